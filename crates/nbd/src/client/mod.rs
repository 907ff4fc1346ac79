//! The client: an export of a server as a device.
//!
//! Any number of requests may be in flight. When the connection is lost, everything in flight and everything later
//! fails with `Disconnected`: whether a write was carried out is then unknown. [`NbdBackend`] connects again, with what
//! that means for what was answered before.

mod backend;
mod handshake;
mod pump;
mod replay_log;

pub use backend::{BackendOptions, Dial, DialUri, NbdBackend};

use std::time::Duration;

use block::{
    BlockDevice, Buffer, Bytes, Data, Error, ErrorKind, Extent, ExtentState, ExtentStatus, Geometry, IoFuture,
    Mutation, MutationKind, Result,
};
use env::{Env, EnvRef};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tokio::sync::oneshot;

use crate::protocol::{Command, Request, allocation, command_flag, export_flag};
use crate::tcp::connect_tcp;
use crate::tls::TlsClient;
use crate::{NbdUri, Transport};
use handshake::Negotiated;
use pump::{Submitter, Wanted, disconnected, pump};

/// How long connecting and the handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(30);

/// The largest piece of a request without payload: a round number below 2^32.
const EFFECT_BYTES_MAX: u64 = 1 << 30;

/// The largest transfer, whatever the server allows.
const TRANSFER_BYTES_MAX: u32 = 32 << 20;

/// An export of an NBD server as a device. Dropping it disconnects politely.
pub struct NbdDevice {
    submitter: Submitter,
    negotiated: Negotiated,
}

impl NbdDevice {
    /// Connects to the export that `uri` names, through TLS if it says so, and never without it then.
    ///
    /// # Errors
    /// If there is no server, no such export, or the server needs what this client has not. What is wrong with TLS says
    /// [`crate::TlsError::of`].
    pub async fn connect(uri: &NbdUri, env: &EnvRef) -> Result<Self> {
        let failed = |error| Error::from_os(error, format!("connecting to {uri}"));
        let host = match &uri.transport {
            Transport::Unix(_) => None,
            Transport::Tcp(host, _) => Some(host.as_str()),
        };
        let tls = uri.tls.as_ref().map(|tls| TlsClient::new(tls, host, env)).transpose();
        let tls = tls.map_err(|error| error.while_doing(format!("connecting to {uri}")))?;
        let connecting = async {
            match &uri.transport {
                Transport::Unix(path) => {
                    let stream = UnixStream::connect(path).await.map_err(failed)?;
                    Self::over_either(stream, uri, tls, &**env).await
                }
                Transport::Tcp(host, port) => {
                    let stream = connect_tcp(host, *port).await.map_err(failed)?;
                    Self::over_either(stream, uri, tls, &**env).await
                }
            }
        };
        let late = || Error::new(ErrorKind::TimedOut, format!("{uri} did not answer within {HANDSHAKE_TIMEOUT:?}"));
        env::timeout(&**env, HANDSHAKE_TIMEOUT, connecting).await.ok_or_else(late)?
    }

    async fn over_either<S>(stream: S, uri: &NbdUri, tls: Option<TlsClient>, env: &dyn Env) -> Result<Self>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        match tls {
            None => Self::over(stream, &uri.export, env).await,
            Some(tls) => {
                let connecting = Box::pin(Self::over_tls(stream, &uri.export, &tls, env));
                connecting.await.map_err(|error| error.wrap(format!("connecting to {uri}")))
            }
        }
    }

    /// Uses the export `name` of the server behind `stream`, without a limit in time.
    ///
    /// # Errors
    /// If there is no such export, or the server needs what this client has not.
    pub async fn over<S>(mut stream: S, name: &str, env: &dyn Env) -> Result<Self>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        handshake::greet(&mut stream).await?;
        let negotiated = handshake::negotiate(&mut stream, name).await?;
        Self::begin(stream, negotiated, env)
    }

    async fn over_tls<S>(mut stream: S, name: &str, tls: &TlsClient, env: &dyn Env) -> Result<Self>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        handshake::greet(&mut stream).await?;
        handshake::start_tls(&mut stream).await?;
        let mut stream = tls.connect(stream).await?;
        let negotiated = handshake::negotiate(&mut stream, name).await.map_err(|error| tls.explain(error))?;
        Self::begin(stream, negotiated, env)
    }

    fn begin<S>(stream: S, negotiated: Negotiated, env: &dyn Env) -> Result<Self>
    where
        S: AsyncRead + AsyncWrite + Send + 'static,
    {
        if negotiated.sizes.minimum > 4096 {
            let minimum = negotiated.sizes.minimum;
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("the export takes multiples of {minimum} bytes only; more than 4096 is not supported"),
            ));
        }
        let (submitter, sender, receiver) = pump(stream, negotiated.is_structured);
        env.spawn(sender);
        env.spawn(receiver);
        Ok(Self { submitter, negotiated })
    }

    /// Whether the server says that all connections see what one has written, and that a flush covers all of them.
    #[must_use]
    pub const fn is_consistent_over_connections(&self) -> bool {
        self.has(export_flag::CAN_MULTI_CONN)
    }

    /// Whether the server can be asked to make durable what it has answered. If not, it says that it is.
    #[must_use]
    pub const fn can_flush(&self) -> bool {
        self.has(export_flag::SEND_FLUSH)
    }

    /// Whether the server tells which parts of the export hold nothing.
    #[must_use]
    pub const fn tells_extents(&self) -> bool {
        self.negotiated.allocation.is_some()
    }

    const fn has(&self, flag: u16) -> bool {
        self.negotiated.export.flags & flag != 0
    }

    /// Sends a request that is answered without contents.
    async fn command(&self, command: Command, flags: u16, extent: Extent, payload: Option<Data>) -> Result<()> {
        let (answer, answered) = oneshot::channel();
        self.submitter.submit(request(command, flags, extent), payload, Wanted::Done(answer));
        answered.await.map_err(|_| disconnected())?
    }

    async fn mutate(&self, mutation: &Mutation) -> Result<()> {
        let extent = mutation.extent();
        let can_fua = self.has(export_flag::SEND_FUA);
        let fua = if mutation.fua && can_fua { command_flag::FUA } else { 0 };
        match mutation.kind() {
            MutationKind::Data(data) => self.command(Command::Write, fua, extent, Some(data.clone())).await?,
            MutationKind::Zeroes { may_unmap } if self.has(export_flag::SEND_WRITE_ZEROES) => {
                let flags = fua | if *may_unmap { 0 } else { command_flag::NO_HOLE };
                for piece in extent.split_at_multiples(EFFECT_BYTES_MAX) {
                    self.command(Command::WriteZeroes, flags, piece, None).await?;
                }
            }
            MutationKind::Zeroes { .. } => {
                let unit = u64::from(self.geometry().transfer_bytes_max).min(1 << 20);
                let unit = unit - unit % u64::from(self.negotiated.sizes.minimum);
                let zeroes = Buffer::unpooled(unit.min(extent.length.get()) as usize).freeze();
                for piece in extent.split_at_multiples(unit) {
                    let data = zeroes.slice(0..piece.length.as_usize());
                    self.command(Command::Write, fua, piece, Some(data)).await?;
                }
            }
            MutationKind::Discard if self.has(export_flag::SEND_TRIM) => {
                for piece in extent.split_at_multiples(EFFECT_BYTES_MAX) {
                    self.command(Command::Trim, fua, piece, None).await?;
                }
            }
            // A discard may do nothing.
            MutationKind::Discard => {}
        }
        if mutation.fua && !can_fua { self.sync().await } else { Ok(()) }
    }

    async fn sync(&self) -> Result<()> {
        match self.has(export_flag::SEND_FLUSH) {
            true => self.command(Command::Flush, 0, Extent::whole(Bytes::ZERO), None).await,
            // Such a server says that what it answered is durable.
            false => Ok(()),
        }
    }
}

fn request(command: Command, flags: u16, extent: Extent) -> Request {
    let length = u32::try_from(extent.length.get()).expect("requests are cut to lengths of 32 bits");
    Request { flags, command, cookie: 0, offset: extent.offset, length }
}

impl BlockDevice for NbdDevice {
    fn geometry(&self) -> Geometry {
        let sizes = self.negotiated.sizes;
        let transfer_max = sizes.maximum.min(TRANSFER_BYTES_MAX);
        Geometry {
            size: self.negotiated.export.size,
            request_alignment: sizes.minimum,
            preferred_bytes: sizes.preferred,
            transfer_bytes_max: transfer_max - transfer_max % sizes.minimum,
            read_only: self.has(export_flag::READ_ONLY),
        }
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            let (answer, answered) = oneshot::channel();
            let request = request(Command::Read, 0, Extent::new(offset, buffer.len().into()));
            let wanted = Wanted::Bytes { buffer, offset: offset.get(), received: 0, answer };
            self.submitter.submit(request, None, wanted);
            answered.await.map_err(|_| disconnected())?
        })
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(async move { self.mutate(&mutation).await })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.sync())
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        Box::pin(async move {
            let Some(context) = self.negotiated.allocation else {
                return Ok(vec![ExtentStatus { extent, state: ExtentState::Data }]);
            };
            let asked = Extent::new(extent.offset, extent.length.min(Bytes(EFFECT_BYTES_MAX)));
            let (answer, answered) = oneshot::channel();
            let wanted = Wanted::Extents { context, descriptors: Vec::new(), answer };
            self.submitter.submit(request(Command::BlockStatus, 0, asked), None, wanted);
            let descriptors = answered.await.map_err(|_| disconnected())??;
            Ok(pieces_of(asked, &descriptors))
        })
    }
}

/// The described part of `asked`; a server may describe more than it was asked.
fn pieces_of(asked: Extent, descriptors: &[(u32, u32)]) -> Vec<ExtentStatus> {
    let mut pieces = Vec::with_capacity(descriptors.len());
    let mut next = asked.offset;
    for (length, flags) in descriptors {
        let end = next.get().saturating_add(u64::from(*length)).min(asked.end().get());
        let state = match flags & (allocation::HOLE | allocation::ZERO) {
            0 | allocation::HOLE => ExtentState::Data,
            allocation::ZERO => ExtentState::Zero,
            _ => ExtentState::Hole,
        };
        if Bytes(end) > next {
            pieces.push(ExtentStatus { extent: Extent::between(next, Bytes(end)), state });
            next = Bytes(end);
        }
    }
    pieces
}
