//! A peer that has no keys yet. Whatever it sends in place of a handshake, nobody is let in. Nobody waits for what has
//! ended, and little of it is kept.

use std::cell::RefCell;
use std::rc::Rc;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

use super::handshake::INCOMING_BYTES_MAX;
use super::scripted::{CONFIGS, Line, Script, pieces, poll_until_dry};
use super::tests::name;
use super::*;

/// What is said before there are keys.
#[derive(Clone, Debug)]
enum Opening {
    /// What the library says first, in records of these lengths.
    Hello(Vec<usize>),
    /// A record that says it is of this kind and length, again and again.
    Records {
        kind: u8,
        length: u16,
        body: Vec<u8>,
        times: usize,
    },
    Garbage(Vec<u8>),
}

impl Opening {
    fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Hello(lengths) => {
                let mut connection = rustls::ClientConnection::new(CONFIGS.0.clone(), name()).expect("a client");
                let mut hello = Vec::new();
                connection.write_tls(&mut hello).expect("it is memory");
                let mut rest = &hello[HEADER_BYTES..];
                let mut said = Vec::new();
                for length in lengths.iter().cycle() {
                    let (part, others) = rest.split_at((*length).min(rest.len()));
                    said.extend(&hello[..3]);
                    said.extend((part.len() as u16).to_be_bytes());
                    said.extend(part);
                    if others.is_empty() {
                        break;
                    }
                    rest = others;
                }
                said
            }
            Self::Records { kind, length, body, times } => {
                let [high, low] = length.to_be_bytes();
                [&[*kind, 3, 3, high, low], &body[..]].concat().repeat(*times)
            }
            Self::Garbage(bytes) => bytes.clone(),
        }
    }
}

fn opening() -> impl Strategy<Value = Opening> {
    let kind = prop_oneof![4 => Just(22), 1 => 20_u8..25, 1 => any::<u8>()];
    // Whole records, so that the next one is one, too.
    let whole = (kind.clone(), vec(any::<u8>(), 0..300), 1..2000_usize)
        .prop_map(|(kind, body, times)| Opening::Records { kind, length: body.len() as u16, body, times });
    // A message of the handshake that says it is long, in many parts.
    let long = (1_u8..25, any::<u8>(), 1..200_usize, 1..40_000_usize).prop_map(|(message, high, length, times)| {
        let body = [vec![message, high & 1, 255, 255], vec![7; length]].concat();
        Opening::Records { kind: 22, length: body.len() as u16, body, times: times.min(600_000 / (length + 9)) }
    });
    let torn = (kind, any::<u16>(), vec(any::<u8>(), 0..300), 1..2000_usize)
        .prop_map(|(kind, length, body, times)| Opening::Records { kind, length, body, times });
    prop_oneof![
        3 => vec(1..400_usize, 1..4).prop_map(Opening::Hello),
        2 => whole,
        1 => long,
        1 => torn,
        1 => vec(any::<u8>(), 0..200).prop_map(Opening::Garbage),
    ]
}

proptest! {
    #[test]
    fn of_somebody_without_keys_nothing_is_believed_and_little_is_kept(
        openings in vec(opening(), 1..4), bent in prop::option::weighted(0.3, (any::<Index>(), 0_u8..8)),
        gives in pieces(), stays_open: bool,
    ) {
        let mut coming: Vec<u8> = openings.iter().flat_map(Opening::bytes).collect();
        if let (Some((at, bit)), false) = (bent, coming.is_empty()) {
            let at = at.index(coming.len());
            coming[at] ^= 1 << bit;
        }
        let script = || Rc::new(RefCell::new(Script::new(coming.clone(), gives.clone(), stays_open)));
        // Once to a server, which listens before it begins, and once to a client.
        let (to_server, to_client) = (script(), script());
        let served = poll_until_dry(&to_server, async {
            let mut line = Line::scripted(&to_server);
            let greeting = greeted(&mut line).await?;
            assert!(greeting.bytes[..] == coming[..to_server.borrow().given], "it is not all that has come");
            assert!(greeting.bytes.capacity() <= 3 * INCOMING_BYTES_MAX, "{} bytes", greeting.bytes.capacity());
            accept(CONFIGS.1.clone(), line, greeting.bytes).await
        });
        let connected = poll_until_dry(&to_client, connect(CONFIGS.0.clone(), name(), Line::scripted(&to_client)));
        for (script, outcome) in [(to_server, served), (to_client, connected)] {
            prop_assert!(!matches!(outcome, Some(Ok(_))), "it was let in");
            prop_assert!(stays_open || outcome.is_some(), "it waits for what has ended");
            let Script { given, taken, .. } = &*script.borrow();
            prop_assert!(*given <= 3 * INCOMING_BYTES_MAX && taken.len() <= 8192, "{given} bytes in, {} out", taken.len());
        }
    }
}
