//! What `blkparse` prints by default (blkparse(1), "default output"):
//!
//! ```text
//!   8,0    3        1     0.000000000   697  Q   W 223490 + 8 [kjournald]
//!   major,minor  cpu  sequence  seconds  pid  action  what  sector + sectors [process]
//! ```
//!
//! Only queued requests are taken: later actions are the same requests merged and moved. Discards and whatever has no
//! extent but a flush are passed over.

use super::{Line, Record, seconds};
use crate::model::Request;

pub(super) fn parse(line: &str) -> Line {
    let fields: Vec<&str> = line.split_whitespace().collect();
    // The summary at the end has other columns; so have lines of other actions.
    let is_event =
        fields.len() >= 7 && fields[0].split_once(',').is_some_and(|(major, _)| major.parse::<u32>().is_ok());
    if !is_event || fields[5] != "Q" {
        return Line::Other;
    }
    let what = fields[6];
    if what.contains('D') || what.starts_with('N') {
        return Line::Other;
    }
    record(&fields, what).into()
}

fn record(fields: &[&str], what: &str) -> Option<Record> {
    let volume = fields[0].split_once(',')?.1.parse().ok()?;
    let at = seconds(fields[3])?;
    let request = match fields.get(7..10) {
        Some([sector, "+", sectors]) => {
            let (offset, length) = (sector.parse::<u64>().ok()? * 512, sectors.parse::<u64>().ok()? * 512);
            if length == 0 {
                Request::flush()
            } else if what.contains('R') && !what.contains('W') {
                Request::read(offset, length)
            } else {
                Request::write(offset, length)
            }
        }
        _ if what.contains('F') => Request::flush(),
        _ => return None,
    };
    Some(Record { at, volume, request })
}
