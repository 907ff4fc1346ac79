//! Where a file has data: `SEEK_DATA` and `SEEK_HOLE`, a bounded number of calls a question.
//!
//! What lies behind the end of a file is a hole only where the volume may be longer than its file. Otherwise those bytes
//! are lost: they are data that cannot be read, so that nobody takes them for zeroes.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

use block::{Bytes, Extent, ExtentState, ExtentStatus};
use rustix::fs::SeekFrom;
use rustix::io::Errno;

/// An answer with so many pieces gets no more; each costs two system calls.
const PIECES_MAX: usize = 64;

/// What was found: the pieces, and the last run of data to its very end, which may lie past the extent asked about.
pub(crate) struct Found {
    pub(crate) pieces: Vec<ExtentStatus>,
    pub(crate) data_run: Option<Extent>,
}

/// The run of data, and the pieces, each with what it is.
pub(crate) const FOUND_BYTES_MAX: usize = FOUND_HEAD_BYTES + (PIECES_MAX + 1) * FOUND_PIECE_BYTES;
const FOUND_HEAD_BYTES: usize = 16;
const FOUND_PIECE_BYTES: usize = 24;

impl Found {
    /// Puts it into `bytes`, for a process that is the same program; how many pieces there are.
    pub(crate) fn put(&self, bytes: &mut [u8]) -> u64 {
        let run = self.data_run.unwrap_or(Extent::new(Bytes::ZERO, Bytes::ZERO));
        let pieces = self.pieces.iter().flat_map(|piece| {
            [piece.extent.offset.0, piece.extent.length.0, u64::from(piece.state == ExtentState::Hole)]
        });
        let length = FOUND_HEAD_BYTES + self.pieces.len() * FOUND_PIECE_BYTES;
        assert!(length <= bytes.len(), "{} pieces do not fit {} bytes", self.pieces.len(), bytes.len());
        let numbers = [run.offset.0, run.length.0].into_iter().chain(pieces);
        for (place, number) in bytes.chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        self.pieces.len() as u64
    }

    /// What was put into `bytes`, with so many pieces.
    pub(crate) fn take(bytes: &[u8], pieces: u64) -> Self {
        let number =
            |place: usize| u64::from_le_bytes(bytes[place * 8..place * 8 + 8].try_into().expect("eight bytes"));
        let extent = |place: usize| Extent::new(Bytes(number(place)), Bytes(number(place + 1)));
        let piece = |index: usize| {
            let place = 2 + index * 3;
            let state = if number(place + 2) == 0 { ExtentState::Data } else { ExtentState::Hole };
            ExtentStatus { extent: extent(place), state }
        };
        let data_run = Some(extent(0)).filter(|run| !run.is_empty());
        Self { pieces: (0..pieces as usize).map(piece).collect(), data_run }
    }
}

/// Whether the file, which holds all of `extent`, has as many blocks as bytes.
pub(crate) fn is_allocated(file: &File, extent: Extent) -> io::Result<bool> {
    let metadata = file.metadata()?;
    Ok(metadata.blocks() * 512 >= metadata.len() && extent.end().0 <= metadata.len())
}

/// Not remembered as a run of data: holes may be punched without our knowing.
pub(crate) fn all_data(extent: Extent) -> Found {
    Found { pieces: vec![ExtentStatus { extent, state: ExtentState::Data }], data_run: None }
}

/// The first byte of data at or after `offset`, or `None` if none follows.
fn next_data(file: &File, offset: Bytes) -> io::Result<Option<Bytes>> {
    match rustix::fs::seek(file, SeekFrom::Data(offset.0)) {
        Ok(start) => Ok(Some(Bytes(start))),
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The first byte of a hole at or after `offset`; the file may have been changed since data was found there.
fn next_hole(file: &File, offset: Bytes) -> io::Result<Bytes> {
    match rustix::fs::seek(file, SeekFrom::Hole(offset.0)) {
        Ok(start) => Ok(Bytes(start)),
        Err(Errno::NXIO) => Ok(offset),
        Err(error) => Err(error.into()),
    }
}

fn end_of(file: &File) -> io::Result<Bytes> {
    file.metadata().map(|found| Bytes(found.len()))
}

/// Pieces begin and end at multiples of `unit`, so that each can be read as it is. Behind the end of a file that may not be
/// shorter than its volume nothing is a hole.
pub(crate) fn find_holes(file: &File, extent: Extent, unit: u64, may_be_short: bool) -> io::Result<Found> {
    let mut found = Found { pieces: Vec::new(), data_run: None };
    let mut next = extent.offset;
    while next < extent.end() && found.pieces.len() < PIECES_MAX {
        let data = match next_data(file, next)? {
            None if !may_be_short && end_of(file)? < extent.end() => end_of(file)?.align_down(unit),
            data => data.map_or(extent.end(), |data| data.align_down(unit)),
        };
        let data = data.clamp(next, extent.end());
        if data > next {
            found.pieces.push(ExtentStatus { extent: Extent::between(next, data), state: ExtentState::Hole });
        }
        if data < extent.end() {
            let mut hole = next_hole(file, data)?.max(data + Bytes(1)).align_up(unit);
            if !may_be_short && hole < extent.end() && hole >= end_of(file)? {
                hole = extent.end();
            }
            let run = Extent::between(data, hole);
            let part = Extent::between(data, hole.min(extent.end()));
            found.pieces.push(ExtentStatus { extent: part, state: ExtentState::Data });
            found.data_run = Some(run);
            next = part.end();
        } else {
            next = data;
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn an_answer_with_as_many_pieces_as_there_may_be_comes_as_it_was_put() {
        const STEP: u64 = 64 << 10;
        for first in [0, STEP] {
            let file = tempfile::tempfile_in("/var/tmp").expect("a file on disk");
            file.set_len(200 * STEP).expect("it is extended");
            for number in 0..90 {
                file.write_all_at(&[7; 4096], first + number * 2 * STEP).expect("written");
            }
            for length in [1, 3, 64, 65, 200] {
                let extent = Extent::new(Bytes::ZERO, Bytes(length * STEP));
                let found = find_holes(&file, extent, 512, false).expect("it is found");
                let mut bytes = vec![0; FOUND_BYTES_MAX];
                let count = found.put(&mut bytes);
                let taken = Found::take(&bytes, count);
                assert_eq!((taken.pieces, taken.data_run), (found.pieces, found.data_run), "{first} {length}");
            }
        }
    }
}
