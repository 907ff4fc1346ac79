//! The HTTP API: paths to operations. What an operation is, the other modules say.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use api::v1::{self, Error, ErrorCode};
use axum::body::Bytes;
use axum::extract::connect_info::Connected;
use axum::extract::{ConnectInfo, DefaultBodyLimit, FromRequest, FromRequestParts, Path, Query, Request, State};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, patch, post};
use axum::serve::IncomingStream;
use axum::{Json, Router};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::audit::Peer;
use crate::daemon::Daemon;
use crate::metrics;
use crate::problem::Result;

/// The largest request that is read.
const REQUEST_BYTES_MAX: usize = 1 << 20;

type Shared = State<Arc<Daemon>>;
type Who = ConnectInfo<Peer>;

impl Connected<IncomingStream<'_, tokio::net::UnixListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, tokio::net::UnixListener>) -> Self {
        Self::of(stream.io())
    }
}

/// The paths.
pub(crate) fn router(daemon: Arc<Daemon>) -> Router {
    Router::new()
        .route("/v1/version", get(async |State(daemon): Shared| Json(daemon.version())))
        .route("/v1/status", get(async |State(daemon): Shared| Json(daemon.status())))
        .route("/v1/volumes", get(volumes).post(attach))
        .route("/v1/volumes/{name}", get(volume).delete(detach))
        .route("/v1/volumes/{name}/layers", get(layers).post(add_layer))
        .route("/v1/volumes/{name}/layers/{layer}", patch(change_layer).delete(remove_layer))
        .route("/v1/volumes/{name}/snapshots", post(add_snapshot))
        .route("/v1/volumes/{name}/snapshots/{snapshot}", delete(remove_snapshot))
        .route("/v1/volumes/{name}/revert", post(revert))
        .route("/v1/volumes/{name}/resolve", post(resolve))
        .route("/v1/volumes/{name}/move", post(start_move))
        .route("/v1/volumes/{name}/move-all", post(start_move_of_all))
        .route("/v1/volumes/{name}/plan", post(plan))
        .route("/v1/volumes/{name}/plan-all", post(plan_all))
        .route("/v1/volumes/{name}/job", patch(set))
        .route("/v1/volumes/{name}/job/{action}", post(steer))
        .route("/v1/adoptions/check", post(check))
        .route("/v1/adoptions", post(adopt))
        .route("/v1/adoptions/{name}/release", post(release))
        .route("/v1/surrogates", get(surrogates).post(create_surrogate))
        .route("/v1/surrogates/{name}", get(surrogate).delete(remove_surrogate))
        .route("/v1/surrogates/{name}/drain", post(drain_surrogate))
        .route("/v1/surrogates/{name}/repair", post(repair_surrogate))
        .route("/v1/caches", get(caches).post(create_cache))
        .route("/v1/caches/{name}", get(cache).delete(remove_cache))
        .route("/v1/caches/{name}/resize", post(resize_cache))
        .route("/v1/caches/{name}/drain", post(drain_cache))
        .route("/v1/vms", get(vms).post(add_vm))
        .route("/v1/found-vms", get(found_vms))
        .route("/v1/vms/{name}", get(vm).delete(remove_vm))
        .route("/v1/vms/{name}/plan", post(plan_vm))
        .route("/v1/vms/{name}/prepare", get(prepare_vm))
        .route("/v1/vms/{name}/move", get(vm_move).post(move_vm).delete(cancel_vm))
        .route("/v1/vms/{name}/resume", post(resume_vm))
        .route("/v1/vms/{name}/resolve", post(resolve_vm))
        .route("/v1/vms/{name}/release", post(release_vm))
        .route("/v1/jobs", get(jobs))
        .route("/v1/jobs/{id}", get(job))
        .route("/v1/host", get(host))
        .route("/v1/host/renew", post(renew_host))
        .route("/v1/host/invite", post(invite))
        .route("/v1/hosts", get(trusted_hosts).post(pair))
        .route("/v1/hosts/{name}", patch(change_host).delete(remove_host))
        .route("/metrics", get(render_metrics))
        .fallback(async || Failure(Error::new(ErrorCode::NotFound, "the API has no such path")))
        .method_not_allowed_fallback(async || Failure(Error::new(ErrorCode::Invalid, "this path takes another method")))
        .layer(DefaultBodyLimit::max(REQUEST_BYTES_MAX))
        .with_state(daemon)
}

/// An error as an answer.
struct Failure(Error);

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status = match self.0.code {
            ErrorCode::NotFound => StatusCode::NOT_FOUND,
            ErrorCode::Invalid => StatusCode::BAD_REQUEST,
            ErrorCode::Internal | ErrorCode::Io => StatusCode::INTERNAL_SERVER_ERROR,
            _ => StatusCode::CONFLICT,
        };
        (status, Json(self.0)).into_response()
    }
}

type Answer<T> = Result<Json<T>, Failure>;

/// A part of a request; what makes it unreadable is told like every other error, and not in the framework's plain text.
struct Part<P>(P);

impl<S: Send + Sync, P> FromRequestParts<S> for Part<P>
where
    P: FromRequestParts<S, Rejection: Display>,
{
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        P::from_request_parts(parts, state).await.map(Self).map_err(|why| unreadable(why).into())
    }
}

/// All that a request says, at most [`REQUEST_BYTES_MAX`].
struct Body(Bytes);

impl<S: Send + Sync> FromRequest<S> for Body {
    type Rejection = Failure;

    async fn from_request(request: Request, state: &S) -> Result<Self, Failure> {
        Bytes::from_request(request, state).await.map(Self).map_err(|why| unreadable(why).into())
    }
}

/// What cannot be read, in one line.
fn unreadable(why: impl Display) -> Error {
    let why = why.to_string().replace(['\n', '\r'], " ");
    Error::new(ErrorCode::Invalid, format!("the request cannot be read: {why}"))
        .with_hint("send the JSON that docs/cli.md and the crate transhume-api describe")
}

/// What a request says.
fn parse<T: DeserializeOwned>(body: &Bytes) -> Result<T> {
    serde_json::from_slice(body).map_err(unreadable)
}

/// Carries out something that changes something: to its end, even if whoever asked goes away meanwhile, and noted in
/// the audit log.
async fn audited<T, Work>(
    daemon: Arc<Daemon>,
    peer: Peer,
    (action, subject): (&'static str, String),
    request: &impl Serialize,
    work: impl FnOnce(Arc<Daemon>, Peer) -> Work + Send + 'static,
) -> Answer<T>
where
    T: Send + 'static,
    Work: Future<Output = Result<T>> + Send + 'static,
{
    let request = serde_json::to_value(request).unwrap_or_default();
    let task = tokio::spawn(async move {
        let outcome = work(Arc::clone(&daemon), peer.clone()).await;
        daemon.note(&peer, (action, &subject), request, outcome.as_ref().err());
        outcome
    });
    // A panic ends the process; what else ends a task is the daemon's own end.
    let outcome = task.await.unwrap_or_else(|ended| {
        Err(Error::new(ErrorCode::Internal, format!("the daemon ended before this was done: {ended}"))
            .with_hint("ask it once it is back what became of it"))
    });
    Ok(Json(outcome?))
}

async fn volumes(State(daemon): Shared) -> Json<Vec<v1::Volume>> {
    Json(daemon.shown_volumes())
}

async fn volume(State(daemon): Shared, Part(Path(name)): Part<Path<String>>) -> Answer<v1::Volume> {
    Ok(Json(daemon.volume(&name)?.show()))
}

async fn attach(State(daemon): Shared, ConnectInfo(peer): Who, Body(body): Body) -> Answer<v1::Volume> {
    let request: v1::AttachRequest = parse(&body)?;
    let action = ("volume.attach", request.name.clone());
    audited(daemon, peer, action, &request.clone(), async |daemon, _| daemon.attach(request).await).await
}

async fn detach(
    State(daemon): Shared,
    ConnectInfo(peer): Who,
    Part(Path(name)): Part<Path<String>>,
) -> Answer<v1::Volume> {
    let action = ("volume.detach", name.clone());
    audited(daemon, peer, action, &(), async move |daemon, _| daemon.detach(&name).await).await
}

async fn layers(State(daemon): Shared, Part(Path(name)): Part<Path<String>>) -> Answer<Vec<v1::Layer>> {
    Ok(Json(daemon.volume(&name)?.show_layers()))
}

async fn add_layer(
    State(daemon): Shared,
    ConnectInfo(peer): Who,
    Part(Path(name)): Part<Path<String>>,
    Body(body): Body,
) -> Answer<v1::Volume> {
    let request: v1::LayerRequest = parse(&body)?;
    let action = ("layer.add", name.clone());
    audited(daemon, peer, action, &request.clone(), async move |daemon, _| daemon.add_layer(&name, request).await).await
}

async fn change_layer(
    State(daemon): Shared,
    ConnectInfo(peer): Who,
    Part(Path((name, layer))): Part<Path<(String, String)>>,
    Body(body): Body,
) -> Answer<v1::Volume> {
    let request: v1::LayerChangeRequest = parse(&body)?;
    let action = ("layer.change", name.clone());
    let work = async move |daemon: Arc<Daemon>, _| daemon.change_layer(&name, &layer, request).await;
    audited(daemon, peer, action, &request, work).await
}

#[derive(Deserialize)]
struct RemoveLayerQuery {
    #[serde(default)]
    discard_dirty: bool,
}

async fn remove_layer(
    State(daemon): Shared,
    ConnectInfo(peer): Who,
    Part(Path((name, layer))): Part<Path<(String, String)>>,
    Part(Query(query)): Part<Query<RemoveLayerQuery>>,
) -> Answer<v1::Volume> {
    if query.discard_dirty {
        let (action, what) = (("layer.discard", name.clone()), layer.clone());
        let work = async move |daemon: Arc<Daemon>, _| daemon.discard_layer(&name, &layer).await;
        return audited(daemon, peer, action, &what, work).await;
    }
    let action = ("layer.remove", name.clone());
    audited(daemon, peer, action, &layer.clone(), async move |daemon, _| daemon.remove_layer(&name, &layer).await).await
}

async fn add_snapshot(
    State(daemon): Shared,
    ConnectInfo(peer): Who,
    Part(Path(name)): Part<Path<String>>,
    Body(body): Body,
) -> Answer<v1::Volume> {
    let request: v1::SnapshotRequest = parse(&body)?;
    let action = ("snapshot.add", name.clone());
    let work = async move |daemon: Arc<Daemon>, _| daemon.add_snapshot(&name, request).await;
    audited(daemon, peer, action, &parse::<serde_json::Value>(&body)?, work).await
}

async fn remove_snapshot(
    State(daemon): Shared,
    ConnectInfo(peer): Who,
    Part(Path((name, snapshot))): Part<Path<(String, String)>>,
) -> Answer<v1::Volume> {
    let action = ("snapshot.remove", name.clone());
    let work = {
        let snapshot = snapshot.clone();
        async move |daemon: Arc<Daemon>, _| daemon.remove_snapshot(&name, &snapshot).await
    };
    audited(daemon, peer, action, &snapshot, work).await
}

async fn surrogates(State(daemon): Shared) -> Json<Vec<v1::Surrogate>> {
    Json(daemon.shown_surrogates())
}

async fn surrogate(State(daemon): Shared, Part(Path(name)): Part<Path<String>>) -> Answer<v1::Surrogate> {
    Ok(Json(daemon.show_surrogate(&*daemon.surrogates.get(&name)?)))
}

async fn create_surrogate(State(daemon): Shared, ConnectInfo(peer): Who, Body(body): Body) -> Answer<v1::Surrogate> {
    let request: v1::SurrogateRequest = parse(&body)?;
    let action = ("surrogate.create", request.name.clone());
    let work = async move |daemon: Arc<Daemon>, _| daemon.create_surrogate(request).await;
    audited(daemon, peer, action, &parse::<serde_json::Value>(&body)?, work).await
}

async fn drain_surrogate(
    State(daemon): Shared,
    ConnectInfo(peer): Who,
    Part(Path(name)): Part<Path<String>>,
) -> Answer<v1::Surrogate> {
    let action = ("surrogate.drain", name.clone());
    let work = async move |daemon: Arc<Daemon>, _| Ok(daemon.show_surrogate(&*daemon.surrogates.drain(&name)?));
    audited(daemon, peer, action, &(), work).await
}

async fn repair_surrogate(
    State(daemon): Shared,
    Part(Path(name)): Part<Path<String>>,
    ConnectInfo(peer): Who,
    Body(body): Body,
) -> Answer<v1::Surrogate> {
    let request: v1::SurrogateRepairRequest = parse(&body)?;
    let (action, asked) = (("surrogate.repair", name.clone()), request.clone());
    let work = async move |daemon: Arc<Daemon>, _| daemon.repair_surrogate(&name, asked).await;
    audited(daemon, peer, action, &request, work).await
}

async fn remove_surrogate(
    State(daemon): Shared,
    ConnectInfo(peer): Who,
    Part(Path(name)): Part<Path<String>>,
) -> Answer<v1::Surrogate> {
    let action = ("surrogate.remove", name.clone());
    let work = async move |daemon: Arc<Daemon>, _| daemon.surrogates.remove(&name).await;
    audited(daemon, peer, action, &(), work).await
}

async fn caches(State(daemon): Shared) -> Json<Vec<v1::Cache>> {
    Json(daemon.shown_caches())
}

async fn cache(State(daemon): Shared, Part(Path(name)): Part<Path<String>>) -> Answer<v1::Cache> {
    Ok(Json(daemon.show_cache(&*daemon.caches.get(&name)?)))
}

async fn create_cache(State(daemon): Shared, ConnectInfo(peer): Who, Body(body): Body) -> Answer<v1::Cache> {
    let request: v1::CacheRequest = parse(&body)?;
    let action = ("cache.create", request.name.clone());
    let work = async move |daemon: Arc<Daemon>, _| daemon.caches.create(request).await;
    audited(daemon, peer, action, &parse::<serde_json::Value>(&body)?, work).await
}

async fn resize_cache(
    State(daemon): Shared,
    ConnectInfo(peer): Who,
    Part(Path(name)): Part<Path<String>>,
    Body(body): Body,
) -> Answer<v1::Cache> {
    let request: v1::CacheResizeRequest = parse(&body)?;
    let action = ("cache.resize", name.clone());
    let work = async move |daemon: Arc<Daemon>, _| {
        Ok(daemon.show_cache(&*daemon.caches.resize(&name, request.size_bytes).await?))
    };
    audited(daemon, peer, action, &request, work).await
}

async fn drain_cache(
    State(daemon): Shared,
    ConnectInfo(peer): Who,
    Part(Path(name)): Part<Path<String>>,
) -> Answer<v1::Cache> {
    let action = ("cache.drain", name.clone());
    let work = async move |daemon: Arc<Daemon>, _| daemon.drain_cache(&name).await;
    audited(daemon, peer, action, &(), work).await
}

async fn remove_cache(
    State(daemon): Shared,
    ConnectInfo(peer): Who,
    Part(Path(name)): Part<Path<String>>,
) -> Answer<v1::Cache> {
    let action = ("cache.remove", name.clone());
    let work = async move |daemon: Arc<Daemon>, _| daemon.caches.remove(&name).await;
    audited(daemon, peer, action, &(), work).await
}

async fn revert(
    State(daemon): Shared,
    ConnectInfo(peer): Who,
    Part(Path(name)): Part<Path<String>>,
    Body(body): Body,
) -> Answer<v1::Volume> {
    let request: v1::RevertRequest = parse(&body)?;
    let action = ("snapshot.revert", name.clone());
    let work = async move |daemon: Arc<Daemon>, _| daemon.revert(&name, request).await;
    audited(daemon, peer, action, &parse::<serde_json::Value>(&body)?, work).await
}

async fn resolve(
    State(daemon): Shared,
    ConnectInfo(peer): Who,
    Part(Path(name)): Part<Path<String>>,
    Body(body): Body,
) -> Answer<v1::Resolution> {
    let request: v1::ResolveRequest = parse(&body)?;
    if request.decision.is_none() {
        return Ok(Json(daemon.resolve(&name, request).await?));
    }
    let action = ("volume.resolve", name.clone());
    audited(daemon, peer, action, &request, async move |daemon, _| daemon.resolve(&name, request).await).await
}

async fn start_move(
    State(daemon): Shared,
    ConnectInfo(peer): Who,
    Part(Path(name)): Part<Path<String>>,
    Body(body): Body,
) -> Answer<v1::Job> {
    let request: v1::MoveRequest = parse(&body)?;
    let action = ("move.start", name.clone());
    let work = async move |daemon: Arc<Daemon>, peer: Peer| daemon.start_move(&peer, &name, request).await;
    audited(daemon, peer, action, &parse::<serde_json::Value>(&body)?, work).await
}

async fn start_move_of_all(
    State(daemon): Shared,
    ConnectInfo(peer): Who,
    Part(Path(name)): Part<Path<String>>,
    Body(body): Body,
) -> Answer<Vec<v1::Job>> {
    let request: v1::MoveRequest = parse(&body)?;
    let action = ("move.start-all", name.clone());
    let work =
        async move |daemon: Arc<Daemon>, peer: Peer| Box::pin(daemon.start_move_of_all(&peer, &name, request)).await;
    audited(daemon, peer, action, &parse::<serde_json::Value>(&body)?, work).await
}

async fn plan_all(
    State(daemon): Shared,
    Part(Path(name)): Part<Path<String>>,
    Body(body): Body,
) -> Answer<Vec<v1::Plan>> {
    Ok(Json(daemon.plan_all(&name, parse(&body)?).await?))
}

async fn plan(State(daemon): Shared, Part(Path(name)): Part<Path<String>>, Body(body): Body) -> Answer<v1::Plan> {
    Ok(Json(daemon.plan(&name, parse(&body)?).await?))
}

async fn set(
    State(daemon): Shared,
    ConnectInfo(peer): Who,
    Part(Path(name)): Part<Path<String>>,
    Body(body): Body,
) -> Answer<v1::Job> {
    let request: v1::SetRequest = parse(&body)?;
    let action = ("move.set", name.clone());
    audited(daemon, peer, action, &request.clone(), async move |daemon, _| daemon.set(&name, request).await).await
}

async fn steer(
    State(daemon): Shared,
    ConnectInfo(peer): Who,
    Part(Path((name, action))): Part<Path<(String, String)>>,
) -> Answer<v1::Job> {
    let noted = match &*action {
        "pause" => "move.pause",
        "resume" => "move.resume",
        _ => "move.cancel",
    };
    let subject = name.clone();
    let work = async move |daemon: Arc<Daemon>, _| daemon.steer(&name, &action).await;
    audited(daemon, peer, (noted, subject), &(), work).await
}

async fn check(State(daemon): Shared, Body(body): Body) -> Answer<Vec<v1::CheckedDisk>> {
    Ok(Json(daemon.check_adoption(parse(&body)?).await?))
}

async fn adopt(State(daemon): Shared, ConnectInfo(peer): Who, Body(body): Body) -> Answer<v1::Volume> {
    let request: v1::AdoptRequest = parse(&body)?;
    let action = ("adopt", request.name.clone());
    audited(daemon, peer, action, &request.clone(), async |daemon, _| Box::pin(daemon.adopt(request)).await).await
}

async fn release(
    State(daemon): Shared,
    ConnectInfo(peer): Who,
    Part(Path(name)): Part<Path<String>>,
) -> Answer<v1::Volume> {
    let action = ("release", name.clone());
    audited(daemon, peer, action, &(), async move |daemon, _| daemon.release(&name).await).await
}

async fn vms(State(daemon): Shared) -> Json<Vec<v1::Vm>> {
    Json(daemon.show_machines().await)
}

async fn found_vms(State(daemon): Shared) -> Json<Vec<v1::FoundVm>> {
    Json(daemon.found_machines().await)
}

async fn vm(State(daemon): Shared, Part(Path(name)): Part<Path<String>>) -> Answer<v1::Vm> {
    Ok(Json(daemon.machine_shown(&name).await?))
}

async fn add_vm(State(daemon): Shared, ConnectInfo(peer): Who, Body(body): Body) -> Answer<v1::Vm> {
    let request: v1::VmAddRequest = parse(&body)?;
    let action = ("vm.add", request.name.clone());
    audited(daemon, peer, action, &request.clone(), async |daemon, _| daemon.add_machine(request).await).await
}

async fn remove_vm(
    State(daemon): Shared,
    ConnectInfo(peer): Who,
    Part(Path(name)): Part<Path<String>>,
) -> Answer<v1::Vm> {
    let action = ("vm.remove", name.clone());
    audited(daemon, peer, action, &(), async move |daemon, _| daemon.remove_machine(&name).await).await
}

async fn plan_vm(State(daemon): Shared, Part(Path(name)): Part<Path<String>>, Body(body): Body) -> Answer<v1::VmPlan> {
    Ok(Json(Box::pin(daemon.plan_machine(&name, parse(&body)?)).await?))
}

async fn prepare_vm(State(daemon): Shared, Part(Path(name)): Part<Path<String>>) -> Answer<v1::VmPreparation> {
    Ok(Json(daemon.prepare_machine(&name).await?))
}

async fn vm_move(State(daemon): Shared, Part(Path(name)): Part<Path<String>>) -> Answer<v1::VmMove> {
    Ok(Json(daemon.show_machine_move(&*daemon.machine(&name)?)?))
}

async fn move_vm(
    State(daemon): Shared,
    ConnectInfo(peer): Who,
    Part(Path(name)): Part<Path<String>>,
    Body(body): Body,
) -> Answer<v1::VmMove> {
    let request: v1::VmMoveRequest = parse(&body)?;
    let action = ("vm.move", name.clone());
    let work =
        async move |daemon: Arc<Daemon>, peer: Peer| Box::pin(daemon.start_machine_move(&peer, &name, request)).await;
    audited(daemon, peer, action, &parse::<serde_json::Value>(&body)?, work).await
}

async fn cancel_vm(
    State(daemon): Shared,
    ConnectInfo(peer): Who,
    Part(Path(name)): Part<Path<String>>,
) -> Answer<v1::VmMove> {
    let action = ("vm.cancel", name.clone());
    audited(daemon, peer, action, &(), async move |daemon, _| daemon.cancel_machine_move(&name).await).await
}

async fn resume_vm(
    State(daemon): Shared,
    ConnectInfo(peer): Who,
    Part(Path(name)): Part<Path<String>>,
) -> Answer<v1::VmMove> {
    let action = ("vm.resume", name.clone());
    audited(daemon, peer, action, &(), async move |daemon, _| daemon.resume_machine_move(&name)).await
}

async fn release_vm(
    State(daemon): Shared,
    ConnectInfo(peer): Who,
    Part(Path(name)): Part<Path<String>>,
) -> Answer<v1::Vm> {
    let action = ("vm.release", name.clone());
    audited(daemon, peer, action, &(), async move |daemon: Arc<Daemon>, _| daemon.release_machine(&name).await).await
}

async fn resolve_vm(
    State(daemon): Shared,
    ConnectInfo(peer): Who,
    Part(Path(name)): Part<Path<String>>,
    Body(body): Body,
) -> Answer<Vec<v1::Resolution>> {
    let request: v1::ResolveRequest = parse(&body)?;
    if request.decision.is_none() {
        return Ok(Json(daemon.resolve_machine(&name, request).await?));
    }
    let action = ("vm.resolve", name.clone());
    let work = async move |daemon: Arc<Daemon>, _| daemon.resolve_machine(&name, request).await;
    audited(daemon, peer, action, &request, work).await
}

#[derive(Deserialize)]
struct JobsQuery {
    #[serde(default)]
    all: bool,
}

async fn jobs(State(daemon): Shared, Part(Query(query)): Part<Query<JobsQuery>>) -> Json<Vec<v1::Job>> {
    Json(daemon.jobs(query.all))
}

#[derive(Deserialize)]
struct JobQuery {
    #[serde(default)]
    wait_ms: u64,
}

async fn job(
    State(daemon): Shared,
    Part(Path(id)): Part<Path<u64>>,
    Part(Query(query)): Part<Query<JobQuery>>,
) -> Answer<v1::Job> {
    Ok(Json(daemon.show_job_after(id, Duration::from_millis(query.wait_ms)).await?))
}

async fn host(State(daemon): Shared) -> Answer<v1::Host> {
    Ok(Json(daemon.host_network()?.show()))
}

async fn renew_host(State(daemon): Shared, ConnectInfo(peer): Who) -> Answer<v1::Host> {
    let action = ("host.renew", String::new());
    audited(daemon, peer, action, &(), async |daemon, _| daemon.host_network()?.renew()).await
}

async fn invite(State(daemon): Shared, ConnectInfo(peer): Who, Body(body): Body) -> Answer<v1::Invitation> {
    let request: v1::InviteRequest = parse(&body)?;
    let action = ("host.invite", request.name.clone().unwrap_or_default());
    let work = async move |daemon: Arc<Daemon>, _| daemon.host_network()?.invite(&request);
    audited(daemon, peer, action, &(), work).await
}

async fn trusted_hosts(State(daemon): Shared) -> Answer<Vec<v1::TrustedHost>> {
    Ok(Json(daemon.host_network()?.trusted()))
}

async fn pair(State(daemon): Shared, ConnectInfo(peer): Who, Body(body): Body) -> Answer<v1::TrustedHost> {
    let request: v1::PairRequest = parse(&body)?;
    // The code is nobody's business, not even afterwards.
    let noted = v1::PairRequest { code: String::new(), ..request.clone() };
    let action = ("host.pair", request.name.clone().unwrap_or_else(|| request.address.clone()));
    audited(daemon, peer, action, &noted, async move |daemon, _| daemon.host_network()?.join(&request).await).await
}

async fn change_host(
    State(daemon): Shared,
    ConnectInfo(peer): Who,
    Part(Path(name)): Part<Path<String>>,
    Body(body): Body,
) -> Answer<v1::TrustedHost> {
    let request: v1::HostAddresses = parse(&body)?;
    let action = ("host.change", name.clone());
    let noted = request.clone();
    let work = async move |daemon: Arc<Daemon>, _| daemon.host_network()?.change(&name, &request);
    audited(daemon, peer, action, &noted, work).await
}

async fn remove_host(
    State(daemon): Shared,
    ConnectInfo(peer): Who,
    Part(Path(name)): Part<Path<String>>,
) -> Answer<v1::TrustedHost> {
    let action = ("host.remove", name.clone());
    audited(daemon, peer, action, &(), async move |daemon, _| daemon.host_network()?.remove(&name)).await
}

async fn render_metrics(State(daemon): Shared) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], metrics::render(&daemon)).into_response()
}
