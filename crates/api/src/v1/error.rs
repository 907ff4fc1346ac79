//! Errors: a stable code, one line that says what is wrong, one that says what to do, and the exit code.

use serde::{Deserialize, Serialize};

/// What an operation of the API gives.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Declares the codes, their names on the wire and the exit codes of the programs, once.
macro_rules! codes {
    ($($(#[doc = $doc:literal])+ $code:ident = $name:literal, $exit:literal;)+) => {
        /// What went wrong, for programs to match on.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum ErrorCode {
            $($(#[doc = $doc])+ #[serde(rename = $name)] $code,)+
            /// A code of a later daemon that this program does not know.
            #[serde(other, rename = "unknown")]
            Unknown,
        }

        impl ErrorCode {
            /// Every code that there is.
            pub const ALL: &[Self] = &[$(Self::$code),+];

            /// The stable name.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$code => $name,)+ Self::Unknown => "unknown" }
            }

            /// What the programs exit with.
            #[must_use]
            pub const fn exit_code(self) -> u8 {
                match self { $(Self::$code => $exit,)+ Self::Unknown => 1 }
            }
        }
    };
}

codes! {
    /// A defect of ours, or a failure that has no code of its own.
    Internal = "internal", 1;
    /// What was asked for makes no sense.
    Invalid = "invalid", 2;
    /// Nobody answers on the daemon's socket.
    DaemonUnreachable = "daemon-unreachable", 3;
    /// The daemon speaks no version of the API that this program speaks.
    VersionMismatch = "version-mismatch", 4;
    /// The volume or job does not exist.
    NotFound = "not-found", 5;
    /// A volume of this name, or one on this backend or export, is already there.
    AlreadyExists = "already-exists", 6;
    /// The volume is being moved already, or something else of it is under way.
    Busy = "busy", 7;
    /// A client is connected to the export.
    InUse = "in-use", 8;
    /// The volume is not in a state in which this can be done.
    WrongState = "wrong-state", 9;
    /// The target exists and is not empty.
    TargetExists = "target-exists", 10;
    /// The target is smaller than the volume.
    TargetTooSmall = "target-too-small", 11;
    /// The target is the file that holds the volume.
    TargetSame = "target-same", 12;
    /// The backend, or where the target should be, cannot be written.
    ReadOnly = "read-only", 13;
    /// The target has no space left.
    NoSpace = "no-space", 14;
    /// The backend is locked by another process.
    BackendLocked = "backend-locked", 15;
    /// The file or directory named is not there.
    BackendMissing = "backend-missing", 16;
    /// Ownership, AppArmor or SELinux are in the way.
    PermissionDenied = "permission-denied", 17;
    /// The backend cannot be used as it is: empty, of another kind, misaligned.
    BackendUnusable = "backend-unusable", 18;
    /// Reading or writing failed.
    Io = "io", 19;
    /// The export's socket or port is taken.
    SocketTaken = "socket-taken", 20;
    /// Nobody answers on the QMP socket: QEMU is dead.
    QmpUnreachable = "qmp-unreachable", 21;
    /// Another client owns the QMP monitor.
    QmpBusy = "qmp-busy", 22;
    /// The disk cannot be adopted.
    NotAdoptable = "not-adoptable", 23;
    /// Options of the disk would be lost.
    OptionLoss = "option-loss", 24;
    /// Nobody would tell the VM's configuration of the new place.
    PersistMissing = "persist-missing", 25;
    /// The hook that tells the VM's configuration of the new place failed.
    PersistFailed = "persist-failed", 26;
    /// QEMU refused a command.
    QmpRefused = "qmp-refused", 27;
    /// A whole VM cannot be moved, or not to that host.
    VmRefused = "vm-refused", 28;
    /// The QEMU of a VM ended at the other host after the commit, before its guest ran there; the disks are there.
    VmLost = "vm-lost", 29;
    /// The configuration file is wrong.
    ConfigInvalid = "config-invalid", 30;
    /// Another daemon uses the state directory.
    StateLocked = "state-locked", 31;
    /// A volume's journal cannot be read.
    JournalUnreadable = "journal-unreadable", 32;
    /// The daemon has too few file descriptors left.
    DescriptorsShort = "descriptors-short", 33;
    /// The move failed; the guest is on the source.
    MoveFailed = "move-failed", 40;
    /// The move was cancelled; the guest is on the source.
    MoveCancelled = "move-cancelled", 41;
    /// Source and target were compared and were not equal.
    NotEqual = "not-equal", 42;
    /// The move was carried out, but something after the switchover was not.
    MoveUnfinished = "move-unfinished", 43;
    /// The move does not converge under what the guest writes, and was to end then; the guest is on the source.
    NoConvergence = "no-convergence", 44;
    /// No host of that name is trusted.
    HostUnknown = "host-unknown", 50;
    /// Another host cannot be reached, or the connection to it broke.
    HostUnreachable = "host-unreachable", 51;
    /// Another host does not want to: it does not trust this one, or is configured otherwise.
    HostRefused = "host-refused", 52;
    /// Who answers, or joins, is not the host of that name that is trusted.
    HostIdentity = "host-identity", 53;
    /// A certificate cannot be read, has expired, is not good yet or is revoked, or a clock is wrong.
    CertificateInvalid = "certificate-invalid", 54;
    /// The code that pairs two hosts is wrong, too old, used up, or none was given out.
    CodeWrong = "code-wrong", 55;
    /// The arbiter cannot be asked.
    ArbiterUnreachable = "arbiter-unreachable", 56;
}

/// An error as it is answered, stored and shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Error {
    /// What went wrong, for programs.
    pub code: ErrorCode,
    /// What is wrong, in one line.
    pub message: String,
    /// What to do about it, in one line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// What the programs exit with.
    pub exit_code: u8,
}

impl Error {
    /// Something that the caller named makes no sense; `hint` says what to do about it.
    pub fn invalid(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(ErrorCode::Invalid, message).with_hint(hint)
    }

    /// An error of the operating system about a file of the daemon's own; `doing` says what was tried.
    pub fn of_file(error: std::io::Error, doing: impl std::fmt::Display) -> Self {
        let code = match error.kind() {
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => ErrorCode::NoSpace,
            std::io::ErrorKind::PermissionDenied => ErrorCode::PermissionDenied,
            std::io::ErrorKind::ReadOnlyFilesystem => ErrorCode::ReadOnly,
            _ => ErrorCode::Io,
        };
        Self::new(code, format!("{doing}: {error}")).with_hint("see to the state directory's file system")
    }

    /// An error of `code` that says `message`.
    #[must_use]
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        let message = one_line(&message.into());
        Self { code, message, hint: None, exit_code: code.exit_code() }
    }

    /// This error, with what to do about it.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(one_line(&hint.into()));
        self
    }
}

fn one_line(text: &str) -> String {
    text.split(['\n', '\r']).map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ")
}

impl std::fmt::Display for Error {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.message)?;
        match &self.hint {
            Some(hint) => write!(out, " - {hint}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_code_has_its_own_name_and_its_own_exit_code() {
        let names: HashSet<_> = ErrorCode::ALL.iter().map(|code| code.name()).collect();
        let exits: HashSet<_> = ErrorCode::ALL.iter().map(|code| code.exit_code()).collect();
        assert_eq!(names.len(), ErrorCode::ALL.len());
        assert_eq!(exits.len(), ErrorCode::ALL.len());
        assert!(!exits.contains(&0));
        for code in ErrorCode::ALL {
            assert_eq!(serde_json::to_value(code).expect("a string"), code.name());
        }
    }

    #[test]
    fn a_code_of_a_later_daemon_is_read_as_unknown_and_messages_are_one_line() {
        let text = r#"{"code":"sun-spots","message":"a","exit_code":77,"more":1}"#;
        let error: Error = serde_json::from_str(text).expect("readable");
        assert_eq!((error.code, error.exit_code), (ErrorCode::Unknown, 77));
        assert_eq!(Error::new(ErrorCode::Io, "a\n\n b\n").message, "a; b");
    }
}
