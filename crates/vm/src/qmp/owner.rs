//! Who else holds a unix socket: what to say when the monitor does not answer because another client owns it.
//!
//! `/proc/net/unix` does not tell which sockets are connected to which; the kernel's `sock_diag` does (it is what
//! `ss -x` asks). The owner is the process that has the peer of a connected socket with the monitor's path open.

use std::collections::HashSet;
use std::fmt;
use std::fs;
use std::io;
use std::path::Path;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink};

/// A process that holds the other end of a monitor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Its program's name.
    pub program: String,
    /// Its process id.
    pub pid: u32,
}

impl fmt::Display for Owner {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} pid {}", self.program, self.pid)
    }
}

/// The process that owns the monitor at `path`, if the kernel tells; `qemu` and this process are not meant.
#[must_use]
pub fn owner_of_socket(path: &Path, qemu: Option<u32>) -> Option<Owner> {
    let path = path.to_str()?;
    let sockets = connected_sockets().ok()?;
    let peers: HashSet<u64> = sockets.iter().filter(|socket| socket.name == path).map(|socket| socket.peer).collect();
    let processes = fs::read_dir("/proc").ok()?.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_meant = |pid: &u32| *pid != std::process::id() && Some(*pid) != qemu && holds_one_of(*pid, &peers);
    let pid = processes.into_iter().find(is_meant)?;
    let program = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?.trim().to_owned();
    Some(Owner { program, pid })
}

fn holds_one_of(pid: u32, inodes: &HashSet<u64>) -> bool {
    let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    descriptors.flatten().filter_map(|entry| fs::read_link(entry.path()).ok()).any(|target| {
        let inode = target.to_str().and_then(|text| text.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok());
        inode.is_some_and(|inode: u64| inodes.contains(&inode))
    })
}

/// A connected unix socket.
#[derive(Clone, Debug, PartialEq, Eq)]
struct UnixSocket {
    name: String,
    /// The inode of the socket at the other end.
    peer: u64,
}

/// `SOCK_DIAG_BY_FAMILY`.
const BY_FAMILY: u16 = 20;
/// `NLMSG_ERROR` and `NLMSG_DONE`: nothing follows.
const ENDS: [u16; 2] = [2, 3];
const HEADER_BYTES: usize = 16;

fn connected_sockets() -> io::Result<Vec<UnixSocket>> {
    let kind = SocketType::DGRAM;
    let protocol = Some(netlink::SOCK_DIAG);
    let socket = rustix::net::socket_with(AddressFamily::NETLINK, kind, SocketFlags::CLOEXEC, protocol)?;
    rustix::net::send(&socket, &request(), SendFlags::empty())?;
    let mut sockets = Vec::new();
    let mut buffer = vec![0; 64 << 10];
    loop {
        let (count, _) = rustix::net::recv(&socket, &mut buffer[..], RecvFlags::empty())?;
        if parse_answer(&buffer[..count], &mut sockets) || count == 0 {
            return Ok(sockets);
        }
    }
}

/// A request for all connected unix sockets with their names and peers.
fn request() -> Vec<u8> {
    const REQUEST_AND_DUMP: u16 = 0x301;
    const CONNECTED: u32 = 1 << 1;
    const NAME_AND_PEER: u32 = 0x5;
    let mut bytes = Vec::new();
    bytes.extend_from_slice(&40_u32.to_ne_bytes());
    bytes.extend_from_slice(&BY_FAMILY.to_ne_bytes());
    bytes.extend_from_slice(&REQUEST_AND_DUMP.to_ne_bytes());
    bytes.extend_from_slice(&[0; 8]);
    bytes.extend_from_slice(&[1, 0, 0, 0]);
    bytes.extend_from_slice(&CONNECTED.to_ne_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&NAME_AND_PEER.to_ne_bytes());
    bytes.extend_from_slice(&[0xff; 8]);
    bytes
}

/// Adds the sockets of one datagram; true if it was the last.
fn parse_answer(mut bytes: &[u8], sockets: &mut Vec<UnixSocket>) -> bool {
    while let Some((length, kind)) = lengths(bytes, 4) {
        if length < HEADER_BYTES || length > bytes.len() || ENDS.contains(&kind) {
            return true;
        }
        if kind == BY_FAMILY {
            sockets.extend(bytes.get(HEADER_BYTES + 16..length).and_then(parse_socket));
        }
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    false
}

/// A length of `width` bytes and the kind after it.
fn lengths(bytes: &[u8], width: usize) -> Option<(usize, u16)> {
    let kind = u16::from_ne_bytes(bytes.get(width..width + 2)?.try_into().ok()?);
    let length = match width {
        4 => u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?) as usize,
        _ => usize::from(u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?)),
    };
    Some((length, kind))
}

fn parse_socket(mut attributes: &[u8]) -> Option<UnixSocket> {
    const NAME: u16 = 0;
    const PEER: u16 = 2;
    let (mut name, mut peer) = (None, None);
    while let Some((length, kind)) = lengths(attributes, 2) {
        let value = attributes.get(4..length)?;
        match kind {
            NAME => name = Some(String::from_utf8_lossy(value).trim_end_matches('\0').to_owned()),
            PEER => peer = Some(u64::from(u32::from_ne_bytes(value.try_into().ok()?))),
            _ => {}
        }
        attributes = attributes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Some(UnixSocket { name: name?, peer: peer? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn the_kernel_tells_who_is_at_the_other_end() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).expect("bound");
        let client = UnixStream::connect(&path).expect("connected");
        let served = listener.accept().expect("accepted");
        let inode = fs::read_link(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&client))).expect("open");
        let sockets = connected_sockets().expect("the kernel answers");
        let found = sockets.iter().find(|socket| Path::new(&socket.name) == path).expect("the served end is listed");
        assert_eq!(inode.to_str(), Some(format!("socket:[{}]", found.peer).as_str()));
        assert_eq!(owner_of_socket(&path, None), None, "this process itself was named");
        drop(served);
    }

    proptest! {
        #[test]
        fn a_damaged_answer_is_no_panic(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            parse_answer(&bytes, &mut Vec::new());
            parse_socket(&bytes);
        }

        #[test]
        fn damaged_lengths_are_no_panic(length in 0_u32..200, inner in 0_u16..200) {
            let mut bytes = vec![0_u8; 96];
            bytes[..4].copy_from_slice(&length.to_ne_bytes());
            bytes[4..6].copy_from_slice(&BY_FAMILY.to_ne_bytes());
            bytes[32..34].copy_from_slice(&inner.to_ne_bytes());
            parse_answer(&bytes, &mut Vec::new());
        }
    }
}
