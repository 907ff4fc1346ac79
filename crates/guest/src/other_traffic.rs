//! What other programs send over the network that moves use.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::{Side, TwoHosts};

const PORT: u16 = 4711;

/// Somebody else's traffic from one host to another: one connection that wants a rate, as an application has it.
#[derive(Debug)]
pub struct OtherTraffic {
    arrived: Arc<AtomicU64>,
    is_over: Arc<AtomicBool>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl OtherTraffic {
    /// From the first host to the second.
    ///
    /// # Panics
    /// There is no such connection.
    #[must_use]
    pub fn start(hosts: &TwoHosts, bytes_per_second: u64) -> Self {
        let enter = |side| hosts.enter(side).expect("entered");
        Self::between(|| enter(Side::A), || enter(Side::B), hosts.machine(Side::B, 0), bytes_per_second)
    }

    /// From where `enter_sender` brings a thread to where `enter_receiver` does, which has the address `to`.
    ///
    /// # Panics
    /// There is no such connection.
    #[must_use]
    pub fn between(
        enter_sender: impl FnOnce() + Send,
        enter_receiver: impl FnOnce() + Send,
        to: String,
        bytes_per_second: u64,
    ) -> Self {
        let (arrived, is_over) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let threads = std::thread::scope(|scope| {
            let (ready, is_ready) = std::sync::mpsc::channel();
            let receiver = scope.spawn({
                let (arrived, to) = (Arc::clone(&arrived), to.clone());
                move || {
                    enter_receiver();
                    let listener = TcpListener::bind((to.as_str(), PORT)).expect("bound");
                    ready.send(()).expect("somebody waits");
                    let mut stream = listener.accept().expect("accepted").0;
                    std::thread::spawn(move || {
                        let mut bytes = vec![0; 1 << 18];
                        while let Ok(count @ 1..) = stream.read(&mut bytes) {
                            arrived.fetch_add(count as u64, Ordering::Relaxed);
                        }
                    })
                }
            });
            let sender = scope.spawn({
                let is_over = Arc::clone(&is_over);
                move || {
                    enter_sender();
                    is_ready.recv().expect("somebody listens");
                    let stream = TcpStream::connect((to.as_str(), PORT)).expect("connected");
                    std::thread::spawn(move || send(stream, bytes_per_second, &is_over))
                }
            });
            [receiver, sender].map(|thread| thread.join().expect("no panic")).into_iter().collect()
        });
        Self { arrived, is_over, threads }
    }

    /// What has arrived so far, in bytes.
    #[must_use]
    pub fn arrived(&self) -> u64 {
        self.arrived.load(Ordering::Relaxed)
    }

    /// What arrives, in bytes a second.
    #[must_use]
    pub fn rate(&self, span: Duration) -> f64 {
        let (before, began) = (self.arrived(), Instant::now());
        std::thread::sleep(span);
        (self.arrived() - before) as f64 / began.elapsed().as_secs_f64()
    }

    /// Ends it.
    ///
    /// # Panics
    /// One of its threads has.
    pub fn stop(self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    }
}

fn send(mut stream: TcpStream, bytes_per_second: u64, is_over: &AtomicBool) {
    let piece = vec![7; 32 << 10];
    let (began, mut sent) = (Instant::now(), 0_u64);
    while !is_over.load(Ordering::Relaxed) {
        let due = (began.elapsed().as_secs_f64() * bytes_per_second as f64) as u64;
        if sent > due {
            std::thread::sleep(Duration::from_millis(2));
            continue;
        }
        // What could not be sent in time is not made up for: whoever asked for it has gone.
        sent = sent.max(due.saturating_sub(1 << 20)) + piece.len() as u64;
        stream.write_all(&piece).expect("the other side reads");
    }
}
