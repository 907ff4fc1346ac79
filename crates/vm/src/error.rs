//! Errors: a stable kind, a context for people, and what QEMU itself said.

use std::fmt;

/// What this crate answers.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, for code to match on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Nothing listens on the monitor's socket: QEMU is dead, or was never there.
    NoMonitor,
    /// The monitor belongs to another client; the context says to whom.
    MonitorBusy,
    /// libvirt itself does not answer, or does not let the command through now. The command was not carried out.
    LibvirtUnreachable,
    /// The other side does not speak QMP, or breaks it.
    Protocol,
    /// The connection to QEMU ended. Whether the command was carried out is to be read from QEMU's graph.
    Disconnected,
    /// QEMU did not answer in time. Whether the command was carried out is to be read from QEMU's graph.
    TimedOut,
    /// QEMU answered with an error; [`Error::qemu`] has its class and words.
    Qemu,
    /// QEMU may not reach our socket or the image; the context says why not and how to fix it.
    Denied,
    /// What was named does not exist in this VM.
    NotFound,
    /// This disk is not adopted; the context says why.
    Refused,
    /// Options of the disk are not known, so a reopen would lose them; the context names them.
    OptionLoss,
    /// Our export is not connected, and the command would block QEMU's main loop until it is.
    ExportDisconnected,
    /// The image's locks could not be taken or dropped.
    Locks,
    /// QEMU's graph is in none of the plan's states.
    UnexpectedGraph,
    /// The configuration hook failed.
    Hook,
    /// QEMU's own migration of the machine failed or was cancelled; the context has QEMU's words.
    Migration,
    /// What was given makes no sense.
    Invalid,
}

/// QEMU's own error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QemuError {
    /// Its class, such as `GenericError` or `DeviceNotFound`.
    pub class: String,
    /// Its words.
    pub description: String,
}

/// An error of this crate.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    context: String,
    qemu: Option<QemuError>,
    is_unsettled: bool,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// An error of `kind`; `context` says in one line what is wrong and, where possible, what to do.
    #[must_use]
    pub fn new(kind: ErrorKind, context: impl Into<String>) -> Self {
        Self { kind, context: context.into(), qemu: None, is_unsettled: false, source: None }
    }

    /// The same with the error that caused it.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    pub(crate) fn refused(context: impl Into<String>) -> Self {
        Self::new(ErrorKind::Refused, context)
    }

    pub(crate) fn of_qemu(command: &str, error: QemuError) -> Self {
        let context = format!("QEMU refused {command}: {}", error.description);
        Self { kind: ErrorKind::Qemu, context, qemu: Some(error), is_unsettled: false, source: None }
    }

    /// What went wrong, for code.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// What QEMU said, if the error is its.
    #[must_use]
    pub fn qemu(&self) -> Option<&QemuError> {
        self.qemu.as_ref()
    }

    /// The same of a plan that it leaves half done.
    pub(crate) fn unsettled(mut self) -> Self {
        self.is_unsettled = true;
        self
    }

    /// Whether a plan that ended with it was neither finished nor undone: QEMU's graph says where the disk stands.
    #[must_use]
    pub fn leaves_doubt(&self) -> bool {
        let is_unheard =
            matches!(self.kind, ErrorKind::Disconnected | ErrorKind::TimedOut | ErrorKind::LibvirtUnreachable);
        self.is_unsettled || is_unheard
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
