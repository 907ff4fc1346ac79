//! The cache of the volume goes to other flash while the guest works, again and again: the two ends of a transfer over a link that is cut.
//!
//! Both hosts are one process here. So a crash ends both of them at once, with everything that only their memory has: what a cache is
//! believed for afterwards is what is on record.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use block::{Device, Slot};
use env::EnvRef;
use filters::{Cache, CacheMode};
use migrate::{CacheArrival, CacheDeparture, CacheTransferOptions, CacheTransferStatus, CacheWay, WarmStart};

use super::Host;
use super::cache::CacheSetup;
use crate::link::{Link, LinkFigures};
use crate::occurrence::Occurrence;
use crate::process::Process;

/// How long is waited before the next transfer, and before the guest is held, at most.
const BEGINS_AFTER: Duration = Duration::from_millis(8);
const HOLDS_AFTER: Duration = Duration::from_millis(6);
/// The link is cut, if it is, at the latest so long after the last time.
const CUT_AFTER: Duration = Duration::from_millis(8);
/// How long a guest is held for all of its cache.
const HELD_MAX: Duration = Duration::from_millis(30);

/// Whether a transfer has ended, for those who keep its connection.
type Ended = Arc<AtomicBool>;

/// Says that it has, however it has.
struct SaysEnd(Ended);

impl Drop for SaysEnd {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl Host {
    /// Moves the cache below `slot` from one partition to the other until the process ends.
    pub(super) async fn move_cache(self, process: Process, base: Device, slot: Slot, setup: CacheSetup) {
        let env = process.env();
        loop {
            env.sleep(self.shared.rng.up_to(BEGINS_AFTER)).await;
            let Some(source) = self.open_cache_now() else { return };
            if let Err(error) = self.move_once(&process, (&base, &slot), &setup, &source).await {
                self.shared.world.event(format_args!("a cache does not move: {}", error.chain()));
            }
        }
    }

    async fn move_once(
        &self,
        process: &Process,
        (base, slot): (&Device, &Slot),
        setup: &CacheSetup,
        source: &Cache,
    ) -> block::Result<()> {
        let (env, rng) = (process.env(), &self.shared.rng);
        let mode = source.status().mode;
        if mode == CacheMode::WriteBack {
            source.set_mode(CacheMode::WriteThrough).await?;
        }
        let options = CacheTransferOptions {
            way: rng.pick(&CacheWay::ALL),
            warm_start: rng.pick(&[WarmStart::AfterSwitchover, WarmStart::WithMemory]),
            in_flight: rng.pick(&[1, 4, 32]),
            time_ms_max: rng.pick(&[2, 50, 50]),
            changed_max: rng.pick(&[0, 20, 1000]),
        };
        let target = self.make_other_cache(process, base, setup).await?;
        let departure = CacheDeparture::new(Arc::clone(&env), source.clone(), options.clone());
        let arrival = CacheArrival::new(Arc::clone(&env), target.clone(), options.clone());
        let ended = SaysEnd(Ended::default());
        self.keep_connected(&env, (&departure, &arrival), &ended.0);
        let (warming, warmed) = (arrival.clone(), base.clone());
        env.spawn(Box::pin(async move { warming.warm_before(warmed).await }));
        env.sleep(rng.up_to(HOLDS_AFTER)).await;

        let held = slot.quiesce().await;
        if options.way == CacheWay::Firepan {
            departure.begin_copy();
            let _ = env::timeout(&*env, HELD_MAX, departure.whole()).await;
        }
        // The answer may be lost: what counts is whether the target has heard it.
        let _ = departure.seal(Duration::MAX).await;
        if !source.holds_nothing() || rng.chance(0.2) {
            // It is undone, or somebody has changed the mode meanwhile.
            drop(held);
            drop(ended);
            target.close().await;
            self.shared.world.occur(Occurrence::Told("a cache stays"));
            return source.set_mode(mode).await;
        }
        let target = match arrival.is_sealed() {
            true => target,
            false => {
                target.close().await;
                self.shared.world.occur(Occurrence::Told("a cache begins empty"));
                self.make_other_cache(process, base, setup).await?
            }
        };
        self.shared.world.sleep(Duration::from_micros(50)).await;
        target.reach_base_by(base.clone());
        self.commit_cache(&target);
        held.swap(Device::new("the cache that has come", target.clone()));
        if arrival.is_sealed() {
            arrival.guest_is_here(base.clone());
        }
        drop(held);
        env.spawn(Box::pin(target.clone().run_write_back()));
        source.close().await;
        if arrival.is_sealed() {
            arrival.over().await;
            self.note_transfer(options.way, &arrival.status());
        }
        drop(ended);
        self.believe_cache(&target);
        target.set_mode(mode).await
    }

    /// Joins both ends again and again until it has ended. Sometimes what joins them is cut.
    fn keep_connected(&self, env: &EnvRef, (departure, arrival): (&CacheDeparture, &CacheArrival), ended: &Ended) {
        let rng = &self.shared.rng;
        let latency = rng.pick(&[Duration::from_micros(20), Duration::from_micros(300)]);
        let figures = LinkFigures { latency, window: rng.pick(&[16 << 10, 1 << 20]), ..LinkFigures::GIGABIT };
        let link = Link::new(&self.shared.world, "caches", figures);
        let (joined, departure, arrival, over) = (link.clone(), departure.clone(), arrival.clone(), Arc::clone(ended));
        let joining = Arc::clone(env);
        env.spawn(Box::pin(async move {
            while !over.load(Ordering::SeqCst) && !departure.is_enough() {
                let (near, far) = joined.connect();
                let working = futures::future::join(departure.run(Box::new(near)), arrival.run(Box::new(far)));
                let watching = async {
                    while !over.load(Ordering::SeqCst) {
                        joining.sleep(Duration::from_millis(1)).await;
                    }
                };
                futures::future::select(Box::pin(working), Box::pin(watching)).await;
                joining.sleep(Duration::from_micros(200)).await;
            }
        }));
        if rng.chance(0.4) {
            let (host, cutting, over) = (self.clone(), Arc::clone(env), Arc::clone(ended));
            env.spawn(Box::pin(async move {
                while !over.load(Ordering::SeqCst) {
                    cutting.sleep(host.shared.rng.up_to(CUT_AFTER)).await;
                    link.cut();
                }
            }));
        }
    }

    fn note_transfer(&self, way: CacheWay, status: &CacheTransferStatus) {
        let told = [
            (true, way.name()),
            (status.from_source > 0, "blocks of the other cache"),
            (status.from_storage > 0, "blocks of the storage"),
            (status.read_remotely > 0, "a miss read at the other host"),
            (status.refused > 0, "blocks that came in vain"),
        ];
        told.into_iter()
            .filter(|(is_so, _)| *is_so)
            .for_each(|(_, word)| self.shared.world.occur(Occurrence::Told(word)));
    }
}
