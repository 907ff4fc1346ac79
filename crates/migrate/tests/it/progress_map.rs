//! What a progress map says after a death of the process, over more than one death, and with more than one page.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{CHUNK, Disk, Guest, World, lost, map_device, map_of_pages, options, switched, until};
use block::{BufferPool, Bytes, Data, Device, ErrorKind, Mutation};
use migrate::{Control, DeviceDigests, MigrationContext, MoveOptions, ProgressMap, Strategy, Verify};

/// Three extents of the activity log.
const SIZE: u64 = 12 << 20;
/// Long enough for the map to follow twice.
const TWO_LOOKS: Duration = Duration::from_secs(12);
/// The strategies that copy into a map. (Snapshots fold into the base what the guest writes.)
const STRATEGIES: [Strategy; 6] = [
    Strategy::Mirror,
    Strategy::Dbt,
    Strategy::IncrementalDbt,
    Strategy::Auto,
    Strategy::MirrorAsync,
    Strategy::MirrorPaper,
];

/// A life of the process.
struct ProcessRun {
    world: World,
    control: Control,
    work: tokio::task::JoinHandle<migrate::Outcome>,
}

impl ProcessRun {
    async fn begin(world: World, map: &Device, page_chunks: u64, options: MoveOptions) -> Self {
        let progress_map = Some(map_of_pages(map, SIZE, 1, page_chunks).await);
        let context = MigrationContext { progress_map, target_is_fresh: false, ..world.context() };
        let (control, work) = world.start_with(context, options).await;
        Self { world, control, work }
    }

    fn guest(&self) -> Guest {
        self.world.lane()
    }

    /// Gives the disks to the next one.
    fn die(self) -> World {
        self.work.abort();
        self.world.source.reboot();
        self.world.target.reboot();
        World::over(self.world.env.clone(), self.world.source.clone(), self.world.target.clone())
    }
}

async fn write(guest: &Guest, chunk: u64, byte: u8) {
    let write = Mutation::data(Bytes(chunk * CHUNK), Data::copy_of(&[byte; CHUNK as usize]));
    guest.device.write(write).await.expect("the source takes it");
}

/// The first and the last chunk of pages, and others, in two extents of the activity log.
fn places(page_chunks: u64) -> Vec<u64> {
    let page = page_chunks.clamp(2, 512);
    [1, page - 1, page, page + 1, 2 * page - 1, 2 * page, 700, 1023, 1024, 1023 + page, 1900, 2047].to_vec()
}

#[tokio::test(start_paused = true)]
async fn what_the_guest_writes_between_two_deaths_is_copied_again_with_every_strategy_and_page() {
    for strategy in STRATEGIES {
        for page_chunks in [1, 2, 7, 64, 500, 1024, 1500, ProgressMap::PAGE_CHUNKS] {
            let any = MoveOptions { strategy, verify: Verify::Off, ..options() };
            let (map, world) = (map_device(SIZE), World::new(page_chunks, SIZE).await);
            // Nearly everything is copied and on record; then the guest writes, and the process dies at once.
            let first =
                ProcessRun::begin(world, &map, page_chunks, MoveOptions { bandwidth: Some(5_000_000), ..any.clone() });
            let first = first.await;
            until(&first.control, |progress| progress.bytes_done > 10 << 20).await;
            first.control.pause();
            first.world.env.sleep(TWO_LOOKS).await;
            for chunk in places(page_chunks) {
                write(&first.guest(), chunk, 0xa1).await;
            }
            // Some of it is copied again; the guest writes the same and its neighbours, and the map follows.
            let second = MoveOptions { bandwidth: Some(200_000), ..any.clone() };
            let second = ProcessRun::begin(first.die(), &map, page_chunks, second).await;
            until(&second.control, |progress| progress.bytes_copied + progress.bytes_zero > 300_000).await;
            second.control.pause();
            second.world.env.sleep(TWO_LOOKS).await;
            write(&second.guest(), 3, 0xa2).await;
            for chunk in places(page_chunks) {
                write(&second.guest(), chunk, 0xa3).await;
            }
            second.world.env.sleep(TWO_LOOKS).await;
            // And it dies once more.
            let third = ProcessRun::begin(second.die(), &map, page_chunks, any).await;
            switched(third.work).await;
            let is_equal = *third.world.journal.equal.lock();
            assert_eq!(is_equal, Some(true), "{strategy} lost a write, with pages of {page_chunks} chunks");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_an_earlier_session_had_and_the_map_has_settled_is_resumed() {
    let page_chunks = 64;
    let (map, world) = (map_device(SIZE), World::new(5, SIZE).await);
    let fast = MoveOptions { bandwidth: Some(5_000_000), verify: Verify::Off, ..options() };
    let first = ProcessRun::begin(world, &map, page_chunks, fast.clone()).await;
    until(&first.control, |progress| progress.bytes_done > 10 << 20).await;
    first.control.pause();
    first.world.env.sleep(TWO_LOOKS).await;
    write(&first.guest(), 1500, 0xa1).await;
    let second =
        ProcessRun::begin(first.die(), &map, page_chunks, MoveOptions { bandwidth: Some(2_000_000), ..fast.clone() });
    let second = second.await;
    until(&second.control, |progress| progress.bytes_done > 11 << 20).await;
    second.control.pause();
    second.world.env.sleep(TWO_LOOKS).await;
    // The extent that was active at the first death is settled: nobody writes there any more.
    let third = ProcessRun::begin(second.die(), &map, page_chunks, fast).await;
    let report = switched(third.work).await;
    third.world.assert_equal_at_commit();
    assert!(report.bytes_resumed >= 11 << 20, "{} of 12 MiB were resumed", Bytes(report.bytes_resumed));
}

#[tokio::test(start_paused = true)]
async fn a_write_to_what_another_target_has_got_again_is_on_record_before_it_is_issued() {
    for strategy in [Strategy::Dbt, Strategy::IncrementalDbt, Strategy::Mirror] {
        let any = MoveOptions { strategy, verify: Verify::Off, ..options() };
        let (map, world) = (map_device(SIZE), World::new(3, SIZE).await);
        let slow = MoveOptions { bandwidth: Some(200_000), ..any.clone() };
        let first = ProcessRun::begin(world, &map, ProgressMap::PAGE_CHUNKS, slow).await;
        until(&first.control, |progress| progress.bytes_done > 500_000).await;
        write(&first.guest(), 0, 0xa1).await;
        first.world.target.manners.lock().kind = Some(ErrorKind::Disconnected);
        first.world.target.manners.lock().writes_left = Some(0);
        assert!(lost(&first.control).await, "{strategy}");
        // A write that is under way keeps the extent in the activity log.
        let held = tokio::spawn({
            let guest = first.guest();
            first.world.source.manners.lock().hung = true;
            async move { write(&guest, 1000, 0xa2).await }
        });
        first.world.env.sleep(Duration::from_millis(100)).await;
        let other = Disk::new(&first.world.env, Bytes(SIZE));
        first.control.resume_with(other.device("other"), None);
        first.world.env.sleep(TWO_LOOKS).await;
        first.world.source.mend();
        write(&first.guest(), 0, 0xa3).await;
        held.abort();
        let dead = first.die();
        let world = World::over(dead.env.clone(), dead.source.clone(), other);
        let second = ProcessRun::begin(world, &map, ProgressMap::PAGE_CHUNKS, any).await;
        let report = switched(second.work).await;
        assert_eq!(*second.world.journal.equal.lock(), Some(true), "{strategy} lost a write");
        assert!(report.bytes_copied + report.bytes_zero >= SIZE / 3, "{report:?}");
    }
}

/// Somebody has worked on source or target while no process ran. What the map says of chunks is compared before it counts.
#[tokio::test(start_paused = true)]
async fn what_was_changed_while_no_process_ran_is_found_and_copied_again_with_every_strategy() {
    for strategy in STRATEGIES {
        for changes_source in [true, false] {
            let page_chunks = 64;
            let (map, world) = (map_device(SIZE), World::new(7, SIZE).await);
            let any = MoveOptions { strategy, verify: Verify::Off, ..options() };
            let first = MoveOptions { bandwidth: Some(5_000_000), ..any.clone() };
            let first = ProcessRun::begin(world, &map, page_chunks, first).await;
            until(&first.control, |progress| progress.bytes_done > 10 << 20).await;
            first.control.pause();
            first.world.env.sleep(TWO_LOOKS).await;
            let world = first.die();
            let changed = if changes_source { &world.source } else { &world.target };
            changed.put(5 * CHUNK, &[0x5a; CHUNK as usize]).await;
            let progress_map = map_of_pages(&map, SIZE, 1, page_chunks).await;
            let digests = DeviceDigests::new(world.target.device("its digests"), BufferPool::new(Bytes::mib(8)));
            let progress_map = Some(progress_map.compared_by(Arc::new(digests)));
            let context = MigrationContext { progress_map, target_is_fresh: false, ..world.context() };
            let (_, work) = world.start_with(context, any).await;
            let report = switched(work).await;
            let is_equal = *world.journal.equal.lock();
            assert_eq!(is_equal, Some(true), "{strategy} believed the map");
            assert!(report.bytes_rechecked >= 9 << 20, "{} were compared", Bytes(report.bytes_rechecked));
            assert!(report.bytes_copied < 6 << 20 || strategy == Strategy::MirrorPaper, "{strategy} copied all again");
        }
    }
}
