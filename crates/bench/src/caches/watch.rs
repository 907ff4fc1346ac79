//! What the volume's cache and the network of the store tell twice a second, at both hosts.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use serde_json::{Value, json};
use transhume_guest::{Daemon, Side, TwoHosts};

use super::VOLUME;
use crate::vm::moment::now_unix_ms;

/// How often it is asked.
const INTERVAL: Duration = Duration::from_millis(500);
/// The host's interface in the network of the store.
const INTERFACE: &str = "guests:";

/// What one host says at one time. Counters are of the cache, which is another one once it has moved.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) unix_ms: f64,
    pub(super) side: Side,
    pub(super) hits: u64,
    /// Reads that the flash alone did not answer.
    pub(super) misses: u64,
    /// Whether the guest goes past the cache.
    pub(super) withheld: bool,
    /// What has come of the source's cache and of the store for it, and what was read remotely, in blocks.
    pub(super) arrived: [u64; 3],
    /// Whether the transfer is over. True of a cache that has not come from elsewhere.
    pub(super) over: bool,
    /// What came from the store, in bytes, with the headers of the network.
    pub(super) store_read: u64,
}

impl Seen {
    pub(super) fn json(&self) -> Value {
        json!({
            "unix_ms": self.unix_ms, "host": self.side.name(), "hits": self.hits, "misses": self.misses,
            "withheld": self.withheld, "from_source": self.arrived[0], "from_storage": self.arrived[1],
            "read_remotely": self.arrived[2], "over": self.over, "store_read_bytes": self.store_read,
        })
    }
}

/// What the cache of the volume has done at this host; null if it has none there.
pub(super) fn cached(daemon: &Daemon) -> Value {
    // A host that does not have the volume yet refuses.
    let layers = daemon.ask(&["volume", "layer", "ls", VOLUME]).ok().and_then(Result::ok).unwrap_or_default();
    let layers = layers.as_array().cloned().unwrap_or_default();
    layers.into_iter().find(|layer| layer["kind"] == "cache").unwrap_or_default()["cached"].clone()
}

/// Everything that was seen so far, of both hosts.
#[derive(Default)]
pub(super) struct Watch {
    seen: Mutex<Vec<Seen>>,
    is_over: AtomicBool,
}

impl Watch {
    /// Asks one host until [`Watch::end`]. The thread is in the host's network from then on.
    pub(super) fn follow(&self, hosts: &TwoHosts, side: Side) -> anyhow::Result<()> {
        hosts.enter(side)?;
        let mut next = Instant::now();
        while !self.is_over.load(Ordering::SeqCst) {
            let seen = look(hosts, side)?;
            self.seen.lock().expect("nobody panics with it").extend(seen);
            next += INTERVAL;
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
        }
        Ok(())
    }

    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::SeqCst);
    }

    /// What one host has said so far, the oldest first.
    pub(super) fn of(&self, side: Side) -> Vec<Seen> {
        let seen = self.seen.lock().expect("nobody panics with it");
        seen.iter().filter(|seen| seen.side == side).cloned().collect()
    }
}

fn look(hosts: &TwoHosts, side: Side) -> anyhow::Result<Option<Seen>> {
    let text = std::fs::read_to_string("/proc/thread-self/net/dev").context("reading the counters of a network")?;
    let line = text.lines().find_map(|line| line.trim().strip_prefix(INTERFACE)).context("the host has no store")?;
    let store_read = line.split_whitespace().next().and_then(|field| field.parse().ok()).context("a counter")?;
    let unix_ms = now_unix_ms();
    let cached = cached(hosts.daemon(side));
    if cached.is_null() {
        return Ok(None);
    }
    let number = |of: &Value, name: &str| of[name].as_u64().unwrap_or_default();
    let arrival = &cached["arrival"];
    Ok(Some(Seen {
        unix_ms,
        side,
        hits: number(&cached, "hits"),
        misses: number(&cached, "misses") + number(&cached, "hits_partial"),
        withheld: arrival["withheld"] == true,
        arrived: ["from_source", "from_storage", "read_remotely"].map(|name| number(arrival, name)),
        over: arrival.is_null() || arrival["over"] == true,
        store_read,
    }))
}
