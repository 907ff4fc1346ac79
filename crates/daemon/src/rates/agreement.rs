//! From what both hosts' interfaces have carried to what each stream of a move may take.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use api::v1::PathRate;
use env::Moment;
use migrate::stream::{EndUsage, LinkCounters, SpareBandwidth, StreamPath, raise_to_reserve};
use parking_lot::Mutex;

/// A guest's mirrored writes go over the same streams and are not slowed down to what others leave: so many times of what they
/// took of late is let through in any case, and this many bytes a second more.
const MIRRORED_FACTOR: f64 = 1.5;
const MIRRORED_MIN: f64 = 256.0 * 1024.0;

/// One look at everything.
#[derive(Clone, Debug, Default)]
pub(super) struct Look {
    /// When this host and the streams were looked at.
    pub(super) at: Moment,
    /// By their addresses: the interfaces of this host,
    pub(super) here: BTreeMap<IpAddr, LinkCounters>,
    /// and of the other one, as far as it has said so.
    pub(super) there: BTreeMap<IpAddr, LinkCounters>,
    /// How long that took. When in that time it looked nobody knows.
    pub(super) asked: Duration,
    /// The move's streams by their numbers; none for those that are not connected.
    pub(super) streams: Vec<Option<StreamLook>>,
    /// What a guest has written to both sides so far, in bytes.
    pub(super) mirrored: u64,
}

/// What a stream has carried since its session began, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamLook {
    pub(super) path: StreamPath,
    pub(super) sent: u64,
    pub(super) received: u64,
}

/// What comes of two looks.
#[derive(Clone, Debug, Default)]
pub(super) struct Agreed {
    /// What each stream may take, in bytes a second.
    pub(super) streams: Vec<Option<u64>>,
    /// All of them together.
    pub(super) limit: Option<u64>,
    pub(super) paths: Vec<PathRate>,
    /// Interfaces of this host whose speed nobody knows.
    pub(super) unknown: Vec<String>,
}

/// Bytes a second in each direction, as seen from this host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Flow {
    sent: u64,
    received: u64,
}

/// An interface that moves of this host use.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum End {
    Here(String),
    /// Of a host.
    There(String, String),
}

/// What each move of this host takes of each interface.
#[derive(Default)]
pub(crate) struct Shares(Mutex<BTreeMap<(End, u64), Flow>>);

impl Shares {
    /// `job` takes this, and nothing else.
    fn publish(&self, job: u64, flows: BTreeMap<End, Flow>) {
        let mut shares = self.0.lock();
        shares.retain(|(_, other), _| *other != job);
        shares.extend(flows.into_iter().map(|(end, flow)| ((end, job), flow)));
    }

    /// `job` takes nothing any more.
    pub(super) fn leave(&self, job: u64) {
        self.publish(job, BTreeMap::new());
    }

    /// What all moves take of `end`, and how many they are.
    fn of(&self, end: &End) -> (Flow, u32) {
        let shares = self.0.lock();
        let all = shares.iter().filter(|((other, _), _)| other == end);
        all.fold((Flow::default(), 0), |(sum, count), (_, flow)| {
            (Flow { sent: sum.sent + flow.sent, received: sum.received + flow.received }, count + 1)
        })
    }
}

/// The way from an interface of this host to one of the other, as far as they are known.
type Way = (String, Option<String>);

#[derive(Default)]
struct WayState {
    spare: SpareBandwidth,
    others_max: u64,
    limit_min: Option<u64>,
}

/// One use of a way between two looks.
#[derive(Default)]
struct Use {
    flow: Flow,
    streams: Vec<usize>,
    addresses: Option<StreamPath>,
}

/// What one move has agreed on with the other host.
pub(super) struct Agreement {
    host: String,
    job: u64,
    shares: Arc<Shares>,
    before: Option<Look>,
    ways: BTreeMap<Way, WayState>,
}

impl Agreement {
    pub(super) const fn new(host: String, job: u64, shares: Arc<Shares>) -> Self {
        Self { host, job, shares, before: None, ways: BTreeMap::new() }
    }

    /// There is no session: what comes later is compared with nothing before.
    pub(super) fn pause(&mut self) {
        self.before = None;
        self.shares.leave(self.job);
    }

    /// Takes the next look and what the move may always have, in bytes a second.
    pub(super) fn step(&mut self, look: Look, reserve: u64) -> Agreed {
        let Some(before) = self.before.replace(look.clone()) else { return Agreed::default() };
        let seconds = look.at.since(before.at).as_secs_f64();
        if seconds < 0.1 {
            return Agreed::default();
        }
        let mirrored = look.mirrored.saturating_sub(before.mirrored) as f64 / seconds;
        let uses = uses(&look, &before, seconds);
        self.publish(&uses);
        let mut found: Vec<(PathRate, Vec<usize>)> = Vec::with_capacity(uses.len());
        for (way, using) in uses {
            let path = self.step_way(&way, &using, (&look, &before));
            found.push((path, using.streams));
        }
        let mut limits: Vec<(Option<u64>, u64)> =
            found.iter().map(|(path, _)| (path.limit, path.capacity.unwrap_or(0))).collect();
        raise_to_reserve(&mut limits, reserve);

        let mut agreed = Agreed { streams: vec![None; look.streams.len()], ..Agreed::default() };
        let streams = found.iter().map(|(path, _)| path.streams).sum::<u64>().max(1) as f64;
        for ((path, numbers), (limit, _)) in found.iter_mut().zip(&limits) {
            path.limit = *limit;
            let share = mirrored * numbers.len() as f64 / streams;
            let rate = limit.map(|limit| (limit as f64).max(share * MIRRORED_FACTOR + MIRRORED_MIN));
            for number in numbers {
                agreed.streams[*number] = rate.map(|rate| (rate / path.streams as f64) as u64);
            }
        }
        agreed.limit = limits.iter().map(|(limit, _)| *limit).sum::<Option<u64>>().filter(|_| !limits.is_empty());
        agreed.paths = found.into_iter().map(|(path, _)| path).collect();
        let unknown = agreed.paths.iter().filter(|path| path.capacity.is_none());
        agreed.unknown = unknown.map(|path| path.interface.clone()).collect();
        agreed
    }

    fn publish(&self, uses: &BTreeMap<Way, Use>) {
        let mut flows: BTreeMap<End, Flow> = BTreeMap::new();
        for ((here, there), using) in uses {
            let ends = [Some(End::Here(here.clone())), there.clone().map(|there| End::There(self.host.clone(), there))];
            for end in ends.into_iter().flatten() {
                let flow = flows.entry(end).or_default();
                flow.sent += using.flow.sent;
                flow.received += using.flow.received;
            }
        }
        self.shares.publish(self.job, flows);
    }

    fn step_way(&mut self, way: &Way, using: &Use, (look, before): (&Look, &Look)) -> PathRate {
        let Flow { sent, received } = using.flow;
        // A comparison reads the other host's copy: then the other direction is the one that is in short supply.
        let is_sending = sent >= received;
        let direction = |flow: Flow| if is_sending { flow.sent } else { flow.received };
        let doubt = (before.asked + look.asked).as_secs_f64() / look.at.since(before.at).as_secs_f64();
        let mut ends = Vec::with_capacity(2);
        if let Some(StreamPath { here, there }) = using.addresses {
            let near = Seen::between(before.here.get(&here), look.here.get(&here));
            let far = Seen::between(before.there.get(&there), look.there.get(&there));
            let far_end = way.1.clone().map(|interface| End::There(self.host.clone(), interface));
            let all = [(near, Some(End::Here(way.0.clone())), 0.0), (far, far_end, doubt)];
            for (seen, end, doubt) in all {
                let (Some(seen), Some(end)) = (seen.filter(|seen| seen.capacity > 0), end) else { continue };
                let (ours, sharers) = self.shares.of(&end);
                // What this host sends the other one receives.
                let is_here = matches!(end, End::Here(_));
                let carried = if is_here == is_sending { seen.sent } else { seen.received };
                let ours = direction(ours);
                let uncertain = (ours as f64 * doubt) as u64;
                ends.push(EndUsage { capacity: seen.capacity, carried, ours, uncertain, sharers: sharers.max(1) });
            }
        }
        let own = direction(using.flow);
        let others = ends.iter().map(EndUsage::others).max().unwrap_or(0);
        let state = self.ways.entry(way.clone()).or_default();
        let limit = state.spare.step(&ends, own);
        state.others_max = state.others_max.max(others);
        state.limit_min = state.limit_min.into_iter().chain(limit).min();
        PathRate {
            interface: way.0.clone(),
            other_interface: way.1.clone(),
            capacity: ends.iter().map(|end| end.capacity).min(),
            streams: using.streams.len() as u64,
            ours: own,
            others,
            others_max: state.others_max,
            limit,
            limit_min: state.limit_min,
        }
    }
}

/// What the streams took between two looks, by their ways. A stream that was connected anew in between counts from the next
/// look on.
fn uses(look: &Look, before: &Look, seconds: f64) -> BTreeMap<Way, Use> {
    let mut uses: BTreeMap<Way, Use> = BTreeMap::new();
    for (number, stream) in look.streams.iter().enumerate() {
        let Some(stream) = stream else { continue };
        let Some(here) = look.here.get(&stream.path.here) else { continue };
        let there = look.there.get(&stream.path.there).map(|there| there.interface.clone());
        let earlier = before.streams.get(number).copied().flatten();
        let since = |now: u64, then: Option<u64>| then.map_or(0, |then| now.saturating_sub(then)) as f64 / seconds;
        let using = uses.entry((here.interface.clone(), there)).or_default();
        using.flow.sent += since(stream.sent, earlier.map(|earlier| earlier.sent)) as u64;
        using.flow.received += since(stream.received, earlier.map(|earlier| earlier.received)) as u64;
        using.streams.push(number);
        using.addresses = Some(stream.path);
    }
    uses
}

/// What an interface has carried between two looks, in bytes a second.
struct Seen {
    sent: u64,
    received: u64,
    capacity: u64,
}

impl Seen {
    /// None if it was not seen twice, or has begun to count anew.
    fn between(before: Option<&LinkCounters>, now: Option<&LinkCounters>) -> Option<Self> {
        let (before, now) = (before?, now?);
        let seconds = now.at_ns.checked_sub(before.at_ns)? as f64 / 1e9;
        if before.interface != now.interface || seconds < 0.01 {
            return None;
        }
        let rate = |now: u64, before: u64| now.checked_sub(before).map(|bytes| (bytes as f64 / seconds) as u64);
        Some(Self {
            sent: rate(now.sent, before.sent)?,
            received: rate(now.received, before.received)?,
            capacity: now.capacity,
        })
    }
}

#[cfg(test)]
#[path = "agreement_tests.rs"]
mod tests;
