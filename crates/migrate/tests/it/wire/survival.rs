//! Streams die, sessions are lost, hosts go away and come back.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use block::{
    BlockDevice, Buffer, Bytes, Device, ErrorKind, Extent, ExtentStatus, Geometry, IoFuture, MemDevice, Mutation,
};
use env::EnvRef;
use futures::future::join_all;
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use transhume_migrate::stream::{Ask, Dialer, Remote, Role, SessionRequest, StreamOptions};

use crate::wire::harness::{OneVolume, Pair, Weather, noise, read, write};

/// A device that takes its time over every mutation, and remembers which are under way.
struct Slow {
    inner: MemDevice,
    env: EnvRef,
    state: Arc<Mutex<Watched>>,
}

#[derive(Default)]
struct Watched {
    takes: Duration,
    under_way: BTreeMap<u64, Extent>,
    next: u64,
    /// Two writes of the same bytes were under way at once.
    has_overlapped: bool,
    /// How many mutations were done, and how many of them when a flush last began.
    done: u64,
    flush_began: Vec<u64>,
}

impl BlockDevice for Slow {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        self.inner.read(offset, buffer)
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let (number, takes) = {
                let mut state = self.state.lock();
                let extent = mutation.extent();
                state.has_overlapped |= state.under_way.values().any(|other| other.overlaps(extent));
                state.next += 1;
                let number = state.next;
                state.under_way.insert(number, extent);
                (number, state.takes)
            };
            if !takes.is_zero() {
                self.env.sleep(takes).await;
            }
            self.inner.write(mutation).await?;
            let mut state = self.state.lock();
            state.under_way.remove(&number);
            state.done += 1;
            Ok(())
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        let mut state = self.state.lock();
        let done = state.done;
        state.flush_began.push(done);
        drop(state);
        self.inner.flush()
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        self.inner.extents(extent)
    }
}

/// A pair whose volume takes `takes` for every mutation.
fn slow_pair(seed: u64, takes: Duration) -> (Pair, Arc<Mutex<Watched>>) {
    let state = Arc::new(Mutex::new(Watched { takes, ..Watched::default() }));
    let env = env::testing::PausedEnv::shared(seed);
    let device = Slow { inner: MemDevice::new(Bytes::mib(64)), env, state: Arc::clone(&state) };
    (Pair::new(seed, Device::new("slow", device)), state)
}

fn quick() -> StreamOptions {
    StreamOptions { streams: 3, ..StreamOptions::default() }
}

#[tokio::test(start_paused = true)]
async fn a_flush_on_any_stream_covers_what_was_answered_on_all_of_them() {
    let (pair, state) = slow_pair(1, Duration::from_millis(3));
    let (_remote, device) = pair.device(Role::Copy, 4).await;
    for round in 0..20_u64 {
        let writes = (0..12_u64).map(|number| {
            let device = device.clone();
            async move { device.write(write(number << 20, &noise(round + number, 4096))).await }
        });
        // Some are answered when the flush is asked for, and some are not.
        let late = device.write(write(40 << 20, &noise(round, 256 << 10)));
        let first = async {
            join_all(writes).await.into_iter().for_each(|outcome| outcome.expect("nothing goes wrong"));
            let answered = state.lock().done;
            device.flush().await.expect("nothing goes wrong");
            let began = *state.lock().flush_began.last().expect("a flush was asked for");
            assert!(
                began >= answered && answered >= 12 * (round + 1),
                "a flush began after {began} of {answered} writes"
            );
        };
        let (late, ()) = futures::join!(late, first);
        late.expect("nothing goes wrong");
    }
}

#[tokio::test(start_paused = true)]
async fn when_one_of_several_streams_dies_nobody_notices_and_what_it_had_is_sent_again() {
    for seed in 0..8 {
        let (pair, state) = slow_pair(seed, Duration::from_millis(40));
        let (remote, device) = pair.device(Role::Copy, 3).await;
        let data = noise(seed, 16 << 20);
        let writes = (0..64_u64).map(|number| {
            let part = data.slice((number as usize) << 18..(number as usize + 1) << 18);
            device.write(Mutation::data(Bytes(number << 18), part))
        });
        let cutting = async {
            pair.env.sleep(Duration::from_millis(1 + seed)).await;
            pair.lines.cut(Some((seed % 3) as u16));
        };
        let (outcomes, ()) = futures::join!(join_all(writes), cutting);
        outcomes.into_iter().for_each(|outcome| outcome.expect("two streams are left"));
        assert_eq!(read(&device, 0, 16 << 20).await, data[..], "seed {seed}");
        let statistics = remote.statistics();
        assert_eq!(statistics.streams.iter().map(|stream| stream.deaths).sum::<u64>(), 1, "seed {seed}");
        assert!(statistics.bytes_again > 0, "seed {seed}: the stream died with nothing unanswered: nothing was tried");
        assert!(!state.lock().has_overlapped, "seed {seed}: a write was repeated while it was still under way");
        pair.env.sleep(Duration::from_secs(1)).await;
        assert_eq!(pair.lines.dials.lock().len(), 4, "the dead stream was not dialled again");
        assert_eq!((statistics.sessions, remote.is_live()), (1, true));
    }
}

#[tokio::test(start_paused = true)]
async fn a_write_of_a_dead_stream_is_not_repeated_before_it_is_done() {
    let (pair, state) = slow_pair(1, Duration::from_secs(20));
    let (_remote, device) = pair.device(Role::Copy, 3).await;
    let writing = [0_u64, 1, 2, 3, 4, 5].map(|number| device.write(write(number << 20, &noise(number, 65536))));
    let cutting = async {
        pair.env.sleep(Duration::from_millis(10)).await;
        assert_eq!(state.lock().under_way.len(), 6);
        pair.lines.cut(Some(1));
        pair.env.sleep(Duration::from_secs(15)).await;
        assert_eq!(state.lock().next, 6, "something was sent again while it was under way");
    };
    let (outcomes, ()) = futures::join!(join_all(writing), cutting);
    outcomes.into_iter().for_each(|outcome| outcome.expect("it is sent again"));
    assert!(!state.lock().has_overlapped && state.lock().next > 6);
}

#[tokio::test(start_paused = true)]
async fn overlapping_writes_land_in_the_order_in_which_they_were_asked_for_whatever_carries_them() {
    for seed in 0..4 {
        let (pair, state) = slow_pair(seed, Duration::from_millis(1));
        let (_remote, device) = pair.device(Role::Copy, 4).await;
        let writes: Vec<_> = (0..40_u64)
            .map(|number| {
                // Large and small ones take turns, so that they would travel at different speeds.
                let length = if number % 2 == 0 { 400_000 } else { 4096 };
                (number, noise(seed * 100 + number, length))
            })
            .collect();
        let asked = writes.iter().map(|(number, data)| device.write(write((number % 5) * 4096, data)));
        let cutting = async {
            pair.env.sleep(Duration::from_millis(7)).await;
            pair.lines.cut(Some((seed % 4) as u16));
        };
        let (outcomes, ()) = futures::join!(join_all(asked), cutting);
        outcomes.into_iter().for_each(|outcome| outcome.expect("three streams are left"));
        let mut expected = vec![0; 500_000];
        for (number, data) in &writes {
            let start = (number % 5) as usize * 4096;
            expected[start..start + data.len()].copy_from_slice(data);
        }
        assert!(read(&device, 0, 500_000).await == expected, "seed {seed}: the writes landed in another order");
        assert!(!state.lock().has_overlapped);
    }
}

/// Writes to one place after the other until a write is not answered. Gives its place, whose number is `place >> 16`, and the
/// write.
async fn unanswered_write(pair: &Pair, device: &Device) -> (u64, JoinHandle<block::Result<()>>) {
    let mut places = (0..64_u64).map(|number| number << 16);
    loop {
        let place = places.next().expect("each stream has its turn");
        let (device, data) = (device.clone(), noise(place, 4096));
        let writing = tokio::spawn(async move { device.write(write(place, &data)).await });
        pair.env.sleep(Duration::from_millis(10)).await;
        if !writing.is_finished() {
            return (place, writing);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_write_that_is_repeated_never_lands_over_one_that_was_asked_for_after_it() {
    for seed in 0..8 {
        let (pair, state) = slow_pair(seed, Duration::ZERO);
        let (_remote, device) = pair.device(Role::Copy, 4).await;
        // What this stream carries is done, and nobody is told.
        pair.lines.set_weather(Some(0), Weather::Unheard);
        let (place, first) = unanswered_write(&pair, &device).await;
        assert_eq!(state.lock().done, (place >> 16) + 1, "seed {seed}: it was not carried out: nothing is tried");
        let newer = noise(seed + 1000, 4096);
        device.write(write(place, &newer)).await.expect("the stream's death costs time and nothing else");
        first.await.expect("no panic").expect("it is sent again");
        assert!(state.lock().done > (place >> 16) + 2, "seed {seed}: nothing was sent again: nothing was tried");
        assert!(
            read(&device, place, 4096).await == newer[..],
            "seed {seed}: the older write landed over the newer one"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_write_that_arrives_after_its_stream_was_given_up_is_not_carried_out() {
    let late = Duration::from_secs(10);
    for seed in 0..8 {
        let (pair, state) = slow_pair(seed, Duration::ZERO);
        let (_remote, device) = pair.device(Role::Copy, 4).await;
        pair.lines.set_weather(Some(0), Weather::Late(late));
        let (place, first) = unanswered_write(&pair, &device).await;
        assert_eq!(state.lock().next, place >> 16, "seed {seed}: it has arrived already: nothing is tried");
        first.await.expect("no panic").expect("another stream carries it");
        let newer = noise(seed + 1000, 4096);
        device.write(write(place, &newer)).await.expect("the stream's death costs time and nothing else");
        let written = state.lock().next;
        pair.env.sleep(2 * late).await;
        assert_eq!(state.lock().next, written, "seed {seed}: the older write was carried out after the newer one");
        assert!(read(&device, place, 4096).await == newer[..], "seed {seed}: the older write lies over the newer one");
    }
}

#[tokio::test(start_paused = true)]
async fn a_copy_whose_streams_are_all_lost_fails_at_once_until_it_is_connected_again() {
    let (pair, state) = slow_pair(1, Duration::from_millis(50));
    let (remote, device) = pair.device(Role::Copy, 3).await;
    let writing = (0..8_u64).map(|number| device.write(write(number << 20, &noise(number, 65536))));
    let cutting = async {
        pair.env.sleep(Duration::from_millis(5)).await;
        pair.lines.cut(None);
    };
    let (outcomes, ()) = futures::join!(join_all(writing), cutting);
    for outcome in outcomes {
        assert_eq!(outcome.expect_err("nobody could answer").kind(), ErrorKind::Disconnected);
    }
    assert_eq!(device.flush().await.expect_err("it is lost").kind(), ErrorKind::Disconnected);
    assert!(!remote.is_live());
    state.lock().takes = Duration::ZERO;
    let info = remote.reconnect().await.expect("it can be reached again");
    assert_eq!((info.number, info.instance), (2, [7; 16]));
    assert!(state.lock().under_way.is_empty(), "a new session was opened over writes of the old one");
    device.write(write(0, &noise(9, 4096))).await.expect("it works again");
    device.flush().await.expect("it works again");
    assert_eq!(remote.statistics().sessions, 2);
}

#[tokio::test(start_paused = true)]
async fn a_forwarded_guest_waits_for_the_other_host_and_loses_nothing() {
    for seed in 0..6 {
        let (pair, state) = slow_pair(seed, Duration::from_millis(2));
        let (remote, device) = pair.device(Role::Forward, 2).await;
        let mut tasks = Vec::new();
        for lane in 0..4_u64 {
            let device = device.clone();
            tasks.push(tokio::spawn(async move {
                for round in 0..60_u64 {
                    let data = noise(lane * 1000 + round, 8192);
                    let offset = (lane << 20) + (round % 7) * 8192;
                    device.write(write(offset, &data)).await.expect("the guest waits, it does not fail");
                    assert!(read(&device, offset, 8192).await == data[..], "lane {lane} lost round {round}");
                    if round % 10 == 9 {
                        device.flush().await.expect("the guest waits, it does not fail");
                    }
                }
            }));
        }
        for outage in 0..4_u64 {
            pair.env.sleep(Duration::from_millis(37 + 11 * seed)).await;
            *pair.lines.is_down.lock() = true;
            if outage == 2 {
                pair.restart()
            } else {
                pair.lines.cut(None)
            }
            pair.env.sleep(Duration::from_secs(3)).await;
            *pair.lines.is_down.lock() = false;
            pair.env.sleep(Duration::from_secs(8)).await;
        }
        for task in tasks {
            task.await.expect("no panic");
        }
        assert!(remote.statistics().sessions >= 3, "seed {seed}: nothing was lost");
        assert!(!state.lock().has_overlapped, "seed {seed}: a write was repeated while it was still under way");
    }
}

#[tokio::test(start_paused = true)]
async fn a_forwarded_guest_is_told_when_patience_ends_and_served_when_the_host_is_back() {
    let (pair, _) = slow_pair(1, Duration::ZERO);
    let options = StreamOptions { reconnect_limit: Duration::from_secs(30), ..quick() };
    let remote = pair.connect(Role::Forward, options).await.expect("it is let in");
    let device = Device::from_arc("remote", Arc::clone(&remote) as Arc<_>);
    *pair.lines.is_down.lock() = true;
    pair.lines.cut(None);
    let began = pair.env.now();
    let error = device.write(write(0, &noise(1, 4096))).await.expect_err("nobody is there");
    let waited = pair.env.now() - began;
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!((29..=31).contains(&waited.as_secs()), "{waited:?}");
    let began = pair.env.now();
    assert_eq!(device.flush().await.expect_err("nobody is there").kind(), ErrorKind::TimedOut);
    assert!(pair.env.now() - began < Duration::from_secs(1), "patience began anew");
    *pair.lines.is_down.lock() = false;
    pair.env.sleep(Duration::from_secs(10)).await;
    device.write(write(0, &noise(2, 4096))).await.expect("the host is back");
}

#[tokio::test(start_paused = true)]
async fn a_flush_never_covers_writes_that_the_other_machine_has_forgotten() {
    let (pair, _) = slow_pair(1, Duration::ZERO);
    let (_remote, device) = pair.device(Role::Forward, 2).await;
    device.write(write(0, &noise(1, 4096))).await.expect("it works");
    device.flush().await.expect("it works");
    let reboot = |boot: u8| {
        *pair.handler.boot.lock() = [boot; 16];
        pair.restart();
        pair.env.sleep(Duration::from_secs(2))
    };
    reboot(2).await;
    device.flush().await.expect("all that was answered was flushed before");
    device.write(write(0, &noise(1, 4096)).with_fua(true)).await.expect("it works");
    reboot(3).await;
    device.flush().await.expect("what was forced was durable");
    device.write(write(0, &noise(1, 4096))).await.expect("it works");
    reboot(4).await;
    for _ in 0..2 {
        let error = device.flush().await.expect_err("a write was lost with the machine");
        assert!(error.kind() == ErrorKind::Io && error.chain().contains("forgotten"), "{}", error.chain());
    }
}

#[tokio::test(start_paused = true)]
async fn a_host_that_falls_silent_is_dead_after_two_seconds_and_one_that_is_slow_is_not() {
    let (pair, state) = slow_pair(1, Duration::from_secs(30));
    let (remote, device) = pair.device(Role::Copy, 1).await;
    let began = pair.env.now();
    device.write(write(0, &noise(1, 4096))).await.expect("slow is not dead");
    assert!(pair.env.now() - began >= Duration::from_secs(30));
    state.lock().takes = Duration::ZERO;
    pair.env.sleep(Duration::from_secs(600)).await;
    device.flush().await.expect("an idle connection is not dead");
    assert_eq!(remote.statistics().streams.iter().map(|stream| stream.deaths).sum::<u64>(), 0);
    for weather in [Weather::Frozen, Weather::HalfOpen] {
        pair.lines.set_weather(None, weather);
        let began = pair.env.now();
        let error = device.write(write(0, &noise(1, 4096))).await.expect_err("nothing gets through");
        let waited = pair.env.now() - began;
        assert_eq!(error.kind(), ErrorKind::Disconnected);
        assert!(waited >= Duration::from_secs(2) && waited < Duration::from_secs(4), "{weather:?}: {waited:?}");
        remote.reconnect().await.expect("a new connection gets through");
        pair.settle().await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_takes_longer_than_a_silence_may_is_none() {
    let (pair, _) = slow_pair(1, Duration::ZERO);
    let (remote, device) = pair.device(Role::Forward, 2).await;
    let data = noise(1, 4 << 20);
    device.write(write(0, &data)).await.expect("nothing goes wrong");
    pair.lines.set_weather(None, Weather::Trickles(200_000));
    let began = pair.env.now();
    assert!(read(&device, 0, 4 << 20).await == data[..]);
    assert!(pair.env.now() - began > Duration::from_secs(9), "it was quick: nothing was tried");
    assert_eq!(remote.statistics().streams.iter().map(|stream| stream.deaths).sum::<u64>(), 0);
}

#[tokio::test(start_paused = true)]
async fn one_silent_stream_of_two_costs_two_seconds_and_no_error() {
    let (pair, _) = slow_pair(1, Duration::ZERO);
    let (remote, device) = pair.device(Role::Copy, 2).await;
    pair.lines.set_weather(Some(1), Weather::Frozen);
    let began = pair.env.now();
    let writes = (0..40_u64).map(|number| device.write(write(number << 20, &noise(number, 256 << 10))));
    join_all(writes).await.into_iter().for_each(|outcome| outcome.expect("one stream is left"));
    assert!(pair.env.now() - began < Duration::from_secs(5));
    assert_eq!(remote.statistics().streams[1].deaths, 1);
    assert_eq!(remote.statistics().streams[0].deaths, 0);
}

#[tokio::test(start_paused = true)]
async fn a_silent_host_costs_two_seconds_however_many_streams_there_are() {
    for weather in [Weather::Frozen, Weather::Unheard] {
        let (pair, _) = slow_pair(1, Duration::ZERO);
        let (_remote, device) = pair.device(Role::Copy, 8).await;
        pair.env.sleep(Duration::from_secs(5)).await;
        pair.lines.set_weather(None, weather);
        *pair.lines.is_down.lock() = true;
        let began = pair.env.now();
        device.write(write(0, &noise(1, 4096))).await.expect_err("nothing gets through");
        let waited = pair.env.now() - began;
        assert!(waited >= Duration::from_secs(2) && waited < Duration::from_secs(3), "{weather:?}: {waited:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn frames_that_come_damaged_are_sent_again_and_never_believed() {
    for seed in 0..6 {
        let (pair, _) = slow_pair(seed, Duration::ZERO);
        // Damaged headers end streams: a forwarding device survives that.
        let (remote, device) = pair.device(Role::Forward, 2).await;
        pair.lines.corrupt_every[0].store(41, std::sync::atomic::Ordering::Relaxed);
        pair.lines.corrupt_every[1].store(37, std::sync::atomic::Ordering::Relaxed);
        for round in 0..40_u64 {
            let data = noise(seed * 100 + round, 300_000);
            device.write(write(round << 20, &data)).await.expect("it is sent again");
            assert!(read(&device, round << 20, 300_000).await == data[..], "seed {seed}: damage was believed");
        }
        assert!(remote.statistics().damaged > 3, "seed {seed}: {:?}", remote.statistics());
        assert!(remote.statistics().bytes_again > 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_line_that_damages_every_frame_is_an_error_and_not_for_ever() {
    let (pair, _) = slow_pair(1, Duration::ZERO);
    let (remote, device) = pair.device(Role::Copy, 1).await;
    pair.lines.corrupt_every[0].store(1, std::sync::atomic::Ordering::Relaxed);
    // Each piece on the way is damaged in its midst, which is payload.
    let error = device.write(write(0, &noise(1, 65536))).await.expect_err("it never came whole");
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{}", error.chain());
    assert_eq!(remote.statistics().damaged, 5);
}

#[tokio::test(start_paused = true)]
async fn a_new_sender_of_the_job_ends_the_old_one_and_an_older_epoch_is_refused() {
    let (pair, state) = slow_pair(1, Duration::from_secs(5));
    let (_first, old) = pair.device(Role::Copy, 2).await;
    let writing = old.write(write(0, &noise(1, 4096)));
    let replacing = async {
        pair.env.sleep(Duration::from_millis(10)).await;
        let second = pair.connect(Role::Forward, quick()).await.expect("it is let in");
        assert!(state.lock().under_way.is_empty(), "the old session's writes were still under way");
        second
    };
    let (outcome, second) = futures::join!(writing, replacing);
    assert_eq!(outcome.expect_err("its session was ended").kind(), ErrorKind::Disconnected);
    let mut older = pair.request(Role::Copy);
    older.epoch = 2;
    let dialer = Arc::clone(&pair.lines) as Arc<dyn Dialer>;
    let refused = Remote::connect(Arc::clone(&pair.env), dialer, older, quick()).await;
    assert_eq!(refused.err().expect("an older epoch was let in").kind(), ErrorKind::Fenced);
    assert!(second.call(Ask::Status).await.is_ok(), "the refused one has done harm");
    assert_eq!(pair.receiver().sessions(), 1);
}

#[tokio::test(start_paused = true)]
async fn what_is_refused_ends_no_session_that_is_in_use() {
    let (pair, state) = slow_pair(1, Duration::from_millis(500));
    let (remote, device) = pair.device(Role::Copy, 2).await;
    let (handler, own) = (&pair.handler, pair.request(Role::Copy));
    let ask = |request| async {
        let dialer = Arc::clone(&pair.lines) as Arc<dyn Dialer>;
        let opened = Remote::connect(Arc::clone(&pair.env), dialer, request, quick()).await;
        opened.err().expect("it was let in").kind()
    };
    let writing = device.write(write(0, &noise(1, 4096)));
    let asking = async {
        pair.env.sleep(Duration::from_millis(10)).await;
        *handler.refusal.lock() = Some(ErrorKind::Fenced);
        // By whoever holds the volume: another volume of the same job has a session of its own.
        assert_eq!(ask(SessionRequest { volume: "other".to_owned(), ..own.clone() }).await, ErrorKind::Fenced);
        // Before anybody is asked.
        assert_eq!(ask(SessionRequest { epoch: own.epoch - 1, ..own.clone() }).await, ErrorKind::Fenced);
        assert_eq!(
            ask(SessionRequest { epoch: own.epoch + 2, role: Role::Forward, ..own.clone() }).await,
            ErrorKind::Fenced
        );
        assert_eq!(state.lock().under_way.len(), 1, "what is refused has waited for what is under way");
    };
    let (outcome, ()) = futures::join!(writing, asking);
    outcome.expect("its session goes on");
    device.flush().await.expect("its session goes on");
    let statistics = remote.statistics();
    assert_eq!(statistics.streams.iter().map(|stream| stream.deaths).sum::<u64>(), 0);
    assert_eq!((statistics.sessions, remote.is_live(), handler.opened.lock().len()), (1, true, 1));
    *handler.refusal.lock() = None;
    let taking = pair.connect(Role::Forward, quick()).await.expect("it is let in");
    assert_eq!(device.flush().await.expect_err("another took its place").kind(), ErrorKind::Disconnected);
    assert!(taking.is_live());
}

#[tokio::test(start_paused = true)]
async fn a_session_without_streams_is_given_up_after_a_while() {
    let pair = Pair::new(1, Device::new("memory", MemDevice::new(Bytes::mib(1))));
    let (remote, _device) = pair.device(Role::Copy, 2).await;
    *pair.lines.is_down.lock() = true;
    pair.lines.cut(None);
    pair.env.sleep(Duration::from_secs(50)).await;
    assert_eq!(pair.receiver().sessions(), 1, "it was given up too soon");
    pair.env.sleep(Duration::from_secs(20)).await;
    assert_eq!(pair.receiver().sessions(), 0, "it is kept for ever");
    let OneVolume { opened, .. } = &*pair.handler;
    assert_eq!(opened.lock().len(), 1);
    drop(remote);
}
