//! What the guest tells.

use std::collections::BTreeMap;
use std::time::Duration;

/// One line of the guest, read.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Its init runs; so long after the kernel started.
    Booted(Duration),
    /// The load filled its disk.
    Filled,
    /// The load runs.
    LoadStarted,
    /// What the load did in one interval.
    Interval(Interval),
    /// A read found something else than the last acknowledged write.
    Fault(String),
    /// A request failed.
    Error(String),
    /// The load has ended; the verification of the whole disk begins.
    LoadStopped,
    /// The whole disk was read again.
    Verified {
        /// Blocks read.
        blocks: u64,
        /// Blocks that held something else than they should.
        wrong: u64,
        /// Places that the load had written at least once.
        slots_rewritten: u64,
    },
    /// How many of the less common requests were answered since the start, by name.
    Counted(BTreeMap<String, u64>),
    /// What the load did to its memory since the start.
    Memory(MemoryTotals),
    /// The load is done: nothing was lost, stale, torn or refused, or something was.
    Done {
        /// Whether all was right.
        is_right: bool,
        /// Everything that the load found, whatever was told before; `None` of a load outside a guest.
        totals: Option<Totals>,
    },
    /// Any other line.
    Line(String),
}

/// What the load did to its memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryTotals {
    /// Pages of 4 KiB that it has.
    pub pages: u64,
    /// Checks that found something else than was last written.
    pub wrong: u64,
    /// Pages rewritten.
    pub rewritten: u64,
}

/// What a load in a guest found from its start to its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Blocks that the final verification read.
    pub blocks: u64,
    /// Blocks among them that held something else than they should.
    pub wrong: u64,
    /// Places that the load had written at least once.
    pub slots_rewritten: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Blocks that were wrong when they were read, at any time.
    pub faults: u64,
    /// Its memory.
    pub memory: MemoryTotals,
}

/// What the load did in one interval.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Interval {
    /// When it ended, since the load's start.
    pub at: Duration,
    /// How long it was.
    pub length: Duration,
    /// Reads answered.
    pub reads: u64,
    /// Writes answered.
    pub writes: u64,
    /// The mean latency.
    pub mean: Duration,
    /// The median latency.
    pub p50: Duration,
    /// The latency that one request of a hundred exceeded.
    pub p99: Duration,
    /// The latency that one request of a thousand exceeded.
    pub p999: Duration,
    /// The longest latency.
    pub longest: Duration,
    /// Requests that failed since the start.
    pub errors: u64,
    /// Blocks that were wrong since the start.
    pub faults: u64,
}

impl Interval {
    /// Requests per second.
    #[must_use]
    pub fn iops(&self) -> f64 {
        let seconds = self.length.as_secs_f64();
        if seconds > 0.0 { (self.reads + self.writes) as f64 / seconds } else { 0.0 }
    }
}

impl Event {
    /// Reads one line.
    #[must_use]
    pub fn parse(line: &str) -> Self {
        let line = line.trim_end();
        Self::parse_told(line).unwrap_or_else(|| Self::Line(line.to_owned()))
    }

    fn parse_told(line: &str) -> Option<Self> {
        if let Some(uptime) = line.strip_prefix("@guest booted ") {
            return uptime.parse().ok().map(|seconds| Self::Booted(Duration::from_secs_f64(seconds)));
        }
        let told = line.strip_prefix("@load ")?;
        let (what, rest) = told.split_once(' ').unwrap_or((told, ""));
        let fields: BTreeMap<&str, &str> = rest.split(' ').filter_map(|word| word.split_once('=')).collect();
        let number = |name: &str| fields.get(name)?.parse::<u64>().ok();
        match what {
            "filled" => Some(Self::Filled),
            "start" => Some(Self::LoadStarted),
            "stopped" => Some(Self::LoadStopped),
            "fault" => Some(Self::Fault(rest.to_owned())),
            "error" | "broken" => Some(Self::Error(rest.to_owned())),
            "counted" => {
                let counted = fields.iter().map(|(name, count)| Some(((*name).to_owned(), count.parse().ok()?)));
                Some(Self::Counted(counted.collect::<Option<_>>()?))
            }
            "memory" => Some(Self::Memory(MemoryTotals {
                pages: number("pages")?,
                wrong: number("wrong")?,
                rewritten: number("rewritten")?,
            })),
            "done" => Some(Self::Done { is_right: number("ok")? == 1, totals: Totals::read(&number) }),
            "verified" => Some(Self::Verified {
                blocks: number("blocks")?,
                wrong: number("wrong")?,
                slots_rewritten: number("slots_rewritten")?,
            }),
            "interval" => Some(Self::Interval(Interval {
                at: Duration::from_millis(number("at_ms")?),
                length: Duration::from_millis(number("length_ms")?),
                reads: number("reads")?,
                writes: number("writes")?,
                mean: Duration::from_micros(number("mean_us")?),
                p50: Duration::from_micros(number("p50_us")?),
                p99: Duration::from_micros(number("p99_us")?),
                p999: Duration::from_micros(number("p999_us")?),
                longest: Duration::from_micros(number("max_us")?),
                errors: number("errors")?,
                faults: number("faults")?,
            })),
            _ => None,
        }
    }
}

impl Totals {
    fn read(number: &impl Fn(&str) -> Option<u64>) -> Option<Self> {
        let memory = MemoryTotals {
            pages: number("pages")?,
            wrong: number("pages_wrong")?,
            rewritten: number("pages_rewritten")?,
        };
        Some(Self {
            blocks: number("blocks")?,
            wrong: number("wrong")?,
            slots_rewritten: number("slots_rewritten")?,
            errors: number("errors")?,
            faults: number("faults")?,
            memory,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_load_are_read_and_others_are_kept() {
        assert_eq!(Event::parse("@guest booted 1.25\r"), Event::Booted(Duration::from_millis(1250)));
        assert_eq!(Event::parse("@load done ok=0 errors=3"), Event::Done { is_right: false, totals: None });
        let done = "@load done ok=1 errors=0 faults=0 blocks=9 wrong=0 slots_rewritten=4 pages=8 pages_wrong=0 \
                    pages_rewritten=7";
        let memory = MemoryTotals { pages: 8, wrong: 0, rewritten: 7 };
        let totals = Totals { blocks: 9, slots_rewritten: 4, memory, ..Totals::default() };
        assert_eq!(Event::parse(done), Event::Done { is_right: true, totals: Some(totals) });
        assert_eq!(Event::parse("@load memory pages=8 wrong=0 rewritten=7"), Event::Memory(memory));
        assert_eq!(
            Event::parse("@load fault block=7 expected=3 Stale { found: 2 }"),
            Event::Fault("block=7 expected=3 Stale { found: 2 }".into())
        );
        let counted = [("discards".to_owned(), 3), ("zeroes".to_owned(), 4)].into();
        assert_eq!(Event::parse("@load counted discards=3 zeroes=4"), Event::Counted(counted));
        assert_eq!(Event::parse("hello"), Event::Line("hello".into()));
        assert_eq!(Event::parse("@load interval reads=x"), Event::Line("@load interval reads=x".into()));
        let line = "@load interval at_ms=400 length_ms=200 reads=70 writes=30 mean_us=200 p50_us=100 p99_us=900 \
                    p999_us=1200 max_us=1500 errors=0 faults=0";
        let Event::Interval(interval) = Event::parse(line) else { panic!("not read as an interval") };
        assert_eq!(interval.iops().round(), 500.0);
        assert_eq!(interval.p99, Duration::from_micros(900));
    }
}
