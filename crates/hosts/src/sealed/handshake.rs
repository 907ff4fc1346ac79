//! The handshake, by the library, up to where records of data begin.

use std::io;
use std::sync::Arc;

use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::{Acceptor, UnbufferedServerConnection};
use rustls::unbuffered::{ConnectionState, EncodeError, UnbufferedStatus};
use rustls::{ClientConfig, CommonState, ServerConfig};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::records::broken;
use super::{RateController, Sealed, of_library};

/// No handshake needs more at once.
pub(super) const INCOMING_BYTES_MAX: usize = 64 << 10;

/// What a client has said first.
pub struct Greeting {
    /// What it would speak, the best first.
    pub protocols: Vec<Vec<u8>>,
    /// All that has come so far.
    pub bytes: Vec<u8>,
}

/// Waits for what a client says first. What makes no sense is for whoever answers it to refuse.
pub async fn greeted(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Greeting> {
    let mut greeting = Greeting { protocols: Vec::new(), bytes: Vec::new() };
    let mut acceptor = Acceptor::default();
    loop {
        let before = greeting.bytes.len();
        receive(stream, &mut greeting.bytes).await?;
        let mut new = &greeting.bytes[before..];
        while !new.is_empty() {
            // The library takes a part at a time.
            if acceptor.read_tls(&mut new).is_err() {
                return Ok(greeting);
            }
            match acceptor.accept() {
                Ok(None) => {}
                Ok(Some(accepted)) => {
                    let protocols = accepted.client_hello().alpn();
                    greeting.protocols = protocols.into_iter().flatten().map(<[u8]>::to_vec).collect();
                    return Ok(greeting);
                }
                Err(_) => return Ok(greeting),
            }
        }
    }
}

/// Shakes hands as the one who connects, with whoever `config` expects.
pub async fn connect<S: AsyncRead + AsyncWrite + Unpin>(
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
    mut stream: S,
) -> io::Result<Sealed<S>> {
    let mut connection = UnbufferedClientConnection::new(config, name).map_err(of_library)?;
    let mut incoming = Vec::new();
    let advance =
        |incoming: &mut [u8], outgoing: &mut Vec<u8>| step(connection.process_tls_records(incoming), outgoing);
    shake_hands(&mut stream, &mut incoming, advance).await?;
    let met = met(&connection);
    let (secrets, keeper) = connection.dangerous_into_kernel_connection().map_err(of_library)?;
    Sealed::new(stream, met, (secrets, RateController::Client(keeper)), &incoming)
}

/// Shakes hands with a client that has sent `incoming` already.
pub async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
    config: Arc<ServerConfig>,
    mut stream: S,
    mut incoming: Vec<u8>,
) -> io::Result<Sealed<S>> {
    let mut connection = UnbufferedServerConnection::new(config).map_err(of_library)?;
    let advance =
        |incoming: &mut [u8], outgoing: &mut Vec<u8>| step(connection.process_tls_records(incoming), outgoing);
    shake_hands(&mut stream, &mut incoming, advance).await?;
    let met = met(&connection);
    let (secrets, keeper) = connection.dangerous_into_kernel_connection().map_err(of_library)?;
    Sealed::new(stream, met, (secrets, RateController::Server(keeper)), &incoming)
}

/// What was agreed to be spoken, and with whom.
fn met(connection: &CommonState) -> (Option<Vec<u8>>, Option<CertificateDer<'static>>) {
    let certificate = connection.peer_certificates().and_then(|chain| chain.first());
    let certificate = certificate.map(|certificate| certificate.clone().into_owned());
    (connection.alpn_protocol().map(<[u8]>::to_vec), certificate)
}

/// What a handshake needs next.
enum Step {
    Again,
    Send,
    Receive,
    Done,
}

/// Does what the library wants; also gives how many bytes of what has come are not needed any more.
fn step<Data>(status: UnbufferedStatus<'_, '_, Data>, outgoing: &mut Vec<u8>) -> (usize, io::Result<Step>) {
    let next = match status.state {
        Ok(ConnectionState::EncodeTlsData(mut encoding)) => match encoding.encode(&mut []) {
            Err(EncodeError::InsufficientSize(size)) => {
                let start = outgoing.len();
                outgoing.resize(start + size.required_size, 0);
                let encoded = encoding.encode(&mut outgoing[start..]);
                encoded.map(|_| Step::Again).map_err(io::Error::other)
            }
            Ok(_) => Ok(Step::Again),
            Err(error) => Err(io::Error::other(error)),
        },
        Ok(ConnectionState::TransmitTlsData(transmitting)) => {
            transmitting.done();
            Ok(Step::Send)
        }
        Ok(ConnectionState::BlockedHandshake) => Ok(Step::Receive),
        Ok(ConnectionState::WriteTraffic(_)) => Ok(Step::Done),
        Ok(_) => Err(broken("data, or the end, comes before the handshake is over")),
        Err(error) => Err(of_library(error)),
    };
    (status.discard, next)
}

/// Takes turns with the other side until `advance` is done.
async fn shake_hands(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    incoming: &mut Vec<u8>,
    mut advance: impl FnMut(&mut [u8], &mut Vec<u8>) -> (usize, io::Result<Step>),
) -> io::Result<()> {
    let mut outgoing = Vec::new();
    loop {
        let (done, next) = advance(incoming, &mut outgoing);
        incoming.drain(..done);
        match next {
            Ok(Step::Again) => {}
            Ok(Step::Send) => send(stream, &mut outgoing).await?,
            Ok(Step::Receive) => receive(stream, incoming).await?,
            Ok(Step::Done) => return send(stream, &mut outgoing).await,
            Err(error) => {
                // The other side learns why, as far as it listens. That is one message at most: whoever asks for more has what was
                // wrong looked at again.
                let _ = advance(incoming, &mut outgoing);
                let _ = send(stream, &mut outgoing).await;
                return Err(error);
            }
        }
    }
}

async fn send(stream: &mut (impl AsyncWrite + Unpin), outgoing: &mut Vec<u8>) -> io::Result<()> {
    stream.write_all(outgoing).await?;
    outgoing.clear();
    stream.flush().await
}

async fn receive(stream: &mut (impl AsyncRead + Unpin), incoming: &mut Vec<u8>) -> io::Result<()> {
    if incoming.len() >= INCOMING_BYTES_MAX {
        return Err(broken("the handshake is too long"));
    }
    incoming.reserve(4096);
    match stream.read_buf(incoming).await? {
        0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the connection has ended within the handshake")),
        _ => Ok(()),
    }
}
