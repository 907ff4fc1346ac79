//! What the tests of this crate share: a server on one end of a stream, a scripted client on the other, and scripted
//! devices.

#![allow(dead_code, unreachable_pub, reason = "each test file uses its part of this")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use block::{
    Buffer, BufferPool, Bytes, Device, Error, ErrorKind, Extent, ExtentStatus, Filter, IoFuture, MemDevice, Mutation,
    ready,
};
use env::{EnvRef, RealEnv};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use transhume_nbd::protocol::{
    Command, Errno, GoRequest, Greeting, MetaContextRequest, OPTION_REPLY_HEADER_BYTES, OptionReplyHeader, ReplyHead,
    Request, option, option_reply, parse_error, write_option,
};
use transhume_nbd::server::Summary;
use transhume_nbd::{Export, Exports, Limits, serve_connection};

pub fn env() -> EnvRef {
    Arc::new(RealEnv::new())
}

pub fn memory(size: Bytes) -> Device {
    Device::new("memory", MemDevice::new(size))
}

/// An export called `disk` of a device that every connection shares.
pub fn export_of(device: Device) -> Export {
    Export::new("disk", BufferPool::new(Bytes::mib(64)), move || device.clone())
}

pub fn only(export: Export) -> Arc<dyn Exports> {
    Arc::new(vec![Arc::new(export)])
}

/// A server on one end of a pipe of 64 KiB, and the other end.
pub fn serve(exports: Arc<dyn Exports>, limits: Limits) -> (DuplexStream, JoinHandle<Summary>) {
    let (near, far) = tokio::io::duplex(64 << 10);
    (near, tokio::spawn(serve_connection(far, exports, env(), limits)))
}

/// A client that has just connected to `exports`.
pub async fn connect(exports: &Arc<dyn Exports>) -> (Raw<DuplexStream>, JoinHandle<Summary>) {
    let (stream, server) = serve(Arc::clone(exports), Limits::default());
    (Raw { stream }, server)
}

/// A client in transmission: structured replies and `base:allocation`.
pub async fn enter(exports: &Arc<dyn Exports>) -> (Raw<DuplexStream>, JoinHandle<Summary>) {
    let (mut raw, server) = connect(exports).await;
    raw.greet(3).await;
    raw.structured().await;
    raw.set_allocation("disk").await;
    assert_eq!(raw.go("disk").await, option_reply::ACK);
    (raw, server)
}

/// A client that says what it is told, right or wrong.
pub struct Raw<S> {
    pub stream: S,
}

/// A reply: error, message, payload.
#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    pub cookie: u64,
    pub error: Option<Errno>,
    pub payload: Vec<u8>,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Raw<S> {
    pub async fn say(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.expect("the server listens");
    }

    pub async fn hear(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.stream.read_exact(&mut bytes).await.expect("the server speaks");
        bytes
    }

    /// Asserts that the server says nothing more and closes.
    pub async fn assert_closed(&mut self) {
        let mut rest = Vec::new();
        self.stream.read_to_end(&mut rest).await.expect("the stream ends without an error");
        assert_eq!(rest, [] as [u8; 0], "the server went on talking");
    }

    pub async fn greet(&mut self, flags: u32) {
        let greeting = self.hear(Greeting::BYTES).await;
        let greeting = Greeting::parse(greeting.as_slice().try_into().expect("it has its length"));
        assert_eq!(greeting.expect("it is one").flags, 3);
        self.say(&flags.to_be_bytes()).await;
    }

    /// All replies to an option: types and data.
    pub async fn option(&mut self, option: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.say(&write_option(option, data)).await;
        self.replies(option).await
    }

    pub async fn replies(&mut self, option: u32) -> Vec<(u32, Vec<u8>)> {
        let mut replies = Vec::new();
        loop {
            let header = self.hear(OPTION_REPLY_HEADER_BYTES).await;
            let header = OptionReplyHeader::parse(header.as_slice().try_into().expect("it has its length"));
            let header = header.expect("it is a reply");
            assert_eq!(header.option, option);
            let data = self.hear(header.length as usize).await;
            replies.push((header.reply, data));
            if header.reply == option_reply::ACK || header.reply & option_reply::ERROR != 0 {
                return replies;
            }
        }
    }

    /// The last reply's type.
    pub async fn outcome(&mut self, option: u32, data: &[u8]) -> u32 {
        self.option(option, data).await.last().expect("there is always a last").0
    }

    pub async fn structured(&mut self) {
        assert_eq!(self.outcome(option::STRUCTURED_REPLY, &[]).await, option_reply::ACK);
    }

    pub async fn set_allocation(&mut self, name: &str) {
        let request = MetaContextRequest { name, queries: vec!["base:allocation"] }.to_bytes();
        assert_eq!(self.outcome(option::SET_META_CONTEXT, &request).await, option_reply::ACK);
    }

    pub async fn go(&mut self, name: &str) -> u32 {
        self.outcome(option::GO, &GoRequest { name, items: vec![] }.to_bytes()).await
    }

    pub async fn send(&mut self, command: Command, flags: u16, offset: u64, length: u32) {
        let request = Request { flags, command, cookie: 77, offset: Bytes(offset), length };
        self.say(&request.to_bytes()).await;
    }

    /// A reply of one chunk, or a simple one with `length` bytes of payload if it is no error.
    pub async fn answer(&mut self, length: usize) -> Answer {
        let first = self.hear(4).await;
        let magic = [first[0], first[1], first[2], first[3]];
        let rest = ReplyHead::length(magic).expect("a reply begins with its magic number") - 4;
        let header = [first, self.hear(rest).await].concat();
        match ReplyHead::parse(&header).expect("it is a reply") {
            ReplyHead::Simple(cookie, error) => {
                let payload = if error.is_none() { self.hear(length).await } else { Vec::new() };
                Answer { cookie, error, payload }
            }
            ReplyHead::Chunk(chunk) => {
                assert!(chunk.done, "this server answers in one chunk");
                let payload = self.hear(chunk.length as usize).await;
                let error = chunk.chunk.is_error().then(|| parse_error(&payload).expect("it is an error").0);
                Answer { cookie: chunk.cookie, error, payload }
            }
        }
    }

    /// A request without payload, and the error of its answer.
    pub async fn ask(&mut self, command: Command, flags: u16, offset: u64, length: u32) -> Option<Errno> {
        self.send(command, flags, offset, length).await;
        let answer = self.answer(0).await;
        assert_eq!(answer.cookie, 77);
        answer.error
    }

    pub async fn write(&mut self, offset: u64, data: &[u8]) -> Option<Errno> {
        self.send(Command::Write, 0, offset, data.len() as u32).await;
        self.say(data).await;
        self.answer(0).await.error
    }

    /// Reads over structured replies.
    pub async fn read(&mut self, offset: u64, length: u32) -> Vec<u8> {
        self.send(Command::Read, 0, offset, length).await;
        let answer = self.answer(0).await;
        assert_eq!(answer.error, None);
        assert_eq!(answer.payload[..8], offset.to_be_bytes());
        answer.payload[8..].to_vec()
    }

    /// Takes leave and returns when the server has closed.
    pub async fn leave(mut self) {
        self.send(Command::Disconnect, 0, 0, 0).await;
        self.assert_closed().await;
    }
}

/// Writes down what it is asked, and can hold requests until it is told, or fail them.
pub struct Recorder {
    lower: Device,
    pub log: Mutex<Vec<String>>,
    /// One permit lets one mutation through; `None` lets all through.
    pub held: Option<Semaphore>,
    pub failure: Mutex<Option<ErrorKind>>,
    pub in_flight: AtomicUsize,
    pub in_flight_max: AtomicUsize,
}

impl Recorder {
    pub fn over(lower: Device) -> Self {
        Self {
            lower,
            log: Mutex::default(),
            held: None,
            failure: Mutex::default(),
            in_flight: AtomicUsize::new(0),
            in_flight_max: AtomicUsize::new(0),
        }
    }

    /// The same, holding every mutation until a permit comes.
    pub fn held(mut self) -> Self {
        self.held = Some(Semaphore::new(0));
        self
    }

    pub fn release(&self, count: usize) {
        self.held.as_ref().expect("it holds").add_permits(count);
    }

    pub fn take_log(&self) -> Vec<String> {
        std::mem::take(&mut self.log.lock())
    }

    fn fail<T>(&self) -> Result<(), IoFuture<'static, T>>
    where
        T: Send + 'static,
    {
        let failure = *self.failure.lock();
        failure.map_or(Ok(()), |kind| Err(ready(Err(Error::new(kind, "as ordered")))))
    }

    async fn pass(&self) {
        let now = self.in_flight.fetch_add(1, Ordering::SeqCst) + 1;
        self.in_flight_max.fetch_max(now, Ordering::SeqCst);
        if let Some(held) = &self.held {
            held.acquire().await.expect("never closed").forget();
        }
    }
}

/// A recorder that the test keeps, too.
pub struct Shared(pub Arc<Recorder>);

impl Filter for Shared {
    fn lower(&self) -> &Device {
        &self.0.lower
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        match self.0.fail() {
            Ok(()) => Box::pin(self.0.lower.read(offset, buffer)),
            Err(failed) => failed,
        }
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        if let Err(failed) = self.0.fail() {
            return failed;
        }
        Box::pin(async move {
            self.0.pass().await;
            let kind = match mutation.kind() {
                block::MutationKind::Data(data) => format!("data {}", data.first().copied().unwrap_or_default()),
                other => format!("{other:?}"),
            };
            let fua = if mutation.fua { " fua" } else { "" };
            self.0.log.lock().push(format!("{:?} {kind}{fua}", mutation.extent()));
            let outcome = self.0.lower.write(mutation).await;
            self.0.in_flight.fetch_sub(1, Ordering::SeqCst);
            outcome
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        if let Err(failed) = self.0.fail() {
            return failed;
        }
        self.0.log.lock().push("flush".to_owned());
        Box::pin(self.0.lower.flush())
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        match self.0.fail() {
            Ok(()) => Box::pin(self.0.lower.extents(extent)),
            Err(failed) => failed,
        }
    }
}

/// A device over `recorder`.
pub fn device_of(recorder: &Arc<Recorder>) -> Device {
    Device::new("recorder", Shared(Arc::clone(recorder)))
}
