//! What the guest answers on its network: UDP and TCP echoes, and a page. As little work as possible for each packet,
//! because the guest may be emulated: a web server that forks for each page takes twice the processor time of this one,
//! and is overloaded by 100 pages a second.

use std::convert::Infallible;
use std::io::{Error, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const UDP_PORT: u16 = 7;
const TCP_PORT: u16 = 8;
const HTTP_PORT: u16 = 80;
/// So many pages are served at once: clients that vanished hold a few of them for a while.
const HTTP_WORKERS: usize = 8;
const HTTP_PATIENCE: Duration = Duration::from_millis(500);

/// Pages served since the guest booted.
static COUNTER: AtomicU64 = AtomicU64::new(0);

/// Serves for ever. The port of the TCP echo opens last: whoever reaches it reaches everything.
pub(crate) fn serve() -> Result<Infallible, Error> {
    let udp = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, UDP_PORT))?;
    std::thread::spawn(move || echo_datagrams(&udp));
    let http = TcpListener::bind((Ipv4Addr::UNSPECIFIED, HTTP_PORT))?;
    for _ in 0..HTTP_WORKERS {
        let http = http.try_clone()?;
        std::thread::spawn(move || {
            loop {
                // A connection that breaks is the client's affair.
                let _ = http.accept().and_then(|(stream, _)| serve_page(stream));
            }
        });
    }
    let tcp = TcpListener::bind((Ipv4Addr::UNSPECIFIED, TCP_PORT))?;
    loop {
        let (stream, _) = tcp.accept()?;
        std::thread::spawn(move || echo_stream(stream));
    }
}

fn echo_datagrams(socket: &UdpSocket) {
    let mut bytes = [0; 2048];
    loop {
        // A client that is gone is told of by an error of either call, which concerns nobody else.
        if let Ok((length, from)) = socket.recv_from(&mut bytes) {
            let _ = socket.send_to(&bytes[..length], from);
        }
    }
}

fn echo_stream(mut stream: TcpStream) {
    let _ = stream.set_nodelay(true);
    let mut bytes = [0; 4096];
    while let Ok(length @ 1..) = stream.read(&mut bytes) {
        if stream.write_all(&bytes[..length]).is_err() {
            return;
        }
    }
}

/// Answers every request with the page; the connection ends with it.
fn serve_page(mut stream: TcpStream) -> Result<(), Error> {
    stream.set_read_timeout(Some(HTTP_PATIENCE))?;
    let (mut request, mut filled) = ([0; 4096], 0);
    while filled < request.len() && !request[..filled].ends_with(b"\r\n\r\n") {
        match stream.read(&mut request[filled..])? {
            0 => return Ok(()),
            length => filled += length,
        }
    }
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let page = format!(
        "<!DOCTYPE html><title>guest</title><p>counter={} clock={}.{:06}</p>\n",
        COUNTER.fetch_add(1, Ordering::Relaxed) + 1,
        clock.as_secs(),
        clock.subsec_micros()
    );
    let head = "HTTP/1.0 200 OK\r\nContent-Type: text/html\r\nCache-Control: no-store\r\nConnection: close\r\n";
    stream.write_all(format!("{head}Content-Length: {}\r\n\r\n{page}", page.len()).as_bytes())
}
