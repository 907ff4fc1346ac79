//! What a process and its helpers say to each other: messages of fixed length over a socket that keeps their bounds.
//!
//! ```text
//!   request  0 number │ 8 file │ 16 verb (u32) │ 20 mode (u32) │ 24 offset │ 32 length │ 40 slot   with new open files
//!   answer   0 number │ 8 the system's error, 0 if there was none (u64) │ 16 count
//! ```
//!
//! A file is opened with the mode 0, or with the number of those that are parked in the socket that comes with it. Syncs,
//! reads and writes have the mode 1 if they go through the witness. A look for holes has the unit as its mode, and
//! the highest bit if the file may be shorter than its volume. All numbers are little-endian. Both ends are the same
//! program.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

const MESSAGE_BYTES: usize = 48;
/// A file and its witness.
const FILES_MAX: usize = 2;
pub(super) const ANSWER_BYTES: usize = 24;
/// The mode's bit of a file that may be shorter than its volume.
const MAY_BE_SHORT: u32 = 1 << 31;

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    /// Keep the file that comes with this, and its witness, if that comes, too. If so many are `parked`, a socket comes in
    /// which they are.
    Open {
        parked: u32,
    },
    /// Close it.
    Close,
    Sync {
        by_witness: bool,
    },
    Allocate {
        mode: u32,
        offset: u64,
        length: u64,
    },
    /// Serve the connection that comes with this, whose requests have their bytes in the memory that comes, too.
    Line,
    /// Fill the slot from the file.
    Read {
        by_witness: bool,
        offset: u64,
        length: u64,
        slot: u64,
    },
    /// Write the slot to the file.
    Write {
        by_witness: bool,
        offset: u64,
        length: u64,
        slot: u64,
    },
    /// Say how long the file is.
    Length,
    /// Put into the slot where the extent has data, in pieces of whole units.
    Holes {
        offset: u64,
        length: u64,
        slot: u64,
        unit: u32,
        may_be_short: bool,
    },
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) id: u64,
    pub(super) file: u64,
    pub(super) verb: Verb,
}

impl Message {
    fn to_bytes(self) -> [u8; MESSAGE_BYTES] {
        let (verb, mode, offset, length, slot) = match self.verb {
            Verb::Open { parked } => (1_u32, parked, 0, 0, 0),
            Verb::Close => (2, 0, 0, 0, 0),
            Verb::Sync { by_witness } => (3, u32::from(by_witness), 0, 0, 0),
            Verb::Allocate { mode, offset, length } => (4, mode, offset, length, 0),
            Verb::Line => (5, 0, 0, 0, 0),
            Verb::Read { by_witness, offset, length, slot } => (6, u32::from(by_witness), offset, length, slot),
            Verb::Write { by_witness, offset, length, slot } => (7, u32::from(by_witness), offset, length, slot),
            Verb::Length => (8, 0, 0, 0, 0),
            Verb::Holes { offset, length, slot, unit, may_be_short } => {
                (9, unit | if may_be_short { MAY_BE_SHORT } else { 0 }, offset, length, slot)
            }
        };
        let mut bytes = [0; MESSAGE_BYTES];
        bytes[..8].copy_from_slice(&self.id.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.file.to_le_bytes());
        bytes[16..20].copy_from_slice(&verb.to_le_bytes());
        bytes[20..24].copy_from_slice(&mode.to_le_bytes());
        bytes[24..32].copy_from_slice(&offset.to_le_bytes());
        bytes[32..40].copy_from_slice(&length.to_le_bytes());
        bytes[40..].copy_from_slice(&slot.to_le_bytes());
        bytes
    }

    fn parse(bytes: &[u8; MESSAGE_BYTES]) -> Option<Self> {
        let short = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let (mode, offset, length, slot) = (short(20), long(24), long(32), long(40));
        let verb = match short(16) {
            1 => Verb::Open { parked: mode },
            2 => Verb::Close,
            3 => Verb::Sync { by_witness: mode != 0 },
            4 => Verb::Allocate { mode, offset, length },
            5 => Verb::Line,
            6 => Verb::Read { by_witness: mode != 0, offset, length, slot },
            7 => Verb::Write { by_witness: mode != 0, offset, length, slot },
            8 => Verb::Length,
            9 => {
                let (unit, may_be_short) = (mode & !MAY_BE_SHORT, mode & MAY_BE_SHORT != 0);
                Verb::Holes { offset, length, slot, unit, may_be_short }
            }
            _ => return None,
        };
        Some(Self { id: long(0), file: long(8), verb })
    }
}

/// What an answer has in the place of the system's error if the helper does not have the file: no call says that.
const UNKNOWN_FILE: u64 = 1 << 32;

/// The helper does not have the file: it may have had no room for it.
#[derive(Debug)]
pub(super) struct UnknownFile;

impl std::fmt::Display for UnknownFile {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "the helper of the device does not have the file")
    }
}

impl std::error::Error for UnknownFile {}

/// What became of a request, and how much it was, where that is a question.
pub(super) struct Answer {
    pub(super) id: u64,
    pub(super) outcome: io::Result<u64>,
}

impl Answer {
    pub(super) fn to_bytes(&self) -> [u8; ANSWER_BYTES] {
        let (code, count) = match &self.outcome {
            Ok(count) => (0, *count),
            Err(error) if error.get_ref().is_some_and(|cause| cause.is::<UnknownFile>()) => (UNKNOWN_FILE, 0),
            Err(error) => (u64::from(error.raw_os_error().unwrap_or(libc::EIO).unsigned_abs()), 0),
        };
        let mut bytes = [0; ANSWER_BYTES];
        bytes[..8].copy_from_slice(&self.id.to_le_bytes());
        bytes[8..16].copy_from_slice(&code.to_le_bytes());
        bytes[16..].copy_from_slice(&count.to_le_bytes());
        bytes
    }

    pub(super) fn parse(bytes: &[u8; ANSWER_BYTES]) -> Self {
        let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let outcome = match long(8) {
            0 => Ok(long(16)),
            UNKNOWN_FILE => Err(io::Error::other(UnknownFile)),
            code => Err(io::Error::from_raw_os_error(code as i32)),
        };
        Self { id: long(0), outcome }
    }
}

/// Sends a request, and `files` with it.
pub(super) fn send_message(
    socket: BorrowedFd<'_>,
    message: &Message,
    files: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(files));
    }
    sendmsg(socket, &[IoSlice::new(&message.to_bytes())], &mut ancillary, flags)?;
    Ok(())
}

/// The next request, and the files that have come with it; none at the end.
pub(super) fn receive_message(socket: BorrowedFd<'_>) -> io::Result<Option<(Message, Vec<OwnedFd>)>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; MESSAGE_BYTES];
    let received = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let files = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    let files: Vec<OwnedFd> = files.flatten().collect();
    if received.bytes != MESSAGE_BYTES {
        return Ok(None);
    }
    Ok(Message::parse(&bytes).map(|message| (message, files)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_as_they_were_sent() {
        let either = [false, true].map(|yes| {
            let (offset, length, slot) = (1 << 40, 4096, 1 << 20);
            [
                Verb::Sync { by_witness: yes },
                Verb::Read { by_witness: yes, offset, length, slot },
                Verb::Write { by_witness: yes, offset, length, slot },
                Verb::Holes { offset, length, slot, unit: 512, may_be_short: yes },
            ]
        });
        let allocate = Verb::Allocate { mode: 3, offset: 1 << 40, length: 4096 };
        let others =
            [Verb::Open { parked: 0 }, Verb::Open { parked: 2 }, Verb::Close, Verb::Line, Verb::Length, allocate];
        for verb in either.into_iter().flatten().chain(others) {
            let message = Message { id: 7, file: 9, verb };
            assert_eq!(Message::parse(&message.to_bytes()), Some(message));
        }
        let answer = |outcome| Answer::parse(&Answer { id: 1, outcome }.to_bytes()).outcome;
        assert_eq!(answer(Ok(1 << 33)).expect("it is well"), 1 << 33);
        let failed = answer(Err(io::Error::from_raw_os_error(libc::ENOSPC)));
        assert_eq!(failed.expect_err("it failed").raw_os_error(), Some(libc::ENOSPC));
        let unknown = answer(Err(io::Error::other(UnknownFile))).expect_err("it failed");
        assert!(unknown.get_ref().is_some_and(|cause| cause.is::<UnknownFile>()));
        assert_eq!(answer(Err(io::Error::other("?"))).expect_err("it failed").raw_os_error(), Some(libc::EIO));
    }
}
