//! One TCP connection that lasts.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::thread::JoinHandle;

use anyhow::Context;

use super::{ATTEMPT, Shared, pace};

pub(super) const PORT: u16 = 8;

/// One thread sends numbers, one notes which came back.
pub(super) fn start(shared: &Arc<Shared>, stream: TcpStream) -> anyhow::Result<[JoinHandle<()>; 2]> {
    stream.set_nodelay(true).context("sending at once")?;
    stream.set_read_timeout(Some(ATTEMPT)).context("limiting the wait")?;
    stream.set_write_timeout(Some(ATTEMPT)).context("limiting the wait")?;
    let receiver = stream.try_clone().context("cloning a socket")?;
    let (sending, receiving) = (Arc::clone(shared), Arc::clone(shared));
    let send = move || send_all(&sending, stream);
    let receive = move || receive_all(&receiving, receiver);
    Ok([std::thread::spawn(send), std::thread::spawn(receive)])
}

fn send_all(shared: &Shared, mut stream: TcpStream) {
    pace(shared, shared.spec.tcp_per_second, || {
        if is_broken(shared) {
            return;
        }
        let number = shared.tcp.made_now() as u64;
        // The buffers of a connection hold what is sent in minutes.
        if let Err(error) = stream.write_all(&number.to_be_bytes()) {
            tell(shared, &format!("sending: {error}"));
        }
    });
}

fn receive_all(shared: &Shared, mut stream: TcpStream) {
    let (mut bytes, mut filled) = ([0; 8], 0);
    while !shared.is_over() {
        match stream.read(&mut bytes[filled..]) {
            Ok(0) => return tell(shared, "the guest closed it"),
            Ok(length) => filled += length,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => return tell(shared, &format!("receiving: {error}")),
        }
        if filled == bytes.len() {
            shared.tcp.answered(u64::from_be_bytes(bytes) as usize);
            filled = 0;
        }
    }
}

fn is_broken(shared: &Shared) -> bool {
    shared.tcp_broken.lock().expect("no holder panics").is_some()
}

fn tell(shared: &Shared, why: &str) {
    shared.tcp_broken.lock().expect("no holder panics").get_or_insert_with(|| why.to_owned());
}
