//! The limit of a file's length (`RLIMIT_FSIZE`, `ulimit -f`). The kernel ends a process that writes behind it, with all
//! that it serves, unless the process handles the signal: then only that write fails, and says so.

use tokio::signal::unix::{SignalKind, signal};

use crate::problem::{Result, of_state};

/// From now on a write behind the limit fails (`EFBIG`), and nothing else does. Programs that this one starts are ended
/// all the same. Needs an event loop.
pub(crate) fn outlive_file_limit() -> Result<()> {
    let kind = SignalKind::from_raw(nix::libc::SIGXFSZ);
    // It is handled for as long as the process lives, whether anybody listens or not.
    signal(kind).map(drop).map_err(|error| of_state(error, "handling the signal of a file's limit"))
}
