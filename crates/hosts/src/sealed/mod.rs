//! A TLS 1.3 connection that carries a stream: the library shakes hands and keeps the secrets, the records are made and
//! opened here.
//!
//! The library copies what is sent once before it encrypts it. It copies what is received three times: into its own
//! memory, out of it, and to the receiver. That is as much work as the encryption. Here bytes are encrypted from where
//! they lie into the buffer for the kernel. They are decrypted from the kernel's buffer into the reader's.
//!
//! ```text
//!   write ──▶ seal ──▶ outgoing ──one write of many records──▶ the connection
//!   read ◀── open ◀── incoming ◀──one read of many records─── the connection
//!    ▲                   │ in place, when there is less room than the record needs
//!    └───────────────────╯
//! ```
//! A side that has sent as much as one key may cover sends `key_update` and goes on with the next key. The other side
//! may ask for a new key, too, and is answered before the next data.

#[cfg(test)]
mod adversary_tests;
mod handshake;
mod records;
#[cfg(test)]
mod scripted;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod unauthenticated_tests;

use std::io::{self, IoSlice};
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use rustls::client::ClientConnectionData;
use rustls::kernel::KernelConnection;
use rustls::pki_types::CertificateDer;
use rustls::server::ServerConnectionData;
use rustls::{ConnectionTrafficSecrets, ExtractedSecrets};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

pub use handshake::{Greeting, accept, connect, greeted};
use records::{
    CONTENT_BYTES_MAX, Content, HEADER_BYTES, Key, RECORD_BYTES_MAX, RECORD_EXTRA_BYTES, broken, opened_bytes,
    record_bytes,
};

/// How much may be encrypted and wait for the kernel: what goes with one call.
const OUTGOING_BYTES_MAX: usize = 8 * (CONTENT_BYTES_MAX + RECORD_EXTRA_BYTES) + CONTENT_BYTES_MAX;
/// How much is read at once: eight records, and the beginning of the next.
const INCOMING_BYTES: usize = 8 * (CONTENT_BYTES_MAX + RECORD_EXTRA_BYTES) + CONTENT_BYTES_MAX;
const _: () = assert!(INCOMING_BYTES >= 2 * RECORD_BYTES_MAX, "a record and the next one's beginning fit");

/// `close_notify`, a warning.
const CLOSE_NOTIFY: [u8; 2] = [1, 0];
/// A handshake message: its kind, its length in 24 bits, and that the other side is not asked for the same.
const KEY_UPDATE: [u8; 5] = [24, 0, 0, 1, 0];

/// What keeps the secrets.
enum RateController {
    Client(KernelConnection<ClientConnectionData>),
    Server(KernelConnection<ServerConnectionData>),
}

impl RateController {
    fn next_sealing(&mut self) -> Result<(u64, ConnectionTrafficSecrets), rustls::Error> {
        match self {
            Self::Client(connection) => connection.update_tx_secret(),
            Self::Server(connection) => connection.update_tx_secret(),
        }
    }

    fn next_opening(&mut self) -> Result<(u64, ConnectionTrafficSecrets), rustls::Error> {
        match self {
            Self::Client(connection) => connection.update_rx_secret(),
            Self::Server(connection) => connection.update_rx_secret(),
        }
    }

    /// How many records one key is good for.
    fn records_max(&self) -> u64 {
        let suite = match self {
            Self::Client(connection) => connection.negotiated_cipher_suite(),
            Self::Server(connection) => connection.negotiated_cipher_suite(),
        };
        // Nothing older is spoken here.
        suite.tls13().map_or(0, |suite| suite.common.confidentiality_limit)
    }
}

/// Records on their way out.
#[derive(Default)]
struct Outgoing {
    /// It grows up to [`OUTGOING_BYTES_MAX`], and by the few bytes of what is said beside the data.
    memory: Vec<u8>,
    unsent: Range<usize>,
}

impl Outgoing {
    /// How long the next record may be.
    fn free(&self) -> usize {
        OUTGOING_BYTES_MAX - if self.unsent.is_empty() { 0 } else { self.unsent.end.min(OUTGOING_BYTES_MAX) }
    }

    /// The place of the next record.
    fn place(&mut self, length: usize) -> &mut [u8] {
        if self.unsent.is_empty() {
            self.unsent = 0..0;
        }
        let end = self.unsent.end + length;
        if self.memory.len() < end {
            self.memory.resize(end.next_power_of_two().min(OUTGOING_BYTES_MAX).max(end), 0);
        }
        &mut self.memory[self.unsent.end..end]
    }

    /// A record of so many bytes is in its place.
    const fn placed(&mut self, length: usize) {
        self.unsent.end += length;
    }
}

/// An encrypted connection over `S`.
pub struct Sealed<S> {
    inner: S,
    protocol: Option<Vec<u8>>,
    certificate: Option<CertificateDer<'static>>,
    keeper: RateController,
    records_max: u64,
    sealing: Key,
    opening: Key,
    outgoing: Outgoing,
    /// What has come, of which the bytes in `unopened` are records, the last of them maybe not whole.
    incoming: Box<[u8]>,
    unopened: Range<usize>,
    /// Content that was opened where it lay.
    open: Range<usize>,
    /// The other side wants the next record under the next key. It gets that with the next data: who asks again and again,
    /// and takes no answer, does not fill this side's memory.
    is_key_wanted: bool,
    /// The other side has said that nothing more comes.
    has_ended: bool,
    /// This one has.
    is_closed: bool,
    /// What was wrong in what has come: what was right before it is read, and nothing behind it ever.
    failure: Option<(io::ErrorKind, String)>,
}

/// What a record that is no data says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Said {
    Nothing,
    End,
    /// The next record of the other side is under its next key, and maybe it wants the same of us.
    NextKey(bool),
}

impl Said {
    fn parse(content: Content, bytes: &[u8]) -> io::Result<Self> {
        match (content, bytes) {
            (Content::Alert, [_, 0]) => Ok(Self::End),
            (Content::Alert, [_, alert]) => {
                let why = format!("the other host has ended the encrypted connection with alert {alert}");
                Err(io::Error::new(io::ErrorKind::ConnectionAborted, why))
            }
            (Content::Handshake, [24, 0, 0, 1, 0]) => Ok(Self::NextKey(false)),
            (Content::Handshake, [24, 0, 0, 1, 1]) => Ok(Self::NextKey(true)),
            // The tickets of a server are of no use to us.
            (Content::Handshake, [4, ..]) => Ok(Self::Nothing),
            _ => Err(broken("what comes was not to be said here")),
        }
    }
}

impl<S> Sealed<S> {
    /// Over `inner`, of which `rest` has come behind the handshake.
    fn new(
        inner: S,
        (protocol, certificate): (Option<Vec<u8>>, Option<CertificateDer<'static>>),
        (secrets, keeper): (ExtractedSecrets, RateController),
        rest: &[u8],
    ) -> io::Result<Self> {
        let mut incoming = vec![0; INCOMING_BYTES].into_boxed_slice();
        let begun = incoming.get_mut(..rest.len()).ok_or_else(|| broken("too much comes at once"))?;
        begun.copy_from_slice(rest);
        Ok(Self {
            inner,
            protocol,
            certificate,
            records_max: keeper.records_max(),
            keeper,
            sealing: Key::new(&secrets.tx)?,
            opening: Key::new(&secrets.rx)?,
            outgoing: Outgoing::default(),
            incoming,
            unopened: 0..rest.len(),
            open: 0..0,
            is_key_wanted: false,
            has_ended: false,
            is_closed: false,
            failure: None,
        })
    }

    /// The connection below.
    pub const fn inner(&self) -> &S {
        &self.inner
    }

    /// What both sides speak on it.
    pub fn protocol(&self) -> Option<&[u8]> {
        self.protocol.as_deref()
    }

    /// The certificate that the other side has shown, and has the key of.
    pub const fn certificate(&self) -> Option<&CertificateDer<'static>> {
        self.certificate.as_ref()
    }

    /// Opens whole records into `target` while there is room in it.
    fn open(&mut self, target: &mut ReadBuf<'_>) -> io::Result<()> {
        self.take_open(target);
        while target.remaining() > 0 && !self.has_ended {
            let Some(length) = record_bytes(&self.incoming[self.unopened.clone()])? else { return Ok(()) };
            if self.unopened.len() < length {
                return Ok(());
            }
            let start = self.unopened.start;
            self.unopened.start += length;
            let record = &mut self.incoming[start..start + length];
            let needed = opened_bytes(length);
            let said = if target.remaining() >= needed {
                let room = target.initialize_unfilled_to(needed);
                let (content, length) = self.opening.open_into(record, room)?;
                match content {
                    Content::Data => {
                        target.advance(length);
                        continue;
                    }
                    content => Said::parse(content, &room[..length])?,
                }
            } else {
                let (content, place) = self.opening.open_in_place(record)?;
                match content {
                    Content::Data => {
                        self.open = start + place.start..start + place.end;
                        self.take_open(target);
                        continue;
                    }
                    content => Said::parse(content, &record[place])?,
                }
            };
            self.hear(said)?;
        }
        Ok(())
    }

    /// Copies what was opened where it lay, as much as there is room for.
    fn take_open(&mut self, target: &mut ReadBuf<'_>) {
        let count = self.open.len().min(target.remaining());
        target.put_slice(&self.incoming[self.open.start..self.open.start + count]);
        self.open.start += count;
    }

    fn hear(&mut self, said: Said) -> io::Result<()> {
        match said {
            Said::Nothing => {}
            Said::End => self.has_ended = true,
            Said::NextKey(is_wanted) => {
                let next = self.keeper.next_opening().map_err(of_library)?;
                self.opening = Key::new(&next)?;
                self.is_key_wanted |= is_wanted;
            }
        }
        Ok(())
    }

    /// Adds a record that is no data.
    fn say(&mut self, content: Content, bytes: &[u8]) -> io::Result<()> {
        let place = self.outgoing.place(bytes.len() + RECORD_EXTRA_BYTES);
        let length = self.sealing.seal(content, bytes, place)?;
        self.outgoing.placed(length);
        Ok(())
    }

    /// Goes on with the next key.
    fn update_key(&mut self) -> io::Result<()> {
        self.say(Content::Handshake, &KEY_UPDATE)?;
        let next = self.keeper.next_sealing().map_err(of_library)?;
        self.sealing = Key::new(&next)?;
        self.is_key_wanted = false;
        Ok(())
    }

    /// Makes records of `pieces` as far as there is room. Gives how many bytes of them that was.
    fn seal(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut pieces = Pieces { rest: pieces, skipped: 0 };
        let mut count = 0;
        loop {
            let next = pieces.next();
            let free = self.outgoing.free();
            if next.is_empty() || free < next.len().min(CONTENT_BYTES_MAX) + RECORD_EXTRA_BYTES {
                return Ok(count);
            }
            if self.is_key_wanted || self.sealing.sequence() >= self.records_max {
                self.update_key()?;
            }
            let (sealed, length) = if next.len() < CONTENT_BYTES_MAX {
                let length = CONTENT_BYTES_MAX.min(free - RECORD_EXTRA_BYTES);
                let place = self.outgoing.place(length + RECORD_EXTRA_BYTES);
                let length = pieces.gather(&mut place[HEADER_BYTES..HEADER_BYTES + length]);
                (self.sealing.seal_in_place(Content::Data, length, place)?, length)
            } else {
                let place = self.outgoing.place(CONTENT_BYTES_MAX + RECORD_EXTRA_BYTES);
                let sealed = self.sealing.seal(Content::Data, &next[..CONTENT_BYTES_MAX], place)?;
                pieces.skip(CONTENT_BYTES_MAX);
                (sealed, CONTENT_BYTES_MAX)
            };
            self.outgoing.placed(sealed);
            count += length;
        }
    }
}

impl<S: AsyncWrite + Unpin> Sealed<S> {
    /// Gives the connection what it takes: ready when that is all.
    fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Outgoing { memory, unsent } = &mut self.outgoing;
        while unsent.start < unsent.end {
            let count = ready!(Pin::new(&mut self.inner).poll_write(context, &memory[unsent.clone()]))?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            unsent.start += count;
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + Unpin> Sealed<S> {
    /// One read of more records.
    fn poll_fill(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        debug_assert!(self.open.is_empty(), "what is open would be written over");
        self.incoming.copy_within(self.unopened.clone(), 0);
        self.unopened = 0..self.unopened.len();
        let mut room = ReadBuf::new(&mut self.incoming[self.unopened.end..]);
        ready!(Pin::new(&mut self.inner).poll_read(context, &mut room))?;
        match room.filled().len() {
            0 => {
                let why = "the other host has ended the connection without saying so under encryption";
                Poll::Ready(Err(io::Error::new(io::ErrorKind::UnexpectedEof, why)))
            }
            count => {
                self.unopened.end += count;
                Poll::Ready(Ok(()))
            }
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Sealed<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        target: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = target.filled().len();
        loop {
            if let Some((kind, words)) = &self.failure {
                return Poll::Ready(Err(io::Error::new(*kind, words.clone())));
            }
            if let Err(error) = self.open(target) {
                self.failure = Some((error.kind(), error.to_string()));
            }
            if target.filled().len() > before || target.remaining() == 0 || self.has_ended {
                return Poll::Ready(Ok(()));
            }
            if self.failure.is_none() {
                ready!(self.poll_fill(context))?;
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Sealed<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.is_closed {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        if pieces.iter().all(|piece| piece.is_empty()) {
            return Poll::Ready(Ok(0));
        }
        loop {
            let count = self.seal(pieces)?;
            let sent = self.poll_send(context)?;
            if count > 0 {
                return Poll::Ready(Ok(count));
            }
            ready!(sent);
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_send(context))?;
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.is_closed {
            self.is_closed = true;
            self.say(Content::Alert, &CLOSE_NOTIFY)?;
        }
        ready!(self.poll_send(context))?;
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

/// What of some pieces is still to be sent.
struct Pieces<'a> {
    rest: &'a [IoSlice<'a>],
    /// Of the first of them.
    skipped: usize,
}

impl<'a> Pieces<'a> {
    /// The rest of the first one that has any; empty when all are done.
    fn next(&mut self) -> &'a [u8] {
        while let Some((first, others)) = self.rest.split_first() {
            if self.skipped < first.len() {
                return &first[self.skipped..];
            }
            self.rest = others;
            self.skipped = 0;
        }
        &[]
    }

    const fn skip(&mut self, count: usize) {
        self.skipped += count;
    }

    /// Fills `target` from pieces that make no whole record of their own. Gives how many bytes there were.
    fn gather(&mut self, target: &mut [u8]) -> usize {
        let mut filled = 0;
        while filled < target.len() {
            let next = self.next();
            if next.is_empty() || (next.len() >= CONTENT_BYTES_MAX && filled > 0) {
                break;
            }
            let count = next.len().min(target.len() - filled);
            target[filled..filled + count].copy_from_slice(&next[..count]);
            self.skip(count);
            filled += count;
        }
        filled
    }
}

/// An error of the library as whoever reads or writes sees it.
fn of_library(error: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
