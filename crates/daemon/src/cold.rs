//! `transhume copy`: a disk that nobody uses, from one place to another, in the process of whoever asks. No daemon, no
//! journal: what is interrupted is begun again.
//!
//! Files are locked as the daemon locks them, so a volume that is served or an image that a QEMU has is refused. An export
//! of an NBD server has no lock; it is the caller's word that nobody writes to it. A server that is lost is waited for.

use std::time::Duration;

use api::v1::{Error, ErrorCode};
use backends::{BackendSpec, CacheMode, PreparedTarget, TargetError, TargetOrigin, TargetRequest, prepare_target};
use block::{Bytes, ErrorKind};
use env::{EnvRef, Moment, RealEnv};
use migrate::{ColdOptions, ColdProgress, copy_cold};
use nbd::NbdUri;
use serde::Serialize;

use crate::file_limit::outlive_file_limit;
use crate::foreign::{inspect, parse_uri};
use crate::location::parse_backend;
use crate::open_backend::{BackendOpenOptions, CLIENT_SECTOR, OpenBackend, suited};
use crate::platform::RealBackends;
use crate::problem::{Result, of_backend, of_state, of_target};

/// How long a server that is lost is waited for.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often progress is shown.
const INTERVAL: Duration = Duration::from_millis(250);

/// What is to be copied.
#[derive(Clone, Debug, Default)]
pub struct CopyRequest {
    /// From where: `file:PATH[,...]`, `nbd://HOST:PORT/NAME` or `nbd+unix:///NAME?socket=PATH`, or these with `nbds` for TLS.
    pub source: String,
    /// Where to, written alike.
    pub to: String,
    /// Whether what the target holds may be destroyed.
    pub overwrite: bool,
    /// At most so many bytes a second are read; none or 0 for no limit.
    pub bandwidth: Option<u64>,
    /// Whether both sides are read again and compared.
    pub verify: bool,
}

/// How far a copy is.
#[derive(Clone, Copy, Debug)]
pub struct CopyStep {
    /// Whether it is comparing already.
    pub compares: bool,
    /// How many bytes are copied, or compared.
    pub done: Bytes,
    /// Of how many.
    pub total: Bytes,
}

/// What was copied.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CopyReport {
    /// From where.
    pub source: String,
    /// Where to.
    pub target: String,
    /// How large the source is.
    pub bytes_total: u64,
    /// What was written as data.
    pub bytes_copied: u64,
    /// What holds nothing but zeroes.
    pub bytes_zero: u64,
    /// How long it took.
    pub seconds: f64,
    /// Whether both sides were compared and are equal.
    pub verified: bool,
}

/// How a copy ended without an error.
#[derive(Clone, Debug, PartialEq)]
pub enum CopyOutcome {
    /// All of it is there.
    Copied(CopyReport),
    /// It was interrupted with Ctrl-C or SIGTERM.
    Interrupted {
        /// What became of the target, in words.
        rest: String,
    },
}

/// Copies, and tells `watch` how far it is now and then. If it is interrupted a target that was created for it is gone, as it is
/// after an error, unless the words that come with either say that it is not.
///
/// # Errors
/// One side cannot be used, or fails on the way, or they differ in the end.
pub fn copy(request: &CopyRequest, watch: impl FnMut(CopyStep)) -> Result<CopyOutcome> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .map_err(|error| of_state(error, "starting the event loop"))?;
    runtime.block_on(carry_out(request, watch))
}

async fn carry_out(request: &CopyRequest, watch: impl FnMut(CopyStep)) -> Result<CopyOutcome> {
    outlive_file_limit()?;
    let env: EnvRef = std::sync::Arc::new(RealEnv::new());
    let start = env.now();
    let source = Source::open(&request.source, &env).await?;
    let target = Target::open(request, &source, &env).await?;
    let options = ColdOptions { target_is_zero: target.is_zero, bandwidth: request.bandwidth, verify: request.verify };
    let progress = ColdProgress::default();
    let (from, to) = (&source.open_backend.device, &target.open_backend.device);
    let copying = copy_cold(&env, from, to, options, &progress);
    let outcome = tokio::select! {
        biased;
        outcome = copying => Some(outcome),
        never = show(&env, &progress, from.size(), watch) => match never {},
        () = interrupted() => None,
    };
    match outcome {
        Some(Ok(())) => Ok(CopyOutcome::Copied(source.report(&target, &progress, (start, &env), request.verify))),
        Some(Err(error)) => {
            let rest = target.discard(&env).await;
            let refused = with_rest(of_backend(&error, "the copy"), &rest);
            Err(match error.kind() {
                ErrorKind::Corrupt => Error::new(ErrorCode::NotEqual, refused.message)
                    .with_hint("somebody has written to one of them, or a medium is bad: copy again with --overwrite"),
                _ => refused,
            })
        }
        None => Ok(CopyOutcome::Interrupted { rest: target.discard(&env).await }),
    }
}

async fn show(
    env: &EnvRef,
    progress: &ColdProgress,
    total: Bytes,
    mut watch: impl FnMut(CopyStep),
) -> std::convert::Infallible {
    loop {
        let compares = progress.done() >= total;
        let done = if compares { progress.compared() } else { progress.done() };
        watch(CopyStep { compares, done, total });
        env.sleep(INTERVAL).await;
    }
}

async fn interrupted() {
    use tokio::signal::unix::{SignalKind, signal};
    let Ok(mut terminate) = signal(SignalKind::terminate()) else { return std::future::pending().await };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = terminate.recv() => {}
    }
}

/// What is read.
struct Source {
    open_backend: OpenBackend,
    place: Place,
}

/// Where one side is.
enum Place {
    File(BackendSpec),
    Export(NbdUri),
}

impl Place {
    fn parse(text: &str) -> Result<Self> {
        match NbdUri::is_meant(text) {
            true => parse_uri(text).map(Self::Export),
            false => parse_backend(text, CacheMode::Auto).map(Self::File),
        }
    }
}

impl Source {
    async fn open(text: &str, env: &EnvRef) -> Result<Self> {
        let place = Place::parse(text)?;
        let open_backend = match &place {
            Place::File(spec) => {
                let spec = suited(spec.clone(), &RealBackends::default())?;
                // Opened for writing where that can be, because only then everybody else can be kept out.
                let alone = OpenBackend::open(&spec, &BackendOpenOptions::default(), None, &**env).await;
                let open_backend = match alone {
                    Err(error) if matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::ReadOnly) => {
                        OpenBackend::open(
                            &spec,
                            &BackendOpenOptions { read_only: true, ..BackendOpenOptions::default() },
                            None,
                            &**env,
                        )
                        .await
                    }
                    other => other,
                };
                open_backend.map_err(|error| of_backend(&error, "the source"))?
            }
            Place::Export(uri) => {
                let export = inspect(uri, env).await.map_err(|error| of_backend(&error, "the source"))?;
                let read_only = BackendOpenOptions { read_only: true, ..BackendOpenOptions::default() };
                OpenBackend::foreign(&export.whole(), &read_only, PATIENCE, env)
                    .map_err(|error| of_backend(&error, "the source"))?
            }
        };
        open_backend.serve_guest();
        Ok(Self { open_backend, place })
    }

    fn report(
        &self,
        target: &Target,
        progress: &ColdProgress,
        (start, env): (Moment, &EnvRef),
        verified: bool,
    ) -> CopyReport {
        CopyReport {
            source: self.open_backend.place.to_string(),
            target: target.open_backend.place.to_string(),
            bytes_total: self.open_backend.device.size().get(),
            bytes_copied: progress.data().get(),
            bytes_zero: progress.done().saturating_sub(progress.data()).get(),
            seconds: env.now().since(start).as_secs_f64(),
            verified,
        }
    }
}

/// What is written.
struct Target {
    open_backend: OpenBackend,
    is_zero: bool,
    /// What is taken back if nothing comes of it.
    prepared: Option<PreparedTarget>,
}

impl Target {
    async fn open(request: &CopyRequest, source: &Source, env: &EnvRef) -> Result<Self> {
        let geometry = source.open_backend.device.geometry();
        let target = match Place::parse(&request.to)? {
            Place::File(spec) => Self::open_file(request, spec, source, env).await?,
            Place::Export(uri) => {
                if matches!(&source.place, Place::Export(from) if from.is_same_export(&uri)) {
                    return Err(Error::new(ErrorCode::TargetSame, "source and target are one and the same export")
                        .with_hint("name another target"));
                }
                let found = inspect(&uri, env).await.map_err(|error| crate::foreign::of_server(&error))?;
                let export = found.as_target(geometry, request.overwrite, env).await?;
                let open_backend = OpenBackend::foreign(&export, &BackendOpenOptions::default(), PATIENCE, env)
                    .map_err(|error| of_backend(&error, "the target"))?;
                Self { open_backend, is_zero: export.reads_zero, prepared: None }
            }
        };
        target.open_backend.serve_guest();
        Ok(target)
    }

    async fn open_file(request: &CopyRequest, spec: BackendSpec, source: &Source, env: &EnvRef) -> Result<Self> {
        let geometry = source.open_backend.device.geometry();
        let is_odd = !geometry.size.is_multiple_of(CLIENT_SECTOR.into());
        let spec = if is_odd && spec.cache == CacheMode::Auto { spec.with_cache(CacheMode::Page) } else { spec };
        let asked = TargetRequest {
            spec: &spec,
            source: match &source.place {
                Place::File(spec) => Some(spec.path()),
                Place::Export(_) => None,
            },
            size: geometry.size,
            guest_alignment: geometry.request_alignment.max(CLIENT_SECTOR),
            overwrite: request.overwrite,
        };
        let prepared = prepare_target(&asked, &**env).await.map_err(|error| of_target(&error))?;
        let open_options = BackendOpenOptions { size_limit: Some(geometry.size), ..BackendOpenOptions::default() };
        let open_options = open_options.for_target();
        match OpenBackend::open(&prepared.spec, &open_options, None, &**env).await {
            Ok(open_backend) => Ok(Self { open_backend, is_zero: prepared.reads_zero, prepared: Some(prepared) }),
            Err(error) => {
                let rest = discard(&prepared, env).await;
                Err(with_rest(of_backend(&error, "the target"), &rest))
            }
        }
    }

    /// Takes it back as far as that can be. Gives what became of it, in words.
    async fn discard(self, env: &EnvRef) -> String {
        let place = self.open_backend.place.to_string();
        drop(self.open_backend);
        match &self.prepared {
            Some(prepared) => discard(prepared, env).await,
            None => half_written(&place),
        }
    }
}

fn half_written(place: &str) -> String {
    format!("{place} is left as far as the copy came")
}

/// Takes back a file that was made ready. Gives what became of it, in words.
async fn discard(prepared: &PreparedTarget, env: &EnvRef) -> String {
    let place = prepared.spec.to_string();
    if prepared.origin == TargetOrigin::BlockDevice {
        return half_written(&place);
    }
    let left = |error: TargetError| match error {
        TargetError::Replaced { .. } => format!("{place} is left as it is: somebody has deleted or replaced it"),
        error => format!("{place} is left as it is: {error}"),
    };
    // What is another one by now, or away, is not touched.
    if let Err(error) = prepared.check() {
        return left(error);
    }
    if let Err(error) = prepared.discard_once_free(&**env).await {
        return left(error);
    }
    match (prepared.check(), prepared.origin) {
        // Where it was before this very moment nothing is any more.
        (Err(TargetError::Replaced { .. }), TargetOrigin::Created) => format!("{place} is removed"),
        (Err(error), _) => left(error),
        (Ok(()), TargetOrigin::Created) => format!("{place} is left as it is: a move has made it a volume meanwhile"),
        (Ok(()), _) => format!("{place} is left empty"),
    }
}

/// The error with what became of the target.
fn with_rest(error: Error, rest: &str) -> Error {
    Error { message: format!("{}; {rest}", error.message), ..error }
}
