//! MSR Cambridge traces (SNIA IOTTA, FAST '08): Windows file time (100 ns since 1601), host, disk, `Read` or `Write`,
//! bytes from the start, bytes, response time.

use std::time::Duration;

use super::{Line, Record};
use crate::model::Request;

pub(super) fn parse(line: &str) -> Line {
    if line.trim().is_empty() || line.starts_with("Timestamp") {
        return Line::Other;
    }
    record(line).into()
}

fn record(line: &str) -> Option<Record> {
    let mut fields = line.split(',').map(str::trim);
    let ticks: u64 = fields.next()?.parse().ok()?;
    let _host = fields.next()?;
    let volume = fields.next()?.parse().ok()?;
    let verb = fields.next()?;
    let offset = fields.next()?.parse().ok()?;
    let length = fields.next()?.parse().ok()?;
    let request = match verb {
        "Read" => Request::read(offset, length),
        "Write" => Request::write(offset, length),
        _ => return None,
    };
    let at = Duration::new(ticks / 10_000_000, (ticks % 10_000_000) as u32 * 100);
    Some(Record { at, volume, request })
}
