//! The life of a volume under a layer that keeps some of it elsewhere and is then drained: while the guest writes, through crashes of the
//! process and power losses, sector by sector against a list of what each may hold.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use block::testing::Random;
use block::{Buffer, Bytes, Data, Device, Extent, Mutation};
use env::testing::PausedEnv;
use env::{Env, EnvRef, Moment, Task};
use futures::future::{Either, join_all, select};
use parking_lot::Mutex;

use crate::cached_disk::{CachedDisk, SECTOR};

/// What a discarded sector may hold: anything.
const ANY: u64 = u64::MAX;

/// A layer over a base, with a device of its own.
pub(crate) trait Layer: Sized {
    /// How large the volume is.
    const SIZE: Bytes;

    /// How large its own device is.
    fn own_bytes() -> Bytes;

    /// Makes an empty one.
    async fn make(own: &Device);

    async fn open_over(env: EnvRef, base: Device, own: Device, boot: [u8; 16]) -> Self;

    /// Where the guest writes, and what else shows the same bytes.
    fn views(&self) -> Vec<Device>;

    async fn start_draining(&self);

    async fn drain_some(&self, random: &mut Random);

    async fn drain_all(&self);

    fn holds_nothing(&self) -> bool;
}

/// An environment whose tasks die with the process.
struct MortalEnv {
    inner: EnvRef,
    tasks: Mutex<Vec<tokio::task::AbortHandle>>,
}

impl MortalEnv {
    fn new(seed: u64) -> Arc<Self> {
        Arc::new(Self { inner: PausedEnv::shared(seed), tasks: Mutex::default() })
    }

    fn kill(&self) {
        self.tasks.lock().drain(..).for_each(|task| task.abort());
    }
}

impl Env for MortalEnv {
    fn now(&self) -> Moment {
        self.inner.now()
    }

    fn sleep(&self, span: Duration) -> Task {
        self.inner.sleep(span)
    }

    fn spawn(&self, task: Task) {
        self.tasks.lock().push(tokio::spawn(task).abort_handle());
    }

    fn random(&self) -> u64 {
        self.inner.random()
    }

    fn wall_clock(&self) -> SystemTime {
        self.inner.wall_clock()
    }
}

/// What a sector may hold, oldest first: what certainly survives, then all that was written since. The last one is what
/// reads see.
struct Sector {
    versions: Vec<u64>,
    /// Writes that were under way when the process died.
    doubtful: Vec<u64>,
}

/// The life of a volume.
struct Life<L> {
    random: Random,
    env: Arc<MortalEnv>,
    base: Arc<CachedDisk>,
    own: Arc<CachedDisk>,
    layer: Arc<L>,
    sectors: Vec<Sector>,
    boot: u8,
    next_tag: u64,
}

/// A disk of a test as a device.
pub(crate) fn disk(name: &str, disk: &Arc<CachedDisk>) -> Device {
    Device::from_arc(name, Arc::clone(disk) as _)
}

fn sectors_of(extent: Extent) -> std::ops::Range<usize> {
    extent.offset.as_usize() / SECTOR..extent.end().as_usize().div_ceil(SECTOR)
}

/// The tag that fills a sector.
fn tag_of(bytes: &[u8], what: &str) -> u64 {
    let mut first = [0; 8];
    first.copy_from_slice(&bytes[..8]);
    let is_whole = bytes.iter().zip(first.iter().cycle()).all(|(byte, expected)| byte == expected);
    assert!(is_whole, "{what}: a sector is a mixture");
    u64::from_le_bytes(first)
}

/// Lets others run so often.
async fn yield_times(count: u64) {
    for _ in 0..count {
        tokio::task::yield_now().await;
    }
}

impl<L: Layer> Life<L> {
    async fn new(seed: u64) -> Self {
        let unit = [1, 512, 4096][(seed % 3) as usize];
        let base = Arc::new(CachedDisk::new(seed, L::SIZE, unit));
        let own = Arc::new(CachedDisk::new(seed + 1, L::own_bytes(), unit));
        L::make(&disk("own", &own)).await;
        let env = MortalEnv::new(seed);
        let layer =
            Arc::new(L::open_over(Arc::clone(&env) as _, disk("base", &base), disk("own", &own), [1; 16]).await);
        let sectors =
            (0..L::SIZE.as_usize().div_ceil(SECTOR)).map(|_| Sector { versions: vec![0], doubtful: Vec::new() });
        let random = Random::new(seed + 2);
        Self { random, env, base, own, layer, sectors: sectors.collect(), boot: 1, next_tag: 1 }
    }

    fn device(&self) -> Device {
        self.layer.views().swap_remove(0)
    }

    async fn open_again(&mut self) {
        self.env.kill();
        let (base, own) = (disk("base", &self.base), disk("own", &self.own));
        self.layer = Arc::new(L::open_over(Arc::clone(&self.env) as _, base, own, [self.boot; 16]).await);
    }

    /// Mutations that do not overlap, in whole units, with the tags that they leave.
    fn mutations(&mut self) -> Vec<(Mutation, u64)> {
        let unit = u64::from(self.device().geometry().request_alignment).max(SECTOR as u64);
        let mut mutations = Vec::new();
        let mut next = Bytes(self.random.below(12) * unit);
        while next < L::SIZE && mutations.len() < 16 {
            let longest = if self.random.one_in(5) { 60 } else { 6 };
            let end = (next + Bytes((1 + self.random.below(longest)) * unit)).min(L::SIZE);
            let extent = Extent::between(next, end);
            let tag = self.next_tag;
            self.next_tag += 1;
            let (mutation, tag) = match self.random.below(6) {
                0 => (Mutation::zeroes(extent, self.random.one_in(2)), 0),
                1 => (Mutation::discard(extent), ANY),
                _ => {
                    let bytes: Vec<u8> = tag.to_le_bytes().into_iter().cycle().take(extent.length.as_usize()).collect();
                    (Mutation::data(next, Data::copy_of(&bytes)), tag)
                }
            };
            mutations.push((mutation.with_fua(self.random.one_in(8)), tag));
            next = end + Bytes(self.random.below(6) * unit);
        }
        mutations
    }

    /// Mutations beside flushes, reads and draining, for at most `limit` turns; false if that cut them short.
    async fn batch(&mut self, limit: Option<u64>, what: &str) -> bool {
        let mutations = self.mutations();
        let delays: Vec<u64> = mutations.iter().map(|_| self.random.below(40)).collect();
        let [flushes, reads, pieces, begin] = [3, 8, 9, 20].map(|most| self.random.below(most));
        let mut random = Random::new(self.random.number());
        let (device, views, layer) = (self.device(), self.layer.views(), Arc::clone(&self.layer));
        let answered = Mutex::new(vec![false; mutations.len()]);
        let work = async {
            let writes =
                join_all(mutations.iter().zip(delays).enumerate().map(async |(number, ((mutation, _), delay))| {
                    yield_times(delay).await;
                    device.write(mutation.clone()).await.expect("a good disk takes it");
                    answered.lock()[number] = true;
                }));
            let flush = async {
                for _ in 0..flushes {
                    yield_times(7).await;
                    device.flush().await.expect("a good disk flushes");
                }
            };
            let read = async {
                for view in views.iter().cycle().take(reads as usize) {
                    yield_times(3).await;
                    let all = view.read(Bytes::ZERO, Buffer::unpooled(L::SIZE.as_usize())).await.expect("it answers");
                    for (number, (bytes, sector)) in all.chunks(SECTOR).zip(&self.sectors).enumerate() {
                        let tag = tag_of(bytes, what);
                        let is_under_way = mutations.iter().any(|(mutation, new)| {
                            sectors_of(mutation.extent()).contains(&number) && [tag, ANY].contains(new)
                        });
                        let is_old = sector.versions.last().is_some_and(|last| [tag, ANY].contains(last));
                        assert!(is_old || is_under_way, "{what}: sector {number} was seen with {tag}");
                    }
                }
            };
            let drain = async {
                if pieces == 0 {
                    return;
                }
                yield_times(begin).await;
                layer.start_draining().await;
                for _ in 0..pieces {
                    layer.drain_some(&mut random).await;
                }
            };
            futures::join!(writes, flush, read, drain);
        };
        let is_done = match limit {
            // Whoever only yields is never idle, and time passes only then.
            None => {
                work.await;
                true
            }
            Some(limit) => matches!(select(pin!(work), pin!(yield_times(limit))).await, Either::Left(_)),
        };
        for ((mutation, tag), is_answered) in mutations.into_iter().zip(answered.into_inner()) {
            for sector in &mut self.sectors[sectors_of(mutation.extent())] {
                if !is_answered {
                    sector.doubtful.push(tag);
                    continue;
                }
                if mutation.fua {
                    sector.versions.clear();
                }
                sector.versions.push(tag);
            }
        }
        is_done
    }

    async fn flush(&mut self) {
        self.device().flush().await.expect("a good disk flushes");
        self.sectors.iter_mut().for_each(|sector| drop(sector.versions.drain(..sector.versions.len() - 1)));
    }

    /// Reads everything: each sector is as `may` says. What was discarded is from now on what was read.
    async fn check(&mut self, device: &Device, what: &str, may: impl Fn(&Sector, u64) -> bool) {
        let all = device.read(Bytes::ZERO, Buffer::unpooled(L::SIZE.as_usize())).await.expect("a good disk answers");
        for (number, (bytes, sector)) in all.chunks(SECTOR).zip(&mut self.sectors).enumerate() {
            let tag = tag_of(bytes, what);
            let (versions, doubtful) = (&sector.versions, &sector.doubtful);
            assert!(may(sector, tag), "{what}: sector {number} holds {tag} of {versions:?} and {doubtful:?}");
            sector.versions.push(tag);
        }
    }

    async fn check_last(&mut self, device: &Device, what: &str) {
        self.check(device, what, |sector, tag| sector.versions.last().is_some_and(|last| [tag, ANY].contains(last)))
            .await;
    }

    async fn crash(&mut self, what: &str) {
        self.open_again().await;
        let device = self.device();
        self.check(&device, what, |sector, tag| {
            sector.versions.last().into_iter().chain(&sector.doubtful).any(|version| [tag, ANY].contains(version))
        })
        .await;
        // What was under way may be on the medium or not, whatever reads say.
        for sector in &mut self.sectors {
            let now = sector.versions.pop().expect("just read");
            sector.versions.append(&mut sector.doubtful);
            sector.versions.push(now);
        }
    }

    async fn lose_power(&mut self, what: &str) {
        self.base.lose_power();
        self.own.lose_power();
        self.boot += 1;
        self.open_again().await;
        let device = self.device();
        self.check(&device, what, |sector, tag| {
            sector.versions.iter().chain(&sector.doubtful).any(|version| [tag, ANY].contains(version))
        })
        .await;
        for sector in &mut self.sectors {
            sector.versions.drain(..sector.versions.len() - 1);
            sector.doubtful.clear();
        }
    }

    /// Takes the layer away.
    async fn finish(&mut self, what: &str) {
        self.layer.start_draining().await;
        self.layer.drain_all().await;
        assert!(self.layer.holds_nothing(), "{what}");
        let device = self.device();
        self.check_last(&device, what).await;
        self.flush().await;
        self.base.lose_power();
        let base = disk("base", &self.base);
        self.check_last(&base, &format!("{what}, the base")).await;
    }
}

/// Lives so many lives with `L`. Each begins with `steps` batches of requests, after which the process or the machine may die.
pub(crate) async fn live<L: Layer>(lives: u64, steps: u32) {
    for seed in 0..lives {
        let mut life = Life::<L>::new(seed * 3 + seed % 3).await;
        for step in 0..steps {
            let what = format!("seed {seed}, step {step}");
            let dies = life.random.one_in(3);
            let limit = dies.then(|| life.random.below(120));
            let is_done = life.batch(limit, &what).await;
            if is_done && !dies {
                for view in life.layer.views() {
                    life.check_last(&view, &what).await;
                }
                if life.random.one_in(3) {
                    life.flush().await;
                }
            } else if life.random.one_in(2) {
                life.crash(&what).await;
            } else {
                life.lose_power(&what).await;
            }
        }
        life.finish(&format!("seed {seed}")).await;
    }
}
