//! Pages by HTTP, each on a connection of its own.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;

use super::Shared;
use crate::two_hosts::enter;

const PORT: u16 = 80;
/// So many pages are asked for at once at most; what is due beyond that waits, and its latency counts.
const WORKERS: usize = 16;
/// A try is given up after so long. The kernel itself repeats a lost SYN after a second only.
const ATTEMPT: Duration = Duration::from_millis(500);
const PAUSE: Duration = Duration::from_millis(20);

/// What was seen of all pages.
#[derive(Default)]
pub(super) struct Pages {
    /// The highest counter that was ever answered.
    counter: Mutex<u64>,
    retries: AtomicU64,
    backwards: AtomicU64,
}

impl Pages {
    pub(super) fn retries(&self) -> u64 {
        self.retries.load(Ordering::Relaxed)
    }

    pub(super) fn backwards(&self) -> u64 {
        self.backwards.load(Ordering::Relaxed)
    }

    fn counter(&self) -> u64 {
        *self.counter.lock().expect("no holder panics")
    }

    /// Takes an answer to a request that was made when `before` was the highest counter.
    fn note(&self, counter: u64, before: u64) {
        if counter <= before {
            self.backwards.fetch_add(1, Ordering::Relaxed);
        }
        let mut highest = self.counter.lock().expect("no holder panics");
        *highest = counter.max(*highest);
    }
}

pub(super) fn start(shared: &Arc<Shared>) -> Vec<JoinHandle<()>> {
    let start = |_| {
        let shared = Arc::clone(shared);
        std::thread::spawn(move || {
            enter(&shared.namespace).expect("the namespace was entered before");
            ask(&shared);
        })
    };
    (0..WORKERS).map(start).collect()
}

fn ask(shared: &Shared) {
    while !shared.is_stopping() {
        let (number, due) = shared.http.next_due(shared.spec.http_per_second);
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        while !shared.is_over() {
            let before = shared.pages.counter();
            if let Ok(counter) = counter_of_page(SocketAddr::new(shared.guest, PORT)) {
                shared.http.answered(number);
                shared.pages.note(counter, before);
                break;
            }
            shared.pages.retries.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(PAUSE);
        }
    }
}

fn counter_of_page(server: SocketAddr) -> anyhow::Result<u64> {
    let mut stream = TcpStream::connect_timeout(&server, ATTEMPT)?;
    stream.set_read_timeout(Some(ATTEMPT))?;
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
    let mut page = String::new();
    stream.read_to_string(&mut page)?;
    let (_, rest) = page.split_once("counter=").context("no counter on the page")?;
    let digits = rest.split(|letter: char| !letter.is_ascii_digit()).next().unwrap_or_default();
    digits.parse().context("the counter is a number")
}
