//! What happens to the other host, and to the way there.

use std::time::Duration;

use ::daemon::IncomingStage;
use block::Bytes;

use super::volume::Flushes;
use super::{FakeArbiter, PeerHost, Shared};
use crate::disk::Disk;
use crate::host::Host;
use crate::link::Side;
use crate::medium::SECTOR_BYTES;

/// How long the hosts are in trouble with each other at once: less than anybody notices, or long enough that everybody does.
const TROUBLES_MS: [u64; 5] = [1, 20, 300, 3000, 12_000];

/// How long an outage of one host waits for what one of the other has left to be settled.
const SETTLING_MAX: Duration = Duration::from_secs(30);

/// How long answers of the other host vanish on a connection before its power goes: less than anybody needs to notice.
const UNHEARD_MAX: Duration = Duration::from_millis(40);

/// What else an outage of the other host brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outage {
    /// Its daemon is killed.
    Death,
    /// It is killed, and before the next one runs somebody has changed something of what it was being filled with.
    Meddling,
    /// The host has no power.
    PowerLoss,
}

impl Host {
    /// The process of the other host is killed, and starts again within `downtime`, after what `outage` brings.
    pub async fn strike_peer(&self, outage: Outage, downtime: Duration) {
        let Some(peer) = &self.shared.daemon_harness.peer else { return };
        let _outage = peer.shared.outage.lock().await;
        // Whatever the guest is told by a new daemon of the source must be there already, and so what it was told before.
        let is_settled = |volume: &Self, flushes: &Flushes| {
            let answered = || volume.shared.guest.report().answered;
            flushes.done >= flushes.after_death || flushes.served_from.is_some_and(|from| answered() > from)
        };
        if outage == Outage::PowerLoss && !self.is_settled(is_settled).await {
            return;
        }
        self.crash_peer().await;
        match outage {
            Outage::Death => {}
            Outage::Meddling => self.meddle(peer),
            Outage::PowerLoss => self.take_power(peer),
        }
        self.shared.world.sleep(peer.shared.rng.up_to(downtime)).await;
        self.boot_peer();
    }

    pub(super) async fn crash_peer(&self) {
        let Some(peer) = &self.shared.daemon_harness.peer else { return };
        let process = peer.shared.process.lock().take();
        let core = peer.shared.core.lock().take();
        drop(core);
        self.shared.world.fault("neighbour-crash", format_args!("the neighbour is killed"));
        if let Some(process) = process {
            process.kill().await;
        }
    }

    fn take_power(&self, peer: &PeerHost) {
        let Shared { files, boots, .. } = &*peer.shared;
        for volume in self.volumes() {
            let Some(peer) = &volume.shared.daemon_harness.peer else { continue };
            [&peer.volume.journal, &peer.volume.map].into_iter().for_each(Disk::lose_power);
            if !volume.is_shared() {
                volume.shared.sides[1].lose_power();
            }
            volume.shared.shelf.lose_power(|side| self.is_of_peer(side));
            let mut flushes = peer.volume.flushes.lock();
            flushes.after_power_loss = flushes.begun + 1;
        }
        files.lose_power();
        *boots.lock() += 1;
        self.shared.world.fault("neighbour-power-loss", format_args!("the neighbour has no power"));
    }

    /// Changes a byte of the file that nobody keeps from others now, where the source has the same: what was copied there
    /// the source's daemon believes to be there, or copies anyway.
    fn meddle(&self, peer: &PeerHost) {
        let is_filled = peer.stage() == Some(IncomingStage::Filling) && peer.is_certain();
        if !is_filled || self.is_shared() {
            return;
        }
        let [source, target] = &self.shared.sides;
        let copied: Vec<usize> = source.inspect(|source| {
            target.inspect(|target| {
                let pairs = source.chunks(SECTOR_BYTES as usize).zip(target.chunks(SECTOR_BYTES as usize));
                let is_copied =
                    |(source, target): (&[u8], &[u8])| source == target && source.iter().any(|byte| *byte != 0);
                pairs.enumerate().filter(|(_, pair)| is_copied(*pair)).map(|(sector, _)| sector).collect()
            })
        });
        if !copied.is_empty() {
            target.corrupt(Bytes(peer.shared.rng.pick(&copied) as u64 * SECTOR_BYTES));
        }
    }

    /// Waits until a death of this host's daemon loses nothing that was passed on.
    pub async fn may_die(&self) -> bool {
        self.is_settled(|_, flushes| flushes.done >= flushes.after_power_loss).await
    }

    /// Waits until `is_settled` is true of each volume that has moved. False if that takes too long.
    async fn is_settled(&self, is_settled: impl Fn(&Self, &Flushes) -> bool) -> bool {
        let volumes = self.volumes();
        let waits = |volume: &Self| {
            let Some(peer) = &volume.shared.daemon_harness.peer else { return false };
            let is_moved = volume.holder() == 1 || peer.fake_arbiter().is_some_and(FakeArbiter::has_committed);
            is_moved && !is_settled(volume, &peer.volume.flushes.lock())
        };
        let until = self.shared.world.now() + SETTLING_MAX;
        while volumes.iter().any(waits) {
            if self.shared.world.now() >= until {
                return false;
            }
            self.shared.world.sleep(Duration::from_millis(1)).await;
        }
        true
    }

    /// The hosts cannot reach each other for a while, in one of the ways there are.
    pub fn trouble_with_peer(&self) {
        let Some(peer) = self.shared.daemon_harness.peer.clone() else { return };
        let Shared { world, rng, link, cuts, .. } = &*peer.shared;
        let span = rng.up_to(Duration::from_millis(rng.pick(&TROUBLES_MS)));
        let parted = match rng.below(7) {
            // The connections there are, in one direction; others work.
            0 => {
                link.silence(rng.pick(&[Side::Client, Side::Server]));
                Duration::ZERO
            }
            // One of them.
            1 => {
                link.silence_one(rng.pick(&[Side::Client, Side::Server]));
                Duration::ZERO
            }
            // Nothing moves, and nobody is told.
            2 | 3 => {
                link.set_up(false);
                let (link, sleeper) = (link.clone(), world.clone());
                world.spawn(async move {
                    sleeper.sleep(span).await;
                    link.set_up(true);
                });
                span
            }
            // Both are told at once, and nobody gets through.
            _ => {
                *cuts.lock() += 1;
                link.cut();
                let (peer, sleeper) = (peer.clone(), world.clone());
                world.spawn(async move {
                    sleeper.sleep(span).await;
                    *peer.shared.cuts.lock() -= 1;
                });
                span
            }
        };
        self.watch_guest_for(parted);
    }

    /// The answers of the other host vanish on one of the connections; then its power goes.
    pub async fn silence_and_strike_peer(&self, downtime: Duration) {
        let Some(peer) = &self.shared.daemon_harness.peer else { return };
        peer.shared.link.silence_one(Side::Server);
        self.shared.world.sleep(peer.shared.rng.up_to(UNHEARD_MAX)).await;
        self.strike_peer(Outage::PowerLoss, downtime).await;
    }

    /// The arbiter is hard to ask for a while.
    pub fn trouble_with_arbiter(&self) {
        if let Some(fake_arbiter) = self.shared.daemon_harness.peer.as_ref().and_then(PeerHost::fake_arbiter) {
            fake_arbiter.trouble();
        }
    }

    /// What is decided at the arbiter arrives late for a while.
    pub fn delay_arbiter(&self) {
        if let Some(fake_arbiter) = self.shared.daemon_harness.peer.as_ref().and_then(PeerHost::fake_arbiter) {
            fake_arbiter.delay();
        }
    }
}
