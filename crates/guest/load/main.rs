//! The load that runs inside the guest: random reads and writes whose every block names its generation. A lost, stale
//! or misplaced write is an error that is reported at once, and again when the whole disk is read at the end. It can
//! rewrite and check its own memory beside that, or instead. Called with the word `serve` it answers the network; with
//! the word `alternate` it only wakes, again and again.
//!
//! Its output lines start with `@load `. Its input takes `stop`, `rate N` and `verify` (the whole disk is read again,
//! then the load goes on). Latency in offered-rate mode counts from the moment a request was due, not from when a
//! worker was free to send it.

mod memory;
mod options;
#[path = "../src/pattern.rs"]
#[allow(dead_code, unreachable_pub, missing_docs)]
mod pattern;
mod report;
mod serve;
mod tools;

use std::fs::File;
use std::io::{BufRead, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use memory::Memory;
use options::Options;
use pattern::BLOCK_BYTES;
use report::Meter;
use tools::{Aligned, Random};

/// How often each of the processes wakes that make the guest's kernel change address spaces.
const ALTERNATE_INTERVAL: Duration = Duration::from_millis(5);
const O_DIRECT: i32 = 0o40000;
const FAULTS_TOLD_MAX: u64 = 20;
/// Set in a slot's word while a request on it is in flight.
const BUSY: u32 = 1 << 31;
/// A write of the slot failed: either generation may be there.
const UNKNOWN: u32 = 1 << 30;

struct Load {
    options: Options,
    file: File,
    slots: Vec<AtomicU32>,
    meter: Meter,
    memory: Option<Memory>,
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

/// What the verification of the whole disk found.
struct Verified {
    blocks: usize,
    wrong: u64,
    slots_rewritten: usize,
}

fn main() {
    if std::env::args().nth(1).is_some_and(|word| word == "serve") {
        let Err(error) = serve::serve();
        fail(&format!("serve: {error}"));
    }
    if std::env::args().nth(1).is_some_and(|word| word == "alternate") {
        loop {
            std::thread::sleep(ALTERNATE_INTERVAL);
        }
    }
    let options = match options::parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(problem) => fail(&problem),
    };
    let mut opening = File::options();
    opening.read(true);
    // Without a disk there are no slots, and nothing is ever read.
    let device = options.device.as_deref().unwrap_or("/dev/null");
    if options.device.is_some() {
        opening.write(true).custom_flags(O_DIRECT);
    }
    let mut file = match opening.open(device) {
        Ok(file) => file,
        Err(error) => fail(&format!("{device}: {error}")),
    };
    let size = options.device.as_ref().map_or(0, |_| file.seek(SeekFrom::End(0)).expect("a disk has an end"));
    let region = if options.region_bytes == 0 { size } else { options.region_bytes.min(size) };
    let first_generation = u32::from(options.is_prefilled);
    let slots = (0..region / options.io_bytes as u64).map(|_| AtomicU32::new(first_generation)).collect();
    let load = Load {
        rate: AtomicU64::new(options.rate),
        memory: Memory::new(&options),
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
    if !load.options.is_prefilled && load.has_disk() {
        load.fill();
    }
    let load: &'static Load = Box::leak(Box::new(load));
    std::thread::spawn(move || load.obey());
    load.run();
    let verified = load.verify();
    load.tell_end(&verified);
}

impl Load {
    fn has_disk(&self) -> bool {
        !self.slots.is_empty()
    }

    /// The last line carries every total: whoever missed the lines before it still learns the result.
    fn tell_end(&self, verified: &Verified) {
        let errors = self.errors.load(Ordering::Relaxed);
        let faults = self.faults.load(Ordering::Relaxed);
        let memory = self.memory.as_ref().map(Memory::totals).unwrap_or_default();
        let Verified { blocks, wrong, slots_rewritten } = verified;
        let is_right = *wrong == 0 && errors == 0 && faults == 0 && memory.wrong == 0;
        say(&format!(
            "done ok={} errors={errors} faults={faults} blocks={blocks} wrong={wrong} \
             slots_rewritten={slots_rewritten} pages={} pages_wrong={} pages_rewritten={}",
            u8::from(is_right),
            memory.pages,
            memory.wrong,
            memory.rewritten
        ));
    }

    /// Every worker works until told to stop; one line per interval.
    fn run(&self) {
        say(&format!("start slots={} io_bytes={}", self.slots.len(), self.options.io_bytes));
        *self.offered.lock().expect("no holder panics") = (self.now_ns(), 0);
        std::thread::scope(|scope| {
            for worker in (0..self.options.workers).filter(|_| self.has_disk()) {
                scope.spawn(move || self.work(worker));
            }
            if let Some(memory) = &self.memory {
                scope.spawn(|| memory.rewrite_until(&self.is_stopping));
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
        if let Some(memory) = &self.memory {
            memory.tell();
        }
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
        if !self.has_disk() {
            return;
        }
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

    /// Reads every slot again, and every page of the memory.
    fn verify(&self) -> Verified {
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
        let slots_rewritten = self.slots.iter().filter(|slot| slot.load(Ordering::Relaxed) > 1).count();
        if let Some(memory) = &self.memory {
            memory.verify();
            memory.tell();
        }
        say(&format!("verified blocks={blocks} wrong={wrong} slots_rewritten={slots_rewritten}"));
        Verified { blocks, wrong, slots_rewritten }
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

pub(crate) fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // The host may be gone; there is nobody else to tell.
    let _ = writeln!(out, "@load {line}").and_then(|()| out.flush());
}

fn fail(problem: &str) -> ! {
    say(&format!("broken {problem}"));
    std::process::exit(1)
}
