//! Where a migration begins.

use std::future::Future;
use std::time::Duration;

use block::{Bytes, Device, Error, ErrorKind, Result};

use crate::control::Control;
use crate::driver::Driver;
use crate::strategy::mirror::Mirror;
use crate::strategy::mirror::tracker::Tracker;
use crate::{MoveOptions, Outcome, Parts, Phase, Progress, Strategy};

/// How long the guest's requests may take to drain before the mirror is in their path.
const ENTER_LIMIT: Duration = Duration::from_secs(30);
/// The smallest pool that copies and compares at a reasonable size.
const POOL_MIN: Bytes = Bytes::mib(4);

/// A migration of one volume.
pub struct Migration;

impl Migration {
    /// Puts the mirror into the guest's path and gives the handle that steers the migration and the work itself, which
    /// the caller drives to its end (dropping it is what a crash is). Once this has returned every guest write is
    /// tracked: whoever resumes after a crash serves the volume only then.
    ///
    /// # Errors
    /// Source and target do not suit each other, the guest's requests do not drain, or the progress map cannot be
    /// read. Nothing has changed then.
    pub async fn start(
        mut parts: Parts,
        options: MoveOptions,
    ) -> Result<(Control, impl Future<Output = Outcome> + Send + 'static)> {
        options.check()?;
        let chunk = options.chunk_size()?;
        let (source, target) = (parts.source.clone(), parts.target.clone());
        check_target(&source, &target)?;
        // A comparison takes two chunks at once.
        let pool_min = POOL_MIN.max(Bytes(2 * chunk.bytes()));
        if parts.pool.limit() < pool_min {
            let context = format!("a pool of {} is too small to copy with; it takes {pool_min}", parts.pool.limit());
            return Err(Error::new(ErrorKind::Invalid, context));
        }
        let progress_map = parts.progress_map.take();
        let mut tracker = Tracker::new(source.size(), chunk, target, parts.target_is_fresh, progress_map.is_some());
        tracker.set_offload(parts.offload.take());
        if options.strategy.iterates() {
            tracker.track(options.strategy == Strategy::IncrementalDbt);
            if options.hot_blocks {
                tracker.count_heat(filters::Heat::new(chunk.count(source.size()), || parts.env.random()));
            }
        }
        if options.buffer().is_some() {
            tracker.mirror_asynchronously();
        }
        if options.strategy == Strategy::Auto {
            tracker.choose(filters::Heat::new(chunk.count(source.size()), || parts.env.random()));
        }
        if options.strategy == Strategy::MirrorPaper {
            tracker.mirror_by_offsets();
        }
        if let Some(map) = &progress_map {
            let identity = map.identity();
            if identity.volume != source.size() || identity.chunk != chunk {
                return Err(Error::new(ErrorKind::Invalid, "the progress map is one of another volume or chunk size"));
            }
            if map.is_known() {
                tracker.adopt(&map.had_runs().await);
                tracker.choose_anew();
            }
        }
        let bytes_resumed = tracker.bytes_had();
        let control = Control::new(first_progress(source.size(), bytes_resumed), &options);
        if parts.phase == Phase::Cancelling {
            control.cancel()?;
        }
        let mirror =
            Mirror::new(parts.env.clone(), source.clone(), tracker, chunk, progress_map, &options, control.clone());
        match options.strategy {
            // Nobody writes anything that a snapshot would hold.
            Strategy::Snapshot if source.geometry().read_only => enter(&parts, &mirror).await?,
            Strategy::Snapshot => enter_below(&parts, &mirror, &options).await?,
            _ => enter(&parts, &mirror).await?,
        }
        let driver = Driver::new(parts, options, control.clone(), &mirror, bytes_resumed);
        Ok((control, driver.run()))
    }
}

/// Puts the mirror in the guest's path.
async fn enter(parts: &Parts, mirror: &Mirror) -> Result<()> {
    let source = &parts.source;
    let quiesced = env::timeout(&*parts.env, ENTER_LIMIT, parts.slot.quiesce()).await.ok_or_else(|| {
        let context = format!("the guest's requests to {} did not drain in {ENTER_LIMIT:?}", source.name());
        Error::new(ErrorKind::Busy, context)
    })?;
    let before = quiesced.swap(Device::new("mirror", mirror.clone()));
    if !before.is_same(source) {
        quiesced.swap(before);
        return Err(not_served_from(source));
    }
    Ok(())
}

/// Puts the mirror below the overlays, and the first one in the guest's path if there is none.
async fn enter_below(parts: &Parts, mirror: &Mirror, options: &MoveOptions) -> Result<()> {
    let Some(snapshots) = &parts.snapshots else {
        return Err(Error::new(ErrorKind::Invalid, "there is no place for snapshots"));
    };
    let mut snapshots = snapshots.lock().await;
    let below = Device::new("mirror", mirror.clone());
    let served = snapshots.top().unwrap_or_else(|| parts.source.clone());
    if !parts.slot.device().is_same(&served) {
        return Err(not_served_from(&parts.source));
    }
    match snapshots.is_empty() {
        true => snapshots.take_within(&parts.slot, &below, options.quiesce_limit(), ENTER_LIMIT).await,
        false => snapshots.rebase(&below),
    }
}

fn not_served_from(source: &Device) -> Error {
    Error::new(ErrorKind::Invalid, format!("{} is not what the volume is served from", source.name()))
}

/// Whether the guest could go on on `target` with what it does on `source`.
pub(crate) fn check_target(source: &Device, target: &Device) -> Result<()> {
    let (from, to) = (source.geometry(), target.geometry());
    let refuse = |kind, context: String| Err(Error::new(kind, context));
    if source.is_same(target) {
        return refuse(ErrorKind::Invalid, format!("{} is source and target at once", source.name()));
    }
    if to.read_only {
        return refuse(ErrorKind::ReadOnly, format!("the target {} is read-only", target.name()));
    }
    if to.size < from.size {
        let context = format!("the target {} has {}, the volume {}", target.name(), to.size, from.size);
        return refuse(ErrorKind::Invalid, context);
    }
    if to.request_alignment > from.request_alignment {
        let context = format!(
            "the target {} takes multiples of {} bytes, and the guest may write {}",
            target.name(),
            to.request_alignment,
            from.request_alignment
        );
        return refuse(ErrorKind::Invalid, context);
    }
    if to.size != from.size && !from.size.is_multiple_of(u64::from(to.request_alignment)) {
        let context = format!(
            "a volume of {} bytes does not end on a multiple of the target's {} bytes",
            from.size.0, to.request_alignment
        );
        return refuse(ErrorKind::Invalid, context);
    }
    Ok(())
}

fn first_progress(size: Bytes, resumed: Bytes) -> Progress {
    Progress {
        bytes_total: size.get(),
        bytes_done: resumed.get(),
        bytes_left: (size - resumed).get(),
        ..Progress::default()
    }
}
