//! How two hosts come to trust each other by a short code that a person carries from one to the other.
//!
//! ```text
//!   joining host                                      inviting host (gave out the code)
//!        │ ── TLS 1.3, each shows a certificate that the other does not know yet ── │
//!        │ begin: its half of SPAKE2 over the code ───────────────────────▶ counts a try
//!        │ ◀────────────────────────────────────────────── answer: its half        │
//!        │ confirm: proof, name, addresses, clock ────────────────────────▶ wrong? refused
//!    wrong? ends ◀──────────────────────────── confirm: proof, name, addresses, clock │
//!    stores it │ kept ────────────────────────────────────────────────────▶ stores it
//!        │ ◀──────────────────────────────────────────────────────────────── kept   │
//! ```
//!
//! A proof is a keyed BLAKE3, with a key from the secret of SPAKE2. It covers which side says it, the keying material
//! that TLS exports, both certificates' fingerprints, both halves, and what is said of oneself. An attacker in between
//! has two connections with other keying material and other certificates, so proofs that are passed on are wrong. Each
//! try reveals only whether one guess of the code was right.

use std::io::{Error as OsError, ErrorKind as OsErrorKind};

use api::v1::{Error, ErrorCode, Result};
use env::Moment;
use spake2::{Ed25519Group, Identity, Password, Spake2};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::certificate::Fingerprint;
use crate::invitation::{Code, Invitations, Try};
use crate::message::{About, Message, Refusal, VERSION};

/// What keying material TLS is asked for.
pub const EXPORTER_LABEL: &[u8] = b"EXPORTER-transhume-trust-1";

const KEY_CONTEXT: &str = "transhume-trust/1: proof of the code of a pairing";

/// The connection between two certificates.
#[derive(Clone, Copy)]
pub struct Channel {
    /// Keying material of the TLS connection, exported under [`EXPORTER_LABEL`].
    pub exported: [u8; 32],
    /// Who has dialled,
    pub joining: Fingerprint,
    /// and who has given out the code.
    pub inviting: Fingerprint,
}

/// Why a pairing has not come about.
#[derive(Debug)]
pub enum Failure {
    /// The other side has said so.
    Refused(Refusal),
    /// This side has found a reason, and told the other one.
    Here(Refusal),
    /// This side cannot store it, or may not: told here only.
    NotKept(Error),
    /// The connection broke, or what came makes no sense.
    Broken(OsError),
}

impl From<OsError> for Failure {
    fn from(error: OsError) -> Self {
        Self::Broken(error)
    }
}

impl Failure {
    /// The error as a person reads it; `whom` is the other side.
    pub fn error(self, whom: &str) -> Error {
        match self {
            Self::Refused(refusal) => refusal.error(whom),
            Self::NotKept(error) => error,
            Self::Here(_) => Error::new(
                ErrorCode::HostRefused,
                format!("what {whom} says is not proved by the code: somebody may be between the two hosts"),
            )
            .with_hint("compare the fingerprints that `transhume host` shows on both, and try again with a new code"),
            Self::Broken(error) => Error::new(
                ErrorCode::HostUnreachable,
                format!("the connection to {whom} broke while the hosts were paired: {error}"),
            )
            .with_hint(format!(
                "try again; if `transhume trust --list` on {whom} shows this host but here it does not, pair them anew"
            )),
        }
    }
}

/// The half of one side.
struct Exchange {
    state: Spake2<Ed25519Group>,
    share: String,
}

impl Exchange {
    fn joining(code: &Code) -> Self {
        let (joining, inviting) = sides();
        Self::from(Spake2::start_a(&Password::new(code.bytes()), &joining, &inviting))
    }

    fn inviting(code: &Code) -> Self {
        let (joining, inviting) = sides();
        Self::from(Spake2::start_b(&Password::new(code.bytes()), &joining, &inviting))
    }

    fn from((state, share): (Spake2<Ed25519Group>, Vec<u8>)) -> Self {
        Self { state, share: hexadecimal(&share) }
    }

    /// The key of both proofs, if `share` can be the other half.
    fn key(self, share: &str) -> Option<[u8; 32]> {
        let secret = self.state.finish(&bytes(share)?).ok()?;
        Some(blake3::derive_key(KEY_CONTEXT, &secret))
    }
}

fn sides() -> (Identity, Identity) {
    (Identity::new(b"transhume joining host"), Identity::new(b"transhume inviting host"))
}

/// What both sides know when they prove.
struct Transcript<'a> {
    key: [u8; 32],
    channel: Channel,
    joining_share: &'a str,
    inviting_share: &'a str,
}

impl Transcript<'_> {
    fn proof(&self, side: &str, about: &str) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        let parts: [&[u8]; 7] = [
            side.as_bytes(),
            &self.channel.exported,
            self.channel.joining.bytes(),
            self.channel.inviting.bytes(),
            self.joining_share.as_bytes(),
            self.inviting_share.as_bytes(),
            about.as_bytes(),
        ];
        for part in parts {
            hasher.update(&(part.len() as u64).to_be_bytes());
            hasher.update(part);
        }
        hasher.finalize()
    }

    /// What the other side says of itself, if it has proved it. (Comparing takes as long whatever differs.)
    fn check(&self, side: &str, proof: &str, about: &str) -> Option<About> {
        let said = blake3::Hash::from_hex(proof).ok()?;
        if said != self.proof(side, about) {
            return None;
        }
        serde_json::from_str(about).ok()
    }
}

const JOINING: &str = "joining";
const INVITING: &str = "inviting";

/// Joins the host at the other end. `keep` stores it, before the other one stores this one.
pub async fn join(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    (channel, code): (Channel, &Code),
    about: &About,
    keep: impl FnOnce(&About) -> Result<()>,
) -> Result<About, Failure> {
    let exchange = Exchange::joining(code);
    let share = exchange.share.clone();
    Message::Begin { version: VERSION, share: share.clone() }.send(stream).await?;
    let Message::Answer { share: answer } = next(stream).await? else { return Err(senseless()) };
    let Some(key) = exchange.key(&answer) else { return refuse(stream, Refusal::Malformed).await };
    let transcript = Transcript { key, channel, joining_share: &share, inviting_share: &answer };

    let own = serde_json::to_string(about).expect("plain data serialises");
    let proof = transcript.proof(JOINING, &own).to_hex().to_string();
    Message::Confirm { proof, about: own }.send(stream).await?;
    let Message::Confirm { proof, about: theirs } = next(stream).await? else { return Err(senseless()) };
    let Some(theirs) = transcript.check(INVITING, &proof, &theirs) else {
        return refuse(stream, Refusal::Malformed).await;
    };
    if let Err(error) = keep(&theirs) {
        // It stores nothing then; that it could not be told makes no difference to it.
        let _ = Message::Refused { why: Refusal::NotKept }.send(stream).await;
        return Err(Failure::NotKept(error));
    }
    Message::Kept.send(stream).await?;
    match next(stream).await? {
        Message::Kept => Ok(theirs),
        _ => Err(senseless()),
    }
}

/// What the inviting side does with a host that joins.
pub trait Invite {
    /// Whether a host that says this of itself may be trusted.
    fn check(&self, about: &About, taken: &Try) -> Result<(), Refusal>;
    /// Stores it.
    fn keep(&self, about: &About, taken: &Try) -> Result<(), Refusal>;
}

/// Lets the host at the other end join, if it knows the code. Gives what that says of itself.
pub async fn invite(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    (channel, invitations, now): (Channel, &Invitations, Moment),
    about: &About,
    side: &(impl Invite + Sync),
) -> Result<About, Failure> {
    let (version, share) = match next(stream).await? {
        Message::Begin { version, share } => (version, share),
        _ => return Err(senseless()),
    };
    if version != VERSION {
        return refuse(stream, Refusal::Version { spoken: VERSION }).await;
    }
    let taken = match invitations.take_try(now) {
        Ok(taken) => taken,
        Err(refusal) => return refuse(stream, refusal).await,
    };
    let exchange = Exchange::inviting(&taken.code);
    let answer = exchange.share.clone();
    let Some(key) = exchange.key(&share) else { return refuse(stream, Refusal::Malformed).await };
    let transcript = Transcript { key, channel, joining_share: &share, inviting_share: &answer };
    Message::Answer { share: answer.clone() }.send(stream).await?;

    let Message::Confirm { proof, about: theirs } = next(stream).await? else { return Err(senseless()) };
    let Some(theirs) = transcript.check(JOINING, &proof, &theirs) else {
        return refuse(stream, Refusal::CodeWrong { tries_left: taken.tries_left }).await;
    };
    if let Err(refusal) = side.check(&theirs, &taken) {
        return refuse(stream, refusal).await;
    }
    let own = serde_json::to_string(about).expect("plain data serialises");
    let proof = transcript.proof(INVITING, &own).to_hex().to_string();
    Message::Confirm { proof, about: own }.send(stream).await?;
    let Message::Kept = next(stream).await? else { return Err(senseless()) };
    if let Err(refusal) = invitations.close(&taken).and_then(|()| side.keep(&theirs, &taken)) {
        return refuse(stream, refusal).await;
    }
    Message::Kept.send(stream).await?;
    Ok(theirs)
}

async fn next(stream: &mut (impl AsyncRead + Unpin)) -> Result<Message, Failure> {
    match Message::receive(stream).await? {
        Message::Refused { why } => Err(Failure::Refused(why)),
        message => Ok(message),
    }
}

async fn refuse<T>(stream: &mut (impl AsyncWrite + Unpin), why: Refusal) -> Result<T, Failure> {
    Message::Refused { why }.send(stream).await?;
    Err(Failure::Here(why))
}

fn senseless() -> Failure {
    Failure::Broken(OsError::new(OsErrorKind::InvalidData, "the other side says something else than it should"))
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(text: &str) -> Option<Vec<u8>> {
    if !text.len().is_multiple_of(2) || !text.is_ascii() {
        return None;
    }
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).ok()).collect()
}

#[cfg(test)]
mod unit {
    use super::*;

    struct Book;

    impl Invite for Book {
        fn check(&self, about: &About, _: &Try) -> Result<(), Refusal> {
            if about.name == "taken" { Err(Refusal::OtherFingerprint) } else { Ok(()) }
        }

        fn keep(&self, _: &About, _: &Try) -> Result<(), Refusal> {
            Ok(())
        }
    }

    fn about(name: &str) -> About {
        About { name: name.to_owned(), addresses: Vec::new(), port: 7, unix_seconds: 7 }
    }

    fn channel() -> Channel {
        Channel { exported: [7; 32], joining: Fingerprint::of(b"joining"), inviting: Fingerprint::of(b"inviting") }
    }

    /// Pairs over a pipe: what the joining and the inviting side make of it.
    async fn pair(
        name: &str,
        (theirs, ours): (Channel, Channel),
        change_code: bool,
        keep: impl FnOnce(&About) -> Result<()>,
    ) -> (Result<About, Failure>, Result<About, Failure>) {
        let env = env::testing::PausedEnv::shared(7);
        let invitations = Invitations::default();
        let mut code = invitations.open(None, &*env);
        if change_code {
            let other = if code.shown().starts_with('2') { "3" } else { "2" };
            code = Code::typed(&format!("{other}{}", &code.shown()[1..]));
        }
        let (mut here, mut there) = tokio::io::duplex(64);
        let invited = async {
            let outcome = invite(&mut there, (ours, &invitations, env.now()), &about("inviting"), &Book).await;
            drop(there);
            outcome
        };
        let joined = async {
            let outcome = join(&mut here, (theirs, &code), &about(name), keep).await;
            drop(here);
            outcome
        };
        tokio::join!(joined, invited)
    }

    #[tokio::test(start_paused = true)]
    async fn who_knows_the_code_is_known_by_both() {
        let (joined, invited) = pair("joining", (channel(), channel()), false, |_| Ok(())).await;
        assert_eq!(joined.expect("joined").name, "inviting");
        assert_eq!(invited.expect("invited").name, "joining");
    }

    #[tokio::test(start_paused = true)]
    async fn a_wrong_code_another_certificate_or_another_connection_prove_nothing() {
        let other_certificate = Channel { joining: Fingerprint::of(b"in between"), ..channel() };
        let other_connection = Channel { exported: [8; 32], ..channel() };
        for (ours, change_code) in [(channel(), true), (other_certificate, false), (other_connection, false)] {
            let kept = |_: &About| panic!("it was stored");
            let (joined, invited) = pair("joining", (channel(), ours), change_code, kept).await;
            assert!(matches!(joined, Err(Failure::Refused(Refusal::CodeWrong { tries_left: 2 }))), "{joined:?}");
            assert!(matches!(invited, Err(Failure::Here(Refusal::CodeWrong { .. }))), "{invited:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn neither_side_keeps_what_the_other_cannot() {
        let (joined, invited) = pair("taken", (channel(), channel()), false, |_| panic!("it was stored")).await;
        assert!(matches!(joined, Err(Failure::Refused(Refusal::OtherFingerprint))), "{joined:?}");
        assert!(matches!(invited, Err(Failure::Here(Refusal::OtherFingerprint))), "{invited:?}");

        let full = |_: &About| Err(Error::new(ErrorCode::NoSpace, "full"));
        let (joined, invited) = pair("joining", (channel(), channel()), false, full).await;
        assert!(matches!(joined, Err(Failure::NotKept(_))), "{joined:?}");
        assert!(matches!(invited, Err(Failure::Refused(Refusal::NotKept))), "{invited:?}");
    }

    #[test]
    fn halves_that_are_none_are_refused() {
        let code = Code::typed("2345-6789");
        for share in ["", "4", "zz", "42", &"42".repeat(33), &"é".repeat(33)] {
            assert!(Exchange::joining(&code).key(share).is_none(), "{share} was taken for a half");
        }
    }
}
