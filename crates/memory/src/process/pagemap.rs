//! Which pages of a process were written since the last time, as the kernel has it.
#![allow(unsafe_code, reason = "the ioctl has no safe interface")]

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use crate::error::{Error, ErrorKind, Result};

const PAGEMAP_SCAN: libc::Ioctl = 0xC060_6610_u32 as libc::Ioctl;
/// Protects again what is told.
const WP_MATCHING: u64 = 1 << 0;
/// Refuses what is not protected asynchronously.
const CHECK_WPASYNC: u64 = 1 << 1;
const IS_WRITTEN: u64 = 1 << 1;
/// So many ranges are told with one call.
const RANGES: usize = 1024;

/// `struct page_region`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Found {
    start: u64,
    end: u64,
    categories: u64,
}

/// `struct pm_scan_arg`.
#[repr(C)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// The page map of a process.
pub(super) struct Pagemap {
    file: File,
    /// How large the memory of the process is, in pages: the first number.
    sizes: File,
    found: Vec<Found>,
}

impl Pagemap {
    pub(super) fn open(pid: u32) -> Result<Self> {
        let path = format!("/proc/{pid}/pagemap");
        let file = File::open(&path).map_err(|error| Error::system(format!("opening {path}"), error))?;
        let path = format!("/proc/{pid}/statm");
        let sizes = File::open(&path).map_err(|error| Error::system(format!("opening {path}"), error))?;
        Ok(Self { file, sizes, found: vec![Found::default(); RANGES] })
    }

    /// Fails if the process has no memory any more: a scan of nothing finds nothing.
    pub(super) fn check(&self) -> Result<()> {
        let mut text = [0; 32];
        let count = self.sizes.read_at(&mut text, 0).unwrap_or_default();
        if count == 0 || text.starts_with(b"0 ") {
            return Err(Error::new(ErrorKind::NotFound, "the process has ended"));
        }
        Ok(())
    }

    /// Tells what of `range` was written since it was told last, and protects it again, both in one step for each page.
    pub(super) fn take_written(&mut self, range: Range<u64>, mut tell: impl FnMut(Range<u64>)) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            let mut scan = Scan {
                size: size_of::<Scan>() as u64,
                flags: WP_MATCHING | CHECK_WPASYNC,
                start: at,
                end: range.end,
                walk_end: 0,
                vec: self.found.as_mut_ptr() as u64,
                vec_len: self.found.len() as u64,
                max_pages: 0,
                category_inverted: 0,
                category_mask: IS_WRITTEN,
                category_anyof_mask: 0,
                return_mask: IS_WRITTEN,
            };
            // SAFETY: the argument is the structure that this request reads and writes, of the size that it says, and the array behind
            // it has the length that it says. Both live for the call.
            let count = unsafe { libc::ioctl(self.file.as_raw_fd(), PAGEMAP_SCAN, &raw mut scan) };
            let Ok(count) = usize::try_from(count) else {
                return Err(failed(std::io::Error::last_os_error()));
            };
            self.found.iter().take(count).for_each(|found| tell(found.start..found.end));
            if scan.walk_end <= at {
                return Err(Error::new(ErrorKind::System, "the kernel does not go on with a scan of pages"));
            }
            at = scan.walk_end;
        }
        Ok(())
    }
}

fn failed(error: std::io::Error) -> Error {
    let (kind, context) = match error.raw_os_error() {
        Some(libc::ENOTTY | libc::EINVAL) => (ErrorKind::Unsupported, "this kernel cannot scan for written pages"),
        Some(libc::EPERM) => (ErrorKind::NotTracked, "what is written to the memory is not tracked any more"),
        Some(libc::ESRCH) => (ErrorKind::NotFound, "the process has ended"),
        _ => (ErrorKind::System, "the scan for written pages has failed"),
    };
    Error::new(kind, context).with_source(error)
}
