//! The page cache of storage that other hosts write, too.
//!
//! Every host that has a block device open keeps a page cache of it, and none hears of what the others write. A page that was read before
//! another host let go of the device is old afterwards, and a small write puts all of the old page back.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::Advice;

use crate::calls::retry;
use crate::executor::Executor;

/// Has this host forget what it has read of the file or block device at `path`. Pages that are dirty are written out and kept: they are
/// this host's own.
///
/// # Errors
/// It cannot be opened, or the system refuses.
pub async fn drop_page_cache(path: &Path) -> io::Result<()> {
    let path = path.to_owned();
    // A file system that does not answer blocks one thread of its own, and the caller.
    let dropping = move || {
        let file = File::open(path)?;
        retry(|| Ok(rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?))
    };
    Executor::threads().run(dropping).await
}

#[cfg(test)]
mod tests {
    use std::io::IoSliceMut;

    use rustix::io::ReadWriteFlags;

    use super::*;

    /// Whether the first page of `file` is in the page cache.
    fn is_cached(file: &File) -> bool {
        let mut page = [0; 4096];
        rustix::io::preadv2(file, &mut [IoSliceMut::new(&mut page)], 0, ReadWriteFlags::NOWAIT).is_ok()
    }

    #[tokio::test]
    async fn what_was_read_is_forgotten() {
        // Where the build is there is a disk; a temporary folder may be memory.
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
        let path = folder.path().join("image");
        std::fs::write(&path, vec![7; 1 << 20]).expect("written");
        let file = File::open(&path).expect("opened");
        file.sync_all().expect("written out");
        assert!(is_cached(&file), "it was written just now");
        drop_page_cache(&path).await.expect("dropped");
        assert!(!is_cached(&file), "it is in the page cache yet");
    }
}
