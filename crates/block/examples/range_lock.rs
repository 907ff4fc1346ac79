//! The cost of a range lock, and what it lets run in parallel. `cargo xtask bench-range-lock` runs this and makes the
//! tables. Every lock takes its turn in every round; one line of JSON for each figure.
//!
//! Threads ask as copiers (64 KiB chunks in order, each in a part of its own) and as guests (4 to 256 KiB anywhere).
//! They wait in the operating system for what is not granted.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use futures::executor::block_on;
use parking_lot::{Mutex, RwLock};
use transhume_block::{Bytes, Extent, RangeLock, RangeMode, RangeQueue, Ticket};

const VOLUME: u64 = 64 << 30;
const CHUNK: u64 = 64 << 10;
const THREADS: [usize; 4] = [1, 2, 4, 8];

/// A lock on extents.
trait Ranges: Sync {
    type Wait: Future + Unpin;
    fn ask(&self, extent: Extent) -> Self::Wait;
}

impl Ranges for RangeLock {
    type Wait = transhume_block::RangeWait;
    fn ask(&self, extent: Extent) -> Self::Wait {
        self.exclusive(extent)
    }
}

/// No lock at all: what the load itself takes, and what a machine makes of several threads that share nothing.
struct Nothing;

impl Ranges for Nothing {
    type Wait = std::future::Ready<Extent>;
    fn ask(&self, extent: Extent) -> Self::Wait {
        std::future::ready(std::hint::black_box(extent))
    }
}

/// The rule behind one mutex, as the range lock was before it was spread over many.
#[derive(Clone, Default)]
struct OneMutex(Arc<Mutex<One>>);

#[derive(Default)]
struct One {
    queue: RangeQueue,
    wakers: HashMap<Ticket, Waker>,
}

struct OneGuard {
    lock: OneMutex,
    ticket: Ticket,
}

impl Ranges for OneMutex {
    type Wait = OneWait;
    fn ask(&self, extent: Extent) -> OneWait {
        let (ticket, _) = self.0.lock().queue.push(extent, RangeMode::Exclusive);
        OneWait(Some(OneGuard { lock: self.clone(), ticket }))
    }
}

struct OneWait(Option<OneGuard>);

impl Future for OneWait {
    type Output = OneGuard;
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<OneGuard> {
        let guard = self.0.as_ref().expect("it is not polled again");
        let ticket = guard.ticket;
        let mut one = guard.lock.0.lock();
        if !one.queue.is_granted(ticket) {
            one.wakers.insert(ticket, context.waker().clone());
            return Poll::Pending;
        }
        drop(one);
        Poll::Ready(self.0.take().expect("looked at above"))
    }
}

impl Drop for OneGuard {
    fn drop(&mut self) {
        let mut one = self.lock.0.lock();
        let One { queue, wakers } = &mut *one;
        if !wakers.is_empty() {
            wakers.remove(&self.ticket);
        }
        let mut woken = Vec::new();
        queue.remove(self.ticket, |granted| woken.extend(wakers.remove(&granted)));
        drop(one);
        woken.into_iter().for_each(Waker::wake);
    }
}

/// What a thread asks for.
#[derive(Clone, Copy)]
enum Asks {
    /// Chunks in order, in a part of the volume of its own.
    Chunks,
    /// By turns a chunk of a copier and a request of a guest.
    Both,
    /// 4 to 16 KiB within one and the same MiB.
    OneMebibyte,
}

struct Asker {
    asks: Asks,
    random: u64,
    next: u64,
    turn: bool,
}

impl Asker {
    fn new(asks: Asks, thread: usize, threads: usize) -> Self {
        let part = (VOLUME / threads as u64) & !(CHUNK - 1);
        Self { asks, random: 0x9e37_79b9_7f4a_7c15 ^ (thread as u64 + 1) << 7, next: part * thread as u64, turn: false }
    }

    fn random(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) % below
    }

    fn chunk(&mut self) -> Extent {
        let offset = self.next % VOLUME;
        self.next = offset + CHUNK;
        Extent::new(Bytes(offset), Bytes(CHUNK))
    }

    /// One request in eight goes to a busy part of 16 MiB, where it meets others.
    fn of_a_guest(&mut self) -> Extent {
        let length = 4096 << self.random(7);
        let room = if self.random(8) == 0 { 16 << 20 } else { VOLUME - (1 << 20) };
        Extent::new(Bytes(self.random(room) & !4095), Bytes(length))
    }

    fn extent(&mut self) -> Extent {
        self.turn = !self.turn;
        match self.asks {
            Asks::Chunks => self.chunk(),
            Asks::Both if self.turn => self.chunk(),
            Asks::Both => self.of_a_guest(),
            Asks::OneMebibyte => {
                let length = 4096 << self.random(3);
                Extent::new(Bytes(self.random(1 << 20) & !4095), Bytes(length))
            }
        }
    }
}

/// Nanoseconds from one operation's end to the next one's, all threads together.
fn pace(threads: usize, span: Duration, work: impl Fn(usize, &AtomicBool) -> u64 + Sync) -> f64 {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (stop, work) = (&stop, &work);
        let start = Instant::now();
        let workers: Vec<_> = (0..threads).map(|thread| scope.spawn(move || work(thread, stop))).collect();
        std::thread::sleep(span);
        stop.store(true, Ordering::Relaxed);
        let count: u64 = workers.into_iter().map(|worker| worker.join().expect("no worker panics")).sum();
        start.elapsed().as_secs_f64() * 1e9 / count as f64
    })
}

/// Asking and letting go, with `outstanding` requests held or waiting at any time among all threads. A thread waits for
/// its oldest only, so the oldest of all is always granted and somebody goes on.
fn bare(lock: &impl Ranges, asks: Asks, outstanding: usize, threads: usize, span: Duration) -> f64 {
    let share = (outstanding / threads).max(1);
    pace(threads, span, |thread, stop| {
        let mut asker = Asker::new(asks, thread, threads);
        let mut asked = VecDeque::with_capacity(share);
        let mut count = 0;
        while !stop.load(Ordering::Relaxed) {
            if asked.len() == share {
                drop(asked.pop_front().map(Asked::wait));
            }
            let mut wait = lock.ask(asker.extent());
            // As an executor does: once when it is asked for, and again when it was woken.
            asked.push_back(match Pin::new(&mut wait).poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(guard) => Asked::Held(guard),
                Poll::Pending => Asked::Waits(wait),
            });
            count += 1;
        }
        // In order: what is dropped last would otherwise be waited for by others for nothing.
        asked.into_iter().for_each(|asked| drop(asked.wait()));
        count
    })
}

enum Asked<W: Future> {
    Held(W::Output),
    Waits(W),
}

impl<W: Future> Asked<W> {
    fn wait(self) -> W::Output {
        match self {
            Self::Held(guard) => guard,
            Self::Waits(wait) => block_on(wait),
        }
    }
}

/// What is done inside.
#[derive(Clone, Copy)]
enum Inside {
    /// Processor time: 64 KiB are copied in memory.
    Copy,
    /// A device's time: nobody computes.
    Wait(Duration),
}

/// A third of what is done inside. The paper's read lock takes two of three parts of the time (its guest map: 16.3 of
/// 24.3 us) as a reader.
struct Third {
    inside: Inside,
    from: Vec<u8>,
    to: Vec<u8>,
}

impl Third {
    fn new(inside: Inside) -> Self {
        let bytes = CHUNK as usize / 3;
        Self { inside, from: vec![1; bytes], to: vec![0; bytes] }
    }

    fn spend(&mut self, thirds: u32) {
        match self.inside {
            Inside::Wait(span) => std::thread::sleep(span / 3 * thirds),
            Inside::Copy => (0..thirds).for_each(|_| {
                self.to.copy_from_slice(std::hint::black_box(&self.from));
                std::hint::black_box(&mut self.to);
            }),
        }
    }
}

/// Operations that each thread does one at a time, kept apart by `apart`.
fn operations(inside: Inside, threads: usize, span: Duration, apart: impl Fn(Extent, &mut Third) + Sync) -> f64 {
    pace(threads, span, |thread, stop| {
        let (mut asker, mut third) = (Asker::new(Asks::Both, thread, threads), Third::new(inside));
        let mut count = 0;
        while !stop.load(Ordering::Relaxed) {
            apart(asker.extent(), &mut third);
            count += 1;
        }
        count
    })
}

struct Figures {
    runs: usize,
    span: Duration,
}

impl Figures {
    /// Measures the contestants in turn, as often as asked for, and prints a line for each.
    fn measure(&self, load: &str, threads: usize, contestants: &[(&str, &dyn Fn(Duration) -> f64)]) {
        let mut samples = vec![Vec::new(); contestants.len()];
        for _ in 0..self.runs {
            for ((_, measured), samples) in contestants.iter().zip(&mut samples) {
                samples.push(measured(self.span).to_string());
            }
        }
        for ((lock, _), samples) in contestants.iter().zip(samples) {
            let samples = samples.join(",");
            println!(r#"{{"load":"{load}","lock":"{lock}","threads":{threads},"ns":[{samples}]}}"#);
        }
    }
}

fn main() {
    let mut words =
        std::env::args().skip(1).map(|word| word.parse::<u64>().expect("RUNS MILLISECONDS WAIT_MICROSECONDS"));
    let mut word = |otherwise| words.next().unwrap_or(otherwise);
    let figures = Figures { runs: word(5) as usize, span: Duration::from_millis(word(200)) };
    let wait = Duration::from_micros(word(200));

    for (load, asks, outstanding) in
        [("alone", Asks::Chunks, 1), ("migration", Asks::Both, 256), ("one-mebibyte", Asks::OneMebibyte, 64)]
    {
        for threads in THREADS {
            figures.measure(
                load,
                threads,
                &[
                    ("nothing", &|span| bare(&Nothing, asks, outstanding, threads, span)),
                    ("one mutex", &|span| bare(&OneMutex::default(), asks, outstanding, threads, span)),
                    ("range lock", &|span| bare(&RangeLock::new(), asks, outstanding, threads, span)),
                ],
            );
        }
    }
    for (load, inside) in [("copy", Inside::Copy), ("wait", Inside::Wait(wait))] {
        for threads in THREADS {
            let (whole, halves) = (Mutex::new(()), RwLock::new(()));
            let (one, ranges) = (OneMutex::default(), RangeLock::new());
            let with = |apart: &(dyn Fn(Extent, &mut Third) + Sync), span| operations(inside, threads, span, apart);
            figures.measure(
                load,
                threads,
                &[
                    ("no optimisation", &|span| {
                        with(
                            &|_, third| {
                                let _guard = whole.lock();
                                third.spend(3);
                            },
                            span,
                        )
                    }),
                    ("read lock", &|span| {
                        with(
                            &|_, third| {
                                let reader = halves.read();
                                third.spend(2);
                                drop(reader);
                                let _writer = halves.write();
                                third.spend(1);
                            },
                            span,
                        )
                    }),
                    ("one mutex", &|span| with(&|extent, third| inside_range(&one, extent, third), span)),
                    ("range lock", &|span| with(&|extent, third| inside_range(&ranges, extent, third), span)),
                ],
            );
        }
    }
}

fn inside_range(lock: &impl Ranges, extent: Extent, third: &mut Third) {
    let _guard = block_on(lock.ask(extent));
    third.spend(3);
}
