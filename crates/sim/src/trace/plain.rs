//! One request a line, with a header: `time_us,op,offset_bytes,length_bytes`.

use std::time::Duration;

use super::{Line, Record};
use crate::model::Request;

pub(super) fn parse(line: &str) -> Line {
    if line.trim().is_empty() || line.starts_with("time_us") {
        return Line::Other;
    }
    record(line).into()
}

fn record(line: &str) -> Option<Record> {
    let mut fields = line.split(',').map(str::trim);
    let at = Duration::from_micros(fields.next()?.parse().ok()?);
    let verb = fields.next()?;
    let offset = fields.next()?.parse().ok()?;
    let length = fields.next()?.parse().ok()?;
    let request = match verb {
        "R" => Request::read(offset, length),
        "W" => Request::write(offset, length),
        _ => return None,
    };
    Some(Record { at, volume: 0, request })
}
