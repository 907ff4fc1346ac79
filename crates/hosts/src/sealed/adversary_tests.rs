//! A malicious peer that has the keys. Whatever arrives, in whatever pieces, only data that was sealed is read, in its
//! order, up to the first thing that is wrong.

use std::cell::RefCell;
use std::rc::Rc;

use futures::FutureExt;
use futures::executor::block_on;
use futures::task::noop_waker_ref;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use tokio::io::{AsyncReadExt, DuplexStream, duplex};

use super::scripted::{CONFIGS, Line, Script, pieces};
use super::tests::{name, noise};
use super::*;

fn pair() -> [Sealed<Line>; 2] {
    let (client, server) = CONFIGS.clone();
    let [near, far] = <[DuplexStream; 2]>::from(duplex(100_000)).map(Line::within);
    let both = async { tokio::join!(connect(client, name(), near), accept(server, far, Vec::new())) };
    let (near, far) = block_on(both);
    [near.expect("connected"), far.expect("accepted")]
}

/// What somebody does who has the keys.
#[derive(Clone, Debug)]
enum Act {
    Data {
        length: usize,
        padding: usize,
    },
    /// A record of any kind with anything in it.
    Record {
        content: Vec<u8>,
        kind: u8,
        padding: usize,
    },
    /// Goes on with the next key after it has said so, and maybe asks for the same.
    Rekey(bool),
    /// Does so without a word.
    RekeySilently,
    /// Sends the last record once more.
    Again,
    /// Sends a record with a bit changed,
    Bent(Index, u8),
    /// or only the beginning of one,
    Cut(Index),
    /// or what is none.
    Garbage(Vec<u8>),
}

fn act() -> impl Strategy<Value = Act> {
    let length = prop_oneof![6 => 0..400_usize, 1 => 16_000..16_500_usize];
    let padding = prop_oneof![6 => Just(0), 2 => 0..300_usize, 1 => 16_000..17_000_usize];
    let few = prop_oneof![Just(0), Just(1), Just(2), Just(4), Just(24), any::<u8>()];
    let kind = prop_oneof![Just(21), Just(22), Just(23), Just(20), Just(24), Just(0), any::<u8>()];
    prop_oneof![
        24 => (length, padding.clone()).prop_map(|(length, padding)| Act::Data { length, padding }),
        6 => any::<bool>().prop_map(Act::Rekey),
        3 => vec(any::<u8>(), 0..200).prop_map(|ticket| Act::Record { content: [vec![4], ticket].concat(), kind: 22, padding: 0 }),
        2 => (vec(few, 0..7), kind, padding).prop_map(|(content, kind, padding)| Act::Record { content, kind, padding }),
        1 => any::<bool>().prop_map(|asks| Act::Record { content: vec![24, 0, 0, 1, asks.into()], kind: 22, padding: 0 }),
        1 => any::<u8>().prop_map(|level| Act::Record { content: vec![level, 0], kind: 21, padding: 3 }),
        1 => Just(Act::RekeySilently),
        1 => Just(Act::Again),
        1 => (any::<Index>(), 0_u8..8).prop_map(|(at, bit)| Act::Bent(at, bit)),
        1 => any::<Index>().prop_map(Act::Cut),
        1 => vec(any::<u8>(), 0..40).prop_map(Act::Garbage),
    ]
}

/// What was sent, as whoever has sent it knows.
#[derive(Clone, Debug)]
enum Sent {
    /// A whole record: its key, its number under it, and what was sealed.
    Record((u32, u64), Vec<u8>),
    /// A whole one that nobody can open.
    Wrong,
    /// What is none, or lacks something: whoever waits for more of it may.
    Torn,
}

/// Somebody with the keys of `near`.
struct Adversary {
    near: Sealed<Line>,
    generation: u32,
    said: Vec<u8>,
    sent: Vec<Sent>,
    last: (Vec<u8>, Sent),
    data: std::iter::Cycle<std::vec::IntoIter<u8>>,
}

impl Adversary {
    fn new(near: Sealed<Line>) -> Self {
        let data = noise(251).into_iter().cycle();
        Self { near, generation: 0, said: Vec::new(), sent: Vec::new(), last: (Vec::new(), Sent::Torn), data }
    }

    fn sealed(&mut self, content: &[u8], kind: u8, padding: usize) -> (Vec<u8>, Sent) {
        let plain = [content, &[kind], &vec![0; padding]].concat();
        let place = (self.generation, self.near.sealing.sequence());
        (self.near.sealing.seal_anything(&plain), Sent::Record(place, plain))
    }

    fn send(&mut self, record: (Vec<u8>, Sent)) {
        self.said.extend(&record.0);
        self.sent.push(record.1.clone());
        self.last = record;
    }

    fn rekey(&mut self) {
        self.near.sealing = Key::new(&self.near.keeper.next_sealing().expect("a secret")).expect("a key");
        self.generation += 1;
    }

    fn data(&mut self, length: usize, padding: usize) -> (Vec<u8>, Sent) {
        let content: Vec<u8> = self.data.by_ref().take(length).collect();
        self.sealed(&content, 23, padding)
    }

    fn act(&mut self, act: Act) {
        match act {
            Act::Data { length, padding } => {
                let record = self.data(length, padding);
                self.send(record);
            }
            Act::Record { content, kind, padding } => {
                let record = self.sealed(&content, kind, padding);
                self.send(record);
            }
            Act::Rekey(asks) => {
                let record = self.sealed(&[24, 0, 0, 1, asks.into()], 22, 0);
                self.send(record);
                self.rekey();
            }
            Act::RekeySilently => self.rekey(),
            Act::Again if self.last.0.is_empty() => {}
            Act::Again => {
                let record = self.last.clone();
                self.send(record);
            }
            Act::Bent(at, bit) => {
                let (mut bytes, _) = self.data(20, 0);
                let at = at.index(bytes.len());
                bytes[at] ^= 1 << bit;
                // With another length it may be longer.
                self.send((bytes, if (3..5).contains(&at) { Sent::Torn } else { Sent::Wrong }));
            }
            Act::Cut(at) => {
                let (mut bytes, _) = self.data(20, 0);
                bytes.truncate(at.index(bytes.len()));
                // One of which nothing comes is missed when the next one does.
                if !bytes.is_empty() {
                    self.send((bytes, Sent::Torn));
                }
            }
            Act::Garbage(bytes) if bytes.is_empty() => {}
            Act::Garbage(bytes) => self.send((bytes, Sent::Torn)),
        }
    }
}

/// How what is read ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    /// The other side has said so.
    Said,
    Error,
    /// More is waited for.
    Open,
    /// One of the two before.
    ErrorOrOpen,
}

/// What is to be read of what was sent, step by step.
fn expected(first: (u32, u64), sent: &[Sent], stays_open: bool) -> (Vec<u8>, Ending) {
    let (mut place, mut data) = (first, Vec::new());
    let unfinished = if stays_open { Ending::ErrorOrOpen } else { Ending::Error };
    for sent in sent {
        let plain = match sent {
            Sent::Record(own, plain) if *own == place && plain.len() <= (1 << 14) + 240 => plain,
            Sent::Record(..) | Sent::Wrong => return (data, Ending::Error),
            Sent::Torn => return (data, unfinished),
        };
        place.1 += 1;
        let content: Vec<u8> = plain.iter().copied().rev().skip_while(|byte| *byte == 0).collect();
        let Some((kind, content)) = content.split_first() else { return (data, Ending::Error) };
        let content: Vec<u8> = content.iter().rev().copied().collect();
        match (kind, &content[..]) {
            (_, content) if content.len() > 1 << 14 => return (data, Ending::Error),
            (23, content) => data.extend(content),
            (22, [24, 0, 0, 1, 0 | 1]) => place = (place.0 + 1, 0),
            (22, [4, ..]) => {}
            (21, [_, 0]) => return (data, Ending::Said),
            _ => return (data, Ending::Error),
        }
    }
    (data, if stays_open { Ending::Open } else { Ending::Error })
}

/// One read of so many bytes; `None` if it is to be asked again.
fn read_once(stream: &mut Sealed<Line>, size: usize) -> Option<io::Result<Vec<u8>>> {
    let mut memory = vec![0; size];
    let mut target = ReadBuf::new(&mut memory);
    let mut context = Context::from_waker(noop_waker_ref());
    match Pin::new(stream).poll_read(&mut context, &mut target) {
        Poll::Ready(Ok(())) => Some(Ok(target.filled().to_vec())),
        Poll::Ready(Err(error)) => {
            assert!(target.filled().is_empty(), "an error takes what was read before it with it");
            Some(Err(error))
        }
        Poll::Pending => None,
    }
}

/// Reads to the end in pieces of these sizes, and does something else in between.
fn read_all(
    stream: &mut Sealed<Line>,
    script: &Rc<RefCell<Script>>,
    sizes: &[usize],
    mut between: impl FnMut(&mut Sealed<Line>),
) -> (Vec<u8>, Ending) {
    let mut received = Vec::new();
    for size in sizes.iter().cycle() {
        match read_once(stream, *size) {
            Some(Ok(bytes)) if bytes.is_empty() => return (received, Ending::Said),
            Some(Ok(bytes)) => received.extend(bytes),
            Some(Err(_)) => return (received, Ending::Error),
            None if script.borrow().is_dry() => break,
            None => {}
        }
        between(stream);
    }
    (received, Ending::Open)
}

/// Gives what has been written of `bytes`.
fn write_once<'a>(stream: &mut Sealed<Line>, bytes: &'a [u8]) -> &'a [u8] {
    match Pin::new(stream).poll_write(&mut Context::from_waker(noop_waker_ref()), bytes) {
        Poll::Ready(count) => &bytes[..count.expect("written")],
        Poll::Pending => &[],
    }
}

proptest! {
    #[test]
    fn of_somebody_with_the_keys_only_data_is_read_and_only_up_to_what_is_wrong(
        acts in vec(act(), 0..24), (gives, takes) in (pieces(), pieces()), stays_open: bool, takes_nothing: bool,
        sizes in vec(prop_oneof![4 => 1..600_usize, 1 => 16_000..40_000_usize, 1 => Just(200_000)], 1..6),
        writes in vec(prop_oneof![3 => Just(0), 2 => 1..600_usize, 1 => 16_000..60_000_usize], 1..6),
    ) {
        let [mut near, mut far] = pair();
        // The tickets, which are sealed already.
        let mut before = vec![0; 4096];
        let count = near.inner.inner().read(&mut before).now_or_never().map_or(0, |count| count.expect("it is open"));
        before.truncate(count);

        let mut adversary = Adversary::new(near);
        let first = (0, adversary.near.sealing.sequence());
        acts.into_iter().for_each(|act| adversary.act(act));
        let Adversary { mut near, said, sent, .. } = adversary;
        let mut script = Script::new(said, gives.clone(), stays_open);
        script.takes = if takes_nothing { vec![0] } else { takes };
        let script = Rc::new(RefCell::new(script));
        far.inner = Line::scripted(&script);

        let (mut written, mut sizes_written) = (Vec::new(), writes.iter().cycle());
        let bytes = noise(60_000);
        let (data, ending) = read_all(&mut far, &script, &sizes, |far| {
            let size = sizes_written.next().expect("they never end");
            if written.len() < 400_000 {
                written.extend_from_slice(write_once(far, &bytes[..*size]));
            }
            assert_eq!(far.incoming.len(), INCOMING_BYTES);
            assert!(far.outgoing.memory.len() < OUTGOING_BYTES_MAX + 100, "{} bytes", far.outgoing.memory.len());
        });
        let (wanted, wanted_ending) = expected(first, &sent, stays_open);
        prop_assert!(data == wanted, "{} bytes of {}, or other ones", data.len(), wanted.len());
        let is_as_wanted = match wanted_ending {
            Ending::ErrorOrOpen => matches!(ending, Ending::Error | Ending::Open),
            wanted => ending == wanted,
        };
        prop_assert!(is_as_wanted, "{ending:?} and not {wanted_ending:?}");
        for size in sizes {
            let again = read_once(&mut far, size);
            let is_the_same = match ending {
                Ending::Said => matches!(&again, Some(Ok(bytes)) if bytes.is_empty()),
                Ending::Error => matches!(again, Some(Err(_))),
                Ending::Open | Ending::ErrorOrOpen => again.is_none(),
            };
            prop_assert!(is_the_same, "{again:?} after {ending:?}");
        }

        // Whatever the other side has sent, what it is sent is whole.
        script.borrow_mut().takes = vec![usize::MAX];
        prop_assert!(far.poll_send(&mut Context::from_waker(noop_waker_ref())).is_ready());
        let reply = [before, std::mem::take(&mut script.borrow_mut().taken)].concat();
        let script = Rc::new(RefCell::new(Script::new(reply, gives, true)));
        near.inner = Line::scripted(&script);
        let (read, ending) = read_all(&mut near, &script, &[30_000, 7, 16_401], |_| {});
        prop_assert!(read == written && ending == Ending::Open, "{} bytes of {}, {ending:?}", read.len(), written.len());
    }
}
