//! A consumer's work on a task: reads the pages, classifies each, and makes a frame of them.

use std::ops::Range;

use crate::error::Result;
use crate::guest_memory::GuestMemory;
use crate::region::PAGE_BYTES;
use crate::send::cutter::{TASK_PAGES, Task, TaskRun};
use crate::send::version_cache::{Known, VersionCache};
use crate::wire::{
    Coding, ENTRY_BYTES, Entry, EntryKind, FrameHeader, FrameKind, HEADER_BYTES, checksum_of, write_entries,
};

const PAGE: usize = PAGE_BYTES as usize;
/// What stands behind a difference: the checksum of the page that comes of it.
const SUM_BYTES: usize = size_of::<u64>();
/// What does not get shorter than this part of itself is sent as it is.
const WORTH: f64 = 0.9;
/// After samples that were not worth it, at most so many frames are sent without another sample.
const UNSAMPLED_MAX: u32 = 31;

/// Whether pages are made shorter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// They are sent as they are.
    Off,
    /// They are always tried.
    Lz4,
    /// They are tried while streams wait for the network: then the processor has time.
    #[default]
    Auto,
}

/// What a frame has in it, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Encoded {
    pub(crate) zero: u64,
    pub(crate) data: u64,
    pub(crate) delta: u64,
    pub(crate) unchanged: u64,
}

/// Whose pages, and how.
pub(crate) struct Source<'a> {
    pub(crate) memory: &'a dyn GuestMemory,
    pub(crate) versions: &'a VersionCache,
    pub(crate) round: u32,
    pub(crate) compresses: bool,
    /// Whether the versions that are sent are kept.
    pub(crate) keeps: bool,
}

/// The buffers of one consumer. They are as large as its largest task has needed.
///
/// A frame is made where its pages are read, without another copy of them: entries and header are put before the pages once it is known
/// which of them are sent.
///
/// ```text
///   frame:  | room | header, entries | body: pages that are sent | pages that were read |
///                  begin             head                        end
/// ```
#[derive(Default)]
pub(crate) struct Encoder {
    difference: Vec<u8>,
    entries: Vec<Entry>,
    coded_entries: Vec<u8>,
    plain: Vec<u8>,
    compressed: Vec<u8>,
    head: usize,
    end: usize,
    /// Where the last frame is, and in which buffer.
    frame: Range<usize>,
    is_compressed: bool,
    /// How many frames are sent without a sample after one that is not worth it, and how many are still to be.
    unsampled: u32,
    unsampled_left: u32,
}

/// What a consumer's buffers take at most: frame and compressed frame, each of which may have grown to twice what it needs.
pub(crate) const ENCODER_BYTES: usize = 4 * (TASK_PAGES as usize + 1) * (PAGE + 16);

impl Encoder {
    /// Makes a frame of `task`. Nothing of it need be sent if [`frame`](Self::frame) is empty afterwards.
    pub(crate) fn encode(&mut self, task: &Task, source: &Source<'_>, sequence: u64) -> Result<Encoded> {
        self.entries.clear();
        let entries_max: u64 = task.runs.iter().map(|run| if run.is_hole { 1 } else { run.count }).sum();
        self.head = HEADER_BYTES + entries_max as usize * ENTRY_BYTES;
        (self.end, self.frame, self.is_compressed) = (self.head, 0..0, false);
        let mut encoded = Encoded::default();
        for run in &task.runs {
            if run.is_hole {
                source.versions.forget_run(task.region, run.page, run.count);
                self.add(EntryKind::Zero, run.page, run.count);
                encoded.zero += run.count;
            } else {
                self.encode_run(task.region, run, source, &mut encoded)?;
            }
        }
        if !self.entries.is_empty() {
            self.make_frame(task.region, source, sequence);
        }
        Ok(encoded)
    }

    /// The frame that was made last.
    pub(crate) fn frame(&self) -> &[u8] {
        let buffer = if self.is_compressed { &self.compressed } else { &self.plain };
        &buffer[self.frame.clone()]
    }

    /// Reads the pages of `run` behind the body, and closes it up over those that are not sent as they are.
    fn encode_run(&mut self, region: usize, run: &TaskRun, source: &Source<'_>, encoded: &mut Encoded) -> Result<()> {
        let mut plain = std::mem::take(&mut self.plain);
        // A difference is longer than its page by its sum: with so much room none reaches a page that is still to be looked at.
        let room = if source.compresses { run.count as usize * SUM_BYTES } else { 0 };
        let first = self.end + room;
        let last = first + run.count as usize * PAGE;
        grow(&mut plain, last);
        let read = source.memory.read(region, run.page, &mut plain[first..last]);
        if read.is_ok() {
            for (page, at) in (run.page..).zip((first..last).step_by(PAGE)) {
                let bytes = at..at + PAGE;
                match self.classify((region, page), &plain[bytes.clone()], source, encoded) {
                    Some(EntryKind::Bytes) => {
                        if at != self.end {
                            plain.copy_within(bytes, self.end);
                        }
                        self.end += PAGE;
                    }
                    Some(EntryKind::Delta) => {
                        let sum = checksum_of(&plain[bytes]).to_le_bytes();
                        let (difference, behind) = plain[self.end..].split_at_mut(PAGE);
                        difference.copy_from_slice(&self.difference);
                        behind[..SUM_BYTES].copy_from_slice(&sum);
                        self.end += PAGE + SUM_BYTES;
                    }
                    Some(EntryKind::Zero) | None => {}
                }
            }
        }
        self.plain = plain;
        read
    }

    /// Adds an entry for a page, unless the target has it as it is. Of a `Delta` the difference is in the buffer.
    fn classify(
        &mut self,
        (region, page): (usize, u64),
        bytes: &[u8],
        source: &Source<'_>,
        encoded: &mut Encoded,
    ) -> Option<EntryKind> {
        if is_zero(bytes) {
            source.versions.forget(region, page);
            self.add(EntryKind::Zero, page, 1);
            encoded.zero += 1;
            return Some(EntryKind::Zero);
        }
        self.difference.resize(PAGE, 0);
        // In the first round nothing was sent before, and the cache takes whatever comes first.
        let is_first = source.round <= 1;
        let kind = match source.versions.compare(region, page, bytes, &mut self.difference) {
            Known::Same => {
                encoded.unchanged += 1;
                return None;
            }
            Known::Differs if source.compresses => {
                encoded.delta += 1;
                EntryKind::Delta
            }
            Known::Differs | Known::Nothing => {
                encoded.data += 1;
                EntryKind::Bytes
            }
        };
        self.add(kind, page, 1);
        match source.keeps {
            true => source.versions.sent(region, page, bytes, is_first),
            false => source.versions.forget(region, page),
        }
        Some(kind)
    }

    /// Adds pages to the entry before, if they follow it and are of its kind.
    fn add(&mut self, kind: EntryKind, page: u64, count: u64) {
        let (page, count) = (page as u32, count as u32);
        if let Some(last) = self.entries.last_mut()
            && last.kind == kind
            && kind != EntryKind::Delta
            && last.page + last.count == page
            && let Some(sum) = last.count.checked_add(count)
        {
            last.count = sum;
            return;
        }
        self.entries.push(Entry { page, count, kind });
    }

    fn make_frame(&mut self, region: usize, source: &Source<'_>, sequence: u64) {
        let body_bytes = self.end - self.head;
        let compressed_bytes = if source.compresses { self.compress() } else { None };
        self.is_compressed = compressed_bytes.is_some();
        self.coded_entries.clear();
        write_entries(&self.entries, &mut self.coded_entries);
        let begin = self.head - self.coded_entries.len() - HEADER_BYTES;
        self.frame = begin..self.head + compressed_bytes.unwrap_or(body_bytes);
        let buffer = if self.is_compressed { &mut self.compressed } else { &mut self.plain };
        grow(buffer, self.frame.end);
        let frame = &mut buffer[self.frame.clone()];
        let (header_place, payload) = frame.split_at_mut(HEADER_BYTES);
        payload[..self.coded_entries.len()].copy_from_slice(&self.coded_entries);
        let header = FrameHeader {
            kind: FrameKind::Pages,
            coding: if self.is_compressed { Coding::Lz4 } else { Coding::Plain },
            region: region as u16,
            sequence,
            round: source.round,
            entries: self.entries.len() as u32,
            body_bytes: body_bytes as u32,
            payload_bytes: payload.len() as u32,
            payload_sum: checksum_of(payload),
        };
        header_place.copy_from_slice(&header.to_bytes());
    }

    /// Makes the body shorter, if a page of it says that this is worth it. Gives how long it is then.
    fn compress(&mut self) -> Option<usize> {
        let body = self.plain.get(self.head..self.end).unwrap_or_default();
        if body.is_empty() {
            return None;
        }
        let has_delta = self.entries.iter().any(|entry| entry.kind == EntryKind::Delta);
        if !has_delta && self.unsampled_left > 0 {
            self.unsampled_left -= 1;
            return None;
        }
        grow(&mut self.compressed, self.head + lz4_flex::block::get_maximum_output_size(body.len()));
        let room = &mut self.compressed[self.head..];
        let middle = body.len().saturating_sub(PAGE) / 2;
        let sample = &body[middle..body.len().min(middle + PAGE)];
        let is_worth = |length: usize, of: usize| (length as f64) < of as f64 * WORTH;
        let sampled = lz4_flex::block::compress_into(sample, room).unwrap_or(sample.len());
        if !has_delta && !is_worth(sampled, sample.len()) {
            self.unsampled = (self.unsampled * 2 + 1).min(UNSAMPLED_MAX);
            self.unsampled_left = self.unsampled;
            return None;
        }
        self.unsampled = 0;
        lz4_flex::block::compress_into(body, room).ok().filter(|length| is_worth(*length, body.len()))
    }
}

/// Makes a buffer at least so long. It never gets shorter, so that no byte of it is cleared twice.
fn grow(buffer: &mut Vec<u8>, length: usize) {
    if buffer.len() < length {
        buffer.resize(length, 0);
    }
}

/// Whether all bytes are zero.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    // By blocks, so that the compiler makes wide comparisons of it and data is told after the first block.
    bytes.chunks(1024).all(|block| block.iter().fold(0, |bits, byte| bits | byte) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EmulatedMemory;
    use crate::wire::parse_entries;

    fn parsed(frame: &[u8]) -> (FrameHeader, Vec<Entry>) {
        let header = FrameHeader::parse(frame.first_chunk().expect("a header")).expect("right");
        assert_eq!(frame.len(), HEADER_BYTES + header.payload_bytes as usize);
        assert_eq!(header.payload_sum, checksum_of(&frame[HEADER_BYTES..]));
        let entries = &frame[HEADER_BYTES..HEADER_BYTES + header.entries as usize * ENTRY_BYTES];
        let entries = parse_entries(entries, &header, 100).expect("right");
        (header, entries)
    }

    #[test]
    fn each_page_is_told_as_what_it_is() {
        let memory = EmulatedMemory::with_pages(100);
        memory.store(0, 2 * PAGE_BYTES, &[9; 2 * PAGE]);
        let noise: Vec<u8> = (0..PAGE as u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect();
        memory.store(0, 5 * PAGE_BYTES, &noise);
        let versions = VersionCache::new(1 << 20);
        let mut encoder = Encoder::default();
        let source = |round| Source { memory: &memory, versions: &versions, round, compresses: true, keeps: true };
        let runs = vec![TaskRun { page: 0, count: 6, is_hole: false }, TaskRun { page: 6, count: 90, is_hole: true }];
        let task = Task { region: 0, runs };
        let encoded = encoder.encode(&task, &source(1), 1).expect("read");
        assert_eq!(encoded, Encoded { zero: 93, data: 3, delta: 0, unchanged: 0 });
        let (header, entries) = parsed(encoder.frame());
        let told: Vec<_> = entries.iter().map(|entry| (entry.page, entry.count, entry.kind)).collect();
        let (zero, bytes) = (EntryKind::Zero, EntryKind::Bytes);
        assert_eq!(told, [(0, 2, zero), (2, 2, bytes), (4, 1, zero), (5, 1, bytes), (6, 90, zero)]);
        assert_eq!(header.body_bytes, 3 * 4096);

        let again = encoder.encode(
            &Task { region: 0, runs: vec![TaskRun { page: 2, count: 2, is_hole: false }] },
            &source(2),
            2,
        );
        assert_eq!(again.expect("read").unchanged, 2);
        assert!(encoder.frame().is_empty(), "nothing is to be sent");

        memory.store(0, 5 * PAGE_BYTES + 7, &[0xff]);
        let task = Task { region: 0, runs: vec![TaskRun { page: 5, count: 1, is_hole: false }] };
        let encoded = encoder.encode(&task, &source(2), 2).expect("read");
        assert_eq!(encoded.delta, 1);
        let (header, entries) = parsed(encoder.frame());
        assert_eq!((header.coding, entries[0].kind), (Coding::Lz4, EntryKind::Delta));
        assert!(encoder.frame().len() < 300, "{}", encoder.frame().len());
        let plain = Source { compresses: false, ..source(3) };
        memory.store(0, 5 * PAGE_BYTES + 7, &[0xfe]);
        assert_eq!(encoder.encode(&task, &plain, 3).expect("read").data, 1);
        memory.store(0, 5 * PAGE_BYTES, &[0; PAGE]);
        assert_eq!(encoder.encode(&task, &source(4), 4).expect("read").zero, 1);
        memory.store(0, 5 * PAGE_BYTES, &noise);
        assert_eq!(encoder.encode(&task, &source(5), 5).expect("read").data, 1, "its version is zeroes now");
    }

    #[test]
    fn pages_that_are_read_in_place_close_up_over_those_that_are_left_out() {
        let memory = EmulatedMemory::with_pages(8);
        (0..8).for_each(|page| memory.store(0, page * PAGE_BYTES, &[page as u8; PAGE]));
        let versions = VersionCache::new(1 << 20);
        let mut encoder = Encoder::default();
        let run = |page, count, is_hole| TaskRun { page, count, is_hole };
        let task = Task { region: 0, runs: vec![run(0, 4, false), run(4, 1, true), run(5, 3, false)] };
        let source = |round| Source { memory: &memory, versions: &versions, round, compresses: false, keeps: true };
        encoder.encode(&task, &source(1), 1).expect("read");
        for (changed, sent) in [(vec![], vec![1_u8, 2, 3, 5, 6, 7]), (vec![2, 7], vec![2, 7]), (vec![6], vec![6])] {
            changed.iter().for_each(|page| memory.store(0, page * PAGE_BYTES + 9, &[0xee]));
            if changed.is_empty() {
                versions.clear();
            }
            encoder.encode(&task, &source(2), 2).expect("read");
            let (header, entries) = parsed(encoder.frame());
            assert_eq!(header.body_bytes as usize, sent.len() * PAGE);
            let body = &encoder.frame()[HEADER_BYTES + entries.len() * ENTRY_BYTES..];
            let firsts: Vec<u8> = body.chunks_exact(PAGE).map(|page| page[0]).collect();
            assert_eq!(firsts, sent);
        }
    }

    #[test]
    fn what_does_not_get_shorter_is_seldom_tried_and_what_does_is_found_again() {
        let memory = EmulatedMemory::with_pages(1000);
        let mut state = 1_u64;
        for at in (0..1000 * PAGE_BYTES).step_by(8) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // The second half gets shorter.
            let word = if at < 500 * PAGE_BYTES { state ^ state >> 29 } else { at };
            memory.store(0, at, &word.to_le_bytes());
        }
        let versions = VersionCache::new(0);
        let mut encoder = Encoder::default();
        let mut compressed = Vec::new();
        for page in 0..1000 {
            let task = Task { region: 0, runs: vec![TaskRun { page, count: 1, is_hole: false }] };
            let source = Source { memory: &memory, versions: &versions, round: 1, compresses: true, keeps: true };
            encoder.encode(&task, &source, page + 1).expect("read");
            let header = FrameHeader::parse(encoder.frame().first_chunk().expect("a header")).expect("right");
            if header.coding == Coding::Lz4 {
                compressed.push(page);
            }
        }
        let first = *compressed.first().expect("some get shorter");
        assert!((500..=500 + u64::from(UNSAMPLED_MAX)).contains(&first), "{first}");
        assert_eq!(compressed.len() as u64, 1000 - first, "each from then on");
    }

    #[test]
    fn a_consumers_buffers_stay_within_their_bound() {
        let memory = EmulatedMemory::with_pages(64);
        for page in 0..64 {
            memory.store(0, page * PAGE_BYTES, &(page + 1).to_le_bytes());
        }
        let versions = VersionCache::new(1 << 20);
        let mut encoder = Encoder::default();
        let task = Task { region: 0, runs: vec![TaskRun { page: 0, count: 64, is_hole: false }] };
        for (round, compresses) in [(1, true), (2, true), (3, false)] {
            memory.store(0, 8, &[round as u8; 8]);
            encoder
                .encode(&task, &Source { memory: &memory, versions: &versions, round, compresses, keeps: true }, 1)
                .expect("read");
        }
        let taken =
            [&encoder.plain, &encoder.compressed, &encoder.coded_entries].map(Vec::capacity).iter().sum::<usize>();
        assert!(taken <= ENCODER_BYTES, "{taken} of {ENCODER_BYTES}");
    }
}
