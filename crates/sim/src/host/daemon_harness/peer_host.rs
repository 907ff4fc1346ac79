//! Another host, whose daemon the volume moves to: a process, its files and its journal, and a link between the two.
//!
//! The place of the target is this host's: it loses its power with it, and the source's daemon reaches it over the link
//! alone. Who opens connections to whom is what the daemons' identities say on real hosts: `a` and `b` trust each other.
//!
//! Not tested: the source's daemon dies and this host loses its power before the next flush. Then writes
//! that were answered and not flushed are lost, and the guest, whose machine still runs, is not told (docs/reliability.md).
//! Whatever brings one of the two about waits for that flush after the other, or until the guest was answered again: what it
//! is told from then on it may believe.

mod faults;
mod latency_check;
mod leftover;
mod stale_peer;
mod volume;

use std::sync::Arc;
use std::time::Duration;

use ::daemon::arbiter::Arbiter;
use ::daemon::hosts::{HostName, Reception};
use ::daemon::platform::Hosts;
use block::{Error, ErrorKind};
use futures::future::BoxFuture;
use migrate::stream::{BoxTransport, Dialer, PeerName};
use parking_lot::Mutex;

use super::LAYERS_OF;
use super::fake_arbiter::FakeArbiter;
use crate::disk::{Disk, HostCache};
use crate::files::SimFiles;
use crate::host::Host;
use crate::host::Setup;
use crate::host::beside::names;
use crate::hypervisor::SimMachine;
use crate::link::{Link, LinkFigures};
use crate::occurrence::Occurrence;
use crate::process::Process;
use crate::rng::Rng;
use crate::world::{Invariant, World};
pub use faults::Outage;
use volume::PeerVolume;

/// What the two hosts call each other.
const NAMES: [&str; 2] = ["a", "b"];

/// The other host as one of the volumes has it. Clones are the same.
#[derive(Clone)]
pub(in crate::host) struct PeerHost {
    shared: Arc<Shared>,
    volume: Arc<PeerVolume>,
}

/// A process that serves connections, and what does that in it.
type Reachable = (Process, Arc<dyn Reception>);

struct Shared {
    world: World,
    rng: Rng,
    files: SimFiles,
    link: Link,
    /// Who serves connections of the other, of each host, and in which process.
    receptions: Mutex<[Option<Reachable>; 2]>,
    /// How many causes there are why nobody can connect.
    cuts: Mutex<u32>,
    /// How often the hosts were in trouble with each other.
    troubles: Mutex<u64>,
    process: Mutex<Option<Process>>,
    lives: Mutex<u32>,
    boots: Mutex<u8>,
    /// Whoever decides while the two cannot reach each other.
    fake_arbiter: Option<FakeArbiter>,
    /// What has the volumes as its disks, if anything.
    machine: Option<SimMachine>,
    /// Its daemon, and in which process.
    core: Mutex<Option<(Process, ::daemon::Core)>>,
    /// The image of a volume that was left there, and whether it was.
    leftover: Disk,
    has_leftover: Mutex<bool>,
    /// It is down, or about to be: one cause at a time.
    outage: tokio::sync::Mutex<()>,
}

impl PeerHost {
    pub(super) fn new(world: &World, setup: &Setup) -> Self {
        let volume = PeerVolume::new(world, 0);
        let link = Link::new(world, "between-hosts", LinkFigures::TEN_GIGABIT);
        let machine = setup.has_machine.then(|| SimMachine::new(world, &link));
        let shared = Shared {
            world: world.clone(),
            rng: world.rng("neighbour"),
            files: SimFiles::new(world, &volume.map),
            link,
            receptions: Mutex::default(),
            cuts: Mutex::new(0),
            troubles: Mutex::new(0),
            process: Mutex::default(),
            lives: Mutex::new(0),
            boots: Mutex::new(128),
            fake_arbiter: setup.has_arbiter.then(|| FakeArbiter::new(world)),
            machine,
            core: Mutex::default(),
            leftover: leftover::disk(world),
            has_leftover: Mutex::new(false),
            outage: tokio::sync::Mutex::default(),
        };
        Self { shared: Arc::new(shared), volume: Arc::new(volume) }
    }

    /// The same host as volume `number` has it.
    pub(super) fn beside(&self, number: usize) -> Self {
        let volume = PeerVolume::new(&self.shared.world, number);
        self.shared.files.add_map(names(number).there, &volume.map);
        Self { shared: Arc::clone(&self.shared), volume: Arc::new(volume) }
    }

    /// What this host's page cache has of the volume's disk.
    pub(super) fn page_cache(&self) -> &HostCache {
        &self.volume.page_cache
    }

    /// The disk of its journal of this volume.
    pub(in crate::host) fn own_journal(&self) -> &Disk {
        &self.volume.journal
    }

    pub(in crate::host) fn files(&self) -> &SimFiles {
        &self.shared.files
    }

    pub(super) fn boot(&self) -> u8 {
        *self.shared.boots.lock()
    }

    /// The other daemons as host number `own` sees them from `process`.
    pub(super) fn hosts(&self, own: usize, process: &Process) -> Arc<dyn Hosts> {
        Arc::new(Seen { peer: self.clone(), own, process: process.clone() })
    }

    /// Its daemon, and in which process, if that lives.
    pub(super) fn core(&self) -> Option<(Process, ::daemon::Core)> {
        self.shared.core.lock().clone().filter(|(process, _)| !process.is_dead())
    }

    /// The arbiter, if there is one.
    pub(super) fn fake_arbiter(&self) -> Option<&FakeArbiter> {
        self.shared.fake_arbiter.as_ref()
    }

    /// The machine whose disks the volumes are, if there is one.
    pub(in crate::host) fn machine(&self) -> Option<&SimMachine> {
        self.shared.machine.as_ref()
    }

    /// The story is over. Each daemon is held by who reaches it and holds the way to the other one: without this, both would stay.
    pub(super) fn close(&self) {
        let receptions = std::mem::take(&mut *self.shared.receptions.lock());
        let core = self.shared.core.lock().take();
        drop((receptions, core));
        self.shared.machine.iter().for_each(SimMachine::close);
    }
}

impl Host {
    /// Starts the process of the other host, if it has one and that does not run.
    pub fn boot_peer(&self) {
        let Some(peer) = &self.shared.daemon_harness.peer else { return };
        let mut running = peer.shared.process.lock();
        if running.is_some() {
            return;
        }
        let life = {
            let mut lives = peer.shared.lives.lock();
            *lives += 1;
            *lives
        };
        let setup = &self.shared.setup;
        let process = match setup.peer_dies_at_poll {
            true => Process::crash_target(&self.shared.world, "neighbour", life),
            false => Process::bystander(&self.shared.world, "neighbour", life),
        };
        let process = process.with_tasks_max(setup.tasks_max);
        *running = Some(process.clone());
        let host = self.clone();
        let serving = process.clone();
        process.env().spawn(Box::pin(async move { host.run_peer(&serving).await }));
    }

    async fn run_peer(&self, process: &Process) {
        let (ground, config) = self.platform_of_peer(process);
        let started = ::daemon::Core::start(ground, config, std::path::Path::new(super::STATE_DIR)).await;
        let error = match started {
            Ok(core) => {
                // A file that is gone belongs to a volume that was being dropped.
                for problem in core.volumes().into_iter().filter_map(|volume| volume.problem) {
                    self.shared.world.event(format_args!("the neighbour's volume is down: {problem}"));
                }
                self.leave_volume_there(&core).await;
                if let Some(peer) = &self.shared.daemon_harness.peer {
                    *peer.shared.core.lock() = Some((process.clone(), core));
                }
                return std::future::pending().await;
            }
            Err(error) => error,
        };
        self.shared.world.event(format_args!("the neighbour cannot serve: {error}"));
        process.env().sleep(Duration::from_millis(100)).await;
        // What an operator does: starts it anew.
        let (host, process) = (self.clone(), process.clone());
        self.shared.world.spawn(async move {
            let Some(peer) = &host.shared.daemon_harness.peer else { return };
            let _outage = peer.shared.outage.lock().await;
            if !process.is_dead() {
                host.crash_peer().await;
                host.boot_peer();
            }
        });
    }

    /// Waits until nothing is left on either host of moves that were undone.
    pub async fn forgotten_by_peer(&self) {
        let Some(peer) = &self.shared.daemon_harness.peer else { return };
        // A machine takes all of its disks along, whoever of them has asked.
        let has_gone = || self.shared.setup.has_machine && peer.holds();
        while !has_gone() && self.left_of_moves(peer).is_some() {
            self.shared.world.sleep(Duration::from_millis(5)).await;
        }
    }

    /// What is left of a move that was undone, if anything is.
    fn left_of_moves(&self, peer: &PeerHost) -> Option<String> {
        if self.shared.daemon_harness.places.lock()[1].exists {
            return Some("the other host has a file".to_owned());
        }
        let named = match self.shared.setup.has_machine {
            true => self.name(),
            false => names(self.shared.number).there,
        };
        let directory = format!("/state/volumes/{named}");
        if peer.shared.files.below("/state/volumes").any(|path| path == directory) {
            return Some(format!("the other host has {directory}"));
        }
        if self.has_layers(1) {
            return Some("the other host has files of layers".to_owned());
        }
        let notices = self.shared.daemon_harness.files.contents("/state/abandoned.json");
        notices
            .filter(|notices| notices.trim() != "[]")
            .map(|notices| format!("the other host is to be told: {notices}"))
    }

    /// Whether what lies beside place `side` is the other host's, if there is one.
    pub(in crate::host) const fn is_of_peer(&self, side: usize) -> bool {
        side % LAYERS_OF == 1
    }

    /// The volume has moved, and all is done: the old copy is put away, and nobody owes anybody anything.
    pub fn check_arrived(&self) {
        if self.shared.daemon_harness.peer.is_none() {
            return;
        }
        let world = &self.shared.world;
        let places = *self.shared.daemon_harness.places.lock();
        let is_in_order = match self.is_shared() {
            // It has never left its place.
            true => places[0].exists && !places[1].exists,
            false => !places[0].exists && places[1].exists,
        };
        if !is_in_order {
            world.violate(Invariant::OneWriter, format!("the move is done and the places are {places:?}"));
        }
        if self.is_shared() {
            world.occur(Occurrence::Told("handed over"));
        }
        if self.has_layers(1) {
            world.occur(Occurrence::Told("layers there"));
        }
    }
}

/// The hosts as one of them sees them.
struct Seen {
    peer: PeerHost,
    own: usize,
    process: Process,
}

impl Hosts for Seen {
    fn dialer(&self, host: &HostName) -> Result<Arc<dyn Dialer>, api::v1::Error> {
        let other = 1 - self.own;
        if host.as_str() != NAMES[other] {
            let message = format!("{host} is not trusted");
            return Err(api::v1::Error::new(api::v1::ErrorCode::HostUnknown, message));
        }
        Ok(Arc::new(Way { peer: self.peer.clone(), own: self.own }))
    }

    fn arbiter(&self) -> Option<Arc<dyn Arbiter>> {
        self.peer.fake_arbiter().map(|fake_arbiter| Arc::new(fake_arbiter.clone()) as _)
    }

    fn machine_connection<'a>(
        &'a self,
        _: &'a HostName,
        _: u16,
    ) -> BoxFuture<'a, Result<BoxTransport, api::v1::Error>> {
        let way = Way { peer: self.peer.clone(), own: self.own };
        let refused = |error: Error| api::v1::Error::new(api::v1::ErrorCode::HostUnreachable, error.to_string());
        let dialled = way.reach().map_err(refused).map(|(process, reception, far, near)| {
            let peer = PeerName(NAMES[self.own].to_owned());
            process.env().spawn(Box::pin(async move {
                // How it ended, both daemons log.
                let _ = reception.serve_machine(far, peer, Box::new(|_| {})).await;
            }));
            near
        });
        Box::pin(std::future::ready(dialled))
    }

    fn listen(&self, reception: Arc<dyn Reception>) -> BoxFuture<'_, Result<(), api::v1::Error>> {
        self.peer.shared.receptions.lock()[self.own] = Some((self.process.clone(), reception));
        Box::pin(std::future::ready(Ok(())))
    }
}

/// The way from one host to the other.
struct Way {
    peer: PeerHost,
    own: usize,
}

/// Who answers, in which process, and both ends of a connection.
type Reached = (Process, Arc<dyn Reception>, BoxTransport, BoxTransport);

impl Way {
    /// A connection to the other host's daemon.
    fn reach(&self) -> block::Result<Reached> {
        let shared = &self.peer.shared;
        let reception = shared.receptions.lock()[1 - self.own].clone();
        let reception = reception.filter(|(process, _)| !process.is_dead() && *shared.cuts.lock() == 0);
        let Some((process, reception)) = reception else {
            return Err(Error::new(ErrorKind::Disconnected, format!("{} does not answer", NAMES[1 - self.own])));
        };
        let (near, far) = shared.link.connect();
        Ok((process, reception, Box::new(far), Box::new(near)))
    }
}

impl Dialer for Way {
    fn dial(&self, _: u16) -> BoxFuture<'_, block::Result<BoxTransport>> {
        let dialled = self.reach().map(|(process, reception, far, near)| {
            let peer = PeerName(NAMES[self.own].to_owned());
            process.env().spawn(Box::pin(async move {
                // How it ended, both daemons log.
                let _ = reception.serve(far, peer, Box::new(|_| ())).await;
            }));
            near
        });
        Box::pin(std::future::ready(dialled))
    }
}
