//! What a process and its helpers say to each other: messages of fixed length over a socket that keeps their bounds.
//!
//! ```text
//!   request  0 number │ 8 file │ 16 verb (u32) │ 20 mode (u32) │ 24 offset │ 32 length     with the open file, if it is new
//!   answer   0 number │ 8 the system's error, 0 if there was none (u64)
//! ```
//!
//! All numbers are little-endian. Both ends are the same program.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

const MESSAGE_BYTES: usize = 40;
pub(super) const ANSWER_BYTES: usize = 16;

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    /// Keep the file that comes with this.
    Open,
    /// Close it.
    Close,
    Sync,
    Allocate {
        mode: u32,
        offset: u64,
        length: u64,
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
        let (verb, mode, offset, length) = match self.verb {
            Verb::Open => (1_u32, 0, 0, 0),
            Verb::Close => (2, 0, 0, 0),
            Verb::Sync => (3, 0, 0, 0),
            Verb::Allocate { mode, offset, length } => (4, mode, offset, length),
        };
        let mut bytes = [0; MESSAGE_BYTES];
        bytes[..8].copy_from_slice(&self.id.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.file.to_le_bytes());
        bytes[16..20].copy_from_slice(&verb.to_le_bytes());
        bytes[20..24].copy_from_slice(&mode.to_le_bytes());
        bytes[24..32].copy_from_slice(&offset.to_le_bytes());
        bytes[32..].copy_from_slice(&length.to_le_bytes());
        bytes
    }

    fn parse(bytes: &[u8; MESSAGE_BYTES]) -> Option<Self> {
        let short = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let verb = match short(16) {
            1 => Verb::Open,
            2 => Verb::Close,
            3 => Verb::Sync,
            4 => Verb::Allocate { mode: short(20), offset: long(24), length: long(32) },
            _ => return None,
        };
        Some(Self { id: long(0), file: long(8), verb })
    }
}

/// What became of a request.
pub(super) struct Answer {
    pub(super) id: u64,
    pub(super) outcome: io::Result<()>,
}

impl Answer {
    pub(super) fn to_bytes(&self) -> [u8; ANSWER_BYTES] {
        let code = match &self.outcome {
            Ok(()) => 0,
            Err(error) => error.raw_os_error().unwrap_or(libc::EIO),
        };
        let mut bytes = [0; ANSWER_BYTES];
        bytes[..8].copy_from_slice(&self.id.to_le_bytes());
        bytes[8..].copy_from_slice(&u64::from(code.unsigned_abs()).to_le_bytes());
        bytes
    }

    pub(super) fn parse(bytes: &[u8; ANSWER_BYTES]) -> Self {
        let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let outcome = match long(8) {
            0 => Ok(()),
            code => Err(io::Error::from_raw_os_error(code as i32)),
        };
        Self { id: long(0), outcome }
    }
}

/// Sends a request, and `file` with it.
pub(super) fn send_message(
    socket: BorrowedFd<'_>,
    message: &Message,
    file: Option<BorrowedFd<'_>>,
    flags: SendFlags,
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let files: Vec<BorrowedFd<'_>> = file.into_iter().collect();
    if !files.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&files));
    }
    sendmsg(socket, &[IoSlice::new(&message.to_bytes())], &mut ancillary, flags)?;
    Ok(())
}

/// The next request, and the file that has come with it; none at the end.
pub(super) fn receive_message(socket: BorrowedFd<'_>) -> io::Result<Option<(Message, Option<OwnedFd>)>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; MESSAGE_BYTES];
    let received = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let mut files = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    let file = files.next().and_then(|mut files| files.next());
    if received.bytes != MESSAGE_BYTES {
        return Ok(None);
    }
    Ok(Message::parse(&bytes).map(|message| (message, file)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_as_they_were_sent() {
        for verb in [Verb::Open, Verb::Close, Verb::Sync, Verb::Allocate { mode: 3, offset: 1 << 40, length: 4096 }] {
            let message = Message { id: 7, file: 9, verb };
            assert_eq!(Message::parse(&message.to_bytes()), Some(message));
        }
        let answer = |outcome| Answer::parse(&Answer { id: 1, outcome }.to_bytes()).outcome;
        assert!(answer(Ok(())).is_ok());
        let failed = answer(Err(io::Error::from_raw_os_error(libc::ENOSPC)));
        assert_eq!(failed.expect_err("it failed").raw_os_error(), Some(libc::ENOSPC));
        assert_eq!(answer(Err(io::Error::other("?"))).expect_err("it failed").raw_os_error(), Some(libc::EIO));
    }
}
