//! A window of a file of huge pages, which can be written only through a mapping.
#![allow(unsafe_code, reason = "a mapping is memory that the compiler knows nothing of")]

use std::fs::File;
use std::os::fd::AsRawFd;

/// A part of a file, mapped to be written.
pub(super) struct Window {
    start: *mut u8,
    bytes: usize,
}

impl Window {
    /// Maps `bytes` bytes of `file` from `offset` on: whole huge pages.
    pub(super) fn open(file: &File, offset: u64, bytes: u64) -> std::io::Result<Self> {
        let bytes = usize::try_from(bytes).map_err(std::io::Error::other)?;
        let offset = libc::off_t::try_from(offset).map_err(std::io::Error::other)?;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel chooses a place that nothing else has. The caller has made the file at least as long.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes, rights, libc::MAP_SHARED, file.as_raw_fd(), offset) };
        if start == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        Ok(Self { start: start.cast(), bytes })
    }

    /// Writes to it. What would be outside is a fault of the caller.
    pub(super) fn write(&self, at: u64, bytes: &[u8]) {
        let at = self.check(at, bytes.len());
        // SAFETY: the range is within the mapping, which is nobody's Rust object; the guest that maps the same file does not run.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.add(at), bytes.len()) }
    }

    /// Writes zeroes to it.
    pub(super) fn zero(&self, at: u64, count: usize) {
        let at = self.check(at, count);
        // SAFETY: as in `write`.
        unsafe { std::ptr::write_bytes(self.start.add(at), 0, count) }
    }

    fn check(&self, at: u64, count: usize) -> usize {
        let at = usize::try_from(at).expect("an offset in a window");
        assert!(at.checked_add(count).is_some_and(|end| end <= self.bytes), "outside of the window");
        at
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: the mapping is this window's own, and nothing points into it.
        unsafe {
            libc::munmap(self.start.cast(), self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn what_is_written_through_it_is_in_the_file() {
        let file = tempfile::tempfile_in("/dev/shm").expect("made");
        file.set_len(3 * 4096).expect("sized");
        let window = Window::open(&file, 4096, 4096).expect("mapped");
        window.write(10, &[7; 20]);
        window.zero(15, 5);
        drop(window);
        let mut read = [9; 22];
        file.read_exact_at(&mut read, 4096 + 9).expect("read");
        assert_eq!(read, [0, 7, 7, 7, 7, 7, 0, 0, 0, 0, 0, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 0]);
    }
}
