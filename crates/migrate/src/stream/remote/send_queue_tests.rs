//! Who takes what, and what becomes of it, without anybody awaiting anything.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Wake, Waker};

use block::{Bytes, Data, Error, ErrorKind, Extent, Result};
use tokio::sync::oneshot;

use super::send_queue::{Answered, Capacity, ConnectionId, Operation, Order, Request, SendQueue, Taken};
use crate::stream::protocol::Kind;

/// Counts how often it is woken.
#[derive(Default)]
struct Bell(AtomicUsize);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Bell {
    fn rings(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

fn write(length: usize) -> Request {
    Request::Write(Bytes(0), Data::copy_of(&vec![1; length]), None)
}

fn place(session: u64, stream: u16, generation: u32) -> ConnectionId {
    ConnectionId { session, stream, generation }
}

/// A queue with a session whose streams are all up.
fn live(streams: u16, waits_when_lost: bool) -> SendQueue {
    let mut send_queue = SendQueue::new(waits_when_lost);
    open(&mut send_queue, streams);
    send_queue
}

fn open(send_queue: &mut SendQueue, streams: u16) -> u64 {
    let (session, failed) = send_queue.next_session();
    failed.answer();
    send_queue.begin_session(session, streams, false).expect("it is the newest").answer();
    for stream in 0..streams {
        let place =
            if stream == 0 { place(session, 0, 1) } else { send_queue.dials(session, stream).expect("it is live") };
        assert!(send_queue.enter(place));
    }
    session
}

fn take(send_queue: &mut SendQueue, place: ConnectionId, has_room: bool) -> Option<Operation> {
    let room = if has_room { Capacity::Anything } else { Capacity::Short };
    match send_queue.take(place, 0, room, Waker::noop()) {
        Taken::Operation(operation) => Some(*operation),
        Taken::Nothing => None,
        Taken::Over => panic!("the session of {place:?} is over"),
    }
}

fn ask(send_queue: &mut SendQueue, request: Request) -> oneshot::Receiver<Result<Answered>> {
    send_queue.submit(request).expect("the session is live")
}

fn error_of(answer: &mut oneshot::Receiver<Result<Answered>>) -> ErrorKind {
    answer.try_recv().expect("it was answered").err().expect("it failed").kind()
}

fn gone() -> Error {
    Error::new(ErrorKind::TimedOut, "it was silent")
}

#[test]
fn short_requests_go_first_and_after_eight_of_them_a_large_one_has_its_turn() {
    let mut send_queue = live(1, false);
    let mut answers = vec![ask(&mut send_queue, write(256 << 10)), ask(&mut send_queue, write(256 << 10))];
    answers.extend((0..40).map(|_| ask(&mut send_queue, write(4096))));
    let here = place(1, 0, 1);
    let order: Vec<usize> =
        (0..42).map(|_| take(&mut send_queue, here, true).expect("there is more").request.cost()).collect();
    let large: Vec<usize> = (0..42).filter(|index| order[*index] > 4096).collect();
    assert_eq!(large, [8, 17]);
    assert!(take(&mut send_queue, here, true).is_none());
}

#[test]
fn a_stream_without_room_takes_short_requests_only() {
    let mut send_queue = live(1, false);
    let _answers = [ask(&mut send_queue, write(256 << 10)), ask(&mut send_queue, Request::Flush)];
    let here = place(1, 0, 1);
    assert_eq!(take(&mut send_queue, here, false).expect("a flush is short").request.kind(), Kind::Flush);
    assert!(take(&mut send_queue, here, false).is_none());
    assert!(take(&mut send_queue, here, true).is_some());
}

#[test]
fn a_short_frame_of_a_long_request_does_not_overtake() {
    let mut send_queue = live(1, false);
    let frame = Order { is_short: false, ..write(4096).into() };
    let _answers = [send_queue.submit(frame).expect("the session is live"), ask(&mut send_queue, write(8192))];
    let here = place(1, 0, 1);
    assert_eq!(take(&mut send_queue, here, false).expect("it is short").request.cost(), 8192);
    assert!(take(&mut send_queue, here, false).is_none(), "a copy's frame was taken for a guest's write");
    assert_eq!(take(&mut send_queue, here, true).expect("there is room").request.cost(), 4096);
}

#[test]
fn the_least_loaded_stream_that_would_take_a_request_is_woken_and_only_that_one() {
    let mut send_queue = live(3, false);
    let bells: [Arc<Bell>; 3] = Default::default();
    let loads = [(5000, true), (100, false), (9000, true)];
    for (stream, (load, has_room)) in (0..3).zip(loads) {
        let waker = Waker::from(Arc::clone(&bells[usize::from(stream)]));
        let room = if has_room { Capacity::Anything } else { Capacity::Short };
        assert!(matches!(send_queue.take(place(1, stream, 1), load, room, &waker), Taken::Nothing));
    }
    let rings = || [bells[0].rings(), bells[1].rings(), bells[2].rings()];
    let _first = ask(&mut send_queue, write(4096));
    assert_eq!(rings(), [0, 1, 0], "the least loaded");
    let _second = ask(&mut send_queue, write(256 << 10));
    assert_eq!(rings(), [1, 1, 0], "the least loaded with room");
    let _third = ask(&mut send_queue, write(256 << 10));
    assert_eq!(rings(), [1, 1, 1]);
    let _fourth = ask(&mut send_queue, write(256 << 10));
    assert_eq!(rings(), [1, 1, 1], "nobody waits");
}

#[test]
fn what_a_dead_stream_had_goes_to_others_writes_only_when_it_is_retired() {
    let mut send_queue = live(2, false);
    let (first, second) = (place(1, 0, 1), place(1, 1, 1));
    let mut written = ask(&mut send_queue, write(4096));
    let _described = ask(&mut send_queue, Request::Extents(Extent::whole(Bytes(4096))));
    let sent = vec![
        take(&mut send_queue, first, true).expect("a write"),
        take(&mut send_queue, first, true).expect("extents"),
    ];
    let (failed, is_over) = send_queue.end(first, sent, &gone());
    failed.answer();
    assert!(!is_over);
    let one = take(&mut send_queue, second, true).expect("extents are asked again at once");
    assert!(one.request.kind() == Kind::Extents && one.is_again);
    let retire = take(&mut send_queue, second, true).expect("the dead one is retired");
    assert!(matches!(retire.request, Request::Retire(0, 1)));
    assert!(take(&mut send_queue, second, true).is_none(), "a write was repeated while it may be under way");
    send_queue.finish(retire, Ok(Answered::Done)).answer();
    let again = take(&mut send_queue, second, true).expect("the write is repeated");
    assert!(again.request.kind() == Kind::Write && again.is_again);
    assert!(written.try_recv().is_err(), "it was answered before it was done");
    send_queue.finish(again, Ok(Answered::Done)).answer();
    assert!(written.try_recv().expect("it is answered").is_ok());
}

#[test]
fn a_copy_fails_with_its_last_stream_and_a_forward_waits_until_its_patience_ends() {
    for waits in [false, true] {
        let mut send_queue = live(2, waits);
        let mut answers = [
            ask(&mut send_queue, write(4096)),
            ask(&mut send_queue, write(4096)),
            ask(&mut send_queue, Request::Flush),
        ];
        let (first, second) = (place(1, 0, 1), place(1, 1, 1));
        let sent = [
            take(&mut send_queue, first, true).expect("a write"),
            take(&mut send_queue, second, true).expect("a write"),
        ];
        let [one, other] = sent;
        send_queue.end(first, vec![one], &gone()).0.answer();
        let (failed, is_over) = send_queue.end(second, vec![other], &gone());
        failed.answer();
        assert!(is_over);
        if !waits {
            assert_eq!(answers.each_mut().map(error_of), [ErrorKind::Disconnected; 3]);
            let refused = send_queue.submit(Request::Flush);
            assert_eq!(refused.err().expect("nobody is there").kind(), ErrorKind::Disconnected);
            continue;
        }
        assert!(answers.iter_mut().all(|answer| answer.try_recv().is_err()), "a forwarded guest was told");
        let session = open(&mut send_queue, 1);
        let here = place(session, 0, 1);
        let kinds: Vec<_> =
            (0..3).map(|_| take(&mut send_queue, here, true).expect("it waits").request.kind()).collect();
        assert_eq!(kinds, [Kind::Write, Kind::Write, Kind::Flush], "what was asked first is sent first");
        assert!(take(&mut send_queue, here, true).is_none(), "what belonged to the old session is sent in the new");
        let mut late = ask(&mut send_queue, Request::Flush);
        assert!(send_queue.end(here, Vec::new(), &gone()).1 && send_queue.is_lost_since(session));
        send_queue.expire(ErrorKind::TimedOut, "too long").answer();
        assert_eq!(error_of(&mut late), ErrorKind::TimedOut);
        assert!(send_queue.submit(Request::Flush).is_err());
    }
}

#[test]
fn a_connection_of_an_old_session_takes_nothing_and_its_copies_fail() {
    let mut send_queue = live(2, false);
    let mut answer = ask(&mut send_queue, write(4096));
    let old = place(1, 1, 1);
    let sent = take(&mut send_queue, old, true).expect("a write");
    open(&mut send_queue, 2);
    assert!(matches!(send_queue.take(old, 0, Capacity::Anything, Waker::noop()), Taken::Over));
    let _new = ask(&mut send_queue, Request::Flush);
    let (failed, is_over) = send_queue.end(old, vec![sent], &gone());
    failed.answer();
    assert!(!is_over, "the new session does not end with the old one's streams");
    assert_eq!(error_of(&mut answer), ErrorKind::Disconnected);
    assert!(!send_queue.enter(old) && send_queue.dials(1, 0).is_none());
}

#[test]
fn a_path_that_is_free_again_wakes_one_stream_that_has_waited_for_it_and_none_of_another_path() {
    let mut send_queue = live(3, false);
    let _answers = [ask(&mut send_queue, write(256 << 10)), ask(&mut send_queue, write(256 << 10))];
    let bells: Vec<Arc<Bell>> = (0..3).map(|_| Arc::default()).collect();
    for (stream, path) in [(0, 7), (1, 8), (2, 8)] {
        let waker = Waker::from(Arc::clone(&bells[usize::from(stream)]));
        let taken = send_queue.take(place(1, stream, 1), 1000, Capacity::ShortOnPath(path), &waker);
        assert!(matches!(taken, Taken::Nothing), "a large request was taken without room");
    }
    let rings = || bells.iter().map(|bell| bell.rings()).collect::<Vec<_>>();
    send_queue.path_is_free(9);
    assert_eq!(rings(), [0, 0, 0]);
    send_queue.path_is_free(8);
    assert_eq!(rings(), [0, 1, 0]);
    send_queue.path_is_free(8);
    assert_eq!(rings(), [0, 1, 1]);
    send_queue.path_is_free(8);
    assert_eq!(rings(), [0, 1, 1]);
}
