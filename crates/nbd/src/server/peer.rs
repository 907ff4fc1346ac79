//! What the kernel knows of a client, so that nobody has to guess from an empty socket whether it lives.

use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::server::TlsStream;

/// TLS may have decrypted so much that nobody has read yet: a few records.
const TLS_BYTES_MAX: u64 = 128 << 10;

/// A client at the other end of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// It has the socket open: whatever waits there unread, it has not gone.
    Open,
    /// It has closed the socket.
    Closed,
    /// It may be gone without the kernel's knowing. No more than so many of its bytes are here unread.
    Unread(u64),
    /// Nobody knows anything of it.
    Unknown,
}

/// Asks for the client at the other end of a stream.
pub(super) type AskPeer<S> = fn(&S) -> Peer;

/// A socket of a client, of which the kernel can be asked.
pub trait ClientSocket: AsyncRead + AsyncWrite + Unpin + Send {
    /// What the kernel says now.
    fn peer(&self) -> Peer;
}

impl ClientSocket for UnixStream {
    fn peer(&self) -> Peer {
        let mut asked = [PollFd::new(self, PollFlags::RDHUP)];
        match poll(&mut asked, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
            Ok(0) => Peer::Open,
            Ok(_) => Peer::Closed,
            Err(_) => Peer::Unknown,
        }
    }
}

impl ClientSocket for TcpStream {
    fn peer(&self) -> Peer {
        rustix::io::ioctl_fionread(self.as_fd()).map_or(Peer::Unknown, Peer::Unread)
    }
}

/// The same for a client that speaks TLS over its socket. What is decrypted is no longer than what was received.
pub(super) fn below_tls<S: ClientSocket>(stream: &TlsStream<S>) -> Peer {
    match stream.get_ref().0.peer() {
        Peer::Unread(bytes) => Peer::Unread(bytes + TLS_BYTES_MAX),
        peer => peer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt;

    #[tokio::test]
    async fn a_client_has_gone_when_it_has_closed_its_socket_and_not_before_whatever_is_unread() {
        let (near, mut far) = UnixStream::pair().expect("a pair");
        far.write_all(&[1; 1000]).await.expect("there is room");
        assert_eq!(near.peer(), Peer::Open);
        drop(far);
        assert_eq!(near.peer(), Peer::Closed, "it is behind what is unread");
        let (near, far) = UnixStream::pair().expect("a pair");
        far.into_std().expect("a socket").shutdown(std::net::Shutdown::Write).expect("shut down");
        assert_eq!(near.peer(), Peer::Closed);
    }
}
