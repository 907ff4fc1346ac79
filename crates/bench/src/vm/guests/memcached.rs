//! A client of memcached over its text protocol: it fills the server, reads and writes as fast as that answers, and checks every value
//! that it reads against the last one that the server has stored.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use transhume_guest::{GuestNetwork, Network};

use super::counter::Counter;

/// Where memcached listens in the guest.
pub(super) const PORT: u16 = 11211;
/// Connections, each with keys of its own and one request at a time, as the paper has it.
const CONNECTIONS: u64 = 4;
/// Keys of one connection.
const KEYS: usize = 5_000;
const VALUE_BYTES: usize = 10_240;
/// How many of a hundred requests store a value.
const SETS_PERCENT: u64 = 10;
/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// A client that works until it is told to finish.
pub(super) struct Client {
    is_stopping: Arc<AtomicBool>,
    workers: Vec<JoinHandle<anyhow::Result<Worker>>>,
}

/// What it has seen.
pub(super) struct Seen {
    /// Requests that were answered.
    pub(super) answers: Counter,
    /// When each of them was.
    all: Vec<Instant>,
}

impl Seen {
    /// The longest time in which no connection had an answer, from a moment on.
    pub(super) fn longest_gap(&self, from: Instant) -> Duration {
        let all = &self.all[self.all.partition_point(|at| *at < from)..];
        all.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or_default()
    }
}

/// One connection.
struct Worker {
    stream: BufReader<TcpStream>,
    number: u64,
    /// How often each value was stored.
    versions: Vec<u32>,
    random: u64,
    /// When each request was answered.
    answers: Vec<Instant>,
    /// What is expected next.
    expected: Vec<u8>,
    found: Vec<u8>,
}

impl Client {
    /// Fills the server and begins.
    pub(super) fn start(network: &GuestNetwork) -> anyhow::Result<Self> {
        let guest = SocketAddr::new(Network::default().host().parse().context("the guest's address")?, PORT);
        let workers = (0..CONNECTIONS).map(|number| Worker::connect(network.connect(guest, PATIENCE)?, number));
        let workers: Vec<Worker> = workers.collect::<anyhow::Result<_>>()?;
        let filling: Vec<_> = workers.into_iter().map(|worker| std::thread::spawn(|| worker.fill())).collect();
        let filled = filling.into_iter().map(end_of).collect::<anyhow::Result<Vec<_>>>()?;
        let is_stopping = Arc::new(AtomicBool::new(false));
        let start = |worker: Worker| {
            let is_stopping = Arc::clone(&is_stopping);
            std::thread::spawn(move || worker.work(&is_stopping))
        };
        let workers = filled.into_iter().map(start).collect();
        Ok(Self { is_stopping, workers })
    }

    /// Stops, and reads every value again.
    ///
    /// # Errors
    /// A value was lost or is not as it was stored, or a connection broke.
    pub(super) fn finish(mut self) -> anyhow::Result<Seen> {
        self.is_stopping.store(true, Ordering::Release);
        let workers = self.workers.drain(..).map(end_of).collect::<anyhow::Result<Vec<Worker>>>()?;
        let mut all: Vec<Instant> = workers.iter().flat_map(|worker| worker.answers.iter().copied()).collect();
        all.sort_unstable();
        let checking: Vec<_> = workers.into_iter().map(|worker| std::thread::spawn(|| worker.check())).collect();
        checking.into_iter().map(end_of).collect::<anyhow::Result<Vec<_>>>()?;
        let mut answers = Counter::default();
        all.iter().for_each(|at| answers.add(*at, 1.0));
        Ok(Seen { answers, all })
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.is_stopping.store(true, Ordering::Release);
    }
}

fn end_of(thread: JoinHandle<anyhow::Result<Worker>>) -> anyhow::Result<Worker> {
    thread.join().unwrap_or_else(|_| bail!("a connection to memcached panicked"))
}

impl Worker {
    fn connect(stream: TcpStream, number: u64) -> anyhow::Result<Self> {
        stream.set_nodelay(true).context("setting up a connection")?;
        stream.set_read_timeout(Some(PATIENCE)).context("setting up a connection")?;
        Ok(Self {
            stream: BufReader::with_capacity(2 * VALUE_BYTES, stream),
            number,
            versions: vec![0; KEYS],
            random: 0x9e37_79b9 + number,
            answers: Vec::new(),
            expected: Vec::new(),
            found: Vec::new(),
        })
    }

    fn fill(mut self) -> anyhow::Result<Self> {
        (0..KEYS).try_for_each(|key| self.set(key))?;
        Ok(self)
    }

    fn work(mut self, is_stopping: &AtomicBool) -> anyhow::Result<Self> {
        while !is_stopping.load(Ordering::Acquire) {
            let (key, dice) = (self.below(KEYS as u64) as usize, self.below(100));
            if dice < SETS_PERCENT {
                self.set(key)?
            } else {
                self.get(key)?
            }
            self.answers.push(Instant::now());
        }
        Ok(self)
    }

    fn check(mut self) -> anyhow::Result<Self> {
        (0..KEYS).try_for_each(|key| self.get(key))?;
        Ok(self)
    }

    fn set(&mut self, key: usize) -> anyhow::Result<()> {
        self.versions[key] += 1;
        let mut request = format!("set {}-{key} 0 0 {VALUE_BYTES}\r\n", self.number).into_bytes();
        self.expect(key);
        request.extend_from_slice(&self.expected);
        request.extend_from_slice(b"\r\n");
        self.send(&request)?;
        let answer = self.line()?;
        ensure!(answer == "STORED", "memcached did not store a value: {answer}");
        Ok(())
    }

    fn get(&mut self, key: usize) -> anyhow::Result<()> {
        let name = format!("{}-{key}", self.number);
        self.send(format!("get {name}\r\n").as_bytes())?;
        let answer = self.line()?;
        ensure!(answer == format!("VALUE {name} 0 {VALUE_BYTES}"), "memcached has lost {name}: {answer}");
        self.found.resize(VALUE_BYTES + 2, 0);
        self.stream.read_exact(&mut self.found).context("reading a value of memcached")?;
        let end = self.line()?;
        ensure!(end == "END", "memcached ends a value by {end:?}");
        self.expect(key);
        let is_right = self.found[..VALUE_BYTES] == self.expected[..];
        ensure!(is_right, "memcached has a wrong value of {name}, stored {} times", self.versions[key]);
        Ok(())
    }

    /// Makes the value that was stored last: bytes that no compression shortens, others for each key and each time.
    fn expect(&mut self, key: usize) {
        let mut state =
            (self.number << 48 | (key as u64) << 32 | u64::from(self.versions[key])) ^ 0x5851_f42d_4c95_7f2d;
        self.expected.clear();
        while self.expected.len() < VALUE_BYTES {
            self.expected.extend_from_slice(&next(&mut state).to_le_bytes());
        }
    }

    fn below(&mut self, limit: u64) -> u64 {
        next(&mut self.random) % limit
    }

    fn send(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        self.stream.get_mut().write_all(bytes).context("sending to memcached")
    }

    fn line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        self.stream.read_line(&mut line).context("reading from memcached")?;
        Ok(line.trim_end().to_owned())
    }
}

/// The next of a series of numbers (xorshift64*).
fn next(state: &mut u64) -> u64 {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    state.wrapping_mul(0x2545_f491_4f6c_dd1d)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// A worker whose server answers what it is told, whatever it is asked.
    fn worker(answer: &'static [u8]) -> Worker {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        server.write_all(answer).unwrap();
        std::thread::spawn(move || std::io::copy(&mut server, &mut std::io::sink()));
        Worker::connect(stream, 3).unwrap()
    }

    #[test]
    fn a_value_that_was_lost_or_refused_is_an_error() {
        let mut lost = worker(b"END\r\n");
        assert!(lost.get(7).unwrap_err().to_string().contains("has lost 3-7"));
        let mut refused = worker(b"SERVER_ERROR out of memory storing object\r\n");
        assert!(refused.set(7).unwrap_err().to_string().contains("out of memory"));
    }

    #[test]
    fn a_value_of_an_earlier_time_is_wrong() {
        let mut reader = worker(b"");
        reader.versions[7] = 1;
        reader.expect(7);
        let first = [b"VALUE 3-7 0 10240\r\n", &reader.expected[..], b"\r\nEND\r\n"].concat();
        let mut right = worker(first.clone().leak());
        right.versions[7] = 1;
        right.get(7).unwrap();
        let mut stale = worker(first.leak());
        stale.versions[7] = 2;
        assert!(stale.get(7).unwrap_err().to_string().contains("wrong value"));
    }
}
