//! The HTTP API: paths to operations. What an operation is, the other modules say.

mod hosts;
mod listener;
mod pools;
mod vms;
mod volumes;

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use api::v1::{self, Error, ErrorCode};
use axum::body::Bytes;
use axum::extract::{ConnectInfo, DefaultBodyLimit, FromRequest, FromRequestParts, Path, Query, Request, State};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::audit::Peer;
use crate::daemon::Daemon;
use crate::metrics;
use crate::problem::Result;

pub(crate) use listener::ApiListener;

/// The largest request that is read.
const REQUEST_BYTES_MAX: usize = 1 << 20;

type Shared = State<Arc<Daemon>>;
type Who = ConnectInfo<Peer>;

/// The paths.
pub(crate) fn router(daemon: Arc<Daemon>) -> Router {
    Router::new()
        .route("/v1/version", get(async |State(daemon): Shared| Json(daemon.version())))
        .route("/v1/status", get(async |State(daemon): Shared| Json(daemon.status())))
        .merge(volumes::routes())
        .merge(pools::routes())
        .merge(vms::routes())
        .merge(hosts::routes())
        .route("/v1/jobs", get(jobs))
        .route("/v1/jobs/{id}", get(job))
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

async fn render_metrics(State(daemon): Shared) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], metrics::render(&daemon)).into_response()
}
