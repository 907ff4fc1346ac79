//! From the kinds of errors inside to the errors that users see.

use api::v1::{Error, ErrorCode};
use block::ErrorKind;

/// What an operation of the daemon gives.
pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

/// An error about something that the caller named, with what to do about it.
pub(crate) fn invalid(message: impl Into<String>, hint: impl Into<String>) -> Error {
    Error::new(ErrorCode::Invalid, message).with_hint(hint)
}

/// An error of a backend; `what` says which one, as in "the target".
pub(crate) fn of_backend(error: &block::Error, what: &str) -> Error {
    let (code, hint) = match error.kind() {
        ErrorKind::NoSpace => (ErrorCode::NoSpace, "free some space there, or choose another target"),
        ErrorKind::ReadOnly => (ErrorCode::ReadOnly, "mount it writable, or choose another place"),
        ErrorKind::Busy => (ErrorCode::BackendLocked, "stop the program that uses it"),
        ErrorKind::NotFound => (ErrorCode::BackendMissing, "check the path"),
        ErrorKind::PermissionDenied => (
            ErrorCode::PermissionDenied,
            "let the daemon's user read and write it; look for AppArmor or SELinux denials with `journalctl -k`",
        ),
        ErrorKind::Unsupported
        | ErrorKind::Misaligned
        | ErrorKind::TooLarge
        | ErrorKind::OutOfRange
        | ErrorKind::Invalid => (ErrorCode::BackendUnusable, "name another file or block device"),
        ErrorKind::Internal => (ErrorCode::Internal, "this is a defect: please report it with the daemon's log"),
        ErrorKind::Io | ErrorKind::Corrupt | ErrorKind::TimedOut | ErrorKind::Disconnected => {
            (ErrorCode::Io, "look at the machine's log (`journalctl -k`): the medium or its path has failed")
        }
        _ => (ErrorCode::Internal, "see the daemon's log"),
    };
    Error::new(code, format!("{what}: {}", error.chain())).with_hint(hint)
}

/// An error of the operating system about the daemon's own files.
pub(crate) fn of_state(error: std::io::Error, doing: impl std::fmt::Display) -> Error {
    let code = match error.kind() {
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => ErrorCode::NoSpace,
        std::io::ErrorKind::PermissionDenied => ErrorCode::PermissionDenied,
        std::io::ErrorKind::ReadOnlyFilesystem => ErrorCode::ReadOnly,
        _ => ErrorCode::Io,
    };
    Error::new(code, format!("{doing}: {error}")).with_hint("see to the state directory's file system")
}

/// No volume of this name.
pub(crate) fn no_volume(name: &str) -> Error {
    Error::new(ErrorCode::NotFound, format!("there is no volume {name}"))
        .with_hint("`transhume volume ls` shows those that there are")
}
