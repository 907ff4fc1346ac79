//! What carries a stream.

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};

use crate::error::{Error, Result};
use crate::wire::{PREFIX_BYTES, checksum_of, parse_prefix};

/// A connection in both directions: an encrypted one between two daemons, a simulated link, a unix socket.
pub trait Transport: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Transport for T {}

/// Any connection.
pub type BoxTransport = Box<dyn Transport>;

/// Reads a greeting, and gives its text.
pub(crate) async fn receive_greeting(transport: &mut BoxTransport) -> Result<Vec<u8>> {
    let mut prefix = [0; PREFIX_BYTES];
    transport.read_exact(&mut prefix).await.map_err(Error::disconnected)?;
    let (length, sum) = parse_prefix(&prefix)?;
    let mut text = vec![0; length as usize];
    transport.read_exact(&mut text).await.map_err(Error::disconnected)?;
    if checksum_of(&text) != sum {
        return Err(Error::protocol("a greeting is damaged"));
    }
    Ok(text)
}
