//! Copying: runs of absent chunks in the order of the schedule, many in flight, within the window, the guest's share and the
//! bandwidth.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use block::{Buffer, Bytes, Error, ErrorKind, Extent};
use env::Moment;
use futures::StreamExt;
use futures::future::{BoxFuture, Either, select};
use futures::stream::FuturesUnordered;
use std::pin::pin;

use super::{Driver, TICK};
use crate::schedule::{Candidates, Choice};
use crate::strategy::mirror::copy::{Copied, CopyError};
use crate::strategy::mirror_paper::mover;
use crate::strategy::tracking::converge::Convergence;
use crate::{Event, Strategy};

/// Adjacent chunks are merged into copies of this size at most.
pub(crate) const COPY_BYTES_MAX: u64 = 1 << 20;
/// While the guest leaves room, copies are not smaller than this.
pub(crate) const COPY_BYTES_MIN: u64 = 256 << 10;
/// Where the copy is in the guest's way, copies are of this size and one after the other.
const STEP_BYTES: u64 = 128 << 10;
/// Holes are brought into step in runs of this size.
const HOLE_BYTES_MAX: u64 = 256 << 20;
/// With a bandwidth, which those count for that the target writes out.
const LIMITED_HOLE_BYTES_MAX: u64 = 16 << 20;
/// So often a copy is tried again after an error.
const RETRIES_MAX: u8 = 3;
/// A run that waits for the guest's requests begins after this, whatever they do.
const GUEST_FIRST_MAX: Duration = Duration::from_millis(50);
/// Before the first retry; it doubles.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// What a copy under way ends with.
struct Ended {
    run: Range<u64>,
    bytes: u64,
    began: Moment,
    outcome: Result<Copied, CopyError>,
    /// Neither device let the copy wait.
    at_once: bool,
    /// Holes say nothing of the device's speed.
    is_hole: bool,
}

/// A run that is to be copied next.
enum Next {
    Data(Range<u64>),
    Hole(Range<u64>),
}

/// What the schedule has chosen.
struct Scheduled {
    run: Range<u64>,
    /// At most so much of it is copied as data.
    data_max: u64,
    /// Out of the order of the volume.
    is_detour: bool,
}

/// The copies under way and what steers the next one.
pub(crate) struct Copies {
    in_flight: FuturesUnordered<BoxFuture<'static, Ended>>,
    bytes: u64,
    /// Nothing more is begun before this, for a retry's or the guest's sake.
    not_before: Moment,
    /// The guest's requests come before the next run, until this at most.
    guest_first_until: Option<Moment>,
    /// The run that is chosen is out of the order of the volume.
    is_detour: bool,
    /// What was said of an extent when it was looked at last: whether it is skipped unread.
    hint: Option<(Extent, bool)>,
    retries: BTreeMap<u64, u8>,
    /// The guest is held: nothing is done for its sake.
    held: bool,
    /// By the paper's mover, a window at a time: nothing is done for the guest's sake either.
    by_window: bool,
}

impl Copies {
    fn new(held: bool, strategy: Strategy) -> Self {
        Self {
            in_flight: FuturesUnordered::new(),
            bytes: 0,
            not_before: Moment::default(),
            guest_first_until: None,
            is_detour: false,
            hint: None,
            retries: BTreeMap::new(),
            held,
            by_window: strategy.copies_in_order(),
        }
    }

    /// Whether the guest's latency steers them.
    const fn heed_guest(&self) -> bool {
        !self.held && !self.by_window
    }
}

impl Driver {
    pub(super) async fn copy(&mut self) -> Event {
        self.buffer_again();
        self.end_left_over().await;
        self.begin_pass(false).await;
        let mut copies = Copies::new(false, self.options.strategy);
        let mut stop = None;
        let mut next_tick = self.env.now();
        loop {
            let now = self.env.now();
            if now >= next_tick {
                next_tick = now + TICK;
                self.tick();
                self.heed();
            }
            self.look_for_end(&mut stop);
            let is_too_late = self.is_too_late();
            if stop.is_none() && !self.machine.paused() && !is_too_late {
                self.begin_copies(&mut copies).await;
            }
            if copies.in_flight.is_empty() {
                if let Some(event) = stop {
                    return event;
                }
                let is_over = is_too_late || self.is_pass_over();
                if is_over && !self.machine.paused() {
                    match self.decide().await {
                        Some(event) => return event,
                        None => continue,
                    }
                }
            }
            let mut limit = next_tick.since(self.env.now());
            let rest = self.rest_of(&copies);
            if !rest.is_zero() {
                limit = limit.min(rest);
            }
            let ended = self.next_ended(&mut copies, limit).await;
            for ended in ended {
                copies.bytes -= ended.bytes;
                if let Some(event) = self.take_ended(&mut copies, ended) {
                    stop.get_or_insert(event);
                }
                self.yield_cpu();
            }
        }
    }

    /// Copies the rest while the guest is held. Gives what ends that early: something that failed or is wished, or
    /// `until`. The guest is let go then whatever is under way, which is left to [`end_left_over`](Self::end_left_over).
    /// Nothing is tried again here: the guest does not wait for that.
    pub(super) async fn copy_held(&mut self, until: Option<Moment>) -> Option<Event> {
        let mut copies = Copies::new(true, self.options.strategy);
        let (began, bytes, retries) = (self.env.now(), self.bytes_left(), self.statistics.retries);
        let mut heard = began;
        let mut stop = None;
        loop {
            stop = stop.or_else(|| self.demand());
            let is_vain = until.is_some_and(|until| {
                let (now, begun) = (self.env.now(), bytes.saturating_sub(self.bytes_left()) + copies.bytes);
                now >= until || Convergence::is_in_vain(now.since(began), until.since(began), begun, bytes)
            });
            let is_silent = self.mirror.stall_limit().is_some_and(|limit| self.env.now().since(heard) >= limit);
            if stop.is_none() && (is_vain || is_silent || self.statistics.retries > retries) {
                stop = Some(Event::Missing);
            }
            if stop.is_some() {
                copies.held = false;
                *self.left_over.get_mut() = Some(copies);
                return stop;
            }
            self.begin_copies(&mut copies).await;
            if copies.in_flight.is_empty() && self.mirror.tracker(|tracker| tracker.is_pass_over()) {
                return None;
            }
            let limit = until.map_or(TICK, |until| until.since(self.env.now()).min(TICK));
            for ended in self.next_ended(&mut copies, limit.max(Duration::from_micros(100))).await {
                copies.bytes -= ended.bytes;
                heard = self.env.now();
                stop = stop.or(self.take_ended(&mut copies, ended));
            }
        }
    }

    /// Drives copies to their end and begins none.
    pub(super) async fn end_copies(&mut self, mut copies: Copies) {
        while !copies.in_flight.is_empty() {
            self.abort_if_cancelled();
            let ended = self.next_ended(&mut copies, TICK).await;
            if ended.is_empty() {
                self.tick();
            }
            for ended in ended {
                copies.bytes -= ended.bytes;
                // A source that cannot be read is found out again by the pass that follows.
                let _ = self.take_ended(&mut copies, ended);
            }
        }
    }

    /// The copies that end next: one, and all that have ended with it. None when something else wants to be looked at.
    async fn next_ended(&self, copies: &mut Copies, limit: Duration) -> Vec<Ended> {
        let mut all = Vec::new();
        if copies.in_flight.is_empty() {
            self.wait(limit).await;
            return all;
        }
        let first = match select(copies.in_flight.next(), pin!(self.wait(limit))).await {
            Either::Left((ended, _)) => ended,
            Either::Right(_) => None,
        };
        all.extend(first);
        all
    }

    /// Begins copies until the window is full or something else stands in the way.
    async fn begin_copies(&mut self, copies: &mut Copies) {
        loop {
            self.let_guest_first(copies);
            let Some(size) = self.next_size(copies) else { return };
            let chunks = (size / self.options.chunk_bytes).max(1);
            let Some(next) = self.next_run(copies, chunks).await else { return };
            let (Next::Data(run) | Next::Hole(run)) = &next;
            let length = self.mirror.tracker(|tracker| tracker.run_extent(run)).length;
            let buffers = match next {
                Next::Hole(_) => Vec::new(),
                // Acquired before anything is claimed or locked. Waiting here is waiting for copies under way.
                Next::Data(_) => match self.buffers(copies, length).await {
                    Some(buffers) => buffers,
                    None => return,
                },
            };
            let run = run.clone();
            if !buffers.is_empty() && !copies.held {
                let _ = self.bucket.take(length.0);
            }
            self.begin_copy(copies, run, length, buffers);
        }
    }

    /// Looks whether the guest's requests come before the next run. The signal wakes the driver when they are served; a guest
    /// that is not answered delays a run no longer than [`GUEST_FIRST_MAX`].
    fn let_guest_first(&mut self, copies: &mut Copies) {
        if copies.held || !self.schedule.lets_guest_first() {
            copies.guest_first_until = None;
            return;
        }
        let now = self.env.now();
        copies.guest_first_until.get_or_insert(now + GUEST_FIRST_MAX);
    }

    /// How long nothing more is begun, for the sake of the bandwidth as it is now, of a retry or of the guest.
    fn rest_of(&self, copies: &Copies) -> Duration {
        let now = self.env.now();
        let guest_first = copies.guest_first_until.map_or(Duration::ZERO, |until| until.since(now));
        let rest = copies.not_before.since(now).max(guest_first);
        if copies.held { rest } else { rest.max(self.bucket.wait()) }
    }

    /// How large the next copy may be; `None` if there may be none now.
    fn next_size(&self, copies: &Copies) -> Option<u64> {
        let is_due = self.rest_of(copies).is_zero() && !self.mirror.is_target_stalled();
        if copies.by_window {
            return (is_due && copies.in_flight.is_empty()).then_some(self.options.window_bytes_max);
        }
        let share = if copies.held { 1.0 } else { self.latency_controller.share() };
        let allowed = (self.window.bytes() as f64 * share) as u64;
        let is_in_the_way = self.is_in_the_way() && !copies.held;
        let allowed = if is_in_the_way { allowed.min(STEP_BYTES) } else { allowed };
        if !is_due || (copies.bytes > 0 && copies.bytes >= allowed) {
            return None;
        }
        Some(match is_in_the_way {
            true => STEP_BYTES,
            false => {
                let fair = (allowed / 4).clamp(COPY_BYTES_MIN.min(allowed), COPY_BYTES_MAX);
                fair.min(self.options.copy_bytes_max)
            }
        })
    }

    /// The memory for a copy of `length`: one buffer, or one for each copy that the paper's mover has outstanding. `None`
    /// if copies under way have to end first.
    async fn buffers(&self, copies: &mut Copies, length: Bytes) -> Option<Vec<Buffer>> {
        let size = if copies.by_window { length.0.min(mover::COPY_BYTES) } else { length.0 } as usize;
        let first = match self.pool.try_acquire(size) {
            Some(buffer) => buffer,
            None if copies.in_flight.is_empty() => self.pool.acquire(size).await,
            None => return None,
        };
        // What cannot be had at once is done without: whoever waits holding some waits for those who do the same.
        let wanted = length.0.div_ceil(size as u64).min(mover::COPIES_MAX as u64) - 1;
        let others = (0..wanted).map_while(|_| self.pool.try_acquire(size));
        Some(std::iter::once(first).chain(others).collect())
    }

    fn begin_copy(&mut self, copies: &mut Copies, run: Range<u64>, length: Bytes, mut buffers: Vec<Buffer>) {
        if !self.mirror.tracker(|tracker| tracker.claim(run.clone())) {
            return;
        }
        if !copies.is_detour {
            self.cursor = run.end;
        }
        self.schedule.began(&run, buffers.is_empty());
        if copies.guest_first_until.take().is_some() {
            self.schedule.waited_for_long();
        }
        let (mirror, env) = (Arc::clone(&self.mirror), Arc::clone(&self.env));
        let began = env.now();
        // A hole counts as one small copy, so that many cannot be under way at once.
        let is_hole = buffers.is_empty();
        let bytes = if is_hole { COPY_BYTES_MIN } else { length.0 };
        copies.bytes += bytes;
        self.note_busy(true, 0);
        let by_window = copies.by_window;
        let bucket = (!copies.held).then(|| Arc::clone(&self.bucket));
        copies.in_flight.push(Box::pin(async move {
            // Devices that answer at once would otherwise never let anybody else run.
            crate::pace::yield_now().await;
            let (outcome, at_once) = if is_hole {
                (mirror.copy_zero_run(run.clone(), bucket).await.map(|_| Copied::default()), false)
            } else if by_window {
                (mirror.copy_window(run.clone(), buffers).await, false)
            } else {
                let buffer = buffers.pop().expect("what is no hole has a buffer");
                crate::pace::at_once(mirror.copy_run(run.clone(), buffer)).await
            };
            Ended { run, bytes, began, outcome, at_once, is_hole }
        }));
    }

    /// Which chunks the schedule has copied next. There are at most `chunks_max` where hot chunks are put off or a
    /// window is held as a whole. Otherwise there are as many as `longest`, if they are a hole.
    async fn next_scheduled(&mut self, chunks_max: u64, longest: u64, by_window: bool) -> Option<Scheduled> {
        loop {
            let (from, schedule) = (self.cursor, &mut self.schedule);
            let (choice, passes_once) = self.mirror.tracker(|tracker| {
                tracker.session()?;
                let longest = if by_window || tracker.puts_off() { chunks_max } else { longest };
                let passes_once = tracker.passes_once();
                let choice = match schedule.next(tracker, from, longest) {
                    Choice::Nothing if !passes_once => schedule.next(tracker, 0, longest),
                    choice => choice,
                };
                Some((choice, passes_once))
            })?;
            match choice {
                Choice::Copy(run) => return Some(Scheduled { run, data_max: chunks_max, is_detour: false }),
                Choice::Detour { run, data_max } => {
                    return Some(Scheduled { run, data_max: data_max.min(chunks_max), is_detour: true });
                }
                Choice::GoOnAt(next) => self.cursor = next,
                Choice::Nothing => {
                    if passes_once {
                        self.cursor = self.mirror.tracker(|tracker| tracker.chunks());
                    }
                    return None;
                }
            }
            crate::pace::yield_now().await;
        }
    }

    /// Which chunks to copy next, as data or as a hole.
    async fn next_run(&mut self, copies: &mut Copies, chunks_max: u64) -> Option<Next> {
        let unit = self.options.chunk_bytes;
        let hole_bytes_max = if self.statistics.is_limited() { LIMITED_HOLE_BYTES_MAX } else { HOLE_BYTES_MAX };
        let scheduled = self.next_scheduled(chunks_max, hole_bytes_max / unit, copies.by_window).await?;
        let Scheduled { run, data_max, is_detour } = scheduled;
        copies.is_detour = is_detour;
        let extent = self.mirror.tracker(|tracker| tracker.run_extent(&run));
        let known = copies.hint.filter(|(hint, _)| hint.contains(Extent::new(extent.offset, Bytes(1))));
        let (hint, is_hole) = match known {
            Some(known) => known,
            None => {
                let stretch = self.mirror.skip.look(&self.mirror.copy_face, extent).await;
                let known = (Extent::between(extent.offset, stretch.end), stretch.reason.is_some());
                copies.hint = Some(known);
                known
            }
        };
        let end = hint.end().min(extent.end());
        if is_hole {
            let chunks = match end == extent.end() {
                true => run.end - run.start,
                false => (end - extent.offset).0 / unit,
            };
            if chunks > 0 {
                return Some(Next::Hole(run.start..run.start + chunks));
            }
        }
        // Up to where the data ends, in whole chunks, but never less than one.
        let data_end = if is_hole { extent.offset + Bytes(1) } else { end };
        let chunks = (data_end - extent.offset).0.div_ceil(unit).min(data_max).min(run.end - run.start);
        Some(Next::Data(run.start..run.start + chunks.max(1)))
    }

    /// Draws conclusions from a copy that has ended.
    fn take_ended(&mut self, copies: &mut Copies, ended: Ended) -> Option<Event> {
        let now = self.env.now();
        if !ended.is_hole {
            self.at_once = ended.at_once;
        }
        self.note_busy(!copies.in_flight.is_empty(), if ended.is_hole { 0 } else { ended.bytes });
        if copies.heed_guest() {
            let rest = self.duty_cycle.record(ended.began, now, self.latency_controller.duty_cycle());
            copies.not_before = copies.not_before.max(now + rest);
        }
        let (session, error) = match ended.outcome {
            Ok(_) => {
                copies.retries.remove(&ended.run.start);
                if ended.is_hole {
                    copies.hint = None;
                } else {
                    let allowed = (self.window.bytes() as f64 * self.latency_controller.share()) as u64;
                    let full = copies.bytes + 2 * ended.bytes >= allowed && self.latency_controller.share() >= 1.0
                        || copies.bytes + 2 * ended.bytes >= self.window.bytes();
                    self.window.record(now, ended.bytes, now.since(ended.began), full);
                }
                return None;
            }
            Err(CopyError::Target(session, error)) => (Some(session), error),
            Err(CopyError::Source(error)) => (None, error),
            Err(CopyError::Silent) => {
                self.cursor = self.cursor.min(ended.run.start);
                return None;
            }
        };
        copies.hint = None;
        let retries = copies.retries.entry(ended.run.start).or_default();
        *retries += 1;
        let is_borne = *retries <= RETRIES_MAX
            && match session {
                Some(session) => self.mirror.bears_failure(session, &error),
                None => may_pass(&error),
            };
        if is_borne {
            self.statistics.retries += 1;
            tracing::warn!(run = ?ended.run, error = error.chain(), "a copy failed and is tried again");
            let pause = RETRY_PAUSE * (1 << (*retries - 1));
            copies.not_before = copies.not_before.max(now + pause);
            self.cursor = self.cursor.min(ended.run.start);
            return None;
        }
        match session {
            Some(session) => {
                self.mirror.fail_target(session, error);
                None
            }
            None => {
                self.error = Some(error.wrap("the source cannot be read"));
                Some(Event::Broken)
            }
        }
    }
}

/// Whether reading the source again could help.
fn may_pass(error: &Error) -> bool {
    !matches!(
        error.kind(),
        ErrorKind::OutOfRange
            | ErrorKind::Misaligned
            | ErrorKind::TooLarge
            | ErrorKind::Unsupported
            | ErrorKind::Fenced
    )
}
