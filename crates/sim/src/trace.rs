//! Block traces: what a disk was once asked, read from the formats that archives use.
//!
//! A parser reads any text, one line at a time; `zstd -dc TRACE | cargo xtask sim --replay -` is how a compressed one
//! comes in. No trace is part of this project.

mod blkparse;
mod msr;
mod plain;
mod spc;

use std::io::BufRead;
use std::time::Duration;

use block::{Error, ErrorKind, Result};

use crate::model::Request;

/// One request of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// When, since whatever the trace counts from.
    pub at: Duration,
    /// Which volume of the trace: an SPC application unit, an MSR disk number, a device's minor number.
    pub volume: u32,
    /// What.
    pub request: Request,
}

/// How a trace is written down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// SPC: `ASU,LBA,size,opcode,timestamp`.
    Spc,
    /// MSR Cambridge: `timestamp,hostname,disk,type,offset,size,response`.
    Msr,
    /// What `blkparse` prints: queued requests (`Q`) are taken.
    Blkparse,
    /// `time_us,op,offset_bytes,length_bytes` under a header of these words.
    Plain,
}

impl std::str::FromStr for Format {
    type Err = Error;
    fn from_str(word: &str) -> Result<Self> {
        match word {
            "spc" => Ok(Self::Spc),
            "msr" => Ok(Self::Msr),
            "blkparse" => Ok(Self::Blkparse),
            "plain" => Ok(Self::Plain),
            other => {
                let context = format!("`{other}` is no trace format: say spc, msr, blkparse or plain");
                Err(Error::new(ErrorKind::Invalid, context))
            }
        }
    }
}

/// Reads a whole trace, in the order of its times. Lines that are no requests (headers, other events, summaries) are passed
/// over.
///
/// # Errors
/// The text cannot be read, or a line that should be a request is none; the error names its number.
pub fn read(format: Format, text: impl BufRead) -> Result<Vec<Record>> {
    let mut records = records(format, text).collect::<Result<Vec<Record>>>()?;
    records.sort_by_key(|record| record.at);
    Ok(records)
}

/// The same line by line, in the order of the text: a trace of any length in the memory of one line.
pub fn records(format: Format, text: impl BufRead) -> impl Iterator<Item = Result<Record>> {
    (1_u64..).zip(text.lines()).filter_map(move |(number, line)| {
        let line = match line {
            Ok(line) => line,
            Err(error) => return Some(Err(Error::from_os(error, format!("reading line {number} of a trace")))),
        };
        let parsed = match format {
            Format::Spc => spc::parse(&line),
            Format::Msr => msr::parse(&line),
            Format::Blkparse => blkparse::parse(&line),
            Format::Plain => plain::parse(&line),
        };
        match parsed {
            Line::Record(record) => Some(Ok(record)),
            Line::Other => None,
            Line::Wrong => {
                let context = format!("line {number} of the trace is no request: {line}");
                Some(Err(Error::new(ErrorKind::Invalid, context)))
            }
        }
    })
}

/// What a line is.
enum Line {
    Record(Record),
    Other,
    Wrong,
}

impl From<Option<Record>> for Line {
    fn from(record: Option<Record>) -> Self {
        record.map_or(Self::Wrong, Self::Record)
    }
}

/// Seconds with a fraction, exact to the nanosecond.
fn seconds(text: &str) -> Option<Duration> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits = fraction.get(..fraction.len().min(9))?;
    let nanos: u32 = if digits.is_empty() { 0 } else { digits.parse().ok()? };
    Some(Duration::new(whole.parse().ok()?, nanos * 10_u32.pow(9 - digits.len() as u32)))
}

#[cfg(test)]
mod tests;
