//! The slot's turnstile and the range lock under a model checker. A few threads run in every interleaving, and every
//! order of their atomics that the C11 memory model allows.
//!
//! The crate's own files are compiled here a second time, with loom's primitives in place of those that `crate::sync`
//! names. That needs neither a `cfg` nor a type parameter in the engine. The same files are compiled a third time with
//! primitives that are too weak: the models must notice.

#![allow(clippy::duplicate_mod, reason = "that is how the same file gets other primitives")]

mod primitives;

use loom::cell::UnsafeCell;
use loom::future::block_on;
use loom::sync::Arc;
use loom::thread;
use transhume_block::{Bytes, Extent};

/// As the crate has them.
#[path = "."]
mod right {
    pub(crate) use transhume_block::{Bytes, Extent};
    pub(crate) mod sync {
        pub(crate) use crate::models::primitives::{Arc, AtomicBool, AtomicUsize, Mutex, Notify};
        pub(crate) use loom::sync::atomic::Ordering;
    }
    #[path = "../../../src/range_lock.rs"]
    #[allow(dead_code, unreachable_pub)]
    pub(crate) mod range_lock;
    #[path = "../../../src/range_queue.rs"]
    #[allow(dead_code, unreachable_pub)]
    pub(crate) mod range_queue;
    #[path = "../../../src/slot/turnstile.rs"]
    #[allow(dead_code)]
    pub(crate) mod turnstile;
}

/// With atomics that order nothing.
#[path = "."]
mod relaxed {
    pub(crate) mod sync {
        pub(crate) use crate::models::primitives::{Arc, AtomicBool, AtomicUsize, Mutex, Notify, Relaxed as Ordering};
    }
    #[path = "../../../src/slot/turnstile.rs"]
    #[allow(dead_code)]
    pub(crate) mod turnstile;
}

/// With a look at the counts that takes no part in their order.
#[path = "."]
mod loaded {
    pub(crate) mod sync {
        pub(crate) use crate::models::primitives::{Arc, AtomicBool, Loaded as AtomicUsize, Mutex, Notify};
        pub(crate) use loom::sync::atomic::Ordering;
    }
    #[path = "../../../src/slot/turnstile.rs"]
    #[allow(dead_code)]
    pub(crate) mod turnstile;
}

/// With wake-ups that get lost when nobody waits yet.
#[path = "."]
mod forgetful {
    pub(crate) mod sync {
        pub(crate) use crate::models::primitives::{Arc, AtomicBool, AtomicUsize, Forgetful as Notify, Mutex};
        pub(crate) use loom::sync::atomic::Ordering;
    }
    #[path = "../../../src/slot/turnstile.rs"]
    #[allow(dead_code)]
    pub(crate) mod turnstile;
}

/// How often a thread may be interrupted where it could have gone on; more finds nothing more and takes minutes.
const PREEMPTIONS_MAX: usize = 3;

fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS_MAX);
    builder.check(model);
}

/// `lanes` threads make a request each while the slot is held, its device changed, and opened again. The device is a
/// cell whose every access loom watches. A request that reads it while it is changed, or without having to see the
/// change, is an error. So is a thread that is never woken.
macro_rules! change_the_device_under_requests {
    ($world:ident, $lanes:expr) => {{
        let slot = Arc::new(($world::turnstile::Turnstile::new(), UnsafeCell::new(0)));
        let requests: Vec<_> = (0..$lanes)
            .map(|_| {
                let slot = Arc::clone(&slot);
                let count = slot.0.add_lane();
                thread::spawn(move || {
                    let (turnstile, device) = &*slot;
                    let inside = match turnstile.try_enter(&count) {
                        Some(inside) => inside,
                        None => block_on(turnstile.wait_to_enter(&count)),
                    };
                    device.with(|_| {});
                    drop(inside);
                })
            })
            .collect();
        let (turnstile, device) = &*slot;
        turnstile.hold();
        block_on(turnstile.drain());
        device.with_mut(|_| {});
        turnstile.open();
        requests.into_iter().for_each(|request| request.join().unwrap());
        assert_eq!(turnstile.inside(), 0);
    }};
}

#[test]
fn no_request_is_inside_while_the_device_is_changed_and_all_of_them_come_through() {
    explore(|| change_the_device_under_requests!(right, 1));
    explore(|| change_the_device_under_requests!(right, 2));
}

#[test]
fn a_request_that_comes_between_two_holds_passes_or_waits_for_the_second() {
    explore(|| {
        let slot = Arc::new((right::turnstile::Turnstile::new(), UnsafeCell::new(0)));
        let count = slot.0.add_lane();
        let request = thread::spawn({
            let slot = Arc::clone(&slot);
            move || {
                let inside = block_on(slot.0.wait_to_enter(&count));
                slot.1.with(|_| {});
                drop(inside);
            }
        });
        for _ in 0..2 {
            slot.0.hold();
            block_on(slot.0.drain());
            slot.1.with_mut(|_| {});
            slot.0.open();
        }
        request.join().unwrap();
    });
}

/// Which of the too weak primitives a process is to run, and thereby to fail.
const WEAKER: &str = "TRANSHUME_WEAKER_PRIMITIVES";

/// A model that has found a thread that nobody wakes cannot unwind, so each runs in a process of its own.
#[test]
fn weaker_primitives_are_found_out() {
    match std::env::var(WEAKER).as_deref() {
        Ok("relaxed") => return explore(|| change_the_device_under_requests!(relaxed, 1)),
        Ok("loaded") => return explore(|| change_the_device_under_requests!(loaded, 1)),
        Ok("forgetful") => return explore(|| change_the_device_under_requests!(forgetful, 1)),
        Ok("right") => return explore(|| change_the_device_under_requests!(right, 1)),
        _ => {}
    }
    for (weaker, is_right) in [("relaxed", false), ("loaded", false), ("forgetful", false), ("right", true)] {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "models::weaker_primitives_are_found_out"])
            .env(WEAKER, weaker)
            .env("RUST_BACKTRACE", "0")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.success(), is_right, "{weaker}: {said}");
    }
}

fn extent(offset: u64, length: u64) -> Extent {
    Extent::new(Bytes(offset), Bytes(length))
}

/// Two queues for regions of four bytes: what is longer stands in both.
fn small_lock() -> right::range_lock::RangeLock {
    right::range_lock::RangeLock::with_regions(Bytes(4), 2)
}

#[test]
fn overlapping_ranges_are_held_by_one_and_every_waiter_is_woken() {
    explore(|| {
        let shared = Arc::new((small_lock(), UnsafeCell::new(0)));
        let write = |extent| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let guard = block_on(shared.0.exclusive(extent));
                shared.1.with_mut(|_| {});
                drop(guard);
            })
        };
        let others = [write(extent(0, 8)), write(extent(4, 8))];
        let guard = block_on(shared.0.exclusive(extent(6, 1)));
        shared.1.with_mut(|_| {});
        drop(guard);
        others.into_iter().for_each(|other| other.join().unwrap());
    });
}

/// Whoever entered one queue first and the other one second would wait for the other, who waits for him.
#[test]
fn requests_that_meet_in_two_queues_do_not_wait_for_each_other() {
    explore(|| {
        let shared = Arc::new((small_lock(), UnsafeCell::new(0)));
        let other = thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                let guard = block_on(shared.0.exclusive(extent(2, 4)));
                shared.1.with_mut(|_| {});
                drop(guard);
            }
        });
        // From the second region to the third, whose queue is the first again.
        let guard = block_on(shared.0.exclusive(extent(4, 8)));
        shared.1.with_mut(|_| {});
        drop(guard);
        other.join().unwrap();
        assert!(shared.0.is_free(extent(0, 16)));
    });
}

#[test]
fn readers_share_a_range_and_a_writer_has_it_alone() {
    explore(|| {
        let shared = Arc::new((small_lock(), UnsafeCell::new(0)));
        let reader = thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                let guard = block_on(shared.0.shared(extent(0, 8)));
                shared.1.with(|_| {});
                drop(guard);
            }
        });
        let writer = thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                let guard = block_on(shared.0.exclusive(extent(0, 1)));
                shared.1.with_mut(|_| {});
                drop(guard);
            }
        });
        let guard = block_on(shared.0.shared(extent(0, 8)));
        shared.1.with(|_| {});
        drop(guard);
        reader.join().unwrap();
        writer.join().unwrap();
    });
}

#[test]
fn a_wait_that_is_given_up_while_it_is_granted_blocks_nobody() {
    explore(|| {
        let lock = small_lock();
        let first = lock.try_exclusive(extent(0, 8)).expect("nobody has it");
        let given_up = lock.exclusive(extent(0, 8));
        let behind = thread::spawn({
            let lock = lock.clone();
            move || drop(block_on(lock.exclusive(extent(0, 8))))
        });
        let holder = thread::spawn(move || drop(first));
        drop(given_up);
        holder.join().unwrap();
        behind.join().unwrap();
        assert!(lock.is_free(extent(0, 8)));
    });
}
