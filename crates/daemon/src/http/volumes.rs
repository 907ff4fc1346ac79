//! Volumes: their layers, snapshots, moves and jobs, and the disks that are adopted.

use std::sync::Arc;

use api::v1;
use axum::extract::{ConnectInfo, Path, Query, State};
use axum::routing::{delete, get, patch, post};
use axum::{Json, Router};
use serde::Deserialize;

use super::{Answer, Body, Part, Shared, Who, audited, parse};
use crate::audit::Peer;
use crate::daemon::Daemon;

pub(super) fn routes() -> Router<Arc<Daemon>> {
    Router::new()
        .route("/v1/volumes", get(volumes).post(attach))
        .route("/v1/volumes/{name}", get(volume).delete(detach))
        .route("/v1/volumes/{name}/accept", post(accept))
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

async fn accept(
    State(daemon): Shared,
    ConnectInfo(peer): Who,
    Part(Path(name)): Part<Path<String>>,
    Body(body): Body,
) -> Answer<v1::Volume> {
    let v1::AcceptRequest {} = parse(&body)?;
    let action = ("volume.accept", name.clone());
    audited(daemon, peer, action, &(), async move |daemon, _| daemon.accept(&name).await).await
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
        return Ok(Json(daemon.resolve_volume(&name, request).await?));
    }
    let action = ("volume.resolve", name.clone());
    audited(daemon, peer, action, &request, async move |daemon, _| daemon.resolve_volume(&name, request).await).await
}

async fn start_move(
    State(daemon): Shared,
    ConnectInfo(peer): Who,
    Part(Path(name)): Part<Path<String>>,
    Body(body): Body,
) -> Answer<v1::Job> {
    let request: v1::MoveRequest = parse(&body)?;
    let action = ("move.start", name.clone());
    let work = async move |daemon: Arc<Daemon>, peer: Peer| Box::pin(daemon.start_move(&peer, &name, request)).await;
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
