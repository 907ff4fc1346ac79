//! Where a migration begins.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use block::{Bytes, ChunkSize, Device, Error, ErrorKind, Result};
use filters::ReadCache;

use crate::control::Control;
use crate::driver::Driver;
use crate::pace::PauseLimit;
use crate::schedule::{HeardDisk, InMemoryFirst, Schedule, ScheduleContext};
use crate::strategy::mirror::Mirror;
use crate::strategy::mirror::tracker::Tracker;
use crate::{MigrationContext, MoveOptions, Outcome, Phase, Progress, Strategy};

/// How long it is tried to hold the guest, for short times, until its requests have drained and the mirror is in their path.
const ENTER_LIMIT: Duration = Duration::from_secs(30);
/// Between two of these tries.
const ENTER_PAUSE: Duration = Duration::from_millis(50);
/// The smallest pool that copies and compares at a reasonable size.
const POOL_MIN: Bytes = Bytes::mib(4);

/// A migration of one volume.
pub struct Migration;

impl Migration {
    /// Puts the mirror into the guest's path. Gives the handle that steers the migration, and the work itself, which
    /// the caller drives to its end. Dropping the work is the same as a crash. Once this has returned every guest write
    /// is tracked, so whoever resumes after a crash serves the volume only then.
    ///
    /// # Errors
    /// Source and target do not suit each other, the guest's requests do not drain, or the progress map cannot be
    /// read. Nothing has changed then.
    pub async fn start(
        mut context: MigrationContext,
        options: MoveOptions,
    ) -> Result<(Control, impl Future<Output = Outcome> + Send + 'static)> {
        options.check()?;
        let chunk = options.chunk_size()?;
        let (source, target) = (context.source.clone(), context.target.clone());
        check_target(&source, &target)?;
        // A comparison takes two chunks at once.
        let pool_min = POOL_MIN.max(Bytes(2 * chunk.bytes()));
        if context.pool.limit() < pool_min {
            let context = format!("a pool of {} is too small to copy with; it takes {pool_min}", context.pool.limit());
            return Err(Error::new(ErrorKind::Invalid, context));
        }
        let control = Control::new(first_progress(source.size(), Bytes::ZERO), &options);
        let schedule = crate::schedule::of(ScheduleContext {
            options: &options,
            size: source.size(),
            medium: context.medium.clone(),
            wake: Arc::clone(&control.shared.signal),
        });
        // Where the file system copies by itself nothing is read, and nothing would be kept.
        let cache_bytes = options.read_cache().filter(|_| context.offload.is_none());
        let paths = SourcePaths::of(&context, &*schedule, cache_bytes.map(|bytes| (chunk, bytes)));
        let read_cache = paths.cache.clone();
        let progress_map = context.progress_map.take();
        let mut tracker = Tracker::new(source.size(), chunk, target, context.target_is_fresh);
        tracker.set_offload(context.offload.take());
        tracker.keep_in_memory(read_cache.clone());
        if options.strategy.iterates() {
            tracker.track(options.strategy.is_incremental());
            if options.hot_blocks {
                tracker.note_write_frequency(filters::WriteFrequencySketch::new(chunk.count(source.size()), || {
                    context.env.random()
                }));
            }
        }
        if options.buffer().is_some() {
            tracker.mirror_asynchronously();
        }
        if options.strategy.chooses_by_chunk() {
            tracker.choose(filters::WriteFrequencySketch::new(chunk.count(source.size()), || context.env.random()));
        }
        if options.skip_zero {
            tracker.record_skips();
        }
        if options.strategy.copies_in_order() {
            tracker.mirror_by_offsets();
        }
        if let Some(map) = &progress_map {
            let identity = map.identity();
            if identity.volume != source.size() || identity.chunk != chunk || identity.skips != options.skip_zero {
                let context = "the progress map is one of another volume, of another chunk size or of other options";
                return Err(Error::new(ErrorKind::Invalid, context));
            }
            tracker.keep_progress(identity.page_chunks);
            if map.is_known() {
                tracker.adopt_record(&map.found().await);
                tracker.choose_anew();
            }
        }
        let bytes_resumed = tracker.bytes_in_step();
        control.shared.progress.send_replace(first_progress(source.size(), bytes_resumed));
        if context.phase == Phase::Cancelling {
            control.cancel()?;
        }
        let schedule = match read_cache {
            Some(_) => Box::new(InMemoryFirst::new(schedule)),
            None => schedule,
        };
        let mirror =
            Mirror::new(context.env.clone(), source.clone(), tracker, chunk, progress_map, &options, control.clone())
                .heard_by(schedule.listener().filter(|_| !paths.hears_disk))
                .reading_by(context.copy_face.clone())
                .cached_by(read_cache, context.redirect.as_ref());
        let entry = match options.strategy {
            // Nobody writes anything that a snapshot would hold.
            Strategy::Snapshot if source.geometry().read_only => enter(&context, &mirror, &options, &paths).await?,
            Strategy::Snapshot => enter_below(&context, &mirror, &options).await?,
            _ => enter(&context, &mirror, &options, &paths).await?,
        };
        let driver = Driver::new(context, options, control.clone(), &mirror, (bytes_resumed, entry), schedule);
        Ok((control, driver.run()))
    }
}

/// By what the source is reached while it is copied.
struct SourcePaths {
    cache: Option<ReadCache>,
    /// Below a redirection: by what the guest's requests reach the source, and by what the copy's do.
    below: Option<(Device, Device)>,
    /// The schedule hears of requests there, and not at the mirror.
    hears_disk: bool,
}

impl SourcePaths {
    /// With a cache of chunks of that size, of so many bytes, if one is given.
    fn of(context: &MigrationContext, schedule: &dyn Schedule, cache: Option<(ChunkSize, Bytes)>) -> Self {
        let redirect = context.redirect.as_ref();
        let disk = redirect.map_or_else(|| context.source.clone(), |redirect| redirect.source().clone());
        let is_covered = redirect.is_some() || cache.is_some();
        let listener = schedule.listener().filter(|_| is_covered && schedule.hears_disk());
        let hears_disk = listener.is_some();
        let heard = listener.map_or_else(|| disk.clone(), |listener| HeardDisk::over(disk.clone(), listener));
        let copied_by = context.copy_face.clone().filter(|_| redirect.is_none()).unwrap_or(disk);
        let cache = cache.map(|(chunk, bytes)| ReadCache::new(heard.clone(), copied_by.clone(), chunk, bytes));
        let below = cache.as_ref().map_or((heard, copied_by), |cache| (cache.guest(), cache.copy()));
        Self { cache, below: redirect.map(|_| below), hears_disk }
    }
}

/// What the guest was held for when the mirror came into its path.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Entry {
    /// All of the holds together.
    pub(crate) held: Duration,
    /// How often it was let go and held again later.
    pub(crate) retries: u64,
}

/// Puts the mirror in the guest's path, which is held for short times only.
async fn enter(
    context: &MigrationContext,
    mirror: &Mirror,
    options: &MoveOptions,
    paths: &SourcePaths,
) -> Result<Entry> {
    let (source, env) = (&context.source, &*context.env);
    if let Some(meter) = &context.meter {
        meter.begin_stall();
    }
    let mut limit = PauseLimit::new(options.quiesce_limit());
    let (until, mut entry) = (env.now() + ENTER_LIMIT, Entry::default());
    let quiesced = loop {
        let began = env.now();
        let quiesced = env::timeout(env, limit.limit(), context.slot.quiesce()).await;
        entry.held += env.now().since(began);
        if let Some(quiesced) = quiesced {
            break quiesced;
        }
        if env.now() >= until {
            let context = format!("the guest's requests to {} did not drain in {ENTER_LIMIT:?}", source.name());
            return Err(Error::new(ErrorKind::Busy, context));
        }
        entry.retries += 1;
        limit.note_failure();
        env.sleep(ENTER_PAUSE).await;
    };
    let before = quiesced.swap(Device::new("mirror", mirror.clone()));
    if !before.is_same(source) {
        quiesced.swap(before);
        return Err(not_served_from(source));
    }
    if let (Some(redirect), Some((guest, copy))) = (&context.redirect, &paths.below) {
        redirect.reach_source_by(guest.clone(), copy.clone());
    }
    Ok(entry)
}

/// Puts the mirror below the overlays, and the first one in the guest's path if there is none.
async fn enter_below(context: &MigrationContext, mirror: &Mirror, options: &MoveOptions) -> Result<Entry> {
    let Some(snapshots) = &context.snapshots else {
        return Err(Error::new(ErrorKind::Invalid, "there is no place for snapshots"));
    };
    let mut snapshots = snapshots.lock().await;
    let below = Device::new("mirror", mirror.clone());
    let served = snapshots.top().unwrap_or_else(|| context.source.clone());
    if !context.slot.device().is_same(&served) {
        return Err(not_served_from(&context.source));
    }
    if !snapshots.is_empty() {
        return snapshots.rebase(&below).map(|()| Entry::default());
    }
    if let Some(meter) = &context.meter {
        meter.begin_stall();
    }
    let mut limit = PauseLimit::new(options.quiesce_limit());
    let (held, retries) = snapshots.take_within(&context.slot, &below, &mut limit, ENTER_LIMIT).await?;
    Ok(Entry { held, retries })
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
