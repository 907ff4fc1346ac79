//! What the guest may legally read: the model behind acked-write, stable-read and flush.
//!
//! Every sector has its versions: what was written there, when it was asked for and when it was answered. A read may
//! give a version unless something has put it into the past before the read began:
//!
//! - a write that was asked for after the version was answered, and was answered before the read was asked for;
//! - another read that was answered before, and showed that a later version had taken its place.
//!
//! A write that is asked again after its connection was lost may take effect a second time.
//!
//! That is what it means for each sector to behave as one register. A guest may count on no more, because writes of
//! several sectors are not atomic. Writes in flight, and those that failed, may or may not be seen. A discard leaves
//! zeroes or what was there, but always the same.
//!
//! A power loss may bring back every version that no flush has put into the past. A version is gone for good only when
//! a write that replaced it was answered before a successful flush was asked for. A replacing write that was answered
//! with forced unit access has the same effect. After a power loss all that is left is possible again, until it has
//! been read.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

use crate::medium::SECTOR_BYTES;
use crate::pattern::{Content, describe};
use crate::world::{Invariant, Violation};

/// A count of what has happened, so that two things at the same microsecond have an order.
type Tick = u64;

/// A request that the guest has asked and that is not answered yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ticket {
    asked: Tick,
    sectors: Range<u64>,
    content: Content,
    is_discard: bool,
}

#[derive(Clone, Copy, Debug)]
struct Version {
    content: Content,
    asked: Tick,
    answered: Option<Tick>,
    /// When a later write over it was answered.
    replaced: Option<Tick>,
    /// When that write was asked.
    replacing: Tick,
    /// When a read showed that it is in the past.
    overtaken: Option<Tick>,
    /// When it was first read.
    seen: Option<Tick>,
    /// It was asked again, so that it may take effect a second time until it is answered.
    again: bool,
    /// The write that replaced it is durable.
    gone: bool,
    /// It was answered well, and leaves nothing of what was there before.
    settled: bool,
}

impl Version {
    const fn original(content: Content) -> Self {
        Self {
            content,
            asked: 0,
            answered: Some(0),
            replaced: None,
            replacing: 0,
            overtaken: None,
            seen: None,
            again: false,
            gone: false,
            settled: true,
        }
    }

    /// Whether a read that was asked at `tick` may give it.
    fn is_legal_at(&self, tick: Tick) -> bool {
        let is_past = |since: Option<Tick>| since.is_some_and(|since| since <= tick);
        !is_past(self.replaced) && !is_past(self.overtaken)
    }
}

/// The history of one volume as its guest knows it.
pub struct RegisterHistory {
    tick: Tick,
    writes: u64,
    size: u64,
    /// What every sector held before it was first written to, or after a power loss left no doubt.
    originals: Vec<Content>,
    /// The versions of each sector, the original included; none while there is no other.
    sectors: Vec<Vec<Version>>,
    /// Requests under way by when they were asked, so that old versions are forgotten only when nobody can see them.
    outstanding: BTreeMap<Tick, ()>,
    /// What successful flushes cover: versions replaced within one of these spans are gone for good.
    flushed: Vec<(Tick, Tick)>,
    /// When the last failed flush was answered: what was answered before it no flush covers any more.
    flush_failed: Tick,
    /// When a disk has lost what it was to flush, and when that was last taken back with the end of a process.
    lost: Option<(Tick, Option<Tick>)>,
}

impl RegisterHistory {
    /// The ledger of a volume of `size` bytes whose sector `i` holds `original(i)`.
    pub fn new(size: u64, original: impl Fn(u64) -> Content) -> Self {
        let originals: Vec<_> = (0..size.div_ceil(SECTOR_BYTES)).map(original).collect();
        let sectors = originals.iter().map(|_| Vec::new()).collect();
        let (outstanding, flushed) = (BTreeMap::new(), Vec::new());
        Self { tick: 1, writes: 0, size, originals, sectors, outstanding, flushed, flush_failed: 0, lost: None }
    }

    /// How many sectors the volume has; the last may be short.
    #[must_use]
    pub fn sector_count(&self) -> u64 {
        self.sectors.len() as u64
    }

    /// The bytes of `sectors`.
    #[must_use]
    pub fn bytes_of(&self, sectors: &Range<u64>) -> Range<u64> {
        sectors.start * SECTOR_BYTES..(sectors.end * SECTOR_BYTES).min(self.size)
    }

    /// A number for the next write, from 1 on.
    pub const fn next_write(&mut self) -> u64 {
        self.writes += 1;
        self.writes
    }

    /// The versions of `sector`, the original included.
    fn versions(&self, sector: u64) -> Cow<'_, [Version]> {
        match &self.sectors[sector as usize][..] {
            [] => Cow::Owned(vec![Version::original(self.originals[sector as usize])]),
            versions => Cow::Borrowed(versions),
        }
    }

    const fn step(&mut self) -> Tick {
        self.tick += 1;
        self.tick
    }

    fn ask(&mut self) -> Tick {
        let tick = self.step();
        self.outstanding.insert(tick, ());
        tick
    }

    fn answer(&mut self, asked: Tick) -> Tick {
        self.outstanding.remove(&asked);
        self.step()
    }

    /// The guest asks to put `content` into `sectors`; a discard may leave what is there.
    pub fn ask_write(&mut self, sectors: Range<u64>, content: Content, is_discard: bool) -> Ticket {
        let asked = self.ask();
        for sector in sectors.clone() {
            self.forget(sector);
            let version = Version { asked, answered: None, settled: false, ..Version::original(content) };
            let (versions, original) = (&mut self.sectors[sector as usize], self.originals[sector as usize]);
            if versions.is_empty() {
                versions.push(Version::original(original));
            }
            versions.push(version);
        }
        Ticket { asked, sectors, content, is_discard }
    }

    /// The write was answered, durably if `fua`.
    pub fn write_done(&mut self, ticket: &Ticket, fua: bool) {
        let answered = self.answer(ticket.asked);
        for sector in ticket.sectors.clone() {
            for version in &mut self.sectors[sector as usize] {
                if version.asked == ticket.asked {
                    (version.answered, version.settled) = (Some(answered), !ticket.is_discard);
                } else if !ticket.is_discard && version.answered.is_some_and(|answered| answered <= ticket.asked) {
                    if version.replaced.is_none() {
                        (version.replaced, version.replacing) = (Some(answered), ticket.asked);
                    }
                    version.gone |= fua;
                }
            }
        }
    }

    /// The write is asked again on another connection, because it was never answered. It may take effect a second time,
    /// over whatever has overtaken it meanwhile.
    pub fn ask_again(&mut self, ticket: &Ticket) {
        for sector in ticket.sectors.clone() {
            let own = self.sectors[sector as usize].iter_mut().filter(|version| version.asked == ticket.asked);
            own.for_each(|version| {
                version.again = true;
                version.overtaken = None;
            });
        }
    }

    /// The write failed: it may have landed or not, but it does not land any later.
    pub fn write_failed(&mut self, ticket: &Ticket) {
        let answered = self.answer(ticket.asked);
        for sector in ticket.sectors.clone() {
            let own = self.sectors[sector as usize].iter_mut().filter(|version| version.asked == ticket.asked);
            own.for_each(|version| version.answered = Some(answered));
        }
    }

    /// The guest asks to read `sectors`.
    pub fn ask_read(&mut self, sectors: Range<u64>) -> Ticket {
        Ticket { asked: self.ask(), sectors, content: Content::Zero, is_discard: false }
    }

    /// The read failed.
    pub fn read_failed(&mut self, ticket: &Ticket) {
        self.answer(ticket.asked);
    }

    /// The read gave `bytes`.
    ///
    /// # Errors
    /// If the guest could not have been given that.
    pub fn read_done(&mut self, ticket: &Ticket, bytes: &[u8]) -> Result<(), Violation> {
        let now = self.answer(ticket.asked);
        for (sector, piece) in ticket.sectors.clone().zip(bytes.chunks(SECTOR_BYTES as usize)) {
            let versions = &mut self.sectors[sector as usize];
            if versions.is_empty() && self.originals[sector as usize].matches(sector, piece) {
                continue;
            }
            let legal = |version: &Version| version.is_legal_at(ticket.asked) && version.content.matches(sector, piece);
            let mut matching = (0..versions.len()).rev().filter(|index| legal(&versions[*index]));
            let Some(found) = matching.next() else { return Err(self.judge(sector, piece, ticket.asked)) };
            // Several zeroes look the same: then nothing can be concluded.
            if matching.next().is_some() {
                continue;
            }
            for (index, version) in versions.iter_mut().enumerate() {
                let is_before = |tick: Option<Tick>| tick.is_some_and(|tick| tick <= ticket.asked);
                let took_effect = is_before(version.answered) || (is_before(version.seen) && !version.again);
                if index != found && took_effect {
                    version.overtaken.get_or_insert(now);
                }
            }
            versions[found].seen.get_or_insert(now);
        }
        Ok(())
    }

    /// Which invariant it breaks that `bytes` were read in `sector`.
    fn judge(&self, sector: u64, bytes: &[u8], asked: Tick) -> Violation {
        let versions = self.versions(sector);
        let matching: Vec<_> = versions.iter().filter(|version| version.content.matches(sector, bytes)).collect();
        let only_overtaken = |version: &&Version| version.replaced.is_none_or(|since| since > asked);
        let invariant = match matching.iter().any(only_overtaken) {
            true => Invariant::StableRead,
            false => Invariant::AckedWrite,
        };
        let legal: Vec<_> =
            versions.iter().filter(|version| version.is_legal_at(asked)).map(|version| version.content).collect();
        let found = describe(self.writes, sector, bytes);
        Violation { invariant, what: format!("sector {sector} read as {found}; legal were {legal:?}") }
    }

    /// The guest asks for a flush.
    pub fn ask_flush(&mut self) -> Ticket {
        Ticket { asked: self.ask(), sectors: 0..0, content: Content::Zero, is_discard: false }
    }

    /// The flush was answered.
    pub fn flush_done(&mut self, ticket: &Ticket, success: bool) {
        let now = self.answer(ticket.asked);
        if !success {
            self.flush_failed = now;
        } else if ticket.asked > self.flush_failed {
            // What is there now stays there.
            self.lost = self.lost.filter(|(_, taken_back)| taken_back.is_none_or(|tick| ticket.asked < tick));
            match self.flushed.last_mut() {
                Some((from, through)) if *from == self.flush_failed => *through = (*through).max(ticket.asked),
                _ => self.flushed.push((self.flush_failed, ticket.asked)),
            }
        }
    }

    /// A flush under way may have failed, and who knew of it is dead: what was answered before it no flush covers any more.
    pub fn flush_lost(&mut self) {
        self.flush_failed = self.step();
    }

    /// The flush was refused: it has covered nothing, and nothing is lost by that.
    pub fn flush_refused(&mut self, ticket: &Ticket) {
        self.answer(ticket.asked);
    }

    /// The disk that holds the volume has lost a flush: what was answered before and not flushed may go with the process that knows
    /// of it.
    pub fn note_lost(&mut self) {
        self.flush_lost();
        self.lost = Some((self.flush_failed, None));
    }

    /// The process has ended. If it knew of a flush that was lost, whoever comes after it finds anything of what was answered before
    /// that, and all that was answered later.
    pub fn take_back(&mut self) {
        let Some((lost, _)) = self.lost else { return };
        let now = self.step();
        for sector in 0..self.sectors.len() {
            let mut versions = std::mem::take(&mut self.sectors[sector]);
            let later = versions.iter().filter(|version| version.settled && version.asked > lost);
            let later: Vec<_> = later.map(|version| (version.asked, version.answered.unwrap_or(now))).collect();
            for version in versions.iter_mut().filter(|version| version.replaced.is_some()) {
                let follows = |asked: Tick| version.answered.is_some_and(|answered| answered <= asked);
                let over = later.iter().filter(|(asked, _)| follows(*asked)).min_by_key(|(_, answered)| *answered);
                if !self.is_gone(version) {
                    (version.replacing, version.replaced) = over.map_or((0, None), |(asked, at)| (*asked, Some(*at)));
                    version.overtaken = None;
                }
            }
            self.sectors[sector] = versions;
        }
        self.lost = Some((lost, Some(now)));
    }

    fn is_gone(&self, version: &Version) -> bool {
        // What was on its way while a flush failed is as doubtful as what was answered before.
        let covered = |answered: Tick| {
            self.flushed.iter().any(|(failed, asked)| *failed < version.replacing && answered <= *asked)
        };
        version.gone || version.replaced.is_some_and(covered)
    }

    /// Drops the versions that can come back neither by a read under way nor by a power loss.
    fn forget(&mut self, sector: u64) {
        if self.sectors[sector as usize].len() < 4 {
            return;
        }
        let oldest = self.outstanding.keys().next().copied().unwrap_or(self.tick);
        let mut versions = std::mem::take(&mut self.sectors[sector as usize]);
        versions
            .retain(|version| !(self.is_gone(version) && version.replaced.is_some_and(|replaced| replaced <= oldest)));
        self.sectors[sector as usize] = versions;
    }

    /// The power was lost, and with it everything that was in flight.
    pub fn lose_power(&mut self) {
        let now = self.step();
        self.outstanding.clear();
        for sector in 0..self.sectors.len() {
            let mut versions = std::mem::take(&mut self.sectors[sector]);
            versions.retain(|version| !self.is_gone(version));
            if let [only] = versions[..] {
                self.originals[sector] = only.content;
                versions.clear();
            }
            for version in &mut versions {
                *version = Version { answered: Some(now), ..Version::original(version.content) };
            }
            self.sectors[sector] = versions;
        }
        self.flushed.clear();
        self.flush_failed = 0;
        self.lost = None;
    }

    /// Whether a write to `sector` is under way.
    #[must_use]
    pub fn is_being_written(&self, sector: u64) -> bool {
        self.sectors[sector as usize].iter().any(|version| version.answered.is_none())
    }

    /// Whether a power loss now may leave `bytes` in `sector`.
    #[must_use]
    pub fn may_survive(&self, sector: u64, bytes: &[u8]) -> bool {
        let versions = self.versions(sector);
        versions.iter().any(|version| !self.is_gone(version) && version.content.matches(sector, bytes))
    }

    /// What a power loss may leave in `sector`, for messages.
    #[must_use]
    pub fn survivors(&self, sector: u64) -> String {
        let versions = self.versions(sector);
        let contents: Vec<_> =
            versions.iter().filter(|version| !self.is_gone(version)).map(|version| version.content).collect();
        format!("{contents:?}")
    }

    /// Names what `bytes` of `sector` are.
    #[must_use]
    pub fn describe(&self, sector: u64, bytes: &[u8]) -> String {
        describe(self.writes, sector, bytes)
    }
}

#[cfg(test)]
mod tests;
