//! TLS under NBD, for both sides: asked for with `NBD_OPT_STARTTLS`, with certificates that an authority has signed,
//! and never given up for an unencrypted connection.
//!
//! The files are those that libnbd, nbdkit and QEMU use, in one directory:
//!
//! | file | who needs it |
//! |---|---|
//! | `ca-cert.pem` | both: the authorities that the other side's certificate may be signed by |
//! | `ca-crl.pem` | nobody; if it is there, certificates on its lists are refused |
//! | `client-cert.pem`, `client-key.pem` | a client whose server wants to know who it is |
//! | `server-cert.pem`, `server-key.pem` | a server |

mod client;
mod files;
mod server;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use block::ErrorKind;
use env::{EnvRef, date, unix_seconds};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::UnixTime;
use rustls::time_provider::TimeProvider;
use rustls::{AlertDescription, CertificateError};

pub(crate) use client::TlsClient;
pub use server::TlsServer;

/// Why a connection is not encrypted as it should be.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum TlsError {
    /// A file of certificates or keys cannot be used, and why.
    File(PathBuf, String),
    /// The server speaks no TLS; what it said to that.
    NotSpoken(String),
    /// The server takes encrypted connections only, and this one is not.
    Required,
    /// The server's certificate is not signed by any authority of this place.
    Authority(PathBuf),
    /// The server's certificate has expired: when, and the time now, in seconds since 1970.
    Expired(u64, u64),
    /// The server's certificate is not valid yet: from when it is, and the time now, in seconds since 1970.
    NotYet(u64, u64),
    /// The server's certificate is for others than the name that is wanted.
    Name(String, Vec<String>),
    /// The server's certificate is on a list of those that are revoked.
    Revoked,
    /// The server broke off when it had seen this client's certificate (or, if false, that it has none), and with what
    /// alert.
    Refused(bool, Option<AlertDescription>),
    /// Anything else.
    Failed(rustls::Error),
}

impl TlsError {
    /// The error of this kind that `error` is about, if it is.
    #[must_use]
    pub fn of(error: &block::Error) -> Option<&Self> {
        let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
        while let Some(cause) = next {
            if let Some(found) = cause.downcast_ref() {
                return Some(found);
            }
            next = cause.source();
        }
        None
    }

    /// As the cause of an error that says what was being done.
    pub(crate) fn while_doing(self, context: impl Into<String>) -> block::Error {
        let kind = match self {
            // Nothing was said: something else, perhaps passing, may have ended the connection.
            Self::Refused(_, None) => ErrorKind::Disconnected,
            _ => ErrorKind::PermissionDenied,
        };
        block::Error::new(kind, context.into()).with_source(self)
    }

    /// What the library says about the other side's certificate, or anything else.
    fn of_library(error: &rustls::Error, authorities: &std::path::Path, shows_own: bool) -> Self {
        use CertificateError as Bad;
        match error {
            rustls::Error::InvalidCertificate(bad) => match bad {
                // A signature that is wrong: an authority of the same name, with another key.
                Bad::UnknownIssuer | Bad::BadSignature => Self::Authority(authorities.to_owned()),
                Bad::ExpiredContext { time, not_after } => Self::Expired(not_after.as_secs(), time.as_secs()),
                Bad::NotValidYetContext { time, not_before } => Self::NotYet(not_before.as_secs(), time.as_secs()),
                Bad::NotValidForNameContext { expected, presented } => {
                    Self::Name(expected.to_str().into_owned(), presented.clone())
                }
                Bad::Revoked => Self::Revoked,
                _ => Self::Failed(error.clone()),
            },
            rustls::Error::AlertReceived(alert) => Self::Refused(shows_own, Some(*alert)),
            _ => Self::Failed(error.clone()),
        }
    }
}

impl fmt::Display for TlsError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path, why) => write!(out, "{}: {why}", path.display()),
            Self::NotSpoken(said) => {
                out.write_str("the NBD server speaks no TLS, and nothing is sent to it unencrypted")?;
                if said.is_empty() { Ok(()) } else { write!(out, ": {said}") }
            }
            Self::Required => {
                out.write_str("the NBD server takes encrypted connections only: write nbds instead of nbd")
            }
            Self::Authority(path) => {
                write!(out, "the NBD server's certificate is not signed by an authority of {}", path.display())
            }
            Self::Expired(until, now) => {
                let (until, now) = (date(*until), date(*now));
                write!(out, "the NBD server's certificate has expired on {until}, and this machine's clock says {now}")
            }
            Self::NotYet(from, now) => {
                let (from, now) = (date(*from), date(*now));
                write!(
                    out,
                    "the NBD server's certificate is good from {from} on only, and this machine's clock says {now}"
                )
            }
            Self::Name(wanted, names) if names.is_empty() => {
                write!(
                    out,
                    "the NBD server's certificate names nobody in its alternative names, and {wanted} is wanted"
                )
            }
            Self::Name(wanted, names) => {
                write!(out, "the NBD server's certificate is for {} and not for {wanted}", names.join(", "))
            }
            Self::Revoked => out.write_str("the NBD server's certificate is revoked"),
            Self::Refused(shows_own, alert) => {
                out.write_str(match (shows_own, alert) {
                    (true, Some(_)) => "the NBD server does not take this client's certificate",
                    (false, Some(_)) => "the NBD server refused this client, which shows no certificate",
                    (true, None) => "the NBD server left when it had seen this client's certificate",
                    (false, None) => "the NBD server left when this client had shown no certificate",
                })?;
                alert.map_or(Ok(()), |alert| write!(out, " ({alert:?})"))
            }
            Self::Failed(error) => write!(out, "TLS failed: {error}"),
        }
    }
}

impl std::error::Error for TlsError {}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

/// The clock of `env` for the library.
struct Clock(EnvRef);

impl fmt::Debug for Clock {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Clock")
    }
}

impl TimeProvider for Clock {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(Duration::from_secs(unix_seconds(self.0.wall_clock()))))
    }
}
