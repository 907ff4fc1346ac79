//! What is looked at in a certificate: its fingerprint, and from when until when it is good. Its names mean nothing.

use std::fmt;

use api::v1::{Error, ErrorCode, Result};
use env::date;
use sha2::{Digest, Sha256};

/// The SHA-256 of a certificate: who a host is. Written as `openssl x509 -fingerprint -sha256` writes it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// Of a certificate in DER.
    pub fn of(certificate: &[u8]) -> Self {
        Self(Sha256::digest(certificate).into())
    }

    /// Reads it, with colons or without.
    pub fn parse(text: &str) -> Option<Self> {
        let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b':').collect();
        let digits = std::str::from_utf8(&digits).ok().filter(|digits| digits.len() == 64 && digits.is_ascii())?;
        let mut bytes = [0; 32];
        for (index, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&digits[2 * index..2 * index + 2], 16).ok()?;
        }
        Some(Self(bytes))
    }

    /// The digest itself.
    pub const fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            write!(out, "{}{byte:02X}", if index == 0 { "" } else { ":" })?;
        }
        Ok(())
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, out)
    }
}

/// From when until when a certificate is good, in seconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// From this second since 1970 on,
    pub from: u64,
    /// up to this one.
    pub until: u64,
}

impl Validity {
    /// Of a certificate in DER.
    pub fn of(certificate: &[u8]) -> Option<Self> {
        let (_, parsed) = x509_parser::parse_x509_certificate(certificate).ok()?;
        let seconds = |time: x509_parser::time::ASN1Time| u64::try_from(time.timestamp()).unwrap_or(0);
        let validity = parsed.validity();
        Some(Self { from: seconds(validity.not_before), until: seconds(validity.not_after) })
    }

    /// Whether it is good at `now`, in seconds since 1970.
    pub const fn at(&self, now: u64) -> ValidityState {
        match now {
            early if early < self.from => ValidityState::NotYet,
            late if late > self.until => ValidityState::Expired,
            _ => ValidityState::Good,
        }
    }
}

/// How a certificate stands to the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValidityState {
    /// It is good now.
    Good,
    /// It will be.
    NotYet,
    /// It was.
    Expired,
}

/// Whether the certificate of `whose` is good at `now`, with what to do if not; `here` says whether it is this host's own.
pub fn check(validity: Validity, now: u64, whose: &str, here: bool) -> Result<()> {
    let at = if here { String::new() } else { format!(" on {whose}") };
    let (message, hint) = match validity.at(now) {
        ValidityState::Good => return Ok(()),
        ValidityState::Expired => (
            format!("the certificate of {whose} has expired on {}", date(validity.until)),
            format!(
                "run `transhume host --renew`{at}, then pair it anew with `transhume trust`; if it should be good \
                 still, set this machine's clock, which says {}",
                date(now)
            ),
        ),
        ValidityState::NotYet => (
            format!("the certificate of {whose} is good from {} on only", date(validity.from)),
            format!("set the clock that is wrong: this machine's says {}", date(now)),
        ),
    };
    Err(Error::new(ErrorCode::CertificateInvalid, message).with_hint(hint))
}

#[cfg(test)]
mod unit {
    use super::*;

    #[test]
    fn a_fingerprint_is_read_as_it_is_written_and_nothing_else_is() {
        let fingerprint = Fingerprint::of(b"a certificate");
        assert_eq!(Fingerprint::parse(&fingerprint.to_string()), Some(fingerprint));
        assert_eq!(Fingerprint::parse(&fingerprint.to_string().replace(':', "").to_lowercase()), Some(fingerprint));
        for text in ["", "AB", &"G".repeat(64), &"A".repeat(63), &"é".repeat(32)] {
            assert_eq!(Fingerprint::parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_certificate_that_is_not_good_says_what_to_do() {
        let validity = Validity { from: 1_000_000_000, until: 2_000_000_000 };
        assert!(check(validity, 1_500_000_000, "b", false).is_ok());
        let expired = check(validity, 2_000_000_001, "b", false).expect_err("it was taken");
        assert_eq!(expired.code, ErrorCode::CertificateInvalid);
        assert!(expired.message.contains("has expired on 2033-05-18"), "{expired}");
        assert!(expired.hint.as_deref().is_some_and(|hint| hint.contains("host --renew` on b")), "{expired}");
        let early = check(validity, 999_999_999, "b", false).expect_err("it was taken");
        assert!(early.message.contains("good from 2001-09-09 on only"), "{early}");
        assert!(early.hint.as_deref().is_some_and(|hint| hint.contains("this machine's says 2001-09-09")), "{early}");
    }
}
