//! What one side writes the other understands, and nothing else.

use super::*;
use block::{Bytes, ErrorKind, Extent};
use proptest::prelude::*;
use uuid::Uuid;

fn opening() -> Opening {
    let request = SessionRequest {
        volume: "disk".to_owned(),
        job: Uuid::from_u128(7),
        role: Role::Copy,
        epoch: 3,
        size: Bytes::gib(1),
        request_alignment: 512,
        origin: "vm-disk".to_owned(),
        layers: None,
        stays: false,
    };
    Opening { sender: [1; 16], session: 1, stream: 2, generation: 3, joins: true, request }
}

#[test]
fn a_header_is_drawn_as_the_documentation_draws_it() {
    let header = Header {
        flags: flag::FUA | flag::AGAIN,
        coding: Coding::Lz4,
        payload_bytes: 0x0403_0201,
        offset: 0x1122,
        length: 0x0010_0000,
        payload_check: 0xaabb,
        ..Header::request(Kind::Write, 0x0102)
    };
    let bytes = header.to_bytes();
    assert_eq!(bytes[..8], [2, 5, 1, 0, 1, 2, 3, 4]);
    assert_eq!(bytes[8..16], [2, 1, 0, 0, 0, 0, 0, 0]);
    assert_eq!(bytes[16..24], [0x22, 0x11, 0, 0, 0, 0, 0, 0]);
    assert_eq!(bytes[24..32], [0, 0, 0x10, 0, 0, 0, 0, 0]);
    assert_eq!(bytes[32..40], [0xbb, 0xaa, 0, 0, 0, 0, 0, 0]);
    assert_eq!(bytes[40..], xxhash_rust::xxh3::xxh3_64(&bytes[..40]).to_le_bytes());
}

#[test]
fn lengths_beyond_the_limits_are_refused() {
    let write = |payload_bytes: u32, length: u64, coding| {
        let header = Header { payload_bytes, length, coding, payload_check: 1, ..Header::request(Kind::Write, 1) };
        Header::parse(&header.to_bytes()).is_ok()
    };
    assert!(write(PAYLOAD_BYTES_MAX, PAYLOAD_BYTES_MAX.into(), Coding::Raw));
    assert!(!write(PAYLOAD_BYTES_MAX + 1, u64::from(PAYLOAD_BYTES_MAX) + 1, Coding::Raw));
    assert!(!write(4096, 4097, Coding::Raw) && !write(0, 0, Coding::Raw));
    assert!(write(4095, 4096, Coding::Zstd));
    assert!(!write(4096, 4096, Coding::Zstd), "a compressed payload that is no shorter was accepted");
    assert!(!write(4095, u64::from(PAYLOAD_BYTES_MAX) + 1, Coding::Lz4), "an expansion without limit was accepted");
    assert!(!write(0, 4096, Coding::Zero));
    let zeroes = Header { offset: u64::MAX, length: 2, ..Header::request(Kind::Zeroes, 1) };
    assert!(Header::parse(&zeroes.to_bytes()).is_err(), "an extent past all numbers was accepted");
    let open = Header {
        payload_bytes: CONTROL_BYTES_MAX + 1,
        length: 65537,
        payload_check: 1,
        ..Header::request(Kind::Open, 0)
    };
    assert!(Header::parse(&open.to_bytes()).is_err());
}

#[test]
fn every_kind_of_error_has_a_number_of_its_own() {
    for code in 1..=17 {
        let status = Status::from_code(code);
        assert_eq!(status.code(), code);
        assert!(matches!(status, Status::Failed(_)));
    }
    assert_eq!(Status::from_code(12), Status::Failed(ErrorKind::Fenced));
    assert_eq!(Status::from_code(99), Status::Failed(ErrorKind::Io));
    assert_eq!(Status::from_code(Status::Damaged.code()), Status::Damaged);
}

#[test]
fn the_senders_best_version_that_both_speak_is_chosen() {
    let hello = Hello { versions: vec![3, 2, 1], required: 0, optional: feature::LZ4 | 1 << 60 };
    let choice = choose(&hello, &[1, 2], feature::KNOWN);
    assert_eq!((choice.version, choice.features), (2, feature::LZ4), "an unknown optional feature is left out");
    let refused = choose(&Hello { versions: vec![9], ..hello.clone() }, &[1], feature::KNOWN);
    assert_eq!(refused.version, 0);
    assert!(refused.words.contains("[9]") && refused.words.contains("[1]"), "{}", refused.words);
    let refused = choose(&Hello { required: 1 << 60, ..hello }, &[1], feature::KNOWN);
    assert!(refused.version == 0 && refused.words.contains("0x1000000000000000"), "{}", refused.words);
}

#[test]
fn messages_survive_their_bytes_and_none_is_followed_by_anything() {
    let opening = opening();
    let mut bytes = opening.to_bytes(0).expect("it is short");
    assert_eq!(decode(&bytes), Ok(opening.clone()), "receivers that know no layers understand it");
    assert_eq!(Opening::parse(&bytes, 0), Ok(opening));
    bytes.push(0);
    assert!(decode::<Opening>(&bytes).is_err() && Opening::parse(&bytes, 0).is_err());
    for ask in [Ask::Prepare { epoch: 4 }, Ask::Abandon, Ask::Status, Ask::MapDigest { chunk_bytes: 65536 }] {
        assert_eq!(decode(&encode(&ask).expect("it is short")), Ok(ask));
    }
    let overlay = SessionLayerKind::Overlay { name: "before".to_owned(), created_unix_ms: 5, bytes: 1 << 30 };
    let throttle = SessionLayerKind::Throttle { iops: Some(500), bytes_per_second: None };
    let layers = [overlay, throttle].map(|kind| SessionLayer { id: Uuid::from_u128(9), kind }).to_vec();
    let layers = Some(SessionLayers { base_bytes: 1 << 30, layers });
    let layered = Opening { request: SessionRequest { layers, ..opening_request() }, ..self::opening() };
    let staying = Opening { request: SessionRequest { stays: true, ..opening_request() }, ..self::opening() };
    for (opening, features) in [(&layered, 0), (&layered, feature::KNOWN), (&staying, feature::KNOWN)] {
        let bytes = opening.to_bytes(features).expect("it is short");
        assert_eq!(Opening::parse(&bytes, features).as_ref(), Ok(opening));
        let parsed = |end: usize| Opening::parse(&bytes[..end], features);
        assert!((1..bytes.len()).all(|end| parsed(end) != parsed(bytes.len())));
    }
    let long = SessionRequest { volume: "x".repeat(70_000), ..opening_request() };
    assert!(encode(&long).is_err(), "a message beyond the limit was encoded");
}

#[test]
fn counters_are_drawn_as_the_documentation_draws_them() {
    let migrations = MigrationCounters { received: 5, sent: 6, incoming: 7, outgoing: 8 };
    let counters = LinkCounters { interface: "e0".to_owned(), at_ns: 1, received: 2, sent: 3, capacity: 4, migrations };
    let answer = Answer::Usage(vec![None, Some(counters)]);
    let bytes = encode(&answer).expect("it is short");
    assert_eq!(bytes, [3, 2, 0, 1, 2, b'e', b'0', 1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(decode(&bytes), Ok(answer));
}

fn opening_request() -> SessionRequest {
    opening().request
}

proptest! {
    #[test]
    fn whatever_is_understood_is_written_the_same_again(
        kind in 0_u8..16, reply in any::<bool>(), flags in 0_u8..8, coding in 0_u8..5, status in 0_u8..20,
        payload in prop_oneof![Just(0_u32), 1_u32..2_000_000], offset in any::<u64>(),
        length in prop_oneof![0_u64..2_000_000, any::<u64>()], check in any::<u64>(),
    ) {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&[kind | if reply { 128 } else { 0 }, flags, coding, status]);
        bytes[4..8].copy_from_slice(&payload.to_le_bytes());
        bytes[16..24].copy_from_slice(&offset.to_le_bytes());
        bytes[24..32].copy_from_slice(&length.to_le_bytes());
        bytes[32..40].copy_from_slice(&check.to_le_bytes());
        let sum = xxhash_rust::xxh3::xxh3_64(&bytes[..40]);
        bytes[40..].copy_from_slice(&sum.to_le_bytes());
        if let Ok(header) = Header::parse(&bytes) {
            // Numbers of errors that are not known become one that is.
            prop_assert!(header.to_bytes() == bytes || status > 17);
            prop_assert!(header.payload_bytes <= PAYLOAD_BYTES_MAX);
        }
        bytes[41] ^= 1;
        prop_assert!(Header::parse(&bytes).is_err());
    }

    #[test]
    fn first_messages_survive_their_bytes(
        versions in prop::collection::vec(1_u16.., 1..16), required in any::<u64>(), optional in any::<u64>(),
        words in "\\PC{0,100}", version in any::<u16>(), at in 0_usize..64, bit in 0_u8..8,
    ) {
        let hello = Hello { versions, required, optional };
        let mut bytes = hello.to_bytes();
        prop_assert_eq!(Hello::parse(&bytes), Ok(hello));
        bytes[at] ^= 1 << bit;
        prop_assert!(Hello::parse(&bytes).is_err());
        let choice = Choice { version, features: optional, words: clip(&words, 232).to_owned() };
        prop_assert_eq!(Choice::parse(&choice.to_bytes()), Ok(choice));
    }

    #[test]
    fn any_bytes_are_understood_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = bytes.first_chunk().map(Header::parse);
        let _ = bytes.first_chunk().map(Hello::parse);
        let _ = bytes.first_chunk().map(Choice::parse);
        let _ = (decode::<Opening>(&bytes), decode::<Welcome>(&bytes), decode::<Ask>(&bytes), decode::<Answer>(&bytes));
        if let Ok(pieces) = parse_extents(Extent::new(Bytes(4096), Bytes::mib(1)), &bytes) {
            prop_assert_eq!(encode_extents(&pieces), bytes);
        }
    }
}
