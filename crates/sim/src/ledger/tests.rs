//! The model judged by hand-made histories.

use super::*;

fn ledger() -> Ledger {
    Ledger::new(1024, |_| Content::Zero)
}

fn bytes(content: Content) -> Vec<u8> {
    let mut bytes = vec![0; 512];
    content.fill(0, &mut bytes);
    bytes
}

fn write(ledger: &mut Ledger) -> (Ticket, Content) {
    let content = Content::Written(ledger.next_write());
    (ledger.ask_write(0..1, content, false), content)
}

fn read(ledger: &mut Ledger, content: Content) -> Result<(), Invariant> {
    let ticket = ledger.ask_read(0..1);
    ledger.read_done(&ticket, &bytes(content)).map_err(|violation| violation.invariant)
}

#[test]
fn an_acknowledged_write_must_be_read() {
    let mut ledger = ledger();
    let (ticket, new) = write(&mut ledger);
    ledger.write_done(&ticket, false);
    assert_eq!(read(&mut ledger, Content::Zero), Err(Invariant::AckedWrite));
    assert_eq!(read(&mut ledger, new), Ok(()));
    assert_eq!(read(&mut ledger, Content::Written(77)), Err(Invariant::AckedWrite));
}

#[test]
fn a_write_in_flight_may_be_read_or_not_but_never_unread() {
    let mut ledger = ledger();
    let (_ticket, new) = write(&mut ledger);
    assert_eq!(read(&mut ledger, Content::Zero), Ok(()));
    assert_eq!(read(&mut ledger, new), Ok(()));
    assert_eq!(read(&mut ledger, Content::Zero), Err(Invariant::StableRead));
}

#[test]
fn concurrent_writes_may_land_in_either_order_but_only_one() {
    let mut ledger = ledger();
    let (first, a) = write(&mut ledger);
    let (second, b) = write(&mut ledger);
    ledger.write_done(&second, false);
    ledger.write_done(&first, false);
    assert_eq!(read(&mut ledger, b), Ok(()));
    assert_eq!(read(&mut ledger, a), Err(Invariant::StableRead));
    assert_eq!(read(&mut ledger, b), Ok(()));
}

#[test]
fn a_read_that_began_before_the_acknowledgement_may_still_see_the_old() {
    let mut ledger = ledger();
    let early = ledger.ask_read(0..1);
    let (ticket, _) = write(&mut ledger);
    ledger.write_done(&ticket, false);
    assert_eq!(ledger.read_done(&early, &bytes(Content::Zero)), Ok(()));
}

#[test]
fn a_failed_write_is_seen_or_not_and_replaced_by_the_next() {
    let mut ledger = ledger();
    let (failed, a) = write(&mut ledger);
    ledger.write_failed(&failed);
    assert_eq!(read(&mut ledger, Content::Zero), Ok(()));
    assert_eq!(read(&mut ledger, a), Err(Invariant::StableRead));
    let (ticket, b) = write(&mut ledger);
    ledger.write_done(&ticket, false);
    assert_eq!(read(&mut ledger, b), Ok(()));
}

#[test]
fn a_discard_leaves_zeroes_or_the_old_but_always_the_same() {
    let mut ledger = ledger();
    let (ticket, a) = write(&mut ledger);
    ledger.write_done(&ticket, false);
    let discard = ledger.ask_write(0..1, Content::Zero, true);
    ledger.write_done(&discard, false);
    assert_eq!(read(&mut ledger, a), Ok(()));
    assert_eq!(read(&mut ledger, Content::Zero), Err(Invariant::StableRead));
}

#[test]
fn only_a_flush_makes_a_write_survive_a_power_loss() {
    for (fua, flush, survives) in [(false, false, false), (true, false, true), (false, true, true)] {
        let mut ledger = ledger();
        let (ticket, new) = write(&mut ledger);
        ledger.write_done(&ticket, fua);
        if flush {
            let flush = ledger.ask_flush();
            ledger.flush_done(&flush, true);
        }
        assert_eq!(!ledger.may_survive(0, &bytes(Content::Zero)), survives);
        ledger.lose_power();
        assert_eq!(read(&mut ledger, Content::Zero).is_err(), survives);
        if survives {
            assert_eq!(read(&mut ledger, new), Ok(()));
        }
    }
}

#[test]
fn a_flush_covers_what_was_answered_before_it_was_asked_and_nothing_after_a_failed_one() {
    let mut ledger = ledger();
    let flush = ledger.ask_flush();
    let (ticket, _) = write(&mut ledger);
    ledger.write_done(&ticket, false);
    ledger.flush_done(&flush, true);
    assert!(ledger.may_survive(0, &bytes(Content::Zero)));
    for success in [false, true] {
        let flush = ledger.ask_flush();
        ledger.flush_done(&flush, success);
    }
    assert!(ledger.may_survive(0, &bytes(Content::Zero)), "a flush was trusted after a failed one");
}

#[test]
fn what_was_read_after_a_power_loss_stays() {
    let mut ledger = ledger();
    let (ticket, new) = write(&mut ledger);
    ledger.write_done(&ticket, false);
    ledger.lose_power();
    assert_eq!(read(&mut ledger, Content::Zero), Ok(()));
    assert_eq!(read(&mut ledger, new), Err(Invariant::StableRead));
}

#[test]
fn a_write_that_is_asked_again_may_take_effect_twice_until_it_is_answered() {
    let mut ledger = ledger();
    let (first, a) = write(&mut ledger);
    let (_second, b) = write(&mut ledger);
    assert_eq!(read(&mut ledger, a), Ok(()));
    ledger.ask_again(&first);
    assert_eq!(read(&mut ledger, b), Ok(()));
    ledger.write_done(&first, false);
    assert_eq!(read(&mut ledger, a), Ok(()));
    assert_eq!(read(&mut ledger, b), Err(Invariant::StableRead));
}
