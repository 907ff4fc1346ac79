//! Whether there is room for what a move, or several together, may take.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use api::v1::{Error, ErrorCode};
use block::Bytes;

use crate::platform::FreeSpace;
use crate::problem::Result;

/// What is needed in each file system.
#[derive(Default)]
pub(crate) struct Needs(BTreeMap<u64, Need>);

struct Need {
    /// Beside what.
    image: PathBuf,
    free: Bytes,
    needed: Bytes,
}

impl Needs {
    /// `bytes` more are needed beside `image`.
    pub(crate) fn add(&mut self, image: &Path, free: FreeSpace, bytes: Bytes) {
        let need = Need { image: image.to_owned(), free: free.free, needed: Bytes::ZERO };
        self.0.entry(free.file_system).or_insert(need).needed += bytes;
    }

    /// Refuses what needs more than is free.
    pub(crate) fn check(&self) -> Result<()> {
        for Need { image, free, needed } in self.0.values() {
            if free < needed {
                let message = format!("{needed} may be needed beside {}, and {free} are free", image.display());
                return Err(Error::new(ErrorCode::NoSpace, message).with_hint("make room, or choose another place"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_several_need_in_one_file_system_is_added_up() {
        let free = |file_system| FreeSpace { file_system, free: Bytes(100) };
        let mut needs = Needs::default();
        needs.add(Path::new("/one/a"), free(1), Bytes(60));
        needs.add(Path::new("/two/b"), free(2), Bytes(60));
        assert!(needs.check().is_ok());
        needs.add(Path::new("/one/c"), free(1), Bytes(60));
        let error = needs.check().expect_err("120 of 100");
        assert!(error.message.contains("/one/a"), "{error}");
    }
}
