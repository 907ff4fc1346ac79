//! A machine of a scene: its guest, its disk, perhaps a redirection, and its move.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use block::{BufferPool, Bytes, ChunkSize, Device, Error, ErrorKind, Result, Slot};
use filters::{AccessCounts, MeterState, Redirect, RedirectHeader, RedirectStatus};
use migrate::{
    Control, Medium, Migration, MigrationContext, MoveOptions, Outcome, Phase, Report, UnderWay, VolumeMeter,
};
use parking_lot::Mutex;
use sim::bench::Tally;
use sim::model::Volume;
use sim::model::contents::Origin;
use sim::player::Player;
use tokio::sync::oneshot;

use super::super::guest_path::{CountedReads, GuestPath};
use super::CHUNK_BYTES;
use super::host::{Host, outstanding};
use crate::journal::MoveJournal;

/// What a request costs on its way through QEMU: assumed.
const REQUEST_COST: Duration = Duration::from_micros(100);
/// The surrogate has room for this part of the image: never full, as the paper's.
const SURROGATE_PARTS: (u64, u64) = (6, 10);

/// A machine.
pub(super) struct Machine {
    slot: Slot,
    /// What the slot holds before the move.
    device: Device,
    source: Volume,
    redirect: Option<Redirect>,
    meter: MeterState,
    copied: Arc<Mutex<Tally>>,
    player: Player,
    number: u64,
    is_over: Arc<AtomicBool>,
}

impl Machine {
    /// Starts the guest of machine `number`.
    pub(super) async fn start(host: &Host, number: u64) -> Result<Self> {
        let (world, scene) = (&host.world, &host.scene);
        let source = host.image(number);
        let device = source.device();
        let slot = Slot::new(device.clone());
        let meter = MeterState::new(host.process.env());
        let lower = Device::new("meter", meter.metered(slot.lane()));
        let writes_through = scene.cache.writes_through();
        let path = GuestPath { world: world.clone(), lower, cost: REQUEST_COST, writes_through };
        let name = format!("guest {number}");
        let (load, is_over) = scene.laid().start(scene.load, &world.rng(&format!("load {number}")))?;
        let port = Device::new("port", path);
        let player = Player::start(world, &name, port, Origin::Filled, load, outstanding(scene));
        Ok(Self { slot, device, source, redirect: None, meter, copied: Arc::default(), player, number, is_over })
    }

    /// Begins its move, and before that the redirection of its guest if there is a surrogate.
    pub(super) async fn begin_move(&mut self, host: &Host) -> Result<Mover> {
        if host.scene.surrogate.is_some() {
            let redirect = redirect(host, self.number, &self.source).await?;
            self.device = Device::new("redirect", redirect.clone());
            self.slot.quiesce().await.swap(self.device.clone());
            self.redirect = Some(redirect);
        }
        let lower = match &self.redirect {
            Some(redirect) => redirect.copy("copy"),
            None => self.source.device(),
        };
        let copy_face = CountedReads { world: host.world.clone(), lower, tally: Arc::clone(&self.copied) };
        let target = host.target(Bytes(host.scene.image_here()));
        let compared = self.redirect.is_none().then(|| [self.source.clone(), target.clone()]);
        let journal = MoveJournal { world: host.world.clone(), compared };
        let meter = Arc::new(VolumeMeter::new(self.meter.clone()));
        let context = MigrationContext {
            copy_face: Some(Device::new("copy face", copy_face)),
            redirect: self.redirect.clone(),
            meter: Some(meter),
            medium: host.medium(self.number),
            ..context(host, &self.slot, &self.device, &target, journal)
        };
        Mover::start(host, context, host.scene.options()).await
    }

    /// What its guest was answered since this was last called.
    pub(super) fn take(&self) -> Tally {
        self.player.take()
    }

    /// Whether its load has ended.
    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    /// What its move has read.
    pub(super) fn copied(&self) -> Tally {
        self.copied.lock().clone()
    }

    pub(super) fn redirect_status(&self) -> Option<RedirectStatus> {
        self.redirect.as_ref().map(Redirect::status)
    }

    pub(super) async fn stop(self) {
        self.player.stop().await;
    }
}

/// An empty redirection of `source`.
async fn redirect(host: &Host, number: u64, source: &Volume) -> Result<Redirect> {
    let size = Bytes(host.scene.image_here());
    let (parts, of) = SURROGATE_PARTS;
    let chunk = ChunkSize::new(CHUNK_BYTES).expect("a power of two");
    let header = RedirectHeader::new(size, chunk, Bytes(size.0 / of * parts), [7; 16])
        .ok_or_else(|| Error::new(ErrorKind::Invalid, "the image is too small for a surrogate"))?;
    let partition = host.partition(number, header.partition_bytes()).device();
    Redirect::create(&partition, &header).await?;
    let popularity = AccessCounts::new(chunk.count(size), host.scene.threshold);
    Redirect::open(host.process.env(), source.device(), partition, [1; 16], Box::new(popularity)).await
}

fn context(host: &Host, slot: &Slot, source: &Device, target: &Volume, journal: MoveJournal) -> MigrationContext {
    let env = host.process.env();
    MigrationContext {
        under_way: UnderWay::new(Duration::ZERO, env.now()),
        env,
        slot: slot.clone(),
        source: source.clone(),
        copy_face: None,
        redirect: None,
        medium: Medium::default(),
        target: target.device(),
        target_is_fresh: true,
        phase: Phase::Preparing,
        journal: Arc::new(journal),
        progress_map: None,
        meter: None,
        comparison: None,
        offload: None,
        pool: BufferPool::new(Bytes::mib(64)),
        snapshots: None,
    }
}

/// A move under way.
pub(super) struct Mover {
    control: Control,
    outcome: oneshot::Receiver<Outcome>,
    ended: Option<Outcome>,
}

impl Mover {
    async fn start(host: &Host, context: MigrationContext, options: MoveOptions) -> Result<Self> {
        let (control, work) = Migration::start(context, options).await?;
        Ok(Self { control, outcome: host.process.run(work), ended: None })
    }

    /// A move of a disk that nobody uses.
    pub(super) async fn of(host: &Host, volume: &Volume) -> Result<Self> {
        let slot = Slot::new(volume.device());
        let target = host.target(slot.device().size());
        let compared = Some([volume.clone(), target.clone()]);
        let journal = MoveJournal { world: host.world.clone(), compared };
        Self::start(host, context(host, &slot, &slot.device(), &target, journal), host.scene.options()).await
    }

    pub(super) fn has_ended(&mut self) -> bool {
        if self.ended.is_none() {
            self.ended = self.outcome.try_recv().ok();
        }
        self.ended.is_some()
    }

    /// Its load is over: nobody waits for its end.
    pub(super) fn cancel(&mut self) {
        // What cannot be cancelled any more ends by itself.
        let _ = self.control.cancel();
    }

    /// Its report once it has ended, if the guest has moved.
    ///
    /// # Errors
    /// It has failed.
    pub(super) fn settle(self) -> Result<Option<Report>> {
        match self.ended {
            Some(Outcome::Switched(report)) => Ok(Some(report)),
            Some(Outcome::Cancelled(_)) => Ok(None),
            Some(Outcome::Failed { error, .. }) => Err(error.wrap("a move of the evaluation")),
            None => Err(Error::new(ErrorKind::Internal, "a move has not ended")),
        }
    }
}
