//! Two devices that hold the same bytes, as one device: RAID 1 of two members.
//!
//! ```text
//!   write   ──▶ both members at once ──▶ both have done it ──────────────▶ answered
//!                   one has failed it ──▶ on record: that member is lost ──▶ answered
//!                   both have failed it ──▶ an error; no member is lost by that
//!   flush   ──▶ the same
//!   read    ──▶ the first member that is not lost ──▶ it fails ──▶ the other one, if that is not lost
//!
//!   both well ──▶ suspect: it lacks what the other one has ──▶ MemberLoss::note ──▶ lost, for good
//!                     ╰──────────── the note fails: tried again by the next request ◀──╯
//! ```
//!
//! A write that is answered is on every member that is not lost. The loss of a member is on record before anything is answered
//! that it lacks. So whoever opens the pair again, after whatever crash, reads a member that has every answered write. While a
//! suspect is not on record, each request tries to put it there first, reads too, and fails if it cannot.
//!
//! Reads are as stable as those of one device:
//!
//! - Mutations that overlap are carried out one after the other. Otherwise the members could end with different ones.
//! - A read waits for mutations under way in its extent. So nobody sees a write that only one member has.
//! - A discard is executed as zeroes that may unmap, since two members may hold different bytes after it.
//! - After a mutation that failed on both, or was abandoned, its extent is *unsettled*: each sector of each member is old or
//!   new. The first request that reads there compares the members and makes the second like the first. If the first cannot be
//!   read, it becomes like the second. Thus a reader finds old or new, sector by sector, and finds the same from then on,
//!   whichever member is lost later.
//! - A flush that fails on both unsettles everything. Of what it covered, each member may have lost something else.
//!
//! | at a crash | member 0 | member 1 | a read finds afterwards |
//! |---|---|---|---|
//! | no write is under way | new | new | new |
//! | a write is under way | old or new | old or new | what member 0 has |
//! | member 1 is suspect, not on record | new | old or new | new |
//! | member 0 is suspect, not on record | old or new | new | what member 0 has, like one device after a failed request |
//! | the suspect is on record | lost, or new | new, or lost | new |
//! | power loss | any of what was not flushed | any of it, perhaps other bytes | what member 0 has |
//!
//! What is unsettled is not stored. After a crash the members may differ where writes were unanswered, and after a power loss
//! where they were unflushed. Reads are stable until member 0 is lost or cannot be read; then they may find what member 1 has
//! of those writes. Whoever opens the pair prevents that with [`ReplicaPair::copy_to_second`], before the first read, for all
//! that must stay as it is read.
//!
//! A failed read makes no member lost: what it holds may be needed. A member that never answers holds its requests up.
//!
//! A lost member comes back as another device ([`ReplicaPair::rebuild`]), while the pair is in use:
//!
//! ```text
//!   lost ──▶ the new device takes its place, all of it unsettled ──▶ written to with the other one, never read
//!                                                                        │ piece by piece made like the other one
//!                                                                        ▼
//!   lost ◀── it fails, or a crash: on record it is lost still       all alike ──▶ flushed ──▶ trusted ──▶ on record: not lost
//! ```

mod rebuild;
mod state;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use block::{
    BlockDevice, Buffer, Bytes, Device, Error, ErrorKind, Extent, ExtentState, ExtentStatus, Geometry, IoFuture,
    Mutation, MutationKind, RangeGuard, RangeLock, Result,
};
use parking_lot::{Mutex, RwLock};

use crate::store::geometry_of_both;
use crate::translate::in_units;
use state::State;

/// Members are compared in pieces of this many bytes at most.
const PIECE_BYTES_MAX: u64 = 1 << 20;

/// Where it is put on record that a member is lost.
pub trait MemberLoss: Send + Sync {
    /// Notes that `member` (0 or 1) has failed with `error` and lacks something that the other one has. Done means durable.
    /// From then on the pair is opened with that member as lost. If it fails, it is asked again, of the same member.
    fn note<'a>(&'a self, member: usize, error: &'a Error) -> IoFuture<'a, ()>;

    /// Notes that `member`, which is `device` now, has all that the other one has, durably: it is lost no more. Done means durable.
    fn note_whole<'a>(&'a self, member: usize, device: &'a Device) -> IoFuture<'a, ()>;
}

/// Two devices that are kept alike. Clones are the same pair.
#[derive(Clone)]
pub struct ReplicaPair {
    inner: Arc<Inner>,
}

struct Inner {
    members: RwLock<[Device; 2]>,
    geometry: Geometry,
    loss: Arc<dyn MemberLoss>,
    /// Held alone by who changes an extent, and shared by who reads it.
    ranges: RangeLock,
    /// Never held across a wait.
    state: Mutex<State>,
    /// Held by who puts a loss on record.
    recording: tokio::sync::Mutex<()>,
    failed_reads: [AtomicU64; 2],
    reads_by_other: AtomicU64,
}

/// How the members of a pair are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplicaStatus {
    /// The member that is lost (0 or 1): never asked again.
    pub lost: Option<usize>,
    /// The member that lacks something, which could not be put on record yet. Requests fail until it is.
    pub suspect: Option<usize>,
    /// The member that is made like the other one, which has `unsettled_bytes` to go, until it is on record that it is so.
    pub rebuilt: Option<usize>,
    /// What the lost or the suspect member has failed with, unless it was lost before the pair was opened.
    pub cause: Option<String>,
    /// How many reads, and questions for extents, each member has failed.
    pub failed_reads: [u64; 2],
    /// How many of these the other member has answered.
    pub reads_by_other: u64,
    /// In how many bytes the members may differ until those are read or written next.
    pub unsettled_bytes: u64,
}

impl ReplicaPair {
    /// The pair of `members`, which hold the same bytes wherever anybody relies on them. The one that is on record as `lost` (0
    /// or 1) is asked for nothing, not even its size. A later loss is noted with `loss`.
    ///
    /// # Errors
    /// Invalid if the members differ in size or are one device, or if there is no such member as `lost`.
    pub fn new(members: [Device; 2], lost: Option<usize>, loss: Arc<dyn MemberLoss>) -> Result<Self> {
        let refuse = |context: String| Err(Error::new(ErrorKind::Invalid, context));
        let [first, second] = &members;
        let geometry = match lost {
            Some(0) => second.geometry(),
            Some(1) => first.geometry(),
            Some(member) => return refuse(format!("a pair has no member {member}")),
            None if first.is_same(second) => return refuse(format!("{} cannot be both of a pair", first.name())),
            None if first.size() != second.size() => {
                let (one, other) = (first.size().0, second.size().0);
                let names = format!("{} and {}", first.name(), second.name());
                return refuse(format!("{names} cannot be a pair: they have {one} and {other} bytes"));
            }
            None => {
                let both = geometry_of_both(first.size(), first, second);
                Geometry { read_only: both.read_only || first.geometry().read_only, ..both }
            }
        };
        let inner = Inner {
            members: RwLock::new(members),
            geometry,
            loss,
            ranges: RangeLock::new(),
            state: Mutex::new(State::new(lost)),
            recording: tokio::sync::Mutex::default(),
            failed_reads: Default::default(),
            reads_by_other: AtomicU64::new(0),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// How the members are.
    #[must_use]
    pub fn status(&self) -> ReplicaStatus {
        let inner = &self.inner;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let state = inner.state.lock();
        let lost_by = state.lost.as_ref().and_then(|(_, error)| error.as_ref());
        let cause = lost_by.or(state.suspect.as_ref().map(|(_, error)| error));
        ReplicaStatus {
            lost: state.lost.as_ref().map(|(member, _)| *member),
            suspect: state.suspect.as_ref().map(|(member, _)| *member),
            rebuilt: state.rebuilt.or(state.noted_whole),
            cause: cause.map(|error| error.chain()),
            failed_reads: [read(&inner.failed_reads[0]), read(&inner.failed_reads[1])],
            reads_by_other: read(&inner.reads_by_other),
            unsettled_bytes: state.unsettled_bytes().get(),
        }
    }

    /// The members that may have everything, with their numbers: not one that is lost or suspect, nor one that is rebuilt.
    #[must_use]
    pub fn trusted_members(&self) -> Vec<(usize, Device)> {
        let state = self.inner.state.lock();
        let members = self.inner.members.read();
        members.iter().cloned().enumerate().filter(|(member, _)| state.is_trusted(*member)).collect()
    }

    /// The members may differ in `extents`, as after a power loss: whoever reads there first makes them alike, so that what was read stays.
    /// [`copy_to_second`](Self::copy_to_second) does it aside.
    pub fn expect_unlike(&self, extents: &[Extent]) {
        let mut state = self.inner.state.lock();
        extents.iter().for_each(|extent| state.unsettle(*extent));
    }

    /// Makes member 1 like member 0 in `extents`, rounded out to what requests are aligned to. What member 0 cannot give is
    /// taken from member 1 instead. Nothing is written where they are alike, nor if a member is lost. A member that fails to be
    /// written is lost. What was written is durable after the next flush.
    ///
    /// # Errors
    /// Read-only if a member is, out of range; otherwise what the members say if neither can be read, or what noting a loss says.
    pub async fn copy_to_second(&self, extents: &[Extent]) -> Result<()> {
        let inner = &self.inner;
        let Geometry { size, request_alignment, read_only, .. } = inner.geometry;
        if read_only {
            return Err(Error::new(ErrorKind::ReadOnly, "a pair that is read-only cannot be made alike"));
        }
        for extent in extents {
            if extent.offset.0.checked_add(extent.length.0).is_none_or(|end| end > size.0) {
                return Err(Error::new(ErrorKind::OutOfRange, format!("{extent} do not lie within a pair of {size}")));
            }
            let unit = u64::from(request_alignment);
            let whole = Extent::between(extent.offset.align_down(unit), extent.end().align_up(unit).min(size));
            for piece in whole.split_at_multiples(inner.piece_bytes()) {
                let _guard = inner.ranges.exclusive(piece).await;
                inner.state.lock().unsettle(piece);
                inner.settle(piece).await?;
            }
        }
        Ok(())
    }
}

impl Inner {
    fn piece_bytes(&self) -> u64 {
        PIECE_BYTES_MAX.min(self.geometry.transfer_bytes_max.into())
    }

    fn member(&self, member: usize) -> Device {
        self.members.read()[member].clone()
    }

    fn count_failed_read(&self, member: usize, error: &Error) {
        self.failed_reads[member].fetch_add(1, Ordering::Relaxed);
        tracing::warn!(
            member = self.member(member).name(),
            error = error.chain(),
            "a member of a pair fails to be read"
        );
    }

    /// Puts on record that a member is lost, if one is suspect.
    async fn record_suspect(&self) -> Result<()> {
        if self.state.lock().suspect.is_none() {
            return Ok(());
        }
        let _turn = self.recording.lock().await;
        // Somebody may have done it meanwhile.
        let Some((member, error)) = self.state.lock().suspect.clone() else { return Ok(()) };
        let device = self.member(member);
        let name = device.name();
        self.loss
            .note(member, &error)
            .await
            .map_err(|failure| failure.wrap(format!("putting on record that {name} is lost ({})", error.chain())))?;
        tracing::error!(member = name, error = error.chain(), "a member of a pair is lost");
        self.state.lock().lose_suspect();
        Ok(())
    }

    /// `member` has failed what the other one has done. Returns once it is lost, which is on record then.
    async fn lose(&self, member: usize, error: Error) -> Result<()> {
        {
            let mut state = self.state.lock();
            if state.rebuilt == Some(member) {
                let device = self.member(member);
                tracing::error!(member = device.name(), error = error.chain(), "a member of a pair cannot be rebuilt");
                state.abandon_rebuild(error);
                return Ok(());
            }
        }
        let accused = self.state.lock().accuse(member, error);
        self.record_suspect().await?;
        accused.map_err(|error| error.wrap(format!("{} alone is left", self.member(member).name())))
    }

    /// Has every member that is not lost carry out `request`. Gives an error unless each one has done it that is not lost now.
    async fn on_members<F: Future<Output = Result<()>>>(&self, request: impl Fn(Device) -> F) -> Result<Done> {
        let (lost, first, members) = {
            let state = self.state.lock();
            // A member is replaced under the same lock.
            (state.lost.is_some(), state.first(), self.members.read().clone())
        };
        let [one, other] = members;
        if lost {
            let left = if first == 0 { one } else { other };
            return request(left).await.map(|()| Done::ByAll);
        }
        match futures::join!(request(one), request(other)) {
            (Ok(()), Ok(())) => Ok(Done::ByAll),
            (Err(error), Ok(())) => self.lose(0, error).await.map(|()| Done::ByAll),
            (Ok(()), Err(error)) => self.lose(1, error).await.map(|()| Done::ByAll),
            (Err(error), Err(_)) => Ok(Done::ByNone(error)),
        }
    }

    async fn write(&self, mutation: Mutation) -> Result<()> {
        let extent = mutation.extent();
        let mutation = match mutation.kind() {
            MutationKind::Discard => Mutation::zeroes(extent, true).with_fua(mutation.fua),
            MutationKind::Data(_) | MutationKind::Zeroes { .. } => mutation,
        };
        let _guard = self.ranges.exclusive(extent).await;
        self.record_suspect().await?;
        let change = Change::begin(self, extent);
        let write = |member: Device| {
            let mutation = mutation.clone();
            async move { member.write(mutation).await }
        };
        match self.on_members(write).await? {
            Done::ByAll => change.settle(),
            Done::ByNone(error) => return Err(error),
        }
        Ok(())
    }

    async fn flush(&self) -> Result<()> {
        self.record_suspect().await?;
        match self.on_members(|member| async move { member.flush().await }).await? {
            Done::ByAll => Ok(()),
            Done::ByNone(error) => {
                self.state.lock().flush_failed(Extent::whole(self.geometry.size));
                Err(error)
            }
        }
    }

    /// Keeps mutations from `extent`, in which the members are alike then.
    async fn hold_settled(&self, extent: Extent) -> Result<RangeGuard> {
        let shared = self.ranges.shared(extent).await;
        self.record_suspect().await?;
        if self.state.lock().unsettled_in(extent).is_empty() {
            return Ok(shared);
        }
        drop(shared);
        let alone = self.ranges.exclusive(extent).await;
        self.settle(extent).await?;
        Ok(alone)
    }

    /// Makes the members alike wherever they may differ in `extent`, which the caller holds alone.
    async fn settle(&self, extent: Extent) -> Result<()> {
        self.record_suspect().await?;
        let unsettled = self.state.lock().unsettled_in(extent);
        for piece in unsettled.into_iter().flat_map(|part| part.split_at_multiples(self.piece_bytes())) {
            self.make_alike(piece).await?;
        }
        Ok(())
    }

    async fn make_alike(&self, piece: Extent) -> Result<()> {
        let since = self.state.lock().moment();
        if self.state.lock().lost.is_some() {
            return Ok(());
        }
        let members = self.members.read().clone();
        let rebuilt = self.state.lock().rebuilt;
        if let Some(member) = rebuilt {
            return self.rebuild_piece(piece, (&members, member), since).await;
        }
        let read = |member: usize| members[member].read(piece.offset, Buffer::unpooled(piece.length.as_usize()));
        let (one, other) = futures::join!(read(0), read(1));
        for (member, outcome) in [&one, &other].into_iter().enumerate() {
            outcome.as_ref().err().into_iter().for_each(|error| self.count_failed_read(member, error));
        }
        let (right, to) = match (one, other) {
            (Ok(one), Ok(other)) if one[..] == other[..] => {
                self.state.lock().settle(piece, since);
                return Ok(());
            }
            (Ok(one), _) => (one, 1),
            (Err(_), Ok(other)) => (other, 0),
            (Err(error), Err(_)) => return Err(error),
        };
        if !self.state.lock().is_trusted(1 - to) {
            // It became suspect meanwhile: what it has is not to be copied. Then only the other one counts.
            return self.record_suspect().await;
        }
        match members[to].write(Mutation::data(piece.offset, right.freeze())).await {
            Ok(()) => self.state.lock().settle(piece, since),
            Err(error) => self.lose(to, error).await?,
        }
        Ok(())
    }

    /// Asks the first member that is not lost, and if that fails the other one, if that may have everything.
    async fn ask<T, F: Future<Output = Result<T>>>(&self, mut question: impl FnMut(Device) -> F) -> Result<T> {
        let member = self.state.lock().first();
        let error = match question(self.member(member)).await {
            Ok(answer) => return Ok(answer),
            Err(error) => error,
        };
        self.count_failed_read(member, &error);
        let other = 1 - member;
        if !self.state.lock().is_trusted(other) {
            return Err(error);
        }
        match question(self.member(other)).await {
            Ok(answer) => {
                self.reads_by_other.fetch_add(1, Ordering::Relaxed);
                Ok(answer)
            }
            Err(second) => {
                self.count_failed_read(other, &second);
                Err(error)
            }
        }
    }

    async fn read(&self, offset: Bytes, buffer: Buffer) -> Result<Buffer> {
        let length = buffer.len();
        let _guard = self.hold_settled(Extent::new(offset, length.into())).await?;
        let mut own = Some(buffer);
        // A member that fails keeps the buffer.
        let read = |member: Device| {
            let buffer = own.take().unwrap_or_else(|| Buffer::unpooled(length));
            async move { member.read(offset, buffer).await }
        };
        self.ask(read).await
    }

    async fn describe(&self, extent: Extent) -> Result<Vec<ExtentStatus>> {
        self.record_suspect().await?;
        if !self.state.lock().unsettled_in(extent).is_empty() {
            return Ok(vec![ExtentStatus { extent, state: ExtentState::Data }]);
        }
        let pieces = self.ask(|member| async move { member.extents(extent).await }).await?;
        Ok(in_units(pieces, self.geometry.request_alignment.into(), self.geometry.size))
    }
}

/// Who has carried a request out.
enum Done {
    /// All members that are not lost.
    ByAll,
    /// Both members have failed it.
    ByNone(Error),
}

/// A mutation under way, of which nobody knows what the members have of it until it is settled.
struct Change<'a> {
    inner: &'a Inner,
    extent: Extent,
    began: u64,
    is_settled: bool,
}

impl<'a> Change<'a> {
    fn begin(inner: &'a Inner, extent: Extent) -> Self {
        Self { inner, extent, began: inner.state.lock().moment(), is_settled: false }
    }

    /// Every member that is not lost has it.
    fn settle(mut self) {
        self.is_settled = true;
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        let mut state = self.inner.state.lock();
        match self.is_settled {
            true => state.settle(self.extent, self.began),
            false => state.unsettle(self.extent),
        }
    }
}

impl BlockDevice for ReplicaPair {
    fn geometry(&self) -> Geometry {
        self.inner.geometry
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(self.inner.read(offset, buffer))
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(self.inner.write(mutation))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.inner.flush())
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        Box::pin(self.inner.describe(extent))
    }
}

impl std::fmt::Debug for ReplicaPair {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [first, second] = &*self.inner.members.read();
        write!(out, "ReplicaPair({} and {})", first.name(), second.name())
    }
}

#[cfg(test)]
mod tests;
