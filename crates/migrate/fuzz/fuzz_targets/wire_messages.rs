//! Every parser of the wire on any bytes: nothing panics, and what was understood is what is written again.
#![no_main]

use block::{Bytes, Extent};
use libfuzzer_sys::fuzz_target;
use transhume_migrate::stream::protocol::{
    Answer, Ask, Choice, HEADER_BYTES, Header, Hello, Opening, Welcome, decode, encode_extents, feature, parse_extents,
};
use xxhash_rust::xxh3::xxh3_64;

fuzz_target!(|bytes: &[u8]| {
    if let Some(first) = bytes.first_chunk::<HEADER_BYTES>() {
        let _ = Header::parse(first);
        // With a checksum that fits, the rules behind it are reached.
        let mut sealed = *first;
        let sum = xxh3_64(&sealed[..40]).to_le_bytes();
        sealed[40..].copy_from_slice(&sum);
        if let Ok(header) = Header::parse(&sealed) {
            let again = header.to_bytes();
            assert_eq!(Header::parse(&again), Ok(header));
        }
    }
    if let Some(Ok(hello)) = bytes.first_chunk().map(Hello::parse) {
        assert_eq!(Hello::parse(&hello.to_bytes()), Ok(hello));
    }
    if let Some(Ok(choice)) = bytes.first_chunk().map(Choice::parse) {
        assert_eq!(Choice::parse(&choice.to_bytes()), Ok(choice));
    }
    for features in [0, feature::KNOWN] {
        let Ok(opening) = Opening::parse(bytes, features) else { continue };
        assert_eq!(Opening::parse(&opening.to_bytes(features).expect("it was short"), features), Ok(opening));
    }
    let _ = (decode::<Welcome>(bytes), decode::<Ask>(bytes), decode::<Answer>(bytes));
    if let Ok(pieces) = parse_extents(Extent::new(Bytes(4096), Bytes::mib(1)), bytes) {
        assert_eq!(encode_extents(&pieces), bytes);
    }
});
