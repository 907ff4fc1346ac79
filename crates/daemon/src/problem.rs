//! From the kinds of errors inside to the errors that users see.

use std::path::Path;

use api::v1::{Error, ErrorCode};
use backends::{ImageError, TargetError};
use block::ErrorKind;
use nbd::TlsError;

/// What an operation of the daemon gives.
pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

/// What helps where file descriptors are short.
pub(crate) const DESCRIPTORS_HINT: &str = "raise the daemon's limit of open files (`LimitNOFILE=` of its service, or `ulimit -n`) and restart it, or detach volumes";

/// An error about something that the caller named, with what to do about it.
pub(crate) fn invalid(message: impl Into<String>, hint: impl Into<String>) -> Error {
    Error::invalid(message, hint)
}

/// An error of a backend; `what` says which one, as in "the target".
pub(crate) fn of_backend(error: &block::Error, what: &str) -> Error {
    if let Some(tls) = TlsError::of(error) {
        return Error { message: format!("{what}: {}", error.chain()), ..of_tls(tls) };
    }
    if let Some(record) = RecordError::of(error) {
        return Error::new(ErrorCode::Io, format!("{what}: {}", error.chain())).with_hint(record.hint);
    }
    if let Some(image) = ImageError::of(error) {
        return Error::new(ErrorCode::BackendUnusable, format!("{what}: {}", error.chain())).with_hint(of_image(image));
    }
    let (code, hint) = match error.kind() {
        ErrorKind::NoSpace => (ErrorCode::NoSpace, "free some space there, or choose another target"),
        ErrorKind::ReadOnly => (ErrorCode::ReadOnly, "mount it writable, or choose another place"),
        ErrorKind::Busy => (ErrorCode::BackendLocked, "stop the program that uses it"),
        ErrorKind::NotFound => (ErrorCode::BackendMissing, "check the path"),
        ErrorKind::PermissionDenied => (
            ErrorCode::PermissionDenied,
            "let the daemon's user read and write it; `lsattr` shows whether it or its directory is immutable (`chattr -i`), and \
             `journalctl -k` denials of AppArmor or SELinux",
        ),
        ErrorKind::Misaligned => (
            ErrorCode::BackendUnusable,
            "give the device back its sectors; or detach the volume and attach it anew, with cache=page if its clients use finer sectors",
        ),
        ErrorKind::Unsupported | ErrorKind::TooLarge | ErrorKind::OutOfRange | ErrorKind::Invalid => {
            (ErrorCode::BackendUnusable, "name another file or block device")
        }
        ErrorKind::NoDescriptors => (ErrorCode::DescriptorsShort, DESCRIPTORS_HINT),
        ErrorKind::Internal => (ErrorCode::Internal, "this is a defect: please report it with the daemon's log"),
        ErrorKind::Io | ErrorKind::Corrupt | ErrorKind::TimedOut | ErrorKind::Disconnected => {
            (ErrorCode::Io, "look at the machine's log (`journalctl -k`): the medium or its path has failed")
        }
        _ => (ErrorCode::Internal, "see the daemon's log"),
    };
    Error::new(code, format!("{what}: {}", error.chain())).with_hint(hint)
}

/// It is not a store of a pool that is wrong, but the pool's record in the state directory: the store is as it was left.
#[derive(Debug)]
pub(crate) struct RecordError {
    message: String,
    /// What to do about it.
    hint: &'static str,
}

impl RecordError {
    /// What an error of opening a part of a pool says of the pool's record, if that is what it is about.
    fn of(error: &block::Error) -> Option<&Self> {
        let mut causes = std::iter::successors(std::error::Error::source(error), |cause| cause.source());
        causes.find_map(|cause| cause.downcast_ref())
    }

    /// The record is not there, although a volume names it.
    pub(crate) fn missing(message: String) -> block::Error {
        let hint = "put back its record in the state directory and restart; its store is as it was left";
        Self { message, hint }.about(ErrorKind::NotFound)
    }

    fn about(self, kind: ErrorKind) -> block::Error {
        block::Error::new(kind, "the daemon's own record").with_source(self)
    }
}

impl std::fmt::Display for RecordError {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.message)
    }
}

impl std::error::Error for RecordError {}

/// An error of what a pool puts on record, told from those of its stores.
pub(crate) fn of_record(error: block::Error) -> block::Error {
    match error.kind() {
        // The part is not on record.
        ErrorKind::NotFound => error,
        kind => {
            let hint = "free some space in the state directory, or see to its file system; the store is as it was left";
            RecordError { message: error.chain(), hint }.about(kind)
        }
    }
}

/// Why a layer cannot be opened that holds what the guest has written last; `what` says which one, and `lost` what to do
/// about a store that is not there, or not as it was left.
///
/// Only `lost` may speak of giving up what the layer holds: with any other error that is there.
pub(crate) fn of_holding(error: &block::Error, what: &str, lost: &str) -> Error {
    let Error { message, hint, .. } = of_backend(error, what);
    let is_lost = matches!(error.kind(), ErrorKind::Fenced | ErrorKind::NotFound | ErrorKind::Corrupt);
    let hint = match error.kind() {
        _ if RecordError::of(error).is_some() || TlsError::of(error).is_some() => hint.unwrap_or_default(),
        _ if is_lost => return Error::new(ErrorCode::BackendUnusable, message).with_hint(lost),
        kind => of_store(kind).to_owned(),
    };
    Error::new(ErrorCode::BackendUnusable, message).with_hint(format!("{hint}; it is tried again by itself"))
}

/// What to do about a store that is there, and cannot be opened.
const fn of_store(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::NoSpace => "free some space where its store is",
        ErrorKind::ReadOnly => "let its store be written to",
        ErrorKind::Busy => "stop the program that uses its store",
        ErrorKind::PermissionDenied => {
            "let the daemon's user read and write its store; `lsattr` shows whether it or its directory is immutable (`chattr -i`), and \
             `journalctl -k` denials of AppArmor or SELinux"
        }
        ErrorKind::NoDescriptors => DESCRIPTORS_HINT,
        ErrorKind::Unsupported
        | ErrorKind::Misaligned
        | ErrorKind::TooLarge
        | ErrorKind::OutOfRange
        | ErrorKind::Invalid => "what is in the place of its store is not that store: put it back as it was left",
        _ => "see whether its store answers, and look at the machine's log (`journalctl -k`)",
    }
}

/// Why the journal at `path` of the volume `name` cannot be used.
pub(crate) fn of_journal(name: &str, path: &Path, error: &block::Error) -> Error {
    let message = format!("the journal of {name}, {}, cannot be read: {}", path.display(), error.chain());
    let (code, hint) = match error.kind() {
        ErrorKind::Busy | ErrorKind::TimedOut => (
            ErrorCode::StateLocked,
            "another process still has it, and it is tried again by itself; leave the file as it is",
        ),
        ErrorKind::NoDescriptors => (ErrorCode::DescriptorsShort, DESCRIPTORS_HINT),
        ErrorKind::Unsupported => (
            ErrorCode::JournalUnreadable,
            "start the newer version, which has written it; the volume's bytes are untouched",
        ),
        ErrorKind::PermissionDenied | ErrorKind::ReadOnly => (
            ErrorCode::PermissionDenied,
            "let the daemon's user read and write it, and restart; the volume's bytes are untouched",
        ),
        ErrorKind::Io => (
            ErrorCode::JournalUnreadable,
            "look at the machine's log (`journalctl -k`): the state directory's disk has failed; the volume's bytes are untouched",
        ),
        _ => (ErrorCode::JournalUnreadable, "put back a copy of it and restart; the volume's bytes are untouched"),
    };
    Error::new(code, message).with_hint(hint)
}

/// Whether what failed so may go well later, without anybody's doing.
pub(crate) const fn may_pass(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Busy | ErrorKind::TimedOut | ErrorKind::NoDescriptors)
}

/// What to do about a file or block device that is not what a volume's record names.
const fn of_image(error: &ImageError) -> &'static str {
    match error {
        ImageError::Another => {
            "put back the one that was served, and it is served again; if this is what the guest has used last, as after its file \
             system came back under another number, `transhume volume accept` the volume"
        }
        ImageError::Shorter { .. } => {
            "put back what is missing, and it is served again; if that is meant, `transhume volume detach` the volume and attach \
             it anew"
        }
        ImageError::Moved { .. } => {
            "use the volume where it was moved to; a state directory from a backup is older than that. If the volume's guest has \
             written the tombstone itself, `transhume volume accept` the volume, or attach or adopt it with --accept-tombstone. To use \
             this device for something else, write zeroes over its first 4 KiB"
        }
        ImageError::Layered => {
            "put back a newer state directory, one that knows the layer. If there is none, or the layer is gone again: `setfattr -x \
             user.transhume.layers` on the image has it served without what only the layer has"
        }
        _ => "put back the newest state directory, or attach the volume anew from where it is",
    }
}

/// An error of TLS under NBD, with what to do about it.
pub(crate) fn of_tls(error: &TlsError) -> Error {
    let (code, hint) = match error {
        TlsError::File(..) => (
            ErrorCode::CertificateInvalid,
            "a client needs ca-cert.pem, and client-cert.pem with client-key.pem if the server asks for them; a server needs \
             ca-cert.pem, server-cert.pem and server-key.pem, all in the directory that tls-certificates names",
        ),
        TlsError::NotSpoken(_) => (
            ErrorCode::HostRefused,
            "give the server its certificates (nbdkit --tls=require, qemu-nbd --tls-creds), or write nbd instead of nbds",
        ),
        TlsError::Required => (
            ErrorCode::HostRefused,
            "write nbds:// or nbds+unix://, with ?tls-certificates=DIR for the authority in DIR/ca-cert.pem",
        ),
        TlsError::Authority(_) => (
            ErrorCode::HostIdentity,
            "name the directory of the authority that has signed it with tls-certificates; if that is the one, somebody is in between",
        ),
        TlsError::Name(..) => (
            ErrorCode::HostIdentity,
            "use a name that the certificate is for, with tls-hostname=NAME if the server is not reached by it",
        ),
        TlsError::Expired(..) => (
            ErrorCode::CertificateInvalid,
            "give the server a new one; if it should be good still, set this machine's clock",
        ),
        TlsError::NotYet(..) => (ErrorCode::CertificateInvalid, "set the clock that is wrong"),
        TlsError::Revoked => (ErrorCode::CertificateInvalid, "give the server a new one"),
        TlsError::Refused(false, _) => (
            ErrorCode::HostRefused,
            "put client-cert.pem and client-key.pem, signed by the server's authority, into the directory that tls-certificates names",
        ),
        TlsError::Refused(true, _) => (
            ErrorCode::HostRefused,
            "see that client-cert.pem is signed by the authority that the server names, and has not expired",
        ),
        _ => (ErrorCode::HostRefused, "see what the server says about it, and that it speaks TLS 1.2 or 1.3"),
    };
    Error::new(code, error.to_string()).with_hint(hint)
}

/// An error of the operating system about the daemon's own files.
pub(crate) fn of_state(error: std::io::Error, doing: impl std::fmt::Display) -> Error {
    Error::of_file(error, doing)
}

/// Why a target cannot be used, as users see it. The lines of the backends say what to do themselves.
pub(crate) fn of_target(error: &TargetError) -> Error {
    let code = match error {
        TargetError::SameAsSource { .. } => ErrorCode::TargetSame,
        TargetError::NotEmpty { .. } => ErrorCode::TargetExists,
        TargetError::TooSmall { .. } => ErrorCode::TargetTooSmall,
        TargetError::ReadOnly { .. } => ErrorCode::ReadOnly,
        TargetError::NoSpace { .. } => ErrorCode::NoSpace,
        TargetError::InUse { .. } => ErrorCode::BackendLocked,
        TargetError::Owner { .. } => ErrorCode::PermissionDenied,
        TargetError::NoDirectory { .. } | TargetError::Away { .. } => ErrorCode::BackendMissing,
        TargetError::Os(error) => return of_backend(error, "the target"),
        _ => ErrorCode::BackendUnusable,
    };
    let line = error.to_string();
    match line.rsplit_once(": ") {
        Some((what, hint)) => Error::new(code, what).with_hint(hint),
        None => Error::new(code, line),
    }
}

/// No volume of this name.
pub(crate) fn no_volume(name: &str) -> Error {
    Error::new(ErrorCode::NotFound, format!("there is no volume {name}"))
        .with_hint("`transhume volume ls` shows those that there are")
}

/// Why a migration has failed, as users see it; `is_unequal` says that a comparison found a difference.
pub(crate) fn of_migration(volume: &str, error: &block::Error, is_unequal: bool) -> Error {
    let code = match error.kind() {
        _ if is_unequal => ErrorCode::NotEqual,
        block::ErrorKind::NoSpace => ErrorCode::NoSpace,
        block::ErrorKind::NoConvergence => ErrorCode::NoConvergence,
        _ => ErrorCode::MoveFailed,
    };
    let hint = match code {
        ErrorCode::NoConvergence => {
            "the guest is on the source and goes on; move it with `--strategy mirror`, which converges under any load, or \
             when it writes less"
        }
        _ => "the guest is on the source and goes on; remove the cause and move again",
    };
    Error::new(code, format!("the move of {volume} failed: {}", error.chain())).with_hint(hint)
}

/// An error of the crate `vm`, as users see it.
pub(crate) fn of_vm(error: &vm::Error) -> Error {
    use vm::ErrorKind;
    let (code, hint) = match error.kind() {
        ErrorKind::NoMonitor => {
            (ErrorCode::QmpUnreachable, "name the monitor's socket of a QEMU that runs, or a libvirt domain that does")
        }
        ErrorKind::Disconnected => (ErrorCode::QmpUnreachable, "QEMU has gone; `transhume status` shows what is left"),
        ErrorKind::TimedOut => (ErrorCode::QmpBusy, "QEMU has much to do or hangs; it is asked again"),
        ErrorKind::LibvirtUnreachable => (ErrorCode::QmpBusy, "see whether `virsh list` answers"),
        ErrorKind::MonitorBusy => (ErrorCode::QmpBusy, "let that one disconnect, or give QEMU a second monitor"),
        ErrorKind::Refused | ErrorKind::NotFound => {
            (ErrorCode::NotAdoptable, "`transhume adopt --check` shows every disk of the VM")
        }
        ErrorKind::OptionLoss => (ErrorCode::OptionLoss, "say --accept-option-loss if QEMU's defaults will do"),
        ErrorKind::ExportDisconnected => (ErrorCode::WrongState, "wait until QEMU has connected again"),
        ErrorKind::Locks => (ErrorCode::BackendLocked, "stop the program that uses the image"),
        ErrorKind::Hook => (ErrorCode::PersistFailed, "change the VM's configuration yourself"),
        ErrorKind::Denied => (ErrorCode::PermissionDenied, "the VM is as it was; mend it and do it again"),
        ErrorKind::Invalid => (ErrorCode::Invalid, "`transhume adopt --help` shows an example"),
        _ => (
            ErrorCode::QmpRefused,
            "if it speaks of permissions: QEMU's user (or its AppArmor or SELinux profile) must reach the socket and the image",
        ),
    };
    Error::new(code, error.to_string()).with_hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_store_that_is_lost_has_a_hint_at_giving_up_what_it_holds() {
        let hint = |error: block::Error| of_holding(&error, "the cache c", "give it up").hint.unwrap_or_default();
        for kind in [ErrorKind::Fenced, ErrorKind::NotFound, ErrorKind::Corrupt] {
            assert_eq!(hint(block::Error::new(kind, "why")), "give it up", "{kind}");
        }
        for kind in [
            ErrorKind::NoSpace,
            ErrorKind::ReadOnly,
            ErrorKind::Busy,
            ErrorKind::PermissionDenied,
            ErrorKind::NoDescriptors,
            ErrorKind::Invalid,
            ErrorKind::TimedOut,
            ErrorKind::Disconnected,
            ErrorKind::Io,
        ] {
            let said = hint(block::Error::new(kind, "why"));
            assert!(!said.contains("give it up") && said.ends_with("it is tried again by itself"), "{kind}: {said}");
        }
        for error in [
            of_record(block::Error::new(ErrorKind::Io, "writing c.json: no space left")),
            RecordError::missing("there is no cache c".to_owned()),
        ] {
            let told = of_holding(&error.wrap("opening it"), "the cache c", "give it up");
            assert!(told.hint.is_some_and(|hint| hint.contains("state directory")), "{}", told.message);
        }
        let gone = of_record(block::Error::new(ErrorKind::NotFound, "no part"));
        assert_eq!(hint(gone), "give it up", "the part is not on record");
    }

    #[test]
    fn what_keeps_a_journal_from_being_read_has_a_hint_of_its_own() {
        let hint = |kind| {
            let error = of_journal("x", Path::new("/s/journal"), &block::Error::new(kind, "why"));
            (error.code, error.hint.unwrap_or_default())
        };
        for kind in [ErrorKind::Busy, ErrorKind::NoDescriptors, ErrorKind::Unsupported, ErrorKind::Io] {
            assert!(!hint(kind).1.contains("put back a copy"), "{kind}: a good journal would be overwritten");
        }
        assert!(hint(ErrorKind::Corrupt).1.contains("put back a copy"));
        assert_eq!(hint(ErrorKind::NoDescriptors).0, ErrorCode::DescriptorsShort);
        let short = block::Error::from_os(std::io::Error::from_raw_os_error(24), "opening");
        assert_eq!(
            (of_backend(&short, "the backend").code, may_pass(short.kind())),
            (ErrorCode::DescriptorsShort, true)
        );
    }
}
