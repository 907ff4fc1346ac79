//! The daemon's life: up, serving, and politely down.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use block::Quiesced;
use env::{EnvRef, RealEnv};
use tokio::signal::unix::{SignalKind, signal};

use crate::args::Args;
use crate::audit::Peer;
use crate::config::Config;
use crate::daemon::Daemon;
use crate::file_limit::outlive_file_limit;
use crate::hosts::{HostNetwork, NoHosts, RealHosts};
use crate::http::ApiListener;
use crate::listeners::Listeners;
use crate::log::{Log, say_aside};
use crate::platform::{Hosts, Platform};
use crate::problem::{Result, invalid, of_state};
use crate::reload::Reload;
use crate::sockets::{listen_unix, make_parent};
use crate::stack::{StackedCache, StackedRedirect};
use crate::state_dir::StateDir;
use crate::volume::Volume;
use crate::workers::Workers;
use crate::{descriptors, http, machines, recover, remote};

/// How long requests in flight may take when the daemon goes down. A device that hangs has them for ever: the process
/// ends without them.
pub(crate) const DRAIN_LIMIT: Duration = Duration::from_secs(20);
/// How long caches and surrogates have for their last note, however long requests have taken.
const LEAVE_LIMIT_MIN: Duration = Duration::from_secs(1);
/// How long NBD servers may take then to make durable what they have answered.
pub(crate) const FLUSH_LIMIT: Duration = Duration::from_secs(5);
/// Threads of the control plane.
const CONTROL_THREADS: usize = 2;

/// Runs the daemon until it is told to end, and gives what the process exits with.
#[must_use]
pub fn main(args: &Args) -> ExitCode {
    match start(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say_aside(&format!("transhumed: {error}"));
            ExitCode::from(error.exit_code)
        }
    }
}

fn start(args: &Args) -> Result<()> {
    let config = Config::load(args.config.as_deref())?;
    let log = Log::start(&config.log)?;
    descriptors::raise_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(CONTROL_THREADS)
        .thread_name("control")
        .enable_all()
        .build()
        .map_err(|error| of_state(error, "starting the control plane"))?;
    let outcome = runtime.block_on(serve(args, config, &log));
    // What still runs is driven by nobody any more; the journal knows of it.
    runtime.shutdown_background();
    log.queue().drain();
    outcome
}

fn listen_path(listen: &str) -> Result<PathBuf> {
    let path = listen.strip_prefix("unix:").filter(|path| !path.is_empty()).ok_or_else(|| {
        invalid(
            format!("--listen {listen} is no unix socket"),
            "write unix:PATH; the API is for the users of this machine, whom the kernel names",
        )
    })?;
    std::path::absolute(path).map_err(|error| of_state(error, format!("looking at {path}")))
}

async fn serve(args: &Args, config: Config, log: &Log) -> Result<()> {
    let env: EnvRef = Arc::new(RealEnv::new());
    // From here on a terminal that goes away ends nothing.
    let hangup = on_signal(SignalKind::hangup())?;
    outlive_file_limit()?;
    let api_path = listen_path(&args.listen)?;
    let state_dir = std::path::absolute(&args.state_dir)
        .map_err(|error| of_state(error, format!("looking at {}", args.state_dir.display())))?;
    let state = StateDir::open(&state_dir, &*env).await?;
    make_parent(&api_path)?;
    // Taken before anything is served: a second daemon of the same socket has no effect at all.
    let (listener, socket) = listen_unix(&api_path, None, &*env).await?;
    let socket_dir = api_path.parent().map(std::path::Path::to_owned).unwrap_or_default();
    let workers = Arc::new(Workers::start(config.worker_count())?);
    let listeners = Arc::new(Listeners::new(Arc::clone(&env), workers));
    let open = |hosts| HostNetwork::open(Arc::clone(&env), hosts, state.layout(), config.worker_count());
    let (host_network, problem) = match config.hosts.as_ref().map(open).transpose() {
        Ok(network) => (network, None),
        // The guests' disks do not depend on it.
        Err(error) => {
            tracing::error!(%error, "this host is none among others until that is mended and the daemon is restarted");
            (None, Some(error))
        }
    };
    let hosts: Arc<dyn Hosts> = match &host_network {
        Some(network) => Arc::new(RealHosts(Arc::clone(network))),
        None => Arc::new(NoHosts),
    };
    let mut daemon = Daemon::new(Platform::real(env, listeners, hosts)?, config, state, socket_dir)?;
    (daemon.host_network, daemon.host_problem) = (host_network, problem);
    daemon.log_queue = Some(log.queue().clone());
    let daemon = Arc::new(daemon);
    // Never torn down. Whoever ends a worker waits for its requests, and a device that hangs keeps them for ever. And
    // the lock of the state directory must not be free while anything of this process still is at work.
    std::mem::forget(Arc::clone(&daemon));
    daemon.reach_host_stores().await;
    recover::recover(&daemon).await?;
    if daemon.host_network.is_some()
        && let Err(error) = std::fs::create_dir_all(&daemon.socket_dir)
    {
        // Where volumes are served that come from other hosts.
        tracing::error!(%error, path = %daemon.socket_dir.display(), "the directory for sockets could not be made");
    }
    machines::recover(&daemon)?;
    let reception = machines::Reception::new(&daemon, remote::receiver(&daemon)?)?;
    daemon.hosts.listen(reception).await?;
    if let Some(network) = &daemon.host_network {
        network.listen().await;
    }

    let reload = Reload { config: args.config.clone(), log: log.clone() };
    tokio::spawn(reload.serve(hangup, Arc::clone(&daemon)));
    let mut terminate = on_signal(SignalKind::terminate())?;
    let mut interrupt = on_signal(SignalKind::interrupt())?;
    let end = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    let router = http::router(Arc::clone(&daemon)).into_make_service_with_connect_info::<Peer>();
    tracing::info!(api = %api_path.display(), state = %state_dir.display(), "transhumed is up");
    // Without a service manager there is nobody to tell.
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    tokio::select! {
        served = async { axum::serve(ApiListener::new(listener, Arc::clone(&daemon.env)), router).await } => {
            served.map_err(|error| of_state(error, "serving the API"))?;
        }
        () = end => {}
    }
    go_down(&daemon).await;
    socket.remove();
    Ok(())
}

fn on_signal(kind: SignalKind) -> Result<tokio::signal::unix::Signal> {
    signal(kind).map_err(|error| of_state(error, "listening to signals"))
}

/// The caches and surrogates of `volumes` are left as the next start is to find them.
async fn leave_layers(volumes: &[Arc<Volume>]) {
    let caches = volumes.iter().filter_map(|volume| volume.with_stack(|stack| stack.cache().cloned()).flatten());
    let redirects = volumes.iter().filter_map(|volume| volume.with_stack(|stack| stack.redirect().cloned()).flatten());
    let caches = futures::future::join_all(caches.map(StackedCache::leave));
    let redirects = futures::future::join_all(redirects.map(StackedRedirect::leave));
    futures::join!(caches, redirects);
}

/// Leaves everything as the next start is to find it: requests in flight are answered, and clients are held from then on, for as long as
/// what this gives lives. Nobody is let in any more.
pub(crate) async fn come_to_rest(daemon: &Daemon) -> Vec<Quiesced> {
    daemon.pause_copies();
    let begun = daemon.env.now();
    let volumes = daemon.volumes();
    let held = futures::future::join_all(volumes.iter().map(|volume| async {
        let held = env::timeout(&*daemon.env, DRAIN_LIMIT, volume.slot()?.quiesce()).await;
        if held.is_none() {
            tracing::warn!(volume = volume.name, "requests in flight did not end in time");
        }
        held
    }));
    let held = held.await.into_iter().flatten().collect();
    // A cache that takes longer, because its backend is away, begins cold. What requests have waited for a backend counts for it, too.
    let rest = DRAIN_LIMIT.saturating_sub(daemon.env.now().since(begun)).max(LEAVE_LIMIT_MIN);
    let _ = env::timeout(&*daemon.env, rest, leave_layers(&volumes)).await;
    // Nobody writes to a file any more, a cache neither.
    daemon.note_rest().await;
    held
}

/// Shuts down so that the next start can take over. No connection is accepted any more, and every request in flight is
/// answered. Later requests are left in their sockets for their clients to send again.
async fn go_down(daemon: &Daemon) {
    tracing::info!("transhumed goes down; clients wait for the next one");
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
    daemon.network.close().await;
    if let Some(hosts) = &daemon.host_network {
        hosts.close();
    }
    // Held until the process is gone: a request that is let through now would die half-way.
    std::mem::forget(come_to_rest(daemon).await);
    // Nobody else knows of that after this process.
    daemon.flush_foreign(FLUSH_LIMIT).await;
    daemon.note(&Peer::daemon(), ("daemon.stop", ""), serde_json::Value::Null, None);
    tracing::info!("transhumed is down");
}
