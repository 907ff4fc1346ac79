//! A disk that is away for a while, one that is not what it was, and one that loses a flush for good.

use std::time::Duration;

use block::{BLOCK_BYTES, Error, ErrorKind, Extent, IoFuture, Result};

use super::Disk;
use crate::failures::Verb;
use crate::medium::Medium;

/// How long whoever asks a disk that does not answer is patient, at most.
const PATIENCE_MAX: Duration = Duration::from_millis(5);
/// How the pages begin by which the owner of a store tells it from another one.
const OWNERS_MAGIC: [&[u8]; 2] = [b"TRANSHUG", b"TRANSHUI"];
/// Longer than any scenario.
const FOR_GOOD: Duration = Duration::from_secs(1_000_000);

/// How a disk is away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Absence {
    /// It can be opened, and every request fails after a while: a server that is not reached, whose client knows its size.
    Unreachable,
    /// It cannot be opened, and every request of who has it open fails: a file system that is not there.
    Missing,
    /// Openings and requests wait until it is back.
    Hanging,
}

/// The right disk, while something else is in its place.
struct PutBy {
    right: Medium,
    /// Whether a volume needs it.
    is_needed: bool,
    /// What the other one began with.
    began_with: Vec<u8>,
}

fn first_block(medium: &Medium) -> Vec<u8> {
    medium.bytes().iter().take(BLOCK_BYTES as usize).copied().collect()
}

/// What is out of order with a disk, of which nothing is lost.
#[derive(Default)]
pub(super) struct Away {
    /// How it is away, and whether a volume needs it.
    absence: Option<(Absence, bool)>,
    /// What it was at the last clean stop of whoever has it open.
    earlier: Option<Medium>,
    put_by: Option<PutBy>,
    /// The next flush fails, and what it covers is lost.
    pub(super) loses_flush: bool,
}

impl Disk {
    /// Is away from now on. It loses nothing by that.
    pub fn go_away(&self, absence: Absence, is_needed: bool) {
        let mut state = self.state();
        if state.away.absence.is_some() {
            return;
        }
        state.away.absence = Some((absence, is_needed));
        if absence == Absence::Hanging {
            state.silent_until = self.shared.world.now() + FOR_GOOD;
        }
        drop(state);
        self.shared.world.begin_absence(is_needed);
        self.shared.world.fault("away", format_args!("{} is {absence:?}", self.shared.name));
    }

    /// Is there again, as it was.
    pub fn come_back(&self) {
        let Some((absence, was_needed)) = self.state().away.absence.take() else { return };
        if absence == Absence::Hanging {
            self.end_silence();
        }
        self.shared.world.end_absence(was_needed);
        self.shared.world.event(format_args!("{} is back", self.shared.name));
    }

    /// Keeps what it is now: whoever has had it open was stopped.
    pub(crate) fn keep_copy(&self) {
        let mut state = self.state();
        state.away.earlier = Some(state.medium.clone());
    }

    /// Whether it knows what it was at a clean stop.
    pub(crate) fn has_copy(&self) -> bool {
        self.state().away.earlier.is_some()
    }

    /// Whether something of what it holds is not in that copy, beside the pages by which their owner tells stores apart: such a page is
    /// written before the first byte of a new life, which may end in between.
    pub(crate) fn differs_from_copy(&self) -> bool {
        let state = self.state();
        let Some(earlier) = &state.away.earlier else { return false };
        let is_owners = |block: &[u8]| OWNERS_MAGIC.iter().any(|magic| block.starts_with(magic));
        let [before, now] = [earlier, &state.medium].map(|medium| medium.bytes().chunks(BLOCK_BYTES as usize));
        let mut pairs = before.zip(now);
        pairs.any(|(before, now)| before != now && !(is_owners(before) && is_owners(now)))
    }

    /// Puts an empty disk in its place, or one that holds what it held at the last clean stop. Nobody has it open.
    pub(crate) fn exchange(&self, is_blank: bool, is_needed: bool) {
        let mut state = self.state();
        if state.away.put_by.is_some() {
            return;
        }
        let other = match state.away.earlier.clone() {
            Some(earlier) if !is_blank => earlier,
            _ => Medium::new(self.shared.geometry.size),
        };
        let began_with = first_block(&other);
        let right = std::mem::replace(&mut state.medium, other);
        state.away.put_by = Some(PutBy { right, is_needed, began_with });
        state.power += 1;
        drop(state);
        self.shared.world.begin_absence(is_needed);
        let what = if is_blank { "blank" } else { "an older one" };
        self.shared.world.fault("exchanged", format_args!("{} is {what}", self.shared.name));
    }

    /// Puts the right disk back, if another one was in its place. Nobody has that open.
    pub(crate) fn put_right(&self) {
        let mut state = self.state();
        let Some(PutBy { right, is_needed: was_needed, .. }) = state.away.put_by.take() else { return };
        state.medium = right;
        state.power += 1;
        drop(state);
        self.shared.world.end_absence(was_needed);
        self.shared.world.event(format_args!("{} is the right one again", self.shared.name));
    }

    /// Whether somebody has written to the first block of what is in its place.
    pub(crate) fn begins_otherwise_since_exchange(&self) -> bool {
        let state = self.state();
        state.away.put_by.as_ref().is_some_and(|put_by| put_by.began_with != first_block(&state.medium))
    }

    /// What is in its place stays there: from now on it is what it is.
    pub(crate) fn accept_exchange(&self) {
        let Some(put_by) = self.state().away.put_by.take() else { return };
        self.shared.world.end_absence(put_by.is_needed);
    }

    /// The next flush fails, and what it covers is lost; no later one of whoever has it open now succeeds.
    pub fn lose_next_flush(&self) {
        self.state().away.loses_flush = true;
    }

    /// No flush is to be lost any more.
    pub fn keep_flushes(&self) {
        self.state().away.loses_flush = false;
    }

    /// Waits while openings do.
    pub(super) async fn no_longer_hanging(&self) {
        while matches!(self.state().away.absence, Some((Absence::Hanging, _))) {
            self.heard().await;
        }
    }

    /// Whether it is not away.
    pub(crate) fn is_there(&self) -> bool {
        self.state().away.absence.is_none()
    }

    /// Fails while it cannot be opened.
    ///
    /// # Errors
    /// It is not there.
    pub(crate) fn require_there(&self) -> Result<()> {
        match self.state().away.absence {
            Some((Absence::Missing, _)) => {
                Err(Error::new(ErrorKind::NotFound, format!("opening {}: it is not there", self.shared.name)))
            }
            _ => Ok(()),
        }
    }

    /// What a request is answered while it is away, as soon as its client has been patient enough; `None` if it is there, or makes
    /// everybody wait.
    pub(super) fn turned_away<T: Send + 'static>(&self, verb: Verb, extent: Extent) -> Option<IoFuture<'static, T>> {
        let kind = match self.state().away.absence? {
            (Absence::Unreachable, _) => ErrorKind::TimedOut,
            (Absence::Missing, _) => ErrorKind::Io,
            (Absence::Hanging, _) => return None,
        };
        let (disk, patience) = (self.clone(), self.shared.rng.up_to(PATIENCE_MAX));
        Some(Box::pin(async move {
            disk.shared.world.sleep(patience).await;
            let reporter = disk.state().reporter.clone();
            if let Some(reporter) = reporter {
                reporter.note_refused(verb, extent, disk.shared.world.now());
            }
            Err(Error::new(kind, format!("{verb:?}: {} does not answer", disk.shared.name)))
        }))
    }
}
