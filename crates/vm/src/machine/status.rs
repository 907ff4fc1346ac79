//! What `query-migrate` says.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Where QEMU's migration stands, by QEMU's own names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum MigrationPhase {
    /// There was none yet.
    #[default]
    None,
    /// It is being set up.
    Setup,
    /// Memory is copied while the guest runs.
    Active,
    /// The guest is stopped and QEMU waits for [`switch_over`](super::switch_over).
    PreSwitchover,
    /// The state of the devices is sent.
    Device,
    /// The guest runs at the target while its memory follows.
    PostcopyActive,
    /// The connection was lost after the guest went to the target.
    PostcopyPaused,
    /// That connection is being made again.
    PostcopyRecover,
    /// Everything was sent, or was loaded.
    Completed,
    /// It has failed.
    Failed,
    /// It is being cancelled.
    Cancelling,
    /// It was cancelled.
    Cancelled,
    /// A phase that this version does not know.
    Other(String),
}

/// The phases that have nothing to tell but their name.
const NAMED: [(&str, MigrationPhase); 12] = [
    ("none", MigrationPhase::None),
    ("setup", MigrationPhase::Setup),
    ("active", MigrationPhase::Active),
    ("pre-switchover", MigrationPhase::PreSwitchover),
    ("device", MigrationPhase::Device),
    ("postcopy-active", MigrationPhase::PostcopyActive),
    ("postcopy-paused", MigrationPhase::PostcopyPaused),
    ("postcopy-recover", MigrationPhase::PostcopyRecover),
    ("completed", MigrationPhase::Completed),
    ("failed", MigrationPhase::Failed),
    ("cancelling", MigrationPhase::Cancelling),
    ("cancelled", MigrationPhase::Cancelled),
];

impl MigrationPhase {
    /// QEMU's name of it.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Other(name) => name,
            known => NAMED.iter().find(|(_, phase)| phase == known).map_or("none", |(name, _)| name),
        }
    }

    /// Whether a migration is under way, in whatever phase. One that is unknown counts as under way: nothing may be
    /// concluded from it.
    #[must_use]
    pub fn is_under_way(&self) -> bool {
        !matches!(self, Self::None | Self::Completed | Self::Failed | Self::Cancelled)
    }

    /// Whether the guest may run at the target while its memory follows, or would if the connection was there.
    #[must_use]
    pub fn is_postcopy(&self) -> bool {
        matches!(self, Self::PostcopyActive | Self::PostcopyPaused | Self::PostcopyRecover)
    }

    /// Whether it has come to nothing.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        matches!(self, Self::Failed | Self::Cancelled)
    }
}

impl From<String> for MigrationPhase {
    fn from(name: String) -> Self {
        match NAMED.iter().find(|(known, _)| *known == name) {
            Some((_, phase)) => phase.clone(),
            None => Self::Other(name),
        }
    }
}

impl From<MigrationPhase> for String {
    fn from(phase: MigrationPhase) -> Self {
        phase.name().to_owned()
    }
}

impl std::fmt::Display for MigrationPhase {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(self.name())
    }
}

/// How far a migration is. What QEMU does not tell in a phase is zero or nothing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MigrationStatus {
    /// The phase.
    pub phase: MigrationPhase,
    /// Bytes that went over the wire.
    pub bytes_transferred: u64,
    /// Bytes of memory that are still to be sent, as of the last pass.
    pub bytes_remaining: u64,
    /// The guest's memory.
    pub bytes_total: u64,
    /// How fast the guest makes memory dirty.
    pub dirty_bytes_per_second: u64,
    /// The rate of late, in megabits a second.
    pub mbps: f64,
    /// How long the guest would be stopped if it were switched over now.
    pub expected_downtime: Option<Duration>,
    /// How long it was stopped. QEMU tells it once the migration is completed.
    pub downtime: Option<Duration>,
    /// How long the setup took.
    pub setup_time: Option<Duration>,
    /// How long all has taken so far.
    pub total_time: Option<Duration>,
    /// Passes over the memory.
    pub iterations: u64,
    /// How much of the guest's processor time auto-converge takes away, in percent.
    pub throttle_percent: u64,
    /// QEMU's words for a failure.
    pub error: Option<String>,
}

impl MigrationStatus {
    /// From what `query-migrate` says.
    pub(super) fn parse(said: &Value) -> Self {
        let ram = &said["ram"];
        let bytes = |name: &str| ram[name].as_u64().unwrap_or_default();
        let time = |name: &str| said[name].as_u64().map(Duration::from_millis);
        Self {
            phase: said["status"].as_str().unwrap_or("none").to_owned().into(),
            bytes_transferred: bytes("transferred"),
            bytes_remaining: bytes("remaining"),
            bytes_total: bytes("total"),
            // QEMU tells a rate of pages.
            dirty_bytes_per_second: bytes("dirty-pages-rate").saturating_mul(bytes("page-size")),
            mbps: ram["mbps"].as_f64().unwrap_or_default(),
            expected_downtime: time("expected-downtime"),
            downtime: time("downtime"),
            setup_time: time("setup-time"),
            total_time: time("total-time"),
            iterations: bytes("dirty-sync-count"),
            throttle_percent: said["cpu-throttle-percentage"].as_u64().unwrap_or_default(),
            error: said["error-desc"].as_str().map(str::to_owned),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_qemu_says_is_understood_and_what_it_leaves_out_is_nothing() {
        assert_eq!(MigrationStatus::parse(&json!({})), MigrationStatus::default());
        let status = MigrationStatus::parse(&json!({
            "status": "active", "expected-downtime": 300, "setup-time": 2, "total-time": 1500,
            "ram": { "transferred": 10, "remaining": 20, "total": 30, "dirty-pages-rate": 5, "page-size": 4096,
                     "mbps": 1.5, "dirty-sync-count": 3 },
        }));
        assert_eq!(status.phase, MigrationPhase::Active);
        assert_eq!((status.bytes_transferred, status.bytes_remaining, status.bytes_total), (10, 20, 30));
        assert_eq!((status.dirty_bytes_per_second, status.iterations), (20480, 3));
        assert_eq!((status.expected_downtime, status.downtime), (Some(Duration::from_millis(300)), None));
        let failed = MigrationStatus::parse(&json!({ "status": "failed", "error-desc": "no route" }));
        assert!(failed.phase.has_failed() && !failed.phase.is_under_way());
        assert_eq!(failed.error.as_deref(), Some("no route"));
    }

    #[test]
    fn phases_have_qemus_names() {
        for (name, phase) in NAMED {
            assert_eq!(phase.name(), name);
            assert_eq!(MigrationPhase::from(name.to_owned()), phase);
            assert_eq!(serde_json::to_value(&phase).expect("JSON"), name);
        }
        let other = MigrationPhase::from("wait-unplug".to_owned());
        assert_eq!((other.name(), other.is_under_way()), ("wait-unplug", true));
    }
}
