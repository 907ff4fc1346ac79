//! The daemon without a machine below it and an API above it: for whoever brings a [`Platform`] of his own.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use api::v1::{
    AttachRequest, Cache, CacheRequest, Job, LayerChangeRequest, LayerRequest, Monitor, MoveRequest, Prediction,
    Resolution, ResolveRequest, RevertRequest, SetRequest, SnapshotRequest, Surrogate, SurrogateRequest, Vm, VmMove,
    VmMoveRequest, Volume,
};
use block::{BufferPool, Quiesced};
use migrate::{Control, MoveOptions};

use crate::audit::Peer;
use crate::config::Config;
use crate::daemon::Daemon;
use crate::machines::{self, MachineDisk};
use crate::platform::Platform;
use crate::problem::Result;
use crate::recover;
use crate::remote;
use crate::run::come_to_rest;
use crate::state_dir::{Layout, StateDir};

/// A daemon on some ground. Clones are the same daemon.
#[derive(Clone)]
pub struct Core {
    daemon: Arc<Daemon>,
}

/// A daemon that leaves nothing half done. Its clients go on when this is dropped.
pub struct AtRest {
    _held: Vec<Quiesced>,
}

impl Core {
    /// Starts a daemon whose state directory is `state_dir` among the ground's files, and brings back its volumes. It is for
    /// the caller to see that no other uses that directory.
    ///
    /// # Errors
    /// If the state directory cannot be used. A volume that cannot be brought back is none: it is shown as down.
    pub async fn start(platform: Platform, config: Config, state_dir: &Path) -> Result<Self> {
        let state = StateDir::over(Layout::new(state_dir, Arc::clone(&platform.files)), None)?;
        let daemon = Arc::new(Daemon::new(platform, config, state, PathBuf::new())?);
        recover::recover(&daemon).await?;
        machines::recover(&daemon)?;
        let reception = machines::Reception::new(&daemon, remote::receiver(&daemon)?)?;
        daemon.hosts.listen(reception).await?;
        Ok(Self { daemon })
    }

    /// Leaves everything as the next start is to find it, as the daemon does when it is told to end: what is in flight is answered, and
    /// clients are held from then on, for as long as what this gives lives. It is for the caller to let nobody in any more.
    pub async fn come_to_rest(&self) -> AtRest {
        AtRest { _held: come_to_rest(&self.daemon).await }
    }

    /// Makes the machine `name` known, whose disks are these volumes already. Done if it is known.
    ///
    /// # Errors
    /// As the API's.
    pub async fn add_machine_of(&self, name: &str, monitor: &str, disks: Vec<MachineDisk>) -> Result<()> {
        self.daemon.add_machine_of(name, Monitor::Qmp(monitor.to_owned()), disks).await
    }

    /// Begins a move of a machine to another host.
    ///
    /// # Errors
    /// As the API's.
    pub async fn start_machine_move(&self, name: &str, request: VmMoveRequest) -> Result<VmMove> {
        Box::pin(self.daemon.start_machine_move(&Peer::default(), name, request)).await
    }

    /// The move of a machine from here that is under way, or the last one.
    ///
    /// # Errors
    /// There was none.
    pub fn machine_move(&self, name: &str) -> Result<VmMove> {
        self.daemon.show_machine_move(&*self.daemon.machine(name)?)
    }

    /// Undoes the move of a machine, as long as that is possible.
    ///
    /// # Errors
    /// As the API's.
    pub async fn cancel_machine_move(&self, name: &str) -> Result<VmMove> {
        self.daemon.cancel_machine_move(name).await
    }

    /// Says what both hosts have on record of the disks of a machine that was on its way, and does what was decided.
    ///
    /// # Errors
    /// As the API's.
    pub async fn resolve_machine(&self, name: &str, request: ResolveRequest) -> Result<Vec<Resolution>> {
        self.daemon.resolve_machine(name, request).await
    }

    /// Gives all disks of a machine back to the program that runs it.
    ///
    /// # Errors
    /// As the API's.
    pub async fn release_machine(&self, name: &str) -> Result<Vm> {
        self.daemon.release_machine(name).await
    }

    /// Forgets a machine. What runs goes on.
    ///
    /// # Errors
    /// As the API's.
    pub async fn remove_machine(&self, name: &str) -> Result<Vm> {
        self.daemon.remove_machine(name).await
    }

    /// The daemon itself.
    #[cfg(test)]
    pub(crate) const fn daemon(&self) -> &Arc<Daemon> {
        &self.daemon
    }

    /// All volumes, those included that cannot be read.
    #[must_use]
    pub fn volumes(&self) -> Vec<Volume> {
        self.daemon.shown_volumes()
    }

    /// Serves a backend.
    ///
    /// # Errors
    /// As the API's `attach`.
    pub async fn attach(&self, request: AttachRequest) -> Result<Volume> {
        self.daemon.attach(request).await
    }

    /// Takes a snapshot of `volume`.
    ///
    /// # Errors
    /// As the API's.
    pub async fn add_snapshot(&self, volume: &str, request: SnapshotRequest) -> Result<Volume> {
        self.daemon.add_snapshot(volume, request).await
    }

    /// Begins to remove a snapshot of `volume`: what was written since goes into what lies below.
    ///
    /// # Errors
    /// As the API's.
    pub async fn remove_snapshot(&self, volume: &str, snapshot: &str) -> Result<Volume> {
        self.daemon.remove_snapshot(volume, snapshot).await
    }

    /// Throws away what was written to `volume` since a snapshot.
    ///
    /// # Errors
    /// As the API's.
    pub async fn revert(&self, volume: &str, request: RevertRequest) -> Result<Volume> {
        self.daemon.revert(volume, request).await
    }

    /// Makes a surrogate.
    ///
    /// # Errors
    /// As the API's.
    pub async fn create_surrogate(&self, request: SurrogateRequest) -> Result<Surrogate> {
        self.daemon.create_surrogate(request).await
    }

    /// The surrogates.
    #[must_use]
    pub fn surrogates(&self) -> Vec<Surrogate> {
        self.daemon.shown_surrogates()
    }

    /// Makes a cache.
    ///
    /// # Errors
    /// As the API's.
    pub async fn create_cache(&self, request: CacheRequest) -> Result<Cache> {
        self.daemon.create_cache(request).await
    }

    /// The caches.
    #[must_use]
    pub fn caches(&self) -> Vec<Cache> {
        self.daemon.shown_caches()
    }

    /// Has everything that only a cache has durably in the backends of its volumes.
    ///
    /// # Errors
    /// As the API's.
    pub async fn drain_cache(&self, name: &str) -> Result<Cache> {
        self.daemon.drain_cache(name).await
    }

    /// Adds a layer to `volume`, or limits what its clients may ask for.
    ///
    /// # Errors
    /// As the API's.
    pub async fn add_layer(&self, volume: &str, request: LayerRequest) -> Result<Volume> {
        self.daemon.add_layer(volume, request).await
    }

    /// Changes a layer of `volume`.
    ///
    /// # Errors
    /// As the API's.
    pub async fn change_layer(&self, volume: &str, layer: &str, request: LayerChangeRequest) -> Result<Volume> {
        self.daemon.change_layer(volume, layer, request).await
    }

    /// Takes a layer of `volume` out that holds nothing.
    ///
    /// # Errors
    /// As the API's.
    pub async fn remove_layer(&self, volume: &str, layer: &str) -> Result<Volume> {
        self.daemon.remove_layer(volume, layer).await
    }

    /// Starts a move of `volume`.
    ///
    /// # Errors
    /// As the API's `move`.
    pub async fn start_move(&self, volume: &str, request: MoveRequest) -> Result<Job> {
        Box::pin(self.daemon.start_move(&Peer::default(), volume, request)).await
    }

    /// The same, with options that the API does not offer: `tune` changes what follows from the request.
    ///
    /// # Errors
    /// As the API's `move`.
    pub async fn start_tuned_move(
        &self,
        volume: &str,
        request: MoveRequest,
        tune: impl FnOnce(&mut MoveOptions) + Send,
    ) -> Result<Job> {
        self.daemon.start_tuned_move(&Peer::default(), volume, request, tune).await
    }

    /// Starts moves of several volumes that belong together, as of all disks of a machine. `tune` changes the options of each.
    ///
    /// # Errors
    /// As the API's `move`. Then none of them has begun.
    pub async fn start_tuned_moves_together(
        &self,
        requests: BTreeMap<&str, MoveRequest>,
        tune: impl FnMut(&str, &mut MoveOptions) + Send,
    ) -> Result<Vec<Job>> {
        let volumes = requests.keys().map(|name| self.daemon.volume(name)).collect::<Result<Vec<_>>>()?;
        self.daemon.start_together(&Peer::default(), &volumes, requests.into_values().collect(), None, tune).await
    }

    /// Takes `prediction` for what a plan of the move that `request` asks for has just said: the move begins without a look at
    /// its source.
    ///
    /// # Errors
    /// If there is no such volume.
    pub fn note_plan(&self, volume: &str, request: &MoveRequest, prediction: Prediction) -> Result<()> {
        self.daemon.note_plan(&*self.daemon.volume(volume)?, request, prediction);
        Ok(())
    }

    /// Pauses, resumes or cancels the move of `volume`.
    ///
    /// # Errors
    /// As the API's.
    pub async fn steer(&self, volume: &str, action: &str) -> Result<Job> {
        self.daemon.steer(volume, action).await
    }

    /// Changes the move of `volume`.
    ///
    /// # Errors
    /// As the API's.
    pub async fn set(&self, volume: &str, request: SetRequest) -> Result<Job> {
        self.daemon.set(volume, request).await
    }

    /// Says what both hosts have on record of a volume that was on its way between them, and does what was decided.
    ///
    /// # Errors
    /// As the API's `resolve`.
    pub async fn resolve(&self, volume: &str, request: ResolveRequest) -> Result<Resolution> {
        self.daemon.resolve_volume(volume, request).await
    }

    /// Stops serving `volume`.
    ///
    /// # Errors
    /// As the API's `detach`.
    pub async fn detach(&self, volume: &str) -> Result<Volume> {
        self.daemon.detach(volume).await
    }

    /// Jobs, newest first, those included that are over.
    #[must_use]
    pub fn jobs(&self) -> Vec<Job> {
        self.daemon.jobs(true)
    }

    /// Waits until no move of `volume` is under way any more.
    pub async fn job_over(&self, volume: &str) {
        let job = self.daemon.volume(volume).ok().and_then(|volume| volume.job());
        if let Some(job) = job {
            job.wait().await;
        }
    }

    /// What steers the migration of `volume`, once it has begun.
    #[must_use]
    pub fn control(&self, volume: &str) -> Option<Control> {
        self.daemon.volume(volume).ok()?.job()?.control()
    }

    /// Where the requests of all clients take their buffers from, and then the copies of the move of `volume`, once it has begun.
    #[must_use]
    pub fn pools(&self, volume: &str) -> Vec<BufferPool> {
        let job = self.daemon.volume(volume).ok().and_then(|volume| volume.job());
        std::iter::once(self.daemon.pool.clone()).chain(job.and_then(|job| job.pool())).collect()
    }
}
