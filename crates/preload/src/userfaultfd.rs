//! The userfaultfd: asynchronous write protection of the process's own mappings.
#![allow(unsafe_code, reason = "a userfaultfd is a system call and ioctls that no library has a safe interface for")]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::protocol::{Failure, FailureKind, Mapping};

const UFFDIO_API: libc::Ioctl = 0xC018_AA3F_u32 as libc::Ioctl;
const UFFDIO_REGISTER: libc::Ioctl = 0xC020_AA00_u32 as libc::Ioctl;
const USERFAULTFD_IOC_NEW: libc::Ioctl = 0xAA00;
const API: u64 = 0xAA;
const MODE_WP: u64 = 1 << 1;
/// Only faults of user mode are handled. In the asynchronous mode nobody handles any, so it costs nothing to give that right up.
const USER_MODE_ONLY: libc::c_int = 1;
const WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
const WP_UNPOPULATED: u64 = 1 << 13;
const WP_ASYNC: u64 = 1 << 15;
const FEATURES: u64 = WP_HUGETLBFS_SHMEM | WP_UNPOPULATED | WP_ASYNC;

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Register {
    start: u64,
    length: u64,
    mode: u64,
    ioctls: u64,
}

impl Failure {
    pub(crate) fn of_system(error: &io::Error) -> Self {
        Self::new(FailureKind::System, error.raw_os_error().unwrap_or_default())
    }
}

/// Has the kernel track what is written to mappings, until it is dropped.
pub(crate) struct Tracker {
    descriptor: OwnedFd,
}

impl Tracker {
    /// Makes a userfaultfd, through `device` (`/dev/userfaultfd`) if that is given.
    pub(crate) fn open(device: Option<OwnedFd>) -> Result<Self, Failure> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        let made = match device {
            Some(device) => new_through(&device, flags),
            None => match new(flags) {
                Err(error) if error.raw_os_error() == Some(libc::EPERM) => new(flags | USER_MODE_ONLY),
                made => made,
            },
        };
        let descriptor = made.map_err(|error| {
            let errno = error.raw_os_error().unwrap_or_default();
            match errno {
                libc::EPERM | libc::EACCES => Failure::new(FailureKind::Denied, errno),
                libc::ENOSYS | libc::ENOTTY => Failure::new(FailureKind::Unsupported, errno),
                _ => Failure::new(FailureKind::System, errno),
            }
        })?;
        let mut api = Api { api: API, features: FEATURES, ioctls: 0 };
        // SAFETY: the argument is the structure that this request reads and writes, and lives for the call.
        let done = unsafe { libc::ioctl(descriptor.as_raw_fd(), UFFDIO_API, &raw mut api) };
        if done != 0 {
            let errno = io::Error::last_os_error().raw_os_error().unwrap_or_default();
            // An older kernel does not know one of the features.
            let kind = if errno == libc::EINVAL { FailureKind::Unsupported } else { FailureKind::System };
            return Err(Failure::new(kind, errno));
        }
        Ok(Self { descriptor })
    }

    /// Tracks `mappings` besides what is tracked already.
    pub(crate) fn track(&self, mappings: &[Mapping]) -> Result<(), Failure> {
        for mapping in mappings {
            let length = mapping.end.saturating_sub(mapping.start);
            let mut register = Register { start: mapping.start, length, mode: MODE_WP, ioctls: 0 };
            // SAFETY: the argument is the structure that this request reads and writes, and lives for the call. The request changes
            // no byte of the mapping, and leaves every access to it allowed: the kernel resolves the faults itself.
            let done = unsafe { libc::ioctl(self.descriptor.as_raw_fd(), UFFDIO_REGISTER, &raw mut register) };
            if done != 0 {
                let errno = io::Error::last_os_error().raw_os_error().unwrap_or_default();
                let kind = match errno {
                    libc::EBUSY => FailureKind::Busy,
                    libc::EINVAL => FailureKind::Unsupported,
                    libc::EPERM => FailureKind::Denied,
                    _ => FailureKind::System,
                };
                return Err(Failure::new(kind, errno));
            }
        }
        Ok(())
    }
}

fn new(flags: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: the system call takes a number and no pointer.
    let made = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    owned(made)
}

fn new_through(device: &OwnedFd, flags: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: the request takes a number and no pointer. Another kind of file refuses it.
    let made = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, flags) };
    owned(made.into())
}

fn owned(made: libc::c_long) -> io::Result<OwnedFd> {
    match i32::try_from(made) {
        // SAFETY: the kernel has just made this descriptor for the caller, and nobody else knows it.
        Ok(number) if number >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(number) }),
        _ => Err(io::Error::last_os_error()),
    }
}
