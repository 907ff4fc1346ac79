//! The thread: one connection after the other. What a connection has registered is released with it.

use std::io::{Error, ErrorKind, IoSliceMut, Read, Result, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use crate::maps::mappings_of;
use crate::protocol::{Failure, MESSAGE_BYTES_MAX, Question, registered};
use crate::userfaultfd::Tracker;

/// The rest of a message that has begun comes within this.
const MESSAGE_LIMIT: Duration = Duration::from_secs(5);
/// After an error of the listener.
const REST: Duration = Duration::from_millis(100);

/// Serves until the process ends.
pub(crate) fn serve(listener: &UnixListener) {
    loop {
        match listener.accept() {
            // Whoever has connected sees that it ends.
            Ok((stream, _)) => _ = serve_one(stream),
            // No descriptors, perhaps. This thread is nobody's worker.
            Err(_) => std::thread::park_timeout(REST),
        }
    }
}

fn serve_one(mut stream: UnixStream) -> Result<()> {
    let mut tracker = None;
    loop {
        let (message, device) = receive(&mut stream)?;
        let answer = match Question::parse(&message) {
            Ok(Question::Hello) => Ok(format!("ok {}", std::process::id())),
            Ok(Question::Register(path)) => register(&mut tracker, &path, device),
            Ok(Question::Release) => {
                tracker = None;
                Ok("ok".to_owned())
            }
            Err(failure) => Err(failure),
        };
        send(&mut stream, &answer.unwrap_or_else(Failure::answer))?;
    }
}

fn register(
    tracker: &mut Option<Tracker>,
    path: &[u8],
    device: Option<OwnedFd>,
) -> std::result::Result<String, Failure> {
    let maps = std::fs::read("/proc/self/maps").map_err(|error| Failure::of_system(&error))?;
    let mappings = mappings_of(&maps, path)?;
    if tracker.is_none() {
        *tracker = Some(Tracker::open(device)?);
    }
    if let Some(tracker) = tracker {
        tracker.track(&mappings)?;
    }
    Ok(registered(&mappings))
}

/// A message, and the descriptor that came along.
fn receive(stream: &mut UnixStream) -> Result<(Vec<u8>, Option<OwnedFd>)> {
    stream.set_read_timeout(None)?;
    let mut length = [0; 4];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(&*stream, &mut [IoSliceMut::new(&mut length)], &mut control, flags)?.bytes;
    let mut device = None;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            // More than one are closed.
            device = device.or(descriptors.into_iter().next());
        }
    }
    if received == 0 {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    stream.set_read_timeout(Some(MESSAGE_LIMIT))?;
    stream.read_exact(length.get_mut(received..).unwrap_or_default())?;
    let length = u32::from_le_bytes(length);
    if length > MESSAGE_BYTES_MAX {
        return Err(Error::new(ErrorKind::InvalidData, "the message is too long"));
    }
    let mut message = vec![0; length as usize];
    stream.read_exact(&mut message)?;
    Ok((message, device))
}

fn send(stream: &mut UnixStream, answer: &str) -> Result<()> {
    let length = u32::try_from(answer.len()).map_err(Error::other)?;
    let mut bytes = length.to_le_bytes().to_vec();
    bytes.extend_from_slice(answer.as_bytes());
    stream.set_write_timeout(Some(MESSAGE_LIMIT))?;
    stream.write_all(&bytes)
}
