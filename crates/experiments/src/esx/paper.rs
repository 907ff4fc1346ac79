//! The numbers that the paper states, each with its place. Its plots give no others: they were not measured off the page.

/// The offline copy of the 32 GB and the 6 GB disk, in seconds (3.1).
pub(super) const OFFLINE_SECONDS: f64 = 176.0;
/// By which part IO mirroring takes longer than that with 2 and with 32 outstanding (3.1).
pub(super) const MIRROR_LONGER: [(usize, f64); 2] = [(2, 0.058), (32, 0.157)];
/// By which factor migration time grows from 2 to 32 outstanding (figure 4's caption).
pub(super) const GROWTH_MIRROR: f64 = 1.118;
/// The same for DBT.
pub(super) const GROWTH_DBT: f64 = 2.74;
/// The same for incremental DBT.
pub(super) const GROWTH_INCREMENTAL: f64 = 3.96;
/// The same for snapshotting.
pub(super) const GROWTH_SNAPSHOT: f64 = 1.4;
/// By which factor the guest's throughput grows from 2 to 32 outstanding (3.1).
pub(super) const GROWTH_GUEST: f64 = 4.9;
/// By which part more than sevenfold the time grows from 4 to 64 GB (figure 5's caption).
pub(super) const BEYOND_SIZE: BeyondSize = BeyondSize { dbt: 0.13, incremental: 0.024, snapshot: 0.85, mirror: 0.034 };
/// What DBT takes to move the mailbox disk under Exchange, and its downtime, in seconds (table 1).
pub(super) const EXCHANGE_DBT: (f64, f64) = (2935.5, 13.297);
/// The same for incremental DBT.
pub(super) const EXCHANGE_INCREMENTAL: (f64, f64) = (2638.9, 7.557);
/// What DBT's choices keep the downtime under, in seconds (3.2).
pub(super) const DOWNTIME_LIMIT_SECONDS: f64 = 5.0;
/// The downtime that the paper forced on its guest with 32 outstanding was more than this, in seconds (3.2).
pub(super) const FORCED_DOWNTIME_SECONDS: f64 = 28.0;
/// IO mirroring's downtime is below this (figures 6 and 7).
pub(super) const MIRROR_DOWNTIME: f64 = 0.5;
/// What the guest loses with DBT while its disk moves (section 5).
pub(super) const PENALTY_DBT: f64 = 0.32;
/// The same with snapshotting ("around 70 %").
pub(super) const PENALTY_SNAPSHOT: f64 = 0.70;
/// The same for IO mirroring.
pub(super) const PENALTY_MIRROR: f64 = 0.34;
/// Reads and writes a second before the move to NFS and after it, from figure 10's caption. The paper's text says 200
/// reads and 95 writes after it, the caption the other way round.
pub(super) const NFS_IOPS: [[f64; 2]; 2] = [[2600.0, 1100.0], [200.0, 95.0]];

/// See [`BEYOND_SIZE`].
pub(super) struct BeyondSize {
    pub(super) dbt: f64,
    pub(super) incremental: f64,
    pub(super) snapshot: f64,
    pub(super) mirror: f64,
}
