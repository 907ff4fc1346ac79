//! A guest: it writes and reads through connections of its own, and knows what it was promised.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use block::{Buffer, Bytes, Data, Device, Extent, Mutation};
use env::{EnvRef, RealEnv};
use nbd::{NbdDevice, NbdUri};
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha12Rng;

use super::{HANG, World};

/// How many connections it has; each writes to a part of the volume of its own.
const LANES: u64 = 3;
/// The unit of its requests.
const BLOCK: u64 = 4096;

/// How long its requests wait.
struct Waits {
    epoch: Instant,
    /// When each lane has begun what it waits for, in nanoseconds; 0 if it waits for nothing.
    begun: [AtomicU64; LANES as usize],
    /// The longest of those that were answered, in nanoseconds.
    longest: AtomicU64,
    /// Whether nothing new is asked for.
    is_resting: AtomicBool,
}

impl Waits {
    fn now(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64
    }

    fn begin(&self, lane: usize) {
        self.begun[lane].store(self.now(), Ordering::Relaxed);
    }

    fn end(&self, lane: usize) {
        let begun = self.begun[lane].swap(0, Ordering::Relaxed);
        self.longest.fetch_max(self.now() - begun, Ordering::Relaxed);
    }
}

/// A guest under load.
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    requests: Arc<AtomicU64>,
    waits: Arc<Waits>,
    thread: Option<std::thread::JoinHandle<Vec<Vec<u8>>>>,
}

impl Load {
    /// Begins to use the export at `uri`, which holds what is in the file `image` now.
    pub(crate) fn start(uri: &str, image: &Path, seed: u64) -> Self {
        Self::start_with(uri, image, seed, true)
    }

    /// The same; whether zeroes are among what it writes is said.
    pub(crate) fn start_with(uri: &str, image: &Path, seed: u64, has_zeroes: bool) -> Self {
        let (stop, requests) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let uri: NbdUri = uri.parse().expect("a good address");
        let contents = std::fs::read(image).expect("read");
        let part = contents.len().div_ceil(LANES as usize).next_multiple_of(BLOCK as usize);
        let lanes: Vec<(u64, Vec<u8>)> = contents
            .chunks(part)
            .enumerate()
            .map(|(number, bytes)| (number as u64 * part as u64, bytes.to_vec()))
            .collect();
        let waits = Arc::new(Waits {
            epoch: Instant::now(),
            begun: Default::default(),
            longest: AtomicU64::new(0),
            is_resting: AtomicBool::new(false),
        });
        let (ended, counted, waited) = (Arc::clone(&stop), Arc::clone(&requests), Arc::clone(&waits));
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("an event loop");
            runtime.block_on(async move {
                let env: EnvRef = Arc::new(RealEnv::new());
                let lanes = lanes.into_iter().enumerate().map(|(number, (start, model))| {
                    let random = ChaCha12Rng::seed_from_u64(seed + number as u64);
                    let (uri, env, waits) = (uri.clone(), Arc::clone(&env), Arc::clone(&waited));
                    let lane = Lane { number, uri, env, waits, has_zeroes, start, model, random, device: None };
                    tokio::spawn(lane.run(Arc::clone(&ended), Arc::clone(&counted)))
                });
                let mut models = Vec::new();
                for lane in lanes.collect::<Vec<_>>() {
                    models.push(lane.await.expect("the guest saw what it must not see"));
                }
                models
            })
        });
        Self { stop, requests, waits, thread: Some(thread) }
    }

    /// Waits until a hundred more requests were answered: it goes on.
    pub(crate) fn goes_on(&self) {
        self.answers(100);
    }

    /// Waits until so many more requests were answered.
    pub(crate) fn answers(&self, count: u64) {
        let (before, start) = (self.requests(), Instant::now());
        while self.requests() < before + count {
            let has_ended = self.thread.as_ref().is_none_or(std::thread::JoinHandle::is_finished);
            assert!(!has_ended, "the guest saw what it must not see");
            assert!(start.elapsed() < HANG, "the guest waits: {} more requests of {count}", self.requests() - before);
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until a few hundred more requests were answered, beside whatever the guest could wait for.
    pub(crate) fn goes_on_beside(&self, what: &str, world: &World) {
        let (before, start) = (self.requests(), Instant::now());
        while self.requests() < before + 300 {
            assert!(start.elapsed() < HANG, "{what}: the guest waits\n{}", world.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Asks for nothing new from now on, or again for as much as before.
    pub(crate) fn rest(&self, is_resting: bool) {
        self.waits.is_resting.store(is_resting, Ordering::Relaxed);
    }

    /// The longest that a request has waited since this was asked for, those included that still wait.
    pub(crate) fn take_longest(&self) -> Duration {
        let answered = self.waits.longest.swap(0, Ordering::Relaxed);
        let now = self.waits.now();
        let begun = self.waits.begun.iter().map(|begun| begun.load(Ordering::Relaxed)).filter(|begun| *begun > 0);
        Duration::from_nanos(begun.map(|begun| now.saturating_sub(begun)).fold(answered, u64::max))
    }

    /// How many requests were answered so far.
    pub(crate) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Ends, and gives what the volume must hold.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.stop.store(true, Ordering::Relaxed);
        let models = self.thread.take().expect("not finished yet").join().expect("the guest saw what it must not see");
        models.concat()
    }
}

/// One connection and its part of the volume.
struct Lane {
    number: usize,
    uri: NbdUri,
    env: EnvRef,
    waits: Arc<Waits>,
    has_zeroes: bool,
    start: u64,
    model: Vec<u8>,
    random: ChaCha12Rng,
    device: Option<Device>,
}

impl Lane {
    async fn run(mut self, stop: Arc<AtomicBool>, requests: Arc<AtomicU64>) -> Vec<u8> {
        while !stop.load(Ordering::Relaxed) {
            if self.waits.is_resting.load(Ordering::Relaxed) {
                tokio::time::sleep(Duration::from_millis(1)).await;
                continue;
            }
            let blocks = self.model.len() as u64 / BLOCK;
            let first = self.random.random_range(0..blocks);
            let count = self.random.random_range(1..=8).min(blocks - first);
            let extent = Extent::new(Bytes(first * BLOCK), Bytes(count * BLOCK));
            self.waits.begin(self.number);
            match self.random.random_range(0..10) {
                0..=2 => self.read(extent).await,
                3 if self.has_zeroes => self.write(extent, None).await,
                4 => self.flush().await,
                _ => {
                    let mut data = vec![0; extent.length.as_usize()];
                    self.random.fill_bytes(&mut data);
                    self.write(extent, Some(data)).await;
                }
            }
            self.waits.end(self.number);
            requests.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        self.model
    }

    /// The connection, made again for as long as it takes.
    async fn device(&mut self) -> Device {
        loop {
            if let Some(device) = &self.device {
                return device.clone();
            }
            match NbdDevice::connect(&self.uri, &self.env).await {
                Ok(device) => self.device = Some(Device::new("export", device)),
                Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    }

    /// The connection is gone: a device's own error is none that a guest would survive.
    fn lost(&mut self, error: &block::Error) {
        assert_eq!(error.kind(), block::ErrorKind::Disconnected, "the guest saw an error: {}", error.chain());
        self.device = None;
    }

    async fn read(&mut self, extent: Extent) {
        loop {
            let at = Bytes(self.start) + extent.offset;
            match self.device().await.read(at, Buffer::unpooled(extent.length.as_usize())).await {
                Ok(bytes) => {
                    let from = extent.offset.as_usize();
                    assert!(bytes[..] == self.model[from..from + bytes.len()], "{extent} is not what was written");
                    return;
                }
                Err(error) => self.lost(&error),
            }
        }
    }

    async fn write(&mut self, extent: Extent, data: Option<Vec<u8>>) {
        let at = Extent::new(Bytes(self.start) + extent.offset, extent.length);
        loop {
            let mutation = match &data {
                Some(data) => Mutation::data(at.offset, Data::copy_of(data)),
                None => Mutation::zeroes(at, true),
            };
            match self.device().await.write(mutation).await {
                Ok(()) => break,
                Err(error) => self.lost(&error),
            }
        }
        let from = extent.offset.as_usize();
        let part = &mut self.model[from..from + extent.length.as_usize()];
        match data {
            Some(data) => part.copy_from_slice(&data),
            None => part.fill(0),
        }
    }

    async fn flush(&mut self) {
        loop {
            match self.device().await.flush().await {
                Ok(()) => return,
                Err(error) => self.lost(&error),
            }
        }
    }
}
