//! One NBD connection without blocking: requests go into a buffer, replies come out of one.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

const NBD_MAGIC: u64 = 0x4e42_444d_4147_4943;
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const FIXED_NEWSTYLE_NO_ZEROES: u32 = 3;
const INCOMING_BYTES: usize = 4 << 20;

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Read = 0,
    Write = 1,
    Disconnect = 2,
    Flush = 3,
    Discard = 4,
    Zeroes = 6,
}

/// With anything that changes the volume: durable before it is answered.
pub(crate) const FORCED: u16 = 1 << 0;

/// With [`Command::Zeroes`]: write them, make no hole.
pub(crate) const NO_HOLE: u16 = 1 << 1;

/// The head of a reply; the bytes of a read follow it.
pub(crate) struct Reply {
    pub(crate) cookie: u64,
    pub(crate) error: u32,
}

pub(crate) struct Connection {
    stream: UnixStream,
    pub(crate) size: u64,
    outgoing: Vec<u8>,
    sent: usize,
    incoming: Vec<u8>,
    filled: usize,
    taken: usize,
}

impl Connection {
    pub(crate) fn open(socket: &str, export: &str) -> io::Result<Self> {
        let mut stream = UnixStream::connect(socket)?;
        let size = shake_hands(&mut stream, export)?;
        stream.set_nonblocking(true)?;
        Ok(Self {
            stream,
            size,
            outgoing: Vec::with_capacity(1 << 20),
            sent: 0,
            incoming: vec![0; INCOMING_BYTES],
            filled: 0,
            taken: 0,
        })
    }

    pub(crate) fn stream(&self) -> &UnixStream {
        &self.stream
    }

    pub(crate) fn has_outgoing(&self) -> bool {
        self.sent < self.outgoing.len()
    }

    /// Ends it for the server, too, whatever it was about to send or read.
    pub(crate) fn hang_up(&self) {
        // It may have been lost altogether.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }

    /// Queues a request; `fill` appends the bytes of a write.
    pub(crate) fn request(
        &mut self,
        (command, flags): (Command, u16),
        cookie: u64,
        offset: u64,
        length: u32,
        fill: impl FnOnce(&mut Vec<u8>),
    ) {
        self.outgoing.extend_from_slice(&REQUEST_MAGIC.to_be_bytes());
        self.outgoing.extend_from_slice(&flags.to_be_bytes());
        self.outgoing.extend_from_slice(&(command as u16).to_be_bytes());
        self.outgoing.extend_from_slice(&cookie.to_be_bytes());
        self.outgoing.extend_from_slice(&offset.to_be_bytes());
        self.outgoing.extend_from_slice(&length.to_be_bytes());
        fill(&mut self.outgoing);
    }

    /// Sends as much of what is queued as the socket takes.
    pub(crate) fn send(&mut self) -> io::Result<()> {
        while self.has_outgoing() {
            match self.stream.write(&self.outgoing[self.sent..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        self.outgoing.clear();
        self.sent = 0;
        Ok(())
    }

    /// Takes in what the socket has; at most one read, so that replies are noted when they come.
    pub(crate) fn receive(&mut self) -> io::Result<()> {
        if self.taken == self.filled {
            (self.taken, self.filled) = (0, 0);
        } else if self.filled > INCOMING_BYTES / 2 {
            self.incoming.copy_within(self.taken..self.filled, 0);
            (self.taken, self.filled) = (0, self.filled - self.taken);
        }
        match self.stream.read(&mut self.incoming[self.filled..]) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                self.filled += count;
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// The next whole reply; `read_bytes` says how many bytes follow the head of a good reply to a cookie.
    pub(crate) fn next_reply(
        &mut self,
        read_bytes: impl Fn(u64) -> usize,
    ) -> io::Result<Option<(Reply, std::ops::Range<usize>)>> {
        let bytes = &self.incoming[self.taken..self.filled];
        let Some(head) = bytes.first_chunk::<16>() else { return Ok(None) };
        if head[..4] != REPLY_MAGIC.to_be_bytes() {
            return Err(io::Error::other("the server's reply has no magic"));
        }
        let word = |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let reply = Reply { error: word(4), cookie: u64::from(word(8)) << 32 | u64::from(word(12)) };
        let length = if reply.error == 0 { read_bytes(reply.cookie) } else { 0 };
        if bytes.len() < 16 + length {
            return Ok(None);
        }
        let data = self.taken + 16..self.taken + 16 + length;
        self.taken = data.end;
        Ok(Some((reply, data)))
    }

    pub(crate) fn data(&self, range: std::ops::Range<usize>) -> &[u8] {
        &self.incoming[range]
    }
}

/// The fixed-newstyle handshake with `NBD_OPT_GO`; returns the export's size.
fn shake_hands(stream: &mut UnixStream, export: &str) -> io::Result<u64> {
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting)?;
    let (magic, option_magic) = (greeting[..8].to_vec(), greeting[8..16].to_vec());
    if magic != NBD_MAGIC.to_be_bytes() || option_magic != OPTION_MAGIC.to_be_bytes() {
        return Err(io::Error::other("this is no NBD server"));
    }
    let mut go = FIXED_NEWSTYLE_NO_ZEROES.to_be_bytes().to_vec();
    go.extend(OPTION_MAGIC.to_be_bytes());
    go.extend(OPTION_GO.to_be_bytes());
    go.extend((4 + export.len() as u32 + 2).to_be_bytes());
    go.extend((export.len() as u32).to_be_bytes());
    go.extend(export.as_bytes());
    go.extend(0_u16.to_be_bytes());
    stream.write_all(&go)?;
    let mut size = None;
    loop {
        let mut head = [0; 20];
        stream.read_exact(&mut head)?;
        if head[..8] != OPTION_REPLY_MAGIC.to_be_bytes() {
            return Err(io::Error::other("the reply to NBD_OPT_GO has no magic"));
        }
        let word = |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (kind, length) = (word(12), word(16));
        let mut content = vec![0; length as usize];
        stream.read_exact(&mut content)?;
        match kind {
            REPLY_ACK => return size.ok_or_else(|| io::Error::other("the server did not tell the export's size")),
            REPLY_INFO if content.len() >= 12 && content[..2] == [0, 0] => {
                size = Some(content[2..10].iter().fold(0, |size, byte| size << 8 | u64::from(*byte)));
            }
            REPLY_INFO => {}
            other => return Err(io::Error::other(format!("the server refuses export {export:?}: {other:#x}"))),
        }
    }
}
