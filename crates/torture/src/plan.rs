//! What happens in one cycle: drawn from a seed, without looking at the world.

use std::time::Duration;

use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha12Rng;

/// Who uses the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClientKind {
    /// Our verifying load over the export, through a proxy that can cut and slow it down; it reconnects like QEMU.
    Load,
    /// fio with verification; it does not reconnect, so the daemon is not killed under it.
    Fio,
    /// A Linux guest under QEMU, whose disk is adopted.
    Guest,
}

/// Where a volume can go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// A file on the machine's disk: direct IO.
    Disk,
    /// A file on a tmpfs.
    Memory,
    /// A file on an ext4 file system made for this.
    Ext4,
    /// A file on an XFS made for this, where files can share blocks.
    Xfs,
    /// A file on a small ext4 file system, which can be filled.
    Small,
    /// A block device.
    Device,
    /// The export of an NBD server that is not ours.
    Server,
}

impl Place {
    /// All of them.
    pub(crate) const ALL: [Self; 7] =
        [Self::Disk, Self::Memory, Self::Ext4, Self::Xfs, Self::Small, Self::Device, Self::Server];

    /// Whether there is room for two volumes with what their moves leave.
    pub(crate) const fn has_room(self) -> bool {
        !matches!(self, Self::Small | Self::Device | Self::Server)
    }

    /// Whether a volume there is a file, which is put out of the way or deleted when the volume leaves.
    pub(crate) const fn is_file(self) -> bool {
        !matches!(self, Self::Device | Self::Server)
    }

    /// Whether overlays of snapshots have their room beside a source there.
    const fn takes_overlays(self) -> bool {
        matches!(self, Self::Disk | Self::Ext4 | Self::Xfs)
    }
}

/// What is done to a move, or to those around it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InjectedFault {
    /// `kill -9` of the daemon, and a new one at once.
    Kill,
    /// The same, so long after it came up, in the middle of its recovery.
    KillAgain(Duration),
    /// SIGTERM, and a new daemon: an upgrade.
    Restart,
    /// The daemon is stopped for a while.
    Freeze(Duration),
    /// The client's process is stopped for a while.
    FreezeClient(Duration),
    /// Every connection is cut in the middle of whatever it carries. The daemon is stopped for so long around the cut.
    /// It then finds the end of the old connections and the beginning of the new ones at the same time.
    Cut(Duration),
    /// A thread that serves connections stops for a while, and soon after it all connections are cut. What the thread
    /// still held of the old ones comes long after the new ones have begun.
    Stall(usize, Duration),
    /// Connections carry nothing for a while.
    Hold(Duration),
    /// Connections carry so many bytes a second for a while.
    Trickle(u64, Duration),
    /// The move's bandwidth is set, in MiB/s.
    Bandwidth(u32),
    /// The move is paused for a while.
    Pause(Duration),
    /// The move is cancelled.
    Cancel,
    /// The target's file system is filled, and has room again when the move is over.
    Fill,
    /// The daemon ends, and the NBD server as well; the daemon starts, and the server that long after it.
    StartWithoutServer(Duration),
}

/// One cycle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Where the volume goes to.
    pub(crate) place: Place,
    /// What is compared.
    pub(crate) verify: &'static str,
    /// How copies and guest writes come together.
    pub(crate) strategy: &'static str,
    /// How fast the copy is at first, in MiB/s.
    pub(crate) bandwidth: u32,
    /// Whether the source is deleted.
    pub(crate) delete_source: bool,
    /// Whether a file that an earlier move left is overwritten, if there is one.
    pub(crate) overwrite_kept: bool,
    /// What happens, and how long after the thing before it.
    pub(crate) faults: Vec<(Duration, InjectedFault)>,
    /// Whether a surrogate serves the guest.
    pub(crate) surrogate: bool,
    /// What a cache does with the guest's writes, if one is put into its path before the move.
    pub(crate) cache: Option<&'static str>,
    /// Of an adopted disk: whether it is released and adopted again afterwards.
    pub(crate) readopt: bool,
}

/// How long the blows of a cycle last, all together; the move itself is about as long.
const CYCLE: Duration = Duration::from_millis(1500);
const BLOWS_MAX: usize = 4;

/// All strategies; the default twice.
const STRATEGIES: [&str; 8] =
    ["mirror", "mirror", "mirror-paper", "mirror-async", "dbt", "incremental-dbt", "snapshot", "auto"];

impl Plan {
    /// How a move from `source` goes. Overlays of snapshots need room beside source and target, which must be files.
    pub(crate) fn strategy_from(&self, source: Place) -> &'static str {
        let takes_overlays = source.takes_overlays() && self.place.has_room();
        if self.strategy == "snapshot" && !takes_overlays { "mirror" } else { self.strategy }
    }

    /// Whether a surrogate serves the guest of a move from `source`: not where the strategy takes the guest's writes itself, and not where
    /// another server has the disk.
    pub(crate) fn surrogate_from(&self, source: Place) -> bool {
        self.surrogate && source != Place::Server && !matches!(self.strategy_from(source), "snapshot" | "mirror-paper")
    }

    /// Has a cache instead of what it would have in its place.
    pub(crate) fn take_cache(&mut self) {
        self.surrogate = false;
        self.cache = self.cache.or(Some("write-back"));
    }

    /// What a cache does with the guest's writes while the volume moves from `source`, if there is one. It lies where a surrogate does.
    pub(crate) fn cache_from(&self, source: Place) -> Option<&'static str> {
        let takes_one = !self.surrogate && !matches!(self.strategy_from(source), "snapshot" | "mirror-paper");
        self.cache.filter(|_| takes_one)
    }
}

/// What an act is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cast {
    /// Who uses the first volume.
    pub(crate) kind: ClientKind,
    /// For how many cycles.
    pub(crate) cycles: u32,
    /// The first volume's size.
    pub(crate) bytes: u64,
    /// The size of a second volume under our load, if there is one.
    pub(crate) beside: Option<u64>,
}

/// A volume's size if it is even: a multiple of a block, of a chunk and a bit.
const EVEN_BYTES: u64 = (24 << 20) + (8 << 10);
/// Sizes that are drawn are multiples of it.
const SECTOR_BYTES: u64 = 512;
/// Sectors of a block.
const SECTORS: u64 = 8;

/// The random numbers of one act: everything that is drawn follows from its seed.
pub(crate) struct Rng {
    seed: u64,
    random: ChaCha12Rng,
    /// Places in the order in which they come; so none is left out for long.
    deck: Vec<Place>,
}

impl Rng {
    /// The random numbers of a seed.
    pub(crate) fn new(seed: u64) -> Self {
        Self { seed, random: ChaCha12Rng::seed_from_u64(seed), deck: Vec::new() }
    }

    /// What the act is made of. Of two acts in a row one has a first volume of an odd size, and one has a second volume.
    pub(crate) fn act(&mut self) -> Cast {
        let (kind, cycles) = match self.random.random_range(0..10) {
            0..=6 => (ClientKind::Load, self.random.random_range(4..=10)),
            7 => (ClientKind::Fio, self.random.random_range(1..=3)),
            _ => (ClientKind::Guest, self.random.random_range(4..=8)),
        };
        let is_odd = self.seed.is_multiple_of(2);
        let bytes = self.size(is_odd);
        let beside = (self.seed % 3 != 2).then(|| self.size(!is_odd));
        Cast { kind, cycles, bytes, beside }
    }

    /// An odd size is a multiple of a sector, and of nothing larger that anybody works with.
    fn size(&mut self, is_odd: bool) -> u64 {
        if !is_odd {
            return EVEN_BYTES;
        }
        let sectors = self.random.random_range(0..64) * SECTORS + self.random.random_range(1..SECTORS);
        (24 << 20) + sectors * SECTOR_BYTES
    }

    /// Whether the second volume moves in cycle `number` as well.
    pub(crate) fn moves_beside(&mut self, number: u32) -> bool {
        number == 1 || self.one_in(2)
    }

    /// The next place, one of `places`.
    fn deal(&mut self, places: &[Place]) -> Place {
        loop {
            if let Some(at) = self.deck.iter().position(|place| places.contains(place)) {
                return self.deck.remove(at);
            }
            self.deck = Place::ALL.into();
            self.deck.shuffle(&mut self.random);
        }
    }

    /// A seed for somebody else.
    pub(crate) fn seed(&mut self) -> u64 {
        self.random.random_range(1..u64::from(u32::MAX))
    }

    fn one_in(&mut self, count: u32) -> bool {
        self.random.random_range(0..count) == 0
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.random.random_range(0..from.len())]
    }

    fn millis(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(self.random.random_range(from..=to))
    }

    /// The next cycle of an act, to one of `places`.
    pub(crate) fn plan(&mut self, kind: ClientKind, places: &[Place]) -> Plan {
        // An adopted disk is given back to its VM as a file, and fio does not wait for a server.
        let files: Vec<Place> = places.iter().copied().filter(|place| *place != Place::Server).collect();
        let place = self.deal(if kind == ClientKind::Load { places } else { &files });
        let mut plan = Plan {
            place,
            verify: self.pick(&["off", "sample", "full", "full"]),
            strategy: self.pick(&STRATEGIES),
            bandwidth: self.pick(&[0, 12, 16, 24, 32, 64]),
            delete_source: self.one_in(3),
            overwrite_kept: self.one_in(2),
            faults: Vec::new(),
            surrogate: false,
            cache: None,
            readopt: self.one_in(3),
        };
        let count = self.random.random_range(0..=BLOWS_MAX);
        if place == Place::Small && self.one_in(2) {
            // So slow that the move cannot be over before the file system is full.
            plan.bandwidth = 4;
            plan.faults.push((self.millis(0, 100), InjectedFault::Fill));
        }
        if place == Place::Server && self.one_in(2) {
            plan.faults.push((self.millis(50, 600), InjectedFault::StartWithoutServer(self.millis(50, 2500))));
        }
        let pause = CYCLE.as_millis() as u64 / (count.max(1) as u64);
        while plan.faults.len() < count {
            let fault = self.fault(kind);
            let is_filled = plan.faults.iter().any(|(_, fault)| *fault == InjectedFault::Fill);
            if !(is_filled && matches!(fault, InjectedFault::Bandwidth(_))) {
                plan.faults.push((self.millis(0, pause), fault));
            }
        }
        // Drawn last: what else a seed draws does not depend on it.
        plan.surrogate = self.one_in(3);
        let mode = self.pick(&["write-back", "write-back", "write-through", "read-only"]);
        plan.cache = self.one_in(2).then_some(mode);
        plan
    }

    /// What the second volume does in a cycle: what strikes the daemon is the first one's.
    pub(crate) fn plan_beside(&mut self, places: &[Place]) -> Plan {
        let mut plan = self.plan(ClientKind::Load, places);
        plan.faults.retain(|(_, fault)| fault.is_of_volume());
        plan
    }

    fn fault(&mut self, kind: ClientKind) -> InjectedFault {
        loop {
            let fault = match self.random.random_range(0..20) {
                0..=3 => InjectedFault::Kill,
                4 => InjectedFault::KillAgain(self.millis(0, 40)),
                5 => InjectedFault::Restart,
                6 => InjectedFault::Freeze(self.millis(20, 400)),
                7 => InjectedFault::FreezeClient(self.millis(20, 400)),
                8 | 9 => InjectedFault::Cut(self.millis(0, 60)),
                10 => InjectedFault::Hold(self.millis(20, 300)),
                11 => InjectedFault::Trickle(self.random.random_range(20_000..400_000), self.millis(50, 300)),
                12 | 13 => InjectedFault::Bandwidth(self.pick(&[0, 8, 16, 128])),
                14 | 15 => InjectedFault::Stall(self.random.random_range(0..64), self.millis(50, 400)),
                16 => InjectedFault::Pause(self.millis(20, 300)),
                17 | 18 => InjectedFault::StartWithoutServer(self.millis(50, 2500)),
                _ => InjectedFault::Cancel,
            };
            if fault.suits(kind) {
                return fault;
            }
        }
    }
}

impl InjectedFault {
    /// How often the daemon is killed by it.
    pub(crate) const fn kills(self) -> u64 {
        match self {
            Self::Kill | Self::StartWithoutServer(_) => 1,
            Self::KillAgain(_) => 2,
            _ => 0,
        }
    }

    /// Whether another daemon goes on after it.
    pub(crate) const fn restarts(self) -> bool {
        matches!(self, Self::Kill | Self::KillAgain(_) | Self::Restart | Self::StartWithoutServer(_))
    }

    /// Whether it strikes one volume or its client alone.
    const fn is_of_volume(self) -> bool {
        matches!(
            self,
            Self::FreezeClient(_)
                | Self::Hold(_)
                | Self::Trickle(..)
                | Self::Bandwidth(_)
                | Self::Pause(_)
                | Self::Cancel
        )
    }

    /// Whether a client of this kind must survive it.
    pub(crate) fn suits(self, kind: ClientKind) -> bool {
        match self {
            Self::Kill | Self::KillAgain(_) | Self::Restart => kind != ClientKind::Fio,
            Self::Cut(_) | Self::Stall(..) | Self::Hold(_) | Self::Trickle(..) | Self::StartWithoutServer(_) => {
                kind == ClientKind::Load
            }
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_draws_the_same_cycles_again_and_another_seed_draws_others() {
        let draw = |seed| {
            let mut rng = Rng::new(seed);
            let cast = rng.act();
            let plans = (0..cast.cycles).map(|_| (rng.plan(cast.kind, &Place::ALL), rng.plan_beside(&Place::ALL)));
            (cast, plans.collect::<Vec<_>>())
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }

    #[test]
    fn every_kind_of_client_place_and_blow_is_drawn_and_nobody_gets_what_would_break_him() {
        let (mut kinds, mut places, mut faults) = (Vec::new(), Vec::new(), std::collections::BTreeSet::new());
        let mut strategies = std::collections::BTreeSet::new();
        for seed in 0..300 {
            let mut rng = Rng::new(seed);
            let Cast { kind, cycles, .. } = rng.act();
            kinds.push(kind);
            for _ in 0..cycles {
                let plan = rng.plan(kind, &Place::ALL);
                places.push(plan.place);
                strategies.insert(plan.strategy_from(Place::Disk));
                assert!(plan.place.has_room() || plan.strategy_from(Place::Disk) != "snapshot", "{plan:?}");
                assert_ne!(plan.strategy_from(Place::Small), "snapshot");
                assert!(plan.faults.iter().all(|(_, fault)| fault.suits(kind)), "{kind:?}: {plan:?}");
                faults.extend(plan.faults.iter().map(|(_, fault)| {
                    let name = format!("{fault:?}");
                    name.split('(').next().unwrap_or_default().to_owned()
                }));
                let beside = rng.plan_beside(&[Place::Disk, Place::Xfs]);
                assert!(
                    beside.place.has_room() && beside.faults.iter().all(|(_, fault)| fault.is_of_volume()),
                    "{beside:?}"
                );
            }
        }
        for kind in [ClientKind::Load, ClientKind::Fio, ClientKind::Guest] {
            assert!(kinds.contains(&kind), "no {kind:?}");
        }
        assert!(Place::ALL.iter().all(|place| places.contains(place)));
        assert_eq!(faults.len(), 14, "{faults:?}");
        assert_eq!(strategies, STRATEGIES.into());
    }

    #[test]
    fn two_acts_in_a_row_have_every_kind_of_size_and_a_second_volume() {
        let is_odd = |bytes: u64| bytes.is_multiple_of(512) && !bytes.is_multiple_of(4096);
        for seed in 0..100 {
            let casts = [seed, seed + 1].map(|seed| Rng::new(seed).act());
            assert_eq!(casts.iter().filter(|cast| is_odd(cast.bytes)).count(), 1, "{casts:?}");
            assert!(casts.iter().any(|cast| cast.beside.is_some()), "{casts:?}");
        }
    }

    #[test]
    fn seven_places_in_a_row_are_all_of_them() {
        let mut rng = Rng::new(5);
        for _ in 0..20 {
            let dealt: Vec<Place> = (0..7).map(|_| rng.deal(&Place::ALL)).collect();
            assert!(Place::ALL.iter().all(|place| dealt.contains(place)), "{dealt:?}");
        }
        assert_eq!(rng.deal(&[Place::Disk]), Place::Disk);
        assert_eq!(rng.deal(&[Place::Disk]), Place::Disk);
    }

    #[test]
    fn a_file_system_is_filled_before_the_move_can_be_over() {
        for seed in 0..300 {
            let mut rng = Rng::new(seed);
            let kind = rng.act().kind;
            let plan = rng.plan(kind, &Place::ALL);
            if let Some(at) = plan.faults.iter().position(|(_, fault)| *fault == InjectedFault::Fill) {
                assert_eq!((at, plan.bandwidth, plan.place), (0, 4, Place::Small), "{plan:?}");
            }
        }
    }
}
