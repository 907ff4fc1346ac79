//! The target's memory as files on tmpfs or hugetlbfs, which the target's VMM maps.
//!
//! tmpfs is written by `pwrite`, so no mapping of the whole memory takes page tables here. hugetlbfs has no `pwrite`: there a window
//! of one huge page is mapped for each piece.

mod mapping;

use std::fs::File;
use std::io::ErrorKind as OsErrorKind;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{FallocateFlags, fallocate};

use self::mapping::Window;
use crate::error::{Error, ErrorKind, Result};
use crate::guest_memory::TargetMemory;
use crate::region::{PAGE_BYTES, Region};

const HUGETLBFS: i64 = 0x9584_58f6;
const TMPFS: i64 = 0x0102_1994;

/// Files that the target's VMM has as its guest's memory.
pub struct RamFile {
    regions: Vec<Region>,
    files: Vec<File>,
}

impl RamFile {
    /// None yet.
    #[must_use]
    pub const fn new() -> Self {
        Self { regions: Vec::new(), files: Vec::new() }
    }

    /// Makes a file of zeroes at `path`, which is not there yet, for nobody but its owner.
    ///
    /// # Errors
    /// It cannot be made; `Invalid` if it would lie on a file system that is no memory.
    pub fn create(&mut self, region: Region, path: &Path) -> Result<()> {
        let mut options = File::options();
        options.read(true).write(true).create_new(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let shown = path.display();
        let file = options.open(path).map_err(|error| Error::system(format!("making {shown}"), error))?;
        let added = file.set_len(region.bytes).map_err(|error| Error::system(format!("sizing {shown}"), error));
        let added = added.and_then(|()| self.add(region, file, path));
        if added.is_err() {
            // It was made just now.
            let _ = std::fs::remove_file(path);
        }
        added
    }

    /// Takes the file that is at `path`, with what it holds.
    ///
    /// # Errors
    /// It is not there, is not as long as the region, or is no memory.
    pub fn open(&mut self, region: Region, path: &Path) -> Result<()> {
        let shown = path.display();
        let mut options = File::options();
        options.read(true).write(true).custom_flags(libc::O_NOFOLLOW);
        let file = options.open(path).map_err(|error| Error::system(format!("opening {shown}"), error))?;
        let length = file.metadata().map_err(|error| Error::system(format!("reading {shown}"), error))?.len();
        if length != region.bytes {
            let context = format!("{shown} has {length} bytes, and {} has {}", region.name, region.bytes);
            return Err(Error::new(ErrorKind::Mismatch, context));
        }
        self.add(region, file, path)
    }

    fn add(&mut self, region: Region, file: File, path: &Path) -> Result<()> {
        let unit = page_bytes_of(&file)?;
        if unit.is_none_or(|unit| unit != region.page_bytes) {
            let context =
                format!("{} is on no tmpfs, and no hugetlbfs of {} bytes a page", path.display(), region.page_bytes);
            return Err(Error::new(ErrorKind::Invalid, context));
        }
        self.regions.push(region);
        self.files.push(file);
        Ok(())
    }

    fn place(&self, region: usize, page: u64, bytes: u64) -> Result<(&File, &Region, u64)> {
        let at = page.saturating_mul(PAGE_BYTES);
        match (self.files.get(region), self.regions.get(region)) {
            (Some(file), Some(region)) if at.saturating_add(bytes) <= region.bytes => Ok((file, region, at)),
            _ => Err(Error::new(ErrorKind::Invalid, format!("page {page} of region {region} is not there"))),
        }
    }
}

impl Default for RamFile {
    fn default() -> Self {
        Self::new()
    }
}

/// In which unit a file of memory is paged; `None` if it is on another file system.
pub(crate) fn page_bytes_of(file: &File) -> Result<Option<u64>> {
    let about = rustix::fs::fstatfs(file).map_err(|error| Error::system("asking for a file system", error))?;
    Ok(match about.f_type as i64 {
        HUGETLBFS => u64::try_from(about.f_bsize).ok(),
        TMPFS => Some(PAGE_BYTES),
        _ => None,
    })
}

impl TargetMemory for RamFile {
    fn regions(&self) -> &[Region] {
        &self.regions
    }

    fn write(&self, region: usize, page: u64, bytes: &[u8]) -> Result<()> {
        let (file, about, at) = self.place(region, page, bytes.len() as u64)?;
        let failed = |error| Error::system(format!("writing the memory {}", about.name), error);
        if about.page_bytes == PAGE_BYTES {
            return file.write_all_at(bytes, at).map_err(failed);
        }
        for (at, piece) in pieces(at, bytes.len() as u64, about.page_bytes) {
            let window =
                Window::open(file, at / about.page_bytes * about.page_bytes, about.page_bytes).map_err(failed)?;
            window.write(at % about.page_bytes, &bytes[piece]);
        }
        Ok(())
    }

    fn zero(&self, region: usize, page: u64, count: u64) -> Result<()> {
        let bytes = count.saturating_mul(PAGE_BYTES);
        let (file, about, at) = self.place(region, page, bytes)?;
        let failed = |error| Error::system(format!("writing the memory {}", about.name), error);
        let unit = about.page_bytes;
        let (first, last) = (at.div_ceil(unit) * unit, (at + bytes) / unit * unit);
        if first < last {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(file, flags, first, last - first).map_err(|error| failed(error.into()))?;
        }
        // The parts of huge pages at both ends.
        let (head, tail) = if first < last { (at..first, last..at + bytes) } else { (at..at + bytes, 0..0) };
        for part in [head, tail].into_iter().filter(|part| !part.is_empty()) {
            for (at, piece) in pieces(part.start, part.end - part.start, unit) {
                let window = Window::open(file, at / unit * unit, unit).map_err(failed)?;
                window.zero(at % unit, piece.len());
            }
        }
        Ok(())
    }

    fn read(&self, region: usize, page: u64, into: &mut [u8]) -> Result<()> {
        let (file, about, at) = self.place(region, page, into.len() as u64)?;
        read_at(file, at, into).map_err(|error| Error::system(format!("reading the memory {}", about.name), error))
    }
}

/// Reads all of `into`. What is behind the end of a file that has become shorter is missing memory, not zeroes.
pub(crate) fn read_at(file: &File, at: u64, into: &mut [u8]) -> std::io::Result<()> {
    let mut done = 0;
    while done < into.len() {
        match file.read_at(&mut into[done..], at + done as u64) {
            Ok(0) => return Err(OsErrorKind::UnexpectedEof.into()),
            Ok(count) => done += count,
            Err(error) if error.kind() == OsErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The pieces of `bytes` bytes from `at` on, each within one huge page, and where in the bytes they are.
fn pieces(at: u64, bytes: u64, unit: u64) -> impl Iterator<Item = (u64, std::ops::Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let from = at + done;
        let count = (unit - from % unit).min(bytes - done);
        let piece = done as usize..(done + count) as usize;
        done += count;
        (count > 0).then_some((from, piece))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(pages: u64) -> Region {
        Region { name: "ram".to_owned(), bytes: pages * PAGE_BYTES, page_bytes: PAGE_BYTES }
    }

    #[test]
    fn a_file_is_written_read_and_zeroed_and_takes_no_memory_where_it_is_zero() {
        let folder = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let path = folder.path().join("ram");
        let mut memory = RamFile::new();
        memory.create(region(1000), &path).expect("made");
        assert!(memory.create(region(1000), &path).is_err(), "it is there");
        memory.write(0, 998, &[7; 8192]).expect("written");
        memory.write(0, 5, &[8; 4096]).expect("written");
        let mut read = vec![1; 8192];
        memory.read(0, 998, &mut read).expect("read");
        assert_eq!(read, [7; 8192]);
        memory.zero(0, 0, 999).expect("zeroed");
        memory.read(0, 5, &mut read).expect("read");
        assert_eq!(read, [0; 8192]);
        let blocks = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&path).expect("there"));
        assert_eq!(blocks, 8);
        assert!(memory.write(0, 999, &[7; 8192]).is_err(), "behind the end");
        let mut again = RamFile::new();
        again.open(region(1000), &path).expect("opened");
        assert_eq!(again.open(region(999), &path).expect_err("another length").kind(), ErrorKind::Mismatch);
    }

    #[test]
    fn a_disk_is_no_memory() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
        let path = folder.path().join("ram");
        assert_eq!(RamFile::new().create(region(10), &path).expect_err("no tmpfs").kind(), ErrorKind::Invalid);
        assert!(!path.exists());
    }

    #[test]
    fn pieces_end_where_huge_pages_do() {
        let found: Vec<_> = pieces(100, 300, 128).collect();
        assert_eq!(found, [(100, 0..28), (128, 28..156), (256, 156..284), (384, 284..300)]);
        assert_eq!(pieces(128, 0, 128).count(), 0);
    }
}
