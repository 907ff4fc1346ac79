//! That the simulated disk behaves as it says.

use super::*;
use crate::clock;
use crate::log::Keep;
use block::{Buffer, Data};

const SIZE: Bytes = Bytes::kib(64);

fn disk(world: &World) -> Disk {
    Disk::new(world, "disk", SIZE, 1, Timing::FLASH)
}

fn write_of(offset: u64, byte: u8, length: usize) -> Mutation {
    Mutation::data(Bytes(offset), Data::copy_of(&vec![byte; length]))
}

#[test]
fn what_was_written_is_read_and_takes_its_time() {
    clock::run(async {
        let world = World::new(1, Keep::Tail);
        let device = disk(&world).open(0).await;
        device.write(write_of(100, 7, 5000)).await.expect("no faults");
        let read = device.read(Bytes(99), Buffer::unpooled(5002)).await.expect("no faults");
        assert_eq!((read[0], read[1], read[5000], read[5001]), (0, 7, 7, 0));
        let took = world.now().0;
        assert!((160..400).contains(&took.as_micros()), "two requests took {took:?}");
        device.write(Mutation::zeroes(Extent::whole(SIZE), true)).await.expect("no faults");
        let pieces = device.extents(Extent::whole(SIZE)).await.expect("no faults");
        assert_eq!(pieces[0].state, block::ExtentState::Hole);
    });
}

#[test]
fn more_requests_than_channels_queue() {
    clock::run(async {
        let world = World::new(1, Keep::Tail);
        let device = disk(&world).open(0).await;
        let writes = (0..64).map(|_| device.write(write_of(0, 1, 512)));
        futures::future::join_all(writes).await.into_iter().for_each(|outcome| outcome.expect("no faults"));
        assert!(world.now().0 >= Duration::from_micros(8 * 80), "64 requests on 8 channels took {:?}", world.now());
    });
}

#[test]
fn a_dropped_write_may_land_late_and_opening_waits_for_it() {
    let outcomes = (0..50).map(|seed| {
        clock::run(async {
            let world = World::new(seed, Keep::Tail);
            let disk = disk(&world);
            let device = disk.open(0).await;
            drop(device.write(write_of(0, 9, 512)));
            assert_eq!(disk.in_flight(), 0, "a write that nobody polled was submitted");
            let writing = tokio::spawn({
                let device = device.clone();
                async move { device.write(write_of(0, 9, 512)).await }
            });
            tokio::task::yield_now().await;
            assert_eq!(disk.in_flight(), 1);
            writing.abort();
            let _ = writing.await;
            let before = disk.inspect(|bytes| bytes[0]);
            let _ = disk.open(0).await;
            (before, disk.inspect(|bytes| bytes[0]), disk.in_flight())
        })
    });
    let outcomes: std::collections::BTreeSet<_> = outcomes.collect();
    assert!(outcomes.contains(&(0, 0, 0)), "never lost: {outcomes:?}");
    assert!(outcomes.contains(&(0, 9, 0)), "never late: {outcomes:?}");
}

#[test]
fn faults_fail_requests_and_are_counted() {
    clock::run(async {
        let world = World::new(1, Keep::Tail);
        let disk = disk(&world);
        let device = disk.open(0).await;
        disk.set_space(Some(Bytes(4096)));
        device.write(write_of(0, 1, 4096)).await.expect("there is space for one block");
        let full = device.write(write_of(4096, 1, 1)).await.expect_err("there is none for another");
        assert_eq!(full.kind(), ErrorKind::NoSpace);
        device.write(write_of(512, 2, 512)).await.expect("an allocated block needs no space");
        disk.set_space(None);
        disk.set_faults(Faults { read_errors: 1.0, flush_errors: 1.0, lost_writes: 1.0, ..Faults::default() });
        assert_eq!(device.flush().await.expect_err("injected").kind(), ErrorKind::Io);
        assert_eq!(device.read(Bytes(0), Buffer::unpooled(1)).await.expect_err("injected").kind(), ErrorKind::Io);
        device.write(write_of(0, 3, 1)).await.expect("a lost write is answered");
        assert_eq!(disk.inspect(|bytes| bytes[0]), 1);
        let classes: Vec<_> = world.faults().into_keys().collect();
        assert_eq!(classes, ["flush-error", "lost-write", "no-space", "read-error"]);
        disk.set_lost(true);
        assert_eq!(device.write(write_of(0, 3, 1)).await.expect_err("gone").kind(), ErrorKind::Io);
        disk.revoke("it is fenced");
        let _ = device.write(write_of(0, 3, 1)).await;
        assert_eq!(world.violation().expect("a fence holds").invariant, Invariant::OneWriter);
    });
}
