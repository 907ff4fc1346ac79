//! This host, and those that it trusts.

use std::sync::Arc;

use api::v1;
use axum::extract::{ConnectInfo, Path, State};
use axum::routing::{get, patch, post};
use axum::{Json, Router};

use super::{Answer, Body, Part, Shared, Who, audited, parse};
use crate::daemon::Daemon;

pub(super) fn routes() -> Router<Arc<Daemon>> {
    Router::new()
        .route("/v1/host", get(host))
        .route("/v1/host/renew", post(renew_host))
        .route("/v1/host/invite", post(invite))
        .route("/v1/hosts", get(trusted_hosts).post(pair))
        .route("/v1/hosts/{name}", patch(change_host).delete(remove_host))
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
