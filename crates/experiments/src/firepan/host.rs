//! A host's path for requests: what its VMs share, and what a move changes.
//!
//! ```text
//!   VM that moves  ─▶ flash first, then storage: the guest's and the warmer's in turn ─╮
//!   copier         ─▶ blocks ──────────────────────────────────────────────────────────┤─▶ each that asks gets the same part
//!   neighbours     ─▶ always ask ──────────────────────────────────────────────────────╯
//! ```
//!
//! Each request costs some of the host's time. Whoever asks gets the same part of that time as each other who asks at that moment
//! (section 4.3.1: "every VM fairly shares"). A neighbour is a closed loop, which always asks. So it is a part of the time and no requests.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use env::Moment;
use parking_lot::Mutex;
use sim::world::World;
use tokio::sync::{Notify, oneshot};

/// What is left of a job that is done, in seconds: rounding.
const NOTHING: f64 = 1e-9;

/// For what a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// The guest's, to its flash: hits, and blocks that are admitted.
    GuestFlash,
    /// The guest's, to shared storage.
    GuestStorage,
    /// The warmer's, to shared storage: the same VM's part of the host (section 4.2).
    Warmer,
    /// The same, apart from the VM: it asks for itself.
    WarmerApart,
    /// A block that is copied between two hosts.
    Copier,
}

struct Job {
    /// The host's time, in seconds.
    left: f64,
    done: oneshot::Sender<()>,
}

/// One that asks: a VM, or the copier.
#[derive(Default)]
struct Asker {
    flash: VecDeque<Job>,
    /// The guest's and the warmer's.
    storage: [VecDeque<Job>; 2],
    /// Whose turn it is.
    turn: usize,
    current: Option<Job>,
}

impl Asker {
    fn begin(&mut self) {
        if self.current.is_none() {
            self.current = self.flash.pop_front().or_else(|| {
                let turn = self.turn;
                self.turn = 1 - turn;
                self.storage[turn].pop_front().or_else(|| self.storage[1 - turn].pop_front())
            });
        }
    }
}

struct State {
    /// How many VMs beside the one that moves.
    neighbours: u32,
    /// The VM, the copier, and a warmer that asks for itself.
    askers: [Asker; 3],
    at: Moment,
    /// What each neighbour has got of the host's time, in seconds.
    neighbour_seconds: f64,
}

impl State {
    fn active(&self) -> u32 {
        self.neighbours + self.askers.iter().filter(|asker| asker.current.is_some()).count() as u32
    }

    /// How many seconds until the first job is done, if nothing else comes.
    fn span(&self) -> Option<f64> {
        let left = self.askers.iter().filter_map(|asker| asker.current.as_ref()).map(|job| job.left);
        left.reduce(f64::min).map(|left| left * f64::from(self.active()))
    }

    /// Lets the time up to `now` pass.
    fn advance(&mut self, now: Moment) {
        let mut rest = (now - self.at).as_secs_f64();
        self.at = self.at.max(now);
        loop {
            let active = f64::from(self.active());
            let step = self.span().map_or(rest, |span| span.min(rest));
            if active > 0.0 {
                self.neighbour_seconds += if self.neighbours > 0 { step / active } else { 0.0 };
                for asker in &mut self.askers {
                    let Some(job) = &mut asker.current else { continue };
                    job.left -= step / active;
                    if job.left <= NOTHING {
                        // Whoever asked may have given up.
                        let _ = asker.current.take().map(|job| job.done.send(()));
                        asker.begin();
                    }
                }
            }
            rest -= step;
            if rest <= 0.0 {
                return;
            }
        }
    }
}

/// A host. Clones are the same.
#[derive(Clone)]
pub(super) struct Host {
    shared: Arc<Shared>,
}

struct Shared {
    world: World,
    state: Mutex<State>,
    kick: Notify,
}

impl Host {
    /// One with `neighbours` beside the VM that moves.
    pub(super) fn new(world: &World, neighbours: u32) -> Self {
        let state = State { neighbours, askers: Default::default(), at: world.now(), neighbour_seconds: 0.0 };
        let host =
            Self { shared: Arc::new(Shared { world: world.clone(), state: Mutex::new(state), kick: Notify::new() }) };
        let driven = host.clone();
        world.spawn(async move { driven.drive().await });
        host
    }

    async fn drive(&self) {
        let Shared { world, state, kick } = &*self.shared;
        loop {
            let kicked = kick.notified();
            let next = {
                let mut state = state.lock();
                state.advance(world.now());
                // Moments are whole microseconds: a job ends at the first after it is done.
                state.span().map(|span| state.at + Duration::from_micros((span * 1e6).ceil().max(1.0) as u64))
            };
            match next {
                Some(at) => {
                    tokio::select! {
                        biased;
                        () = kicked => {}
                        () = world.sleep_until(at) => {}
                    }
                }
                None => kicked.await,
            }
        }
    }

    /// Takes `seconds` of the host's time for a request.
    pub(super) async fn serve(&self, class: Class, seconds: f64) {
        let done = {
            let mut state = self.shared.state.lock();
            state.advance(self.shared.world.now());
            let (done, answer) = oneshot::channel();
            let job = Job { left: seconds, done };
            let [vm, copier, warmer] = &mut state.askers;
            match class {
                Class::GuestFlash => vm.flash.push_back(job),
                Class::GuestStorage => vm.storage[0].push_back(job),
                Class::Warmer => vm.storage[1].push_back(job),
                Class::WarmerApart => warmer.flash.push_back(job),
                Class::Copier => copier.flash.push_back(job),
            }
            state.askers.iter_mut().for_each(Asker::begin);
            answer
        };
        self.shared.kick.notify_one();
        // The host lives as long as the world.
        let _ = done.await;
    }

    /// What each neighbour has got of the host's time so far, in seconds.
    pub(super) fn neighbour_seconds(&self) -> f64 {
        let mut state = self.shared.state.lock();
        state.advance(self.shared.world.now());
        state.neighbour_seconds
    }
}

#[cfg(test)]
mod tests {
    use futures::future::join_all;
    use sim::clock;
    use sim::log::Keep;

    use super::*;

    #[test]
    fn whoever_asks_gets_the_same_part_and_a_neighbour_what_is_left() {
        clock::run(async {
            let world = World::new(1, Keep::Tail);
            let host = Host::new(&world, 3);
            join_all((0..100).map(|_| host.serve(Class::GuestStorage, 0.01))).await;
            let alone = world.now().0.as_secs_f64();
            assert!((alone - 4.0).abs() < 1e-3, "a quarter of the host: {alone} s for one of its seconds");
            assert!((host.neighbour_seconds() - 1.0).abs() < 1e-3, "{}", host.neighbour_seconds());
            let guest = (0..100).map(|_| host.serve(Class::GuestStorage, 0.01));
            let copier = (0..200).map(|_| host.serve(Class::Copier, 0.01));
            let (guest_done, ()) = futures::future::join(
                async {
                    join_all(guest).await;
                    world.now().0.as_secs_f64() - alone
                },
                async { drop(join_all(copier).await) },
            )
            .await;
            assert!((guest_done - 5.0).abs() < 1e-3, "a fifth beside the copier: {guest_done} s");
            let all = world.now().0.as_secs_f64() - alone;
            assert!((all - 9.0).abs() < 1e-3, "and the copier a quarter afterwards: {all} s");
        });
    }

    #[test]
    fn flash_goes_first_within_a_vm_and_the_warmer_takes_turns_with_its_guest() {
        clock::run(async {
            let world = World::new(1, Keep::Tail);
            let host = Host::new(&world, 0);
            let ended = Mutex::new(Vec::new());
            let ask = async |class| {
                host.serve(class, 0.001).await;
                ended.lock().push(class);
            };
            let classes = [Class::GuestStorage, Class::GuestStorage, Class::Warmer, Class::Warmer, Class::GuestFlash];
            join_all(classes.map(ask)).await;
            let order = ended.into_inner();
            assert_eq!(order[1], Class::GuestFlash, "the first was served at once: {order:?}");
            let (guest, warmer) = (Class::GuestStorage, Class::Warmer);
            assert!(order[2..] == [warmer, guest, warmer] || order[2..] == [guest, warmer, warmer], "{order:?}");
        });
    }
}
