//! A lost member of a pair comes back as another device, while the pair is in use.

use std::sync::Arc;

use block::{Buffer, Bytes, Device, Error, ErrorKind, Extent, Mutation, Result};

use super::{Inner, ReplicaPair};

impl ReplicaPair {
    /// Has `member` (0 or 1) be lost, unless one is: whoever asks knows that it is of no use any more. Done means that it is on record.
    ///
    /// # Errors
    /// The other one is lost, or that cannot be put on record.
    pub async fn expel(&self, member: usize) -> Result<()> {
        let inner = &self.inner;
        inner.record_suspect().await?;
        inner.lose(member, Error::new(ErrorKind::Disconnected, "it is taken out of use")).await
    }

    /// Has `device` take the place of the member that is lost, and makes it like the other one. Returns once it has everything, and
    /// that is on record. Requests go on meanwhile. `is_wanted` is asked before each piece.
    ///
    /// # Errors
    /// Invalid if no member is lost, or if `device` does not suit; cancelled if it is not wanted any more; what the other member says if it cannot be
    /// read, and what `device` says if it cannot be written. The member is lost then, as before.
    pub async fn rebuild(&self, device: Device, is_wanted: impl Fn() -> bool + Send) -> Result<()> {
        let member = self.begin_rebuild(device).await?;
        self.finish_rebuild(member, is_wanted).await
    }

    /// The first part of [`rebuild`](Self::rebuild): `device` takes the place of the member that is lost. Gives which one that is.
    ///
    /// # Errors
    /// Invalid if no member is lost, or if `device` does not suit.
    pub async fn begin_rebuild(&self, device: Device) -> Result<usize> {
        self.inner.record_suspect().await?;
        self.inner.replace_lost(device)
    }

    /// The second part: `member`, whose place another device has taken, is made like the other one.
    ///
    /// # Errors
    /// As [`rebuild`](Self::rebuild).
    pub async fn finish_rebuild(&self, member: usize, is_wanted: impl Fn() -> bool + Send) -> Result<()> {
        let inner = &self.inner;
        let rebuilt = inner.make_whole(member, is_wanted).await;
        if let Err(error) = &rebuilt {
            let mut state = inner.state.lock();
            if state.rebuilt == Some(member) {
                state.abandon_rebuild(Error::new(error.kind(), error.chain()));
            }
        }
        rebuilt
    }
}

impl Inner {
    /// Has `device` take the place of the member that is lost.
    fn replace_lost(&self, device: Device) -> Result<usize> {
        let (own, whole) = (device.geometry(), Extent::whole(self.geometry.size));
        let refuse = |context: String| Err(Error::new(ErrorKind::Invalid, context));
        if own.size != self.geometry.size {
            return refuse(format!("{} has {} and the pair {}", device.name(), own.size, self.geometry.size));
        }
        let is_coarse = own.request_alignment > self.geometry.request_alignment;
        if is_coarse || own.transfer_bytes_max < self.geometry.transfer_bytes_max || own.read_only {
            return refuse(format!("{} does not take all requests that the pair takes", device.name()));
        }
        let mut state = self.state.lock();
        let left = state.first();
        if self.members.read()[left].is_same(&device) {
            return refuse(format!("{} cannot be both of a pair", device.name()));
        }
        let Some(member) = state.begin_rebuild(whole) else {
            return refuse("no member of the pair is lost".to_owned());
        };
        self.members.write()[member] = device;
        Ok(member)
    }

    async fn make_whole(&self, member: usize, is_wanted: impl Fn() -> bool + Send) -> Result<()> {
        // A flush that fails on both while this goes on leaves something unsettled again.
        loop {
            let unsettled = self.state.lock().unsettled_in(Extent::whole(self.geometry.size));
            if unsettled.is_empty() {
                break;
            }
            for piece in unsettled.into_iter().flat_map(|part| part.split_at_multiples(self.piece_bytes())) {
                if !is_wanted() {
                    return Err(Error::new(ErrorKind::Cancelled, "the pair is not used any more"));
                }
                let _guard = self.ranges.exclusive(piece).await;
                self.settle(piece).await?;
                self.check_rebuilt(member)?;
            }
        }
        let device = self.member(member);
        device.flush().await?;
        let _turn = self.recording.lock().await;
        {
            let mut state = self.state.lock();
            if state.rebuilt != Some(member) || state.unsettled_bytes() > Bytes::ZERO {
                let context = format!("{} failed when it was nearly rebuilt", device.name());
                return Err(Error::new(ErrorKind::Io, context));
            }
            // A failure from here on is noted after this is.
            state.rebuilt = None;
            state.noted_whole = Some(member);
        }
        let noted = self.loss.note_whole(member, &device).await;
        self.state.lock().noted_whole = None;
        if let Err(error) = noted {
            let error = error.wrap(format!("putting on record that {} is whole", device.name()));
            // Nobody knows what is on record now. It is made sure of before anything is answered that only the other one has.
            let noted = Error::new(error.kind(), error.chain());
            self.state.lock().suspect.get_or_insert_with(|| (member, Arc::new(noted)));
            return Err(error);
        }
        tracing::info!(member = device.name(), "a member of a pair is rebuilt");
        Ok(())
    }

    /// The member that is rebuilt is still that.
    fn check_rebuilt(&self, member: usize) -> Result<()> {
        let state = self.state.lock();
        if state.rebuilt == Some(member) {
            return Ok(());
        }
        let why =
            state.lost.as_ref().and_then(|(_, error)| error.as_ref()).map_or_else(String::new, |error| error.chain());
        Err(Error::new(ErrorKind::Io, format!("{} has failed: {why}", self.member(member).name())))
    }

    /// Gives `piece`, which the caller holds alone, to the member that is rebuilt.
    pub(super) async fn rebuild_piece(
        &self,
        piece: Extent,
        (members, member): (&[Device; 2], usize),
        since: u64,
    ) -> Result<()> {
        let left = 1 - member;
        let read = members[left].read(piece.offset, Buffer::unpooled(piece.length.as_usize())).await;
        let data = read.inspect_err(|error| self.count_failed_read(left, error))?;
        match members[member].write(Mutation::data(piece.offset, data.freeze())).await {
            Ok(()) => self.state.lock().settle(piece, since),
            Err(error) => self.lose(member, error).await?,
        }
        Ok(())
    }
}
