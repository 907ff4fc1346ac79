use std::sync::Arc;

use block::{BlockDevice, Extent, ExtentStatus, Filter, Geometry, IoFuture, MemDevice, MutationKind, ready};
use parking_lot::Mutex;

use super::*;

type Document = String;

/// What becomes of the next writes.
#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Well,
    /// Fails, and nothing was written.
    Lost,
    /// Fails, and so many bytes were written.
    Torn(usize),
    /// Fails, and everything was written.
    Written,
}

#[derive(Clone)]
struct Disk {
    below: Device,
    fate: Arc<Mutex<Fate>>,
    written: Arc<Mutex<Vec<Extent>>>,
}

impl Disk {
    fn new() -> Self {
        let below = Device::new("mem", MemDevice::new(Journal::<Document>::bytes_needed()));
        Self { below, fate: Arc::new(Mutex::new(Fate::Well)), written: Arc::default() }
    }

    fn device(&self) -> Device {
        Device::new("disk", self.clone())
    }

    fn set(&self, fate: Fate) {
        *self.fate.lock() = fate;
    }
}

impl Filter for Disk {
    fn lower(&self) -> &Device {
        &self.below
    }
    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        assert!(mutation.fua, "a store that is not forced");
        self.written.lock().push(mutation.extent());
        let fate = *self.fate.lock();
        let failed = || Err(Error::new(ErrorKind::Io, "the disk says no"));
        Box::pin(async move {
            match (fate, mutation.kind()) {
                (Fate::Well, _) => self.below.write(mutation).await,
                (Fate::Torn(length), MutationKind::Data(data)) => {
                    let part = data.slice(0..length.min(data.len()));
                    self.below.write(Mutation::data(mutation.extent().offset, part)).await?;
                    failed()
                }
                (Fate::Written, _) => {
                    self.below.write(mutation).await?;
                    failed()
                }
                _ => failed(),
            }
        })
    }
}

async fn reopened(disk: &Disk) -> Option<Document> {
    disk.set(Fate::Well);
    let (_, document) = Journal::<Document>::open(disk.device()).await.expect("the journal opens");
    document
}

#[tokio::test]
async fn a_new_journal_is_empty_and_then_gives_what_was_stored_last() {
    let disk = Disk::new();
    let (journal, document) = Journal::<Document>::open(disk.device()).await.expect("opens");
    assert_eq!(document, None);
    for number in 0..10 {
        journal.store(&format!("document {number}")).await.expect("stores");
    }
    assert_eq!(Journal::<Document>::peek(&disk.device()).await.expect("reads").as_deref(), Some("document 9"));
    assert_eq!(reopened(&disk).await.as_deref(), Some("document 9"));
}

#[tokio::test]
async fn a_torn_store_leaves_the_document_before_it_wherever_it_was_torn() {
    // Other bytes everywhere, so that no mixture of two documents is one of them.
    let document = |number: u64| number.to_string().repeat(9000);
    for length in [1, 8, 27, 28, 31, 32, 40, 4095, 4096, 8192, 9000] {
        let disk = Disk::new();
        let (journal, _) = Journal::<Document>::open(disk.device()).await.expect("opens");
        for number in 0..5 {
            journal.store(&document(number)).await.expect("stores");
        }
        disk.set(Fate::Torn(length));
        let failed = journal.store(&document(5)).await;
        assert_eq!(failed.expect_err("a torn store succeeded").kind(), ErrorKind::Io);
        assert!(journal.in_doubt().await);
        assert_eq!(reopened(&disk).await, Some(document(4)), "torn after {length} bytes");
    }
}

#[tokio::test]
async fn after_a_failed_store_the_next_goes_elsewhere_and_settles_it() {
    for fate in [Fate::Lost, Fate::Torn(100), Fate::Written] {
        let disk = Disk::new();
        let (journal, _) = Journal::<Document>::open(disk.device()).await.expect("opens");
        journal.store(&"good".to_owned()).await.expect("stores");
        let good = disk.written.lock().last().copied();
        disk.set(fate);
        let mut before = None;
        for _ in 0..5 {
            journal.store(&"doubtful".to_owned()).await.expect_err("the disk says no");
            let slot = disk.written.lock().last().copied();
            assert!(slot != good, "the last good document was overwritten");
            assert!(slot != before, "a store went over the one in doubt");
            before = slot;
        }
        disk.set(Fate::Well);
        journal.store(&"settled".to_owned()).await.expect("stores");
        assert!(!journal.in_doubt().await);
        assert_eq!(reopened(&disk).await.as_deref(), Some("settled"));
    }
}

#[tokio::test]
async fn what_is_in_doubt_is_stored_again_before_anybody_acts_upon_it() {
    let disk = Disk::new();
    let (journal, _) = Journal::<Document>::open(disk.device()).await.expect("opens");
    journal.store(&"before".to_owned()).await.expect("stores");
    disk.set(Fate::Written);
    journal.store(&"after".to_owned()).await.expect_err("the disk says no");
    disk.set(Fate::Lost);
    assert!(Journal::<Document>::open(disk.device()).await.is_err(), "opened without a durable document");
    let stores = disk.written.lock().len();
    assert_eq!(reopened(&disk).await.as_deref(), Some("after"));
    assert_eq!(disk.written.lock().len(), stores + 1);
}

#[tokio::test]
async fn a_stale_slot_and_a_damaged_one_do_not_win() {
    let disk = Disk::new();
    let (journal, _) = Journal::<Document>::open(disk.device()).await.expect("opens");
    for number in 0..3 {
        journal.store(&format!("document {number}")).await.expect("stores");
    }
    // Damage the newest: the one before it counts, and the oldest does not.
    let newest = disk.written.lock().last().copied().expect("stores were written");
    let byte = Mutation::data(newest.offset + Bytes(40), block::Data::copy_of(b"!"));
    disk.below.write(byte).await.expect("memory takes it");
    assert_eq!(reopened(&disk).await.as_deref(), Some("document 1"));
}

#[tokio::test]
async fn garbage_everywhere_is_damage_and_not_an_empty_journal() {
    let disk = Disk::new();
    let size = disk.below.size().as_usize();
    let garbage: Vec<u8> = (0..size).map(|at| (at * 31 % 251) as u8).collect();
    disk.below.write(Mutation::data(Bytes(0), block::Data::copy_of(&garbage))).await.expect("memory takes it");
    let error = Journal::<Document>::open(disk.device()).await.expect_err("garbage was opened");
    assert_eq!(error.kind(), ErrorKind::Corrupt);
}

#[tokio::test]
async fn a_newer_layout_is_refused_and_not_taken_for_damage() {
    let disk = Disk::new();
    let (journal, _) = Journal::<Document>::open(disk.device()).await.expect("opens");
    journal.store(&"document".to_owned()).await.expect("stores");
    let mut slot = disk.below.read(Bytes(0), Buffer::unpooled(4096)).await.expect("memory answers");
    slot[8..12].copy_from_slice(&2_u32.to_le_bytes());
    let length = u32::from_le_bytes(slot[12..16].try_into().expect("four bytes")) as usize;
    let crc = checksum(&slot[..HEADER_BYTES], &slot[HEADER_BYTES..HEADER_BYTES + length]);
    slot[CRC_AT].copy_from_slice(&crc.to_le_bytes());
    disk.below.write(Mutation::data(Bytes(0), slot.freeze())).await.expect("memory takes it");
    let error = Journal::<Document>::open(disk.device()).await.expect_err("a newer layout was opened");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}

#[tokio::test]
async fn a_document_too_large_is_refused_and_the_one_before_stays() {
    let disk = Disk::new();
    let (journal, _) = Journal::<Document>::open(disk.device()).await.expect("opens");
    journal.store(&"small".to_owned()).await.expect("stores");
    let error = journal.store(&"x".repeat(70_000)).await.expect_err("it does not fit");
    assert_eq!(error.kind(), ErrorKind::TooLarge);
    assert!(!journal.in_doubt().await);
    assert_eq!(reopened(&disk).await.as_deref(), Some("small"));
}

/// Never answers.
struct Hung;

impl BlockDevice for Hung {
    fn geometry(&self) -> Geometry {
        Geometry::of_size(Journal::<Document>::bytes_needed())
    }
    fn read(&self, _: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        ready(Ok(buffer))
    }
    fn write(&self, _: Mutation) -> IoFuture<'_, ()> {
        Box::pin(std::future::pending())
    }
    fn flush(&self) -> IoFuture<'_, ()> {
        ready(Ok(()))
    }
    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        ready(Ok(vec![ExtentStatus { extent, state: block::ExtentState::Data }]))
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_was_given_up_is_in_doubt() {
    let (journal, _) = Journal::<Document>::open(Device::new("hung", Hung)).await.expect("opens");
    let document = "document".to_owned();
    let store = tokio::time::timeout(std::time::Duration::from_secs(1), journal.store(&document));
    assert!(store.await.is_err());
    assert!(journal.in_doubt().await);
}
