//! The model judged by hand-made histories.

use super::*;

fn history() -> RegisterHistory {
    RegisterHistory::new(1024, |_| Content::Zero)
}

fn bytes(content: Content) -> Vec<u8> {
    let mut bytes = vec![0; 512];
    content.fill(0, &mut bytes);
    bytes
}

fn write(history: &mut RegisterHistory) -> (Ticket, Content) {
    let content = Content::Written(history.next_write());
    (history.ask_write(0..1, content, false), content)
}

fn read(history: &mut RegisterHistory, content: Content) -> Result<(), Invariant> {
    let ticket = history.ask_read(0..1);
    history.read_done(&ticket, &bytes(content)).map_err(|violation| violation.invariant)
}

#[test]
fn an_acknowledged_write_must_be_read() {
    let mut history = history();
    let (ticket, new) = write(&mut history);
    history.write_done(&ticket, false);
    assert_eq!(read(&mut history, Content::Zero), Err(Invariant::AckedWrite));
    assert_eq!(read(&mut history, new), Ok(()));
    assert_eq!(read(&mut history, Content::Written(77)), Err(Invariant::AckedWrite));
}

#[test]
fn a_write_in_flight_may_be_read_or_not_but_never_unread() {
    let mut history = history();
    let (_ticket, new) = write(&mut history);
    assert_eq!(read(&mut history, Content::Zero), Ok(()));
    assert_eq!(read(&mut history, new), Ok(()));
    assert_eq!(read(&mut history, Content::Zero), Err(Invariant::StableRead));
}

#[test]
fn concurrent_writes_may_land_in_either_order_but_only_one() {
    let mut history = history();
    let (first, a) = write(&mut history);
    let (second, b) = write(&mut history);
    history.write_done(&second, false);
    history.write_done(&first, false);
    assert_eq!(read(&mut history, b), Ok(()));
    assert_eq!(read(&mut history, a), Err(Invariant::StableRead));
    assert_eq!(read(&mut history, b), Ok(()));
}

#[test]
fn a_read_that_began_before_the_acknowledgement_may_still_see_the_old() {
    let mut history = history();
    let early = history.ask_read(0..1);
    let (ticket, _) = write(&mut history);
    history.write_done(&ticket, false);
    assert_eq!(history.read_done(&early, &bytes(Content::Zero)), Ok(()));
}

#[test]
fn a_failed_write_is_seen_or_not_and_replaced_by_the_next() {
    let mut history = history();
    let (failed, a) = write(&mut history);
    history.write_failed(&failed);
    assert_eq!(read(&mut history, Content::Zero), Ok(()));
    assert_eq!(read(&mut history, a), Err(Invariant::StableRead));
    let (ticket, b) = write(&mut history);
    history.write_done(&ticket, false);
    assert_eq!(read(&mut history, b), Ok(()));
}

#[test]
fn a_discard_leaves_zeroes_or_the_old_but_always_the_same() {
    let mut history = history();
    let (ticket, a) = write(&mut history);
    history.write_done(&ticket, false);
    let discard = history.ask_write(0..1, Content::Zero, true);
    history.write_done(&discard, false);
    assert_eq!(read(&mut history, a), Ok(()));
    assert_eq!(read(&mut history, Content::Zero), Err(Invariant::StableRead));
}

#[test]
fn only_a_flush_makes_a_write_survive_a_power_loss() {
    for (fua, flush, survives) in [(false, false, false), (true, false, true), (false, true, true)] {
        let mut history = history();
        let (ticket, new) = write(&mut history);
        history.write_done(&ticket, fua);
        if flush {
            let flush = history.ask_flush();
            history.flush_done(&flush, true);
        }
        assert_eq!(!history.may_survive(0, &bytes(Content::Zero)), survives);
        history.lose_power();
        assert_eq!(read(&mut history, Content::Zero).is_err(), survives);
        if survives {
            assert_eq!(read(&mut history, new), Ok(()));
        }
    }
}

#[test]
fn a_flush_covers_what_was_answered_before_it_was_asked_and_nothing_after_a_failed_one() {
    let mut history = history();
    let flush = history.ask_flush();
    let (ticket, _) = write(&mut history);
    history.write_done(&ticket, false);
    history.flush_done(&flush, true);
    assert!(history.may_survive(0, &bytes(Content::Zero)));
    for success in [false, true] {
        let flush = history.ask_flush();
        history.flush_done(&flush, success);
    }
    assert!(history.may_survive(0, &bytes(Content::Zero)), "a flush was trusted after a failed one");
}

#[test]
fn what_was_read_after_a_power_loss_stays() {
    let mut history = history();
    let (ticket, new) = write(&mut history);
    history.write_done(&ticket, false);
    history.lose_power();
    assert_eq!(read(&mut history, Content::Zero), Ok(()));
    assert_eq!(read(&mut history, new), Err(Invariant::StableRead));
}

#[test]
fn a_write_that_is_asked_again_may_take_effect_twice_until_it_is_answered() {
    let mut history = history();
    let (first, a) = write(&mut history);
    let (_second, b) = write(&mut history);
    assert_eq!(read(&mut history, a), Ok(()));
    history.ask_again(&first);
    assert_eq!(read(&mut history, b), Ok(()));
    history.write_done(&first, false);
    assert_eq!(read(&mut history, a), Ok(()));
    assert_eq!(read(&mut history, b), Err(Invariant::StableRead));
}

#[test]
fn a_lost_flush_and_the_end_of_its_process_excuse_what_was_not_flushed_before_and_nothing_later() {
    let mut history = history();
    let answered = |history: &mut RegisterHistory| {
        let (ticket, content) = write(history);
        history.write_done(&ticket, false);
        content
    };
    let flushed = answered(&mut history);
    let flush = history.ask_flush();
    history.flush_done(&flush, true);
    let doubtful = answered(&mut history);
    history.note_lost();
    // The process that knows of it goes on by what it has.
    assert_eq!(read(&mut history, flushed), Err(Invariant::AckedWrite));
    assert_eq!(read(&mut history, doubtful), Ok(()));
    history.take_back();
    assert_eq!(read(&mut history, Content::Zero), Err(Invariant::AckedWrite));
    assert_eq!(read(&mut history, flushed), Ok(()));
    assert_eq!(read(&mut history, doubtful), Err(Invariant::StableRead));

    let later = answered(&mut history);
    history.take_back();
    assert_eq!(read(&mut history, flushed), Err(Invariant::AckedWrite));
    assert_eq!(read(&mut history, later), Ok(()));
}

#[test]
fn a_flush_that_is_refused_makes_nothing_doubtful() {
    let mut history = history();
    let (ticket, old) = write(&mut history);
    history.write_done(&ticket, false);
    let (ticket, new) = write(&mut history);
    history.write_done(&ticket, false);
    let refused = history.ask_flush();
    history.flush_refused(&refused);
    assert!(history.may_survive(0, &bytes(old)));
    let flush = history.ask_flush();
    history.flush_done(&flush, true);
    assert!(!history.may_survive(0, &bytes(old)));
    assert!(history.may_survive(0, &bytes(new)));
}
