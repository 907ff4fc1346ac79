//! etcd as the arbiter, through its JSON gateway (`/v3`, etcd 3.4 and later).
//!
//! A ruling is a key `/transhume/moves/JOB`, written in one transaction that compares it with what it was. It has no
//! lease. If a ruling expired while a host is down, that host would see another ruling. The source deletes it when both
//! hosts have it on record.

use std::time::Duration;

use api::v1::{Error, ErrorCode};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use env::EnvRef;
use futures::future::BoxFuture;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request, Uri};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use uuid::Uuid;

use super::{Arbiter, Ruling, unreachable};
use crate::problem::Result;

/// How long one member may take for an answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(3);
/// The largest answer that is read.
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// An etcd cluster.
pub(crate) struct Etcd {
    env: EnvRef,
    members: Vec<Uri>,
}

impl Etcd {
    /// The cluster whose `members` are asked in this order (`http://HOST:PORT`).
    ///
    /// # Errors
    /// A member's address makes no sense.
    pub(crate) fn new(env: EnvRef, members: &[String]) -> Result<Self> {
        Ok(Self { env, members: parse_members(members)? })
    }

    /// Asks one member after the other until one answers.
    async fn ask(&self, path: &str, body: &Value) -> Result<Value> {
        let mut failures = Vec::new();
        for member in &self.members {
            match env::timeout(&*self.env, ANSWER_LIMIT, post(member, path, body)).await {
                // Every answer of etcd names its cluster. A proxy's page does not, and an empty answer would be read as an empty
                // range.
                Some(Ok(answer)) if names_its_cluster(&answer) => return Ok(answer),
                Some(Ok(_)) => failures.push(format!("{member} answers, and is no etcd")),
                Some(Err(failure)) => failures.push(format!("{member} {failure}")),
                None => failures.push(format!("{member} did not answer within {} s", ANSWER_LIMIT.as_secs())),
            }
        }
        Err(unreachable(&failures.join("; ")))
    }
}

impl Arbiter for Etcd {
    fn decide(&self, job: Uuid, expected: Ruling, wanted: Ruling) -> BoxFuture<'_, Result<Ruling>> {
        Box::pin(async move {
            let key = key(job);
            let compare = match expected.to_text() {
                Some(text) => {
                    json!({ "key": key, "target": "VALUE", "result": "EQUAL", "value": STANDARD.encode(text) })
                }
                None => json!({ "key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0" }),
            };
            let value = STANDARD.encode(wanted.to_text().unwrap_or_default());
            let transaction = json!({
                "compare": [compare],
                "success": [{ "request_put": { "key": key, "value": value } }],
                "failure": [{ "request_range": { "key": key } }],
            });
            let answer = self.ask("/v3/kv/txn", &transaction).await?;
            match answer["succeeded"].as_bool() {
                Some(true) => Ok(wanted),
                _ => kept(&answer["responses"][0]["response_range"]),
            }
        })
    }

    fn ruling(&self, job: Uuid) -> BoxFuture<'_, Result<Ruling>> {
        Box::pin(async move {
            // A range is read through the cluster's majority unless it is told to be serializable.
            kept(&self.ask("/v3/kv/range", &json!({ "key": key(job) })).await?)
        })
    }

    fn forget(&self, job: Uuid) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move { self.ask("/v3/kv/deleterange", &json!({ "key": key(job) })).await.map(drop) })
    }
}

/// Whether that is an answer of etcd. Its gateway writes 64 bits as a string.
fn names_its_cluster(answer: &Value) -> bool {
    let cluster = &answer["header"]["cluster_id"];
    cluster.is_string() || cluster.is_u64()
}

/// The key of a move's ruling, as the gateway has keys.
fn key(job: Uuid) -> String {
    STANDARD.encode(format!("/transhume/moves/{job}"))
}

/// The ruling in an answer to a range.
fn kept(range: &Value) -> Result<Ruling> {
    let Some(value) = range["kvs"][0]["value"].as_str() else { return Ok(Ruling::Unknown) };
    let text = STANDARD.decode(value).ok().and_then(|bytes| String::from_utf8(bytes).ok());
    text.as_deref().and_then(Ruling::from_text).ok_or_else(|| unexpected(range))
}

fn unexpected(answer: &Value) -> Error {
    Error::new(ErrorCode::Internal, format!("the arbiter's answer makes no sense: {answer}"))
        .with_hint("look at what is in etcd under that key, and whether its version is 3.4 or later")
}

/// The addresses of `members`.
///
/// # Errors
/// One makes no sense.
pub(super) fn parse_members(members: &[String]) -> Result<Vec<Uri>> {
    members.iter().map(|member| parse_member(member)).collect()
}

fn parse_member(text: &str) -> Result<Uri> {
    let refuse = |why: &str| {
        Err(Error::new(ErrorCode::ConfigInvalid, format!("\"{text}\" is no member of an etcd cluster: {why}"))
            .with_hint("write http://HOST:PORT"))
    };
    let Ok(uri) = text.parse::<Uri>() else { return refuse("it is no address") };
    match uri.scheme_str() {
        Some("http") if uri.authority().is_some() => Ok(uri),
        _ => refuse("only http is spoken; put a proxy beside the daemon where etcd wants TLS"),
    }
}

/// What `member` answers to `body`.
async fn post(member: &Uri, path: &str, body: &Value) -> Result<Value, String> {
    let authority = member.authority().map(ToString::to_string).unwrap_or_default();
    let address = match member.port_u16() {
        Some(_) => authority.clone(),
        None => format!("{authority}:2379"),
    };
    let stream = TcpStream::connect(&address).await.map_err(|error| format!("cannot be reached: {error}"))?;
    let left = |error: hyper::Error| format!("left: {error}");
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(left)?;
    let driving = async {
        // It ends with the exchange; what went wrong with it is what the exchange says.
        let _ = connection.await;
        std::future::pending::<std::convert::Infallible>().await
    };
    let request = Request::builder()
        .method(Method::POST)
        .uri(path)
        .header("host", &authority)
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body.to_string())))
        .map_err(|error| format!("cannot be asked for {path}: {error}"))?;
    let exchange = async {
        let answer = sender.send_request(request).await.map_err(left)?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await;
        let body = body.map_err(|error| format!("left in the middle of an answer: {error}"))?.to_bytes();
        match status.is_success() {
            true => serde_json::from_slice(&body).map_err(|error| format!("answered no JSON: {error}")),
            false => Err(format!("answered {status}: {}", String::from_utf8_lossy(&body[..body.len().min(200)]))),
        }
    };
    tokio::select! {
        biased;
        never = driving => match never {},
        answer = exchange => answer,
    }
}

#[cfg(test)]
mod tests {
    use env::RealEnv;

    use super::super::abandon;
    use super::*;

    /// A cluster of one member.
    struct Member {
        process: transhume_guest::Etcd,
        _data: tempfile::TempDir,
    }

    impl Member {
        async fn start() -> Self {
            let data = tempfile::tempdir().expect("a temporary directory");
            let member = Self { process: transhume_guest::Etcd::start(data.path()).expect("etcd runs"), _data: data };
            // It listens before it serves.
            while member.cluster().ruling(Uuid::nil()).await.is_err() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            member
        }

        fn cluster(&self) -> Etcd {
            Etcd::new(std::sync::Arc::new(RealEnv::new()), &[self.process.address()]).expect("an address")
        }
    }

    #[tokio::test]
    async fn of_two_verdicts_that_are_asked_for_at_once_one_counts_for_both() {
        let member = Member::start().await;
        for _ in 0..20 {
            let (source, target, job) = (member.cluster(), member.cluster(), Uuid::new_v4());
            assert_eq!(source.ruling(job).await.expect("an answer"), Ruling::Unknown);
            let announced = source.decide(job, Ruling::Unknown, Ruling::Open).await;
            assert_eq!(announced.expect("an answer"), Ruling::Open);
            let committing = source.decide(job, Ruling::Open, Ruling::Committed);
            let both = futures::join!(committing, abandon(&target, job));
            let (one, other) = (both.0.expect("an answer"), both.1.expect("an answer"));
            assert_eq!(one, other);
            assert_eq!(target.ruling(job).await.expect("an answer"), one, "another verdict is kept");
            let changed = source.decide(job, Ruling::Open, Ruling::Withdrawn(1)).await;
            assert_eq!(changed.expect("an answer"), one, "it was changed");
        }
    }

    #[tokio::test]
    async fn a_commit_that_arrives_after_it_was_taken_back_does_nothing() {
        let member = Member::start().await;
        let (source, job) = (member.cluster(), Uuid::new_v4());
        let unannounced = source.decide(job, Ruling::Open, Ruling::Committed).await;
        assert_eq!(unannounced.expect("an answer"), Ruling::Unknown, "a move was committed that is not known");
        source.decide(job, Ruling::Unknown, Ruling::Open).await.expect("an answer");
        let taken_back = source.decide(job, Ruling::Open, Ruling::Withdrawn(1)).await;
        assert_eq!(taken_back.expect("an answer"), Ruling::Withdrawn(1));
        let late = source.decide(job, Ruling::Open, Ruling::Committed).await;
        assert_eq!(late.expect("an answer"), Ruling::Withdrawn(1));
        let next = source.decide(job, Ruling::Withdrawn(1), Ruling::Committed).await;
        assert_eq!(next.expect("an answer"), Ruling::Committed);
        assert_eq!(abandon(&source, job).await.expect("an answer"), Ruling::Committed);
        source.forget(job).await.expect("an answer");
        assert_eq!(source.ruling(job).await.expect("an answer"), Ruling::Unknown);
    }

    #[tokio::test]
    async fn a_member_that_is_dead_is_passed_over_and_a_dead_cluster_is_named() {
        let member = Member::start().await;
        let members = ["http://127.0.0.1:1".to_owned(), member.process.address()];
        let job = Uuid::new_v4();
        let etcd = Etcd::new(std::sync::Arc::new(RealEnv::new()), &members).expect("addresses");
        let decided = etcd.decide(job, Ruling::Unknown, Ruling::Open).await;
        assert_eq!(decided.expect("the second member"), Ruling::Open);
        drop(member);
        let error = etcd.ruling(job).await.expect_err("nobody is there");
        assert_eq!(error.code, ErrorCode::ArbiterUnreachable);
        assert!(members.iter().all(|member| error.message.contains(&member["http://".len()..])), "{}", error.message);
    }

    #[tokio::test]
    async fn what_answers_and_is_no_etcd_has_no_ruling() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = format!("http://{}", listener.local_addr().expect("an address"));
        let page = tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.expect("a client");
                let mut request = [0; 4096];
                let _ = tokio::io::AsyncReadExt::read(&mut stream, &mut request).await;
                let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}";
                let _ = tokio::io::AsyncWriteExt::write_all(&mut stream, answer).await;
            }
        });
        let etcd = Etcd::new(std::sync::Arc::new(RealEnv::new()), &[address]).expect("an address");
        for error in [etcd.ruling(Uuid::nil()).await.err(), abandon(&etcd, Uuid::nil()).await.err()] {
            let error = error.expect("a page of nobody rules");
            assert_eq!(error.code, ErrorCode::ArbiterUnreachable);
            assert!(error.message.contains("is no etcd"), "{}", error.message);
        }
        page.abort();
    }

    #[test]
    fn an_address_that_is_none_is_refused_with_what_to_write() {
        for text in ["https://etcd:2379", "etcd:2379", "http://", ""] {
            let error = parse_member(text).expect_err(text);
            assert_eq!(error.code, ErrorCode::ConfigInvalid, "{text}");
            assert!(error.hint.is_some_and(|hint| hint.contains("http://HOST:PORT")), "{text}");
        }
    }
}
