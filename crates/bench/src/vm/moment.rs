//! When QEMU stops and starts a guest, by its own clock.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use serde_json::Value;
use transhume_guest::Qmp;

/// How long an event may be on its way that was there before.
const LIMIT: Duration = Duration::from_secs(10);

/// The monitor of one QEMU, for its events.
pub(crate) struct Witness(Qmp);

impl Witness {
    /// Listens to the second monitor of the QEMU whose sockets are in `folder`.
    pub(crate) fn of(folder: &Path) -> anyhow::Result<Self> {
        Ok(Self(Qmp::connect(&folder.join("qmp2.sock"), LIMIT)?))
    }

    /// When the event came, in milliseconds since 1970.
    pub(crate) fn when(&mut self, event: &str) -> anyhow::Result<f64> {
        unix_ms(&self.0.wait_for_event(event, LIMIT)?)
    }
}

/// When an event came, in milliseconds since 1970.
pub(crate) fn unix_ms(event: &Value) -> anyhow::Result<f64> {
    let part = |name: &str| event["timestamp"][name].as_f64().context("QEMU's events have times");
    Ok(part("seconds")? * 1e3 + part("microseconds")? / 1e3)
}

/// Now, in milliseconds since 1970.
pub(crate) fn now_unix_ms() -> f64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.unwrap_or_default().as_secs_f64() * 1e3
}
