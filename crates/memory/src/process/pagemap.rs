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
/// A thread scans at least so much memory: its start costs as much as a scan of a few hundred megabytes.
const BYTES_EACH_MIN: u64 = 4 << 30;
/// Parts end where a page of any size ends, up to 1 GiB.
const CUT: u64 = 1 << 30;
/// So many threads scan at most: each reads page tables as fast as the memory gives them.
const THREADS_MAX: u64 = 8;

/// `struct page_region`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Found {
    pub(super) start: u64,
    pub(super) end: u64,
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
    threads: u64,
}

impl Pagemap {
    pub(super) fn open(pid: u32) -> Result<Self> {
        let path = format!("/proc/{pid}/pagemap");
        let file = File::open(&path).map_err(|error| Error::system(format!("opening {path}"), error))?;
        let path = format!("/proc/{pid}/statm");
        let sizes = File::open(&path).map_err(|error| Error::system(format!("opening {path}"), error))?;
        let threads = std::thread::available_parallelism().map_or(1, |count| count.get() as u64).min(THREADS_MAX);
        Ok(Self { file, sizes, threads })
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

    /// Tells what of `range` was written since it was told last, and protects it again, both in one step for each page. Several threads
    /// scan a large one, as consumers send it (PMigrate, section 3.1); `tell` hears of some ranges at once, in no order.
    pub(super) fn take_written(&self, range: Range<u64>, tell: impl Fn(&[Found]) + Sync) -> Result<()> {
        let parts = parts_of(range, self.threads);
        if let [part] = &parts[..] {
            return self.take_part(part.clone(), &tell);
        }
        let tell = &tell;
        std::thread::scope(|scope| {
            let scans: Vec<_> = parts.into_iter().map(|part| scope.spawn(move || self.take_part(part, tell))).collect();
            let ended = |result: std::thread::Result<Result<()>>| {
                result.unwrap_or_else(|_| Err(Error::new(ErrorKind::System, "a scan of pages has panicked")))
            };
            // All of them: what one has told is protected again, and nobody would hear of it otherwise.
            let ends: Vec<_> = scans.into_iter().map(|scan| ended(scan.join())).collect();
            ends.into_iter().collect()
        })
    }

    fn take_part(&self, range: Range<u64>, tell: &impl Fn(&[Found])) -> Result<()> {
        let mut found = vec![Found::default(); RANGES];
        let mut at = range.start;
        while at < range.end {
            let mut scan = Scan {
                size: size_of::<Scan>() as u64,
                flags: WP_MATCHING | CHECK_WPASYNC,
                start: at,
                end: range.end,
                walk_end: 0,
                vec: found.as_mut_ptr() as u64,
                vec_len: found.len() as u64,
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
            tell(found.get(..count).unwrap_or_default());
            if scan.walk_end <= at {
                return Err(Error::new(ErrorKind::System, "the kernel does not go on with a scan of pages"));
            }
            at = scan.walk_end;
        }
        Ok(())
    }
}

/// Parts of `range` for at most so many threads, cut where a page of any size begins.
fn parts_of(range: Range<u64>, threads: u64) -> Vec<Range<u64>> {
    let count = ((range.end - range.start) / BYTES_EACH_MIN).clamp(1, threads.max(1));
    let start = range.start / CUT * CUT;
    let each = (range.end - start).div_ceil(count).next_multiple_of(CUT);
    let begin = |part: u64| (start + part * each).clamp(range.start, range.end);
    (0..count).map(|part| begin(part)..begin(part + 1)).filter(|part| !part.is_empty()).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scan_of_much_memory_is_cut_where_pages_begin_and_misses_none() {
        for (range, threads, count) in [
            (0x7000_0000_0000..0x7000_0000_0000 + (64 << 30), 2, 2),
            (0x1000..0x1000 + (64 << 30), 4, 4),
            (0x1000..0x1000 + BYTES_EACH_MIN, 8, 1),
            (0x1000..0x2000, 8, 1),
            (0x7fff_ffff_f000..0x7fff_ffff_f000 + (9 << 30), 0, 1),
        ] {
            let parts = parts_of(range.clone(), threads);
            assert_eq!((parts[0].start, parts[parts.len() - 1].end), (range.start, range.end));
            assert!(parts.windows(2).all(|two| two[0].end == two[1].start && two[0].end % CUT == 0), "{parts:x?}");
            assert!(parts.len() <= count, "{parts:x?}");
        }
    }
}
