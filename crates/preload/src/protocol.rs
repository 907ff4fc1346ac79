//! What is said over the socket. Each question has one answer.
//!
//! A message is its length (u32, little-endian, at most [`MESSAGE_BYTES_MAX`]) and text.
//!
//! | question | answer |
//! |---|---|
//! | `hello 1` | `ok PID` |
//! | `register PATH`, PATH as `/proc/PID/maps` has it; a descriptor of `/dev/userfaultfd` may come along | `ok START-END+OFFSET ...`, in hexadecimal |
//! | `release` | `ok` |
//! | anything | `error KIND ERRNO` |
//!
//! What was registered is released when the connection ends.

use std::fmt::Write as _;

/// The longest message, in bytes.
pub const MESSAGE_BYTES_MAX: u32 = 256 << 10;
/// The version of what is said.
pub const VERSION: &[u8] = b"1";

/// One mapping of a file in the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Its first address.
    pub start: u64,
    /// The address behind it.
    pub end: u64,
    /// Where in the file it begins.
    pub offset: u64,
}

/// What is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Question {
    /// Who is there.
    Hello,
    /// The mappings of the file of this name are to be tracked.
    Register(Vec<u8>),
    /// Nothing is to be tracked any more.
    Release,
}

/// Why it is not done. The names are stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// The question is not understood.
    Malformed,
    /// The kernel has no asynchronous write protection of shared memory (before Linux 6.7).
    Unsupported,
    /// The process may not make a userfaultfd. Pass `/dev/userfaultfd`.
    Denied,
    /// The file is not mapped here to be written.
    NotMapped,
    /// Writes to the mapping do not reach the file.
    Private,
    /// Too many mappings.
    TooMany,
    /// The mapping is tracked by something else.
    Busy,
    /// The system says otherwise.
    System,
}

/// A refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Why.
    pub kind: FailureKind,
    /// The system's number for it; 0 if the system has said nothing.
    pub errno: i32,
}

impl FailureKind {
    const fn name(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::Unsupported => "unsupported",
            Self::Denied => "denied",
            Self::NotMapped => "not-mapped",
            Self::Private => "private",
            Self::TooMany => "too-many",
            Self::Busy => "busy",
            Self::System => "system",
        }
    }
}

impl Failure {
    pub(crate) const fn new(kind: FailureKind, errno: i32) -> Self {
        Self { kind, errno }
    }

    /// The answer that says it.
    #[must_use]
    pub fn answer(self) -> String {
        format!("error {} {}", self.kind.name(), self.errno)
    }
}

impl Question {
    /// Understands a message.
    ///
    /// # Errors
    /// `Malformed`.
    pub fn parse(message: &[u8]) -> Result<Self, Failure> {
        let malformed = Failure::new(FailureKind::Malformed, 0);
        let space = message.iter().position(|byte| *byte == b' ').unwrap_or(message.len());
        let (verb, rest) = message.split_at(space);
        let rest = rest.strip_prefix(b" ").unwrap_or_default();
        match verb {
            b"hello" if rest == VERSION => Ok(Self::Hello),
            b"register" if !rest.is_empty() => Ok(Self::Register(rest.to_vec())),
            b"release" if rest.is_empty() => Ok(Self::Release),
            _ => Err(malformed),
        }
    }
}

/// The answer to a `register` that was done.
#[must_use]
pub fn registered(mappings: &[Mapping]) -> String {
    let mut text = "ok".to_owned();
    for Mapping { start, end, offset } in mappings {
        // Writing to a string does not fail.
        let _ = write!(text, " {start:x}-{end:x}+{offset:x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_are_understood_and_nothing_else_is() {
        assert_eq!(Question::parse(b"hello 1"), Ok(Question::Hello));
        assert_eq!(Question::parse(b"register /a b"), Ok(Question::Register(b"/a b".to_vec())));
        assert_eq!(Question::parse(b"release"), Ok(Question::Release));
        for bad in [&b""[..], b" ", b"hello", b"hello 2", b"register", b"register ", b"release 1", b"\xff\x00"] {
            assert_eq!(Question::parse(bad).map_err(|failure| failure.kind), Err(FailureKind::Malformed));
        }
    }

    #[test]
    fn answers_have_their_text() {
        assert_eq!(registered(&[Mapping { start: 0x1000, end: 0x2000, offset: 0 }]), "ok 1000-2000+0");
        assert_eq!(Failure::new(FailureKind::NotMapped, 2).answer(), "error not-mapped 2");
    }
}
