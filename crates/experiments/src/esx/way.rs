//! How the evaluation's moves are carried out: the paper's systems, with the limits of the paper's, and ours as it is.
//!
//! The paper's data mover never has more than 16 copies outstanding (3.1) and pays no regard to the guest. VMware has
//! published since that its copies are of 64 KiB, and that mirroring asks it for [`TRANSFER_BYTES`] at a time. The
//! second is the window of the paper's mirror (2.4). DBT has passes instead of a window, and 16 copies whatever is left
//! of a pass. Snapshotting consolidates with 16 requests outstanding: the paper ran the version that used the data
//! mover.
//!
//! DBT aims at a downtime of 5 s and takes total time into account. It forces the last copy if that is "short enough",
//! which came to more than 28 s (3.2). The paper does not state how much time it takes and how short is enough.
//! [`OFFLINES_MAX`] and [`FORCED_SECONDS_MAX`] are assumed.

use migrate::{MoveOptions, OnNoConverge, Strategy};

use super::allocated::FileCosts;
use super::paper;

/// The size of a copy of the paper's mover.
const PAPER_COPY_BYTES: u64 = 64 << 10;
/// 16 of them are outstanding.
const PAPER_WINDOW_BYTES: u64 = 16 * PAPER_COPY_BYTES;
/// What mirroring has the mover copy at once. It is divided by the scale as disks are, so that as many of the guest's writes
/// meet it.
const TRANSFER_BYTES: u64 = 32 << 20;
/// But no smaller than this: the mover is idle for a moment between two of them.
const TRANSFER_BYTES_MIN: u64 = 4 << 20;
/// Snapshotting always converges (3.4), however long the guest is held at the end.
const FOR_EVER_MS: u64 = 86_400_000;
/// A move that tracks may take so many times what the offline copy takes. Incremental DBT with 32 outstanding takes
/// nearly four times what it takes with two.
const OFFLINES_MAX: f64 = 4.0;
/// The downtime that moves by DBT aim at which are content with more than 5 s: whatever may be forced.
pub(super) const LONG_HOLD_SECONDS: f64 = FORCED_SECONDS_MAX;
/// The longest downtime that is forced on a guest.
const FORCED_SECONDS_MAX: f64 = 45.0;
/// How fast the offline copy is, in bytes a second: 38 GiB in 176 s.
const COPY_RATE: f64 = 232e6;
/// What is tracked in the control that tracks what the guest writes.
const FINE_BYTES: u64 = 8 << 10;
/// A latency that no guest has: the copy never yields.
const NEVER_US: u64 = 3_600_000_000;

/// One way to move a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Way {
    /// IO mirroring to the paper's letter: two offsets, one window, and the paper's data mover.
    PaperMirror,
    /// Dirty block tracking with the paper's data mover.
    Dbt,
    /// The same, not tracking ahead of the copy.
    IncrementalDbt,
    /// DBT that forces whatever downtime it takes on the guest. Only where it is asked for.
    DbtUnlimited,
    /// The same, not tracking ahead of the copy.
    IncrementalDbtUnlimited,
    /// Incremental DBT, and putting off copies of hot blocks. Only where it is asked for.
    HotDbt,
    /// Snapshotting with the paper's data mover.
    Snapshot,
    /// The same, with overlays that allocate what is written to them. Only where it is asked for.
    SnapshotAllocated,
    /// The same, with overlays in which blocks are looked up. Only where it is asked for.
    SnapshotLookedUp,
    /// DBT that ends within its first copy. Only where it is asked for.
    DbtFirstCopy,
    /// The same, not tracking ahead of the copy.
    IncrementalDbtFirstCopy,
    /// DBT that is content with a downtime of [`LONG_HOLD_SECONDS`]. Only where it is asked for.
    DbtLongHold,
    /// The same, not tracking ahead of the copy.
    IncrementalDbtLongHold,
    /// DBT that tracks blocks of the guest's size. Only where it is asked for.
    FineDbt,
    /// The same, not tracking ahead of the copy.
    FineIncrementalDbt,
    /// Our mirror with our pace, its defaults.
    Mirror,
    /// The same, which pays no regard to the guest. Only where it is asked for.
    MirrorUnpaced,
    /// Our asynchronous mirror, with a buffer as much smaller as the disk. Only where it is asked for.
    MirrorAsync,
    /// The strategy that chooses for itself, with our pace. Only where it is asked for.
    Auto,
}

impl Way {
    /// All of them that every figure has.
    pub(super) const ALL: &[Self] = &[Self::Snapshot, Self::Dbt, Self::IncrementalDbt, Self::PaperMirror, Self::Mirror];
    /// Those that track dirty blocks, with the paper's data mover.
    pub(super) const TRACKING: &[Self] = &[Self::Dbt, Self::IncrementalDbt];
    /// By which factor the paper's time grows from 2 to 32 outstanding.
    pub(super) const GROWTHS: &[(Self, f64)] = &[
        (Self::Dbt, paper::GROWTH_DBT),
        (Self::IncrementalDbt, paper::GROWTH_INCREMENTAL),
        (Self::Snapshot, paper::GROWTH_SNAPSHOT),
        (Self::PaperMirror, paper::GROWTH_MIRROR),
    ];
    /// By which part the paper's time grows more than the disk.
    pub(super) const BEYOND_SIZES: &[(Self, f64)] = &[
        (Self::Dbt, paper::BEYOND_SIZE.dbt),
        (Self::IncrementalDbt, paper::BEYOND_SIZE.incremental),
        (Self::Snapshot, paper::BEYOND_SIZE.snapshot),
        (Self::PaperMirror, paper::BEYOND_SIZE.mirror),
    ];
    /// What the guest loses in the paper, beside the mirror's.
    pub(super) const PENALTIES: &[(Self, f64)] =
        &[(Self::Dbt, paper::PENALTY_DBT), (Self::Snapshot, paper::PENALTY_SNAPSHOT)];

    /// What it is called in plots and tables.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Dbt => "DBT, the paper's mover",
            Self::IncrementalDbt => "incremental DBT, the paper's mover",
            Self::HotDbt => "incremental DBT without hot blocks, the paper's mover",
            Self::DbtUnlimited => "DBT that forces any downtime, the paper's mover",
            Self::IncrementalDbtUnlimited => "incremental DBT that forces any downtime, the paper's mover",
            Self::Snapshot => "snapshotting, the paper's mover",
            Self::SnapshotAllocated => "snapshotting into files that allocate, the paper's mover",
            Self::SnapshotLookedUp => "snapshotting into files that are looked up, the paper's mover",
            Self::PaperMirror => "IO mirroring, the paper's",
            Self::DbtFirstCopy => "DBT's first copy, the paper's mover",
            Self::IncrementalDbtFirstCopy => "incremental DBT's first copy, the paper's mover",
            Self::DbtLongHold => "DBT that is content with a longer downtime, the paper's mover",
            Self::IncrementalDbtLongHold => "incremental DBT that is content with a longer downtime, the paper's mover",
            Self::FineDbt => "DBT in blocks of 8 KiB, the paper's mover",
            Self::FineIncrementalDbt => "incremental DBT in blocks of 8 KiB, the paper's mover",
            Self::Mirror => "mirror, ours",
            Self::MirrorUnpaced => "mirror that pays no regard to the guest, ours",
            Self::MirrorAsync => "asynchronous mirror, ours",
            Self::Auto => "auto",
        }
    }

    /// Its colour in every plot.
    pub(super) const fn colour(self) -> usize {
        match self {
            Self::Dbt | Self::DbtUnlimited | Self::DbtFirstCopy | Self::DbtLongHold => 1,
            Self::IncrementalDbt
            | Self::IncrementalDbtUnlimited
            | Self::IncrementalDbtFirstCopy
            | Self::IncrementalDbtLongHold => 2,
            Self::PaperMirror => 3,
            Self::Mirror | Self::MirrorUnpaced | Self::FineDbt | Self::FineIncrementalDbt => 0,
            Self::MirrorAsync => 4,
            Self::Auto => 5,
            Self::HotDbt => 6,
            Self::Snapshot | Self::SnapshotAllocated | Self::SnapshotLookedUp => 7,
        }
    }

    /// What overlays cost that are files in which blocks are allocated.
    pub(super) const fn overlay_files(self) -> Option<FileCosts> {
        match self {
            Self::SnapshotAllocated => Some(FileCosts::ALLOCATES),
            Self::SnapshotLookedUp => Some(FileCosts::LOOKS_UP),
            _ => None,
        }
    }

    /// Whether the guest writes to overlays meanwhile.
    pub(super) const fn takes_snapshots(self) -> bool {
        matches!(self, Self::Snapshot | Self::SnapshotAllocated | Self::SnapshotLookedUp)
    }

    /// What the engine is asked for to move `bytes`, with limits of time `scale` times shorter.
    pub(super) fn options(self, bytes: u64, scale: u64) -> MoveOptions {
        let scaled = |seconds: f64| (seconds * 1e3 / scale as f64).max(1.0) as u64;
        let ours = MoveOptions { quiesce_ms: 5_000, ..MoveOptions::default() };
        let paper = MoveOptions {
            window_bytes_max: PAPER_WINDOW_BYTES,
            copy_bytes_max: PAPER_COPY_BYTES,
            guest_latency_us: NEVER_US,
            downtime_limit_ms: scaled(paper::DOWNTIME_LIMIT_SECONDS),
            on_no_converge: OnNoConverge::Force,
            forced_downtime_ms_max: scaled(FORCED_SECONDS_MAX),
            ..ours.clone()
        };
        let offline = bytes as f64 * scale as f64 / COPY_RATE;
        let tracking = MoveOptions { deadline_ms: Some(scaled(offline * OFFLINES_MAX)), ..paper.clone() };
        let long_hold = MoveOptions { downtime_limit_ms: scaled(LONG_HOLD_SECONDS), ..tracking.clone() };
        let first_copy =
            MoveOptions { deadline_ms: Some(scaled(offline)), on_no_converge: OnNoConverge::Abort, ..paper.clone() };
        let unlimited = MoveOptions { forced_downtime_ms_max: FOR_EVER_MS, ..tracking.clone() };
        match self {
            Self::Dbt => MoveOptions { strategy: Strategy::Dbt, ..tracking },
            Self::IncrementalDbt => MoveOptions { strategy: Strategy::IncrementalDbt, ..tracking },
            Self::DbtUnlimited => MoveOptions { strategy: Strategy::Dbt, ..unlimited },
            Self::IncrementalDbtUnlimited => MoveOptions { strategy: Strategy::IncrementalDbt, ..unlimited },
            Self::HotDbt => MoveOptions { strategy: Strategy::IncrementalDbt, hot_blocks: true, ..tracking },
            Self::Snapshot | Self::SnapshotAllocated | Self::SnapshotLookedUp => {
                MoveOptions { strategy: Strategy::Snapshot, forced_downtime_ms_max: FOR_EVER_MS, ..paper }
            }
            Self::PaperMirror => {
                let window_bytes_max = (TRANSFER_BYTES / scale).max(TRANSFER_BYTES_MIN);
                MoveOptions { strategy: Strategy::MirrorPaper, window_bytes_max, ..paper }
            }
            Self::DbtFirstCopy => MoveOptions { strategy: Strategy::Dbt, ..first_copy },
            Self::IncrementalDbtFirstCopy => MoveOptions { strategy: Strategy::IncrementalDbt, ..first_copy },
            Self::DbtLongHold => MoveOptions { strategy: Strategy::Dbt, ..long_hold },
            Self::IncrementalDbtLongHold => MoveOptions { strategy: Strategy::IncrementalDbt, ..long_hold },
            Self::FineDbt => MoveOptions { strategy: Strategy::Dbt, chunk_bytes: FINE_BYTES, ..tracking },
            Self::FineIncrementalDbt => {
                MoveOptions { strategy: Strategy::IncrementalDbt, chunk_bytes: FINE_BYTES, ..tracking }
            }
            Self::Mirror => MoveOptions { strategy: Strategy::Mirror, ..ours },
            Self::MirrorUnpaced => MoveOptions { strategy: Strategy::Mirror, guest_latency_us: NEVER_US, ..ours },
            Self::Auto => MoveOptions { strategy: Strategy::Auto, ..ours },
            Self::MirrorAsync => {
                let buffer = (MoveOptions::BUFFER_BYTES / scale).max(1 << 20);
                MoveOptions { strategy: Strategy::MirrorAsync, buffer_bytes: Some(buffer), ..ours }
            }
        }
    }
}
