//! Surrogates and caches.

use std::sync::Arc;

use api::v1;
use axum::extract::{ConnectInfo, Path, State};
use axum::routing::{get, post};
use axum::{Json, Router};

use super::{Answer, Body, Part, Shared, Who, audited, parse};
use crate::daemon::Daemon;

pub(super) fn routes() -> Router<Arc<Daemon>> {
    Router::new()
        .route("/v1/surrogates", get(surrogates).post(create_surrogate))
        .route("/v1/surrogates/{name}", get(surrogate).delete(remove_surrogate))
        .route("/v1/surrogates/{name}/drain", post(drain_surrogate))
        .route("/v1/surrogates/{name}/repair", post(repair_surrogate))
        .route("/v1/caches", get(caches).post(create_cache))
        .route("/v1/caches/{name}", get(cache).delete(remove_cache))
        .route("/v1/caches/{name}/resize", post(resize_cache))
        .route("/v1/caches/{name}/drain", post(drain_cache))
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
    let work = async move |daemon: Arc<Daemon>, _| daemon.create_cache(request).await;
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
