//! QMP over a unix socket of QEMU's.

use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use env::EnvRef;
use futures::future::{Either, select};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::sync::{broadcast, mpsc, oneshot};

use super::owner::owner_of_socket;
use super::wire::{self, Lines, Message};
use super::{Event, GREETING_LIMIT, Request, Version};
use crate::error::{Error, ErrorKind, Result};

/// A monitor that has greeted.
pub(super) struct Opened {
    pub(super) connection: Connection,
    pub(super) version: Version,
    pub(super) process_id: Option<u32>,
}

/// Connects and waits for the greeting.
pub(super) async fn open(path: &Path, env: &EnvRef) -> Result<Opened> {
    let shown = path.display();
    let stream = UnixStream::connect(path).await.map_err(|error| {
        if error.kind() == io::ErrorKind::WouldBlock {
            // QEMU listens, and more clients wait than it lets wait.
            let context = format!("monitor {shown}: it is taken, and others wait for it");
            return Error::new(ErrorKind::MonitorBusy, context).with_source(error);
        }
        let hint = match error.kind() {
            std::io::ErrorKind::ConnectionRefused => "nobody listens on it any more: QEMU is dead",
            std::io::ErrorKind::NotFound => "there is no such socket",
            std::io::ErrorKind::PermissionDenied => "run as root or as QEMU's user",
            _ => "no connection",
        };
        Error::new(ErrorKind::NoMonitor, format!("monitor {shown}: {hint}")).with_source(error)
    })?;
    let process_id = stream.peer_cred().ok().and_then(|peer| peer.pid()).and_then(|pid| u32::try_from(pid).ok());
    let mut connection = Connection { stream, lines: Lines::default() };
    match env::timeout(&**env, GREETING_LIMIT, connection.first_but_events()).await {
        Some(Ok(Message::Greeting(version))) => Ok(Opened { connection, version, process_id }),
        Some(Ok(other)) => Err(Error::new(ErrorKind::Protocol, format!("monitor {shown}: no greeting but {other:?}"))),
        Some(Err(error)) => Err(error),
        None => Err(busy(path, process_id)),
    }
}

fn busy(path: &Path, qemu: Option<u32>) -> Error {
    let owner = owner_of_socket(path, qemu).map(|owner| format!(" \u{2014} {owner}")).unwrap_or_default();
    let context = format!(
        "monitor {}: no greeting within {} s: another client owns this monitor{owner}",
        path.display(),
        GREETING_LIMIT.as_secs()
    );
    Error::new(ErrorKind::MonitorBusy, context)
}

pub(super) struct Connection {
    stream: UnixStream,
    lines: Lines,
}

impl Connection {
    /// The first message that is no event: QEMU sends what happens to a client whom it has not greeted yet, as one that
    /// connects while its guest is started.
    async fn first_but_events(&mut self) -> Result<Message> {
        loop {
            match self.next().await? {
                Message::Event(_) => {}
                other => return Ok(other),
            }
        }
    }

    /// The next message. May be dropped while it waits: what was read stays.
    async fn next(&mut self) -> Result<Message> {
        let broken = |what: String| Error::new(ErrorKind::Protocol, format!("the monitor does not speak QMP: {what}"));
        loop {
            if let Some(line) = self.lines.next().map_err(broken)? {
                return wire::parse(&line).map_err(broken);
            }
            let count = self.stream.read_buf(&mut self.lines.bytes).await.unwrap_or(0);
            if count == 0 {
                return Err(Error::new(ErrorKind::Disconnected, "QEMU closed the monitor"));
            }
        }
    }

    /// Sends `bytes`, and `file` with the first of them.
    async fn send(&mut self, bytes: &[u8], file: Option<OwnedFd>) -> io::Result<()> {
        let mut sent = 0;
        if let Some(file) = file {
            let stream = &self.stream;
            sent = stream.async_io(Interest::WRITABLE, || send_with_file(stream.as_fd(), bytes, file.as_fd())).await?;
        }
        self.stream.write_all(&bytes[sent..]).await
    }
}

fn send_with_file(socket: BorrowedFd<'_>, bytes: &[u8], file: BorrowedFd<'_>) -> io::Result<usize> {
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut room);
    let files = [file];
    let fits = control.push(SendAncillaryMessage::ScmRights(&files));
    debug_assert!(fits, "there is room for one file");
    let flags = SendFlags::NOSIGNAL;
    Ok(rustix::net::sendmsg(socket, &[io::IoSlice::new(bytes)], &mut control, flags)?)
}

/// Carries requests out and answers back until one side is gone; what is pending then fails by being dropped.
pub(super) async fn serve(
    mut connection: Connection,
    mut requests: mpsc::Receiver<Request>,
    events: broadcast::Sender<Arc<Event>>,
) {
    let mut pending: HashMap<u64, (String, oneshot::Sender<Result<Value>>)> = HashMap::new();
    let mut last_id = 0_u64;
    loop {
        let next = {
            let message = std::pin::pin!(connection.next());
            let request = std::pin::pin!(requests.recv());
            match select(message, request).await {
                Either::Left((message, _)) => Either::Left(message),
                Either::Right((request, _)) => Either::Right(request),
            }
        };
        match next {
            Either::Left(Ok(Message::Answer { id, result })) => {
                // QEMU leaves the id out only when it could not read the command at all; then the oldest is meant.
                let id = id.or_else(|| pending.keys().min().copied());
                if let Some((command, waiting)) = id.and_then(|id| pending.remove(&id)) {
                    // Whoever asked may have given up.
                    let _ = waiting.send(result.map_err(|error| Error::of_qemu(&command, error)));
                }
            }
            Either::Left(Ok(Message::Event(event))) => {
                tracing::debug!(event = event.name, data = %event.data, "qmp");
                // Without listeners nobody misses it.
                let _ = events.send(Arc::new(event));
            }
            Either::Left(Ok(Message::Greeting(_) | Message::Unknown)) => {}
            Either::Left(Err(error)) => {
                tracing::debug!(%error, "the monitor's connection ends");
                return;
            }
            Either::Right(None) => return,
            Either::Right(Some(request)) => {
                last_id += 1;
                let mut line = wire::request(Some(last_id), &request.command, &request.arguments);
                line.push('\n');
                pending.insert(last_id, (request.command, request.answer));
                if connection.send(line.as_bytes(), request.file).await.is_err() {
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use env::RealEnv;
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};

    #[tokio::test]
    async fn a_monitor_whose_queue_is_full_is_busy_and_not_dead() {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("qmp");
        let env: EnvRef = Arc::new(RealEnv::new());
        let monitor = socket(AddressFamily::UNIX, SocketType::STREAM, None).expect("a socket");
        bind(&monitor, &SocketAddrUnix::new(&path).expect("a short path")).expect("bound");
        listen(&monitor, 0).expect("it listens");
        // Nobody accepts, as while QEMU has a client.
        let mut waiting = Vec::new();
        while let Ok(client) = UnixStream::connect(&path).await {
            waiting.push(client);
            assert!(waiting.len() < 100, "the queue has no end");
        }
        let error = open(&path, &env).await.map(drop).expect_err("there is no place");
        assert_eq!(error.kind(), ErrorKind::MonitorBusy, "{error}");
        drop((waiting, monitor));
        let error = open(&path, &env).await.map(drop).expect_err("nobody listens");
        assert_eq!(error.kind(), ErrorKind::NoMonitor, "{error}");
    }
}
