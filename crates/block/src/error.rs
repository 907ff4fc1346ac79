//! Errors: a stable kind, a context, and the source.

use std::borrow::Cow;
use std::fmt;

/// Too many files are open, in this process and in the whole system: the standard library has no names for that.
const EMFILE: i32 = 24;
const ENFILE: i32 = 23;

/// What a device answers.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, for code to match on. Frontends map it to their protocol's codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The extent does not lie within the volume.
    OutOfRange,
    /// The offset or the length is no multiple of the device's request alignment.
    Misaligned,
    /// The request is larger than the device's largest transfer.
    TooLarge,
    /// The device may not be written.
    ReadOnly,
    /// No space is left where the bytes should go.
    NoSpace,
    /// The medium failed.
    Io,
    /// The device cannot do this at all.
    Unsupported,
    /// Somebody else uses what was asked for.
    Busy,
    /// What was named does not exist.
    NotFound,
    /// The caller may not do this.
    PermissionDenied,
    /// What was given makes no sense.
    Invalid,
    /// A newer epoch owns the volume; this side may not write any more.
    Fenced,
    /// The other side holds the volume and lets nobody of this one in: a person has opened it there.
    KeptOut,
    /// The other side has gone away.
    Disconnected,
    /// The work was cancelled.
    Cancelled,
    /// A limit in time ran out.
    TimedOut,
    /// This process, or the system, has no file descriptors left.
    NoDescriptors,
    /// What is left to do gets no smaller, so the work would never finish.
    NoConvergence,
    /// What was read is not what was written.
    Corrupt,
    /// A layer broke the contract: a defect of ours.
    Internal,
}

impl ErrorKind {
    /// The kind's stable name, as logs and the API show it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::OutOfRange => "out-of-range",
            Self::Misaligned => "misaligned",
            Self::TooLarge => "too-large",
            Self::ReadOnly => "read-only",
            Self::NoSpace => "no-space",
            Self::Io => "io",
            Self::Unsupported => "unsupported",
            Self::Busy => "busy",
            Self::NotFound => "not-found",
            Self::PermissionDenied => "permission-denied",
            Self::Invalid => "invalid",
            Self::Fenced => "fenced",
            Self::KeptOut => "kept-out",
            Self::Disconnected => "disconnected",
            Self::Cancelled => "cancelled",
            Self::TimedOut => "timed-out",
            Self::NoDescriptors => "no-descriptors",
            Self::NoConvergence => "no-convergence",
            Self::Corrupt => "corrupt",
            Self::Internal => "internal",
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

/// An error with its kind, what was being done, and what caused it.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    context: Cow<'static, str>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// An error of `kind`; `context` says in words what was being done and what is wrong.
    pub fn new(kind: ErrorKind, context: impl Into<Cow<'static, str>>) -> Self {
        Self { kind, context: context.into(), source: None }
    }

    /// An error of the operating system, its kind taken from its code.
    pub fn from_os(error: std::io::Error, context: impl Into<Cow<'static, str>>) -> Self {
        use std::io::ErrorKind as Os;
        let kind = match error.kind() {
            _ if matches!(error.raw_os_error(), Some(EMFILE | ENFILE)) => ErrorKind::NoDescriptors,
            Os::StorageFull | Os::QuotaExceeded | Os::FileTooLarge => ErrorKind::NoSpace,
            Os::ReadOnlyFilesystem => ErrorKind::ReadOnly,
            Os::NotFound => ErrorKind::NotFound,
            Os::PermissionDenied => ErrorKind::PermissionDenied,
            Os::Unsupported => ErrorKind::Unsupported,
            Os::ResourceBusy | Os::WouldBlock | Os::AddrInUse => ErrorKind::Busy,
            Os::InvalidInput => ErrorKind::Invalid,
            Os::TimedOut => ErrorKind::TimedOut,
            Os::ConnectionReset | Os::ConnectionAborted | Os::BrokenPipe | Os::UnexpectedEof | Os::NotConnected => {
                ErrorKind::Disconnected
            }
            _ => ErrorKind::Io,
        };
        Self::new(kind, context).with_source(error)
    }

    /// This error, with what caused it.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// This error as the cause of one that says more; the kind stays.
    #[must_use]
    pub fn wrap(self, context: impl Into<Cow<'static, str>>) -> Self {
        Self { kind: self.kind, context: context.into(), source: Some(Box::new(self)) }
    }

    /// What went wrong, to match on.
    #[must_use]
    pub const fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// What was being done, without the causes.
    #[must_use]
    pub fn context(&self) -> &str {
        &self.context
    }

    /// The whole story in one line: the context, then every cause.
    #[must_use]
    pub fn chain(&self) -> String {
        let mut line = self.context.to_string();
        let mut next = std::error::Error::source(self);
        while let Some(cause) = next {
            line.push_str(": ");
            line.push_str(&cause.to_string());
            next = cause.source();
        }
        line
    }
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.context)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_survives_wrapping_and_the_chain_tells_all() {
        let os = std::io::Error::from_raw_os_error(28);
        let error = Error::from_os(os, "writing 4096 bytes at 0").wrap("mirroring to the target");
        assert_eq!(error.kind(), ErrorKind::NoSpace);
        assert!(error.chain().starts_with("mirroring to the target: writing 4096 bytes at 0: "), "{}", error.chain());
    }
}
