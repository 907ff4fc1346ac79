//! What two daemons say to each other on a new connection before it becomes a stream, and while they are paired.
//!
//! ```text
//!   0        2
//!   +--------+----------------------+
//!   | length | JSON, `length` bytes |     length: u16, big-endian, at most 4096
//!   +--------+----------------------+
//! ```
//!
//! A refusal carries a kind and numbers, never words: what a person reads here is written here.

use std::io::{Error as OsError, ErrorKind as OsErrorKind};

use api::v1::{Error, ErrorCode};
use env::date;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::tls::{ALPN_MACHINE, ALPN_WIRE};

/// The version of this protocol.
pub const VERSION: u32 = 1;

/// The longest message that is read.
const LENGTH_MAX: u16 = 4096;

/// What a connection between two hosts that trust each other is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Purpose {
    /// Requests for a volume.
    #[default]
    Stream,
    /// What the hosts say of a machine that moves, or a part of its memory.
    Machine,
}

impl Purpose {
    /// The protocol by which TLS tells it.
    #[must_use]
    pub const fn protocol(self) -> &'static [u8] {
        match self {
            Self::Stream => ALPN_WIRE,
            Self::Machine => ALPN_MACHINE,
        }
    }

    /// That which `protocol` tells, if it is one of these.
    #[must_use]
    pub fn of_protocol(protocol: &[u8]) -> Option<Self> {
        [Self::Stream, Self::Machine].into_iter().find(|purpose| purpose.protocol() == protocol)
    }

    fn is_stream(&self) -> bool {
        *self == Self::Stream
    }
}

/// One message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "kebab-case")]
pub enum Message {
    /// Without encryption: who dials, and whom it means. Nothing proves it.
    Claim {
        /// What the one that dials calls itself.
        from: String,
        /// What it calls the other.
        to: String,
        /// What the connection is for.
        #[serde(default, skip_serializing_if = "Purpose::is_stream")]
        purpose: Purpose,
    },
    /// The connection is a stream from here on.
    Welcome,
    /// It is not, and ends.
    Refused {
        /// The reason.
        why: Refusal,
    },
    /// Pairing, from the joining host: its half of the exchange, in hexadecimal.
    Begin {
        /// The version of pairing that it speaks.
        version: u32,
        /// Its half.
        share: String,
    },
    /// Pairing, from the inviting host: its half.
    Answer {
        /// Its half.
        share: String,
    },
    /// Pairing: proof of the code for this connection between these two certificates, and what is proved with it.
    Confirm {
        /// The proof, in hexadecimal.
        proof: String,
        /// An [`About`] as JSON, under the proof.
        about: String,
    },
    /// Pairing: the other one is trusted from here on, durably.
    Kept,
}

/// What a host says of itself while it is paired.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// What it calls itself.
    pub name: String,
    /// Where it is reached; none means: where the other one has seen it, at `port`.
    pub addresses: Vec<String>,
    /// The port that goes with an address without one.
    pub port: u16,
    /// Its clock.
    pub unix_seconds: u64,
}

/// Why a host refuses another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Refusal {
    /// It does not trust that certificate.
    NotTrusted,
    /// It takes no streams yet, or no more.
    NotReady,
    /// That certificate was good until then only.
    Expired {
        /// The last second, since 1970.
        until: u64,
        /// Its clock.
        now: u64,
    },
    /// That certificate will be good from then on.
    NotYet {
        /// The first second, since 1970.
        from: u64,
        /// Its clock.
        now: u64,
    },
    /// It does not take connections without encryption.
    Encrypted,
    /// Another host was meant.
    NotMe,
    /// It has too many connections.
    Busy,
    /// It has given out no code.
    NoInvitation,
    /// The code was good for a while that is over.
    CodeExpired,
    /// The code is another one.
    CodeWrong {
        /// How often it may still be tried.
        tries_left: u32,
    },
    /// The code was tried too often.
    TriesUsedUp,
    /// It trusts a host of that name with another certificate.
    OtherFingerprint,
    /// It trusts that certificate under another name.
    OtherName,
    /// It could not store what it should.
    NotKept,
    /// It speaks another version.
    Version {
        /// The one that it speaks.
        spoken: u32,
    },
    /// What it read makes no sense.
    Malformed,
    /// Something that a later version says.
    #[serde(other)]
    Unknown,
}

impl Refusal {
    /// The error as a person reads it; `whom` is who refused.
    pub fn error(self, whom: &str) -> Error {
        let (code, message, hint) = self.of_connection(whom);
        Error::new(code, message).with_hint(hint)
    }

    /// Code, message and hint of what concerns any connection.
    fn of_connection(self, whom: &str) -> (ErrorCode, String, String) {
        match self {
            Self::NotTrusted => (
                ErrorCode::HostRefused,
                format!("{whom} does not trust this host"),
                "pair them: `transhume trust --invite` on one, `transhume trust HOST:PORT CODE` on the other"
                    .to_owned(),
            ),
            Self::NotReady => (
                ErrorCode::HostUnreachable,
                format!("{whom} takes no volumes at the moment"),
                format!("it starts or goes down: try again, and see the log of transhumed on {whom}"),
            ),
            Self::Busy => (
                ErrorCode::HostUnreachable,
                format!("{whom} has as many connections as it takes"),
                "try again later, or use fewer streams".to_owned(),
            ),
            Self::Expired { until, now } => (
                ErrorCode::CertificateInvalid,
                format!("{whom} says that this host's certificate has expired on {}", date(until)),
                format!(
                    "run `transhume host --renew` here and pair them anew; if it should be good still, set the clock of \
                     {whom}, which says {}",
                    date(now)
                ),
            ),
            Self::NotYet { from, now } => (
                ErrorCode::CertificateInvalid,
                format!("{whom} says that this host's certificate is good from {} on only", date(from)),
                format!("set the clock that is wrong: that of {whom} says {}", date(now)),
            ),
            Self::Encrypted => (
                ErrorCode::HostRefused,
                format!("{whom} takes no connections without encryption"),
                format!("remove `plaintext` from this host's configuration, or set it on {whom}, too"),
            ),
            Self::NotMe => (
                ErrorCode::HostIdentity,
                format!("another host answers at the addresses of {whom}"),
                format!("correct them: `transhume trust --change {whom} --address HOST:PORT`"),
            ),
            Self::NoInvitation | Self::CodeExpired | Self::CodeWrong { .. } | Self::TriesUsedUp => {
                let (message, hint) = self.of_code(whom);
                (ErrorCode::CodeWrong, message, hint)
            }
            _ => self.of_pairing(whom),
        }
    }

    /// The same of what concerns names and versions.
    fn of_pairing(self, whom: &str) -> (ErrorCode, String, String) {
        match self {
            Self::OtherFingerprint => (
                ErrorCode::HostIdentity,
                format!("{whom} trusts a host of this host's name already, with another fingerprint"),
                format!(
                    "`transhume trust --remove NAME` on {whom} if that was this one before, or `--invite --name NAME` there"
                ),
            ),
            Self::OtherName => (
                ErrorCode::HostIdentity,
                format!("{whom} trusts this host already, under another name"),
                format!("`transhume trust --list` on {whom} shows it; `--remove` it there to pair them anew"),
            ),
            Self::NotKept => (
                ErrorCode::HostRefused,
                format!("{whom} could not store whom it trusts"),
                format!("see the log of transhumed on {whom}"),
            ),
            Self::Version { spoken } => (
                ErrorCode::VersionMismatch,
                format!("{whom} pairs hosts by version {spoken} of that protocol, this one by {}", VERSION),
                "install the same version of transhumed on both".to_owned(),
            ),
            _ => (
                ErrorCode::HostRefused,
                format!("{whom} has refused, for a reason that this version does not know"),
                "install the same version of transhumed on both".to_owned(),
            ),
        }
    }

    /// Message and hint of what concerns the code.
    fn of_code(self, whom: &str) -> (String, String) {
        match self {
            Self::NoInvitation => (
                format!("{whom} has given out no code, or it was used already"),
                format!("run `transhume trust --invite` on {whom}; a restart of its daemon forgets a code"),
            ),
            Self::CodeExpired => {
                ("the code has expired".to_owned(), format!("run `transhume trust --invite` on {whom} for a new one"))
            }
            Self::CodeWrong { tries_left: 0 } => (
                "the code is wrong, or somebody is between the two hosts; it is good no more".to_owned(),
                format!("run `transhume trust --invite` on {whom} for a new one"),
            ),
            Self::CodeWrong { tries_left } => (
                "the code is wrong, or somebody is between the two hosts".to_owned(),
                format!(
                    "type it again as `transhume trust --invite` on {whom} has printed it; tries left: {tries_left}"
                ),
            ),
            _ => (
                "the code was tried too often and is good no more".to_owned(),
                format!("run `transhume trust --invite` on {whom} for a new one; its log says who has tried"),
            ),
        }
    }
}

impl Message {
    /// Sends it.
    pub async fn send(&self, stream: &mut (impl AsyncWrite + Unpin)) -> std::io::Result<()> {
        let text = serde_json::to_vec(self).expect("plain data serialises");
        let length = u16::try_from(text.len()).ok().filter(|length| *length <= LENGTH_MAX);
        let length = length.ok_or_else(|| OsError::new(OsErrorKind::InvalidInput, "a message is too long"))?;
        let mut frame = length.to_be_bytes().to_vec();
        frame.extend_from_slice(&text);
        stream.write_all(&frame).await?;
        stream.flush().await
    }

    /// Receives one, and not a byte more.
    pub async fn receive(stream: &mut (impl AsyncRead + Unpin)) -> std::io::Result<Self> {
        let length = stream.read_u16().await?;
        if length > LENGTH_MAX {
            return Err(OsError::new(OsErrorKind::InvalidData, "a message is longer than any may be"));
        }
        let mut text = vec![0; usize::from(length)];
        stream.read_exact(&mut text).await?;
        serde_json::from_slice(&text).map_err(|error| OsError::new(OsErrorKind::InvalidData, error))
    }
}

#[cfg(test)]
mod unit {
    use super::*;

    #[tokio::test]
    async fn messages_are_read_as_they_were_sent_and_long_ones_not_at_all() {
        let (mut one, mut other) = tokio::io::duplex(8192);
        for message in [
            Message::Welcome,
            Message::Refused { why: Refusal::CodeWrong { tries_left: 2 } },
            Message::Begin { version: 1, share: "ab".to_owned() },
        ] {
            message.send(&mut one).await.expect("sent");
            assert_eq!(Message::receive(&mut other).await.expect("received"), message);
        }
        one.write_all(&[0x10, 0x01]).await.expect("sent");
        assert_eq!(Message::receive(&mut other).await.expect_err("taken").kind(), OsErrorKind::InvalidData);
        let text = br#"{"say":"refused","why":{"kind":"sun-spots","more":1}}"#;
        one.write_all(&u16::try_from(text.len()).expect("short").to_be_bytes()).await.expect("sent");
        one.write_all(text).await.expect("sent");
        let later = Message::receive(&mut other).await.expect("a refusal of a later version is read");
        assert_eq!(later, Message::Refused { why: Refusal::Unknown });
        let long = Message::Answer { share: "a".repeat(5000) };
        assert!(long.send(&mut one).await.is_err(), "a long message was sent");
    }
}
