//! SPC traces ("SPC Trace File Format Specification", revision 1.0.1): application unit, block of 512 bytes, bytes,
//! opcode, seconds; optional fields after these are passed over.

use super::{Line, Record, seconds};
use crate::model::Request;

pub(super) fn parse(line: &str) -> Line {
    if line.trim().is_empty() {
        return Line::Other;
    }
    record(line).into()
}

fn record(line: &str) -> Option<Record> {
    let mut fields = line.split(',').map(str::trim);
    let volume = fields.next()?.parse().ok()?;
    let offset = fields.next()?.parse::<u64>().ok()?.checked_mul(512)?;
    let length = fields.next()?.parse().ok()?;
    let request = match fields.next()? {
        "r" | "R" => Request::read(offset, length),
        "w" | "W" => Request::write(offset, length),
        _ => return None,
    };
    Some(Record { at: seconds(fields.next()?)?, volume, request })
}
