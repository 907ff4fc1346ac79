//! How fast moves to other hosts may go, and at whose cost (PMigrate, section 3.2).
//!
//! ```text
//!   this host's kernel                        the other host's kernel
//!     counters of each interface                counters of each interface
//!        │                                         ▲
//!        ▼ every second                            │ every second, over the wire: Ask::Usage
//!   ┌─ keeper, one a move ─────────────────────────┴──┐
//!   │ agreement: others = counters - all moves'       │──▶ a rate for each stream (Remote::set_rate)
//!   │ deadline:  needed = what is left / time left    │──▶ the copy's threads give way, or do not
//!   └─────────────────────────────────────────────────┘
//! ```
//! Beside its kernel's counters each host says what its own moves were of that, in either role, and how many they are:
//! `traffic` counts it in the connections.
//!
//! A move takes its part of what others leave of an interface, on both hosts. Other moves do not count as others,
//! whatever hosts they are between. A move may always take its reserve, and what it needs for its deadline. The limit
//! that a user sets (`--bandwidth`) belongs to the migration and stays above all of this. The guest does, too: the
//! migration's latency controller slows the copy down when the guest feels it, whatever rate is allowed here.
//!
//! | module | what it is |
//! |---|---|
//! | `capacity` | what a way to another host carries at most, for what is foretold |
//! | `traffic` | what moves have carried by each address, and how many they are |
//! | `interfaces` | which interface has an address, and what it has carried |
//! | `agreement` | from both hosts' counters to rates of streams; pure |
//! | `deadline` | what is needed, and whether it is at risk; pure |
//! | `controller` | looks and acts once a second |

mod agreement;
mod capacity;
mod controller;
mod deadline;
mod interfaces;
mod traffic;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use migrate::stream::{LinkCounters, StreamPath};

pub(crate) use agreement::{Agreed, Agreement, RateSample, StreamSample};
pub(crate) use capacity::capacity;
pub(crate) use controller::{ControllerContext, keep};
pub(crate) use interfaces::KernelInterfaces;
pub(crate) use traffic::{Counted, Meter, MigrationTraffic};

/// The addresses that streams run between, each once: this host's, and the other's.
pub(crate) fn addresses(paths: &[Option<StreamPath>]) -> [Vec<IpAddr>; 2] {
    let (here, there): (BTreeSet<_>, BTreeSet<_>) = paths.iter().flatten().map(|path| (path.here, path.there)).unzip();
    [here, there].map(Vec::from_iter)
}

/// What was found of interfaces, by the addresses that were asked for.
pub(crate) fn found(addresses: &[IpAddr], counters: Vec<Option<LinkCounters>>) -> BTreeMap<IpAddr, LinkCounters> {
    let pairs = addresses.iter().zip(counters);
    pairs.filter_map(|(address, counters)| Some((*address, counters?))).collect()
}
