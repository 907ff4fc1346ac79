//! The load that runs inside the guest: random reads and writes whose every block names its generation. A lost, stale
//! or misplaced write is an error that is reported at once, and again when the whole disk is read at the end.
//!
//! Its output lines start with `@load `. Its input takes `stop`, `rate N` and `verify` (the whole disk is read again,
//! then the load goes on). Latency in offered-rate mode counts from the moment a request was due, not from when a
//! worker was free to send it.

#[path = "../src/pattern.rs"]
#[allow(dead_code, unreachable_pub, missing_docs)]
mod pattern;
mod report;

use std::fs::File;
use std::io::{BufRead, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pattern::BLOCK_BYTES;
use report::Meter;

const O_DIRECT: i32 = 0o40000;
const FAULTS_TOLD_MAX: u64 = 20;
/// Set in a slot's word while a request on it is in flight.
const BUSY: u32 = 1 << 31;
/// A write of the slot failed: either generation may be there.
const UNKNOWN: u32 = 1 << 30;

struct Options {
    device: String,
    workers: u64,
    io_bytes: usize,
    read_percent: u64,
    rate: u64,
    seconds: u64,
    interval_ms: u64,
    region_bytes: u64,
    flush_every: u64,
    is_prefilled: bool,
    seed: u64,
}

struct Load {
    options: Options,
    file: File,
    slots: Vec<AtomicU32>,
    meter: Meter,
    rate: AtomicU64,
    faults: AtomicU64,
    errors: AtomicU64,
    is_stopping: AtomicBool,
    /// When the offered load of the current rate began, in nanoseconds since the start, and how many were due since.
    offered: std::sync::Mutex<(u64, u64)>,
    /// Shared by each request, held alone by a verification between them.
    traffic: std::sync::RwLock<()>,
    started: Instant,
}

fn main() {
    let options = match parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(problem) => fail(&problem),
    };
    let mut opening = File::options();
    opening.read(true).write(true).custom_flags(O_DIRECT);
    let mut file = match opening.open(&options.device) {
        Ok(file) => file,
        Err(error) => fail(&format!("{}: {error}", options.device)),
    };
    let size = file.seek(SeekFrom::End(0)).expect("a disk has an end");
    let region = if options.region_bytes == 0 { size } else { options.region_bytes.min(size) };
    let first_generation = u32::from(options.is_prefilled);
    let slots = (0..region / options.io_bytes as u64).map(|_| AtomicU32::new(first_generation)).collect();
    let load = Load {
        rate: AtomicU64::new(options.rate),
        options,
        file,
        slots,
        meter: Meter::new(),
        faults: AtomicU64::new(0),
        errors: AtomicU64::new(0),
        is_stopping: AtomicBool::new(false),
        offered: std::sync::Mutex::new((0, 0)),
        traffic: std::sync::RwLock::new(()),
        started: Instant::now(),
    };
    if !load.options.is_prefilled {
        load.fill();
    }
    let load: &'static Load = Box::leak(Box::new(load));
    std::thread::spawn(move || load.obey());
    load.run();
    let wrong = load.verify();
    let errors = load.errors.load(Ordering::Relaxed);
    let is_right = wrong == 0 && errors == 0 && load.faults.load(Ordering::Relaxed) == 0;
    say(&format!("done ok={} errors={errors}", u8::from(is_right)));
}

impl Load {
    /// Every worker works until told to stop; one line per interval.
    fn run(&self) {
        say(&format!("start slots={} io_bytes={}", self.slots.len(), self.options.io_bytes));
        *self.offered.lock().expect("no holder panics") = (self.now_ns(), 0);
        std::thread::scope(|scope| {
            for worker in 0..self.options.workers {
                scope.spawn(move || self.work(worker));
            }
            let end = (self.options.seconds > 0).then(|| Duration::from_secs(self.options.seconds));
            let mut last = self.started.elapsed();
            let begun = last;
            while !self.is_stopping.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(self.options.interval_ms));
                let now = self.started.elapsed();
                self.tell_interval(now, now - last);
                last = now;
                if end.is_some_and(|end| now - begun >= end) {
                    self.is_stopping.store(true, Ordering::Relaxed);
                }
            }
        });
        say("stopped");
    }

    fn tell_interval(&self, now: Duration, length: Duration) {
        let taken = self.meter.take();
        say(&format!(
            "interval at_ms={} length_ms={} {} errors={} faults={}",
            now.as_millis(),
            length.as_millis(),
            taken.fields(),
            self.errors.load(Ordering::Relaxed),
            self.faults.load(Ordering::Relaxed),
        ));
    }

    fn work(&self, worker: u64) {
        let mut random = Random(self.options.seed ^ (worker + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut buffer = Aligned::new(self.options.io_bytes);
        let mut writes = 0_u64;
        while !self.is_stopping.load(Ordering::Relaxed) {
            let due = self.wait_for_turn();
            let _request = self.traffic.read().expect("no holder panics");
            let Some(slot) = self.claim(&mut random) else { continue };
            let is_read = random.below(100) < self.options.read_percent;
            if is_read {
                self.read_slot(slot, buffer.bytes());
            } else {
                self.write_slot(slot, buffer.bytes());
                writes += 1;
            }
            self.meter.note(is_read, self.started.elapsed().saturating_sub(due));
            if !is_read && self.options.flush_every > 0 && writes.is_multiple_of(self.options.flush_every) {
                self.flush();
            }
        }
    }

    /// Waits until the next request of the offered rate is due and says when that was; without a rate it is due now.
    fn wait_for_turn(&self) -> Duration {
        let rate = self.rate.load(Ordering::Relaxed);
        if rate == 0 {
            return self.started.elapsed();
        }
        let due_ns = {
            let mut offered = self.offered.lock().expect("no holder panics");
            offered.1 += 1;
            offered.0 + (u128::from(offered.1) * 1_000_000_000 / u128::from(rate)) as u64
        };
        let due = Duration::from_nanos(due_ns);
        std::thread::sleep(due.saturating_sub(self.started.elapsed()));
        due
    }

    /// A random slot that no other worker works on, claimed, with the index only.
    fn claim(&self, random: &mut Random) -> Option<usize> {
        for _ in 0..100 {
            let slot = random.below(self.slots.len() as u64) as usize;
            let word = self.slots[slot].load(Ordering::Acquire);
            let claimed =
                self.slots[slot].compare_exchange(word & !BUSY, word | BUSY, Ordering::AcqRel, Ordering::Relaxed);
            if word & BUSY == 0 && claimed.is_ok() {
                return Some(slot);
            }
        }
        None
    }

    fn read_slot(&self, slot: usize, bytes: &mut [u8]) {
        let word = self.slots[slot].load(Ordering::Relaxed) & !BUSY;
        match self.file.read_exact_at(bytes, (slot * bytes.len()) as u64) {
            Ok(()) => self.check(slot, word, bytes),
            Err(error) => self.tell_error("read", slot, &error),
        }
        self.slots[slot].store(word, Ordering::Release);
    }

    fn write_slot(&self, slot: usize, bytes: &mut [u8]) {
        let word = self.slots[slot].load(Ordering::Relaxed) & !BUSY;
        let generation = (word & !UNKNOWN) + 1;
        self.fill_slot(slot, generation, bytes);
        let next = match self.file.write_all_at(bytes, (slot * bytes.len()) as u64) {
            Ok(()) => generation,
            Err(error) => {
                self.tell_error("write", slot, &error);
                generation | UNKNOWN
            }
        };
        self.slots[slot].store(next, Ordering::Release);
    }

    fn fill_slot(&self, slot: usize, generation: u32, bytes: &mut [u8]) {
        let first = (slot * self.options.io_bytes / BLOCK_BYTES) as u64;
        for (block, bytes) in (first..).zip(bytes.chunks_exact_mut(BLOCK_BYTES)) {
            pattern::fill(bytes, block, u64::from(generation));
        }
    }

    fn check(&self, slot: usize, word: u32, bytes: &[u8]) {
        if word & UNKNOWN != 0 {
            return;
        }
        let first = (slot * self.options.io_bytes / BLOCK_BYTES) as u64;
        for (block, bytes) in (first..).zip(bytes.chunks_exact(BLOCK_BYTES)) {
            let Err(fault) = pattern::check(bytes, block, u64::from(word)) else { continue };
            if self.faults.fetch_add(1, Ordering::Relaxed) < FAULTS_TOLD_MAX {
                say(&format!("fault block={block} expected={word} {fault:?}"));
            }
        }
    }

    fn flush(&self) {
        if let Err(error) = self.file.sync_data() {
            self.tell_error("flush", 0, &error);
        }
    }

    fn tell_error(&self, what: &str, slot: usize, error: &std::io::Error) {
        if self.errors.fetch_add(1, Ordering::Relaxed) < FAULTS_TOLD_MAX {
            say(&format!("error {what} slot={slot}: {error}"));
        }
    }

    /// Writes generation 1 everywhere, in large requests.
    fn fill(&self) {
        let per_request = ((1 << 20) / self.options.io_bytes).max(1);
        let mut buffer = Aligned::new(per_request * self.options.io_bytes);
        for first in (0..self.slots.len()).step_by(per_request) {
            let count = per_request.min(self.slots.len() - first);
            let bytes = &mut buffer.bytes()[..count * self.options.io_bytes];
            for (slot, bytes) in (first..).zip(bytes.chunks_exact_mut(self.options.io_bytes)) {
                self.fill_slot(slot, 1, bytes);
            }
            match self.file.write_all_at(bytes, (first * self.options.io_bytes) as u64) {
                Ok(()) => self.slots[first..first + count].iter().for_each(|slot| slot.store(1, Ordering::Relaxed)),
                Err(error) => self.tell_error("fill", first, &error),
            }
        }
        self.flush();
        say(&format!("filled slots={}", self.slots.len()));
    }

    /// Reads every slot again and returns how many blocks are wrong.
    fn verify(&self) -> u64 {
        self.flush();
        let before = self.faults.load(Ordering::Relaxed);
        let per_request = ((1 << 20) / self.options.io_bytes).max(1);
        let mut buffer = Aligned::new(per_request * self.options.io_bytes);
        for first in (0..self.slots.len()).step_by(per_request) {
            let count = per_request.min(self.slots.len() - first);
            let bytes = &mut buffer.bytes()[..count * self.options.io_bytes];
            if let Err(error) = self.file.read_exact_at(bytes, (first * self.options.io_bytes) as u64) {
                self.tell_error("verify", first, &error);
                continue;
            }
            for (slot, bytes) in (first..).zip(bytes.chunks_exact(self.options.io_bytes)) {
                self.check(slot, self.slots[slot].load(Ordering::Relaxed), bytes);
            }
        }
        let wrong = self.faults.load(Ordering::Relaxed) - before;
        let blocks = self.slots.len() * self.options.io_bytes / BLOCK_BYTES;
        let rewritten = self.slots.iter().filter(|slot| slot.load(Ordering::Relaxed) > 1).count();
        say(&format!("verified blocks={blocks} wrong={wrong} slots_rewritten={rewritten}"));
        wrong
    }

    /// Takes commands from the host until it goes away.
    fn obey(&self) {
        for line in std::io::stdin().lock().lines() {
            let Ok(line) = line else { return };
            match line.trim().split_once(' ').unwrap_or((line.trim(), "")) {
                ("stop", _) => self.is_stopping.store(true, Ordering::Relaxed),
                ("verify", _) => {
                    let _alone = self.traffic.write().expect("no holder panics");
                    self.verify();
                }
                ("rate", rate) => {
                    let rate = rate.trim().parse().unwrap_or(0);
                    *self.offered.lock().expect("no holder panics") = (self.now_ns(), 0);
                    self.rate.store(rate, Ordering::Relaxed);
                }
                _ => {}
            }
        }
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// Bytes at an address that direct IO takes.
struct Aligned {
    bytes: Vec<u8>,
    start: usize,
    length: usize,
}

impl Aligned {
    fn new(length: usize) -> Self {
        let bytes = vec![0; length + BLOCK_BYTES];
        let start = bytes.as_ptr().align_offset(BLOCK_BYTES);
        Self { bytes, start, length }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.length]
    }
}

/// xorshift64*: the order of requests needs no better.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let value = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d);
        ((u128::from(value) * u128::from(limit)) >> 64) as u64
    }
}

fn parse(words: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut options = Options {
        device: "/dev/vda".into(),
        workers: 8,
        io_bytes: 8192,
        read_percent: 70,
        rate: 0,
        seconds: 0,
        interval_ms: 1000,
        region_bytes: 0,
        flush_every: 0,
        is_prefilled: false,
        seed: 1,
    };
    for word in words {
        let (name, value) = word.split_once('=').ok_or(format!("{word}: not NAME=VALUE"))?;
        let number = value.parse::<u64>();
        let number = || number.clone().map_err(|error| format!("{word}: {error}"));
        match name {
            "device" => options.device = value.into(),
            "workers" => options.workers = number()?,
            "io_bytes" => options.io_bytes = number()? as usize,
            "read_percent" => options.read_percent = number()?,
            "rate" => options.rate = number()?,
            "seconds" => options.seconds = number()?,
            "interval_ms" => options.interval_ms = number()?,
            "region_bytes" => options.region_bytes = number()?,
            "flush_every" => options.flush_every = number()?,
            "prefilled" => options.is_prefilled = number()? == 1,
            "seed" => options.seed = number()?,
            _ => return Err(format!("{name}: no such option")),
        }
    }
    if options.io_bytes == 0 || !options.io_bytes.is_multiple_of(BLOCK_BYTES) {
        return Err("io_bytes is a multiple of 4096".into());
    }
    Ok(options)
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // The host may be gone; there is nobody else to tell.
    let _ = writeln!(out, "@load {line}").and_then(|()| out.flush());
}

fn fail(problem: &str) -> ! {
    say(&format!("broken {problem}"));
    std::process::exit(1)
}
