//! Bringing an export back without the daemon, from the volume's journal alone.
//!
//! It serves the backend that the journal names as the authority, on the socket that clients know, under the same
//! locks. It does nothing else: no move goes on, no API answers. When a move was under way, what is written now reaches
//! the source only. So the record of what the target has is removed first, and the daemon copies anew at its next
//! start.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use api::v1::{Error, ErrorCode};
use block::{BufferPool, Bytes};
use env::{EnvRef, RealEnv, RealFiles};
use migrate::Journal;
use tokio::signal::unix::{SignalKind, signal};

use crate::caches::Caches;
use crate::config::Config;
use crate::descriptors;
use crate::document::{IncomingStage, JobDocument, VolumeDocument, random_uuid};
use crate::file_limit::outlive_file_limit;
use crate::foreign::flush_last;
use crate::jobs::{GroupRecord, GroupState, commit_with_group, undecided_record_of};
use crate::journal::VolumeJournal;
use crate::lent_parts::LentParts;
use crate::listeners::Listeners;
use crate::location::{Location, require_local};
use crate::open_backend::{BackendOpenOptions, OpenBackend};
use crate::overlays::OverlayContext;
use crate::platform::{Backends, Network, RealBackends, boot_identity};
use crate::pools::PoolContext;
use crate::problem::{Result, may_pass, no_volume, of_backend, of_journal, of_state};
use crate::run::{DRAIN_LIMIT, FLUSH_LIMIT};
use crate::state_dir::{Layout, StateDir, check_name};
use crate::surrogates::Surrogates;
use crate::volume::Volume;
use crate::workers::Workers;

/// Serves the volume `name` of the state directory `state_dir` until it is told to end.
///
/// # Errors
/// A daemon uses the state directory, there is no such volume, or its backend cannot be served.
pub fn rescue(state_dir: &Path, name: &str, json: bool) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .map_err(|error| of_state(error, "starting the event loop"))?;
    let outcome = runtime.block_on(serve(state_dir, name, json));
    // Nobody waits for a thread whose device hangs.
    runtime.shutdown_background();
    outcome
}

/// Whether what is on record makes the backend the volume. There is no daemon that could ask anybody.
fn check_held(document: &VolumeDocument) -> Result<()> {
    let name = &document.name;
    if document.job.as_deref().is_some_and(JobDocument::is_for_the_arbiter) {
        let message = format!("whether {name} was given up to another host only the arbiter knows");
        return Err(Error::new(ErrorCode::WrongState, message)
            .with_hint("start the daemon where the arbiter can be reached: it settles that by itself"));
    }
    match &document.incoming {
        Some(incoming) if !matches!(incoming.stage, IncomingStage::Held { .. }) => {
            let message = format!("{name} was on its way from {} and is not held here", incoming.host);
            Err(Error::new(ErrorCode::WrongState, message).with_hint(format!(
                "start the daemon: `transhume resolve {name}` says what both hosts have on record, and decides"
            )))
        }
        _ => Ok(()),
    }
}

/// What the record of its group says of the volume goes on its own journal.
async fn settle_group(volume: &Volume, layout: &Layout, backends: &Arc<dyn Backends>, env: &EnvRef) -> Result<()> {
    let Some(record) = undecided_record_of(&volume.document()) else { return Ok(()) };
    let path = layout.group_journal(record);
    let record = match backends.open_store(&path, &**env).await {
        Ok(store) => Journal::<GroupRecord>::peek(&store.device).await,
        Err(error) => Err(error),
    };
    let unreadable = |why: &str| {
        let message = format!("whether {} was moved is on record in {}: {why}", volume.name, path.display());
        Error::new(ErrorCode::JournalUnreadable, message).with_hint("put back a copy of that file")
    };
    match record.map_err(|error| unreadable(&error.chain()))? {
        None => Err(unreadable("it is empty")),
        Some(record) if record.state == GroupState::Open => Ok(()),
        Some(_) => commit_with_group(volume).await,
    }
}

async fn open_journal(
    layout: &Layout,
    name: &str,
    (backends, env): (&Arc<dyn Backends>, &EnvRef),
) -> Result<VolumeJournal> {
    let path = layout.journal(name);
    VolumeJournal::open(&path, backends, &**env).await.map_err(|error| {
        if may_pass(error.kind()) || error.kind() == block::ErrorKind::Unsupported {
            return of_journal(name, &path, &error);
        }
        Error::new(ErrorCode::JournalUnreadable, format!("the journal of {name}: {}", error.chain()))
            .with_hint("serve the backend by hand, for instance with nbdkit or qemu-nbd")
    })
}

/// Opens what holds the volume, if that is what its record names.
async fn open(
    document: &VolumeDocument,
    open_options: &BackendOpenOptions,
    config: &Config,
    (backends, env): (&Arc<dyn Backends>, &EnvRef),
) -> Result<OpenBackend> {
    let open_backend = match &document.backend {
        Location::Foreign(export) => OpenBackend::foreign(export, open_options, config.nbd_reconnect_limit(), env),
        place => {
            let spec = require_local(place, "there is nothing here to serve")?;
            backends.open_backend(spec, open_options, &**env).await
        }
    };
    let checked = open_backend.and_then(|open_backend| {
        open_backend.require_image(document.image_of(&document.backend))?;
        Ok(open_backend)
    });
    checked.map_err(|error| of_backend(&error, "the backend"))
}

async fn serve(state_dir: &Path, name: &str, json: bool) -> Result<()> {
    let env: EnvRef = Arc::new(RealEnv::new());
    descriptors::raise_limit();
    outlive_file_limit()?;
    let config = Config::default();
    check_name(name)?;
    let state_dir = std::path::absolute(state_dir)
        .map_err(|error| of_state(error, format!("looking at {}", state_dir.display())))?;
    // Nothing is created in a directory that is named by mistake.
    if !Layout::new(&state_dir, RealFiles::shared()).volumes().is_dir() {
        let message = format!("{} is no state directory of transhumed", state_dir.display());
        return Err(Error::new(ErrorCode::NotFound, message).with_hint("name the daemon's with --state-dir"));
    }
    // One rescue of each volume may run beside others, but none beside a daemon.
    let lock = StateDir::share(&state_dir, &*env).await?;
    let layout = Layout::new(&state_dir, RealFiles::shared());
    if !layout.volume(name).is_dir() {
        return Err(no_volume(name));
    }
    let backends: Arc<dyn Backends> = Arc::new(RealBackends::with_helpers());
    let journal = open_journal(&layout, name, (&backends, &env)).await?;
    let volume = Volume::new(name, journal, Arc::clone(&env));
    settle_group(&volume, &layout, &backends, &env).await?;
    let document = volume.document();
    check_held(&document)?;
    if document.job.as_ref().is_some_and(|job| job.committed.is_none()) {
        // Before the first write is taken: from here on the target misses what is written.
        layout.forget_progress(name)?;
    }
    let open_options = volume.open_options(config.lock_wait());
    let open_backend = open(&document, &open_options, &config, (&backends, &env)).await?;
    if document.incoming.as_ref().is_some_and(|incoming| incoming.machine.is_none()) {
        // Whoever comes here writes what the guest of the other host knows nothing of.
        let id = random_uuid(&*env);
        let stored = volume.journal.update(|document| document.open_to_others(id));
        stored.await.map_err(|error| of_backend(&error, "the volume's journal"))?;
    }
    volume.recall_loss(&open_backend);
    volume.journal.mark_image();
    let pool = BufferPool::new(Bytes::mib(config.request_pool_mib));
    let pools = PoolContext::new(layout, Arc::clone(&backends), Arc::clone(&env), config.nbd_reconnect_limit());
    let overlay_context = OverlayContext {
        backends: Arc::clone(&backends),
        surrogates: Arc::new(Surrogates::load(&pools)?),
        caches: Arc::new(Caches::load(&pools)?),
        lent_parts: LentParts::default(),
        env: Arc::clone(&env),
        boot: boot_identity()?,
    };
    let (slot, export) = volume.bring_up(open_backend, pool, &overlay_context, &open_options).await?;
    let workers = Arc::new(Workers::start(config.worker_count())?);
    let listeners = Listeners::new(Arc::clone(&env), workers);
    let uri = volume.uri()?;
    let failed = |error| of_state(error, "listening to signals");
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    // The guest goes on when the terminal goes away in which this was started.
    let _hangup = signal(SignalKind::hangup()).map_err(failed)?;
    listeners.offer(&uri, export, document.clients()).await?;
    say(&match json {
        true => {
            serde_json::json!({ "volume": name, "backend": document.backend, "export": document.export }).to_string()
        }
        false => format!("{name} is served at {} from {}; Ctrl-C ends it", document.export, document.backend),
    });
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    listeners.close().await;
    // What is in flight is answered, what comes after waits for the daemon.
    std::mem::forget(env::timeout(&*env, DRAIN_LIMIT, slot.quiesce()).await);
    if let Some(export) = volume.with_backend(|backend| backend.export().map(Arc::clone)).flatten() {
        // The process ends whether the server answers or not.
        let _ = flush_last(&export, Some(&volume), FLUSH_LIMIT, &env).await;
    }
    // Not torn down: that would wait for a device that hangs, and let the lock go before the process has ended.
    std::mem::forget((volume, listeners, lock));
    Ok(())
}

/// Says `text` on the standard output, if anybody is there.
fn say(text: &str) {
    let mut out = std::io::stdout();
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}
