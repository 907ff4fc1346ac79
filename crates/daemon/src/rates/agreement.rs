//! From what both hosts' interfaces have carried to what each stream of a move may take.

use std::collections::BTreeMap;
use std::net::IpAddr;

use api::v1::PathRate;
use env::Moment;
use migrate::stream::{EndUsage, LinkCounters, SpareBandwidth, StreamPath, raise_to_reserve};

/// A guest's mirrored writes go over the same streams and are not limited to what others leave. They always get so many
/// times their recent rate, and this many bytes a second more.
const MIRRORED_FACTOR: f64 = 1.5;
const MIRRORED_MIN: f64 = 256.0 * 1024.0;

/// One look at everything.
#[derive(Clone, Debug, Default)]
pub(crate) struct RateSample {
    /// When this host and the streams were looked at.
    pub(crate) at: Moment,
    /// By their addresses: the interfaces of this host,
    pub(crate) here: BTreeMap<IpAddr, LinkCounters>,
    /// and of the other one, as far as it has said so.
    pub(crate) there: BTreeMap<IpAddr, LinkCounters>,
    /// The move's streams by their numbers; none for those that are not connected.
    pub(crate) streams: Vec<Option<StreamSample>>,
    /// What a guest has written to both sides so far, in bytes.
    pub(crate) mirrored: u64,
}

/// What a stream has carried since its session began, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamSample {
    pub(crate) path: StreamPath,
    pub(crate) sent: u64,
    pub(crate) received: u64,
}

/// What comes of two looks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Agreed {
    /// What each stream may take, in bytes a second.
    pub(crate) streams: Vec<Option<u64>>,
    /// All of them together.
    pub(crate) limit: Option<u64>,
    pub(crate) paths: Vec<PathRate>,
    /// Interfaces of this host whose speed nobody knows.
    pub(crate) unknown: Vec<String>,
}

/// Bytes a second in each direction, as seen from this host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Flow {
    sent: u64,
    received: u64,
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
#[derive(Default)]
pub(crate) struct Agreement {
    before: Option<RateSample>,
    ways: BTreeMap<Way, WayState>,
}

impl Agreement {
    /// There is no session: what comes later is compared with nothing before.
    pub(crate) fn pause(&mut self) {
        self.before = None;
    }

    /// Takes the next look and what the move may always have, in bytes a second.
    pub(crate) fn step(&mut self, look: RateSample, reserve: u64) -> Agreed {
        let Some(before) = self.before.replace(look.clone()) else { return Agreed::default() };
        let seconds = look.at.since(before.at).as_secs_f64();
        if seconds < 0.1 {
            return Agreed::default();
        }
        let mirrored = look.mirrored.saturating_sub(before.mirrored) as f64 / seconds;
        let uses = uses(&look, &before, seconds);
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

    fn step_way(&mut self, way: &Way, using: &Use, (look, before): (&RateSample, &RateSample)) -> PathRate {
        let Flow { sent, received } = using.flow;
        // A comparison reads the other host's copy: then the other direction is the one that is in short supply.
        let is_sending = sent >= received;
        let own = if is_sending { sent } else { received };
        let mut ends = Vec::with_capacity(2);
        if let Some(StreamPath { here, there }) = using.addresses {
            let near = Seen::between(before.here.get(&here), look.here.get(&here));
            let far = Seen::between(before.there.get(&there), look.there.get(&there));
            // What this host sends the other one receives.
            ends.extend(near.map(|seen| seen.usage(is_sending)));
            ends.extend(far.map(|seen| seen.usage(!is_sending)));
            ends.retain(|end| end.capacity > 0);
        }
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
fn uses(look: &RateSample, before: &RateSample, seconds: f64) -> BTreeMap<Way, Use> {
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

/// What an interface has carried between two looks, in bytes a second, and what of that was of moves.
struct Seen {
    all: Flow,
    moves: Flow,
    /// Its last look.
    now: LinkCounters,
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
        let (then, moves) = (&before.migrations, &now.migrations);
        Some(Self {
            all: Flow { sent: rate(now.sent, before.sent)?, received: rate(now.received, before.received)? },
            moves: Flow { sent: rate(moves.sent, then.sent)?, received: rate(moves.received, then.received)? },
            now: now.clone(),
        })
    }

    /// In one direction.
    fn usage(&self, is_sending: bool) -> EndUsage {
        let rate = |flow: Flow| if is_sending { flow.sent } else { flow.received };
        let LinkCounters { capacity, migrations, .. } = self.now;
        let sharers = if is_sending { migrations.outgoing } else { migrations.incoming };
        EndUsage { capacity, carried: rate(self.all), ours: rate(self.moves), sharers }
    }
}

#[cfg(test)]
#[path = "agreement_tests.rs"]
mod tests;
