//! One request, carried out on the export's device.

use std::sync::Arc;

use block::{Buffer, Bytes, Device, Error, ErrorKind, ExtentState, ExtentStatus, Mutation};

use super::outbox::Reply;
use super::pieces;
use super::quota::Quota;
use crate::protocol::{BlockSizes, Command, Errno, Request, allocation, block_status_payload, command_flag};

/// The metadata context that this server has, by its number on the wire.
pub(crate) const ALLOCATION_CONTEXT: u32 = 1;

/// How many extents one answer describes at most.
const DESCRIPTORS_MAX: usize = 4096;

/// The largest payload: what the protocol has every server take from a client that was not told less.
pub(crate) const PAYLOAD_BYTES_MAX: u32 = 32 << 20;

/// How much a cache request reads at once.
const CACHE_BYTES: u64 = 256 << 10;

/// What was negotiated: all that a request needs.
pub(crate) struct Context {
    pub(crate) device: Device,
    pub(crate) quota: Arc<Quota>,
    /// What clients are told of, and what the device is asked for at once.
    pub(crate) sizes: BlockSizes,
    /// The largest read or write that is carried out.
    pub(crate) payload_max: u32,
    pub(crate) is_read_only: bool,
    pub(crate) is_structured: bool,
    pub(crate) has_allocation: bool,
    /// See [`Export::with_failed_flushes`](super::Export::with_failed_flushes).
    pub(crate) failed_flush_sent: Option<FailedFlushSent>,
}

/// What is called when a client was sent that a flush failed.
pub(crate) type FailedFlushSent = Arc<dyn Fn() + Send + Sync>;

impl Context {
    /// What is wrong with `request` before the device is asked.
    pub(crate) fn validate(&self, request: &Request) -> Result<(), (Errno, &'static str)> {
        let known = match self.is_structured {
            true => request.command.valid_flags(),
            false => request.command.valid_flags() & !command_flag::DF,
        };
        if request.flags & !known != 0 {
            return Err((Errno::Invalid, "flags are set that have no meaning with this command"));
        }
        if matches!(request.command, Command::Unknown(_)) {
            return Err((Errno::Invalid, "the command is unknown"));
        }
        if self.is_read_only && request.command.is_mutation() {
            return Err((Errno::NotPermitted, "the export is read-only"));
        }
        if request.command == Command::BlockStatus && !(self.is_structured && self.has_allocation) {
            return Err((Errno::Invalid, "no metadata context was negotiated"));
        }
        let has_payload = matches!(request.command, Command::Read | Command::Write);
        if has_payload && request.length > self.payload_max {
            return Err((Errno::Invalid, "the request is larger than any that is carried out"));
        }
        if request.length == 0 && request.command != Command::Flush {
            return Err((Errno::Invalid, "the request is for no bytes"));
        }
        if request.offset.get().checked_add(request.length.into()).is_none() {
            return Err((out_of_range(request.command), "the request reaches past the end of all numbers"));
        }
        Ok(())
    }
}

/// Carries out a valid `request`; a write comes with its payload.
pub(crate) async fn execute(context: &Context, request: Request, payload: Option<Buffer>) -> Reply {
    let device = &context.device;
    let fua = request.has(command_flag::FUA);
    let is_large = request.length > context.sizes.maximum;
    let outcome = match (request.command, payload) {
        (Command::Read, _) => {
            let buffer = context.quota.acquire(request.length as usize).await;
            let read = match is_large {
                false => device.read(request.offset, buffer).await,
                true => Box::pin(pieces::read(context, request.offset, buffer)).await,
            };
            match read {
                Ok(buffer) => {
                    return Reply::data(context.is_structured, request.cookie, request.offset.get(), buffer);
                }
                Err(error) => Err(error),
            }
        }
        (Command::Write, Some(buffer)) => {
            let mutation = Mutation::data(request.offset, buffer.freeze()).with_fua(fua);
            match is_large {
                false => device.write(mutation).await,
                true => Box::pin(pieces::write(context, &mutation)).await,
            }
        }
        (Command::Flush, _) => device.flush().await,
        (Command::Trim, _) => device.write(Mutation::discard(request.extent()).with_fua(fua)).await,
        (Command::WriteZeroes, _) => {
            let may_unmap = !request.has(command_flag::NO_HOLE);
            device.write(Mutation::zeroes(request.extent(), may_unmap).with_fua(fua)).await
        }
        (Command::Cache, _) => cache(context, &request).await,
        (Command::BlockStatus, _) => match device.extents(request.extent()).await {
            Ok(pieces) => {
                let descriptors = descriptors(&request, &pieces, context.sizes.minimum.into());
                let payload = block_status_payload(ALLOCATION_CONTEXT, &descriptors);
                return Reply::block_status(request.cookie, payload);
            }
            Err(error) => Err(error),
        },
        (Command::Write | Command::Disconnect | Command::Unknown(_), _) => {
            Err(Error::new(ErrorKind::Internal, "a request came to be carried out that has nothing to carry out"))
        }
    };
    match outcome {
        Ok(()) => Reply::done(request.cookie),
        Err(error) => {
            let message = error.chain();
            tracing::debug!(?request, error = message, "request failed");
            Reply::error(context.is_structured, request.cookie, errno_of(request.command, &error), &message)
                .of_failed_flush(request.command == Command::Flush)
        }
    }
}

/// Reads and forgets: what the client is about to read is in the backend's cache then.
async fn cache(context: &Context, request: &Request) -> Result<(), Error> {
    let unit = CACHE_BYTES.min(u64::from(context.sizes.maximum).next_power_of_two());
    let unit = unit.min(u64::from(context.sizes.maximum));
    for piece in request.extent().split_at_multiples(unit) {
        let buffer = context.quota.acquire(piece.length.as_usize()).await;
        context.device.read(piece.offset, buffer).await?;
    }
    Ok(())
}

const fn out_of_range(command: Command) -> Errno {
    match command {
        Command::Write | Command::WriteZeroes => Errno::NoSpace,
        _ => Errno::Invalid,
    }
}

/// The protocol's number for a device's error.
pub(crate) fn errno_of(command: Command, error: &Error) -> Errno {
    match error.kind() {
        ErrorKind::OutOfRange => out_of_range(command),
        ErrorKind::Misaligned | ErrorKind::TooLarge | ErrorKind::Invalid => Errno::Invalid,
        ErrorKind::ReadOnly | ErrorKind::PermissionDenied => Errno::NotPermitted,
        ErrorKind::NoSpace => Errno::NoSpace,
        ErrorKind::Fenced | ErrorKind::Cancelled => Errno::Shutdown,
        // Clients take this answer to write-zeroes as "not fast", which they had not asked for.
        ErrorKind::Unsupported if command != Command::WriteZeroes => Errno::NotSupported,
        _ => Errno::Io,
    }
}

/// The extents of an answer as lengths and flags: neighbours of one state merged, cut at multiples of the smallest
/// block. A client cannot address anything smaller. A block that is only partly zero is data.
fn descriptors(request: &Request, pieces: &[ExtentStatus], unit: u64) -> Vec<(u32, u32)> {
    let whole = request.extent();
    let mut merged = Merged { next: whole.offset, descriptors: Vec::new() };
    let mut described = whole.offset;
    for piece in pieces {
        let piece_end = piece.extent.end().min(whole.end());
        described = piece_end;
        let flags = match piece.state {
            ExtentState::Data => continue,
            ExtentState::Zero => allocation::ZERO,
            ExtentState::Hole => allocation::HOLE | allocation::ZERO,
        };
        let start = piece.extent.offset.align_up(unit);
        let end = if piece_end == whole.end() { piece_end } else { piece_end.align_down(unit) };
        if start < end {
            merged.push(start, 0);
            merged.push(end, flags);
        }
    }
    merged.push(described.align_up(unit).min(whole.end()), 0);
    merged.descriptors.truncate(if request.has(command_flag::REQ_ONE) { 1 } else { DESCRIPTORS_MAX });
    merged.descriptors
}

struct Merged {
    next: Bytes,
    descriptors: Vec<(u32, u32)>,
}

impl Merged {
    /// Everything up to `end` has `flags`.
    fn push(&mut self, end: Bytes, flags: u32) {
        // Lengths come from a request of 32 bits.
        let length = end.saturating_sub(self.next).get() as u32;
        self.next = self.next.max(end);
        match self.descriptors.last_mut() {
            _ if length == 0 => {}
            Some(last) if last.1 == flags => last.0 += length,
            _ => self.descriptors.push((length, flags)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::Extent;
    use proptest::prelude::*;

    fn request(offset: u64, length: u32, flags: u16) -> Request {
        Request { flags, command: Command::BlockStatus, cookie: 0, offset: Bytes(offset), length }
    }

    fn piece(offset: u64, length: u64, state: ExtentState) -> ExtentStatus {
        ExtentStatus { extent: Extent::new(Bytes(offset), Bytes(length)), state }
    }

    #[test]
    fn neighbours_of_one_state_are_merged_and_one_is_one() {
        use ExtentState::{Data, Hole, Zero};
        let pieces = [piece(0, 10, Data), piece(10, 20, Data), piece(30, 5, Hole), piece(35, 5, Zero)];
        assert_eq!(descriptors(&request(0, 40, 0), &pieces, 1), [(30, 0), (5, 3), (5, 2)]);
        assert_eq!(descriptors(&request(0, 40, command_flag::REQ_ONE), &pieces, 1), [(30, 0)]);
    }

    #[test]
    fn a_block_that_is_partly_zero_is_data() {
        use ExtentState::{Data, Hole};
        let pieces = [piece(0, 700, Data), piece(700, 900, Hole), piece(1600, 448, Data)];
        assert_eq!(descriptors(&request(0, 2048, 0), &pieces, 512), [(1024, 0), (512, 3), (512, 0)]);
        // An answer that ends early ends at a block all the same.
        assert_eq!(descriptors(&request(0, 4096, 0), &pieces[..1], 512), [(1024, 0)]);
        assert_eq!(descriptors(&request(0, 4096, 0), &[piece(0, 100, Hole)], 512), [(512, 0)]);
        // The odd end of a volume is not cut.
        assert_eq!(descriptors(&request(0, 700, 0), &[piece(0, 700, Hole)], 512), [(700, 3)]);
    }

    proptest! {
        #[test]
        fn what_is_called_zero_is_zero_and_lengths_are_blocks(
            lengths in prop::collection::vec((1_u64..3000, 0_u8..3), 1..12), unit_log2 in 0_u32..13, cut in 0_usize..12,
        ) {
            let unit = 1_u64 << unit_log2;
            let mut next = 0;
            let mut pieces = Vec::new();
            for (length, state) in lengths {
                let state = [ExtentState::Data, ExtentState::Zero, ExtentState::Hole][usize::from(state)];
                pieces.push(piece(next, length, state));
                next += length;
            }
            let total = next;
            pieces.truncate(cut.max(1));
            let answer = descriptors(&request(0, total as u32, 0), &pieces, unit);
            prop_assert!(!answer.is_empty());
            let mut at = 0;
            for (length, flags) in answer {
                let end = at + u64::from(length);
                prop_assert!(length > 0 && end <= total);
                prop_assert!(end.is_multiple_of(unit) || end == total);
                for piece in pieces.iter().filter(|piece| piece.extent.offset.get() < end && piece.extent.end().get() > at) {
                    prop_assert!(flags == 0 || piece.state.reads_zero(), "data at {:?} was called zero", piece.extent);
                }
                prop_assert!(flags == 0 || end <= pieces.last().expect("there is one").extent.end().get());
                at = end;
            }
        }
    }
}
