//! Errors: a stable kind, a context for people, and what caused it.

use std::fmt;

/// What this crate answers.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, for code to match on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The kernel cannot track what is written to the memory.
    Unsupported,
    /// This process, or the guest's, may not do that.
    Denied,
    /// Nobody answers in the guest's process.
    NotTracked,
    /// The memory, or one of its files, is not there.
    NotFound,
    /// The system refuses.
    System,
    /// A stream has ended, or failed. What was not confirmed is sent again over new ones.
    Disconnected,
    /// The other side breaks the wire's rules.
    Protocol,
    /// The other side speaks another version, or has other regions.
    Mismatch,
    /// The receiver could not write.
    Target,
    /// The memory was written to after the guest was stopped and its devices were saved.
    DirtyAfterStop,
    /// The guest writes faster than its memory is sent.
    NoConvergence,
    /// What was given makes no sense.
    Invalid,
}

/// An error of this crate.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    context: String,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// An error of `kind`; `context` says in one line what is wrong.
    #[must_use]
    pub fn new(kind: ErrorKind, context: impl Into<String>) -> Self {
        Self { kind, context: context.into(), source: None }
    }

    /// The same with the error that caused it.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    pub(crate) fn system(context: impl Into<String>, source: impl Into<std::io::Error>) -> Self {
        let source = source.into();
        let kind = match source.kind() {
            std::io::ErrorKind::NotFound => ErrorKind::NotFound,
            std::io::ErrorKind::PermissionDenied => ErrorKind::Denied,
            _ => ErrorKind::System,
        };
        Self::new(kind, context).with_source(source)
    }

    pub(crate) fn disconnected(source: std::io::Error) -> Self {
        Self::new(ErrorKind::Disconnected, "a stream of the memory has failed").with_source(source)
    }

    pub(crate) fn protocol(context: impl Into<String>) -> Self {
        Self::new(ErrorKind::Protocol, context)
    }

    /// What went wrong, for code.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.context)?;
        match &self.source {
            Some(source) => write!(out, ": {source}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}
