//! Who takes what, and what becomes of it, without anybody awaiting anything.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Wake, Waker};

use block::{Bytes, Data, Error, ErrorKind, Extent, Result};
use tokio::sync::oneshot;

use super::board::{Answered, Board, Operation, Order, Place, Request, Room, Taken};
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

fn place(session: u64, stream: u16, generation: u32) -> Place {
    Place { session, stream, generation }
}

/// A board with a session whose streams are all up.
fn live(streams: u16, waits_when_lost: bool) -> Board {
    let mut board = Board::new(waits_when_lost);
    open(&mut board, streams);
    board
}

fn open(board: &mut Board, streams: u16) -> u64 {
    let (session, failed) = board.next_session();
    failed.answer();
    board.begin_session(session, streams, false).expect("it is the newest").answer();
    for stream in 0..streams {
        let place = if stream == 0 { place(session, 0, 1) } else { board.dials(session, stream).expect("it is live") };
        assert!(board.enter(place));
    }
    session
}

fn take(board: &mut Board, place: Place, has_room: bool) -> Option<Operation> {
    let room = if has_room { Room::Anything } else { Room::Short };
    match board.take(place, 0, room, Waker::noop()) {
        Taken::Operation(operation) => Some(*operation),
        Taken::Nothing => None,
        Taken::Over => panic!("the session of {place:?} is over"),
    }
}

fn ask(board: &mut Board, request: Request) -> oneshot::Receiver<Result<Answered>> {
    board.submit(request).expect("the session is live")
}

fn error_of(answer: &mut oneshot::Receiver<Result<Answered>>) -> ErrorKind {
    answer.try_recv().expect("it was answered").err().expect("it failed").kind()
}

fn gone() -> Error {
    Error::new(ErrorKind::TimedOut, "it was silent")
}

#[test]
fn short_requests_go_first_and_after_eight_of_them_a_large_one_has_its_turn() {
    let mut board = live(1, false);
    let mut answers = vec![ask(&mut board, write(256 << 10)), ask(&mut board, write(256 << 10))];
    answers.extend((0..40).map(|_| ask(&mut board, write(4096))));
    let here = place(1, 0, 1);
    let order: Vec<usize> =
        (0..42).map(|_| take(&mut board, here, true).expect("there is more").request.cost()).collect();
    let large: Vec<usize> = (0..42).filter(|index| order[*index] > 4096).collect();
    assert_eq!(large, [8, 17]);
    assert!(take(&mut board, here, true).is_none());
}

#[test]
fn a_stream_without_room_takes_short_requests_only() {
    let mut board = live(1, false);
    let _answers = [ask(&mut board, write(256 << 10)), ask(&mut board, Request::Flush)];
    let here = place(1, 0, 1);
    assert_eq!(take(&mut board, here, false).expect("a flush is short").request.kind(), Kind::Flush);
    assert!(take(&mut board, here, false).is_none());
    assert!(take(&mut board, here, true).is_some());
}

#[test]
fn a_short_frame_of_a_long_request_does_not_overtake() {
    let mut board = live(1, false);
    let frame = Order { is_short: false, ..write(4096).into() };
    let _answers = [board.submit(frame).expect("the session is live"), ask(&mut board, write(8192))];
    let here = place(1, 0, 1);
    assert_eq!(take(&mut board, here, false).expect("it is short").request.cost(), 8192);
    assert!(take(&mut board, here, false).is_none(), "a copy's frame was taken for a guest's write");
    assert_eq!(take(&mut board, here, true).expect("there is room").request.cost(), 4096);
}

#[test]
fn the_least_loaded_stream_that_would_take_a_request_is_woken_and_only_that_one() {
    let mut board = live(3, false);
    let bells: [Arc<Bell>; 3] = Default::default();
    let loads = [(5000, true), (100, false), (9000, true)];
    for (stream, (load, has_room)) in (0..3).zip(loads) {
        let waker = Waker::from(Arc::clone(&bells[usize::from(stream)]));
        let room = if has_room { Room::Anything } else { Room::Short };
        assert!(matches!(board.take(place(1, stream, 1), load, room, &waker), Taken::Nothing));
    }
    let rings = || [bells[0].rings(), bells[1].rings(), bells[2].rings()];
    let _first = ask(&mut board, write(4096));
    assert_eq!(rings(), [0, 1, 0], "the least loaded");
    let _second = ask(&mut board, write(256 << 10));
    assert_eq!(rings(), [1, 1, 0], "the least loaded with room");
    let _third = ask(&mut board, write(256 << 10));
    assert_eq!(rings(), [1, 1, 1]);
    let _fourth = ask(&mut board, write(256 << 10));
    assert_eq!(rings(), [1, 1, 1], "nobody waits");
}

#[test]
fn what_a_dead_stream_had_goes_to_others_writes_only_when_it_is_retired() {
    let mut board = live(2, false);
    let (first, second) = (place(1, 0, 1), place(1, 1, 1));
    let mut written = ask(&mut board, write(4096));
    let _described = ask(&mut board, Request::Extents(Extent::whole(Bytes(4096))));
    let sent = vec![take(&mut board, first, true).expect("a write"), take(&mut board, first, true).expect("extents")];
    let (failed, is_over) = board.end(first, sent, &gone());
    failed.answer();
    assert!(!is_over);
    let one = take(&mut board, second, true).expect("extents are asked again at once");
    assert!(one.request.kind() == Kind::Extents && one.is_again);
    let retire = take(&mut board, second, true).expect("the dead one is retired");
    assert!(matches!(retire.request, Request::Retire(0, 1)));
    assert!(take(&mut board, second, true).is_none(), "a write was repeated while it may be under way");
    board.finish(retire, Ok(Answered::Done)).answer();
    let again = take(&mut board, second, true).expect("the write is repeated");
    assert!(again.request.kind() == Kind::Write && again.is_again);
    assert!(written.try_recv().is_err(), "it was answered before it was done");
    board.finish(again, Ok(Answered::Done)).answer();
    assert!(written.try_recv().expect("it is answered").is_ok());
}

#[test]
fn a_copy_fails_with_its_last_stream_and_a_forward_waits_until_its_patience_ends() {
    for waits in [false, true] {
        let mut board = live(2, waits);
        let mut answers = [ask(&mut board, write(4096)), ask(&mut board, write(4096)), ask(&mut board, Request::Flush)];
        let (first, second) = (place(1, 0, 1), place(1, 1, 1));
        let sent = [take(&mut board, first, true).expect("a write"), take(&mut board, second, true).expect("a write")];
        let [one, other] = sent;
        board.end(first, vec![one], &gone()).0.answer();
        let (failed, is_over) = board.end(second, vec![other], &gone());
        failed.answer();
        assert!(is_over);
        if !waits {
            assert_eq!(answers.each_mut().map(error_of), [ErrorKind::Disconnected; 3]);
            let refused = board.submit(Request::Flush);
            assert_eq!(refused.err().expect("nobody is there").kind(), ErrorKind::Disconnected);
            continue;
        }
        assert!(answers.iter_mut().all(|answer| answer.try_recv().is_err()), "a forwarded guest was told");
        let session = open(&mut board, 1);
        let here = place(session, 0, 1);
        let kinds: Vec<_> = (0..3).map(|_| take(&mut board, here, true).expect("it waits").request.kind()).collect();
        assert_eq!(kinds, [Kind::Write, Kind::Write, Kind::Flush], "what was asked first is sent first");
        assert!(take(&mut board, here, true).is_none(), "what belonged to the old session is sent in the new");
        let mut late = ask(&mut board, Request::Flush);
        assert!(board.end(here, Vec::new(), &gone()).1 && board.is_lost_since(session));
        board.expire(ErrorKind::TimedOut, "too long").answer();
        assert_eq!(error_of(&mut late), ErrorKind::TimedOut);
        assert!(board.submit(Request::Flush).is_err());
    }
}

#[test]
fn a_connection_of_an_old_session_takes_nothing_and_its_copies_fail() {
    let mut board = live(2, false);
    let mut answer = ask(&mut board, write(4096));
    let old = place(1, 1, 1);
    let sent = take(&mut board, old, true).expect("a write");
    open(&mut board, 2);
    assert!(matches!(board.take(old, 0, Room::Anything, Waker::noop()), Taken::Over));
    let _new = ask(&mut board, Request::Flush);
    let (failed, is_over) = board.end(old, vec![sent], &gone());
    failed.answer();
    assert!(!is_over, "the new session does not end with the old one's streams");
    assert_eq!(error_of(&mut answer), ErrorKind::Disconnected);
    assert!(!board.enter(old) && board.dials(1, 0).is_none());
}

#[test]
fn a_path_that_is_free_again_wakes_one_stream_that_has_waited_for_it_and_none_of_another_path() {
    let mut board = live(3, false);
    let _answers = [ask(&mut board, write(256 << 10)), ask(&mut board, write(256 << 10))];
    let bells: Vec<Arc<Bell>> = (0..3).map(|_| Arc::default()).collect();
    for (stream, path) in [(0, 7), (1, 8), (2, 8)] {
        let waker = Waker::from(Arc::clone(&bells[usize::from(stream)]));
        let taken = board.take(place(1, stream, 1), 1000, Room::ShortOnPath(path), &waker);
        assert!(matches!(taken, Taken::Nothing), "a large request was taken without room");
    }
    let rings = || bells.iter().map(|bell| bell.rings()).collect::<Vec<_>>();
    board.path_is_free(9);
    assert_eq!(rings(), [0, 0, 0]);
    board.path_is_free(8);
    assert_eq!(rings(), [0, 1, 0]);
    board.path_is_free(8);
    assert_eq!(rings(), [0, 1, 1]);
    board.path_is_free(8);
    assert_eq!(rings(), [0, 1, 1]);
}
