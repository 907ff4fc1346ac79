//! Requests by UDP.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::thread::JoinHandle;

use anyhow::Context;

use super::{ATTEMPT, Shared, pace};

const PORT: u16 = 7;

/// A socket that speaks to the guest.
pub(super) fn open(guest: IpAddr) -> anyhow::Result<UdpSocket> {
    let socket = UdpSocket::bind("0.0.0.0:0").context("making a UDP socket")?;
    socket.connect(SocketAddr::new(guest, PORT)).context("connecting a UDP socket")?;
    socket.set_read_timeout(Some(ATTEMPT)).context("limiting the wait")?;
    Ok(socket)
}

/// One thread sends numbers, one notes which came back.
pub(super) fn start(shared: &Arc<Shared>, socket: UdpSocket) -> anyhow::Result<[JoinHandle<()>; 2]> {
    let receiver = socket.try_clone().context("cloning a socket")?;
    let (sending, receiving) = (Arc::clone(shared), Arc::clone(shared));
    let send = move || {
        pace(&sending, sending.spec.udp_per_second, || {
            let number = sending.udp.made_now() as u64;
            // What cannot be sent is lost, and counts as that.
            let _ = socket.send(&number.to_be_bytes());
        });
    };
    let receive = move || {
        let mut bytes = [0; 8];
        while !receiving.is_over() {
            // Errors tell of a guest that is unreachable for a while.
            if let Ok(8) = receiver.recv(&mut bytes) {
                receiving.udp.answered(u64::from_be_bytes(bytes) as usize);
            }
        }
    };
    Ok([std::thread::spawn(send), std::thread::spawn(receive)])
}
