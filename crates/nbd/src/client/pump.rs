//! What moves a client's bytes: one task that sends requests, one that receives replies.
//!
//! ```text
//!   submit ──▶ pending (by cookie) ──▶ sender ──▶ socket
//!                   ▲                                │
//!                   └──────────── receiver ◀─────────┘
//! ```
//! When either ends, nothing is pending any more and nothing can be submitted: all callers get `Disconnected`.

use std::collections::HashMap;
use std::sync::Arc;

use block::{Buffer, Data, Error, ErrorKind, Result};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::sync::{mpsc, oneshot};

use crate::protocol::{
    Chunk, ChunkHeader, Command, Errno, Malformed, ReplyHead, Request, STRUCTURED_HEADER_BYTES, parse_block_status,
    parse_error,
};

/// The payload of a chunk that is no content: errors, extents. The protocol's own bound on extents is 8 MiB.
const CONTROL_BYTES_MAX: u32 = 9 << 20;

/// Small replies are read together.
const READ_AHEAD_BYTES: usize = 128 << 10;

/// What a request waits for.
pub(super) enum Wanted {
    Done(oneshot::Sender<Result<()>>),
    Bytes { buffer: Buffer, offset: u64, received: usize, answer: oneshot::Sender<Result<Buffer>> },
    Extents { context: u32, descriptors: Vec<(u32, u32)>, answer: oneshot::Sender<Result<Vec<(u32, u32)>>> },
}

struct Waiting {
    wanted: Wanted,
    command: Command,
    /// What an earlier chunk of the reply said.
    error: Option<Error>,
}

impl Waiting {
    /// Delivers the answer. The caller may be gone.
    fn finish(self) {
        let command = self.command;
        let short = || Error::new(ErrorKind::Invalid, format!("the NBD server's answer to {command:?} is incomplete"));
        match (self.wanted, self.error) {
            (Wanted::Done(answer), None) => drop(answer.send(Ok(()))),
            (Wanted::Done(answer), Some(error)) => drop(answer.send(Err(error))),
            (Wanted::Bytes { buffer, received, answer, .. }, None) if received == buffer.len() => {
                drop(answer.send(Ok(buffer)));
            }
            (Wanted::Bytes { answer, .. }, error) => drop(answer.send(Err(error.unwrap_or_else(short)))),
            (Wanted::Extents { descriptors, answer, .. }, None) if !descriptors.is_empty() => {
                drop(answer.send(Ok(descriptors)));
            }
            (Wanted::Extents { answer, .. }, error) => drop(answer.send(Err(error.unwrap_or_else(short)))),
        }
    }
}

/// A request on its way out.
type Outgoing = (Request, Option<Data>);

/// The requests that wait for an answer.
pub(super) struct Pending {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    waiting: HashMap<u64, Waiting>,
    next_cookie: u64,
    is_closed: bool,
}

/// The way in for requests. Dropping it disconnects politely.
pub(super) struct Submitter {
    pending: Arc<Pending>,
    outgoing: mpsc::UnboundedSender<Outgoing>,
}

/// The error of everything that a lost connection leaves unanswered.
pub(super) fn disconnected() -> Error {
    Error::new(ErrorKind::Disconnected, "the connection to the NBD server is lost")
}

impl Submitter {
    /// Sends `request`, whose cookie is chosen here. If the connection is lost, `wanted` is dropped unanswered.
    pub(super) fn submit(&self, mut request: Request, payload: Option<Data>, wanted: Wanted) {
        {
            let mut state = self.pending.state.lock();
            if state.is_closed {
                return;
            }
            request.cookie = state.next_cookie;
            state.next_cookie += 1;
            state.waiting.insert(request.cookie, Waiting { wanted, command: request.command, error: None });
        }
        // If the sender has just gone, it has closed `pending`, which answers.
        let _ = self.outgoing.send((request, payload));
    }
}

impl Pending {
    /// Nothing is answered any more.
    fn close(&self) {
        let mut state = self.state.lock();
        state.is_closed = true;
        let mut waiting: Vec<_> = std::mem::take(&mut state.waiting).into_iter().collect();
        drop(state);
        // Dropping the senders tells the waiters, in the order in which they asked.
        waiting.sort_unstable_by_key(|(cookie, _)| *cookie);
        drop(waiting);
    }

    fn take(&self, cookie: u64) -> Result<Waiting, Broken> {
        self.state.lock().waiting.remove(&cookie).ok_or(Broken::Protocol(Malformed::Value))
    }

    fn put_back(&self, cookie: u64, waiting: Waiting) {
        let mut state = self.state.lock();
        if !state.is_closed {
            state.waiting.insert(cookie, waiting);
        }
    }
}

/// The two tasks of a connection over `stream`, and the way in.
pub(super) fn pump<S>(stream: S, is_structured: bool) -> (Submitter, env::Task, env::Task)
where
    S: AsyncRead + AsyncWrite + Send + 'static,
{
    let pending = Arc::new(Pending { state: Mutex::default() });
    let (outgoing, queue) = mpsc::unbounded_channel();
    let (reader, writer) = tokio::io::split(stream);
    let (gone, told) = oneshot::channel();
    let sender = {
        let pending = Arc::clone(&pending);
        Box::pin(async move {
            let outcome = tokio::select! {
                biased;
                outcome = send(writer, queue) => outcome,
                _ = told => Ok(()),
            };
            if let Err(error) = outcome {
                tracing::debug!(%error, "sending to the NBD server failed");
            }
            pending.close();
        })
    };
    let receiver = {
        let pending = Arc::clone(&pending);
        Box::pin(async move {
            let reader = BufReader::with_capacity(READ_AHEAD_BYTES, reader);
            let broken = receive(reader, &pending, is_structured).await;
            tracing::debug!(%broken, "the connection to the NBD server ended");
            pending.close();
            let _ = gone.send(());
        })
    };
    (Submitter { pending, outgoing }, sender, receiver)
}

async fn send<W: AsyncWrite + Unpin>(
    mut writer: W,
    mut queue: mpsc::UnboundedReceiver<Outgoing>,
) -> std::io::Result<()> {
    let mut batch = Vec::new();
    while let Some((request, payload)) = queue.recv().await {
        batch.extend_from_slice(&request.to_bytes());
        if let Some(payload) = payload {
            writer.write_all(&batch).await?;
            batch.clear();
            writer.write_all(&payload).await?;
        }
        if queue.is_empty() {
            writer.write_all(&batch).await?;
            batch.clear();
            writer.flush().await?;
        }
    }
    let leave = Request { flags: 0, command: Command::Disconnect, cookie: 0, offset: block::Bytes::ZERO, length: 0 };
    batch.extend_from_slice(&leave.to_bytes());
    writer.write_all(&batch).await?;
    writer.shutdown().await
}

/// Why nothing more is received.
#[derive(Debug)]
enum Broken {
    Stream(std::io::Error),
    Protocol(Malformed),
}

impl std::fmt::Display for Broken {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Stream(error) => error.fmt(out),
            Self::Protocol(malformed) => malformed.fmt(out),
        }
    }
}

impl From<std::io::Error> for Broken {
    fn from(error: std::io::Error) -> Self {
        Self::Stream(error)
    }
}

impl From<Malformed> for Broken {
    fn from(malformed: Malformed) -> Self {
        Self::Protocol(malformed)
    }
}

async fn receive<R: AsyncRead + Unpin>(mut reader: R, pending: &Pending, is_structured: bool) -> Broken {
    loop {
        if let Err(broken) = receive_reply(&mut reader, pending, is_structured).await {
            return broken;
        }
    }
}

async fn receive_reply<R: AsyncRead + Unpin>(
    reader: &mut R,
    pending: &Pending,
    is_structured: bool,
) -> Result<(), Broken> {
    let mut header = [0; STRUCTURED_HEADER_BYTES];
    reader.read_exact(&mut header[..4]).await?;
    let length = ReplyHead::length([header[0], header[1], header[2], header[3]])?;
    reader.read_exact(&mut header[4..length]).await?;
    match ReplyHead::parse(&header[..length])? {
        ReplyHead::Simple(cookie, errno) => {
            let mut waiting = pending.take(cookie)?;
            waiting.error = errno.map(|errno| error_of(waiting.command, errno, ""));
            if let (Wanted::Bytes { buffer, received, .. }, None) = (&mut waiting.wanted, &waiting.error) {
                // Replies to reads are structured once that was negotiated.
                if is_structured {
                    return Err(Malformed::Value.into());
                }
                reader.read_exact(buffer).await?;
                *received = buffer.len();
            }
            waiting.finish();
        }
        ReplyHead::Chunk(chunk) if is_structured => {
            let mut waiting = pending.take(chunk.cookie)?;
            receive_chunk(reader, chunk, &mut waiting).await?;
            match chunk.done {
                true => waiting.finish(),
                false => pending.put_back(chunk.cookie, waiting),
            }
        }
        ReplyHead::Chunk(_) => return Err(Malformed::Magic.into()),
    }
    Ok(())
}

async fn receive_chunk<R: AsyncRead + Unpin>(
    reader: &mut R,
    chunk: ChunkHeader,
    waiting: &mut Waiting,
) -> Result<(), Broken> {
    match (chunk.chunk, &mut waiting.wanted) {
        (Chunk::None, _) if chunk.length == 0 && chunk.done => Ok(()),
        (Chunk::OffsetData, Wanted::Bytes { buffer, offset, received, .. }) if chunk.length > 8 => {
            let start = reader.read_u64().await?;
            let target = content(buffer, *offset, start, chunk.length - 8)?;
            reader.read_exact(target).await?;
            *received += target.len();
            Ok(())
        }
        (Chunk::OffsetHole, Wanted::Bytes { buffer, offset, received, .. }) if chunk.length == 12 => {
            let start = reader.read_u64().await?;
            let length = reader.read_u32().await?;
            let target = content(buffer, *offset, start, length)?;
            target.fill(0);
            *received += target.len();
            Ok(())
        }
        (Chunk::BlockStatus, Wanted::Extents { context, descriptors, .. }) if chunk.length <= CONTROL_BYTES_MAX => {
            let payload = read_vec(reader, chunk.length).await?;
            let (id, told) = parse_block_status(&payload)?;
            if id == *context {
                *descriptors = told;
            }
            Ok(())
        }
        (kind, _) if kind.is_error() && chunk.length <= CONTROL_BYTES_MAX => {
            let payload = read_vec(reader, chunk.length).await?;
            let (errno, message) = parse_error(&payload)?;
            let error = error_of(waiting.command, errno, &message);
            waiting.error.get_or_insert(error);
            Ok(())
        }
        _ => Err(Malformed::Value.into()),
    }
}

/// The part of `buffer` (the bytes at `offset`) that `length` bytes at `start` fill.
fn content(buffer: &mut Buffer, offset: u64, start: u64, length: u32) -> Result<&mut [u8], Malformed> {
    let from = start.checked_sub(offset).and_then(|from| usize::try_from(from).ok()).ok_or(Malformed::Value)?;
    let end = from.checked_add(length as usize).ok_or(Malformed::Value)?;
    if length == 0 {
        return Err(Malformed::Value);
    }
    buffer.get_mut(from..end).ok_or(Malformed::Value)
}

async fn read_vec<R: AsyncRead + Unpin>(reader: &mut R, length: u32) -> std::io::Result<Vec<u8>> {
    // Grows as the bytes come, whatever length was claimed.
    let mut bytes = Vec::new();
    reader.take(length.into()).read_to_end(&mut bytes).await?;
    match bytes.len() == length as usize {
        true => Ok(bytes),
        false => Err(std::io::ErrorKind::UnexpectedEof.into()),
    }
}

fn error_of(command: Command, errno: Errno, message: &str) -> Error {
    let kind = match errno {
        Errno::NotPermitted if command.is_mutation() => ErrorKind::ReadOnly,
        Errno::NotPermitted => ErrorKind::PermissionDenied,
        Errno::Io | Errno::NoMemory => ErrorKind::Io,
        Errno::Invalid => ErrorKind::Invalid,
        Errno::NoSpace => ErrorKind::NoSpace,
        Errno::Overflow => ErrorKind::TooLarge,
        Errno::NotSupported => ErrorKind::Unsupported,
        Errno::Shutdown => ErrorKind::Fenced,
    };
    let words = if message.is_empty() { "" } else { ": " };
    Error::new(kind, format!("the NBD server answered {command:?} with {errno:?}{words}{message}"))
}
