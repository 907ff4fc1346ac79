//! The whole engine over connections in memory: a guest writes while it is copied, streams are cut, and rules are broken.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use env::EnvRef;
use env::testing::PausedEnv;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use transhume_memory::{
    BoxTransport, Compression, DirtyMap, EmulatedMemory, Error, ErrorKind, GuestMemory, Lane, PAGE_BYTES, PageRun,
    Precopy, PrecopyOptions, RateLimit, Receiver, Region, StopReason, StopRules, Unpaced,
};

const SESSION: [u8; 16] = [7; 16];

/// A generator good enough for tests.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn fill(&mut self, memory: &EmulatedMemory, region: usize, page: u64) {
        let mut bytes = vec![0; PAGE_BYTES as usize];
        match self.next() % 4 {
            0 => {}
            1 => bytes.fill(self.next() as u8),
            _ => bytes.iter_mut().for_each(|byte| *byte = self.next() as u8),
        }
        memory.store(region, page * PAGE_BYTES, &bytes);
    }
}

struct Place {
    env: EnvRef,
    source: Arc<EmulatedMemory>,
    target: Arc<EmulatedMemory>,
    receiver: Arc<Receiver>,
}

impl Place {
    fn new(seed: u64, pages: &[u64]) -> Self {
        let region = |(number, pages): (usize, &u64)| Region {
            name: format!("ram{number}"),
            bytes: pages * PAGE_BYTES,
            page_bytes: PAGE_BYTES,
        };
        let regions: Vec<_> = pages.iter().enumerate().map(region).collect();
        let (source, target) = (Arc::new(EmulatedMemory::new(regions.clone())), Arc::new(EmulatedMemory::new(regions)));
        let mut draw = Draw(seed);
        for (region, pages) in pages.iter().enumerate() {
            for page in 0..*pages {
                draw.fill(&source, region, page);
                // What a target has before is no matter.
                draw.fill(&target, region, page);
            }
        }
        let receiver = Arc::new(Receiver::new(target.clone(), SESSION));
        Self { env: PausedEnv::shared(seed), source, target, receiver }
    }

    fn precopy(&self, options: PrecopyOptions) -> Precopy {
        Precopy::new(self.env.clone(), self.source.clone(), options, (SESSION, Arc::new(Unpaced))).expect("begun")
    }

    /// Connections to the receiver, each through `link`.
    fn lanes(&self, count: usize, link: impl Fn(usize, BoxTransport) -> BoxTransport) -> Vec<Lane> {
        let lane = |number| {
            let (near, far) = tokio::io::duplex(64 << 10);
            let receiver = Arc::clone(&self.receiver);
            self.env.spawn(Box::pin(async move {
                // The sender hears of it.
                let _ = receiver.serve(Box::new(far)).await;
            }));
            Lane { transport: link(number, Box::new(near)), env: self.env.clone() }
        };
        (0..count).map(lane).collect()
    }

    /// A guest that writes to a part of its memory until it is told to stop.
    fn write_until(
        &self,
        stop: &Arc<AtomicBool>,
        (seed, pages, rest): (u64, u64, Duration),
    ) -> tokio::task::JoinHandle<()> {
        let (env, memory, stop) = (self.env.clone(), self.source.clone(), Arc::clone(stop));
        tokio::spawn(async move {
            let mut draw = Draw(seed);
            while !stop.load(Ordering::Relaxed) {
                for _ in 0..4 {
                    let page = draw.next() % pages;
                    match draw.next() % 3 {
                        0 => draw.fill(&memory, 0, page),
                        _ => memory.store(0, page * PAGE_BYTES + draw.next() % 4000, &draw.next().to_le_bytes()),
                    }
                }
                env.sleep(rest).await;
            }
        })
    }

    fn assert_equal(&self) {
        assert_eq!(self.source.first_difference(&self.target), None);
    }
}

fn direct(_: usize, transport: BoxTransport) -> BoxTransport {
    transport
}

/// Carries so many bytes from the sender, and then nothing more.
fn cut_after(bytes: u64) -> impl Fn(usize, BoxTransport) -> BoxTransport {
    move |number, far| {
        let (near, other) = tokio::io::duplex(64 << 10);
        let bytes = bytes * (1 + number as u64);
        tokio::spawn(async move {
            let (mut from, mut to) = tokio::io::split(other);
            let (mut back, mut on) = tokio::io::split(far);
            let forth = async {
                let _ = tokio::io::copy(&mut (&mut from).take(bytes), &mut on).await;
                let _ = on.shutdown().await;
            };
            let answers = async {
                let _ = tokio::io::copy(&mut back, &mut to).await;
            };
            tokio::join!(forth, answers);
        });
        Box::new(near)
    }
}

#[tokio::test(start_paused = true)]
async fn a_memory_arrives_whole_while_its_guest_writes() {
    for (seed, streams) in [(1, 1), (2, 2), (3, 4), (4, 8)] {
        let place = Place::new(seed, &[700, 3, 200]);
        let stop = Arc::new(AtomicBool::new(false));
        let guest = place.write_until(&stop, (seed, 700, Duration::from_millis(1)));
        let compression = [Compression::Off, Compression::Lz4, Compression::Auto][seed as usize % 3];
        let mut precopy = place.precopy(PrecopyOptions { compression, ..PrecopyOptions::default() });
        precopy.connect(place.lanes(streams, direct)).await.expect("connected");
        assert!(!place.receiver.is_complete());
        let reason = precopy.converge().await.expect("converged");
        stop.store(true, Ordering::Relaxed);
        guest.await.expect("the guest ends");
        precopy.finish().await.expect("finished");
        precopy.verify_clean().expect("nothing was written since");
        assert!(place.receiver.is_complete());
        place.assert_equal();
        let progress = precopy.watch()();
        assert!(progress.left_pages == 0 && progress.wire_bytes > 0, "{reason:?} {progress:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_dirty_log_that_forgets_is_caught() {
    let place = Place::new(5, &[600]);
    let stop = Arc::new(AtomicBool::new(false));
    let mut precopy = place.precopy(PrecopyOptions::default());
    place.source.forget_every(50);
    let guest = place.write_until(&stop, (5, 600, Duration::from_millis(1)));
    precopy.connect(place.lanes(2, direct)).await.expect("connected");
    precopy.keep_up(|| place.env.now().0 > Duration::from_millis(500)).await.expect("sent");
    stop.store(true, Ordering::Relaxed);
    guest.await.expect("the guest ends");
    precopy.finish().await.expect("finished");
    assert_ne!(place.source.first_difference(&place.target), None, "the comparison sees what the log has missed");
}

#[tokio::test(start_paused = true)]
async fn what_is_written_after_the_end_fails_the_copy() {
    let place = Place::new(6, &[100]);
    let mut precopy = place.precopy(PrecopyOptions::default());
    precopy.connect(place.lanes(2, direct)).await.expect("connected");
    precopy.converge().await.expect("converged");
    precopy.finish().await.expect("finished");
    place.source.store(0, 42 * PAGE_BYTES, &[1]);
    let error = precopy.verify_clean().expect_err("it was written to");
    assert_eq!(error.kind(), ErrorKind::DirtyAfterStop);
    assert!(error.to_string().contains("the first is 42 of ram0"), "{error}");
    // It can be sent all the same, by whoever knows that the guest has not run there.
    precopy.finish().await.expect("finished");
    precopy.verify_clean().expect("clean");
    place.assert_equal();
}

#[tokio::test(start_paused = true)]
async fn streams_that_are_cut_anywhere_lose_nothing() {
    let mut cuts = 0;
    for seed in 0..60 {
        let place = Place::new(100 + seed, &[400, 150]);
        let stop = Arc::new(AtomicBool::new(false));
        let guest = place.write_until(&stop, (seed, 400, Duration::from_millis(2)));
        let mut precopy = place.precopy(PrecopyOptions::default());
        let streams = 1 + seed as usize % 3;
        precopy.connect(place.lanes(streams, cut_after(3000 + seed * 40_000))).await.expect("connected");
        let sent: Result<(), Error> = async {
            precopy.converge().await?;
            precopy.keep_up(|| place.env.now().0 > Duration::from_millis(300)).await
        }
        .await;
        if let Err(error) = sent {
            assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
            cuts += 1;
            precopy.connect(place.lanes(streams, direct)).await.expect("connected again");
            precopy.converge().await.expect("converged");
        }
        stop.store(true, Ordering::Relaxed);
        guest.await.expect("the guest ends");
        if let Err(error) = precopy.finish().await {
            assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
            precopy.connect(place.lanes(streams, direct)).await.expect("connected again");
            precopy.finish().await.expect("finished");
        }
        precopy.verify_clean().expect("clean");
        assert!(place.receiver.is_complete());
        place.assert_equal();
    }
    assert!(cuts > 30, "{cuts} cuts");
}

#[tokio::test(start_paused = true)]
async fn a_stream_of_an_older_generation_is_not_taken() {
    let place = Place::new(8, &[100]);
    let mut precopy = place.precopy(PrecopyOptions::default());
    precopy.connect(place.lanes(1, direct)).await.expect("connected");
    precopy.connect(place.lanes(2, direct)).await.expect("connected again");
    let mut older = place.precopy(PrecopyOptions::default());
    let error = older.connect(place.lanes(1, direct)).await.expect_err("it is older");
    assert_eq!(error.kind(), ErrorKind::Mismatch);
    precopy.converge().await.expect("converged");
    precopy.finish().await.expect("finished");
    place.assert_equal();
}

#[tokio::test(start_paused = true)]
async fn another_memory_and_another_session_are_refused() {
    let place = Place::new(9, &[100]);
    let other = Arc::new(EmulatedMemory::with_pages(100));
    let begin = |memory, session| {
        Precopy::new(place.env.clone(), memory, PrecopyOptions::default(), (session, Arc::new(Unpaced))).expect("begun")
    };
    for mut precopy in [begin(other, SESSION), begin(place.source.clone(), [8; 16])] {
        let error = precopy.connect(place.lanes(1, direct)).await.expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Mismatch);
    }
}

#[tokio::test(start_paused = true)]
async fn hot_pages_wait_and_what_is_the_same_is_not_sent() {
    let place = Place::new(10, &[2000]);
    let stop = Arc::new(AtomicBool::new(false));
    // 16 pages are written all the time, so that they are sent in vain.
    let guest = place.write_until(&stop, (10, 16, Duration::from_millis(1)));
    let mut precopy = place.precopy(PrecopyOptions { compression: Compression::Lz4, ..PrecopyOptions::default() });
    precopy.connect(place.lanes(2, direct)).await.expect("connected");
    precopy.converge().await.expect("converged");
    precopy.keep_up(|| place.env.now().0 > Duration::from_millis(500)).await.expect("kept up");
    let progress = precopy.watch()();
    assert!(progress.delta_pages + progress.deferred_pages > 0, "{progress:?}");
    place.source.store(0, 1999 * PAGE_BYTES, &[]);
    stop.store(true, Ordering::Relaxed);
    guest.await.expect("the guest ends");
    precopy.finish().await.expect("finished");
    place.assert_equal();
}

#[tokio::test(start_paused = true)]
async fn free_pages_are_left_out_if_the_report_is_not_old() {
    let place = Place::new(11, &[1000]);
    let mut precopy = place.precopy(PrecopyOptions::default());
    let since = precopy.scans();
    let free = [PageRun { region: 0, page: 100, count: 500 }];
    assert!(precopy.report_free(since, &free));
    precopy.connect(place.lanes(1, direct)).await.expect("connected");
    // One of them is used again.
    place.source.store(0, 150 * PAGE_BYTES, &[5; 4096]);
    precopy.converge().await.expect("converged");
    assert!(!precopy.report_free(since, &free), "it is older than the last scan");
    precopy.finish().await.expect("finished");
    let progress = precopy.watch()();
    assert!(progress.zero_pages + progress.data_pages <= 520, "{progress:?}");
    let mut page = [0; 4096];
    place.target.load(0, 150 * PAGE_BYTES, &mut page);
    assert_eq!(page, [5; 4096]);
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_is_faster_than_its_link_is_told() {
    let place = Place::new(12, &[4000]);
    let stop = Arc::new(AtomicBool::new(false));
    let guest = place.write_until(&stop, (12, 4000, Duration::from_micros(1)));
    let rules = StopRules { downtime_limit: Duration::from_millis(10), ..StopRules::default() };
    let options = PrecopyOptions { rules, compression: Compression::Off, ..PrecopyOptions::default() };
    let pace = Arc::new(RateLimit::new(place.env.clone(), Some(8 << 20)));
    let mut precopy =
        Precopy::new(place.env.clone(), place.source.clone(), options, (SESSION, pace.clone())).expect("begun");
    precopy.connect(place.lanes(2, direct)).await.expect("connected");
    assert_eq!(precopy.converge().await.expect("told"), StopReason::NoLess);
    // With more of the link it is fast enough.
    pace.set_rate(None);
    stop.store(true, Ordering::Relaxed);
    guest.await.expect("the guest ends");
    precopy.finish().await.expect("finished");
    place.assert_equal();
}

#[tokio::test(start_paused = true)]
async fn a_copy_that_is_left_in_the_middle_can_be_taken_up() {
    let place = Place::new(13, &[3000]);
    let pace = Arc::new(RateLimit::new(place.env.clone(), Some(1 << 20)));
    let options = PrecopyOptions::default();
    let mut precopy =
        Precopy::new(place.env.clone(), place.source.clone(), options, (SESSION, pace.clone())).expect("begun");
    precopy.connect(place.lanes(2, direct)).await.expect("connected");
    let left = env::timeout(&*place.env, Duration::from_secs(1), precopy.converge()).await;
    assert!(left.is_none(), "it takes longer");
    pace.set_rate(None);
    precopy.connect(place.lanes(3, direct)).await.expect("connected again");
    precopy.converge().await.expect("converged");
    precopy.finish().await.expect("finished");
    place.assert_equal();
}

#[tokio::test(start_paused = true)]
async fn the_engine_of_a_large_guest_takes_little_memory() {
    struct Large([Region; 1]);
    impl GuestMemory for Large {
        fn regions(&self) -> &[Region] {
            &self.0
        }
        fn take_dirty(&self, _: &mut DirtyMap) -> Result<(), Error> {
            Ok(())
        }
        fn read(&self, _: usize, _: u64, _: &mut [u8]) -> Result<(), Error> {
            Ok(())
        }
        fn next_data(&self, _: usize, _: u64) -> Result<Option<std::ops::Range<u64>>, Error> {
            Ok(None)
        }
    }
    let region = Region { name: "ram".to_owned(), bytes: 64 << 30, page_bytes: PAGE_BYTES };
    let options = PrecopyOptions::default();
    let memory = Arc::new(Large([region]));
    let precopy = Precopy::new(PausedEnv::shared(1), memory, options, (SESSION, Arc::new(Unpaced))).expect("begun");
    let pools = options.version_cache_bytes + 8 * transhume_memory::CONSUMER_BYTES;
    assert!(precopy.memory_bytes(8) <= pools + (64 << 20), "{} bytes", precopy.memory_bytes(8));
}
