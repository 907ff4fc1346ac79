//! VMs and their moves.

use std::sync::Arc;

use api::v1;
use axum::extract::{ConnectInfo, Path, State};
use axum::routing::{get, post};
use axum::{Json, Router};

use super::{Answer, Body, Part, Shared, Who, audited, parse};
use crate::audit::Peer;
use crate::daemon::Daemon;

pub(super) fn routes() -> Router<Arc<Daemon>> {
    Router::new()
        .route("/v1/vms", get(vms).post(add_vm))
        .route("/v1/found-vms", get(found_vms))
        .route("/v1/vms/{name}", get(vm).delete(remove_vm))
        .route("/v1/vms/{name}/plan", post(plan_vm))
        .route("/v1/vms/{name}/prepare", get(prepare_vm))
        .route("/v1/vms/{name}/move", get(vm_move).post(move_vm).delete(cancel_vm))
        .route("/v1/vms/{name}/resume", post(resume_vm))
        .route("/v1/vms/{name}/resolve", post(resolve_vm))
        .route("/v1/vms/{name}/release", post(release_vm))
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
