//! A file that the helper of its device keeps open, only for its locks: this process has no descriptor of it.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;

use super::message::Verb;
use super::{CLOSE_LIMIT, Helper};
use crate::open_file::Parked;

/// Open until this is dropped, even if the helper is killed meanwhile.
pub(crate) struct KeptFile {
    helper: Arc<Helper>,
    /// What the helper calls it.
    number: u64,
    parked: Parked,
}

impl KeptFile {
    /// Gives `file` to `helper`, and closes it here: that may wait for the file system. Gives it back if that fails.
    pub(super) fn new(helper: Arc<Helper>, file: File) -> Result<Self, File> {
        let given = Parked::new(&[file.as_fd()]).and_then(|parked| Ok((helper.open_parked(&parked)?, parked)));
        match given {
            Ok((number, parked)) => Ok(Self { helper, number, parked }),
            Err(error) => {
                tracing::warn!(%error, "a file stays open here: a server that hangs may keep this process from ending");
                Err(file)
            }
        }
    }
}

impl Drop for KeptFile {
    fn drop(&mut self) {
        self.parked.let_go();
        // Whoever takes the locks next must find them free.
        let _ = self.helper.ask(Verb::Close, self.number, CLOSE_LIMIT);
    }
}

impl std::fmt::Debug for KeptFile {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "KeptFile({})", self.number)
    }
}
