//! File descriptors: a volume needs about seven, and a process has so many.
//!
//! ```text
//!   0 ─────────────────────────────────── 90 % ──────────────── limit - 32 ───── limit
//!   │ volumes, their clients, all else      │ clients, all else      │ all else     │
//!   │                                       │ no more volumes        │ no clients   │ 8 of them are kept for the API
//! ```

use std::collections::HashSet;
use std::fs::File;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};

use api::v1::{Error, ErrorCode};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::problem::{DESCRIPTORS_HINT, Result};

/// What clients of volumes do not get, and the part of all that it is at most.
const KEPT_FROM_CLIENTS: u64 = 32;
const KEPT_PART: u64 = 16;
/// What a volume needs that comes back at a start, with a client.
const OF_A_VOLUME: u64 = 9;
/// What only the API gets.
const SPARE: usize = 8;

/// How many are used, and how many there may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) used: u64,
    pub(crate) limit: u64,
}

impl Usage {
    /// As it is now.
    pub(crate) fn now() -> Self {
        // One of them is this look itself.
        let used = std::fs::read_dir("/proc/self/fd").map_or(0, |open| open.count().saturating_sub(1) as u64);
        Self { used, limit: limit() }
    }

    /// Whether no more volumes should come; so many clients are still to come to those that are here.
    const fn is_short(self, expected: u64) -> bool {
        self.used + expected > self.limit / 10 * 9
    }

    /// How many volumes may come back at a start, of those whose images are at `places`. A device takes `of_a_device` for
    /// all of its images.
    pub(crate) fn volumes(self, places: &[Option<PathBuf>], of_a_device: u64) -> usize {
        let mut left = (self.limit / 10 * 9).saturating_sub(self.used);
        let mut devices = HashSet::new();
        let fit = places.iter().take_while(|place| {
            let is_new = place.as_deref().is_some_and(|place| devices.insert(device_by_name(place)));
            let rest = left.checked_sub(OF_A_VOLUME + if is_new { of_a_device } else { 0 });
            rest.inspect(|rest| left = *rest).is_some()
        });
        fit.count()
    }
}

/// What is the same only for images of one device, as far as names tell: nothing is asked of a device, which may hang.
fn device_by_name(image: &Path) -> &Path {
    if image.starts_with("/dev") { image } else { image.parent().unwrap_or(image) }
}

fn limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Lets this process have as many as it may.
pub(crate) fn raise_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        Ok(()) => tracing::debug!(before = current, now = maximum, "the limit of file descriptors is raised"),
        Err(error) => tracing::warn!(%error, limit = current, "the limit of file descriptors could not be raised"),
    }
}

/// Refuses a volume for which there may be too few; so many are `expected` to be used by the others.
///
/// # Errors
/// More than nine tenths are used.
pub(crate) fn require_room(expected: usize) -> Result<()> {
    let usage = Usage::now();
    if !usage.is_short(expected as u64) {
        return Ok(());
    }
    Err(shortage(usage))
}

/// The error of a volume for which there are too few.
pub(crate) fn shortage(usage: Usage) -> Error {
    let message = format!("{} of {} file descriptors are used: there is no room for a volume", usage.used, usage.limit);
    Error::new(ErrorCode::DescriptorsShort, message).with_hint(DESCRIPTORS_HINT)
}

/// Whether `descriptor`, the lowest that was free, is one that clients of volumes do not get.
pub(crate) fn is_kept_from_clients(descriptor: RawFd) -> bool {
    let limit = limit();
    let kept = KEPT_FROM_CLIENTS.min(limit / KEPT_PART);
    u64::try_from(descriptor).is_ok_and(|descriptor| descriptor >= limit.saturating_sub(kept))
}

/// Whether `error` says that none are left.
pub(crate) fn are_none_left(error: &std::io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}

/// Some that are let go of when no others are left, so that the API can still be asked.
#[derive(Default)]
pub(crate) struct Spare(Vec<File>);

impl Spare {
    /// Takes as many as are missing, unless they are short.
    pub(crate) fn fill(&mut self) {
        while self.0.len() < SPARE
            && let Ok(file) = File::open("/dev/null")
            && !is_kept_from_clients(std::os::fd::AsRawFd::as_raw_fd(&file))
        {
            self.0.push(file);
        }
    }

    /// Lets go of all; false if there was none.
    pub(crate) fn release(&mut self) -> bool {
        let had_some = !self.0.is_empty();
        self.0.clear();
        had_some
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_are_refused_before_clients_are_and_the_api_has_some_of_its_own() {
        let is_short = |used, expected| Usage { used, limit: 1024 }.is_short(expected);
        assert!(!is_short(900, 0) && is_short(919, 0) && is_short(900, 20));
        let places = |names: &[&str]| names.iter().map(|name| Some(PathBuf::from(name))).collect::<Vec<_>>();
        let of_one = places(&["/vm/a", "/vm/b", "/vm/c"]);
        let volumes = |used, places: &[_]| Usage { used, limit: 1024 }.volumes(places, 5);
        assert_eq!([890, 900, 1000].map(|used| volumes(used, &of_one)), [2, 1, 0]);
        assert_eq!(volumes(0, &of_one), 3);
        assert_eq!(volumes(890, &[None, None, None, None]), 3, "other hosts' volumes need no device here");
        for names in [["/dev/vda", "/dev/vdb"], ["/vm/a", "/other/a"]] {
            assert_eq!([891, 890].map(|used| volumes(used, &places(&names))), [1, 2], "{names:?} are of two devices");
        }
        let usage = Usage::now();
        assert!(usage.used > 2 && usage.used < usage.limit, "{usage:?}");
        let limit = RawFd::try_from(usage.limit.min(1 << 30)).expect("small");
        assert!(is_kept_from_clients(limit - 1) && !is_kept_from_clients(3));
        let mut spare = Spare::default();
        spare.fill();
        assert!(spare.release() && !spare.release());
    }
}
