//! Every parser of the wire on any bytes: nothing panics, and what was understood is what is written again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use transhume_memory::wire::{
    Ack, FrameHeader, HEADER_BYTES, Hello, PREFIX_BYTES, Welcome, checksum_of, parse_entries, parse_prefix, write_entries,
};

fuzz_target!(|bytes: &[u8]| {
    if let Some((first, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() {
        let _ = FrameHeader::parse(first);
        // With a checksum that fits, the rules behind it are reached.
        let mut sealed = *first;
        let sum = checksum_of(&sealed[..56]).to_le_bytes();
        sealed[56..].copy_from_slice(&sum);
        if let Ok(header) = FrameHeader::parse(&sealed) {
            assert_eq!(FrameHeader::parse(&header.to_bytes()).ok(), Some(header));
            if let Ok(entries) = parse_entries(rest, &header, 1 << 20) {
                let mut again = Vec::new();
                write_entries(&entries, &mut again);
                assert_eq!(again, rest);
            }
        }
    }
    if let Some(prefix) = bytes.first_chunk::<PREFIX_BYTES>() {
        let _ = parse_prefix(prefix);
    }
    if let Some(Ok(ack)) = bytes.first_chunk().map(Ack::parse) {
        assert_eq!(Ack::parse(&ack.to_bytes()).ok(), Some(ack));
    }
    if let Ok(hello) = Hello::parse(bytes) {
        let again = hello.to_bytes().expect("it was right");
        assert_eq!(Hello::parse(&again[PREFIX_BYTES..]).ok(), Some(hello));
    }
    let _ = Welcome::parse(bytes);
});
