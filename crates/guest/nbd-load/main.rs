//! The verifying load over NBD, from outside any guest.
//!
//! It offers a fixed rate whatever the server does, and counts each latency from the moment the request was due. So a
//! server that stops for a while is charged with every request that waited, not with one. Without a rate it keeps a
//! fixed number of requests in flight. Its output lines are those of the guest's load. Its input takes `stop`,
//! `rate N`, `verify` and `mark`. `verify` reads all again, then the load goes on. `mark` prints an `interval` line for
//! the time since the last one. It drives any NBD server the same way.
//!
//! With `reconnect_seconds` it behaves like QEMU when a connection is lost. For that time it tries to connect again,
//! and then sends unanswered requests again.

mod connection;
mod contents;
mod options;
#[path = "../src/pattern.rs"]
#[allow(dead_code, unreachable_pub, missing_docs)]
mod pattern;
#[path = "../load/report.rs"]
mod report;
mod zones;

use std::io::{self, Read, Write};
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use connection::{Command, Connection, FORCED, NO_HOLE};
use contents::{Content, append_slot, count_faults};
use options::Options;
use pattern::BLOCK_BYTES;
use report::Meter;
use rustix::event::{PollFd, PollFlags, poll};
use zones::Zones;

const TOLD_MAX: u64 = 20;
/// What a volume's size is a multiple of, if its end is to be used.
const SECTOR_BYTES: u64 = 512;
/// One in so many requests goes to the end of a volume that ends within a slot.
const SHORT_END_ONE_IN: u64 = 64;
const RECONNECT_INTERVAL: Duration = Duration::from_millis(5);
/// Requests that may wait in the server in offered-rate mode; beyond it they wait here, their clocks running.
const IN_FLIGHT_MAX: usize = 4096;

#[derive(Clone, Copy)]
struct Request {
    command: Command,
    flags: u16,
    slot: usize,
    due: Duration,
}

/// What the host has told the load to do.
#[derive(Clone, Copy, Default)]
struct Orders {
    stop: bool,
    verify: bool,
}

/// How many of the less common requests were answered well.
#[derive(Default)]
struct Counts {
    discards: u64,
    zeroes: u64,
    zeroes_kept: u64,
    forced: u64,
    partial: u64,
}

struct Load {
    options: Options,
    connections: Vec<Connection>,
    /// Per connection, requests by cookie; free cookies.
    in_flight: Vec<Vec<Option<Request>>>,
    free: Vec<(usize, u64)>,
    /// What each slot holds and whether a request is on it; empty unless the load verifies.
    contents: Vec<Content>,
    is_busy: Vec<bool>,
    meter: Meter,
    random: Random,
    started: Instant,
    /// Since when the present rate holds, and how many requests it has sent.
    rate_from: Duration,
    rate_sent: u64,
    marked: Duration,
    slots: usize,
    /// Where requests go, if not everywhere.
    zones: Option<Zones>,
    /// How long the last slot is: shorter than the others if the volume ends within it.
    last_bytes: u32,
    writes: u64,
    errors: u64,
    faults: u64,
    counts: Counts,
    /// What is written, but for a word that is new in each write: nothing makes it shorter.
    noise: Vec<u64>,
}

fn main() {
    let outcome = options::parse(std::env::args().skip(1)).map_err(io::Error::other).and_then(run);
    if let Err(error) = outcome {
        say(&format!("broken {error}"));
        std::process::exit(1);
    }
}

fn run(options: Options) -> io::Result<()> {
    // A thread that sleeps for tens of microseconds wants to be woken then, not 50 microseconds later.
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1000));
    rustix::io::ioctl_fionbio(io::stdin(), true)?;
    let connections = (0..options.connections)
        .map(|_| Connection::open(&options.socket, &options.export))
        .collect::<io::Result<Vec<_>>>()?;
    let size = connections.first().map_or(0, |connection| connection.size);
    let region = if options.region_bytes == 0 { size } else { options.region_bytes.min(size) };
    let io_bytes = u64::from(options.io_bytes);
    // What is left at the end is used as well by who checks what it reads.
    let rest = if options.is_verifying { region % io_bytes / SECTOR_BYTES * SECTOR_BYTES } else { 0 };
    let slots = usize::try_from(region / io_bytes + u64::from(rest > 0)).expect("slots are counted in memory");
    let last_bytes = if rest > 0 { rest as u32 } else { options.io_bytes };
    let depth = if options.rate > 0 { IN_FLIGHT_MAX } else { options.depth };
    let per_connection = depth.div_ceil(connections.len().max(1));
    let cookies = (0..per_connection as u64).rev();
    let mut random = Random(options.seed.max(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let zones = (options.zones > 0 && region >= zones::ZONE_BYTES).then(|| Zones::lay(&options, region, &mut random));
    let mut load = Load {
        in_flight: vec![vec![None; per_connection]; connections.len()],
        free: cookies.flat_map(|cookie| (0..connections.len()).map(move |index| (index, cookie))).collect(),
        contents: if options.is_verifying { vec![Content::FIRST; slots] } else { Vec::new() },
        is_busy: if options.is_verifying { vec![false; slots] } else { Vec::new() },
        meter: Meter::new(),
        random,
        zones,
        started: Instant::now(),
        rate_from: Duration::ZERO,
        rate_sent: 0,
        marked: Duration::ZERO,
        slots,
        last_bytes,
        counts: Counts::default(),
        writes: 0,
        errors: 0,
        faults: 0,
        noise: noise(options.io_bytes as usize / size_of::<u64>()),
        connections,
        options,
    };
    say(&format!("start slots={slots} io_bytes={}", load.options.io_bytes));
    load.offer()?;
    say("stopped");
    let wrong = load.verify()?;
    load.disconnect()?;
    let is_right = wrong == 0 && load.errors == 0 && load.faults == 0;
    say(&format!("done ok={} errors={}", u8::from(is_right), load.errors));
    Ok(())
}

impl Load {
    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Offers requests until told to stop, then waits for the last of them.
    fn offer(&mut self) -> io::Result<()> {
        let mut orders = Orders::default();
        let mut next_interval = Duration::from_millis(self.options.interval_ms);
        loop {
            let now = self.now();
            if self.options.seconds > 0 && now >= Duration::from_secs(self.options.seconds) {
                orders.stop = true;
            }
            let is_holding = orders.stop || orders.verify;
            if !is_holding {
                self.submit_due(now);
            }
            self.send()?;
            if self.options.interval_ms > 0 && now >= next_interval {
                self.tell_interval(now);
                next_interval += Duration::from_millis(self.options.interval_ms);
            }
            let is_drained = self.in_flight_count() == 0;
            if orders.stop && is_drained {
                self.tell_interval(now);
                return Ok(());
            }
            if orders.verify && is_drained {
                self.verify()?;
                orders.verify = false;
                (self.rate_from, self.rate_sent) = (self.now(), 0);
                continue;
            }
            let limit = if is_holding { Duration::from_millis(100) } else { self.until_next_due(now, next_interval) };
            let has_orders = self.wait(limit)?;
            self.receive()?;
            if has_orders {
                self.obey(&mut orders);
            }
        }
    }

    fn in_flight_count(&self) -> usize {
        self.in_flight.iter().map(Vec::len).sum::<usize>() - self.free.len()
    }

    fn submit_due(&mut self, now: Duration) {
        while !self.free.is_empty() {
            let due = if self.options.rate == 0 { now } else { self.due_of(self.rate_sent + 1) };
            if due > now {
                return;
            }
            self.rate_sent += 1;
            let is_read = self.random.below(100) < u64::from(self.options.read_percent);
            let Some(slot) = self.free_slot() else { return };
            let (command, flags) = if is_read { (Command::Read, 0) } else { self.choose_write() };
            self.submit(Request { command, flags, slot, due });
            if !is_read {
                self.writes += 1;
                let every = self.options.flush_every;
                if every > 0 && self.writes.is_multiple_of(every) && !self.free.is_empty() {
                    self.submit(Request { command: Command::Flush, flags: 0, slot: 0, due });
                }
            }
        }
    }

    fn choose_write(&mut self) -> (Command, u16) {
        let (zero_percent, discard_percent) = (self.options.zero_percent, self.options.discard_percent);
        if zero_percent + discard_percent + self.options.forced_percent == 0 {
            return (Command::Write, 0);
        }
        let forced = self.random.below(100) < u64::from(self.options.forced_percent);
        let forced = if forced { FORCED } else { 0 };
        match self.random.below(100) as u32 {
            drawn if drawn < zero_percent => {
                (Command::Zeroes, forced | if self.random.below(2) == 0 { 0 } else { NO_HOLE })
            }
            drawn if drawn < zero_percent + discard_percent => (Command::Discard, forced),
            _ => (Command::Write, forced),
        }
    }

    /// How many bytes slot `slot` has.
    const fn slot_bytes(&self, slot: usize) -> u32 {
        if slot + 1 == self.slots { self.last_bytes } else { self.options.io_bytes }
    }

    /// Notes a request that was answered well.
    fn count(&mut self, request: &Request) {
        if request.command == Command::Flush || request.command == Command::Read {
            return;
        }
        let is_partial = self.slot_bytes(request.slot) < self.options.io_bytes;
        let counts = &mut self.counts;
        match request.command {
            Command::Discard => counts.discards += 1,
            Command::Zeroes if request.flags & NO_HOLE != 0 => counts.zeroes_kept += 1,
            Command::Zeroes => counts.zeroes += 1,
            _ => {}
        }
        counts.forced += u64::from(request.flags & FORCED != 0);
        counts.partial += u64::from(is_partial);
    }

    fn due_of(&self, number: u64) -> Duration {
        self.rate_from
            + Duration::from_nanos((u128::from(number) * 1_000_000_000 / u128::from(self.options.rate)) as u64)
    }

    fn until_next_due(&self, now: Duration, next_interval: Duration) -> Duration {
        let mut until = Duration::from_millis(100);
        if self.options.rate > 0 && !self.free.is_empty() {
            until = until.min(self.due_of(self.rate_sent + 1).saturating_sub(now));
        }
        if self.options.interval_ms > 0 {
            until = until.min(next_interval.saturating_sub(now));
        }
        until
    }

    fn free_slot(&mut self) -> Option<usize> {
        let tries = 1000;
        // An end that is shorter than the others is where mistakes are made.
        let has_short_end = self.last_bytes < self.options.io_bytes;
        let hot = self.options.hot_slots;
        (0..tries)
            .map(|_| {
                if has_short_end && self.random.below(SHORT_END_ONE_IN) == 0 {
                    return self.slots - 1;
                }
                if let Some(zones) = &self.zones {
                    return zones.draw(&mut self.random);
                }
                let is_hot = hot > 0 && self.random.below(2) == 0;
                self.random.below(if is_hot { hot } else { self.slots as u64 }) as usize
            })
            .find(|slot| !self.is_busy.get(*slot).is_some_and(|busy| *busy))
    }

    fn submit(&mut self, request: Request) {
        let Some((index, cookie)) = self.free.pop() else { return };
        self.in_flight[index][cookie as usize] = Some(request);
        if request.command != Command::Flush
            && let Some(busy) = self.is_busy.get_mut(request.slot)
        {
            *busy = true;
        }
        self.put(index, cookie, request);
    }

    /// Puts a request into its connection's buffer, for the first time or again after the connection was lost.
    fn put(&mut self, index: usize, cookie: u64, request: Request) {
        let Request { command, flags, slot, .. } = request;
        if command == Command::Flush {
            return self.connections[index].request((command, flags), cookie, 0, 0, |_| {});
        }
        let (io_bytes, length) = (self.options.io_bytes, self.slot_bytes(slot));
        let connection = &mut self.connections[index];
        let offset = slot as u64 * u64::from(io_bytes);
        let (content, noise, random) = (self.contents.get(slot), &self.noise, &mut self.random);
        connection.request((command, flags), cookie, offset, length, |out| match (command, content) {
            (Command::Write, Some(content)) => {
                append_slot(out, offset, length as usize, content.after_write());
            }
            (Command::Write, None) => append_noise(out, noise, random.next()),
            _ => {}
        });
    }

    /// Sends what is queued; connections that are lost are made again.
    fn send(&mut self) -> io::Result<()> {
        for index in 0..self.connections.len() {
            if let Err(error) = self.connections[index].send() {
                self.restore(index, error)?;
            }
        }
        Ok(())
    }

    /// Takes in what has been answered; connections that are lost are made again.
    fn receive(&mut self) -> io::Result<()> {
        for index in 0..self.connections.len() {
            if let Err(error) = self.take_replies(index) {
                self.restore(index, error)?;
            }
        }
        Ok(())
    }

    /// Makes a lost connection again, and asks again for what it did not answer. `error` is how it was lost.
    fn restore(&mut self, index: usize, error: io::Error) -> io::Result<()> {
        if error.kind() == io::ErrorKind::Other {
            // What the server said makes no sense: no connection would make it better.
            return Err(error);
        }
        let limit = self.now() + Duration::from_secs(self.options.reconnect_seconds);
        // The server must see the end of the old connection before it sees the new one.
        self.connections[index].hang_up();
        while self.now() < limit {
            match Connection::open(&self.options.socket, &self.options.export) {
                Ok(connection) => self.connections[index] = connection,
                Err(_) => {
                    std::thread::sleep(RECONNECT_INTERVAL);
                    continue;
                }
            }
            for cookie in 0..self.in_flight[index].len() {
                if let Some(request) = self.in_flight[index][cookie] {
                    self.put(index, cookie as u64, request);
                }
            }
            return Ok(());
        }
        Err(error)
    }

    /// Waits until a socket or the input has something, or for `limit`; says whether the input has.
    fn wait(&self, limit: Duration) -> io::Result<bool> {
        let stdin = io::stdin();
        let mut waited: Vec<PollFd<'_>> = Vec::with_capacity(1 + self.connections.len());
        waited.push(PollFd::new(&stdin, PollFlags::IN));
        for connection in &self.connections {
            let wanted = if connection.has_outgoing() { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            waited.push(PollFd::new(connection.stream(), wanted));
        }
        let limit =
            rustix::event::Timespec { tv_sec: limit.as_secs().cast_signed(), tv_nsec: i64::from(limit.subsec_nanos()) };
        match poll(&mut waited, Some(&limit)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(!waited[0].revents().is_empty()),
            Err(error) => Err(error.into()),
        }
    }

    fn take_replies(&mut self, index: usize) -> io::Result<()> {
        self.connections[index].receive()?;
        let (io_bytes, last) = (self.options.io_bytes as usize, (self.slots - 1, self.last_bytes as usize));
        loop {
            let in_flight = &self.in_flight[index];
            let read_bytes = |cookie: u64| match in_flight.get(cookie as usize) {
                Some(Some(Request { command: Command::Read, slot, .. })) if *slot == last.0 => last.1,
                Some(Some(Request { command: Command::Read, .. })) => io_bytes,
                _ => 0,
            };
            let Some((reply, data)) = self.connections[index].next_reply(read_bytes)? else { return Ok(()) };
            let request = self.in_flight[index].get_mut(reply.cookie as usize).and_then(Option::take);
            let request = request.ok_or_else(|| io::Error::other("a reply to a request that was not made"))?;
            self.free.push((index, reply.cookie));
            let now = self.now();
            if request.command != Command::Flush {
                self.meter.note(request.command == Command::Read, now.saturating_sub(request.due));
                if let Some(busy) = self.is_busy.get_mut(request.slot) {
                    *busy = false;
                }
            }
            if reply.error != 0 {
                self.tell_error(&request, reply.error);
                continue;
            }
            self.count(&request);
            if let Some(content) = self.contents.get_mut(request.slot) {
                match request.command {
                    Command::Write => *content = content.after_write(),
                    // Our volumes read as zeroes where something was discarded.
                    Command::Zeroes | Command::Discard => *content = content.after_zeroes(),
                    Command::Read => {
                        let bytes = self.connections[index].data(data);
                        let offset = request.slot as u64 * io_bytes as u64;
                        self.faults += count_faults(bytes, offset, *content, self.faults);
                    }
                    _ => {}
                }
            }
        }
    }

    fn tell_error(&mut self, request: &Request, error: u32) {
        self.errors += 1;
        if self.errors <= TOLD_MAX {
            say(&format!("error {:?} slot={}: NBD error {error}", request.command, request.slot));
        }
    }

    fn tell_interval(&mut self, now: Duration) {
        let taken = self.meter.take();
        let length = now - self.marked;
        self.marked = now;
        say(&format!(
            "interval at_ms={} length_ms={} {} errors={} faults={}",
            now.as_millis(),
            length.as_millis(),
            taken.fields(),
            self.errors,
            self.faults
        ));
    }

    /// Takes the host's commands; an end of the input is a stop.
    fn obey(&mut self, orders: &mut Orders) {
        let mut bytes = [0; 4096];
        let text = match io::stdin().read(&mut bytes) {
            Ok(0) => return orders.stop = true,
            Ok(count) => String::from_utf8_lossy(&bytes[..count]).into_owned(),
            Err(_) => return,
        };
        for line in text.lines() {
            match line.split_once(' ').unwrap_or((line, "")) {
                ("stop", _) => orders.stop = true,
                ("verify", _) => orders.verify = true,
                ("mark", _) => {
                    let now = self.now();
                    self.tell_interval(now);
                }
                ("rate", rate) => {
                    self.options.rate = rate.trim().parse().unwrap_or(self.options.rate);
                    self.rate_from = self.now();
                    self.rate_sent = 0;
                }
                _ => {}
            }
        }
    }

    /// Reads every slot again, if the load verifies, and returns how many blocks are wrong.
    fn verify(&mut self) -> io::Result<u64> {
        if !self.options.is_verifying {
            return Ok(0);
        }
        let before = self.faults;
        let mut next = 0;
        while next < self.slots || self.in_flight_count() > 0 {
            while next < self.slots && !self.free.is_empty() && self.in_flight_count() < 64 {
                let due = self.now();
                self.submit(Request { command: Command::Read, flags: 0, slot: next, due });
                next += 1;
            }
            self.send()?;
            self.wait(Duration::from_millis(10))?;
            self.receive()?;
        }
        let wrong = self.faults - before;
        let bytes = (self.slots - 1) * self.options.io_bytes as usize + self.last_bytes as usize;
        let blocks = bytes.div_ceil(BLOCK_BYTES);
        let Counts { discards, zeroes, zeroes_kept, forced, partial } = &self.counts;
        say(&format!(
            "counted discards={discards} zeroes={zeroes} zeroes_kept={zeroes_kept} forced={forced} partial={partial}"
        ));
        let rewritten = self.contents.iter().filter(|content| content.is_rewritten()).count();
        say(&format!("verified blocks={blocks} wrong={wrong} slots_rewritten={rewritten}"));
        Ok(wrong)
    }

    fn disconnect(&mut self) -> io::Result<()> {
        for connection in &mut self.connections {
            connection.request((Command::Disconnect, 0), 0, 0, 0, |_| {});
            connection.send()?;
        }
        Ok(())
    }
}

/// xorshift64*: the order of requests needs no better.
struct Random(u64);

impl Random {
    const fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(limit)) >> 64) as u64
    }
}

/// Adds `noise` with every word changed by `mask`.
fn append_noise(out: &mut Vec<u8>, noise: &[u64], mask: u64) {
    let start = out.len();
    out.resize(start + size_of_val(noise), 0);
    for (place, word) in out[start..].as_chunks_mut().0.iter_mut().zip(noise) {
        *place = (word ^ mask).to_le_bytes();
    }
}

/// Words that nothing makes shorter.
fn noise(words: usize) -> Vec<u64> {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    (0..words).map(|_| random.next()).collect()
}

fn say(line: &str) {
    let mut out = io::stdout().lock();
    // The load's parent may be gone; there is nobody else to tell.
    let _ = writeln!(out, "@load {line}").and_then(|()| out.flush());
}
