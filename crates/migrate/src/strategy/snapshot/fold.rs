//! Folding overlays into what lies below them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use block::{BufferPool, Bytes, Device, Mutation, Quiesced, Result, Slot};
use env::EnvRef;
use filters::RunOrigin;
use futures::StreamExt;
use futures::future::{BoxFuture, Either, select};
use futures::stream::FuturesUnordered;
use std::pin::pin;

use super::{Snapshot, Snapshots};
use crate::pace::PauseLimit;

/// What is folded in one piece at most.
const PIECE_BYTES: u64 = 1 << 20;
/// Runs of zeroes are longer: they move no data.
const ZERO_BYTES_MAX: u64 = 256 << 20;
/// So many pieces are under way at once, small ones included.
const PIECES_MAX: usize = 16;
/// How often `pace` is asked again while no piece ends.
const LOOK: Duration = Duration::from_millis(50);
/// An undone move tries again after this; it doubles.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// It does not grow beyond this.
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(5);
/// An undone move folds the last overlay with the guest held when it has no more than this.
const BACK_BYTES_MAX: Bytes = Bytes::mib(4);
/// Or after so many rounds, for a guest may write as fast as it is folded.
const BACK_ROUNDS_MAX: u32 = 8;
/// How long the guest's requests have to drain before it is let go once more.
const BACK_HOLD: Duration = Duration::from_millis(250);

/// What the next piece has to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    /// Nothing.
    Go,
    /// So long, or until a piece has ended.
    Wait(Duration),
    /// Nothing more is to be begun.
    Stop,
}

/// What became of the last overlay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Last {
    /// It held so much and is folded; the guest is below.
    Folded(Bytes),
    /// The guest's requests did not drain, and it was let go as it was.
    NotHeld,
    /// It took too long: the guest was let go, with what is folded still in the overlay, too.
    LetGo(Bytes),
}

/// Folds the overlays of one volume into one device.
pub(crate) struct Fold<'a> {
    pub(crate) snapshots: &'a mut Snapshots,
    pub(crate) slot: &'a Slot,
    pub(crate) env: &'a EnvRef,
    pub(crate) pool: &'a BufferPool,
    /// What they lie over: what the guest reads and writes when none is left.
    pub(crate) below: Device,
    /// The same, where what they hold is written: every write here ends, in an error if it must.
    pub(crate) into: Device,
    /// What must be flushed before an overlay may go: the source, whatever stands before it.
    pub(crate) durable: Device,
    /// How many bytes may be under way at once, also where nobody paces: the guest is held, or the move undone.
    pub(crate) in_flight_bytes_max: u64,
}

impl Fold<'_> {
    /// Folds the lowest overlay, which nobody writes to, and takes it away. Gives what it held, or nothing if it was
    /// stopped; then it is folded again from its beginning some time, which changes nothing.
    pub(crate) async fn fold_lowest(&mut self, pace: impl FnMut(u64, u64) -> Pace) -> Result<Option<Bytes>> {
        assert!(self.snapshots.len() > 1, "an overlay that the guest writes to is folded while it is held");
        let lowest = self.snapshots.stack[0].clone();
        let Some(bytes) = self.pour(&lowest, pace).await? else { return Ok(None) };
        self.durable.flush().await?;
        self.snapshots.stack[1].overlay.rebase(self.below.clone())?;
        self.snapshots.strike(1).await?;
        self.drop_lowest();
        self.snapshots.sweep().await;
        Ok(Some(bytes))
    }

    /// Holds the guest, folds the last overlay and lets the guest go on below. Its requests have `drain` to end. If
    /// folding takes longer than `hold` the guest goes on at once where it was. What is under way then ends beside the
    /// guest, and the overlay is folded again later. (The record that follows has no such limit.)
    pub(crate) async fn fold_last(&mut self, drain: Duration, hold: Option<Duration>) -> Result<Last> {
        assert!(self.snapshots.len() == 1, "one overlay is left");
        let Some(quiesced) = env::timeout(&**self.env, drain, self.slot.quiesce()).await else {
            return Ok(Last::NotHeld);
        };
        let last = self.snapshots.stack[0].clone();
        let (quiesced, bytes) = self.pour_held(&last, quiesced, hold).await?;
        let Some(quiesced) = quiesced else { return Ok(Last::LetGo(bytes)) };
        if let Some(prepared) = self.snapshots.prepared.take() {
            self.snapshots.obsolete.push(prepared.number);
        }
        // A record that failed is in doubt. After a crash, what the guest wrote to the overlay now could be gone, and
        // what it wrote below could be hidden by the overlay. So the guest is held until a store has settled the doubt.
        let mut pause = RETRY_PAUSE;
        while let Err(error) = self.snapshots.strike(1).await {
            tracing::warn!(error = error.chain(), "the guest is held until the record is settled");
            self.env.sleep(pause).await;
            pause = (pause * 2).min(RETRY_PAUSE_MAX);
        }
        quiesced.swap(self.below.clone());
        drop(quiesced);
        self.drop_lowest();
        self.snapshots.sweep().await;
        Ok(Last::Folded(bytes))
    }

    /// Folds `last`, and gives back the guest, still held, and what was folded. Without the guest it was let go: nothing is
    /// under way any more by then.
    async fn pour_held(
        &self,
        last: &Snapshot,
        quiesced: Quiesced,
        hold: Option<Duration>,
    ) -> Result<(Option<Quiesced>, Bytes)> {
        let (is_over, begun) = (AtomicBool::new(false), AtomicU64::new(0));
        let pace = |_, length| match is_over.load(Ordering::Relaxed) {
            true => Pace::Stop,
            false => {
                begun.fetch_add(length, Ordering::Relaxed);
                Pace::Go
            }
        };
        let mut work = pin!(async {
            let bytes = self.pour(last, pace).await?;
            self.durable.flush().await.map(|()| bytes)
        });
        let folded = match hold {
            Some(hold) => env::timeout(&**self.env, hold, work.as_mut()).await,
            None => Some(work.as_mut().await),
        };
        match folded {
            Some(folded) => Ok((Some(quiesced), folded?.expect("nobody stops it while the guest is held"))),
            None => {
                is_over.store(true, Ordering::Relaxed);
                drop(quiesced);
                work.await?;
                Ok((None, Bytes(begun.load(Ordering::Relaxed))))
            }
        }
    }

    fn drop_lowest(&mut self) {
        let gone = self.snapshots.stack.remove(0);
        self.snapshots.obsolete.push(gone.number);
    }

    /// Folds everything, whatever fails, as often as it takes: the end of a move that is undone. `note` hears of every
    /// failure and is asked for nothing.
    pub(crate) async fn fold_all(&mut self, mut note: impl FnMut(block::Error)) {
        let mut pause = RETRY_PAUSE;
        let (mut rounds, mut hold) = (0, PauseLimit::new(BACK_HOLD));
        while !self.snapshots.is_empty() {
            match self.fold_some(&mut rounds, &mut hold).await {
                Ok(()) => pause = RETRY_PAUSE,
                Err(error) => {
                    tracing::warn!(error = error.chain(), "an overlay could not be folded yet");
                    note(error);
                    self.env.sleep(pause).await;
                    pause = (pause * 2).min(RETRY_PAUSE_MAX);
                }
            }
        }
        // What was made and never used, or could not be removed yet.
        if let Some(prepared) = self.snapshots.prepared.take() {
            self.snapshots.obsolete.push(prepared.number);
        }
        if !self.snapshots.obsolete.is_empty() && self.snapshots.strike(0).await.is_ok() {
            self.snapshots.sweep().await;
        }
    }

    async fn fold_some(&mut self, rounds: &mut u32, hold: &mut PauseLimit) -> Result<()> {
        self.snapshots.rebase(&self.below)?;
        if self.snapshots.len() > 1 {
            return self.fold_lowest(|_, _| Pace::Go).await.map(drop);
        }
        if self.snapshots.top_bytes() > BACK_BYTES_MAX && *rounds < BACK_ROUNDS_MAX {
            *rounds += 1;
            let below = self.below.clone();
            return match self.snapshots.take(self.slot, &below, hold.limit()).await {
                Err(error) if error.kind() == block::ErrorKind::Busy => {
                    hold.note_failure();
                    Ok(())
                }
                Err(error) => {
                    // There is no room for another one, perhaps: the guest is held for longer then.
                    *rounds = BACK_ROUNDS_MAX;
                    Err(error)
                }
                Ok(()) => Ok(()),
            };
        }
        // However long that takes: the way back has no other end.
        if self.fold_last(hold.limit(), None).await? == Last::NotHeld {
            hold.note_failure();
            self.env.sleep(super::ENTER_PAUSE).await;
        }
        Ok(())
    }

    /// Writes what `snapshot` holds to what lies below. `pace` is asked before every piece with the bytes under way and
    /// the length of the piece. None if it stopped.
    async fn pour(&self, snapshot: &Snapshot, mut pace: impl FnMut(u64, u64) -> Pace) -> Result<Option<Bytes>> {
        let mut in_flight: FuturesUnordered<BoxFuture<'static, Result<u64>>> = FuturesUnordered::new();
        let (mut next, mut under_way, mut total) = (Bytes::ZERO, 0, Bytes::ZERO);
        let mut failure = None;
        let mut is_stopped = false;
        loop {
            let mut rest = LOOK;
            while failure.is_none() && !is_stopped && in_flight.len() < PIECES_MAX {
                let Some((extent, held)) = next_piece(snapshot, next) else { break };
                let length = if held == RunOrigin::Data { extent.length.0 } else { 0 };
                if under_way > 0 && under_way + length > self.in_flight_bytes_max {
                    break;
                }
                match pace(under_way, length) {
                    Pace::Go => {}
                    Pace::Wait(span) => {
                        rest = span.max(Duration::from_micros(1));
                        break;
                    }
                    Pace::Stop => {
                        is_stopped = true;
                        break;
                    }
                }
                let buffer = match held {
                    RunOrigin::Zeroes => None,
                    // Acquired before anything is read; waiting here is waiting for pieces under way.
                    RunOrigin::Data => match self.pool.try_acquire(extent.length.as_usize()) {
                        Some(buffer) => Some(buffer),
                        None if in_flight.is_empty() => Some(self.pool.acquire(extent.length.as_usize()).await),
                        None => break,
                    },
                };
                next = extent.end();
                under_way += length;
                total += Bytes(length);
                let (from, into) = (snapshot.device.clone(), self.into.clone());
                in_flight.push(Box::pin(async move {
                    // Devices that answer at once would otherwise never let anybody else run.
                    crate::pace::yield_now().await;
                    let write = match buffer {
                        None => Mutation::zeroes(extent, true),
                        Some(buffer) => Mutation::data(extent.offset, from.read(extent.offset, buffer).await?.freeze()),
                    };
                    into.write(write).await?;
                    Ok(length)
                }));
            }
            if in_flight.is_empty() {
                if let Some(error) = failure {
                    return Err(error);
                }
                if is_stopped {
                    return Ok(None);
                }
                if next_piece(snapshot, next).is_none() {
                    return Ok(Some(total));
                }
                self.env.sleep(rest).await;
                continue;
            }
            if let Either::Left((Some(ended), _)) = select(in_flight.next(), pin!(self.env.sleep(rest))).await {
                match ended {
                    Ok(length) => under_way -= length,
                    Err(error) => failure = failure.or(Some(error.wrap("folding a snapshot"))),
                }
            }
        }
    }
}

/// The next run that `snapshot` holds at or after `from`.
fn next_piece(snapshot: &Snapshot, from: Bytes) -> Option<(block::Extent, RunOrigin)> {
    match snapshot.overlay.next_stored(from, Bytes(PIECE_BYTES))? {
        (_, RunOrigin::Zeroes) => snapshot.overlay.next_stored(from, Bytes(ZERO_BYTES_MAX)),
        data => Some(data),
    }
}
