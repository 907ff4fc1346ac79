//! The client: one request a connection, over a unix socket.

use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

use crate::API_VERSION;
use crate::v1::{
    AcceptRequest, AdoptRequest, AttachRequest, Cache, CacheRequest, CacheResizeRequest, CheckRequest, CheckedDisk,
    Error, ErrorCode, FoundVm, Host, HostAddresses, Invitation, InviteRequest, Job, Layer, LayerChangeRequest,
    LayerRequest, MoveRequest, PairRequest, Plan, PlanRequest, ReleaseRequest, Resolution, ResolveRequest, Result,
    RevertRequest, SetRequest, SnapshotRequest, Status, Surrogate, SurrogateRepairRequest, SurrogateRequest,
    TrustedHost, Version, Vm, VmAddRequest, VmMove, VmMoveRequest, VmPlan, VmPreparation, Volume,
};

/// The largest answer that is read.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Speaks to a daemon. Clones are cheap.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
}

impl Client {
    /// A client of the daemon that listens on `socket`. Nothing is connected yet.
    #[must_use]
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into() }
    }

    /// The daemon's socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Who answers.
    ///
    /// # Errors
    /// Nobody does.
    pub async fn version(&self) -> Result<Version> {
        self.get("/v1/version").await
    }

    /// Who answers, once it is known that both speak the same language.
    ///
    /// # Errors
    /// Nobody answers, or in other versions of the API.
    pub async fn check_version(&self) -> Result<Version> {
        let version = self.version().await?;
        if version.api.iter().any(|spoken| spoken == API_VERSION) {
            return Ok(version);
        }
        let message = format!(
            "the daemon ({}) speaks API {} and this program speaks {API_VERSION}",
            version.version,
            version.api.join(", ")
        );
        Err(Error::new(ErrorCode::VersionMismatch, message).with_hint("install the same version of both"))
    }

    /// The daemon as a whole.
    ///
    /// # Errors
    /// Nobody answers.
    pub async fn status(&self) -> Result<Status> {
        self.get("/v1/status").await
    }

    /// All volumes.
    ///
    /// # Errors
    /// Nobody answers.
    pub async fn volumes(&self) -> Result<Vec<Volume>> {
        self.get("/v1/volumes").await
    }

    /// One volume.
    ///
    /// # Errors
    /// There is none of this name.
    pub async fn volume(&self, name: &str) -> Result<Volume> {
        self.get(&format!("/v1/volumes/{}", escape(name))).await
    }

    /// Serves a backend.
    ///
    /// # Errors
    /// What is wrong with the backend, the export or the name.
    pub async fn attach(&self, request: &AttachRequest) -> Result<Volume> {
        self.send(Method::POST, "/v1/volumes", request).await
    }

    /// Stops serving a volume.
    ///
    /// # Errors
    /// It is in use or being moved.
    pub async fn detach(&self, name: &str) -> Result<Volume> {
        self.send(Method::DELETE, &format!("/v1/volumes/{}", escape(name)), &()).await
    }

    /// The layers of a volume, the lowest first.
    ///
    /// # Errors
    /// There is no such volume.
    pub async fn layers(&self, name: &str) -> Result<Vec<Layer>> {
        self.get(&format!("/v1/volumes/{}/layers", escape(name))).await
    }

    /// Adds a layer that holds nothing, or changes the one of its kind.
    ///
    /// # Errors
    /// There is no such volume, or what is asked for makes no sense.
    pub async fn add_layer(&self, name: &str, request: &LayerRequest) -> Result<Volume> {
        self.send(Method::POST, &format!("/v1/volumes/{}/layers", escape(name)), request).await
    }

    /// Takes a layer out that holds nothing; `layer` is its identity or its kind.
    ///
    /// # Errors
    /// There is none, or it is a snapshot.
    pub async fn remove_layer(&self, name: &str, layer: &str) -> Result<Volume> {
        self.send(Method::DELETE, &format!("/v1/volumes/{}/layers/{}", escape(name), escape(layer)), &()).await
    }

    /// Takes a snapshot.
    ///
    /// # Errors
    /// The volume cannot have one now, or there is no place for it.
    pub async fn add_snapshot(&self, name: &str, request: &SnapshotRequest) -> Result<Volume> {
        self.send(Method::POST, &format!("/v1/volumes/{}/snapshots", escape(name)), request).await
    }

    /// Begins to remove a snapshot; it is gone when [`layers`](Self::layers) lists it no more.
    ///
    /// # Errors
    /// There is none, or it cannot be removed now.
    pub async fn remove_snapshot(&self, name: &str, snapshot: &str) -> Result<Volume> {
        self.send(Method::DELETE, &format!("/v1/volumes/{}/snapshots/{}", escape(name), escape(snapshot)), &()).await
    }

    /// Takes a cache out with all that only it has, which is lost; `layer` is its identity or its kind.
    ///
    /// # Errors
    /// There is none, or a client is connected.
    pub async fn discard_layer(&self, name: &str, layer: &str) -> Result<Volume> {
        let path = format!("/v1/volumes/{}/layers/{}?discard_dirty=true", escape(name), escape(layer));
        self.send(Method::DELETE, &path, &()).await
    }

    /// Changes a layer of a volume while its guest works; `layer` is its identity or its kind.
    ///
    /// # Errors
    /// There is none, it is none that can be changed, or that failed.
    pub async fn change_layer(&self, name: &str, layer: &str, request: &LayerChangeRequest) -> Result<Volume> {
        let path = format!("/v1/volumes/{}/layers/{}", escape(name), escape(layer));
        self.send(Method::PATCH, &path, request).await
    }

    /// The caches.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub async fn caches(&self) -> Result<Vec<Cache>> {
        self.get("/v1/caches").await
    }

    /// One cache.
    ///
    /// # Errors
    /// There is none of that name.
    pub async fn cache(&self, name: &str) -> Result<Cache> {
        self.get(&format!("/v1/caches/{}", escape(name))).await
    }

    /// Makes a cache.
    ///
    /// # Errors
    /// There is one of that name, or its store cannot be used.
    pub async fn create_cache(&self, request: &CacheRequest) -> Result<Cache> {
        self.send(Method::POST, "/v1/caches", request).await
    }

    /// Changes how much of its store a cache uses.
    ///
    /// # Errors
    /// There is none of that name, a volume has a part beyond that, or the store is smaller.
    pub async fn resize_cache(&self, name: &str, request: &CacheResizeRequest) -> Result<Cache> {
        self.send(Method::POST, &format!("/v1/caches/{}/resize", escape(name)), request).await
    }

    /// Has all that only a cache has durably in the backends of its volumes.
    ///
    /// # Errors
    /// There is none of that name, or that failed.
    pub async fn drain_cache(&self, name: &str) -> Result<Cache> {
        self.send(Method::POST, &format!("/v1/caches/{}/drain", escape(name)), &()).await
    }

    /// Removes a cache that no volume has a part of.
    ///
    /// # Errors
    /// There is none of that name, or a volume has.
    pub async fn remove_cache(&self, name: &str) -> Result<Cache> {
        self.send(Method::DELETE, &format!("/v1/caches/{}", escape(name)), &()).await
    }

    /// The surrogates.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub async fn surrogates(&self) -> Result<Vec<Surrogate>> {
        self.get("/v1/surrogates").await
    }

    /// One surrogate.
    ///
    /// # Errors
    /// There is none of that name.
    pub async fn surrogate(&self, name: &str) -> Result<Surrogate> {
        self.get(&format!("/v1/surrogates/{}", escape(name))).await
    }

    /// Makes a surrogate.
    ///
    /// # Errors
    /// There is one of that name, or a store cannot be used.
    pub async fn create_surrogate(&self, request: &SurrogateRequest) -> Result<Surrogate> {
        self.send(Method::POST, "/v1/surrogates", request).await
    }

    /// Has a surrogate take no further volume.
    ///
    /// # Errors
    /// There is none of that name.
    pub async fn drain_surrogate(&self, name: &str) -> Result<Surrogate> {
        self.send(Method::POST, &format!("/v1/surrogates/{}/drain", escape(name)), &()).await
    }

    /// Begins to repair the lost store of a surrogate.
    ///
    /// # Errors
    /// There is none of that name, none of its two stores is lost, or the new one cannot be used.
    pub async fn repair_surrogate(&self, name: &str, request: &SurrogateRepairRequest) -> Result<Surrogate> {
        self.send(Method::POST, &format!("/v1/surrogates/{}/repair", escape(name)), request).await
    }

    /// Removes a surrogate that no volume has a part of.
    ///
    /// # Errors
    /// There is none of that name, or a volume has.
    pub async fn remove_surrogate(&self, name: &str) -> Result<Surrogate> {
        self.send(Method::DELETE, &format!("/v1/surrogates/{}", escape(name)), &()).await
    }

    /// Throws away what was written since a snapshot.
    ///
    /// # Errors
    /// There is none, a client is connected, or there are newer ones.
    pub async fn revert(&self, name: &str, request: &RevertRequest) -> Result<Volume> {
        self.send(Method::POST, &format!("/v1/volumes/{}/revert", escape(name)), request).await
    }

    /// What two hosts have on record of a volume that was on its way between them; with a decision, carries that out.
    ///
    /// # Errors
    /// There is no such volume, or that cannot be decided.
    pub async fn resolve(&self, name: &str, request: &ResolveRequest) -> Result<Resolution> {
        self.send(Method::POST, &format!("/v1/volumes/{}/resolve", escape(name)), request).await
    }

    /// Which disks of a VM can be adopted.
    ///
    /// # Errors
    /// The VM cannot be asked.
    pub async fn check(&self, request: &CheckRequest) -> Result<Vec<CheckedDisk>> {
        self.send(Method::POST, "/v1/adoptions/check", request).await
    }

    /// Adopts a running VM's disk.
    ///
    /// # Errors
    /// It cannot be adopted; the VM is as it was.
    pub async fn adopt(&self, request: &AdoptRequest) -> Result<Volume> {
        self.send(Method::POST, "/v1/adoptions", request).await
    }

    /// Gives a disk back to its VM.
    ///
    /// # Errors
    /// It is being moved, or QEMU refuses; then it stays adopted.
    pub async fn release(&self, name: &str) -> Result<Volume> {
        self.send(Method::POST, &format!("/v1/adoptions/{}/release", escape(name)), &ReleaseRequest {}).await
    }

    /// Says that what has the name of the volume's image now is the volume's own.
    ///
    /// # Errors
    /// The volume is served, or cannot be brought back with that either.
    pub async fn accept(&self, name: &str) -> Result<Volume> {
        self.send(Method::POST, &format!("/v1/volumes/{}/accept", escape(name)), &AcceptRequest {}).await
    }

    /// Starts or queues a move.
    ///
    /// # Errors
    /// What is wrong with the target or the volume; nothing was left behind.
    pub async fn start_move(&self, name: &str, request: &MoveRequest) -> Result<Job> {
        self.send(Method::POST, &format!("/v1/volumes/{}/move", escape(name)), request).await
    }

    /// Starts or queues moves of all adopted disks of the machine whose disk this volume is. In the target `{name}`
    /// stands for each volume's name; one that ends with a slash is a directory.
    ///
    /// # Errors
    /// What is wrong with any of them; nothing was left behind.
    pub async fn start_move_of_all(&self, name: &str, request: &MoveRequest) -> Result<Vec<Job>> {
        self.send(Method::POST, &format!("/v1/volumes/{}/move-all", escape(name)), request).await
    }

    /// What moves of all adopted disks of the machine whose disk this volume is would cost.
    ///
    /// # Errors
    /// There is no such volume, or it was not adopted.
    pub async fn plan_all(&self, name: &str, request: &PlanRequest) -> Result<Vec<Plan>> {
        self.send(Method::POST, &format!("/v1/volumes/{}/plan-all", escape(name)), request).await
    }

    /// What a move would cost.
    ///
    /// # Errors
    /// There is no such volume.
    pub async fn plan(&self, name: &str, request: &PlanRequest) -> Result<Plan> {
        self.send(Method::POST, &format!("/v1/volumes/{}/plan", escape(name)), request).await
    }

    /// Pauses, resumes or cancels the volume's move: `action` is one of these words.
    ///
    /// # Errors
    /// Nothing is being moved, or it is too late.
    pub async fn steer(&self, name: &str, action: &str) -> Result<Job> {
        self.send(Method::POST, &format!("/v1/volumes/{}/job/{action}", escape(name)), &()).await
    }

    /// Changes a running move.
    ///
    /// # Errors
    /// Nothing is being moved.
    pub async fn set(&self, name: &str, request: &SetRequest) -> Result<Job> {
        self.send(Method::PATCH, &format!("/v1/volumes/{}/job", escape(name)), request).await
    }

    /// Jobs, newest first; those that are over too with `all`.
    ///
    /// # Errors
    /// Nobody answers.
    pub async fn jobs(&self, all: bool) -> Result<Vec<Job>> {
        self.get(&format!("/v1/jobs?all={all}")).await
    }

    /// One job, after `wait` or as soon as it is over.
    ///
    /// # Errors
    /// There is no such job.
    pub async fn job(&self, id: u64, wait: Duration) -> Result<Job> {
        self.get(&format!("/v1/jobs/{id}?wait_ms={}", wait.as_millis())).await
    }

    /// Every VM that runs on this host and that the daemon does not know.
    ///
    /// # Errors
    /// Nobody answers.
    pub async fn found_vms(&self) -> Result<Vec<FoundVm>> {
        self.get("/v1/found-vms").await
    }

    /// Every VM that the daemon knows.
    ///
    /// # Errors
    /// Nobody answers.
    pub async fn vms(&self) -> Result<Vec<Vm>> {
        self.get("/v1/vms").await
    }

    /// One VM.
    ///
    /// # Errors
    /// There is none of that name.
    pub async fn vm(&self, name: &str) -> Result<Vm> {
        self.get(&format!("/v1/vms/{}", escape(name))).await
    }

    /// Makes a running VM known.
    ///
    /// # Errors
    /// Its QEMU does not answer, or is known already.
    pub async fn add_vm(&self, request: &VmAddRequest) -> Result<Vm> {
        self.send(Method::POST, "/v1/vms", request).await
    }

    /// Forgets a VM; what runs goes on.
    ///
    /// # Errors
    /// There is none of that name, or it is being moved.
    pub async fn remove_vm(&self, name: &str) -> Result<Vm> {
        self.send(Method::DELETE, &format!("/v1/vms/{}", escape(name)), &()).await
    }

    /// What a move of a VM would be.
    ///
    /// # Errors
    /// There is none of that name, or it does not answer. What stands against the move is a part of the plan.
    pub async fn plan_vm(&self, name: &str, request: &VmMoveRequest) -> Result<VmPlan> {
        self.send(Method::POST, &format!("/v1/vms/{}/plan", escape(name)), request).await
    }

    /// What to change so that the parallel engine can copy the memory of a VM.
    ///
    /// # Errors
    /// There is none of that name, or it does not answer.
    pub async fn prepare_vm(&self, name: &str) -> Result<VmPreparation> {
        self.get(&format!("/v1/vms/{}/prepare", escape(name))).await
    }

    /// Begins a move of a VM.
    ///
    /// # Errors
    /// What stands against it. Then nothing has changed.
    pub async fn move_vm(&self, name: &str, request: &VmMoveRequest) -> Result<VmMove> {
        self.send(Method::POST, &format!("/v1/vms/{}/move", escape(name)), request).await
    }

    /// The move of a VM from here that is under way, or the last one.
    ///
    /// # Errors
    /// There was none.
    pub async fn vm_move(&self, name: &str) -> Result<VmMove> {
        self.get(&format!("/v1/vms/{}/move", escape(name))).await
    }

    /// Undoes the move of a VM.
    ///
    /// # Errors
    /// There is none, or it is too late.
    pub async fn cancel_vm(&self, name: &str) -> Result<VmMove> {
        self.send(Method::DELETE, &format!("/v1/vms/{}/move", escape(name)), &()).await
    }

    /// Tries the other host of a VM's move again at once.
    ///
    /// # Errors
    /// There is no move.
    pub async fn resume_vm(&self, name: &str) -> Result<VmMove> {
        self.send(Method::POST, &format!("/v1/vms/{}/resume", escape(name)), &()).await
    }

    /// Gives the disks of a VM back to its QEMU.
    ///
    /// # Errors
    /// One cannot be given back, and stays a volume.
    pub async fn release_vm(&self, name: &str) -> Result<Vm> {
        self.send(Method::POST, &format!("/v1/vms/{}/release", escape(name)), &()).await
    }

    /// What both hosts have on record of the disks of a VM that was on its way; carries out what was decided.
    ///
    /// # Errors
    /// What makes the decision impossible.
    pub async fn resolve_vm(&self, name: &str, request: &ResolveRequest) -> Result<Vec<Resolution>> {
        self.send(Method::POST, &format!("/v1/vms/{}/resolve", escape(name)), request).await
    }

    /// This host as others know it.
    ///
    /// # Errors
    /// It speaks to no others.
    pub async fn host(&self) -> Result<Host> {
        self.get("/v1/host").await
    }

    /// Gives this host a new identity, which nobody trusts yet.
    ///
    /// # Errors
    /// It speaks to no others, or the identity cannot be stored; then the old one stays.
    pub async fn renew_host(&self) -> Result<Host> {
        self.send(Method::POST, "/v1/host/renew", &()).await
    }

    /// A code that lets another host join.
    ///
    /// # Errors
    /// This host speaks to no others.
    pub async fn invite(&self, request: &InviteRequest) -> Result<Invitation> {
        self.send(Method::POST, "/v1/host/invite", request).await
    }

    /// Joins a host that has given out a code: each trusts the other from then on.
    ///
    /// # Errors
    /// The code is wrong, the host is not reached, or one of the two trusts another one of that name.
    pub async fn pair(&self, request: &PairRequest) -> Result<TrustedHost> {
        self.send(Method::POST, "/v1/hosts", request).await
    }

    /// The hosts that are trusted.
    ///
    /// # Errors
    /// This host speaks to no others.
    pub async fn trusted_hosts(&self) -> Result<Vec<TrustedHost>> {
        self.get("/v1/hosts").await
    }

    /// Trusts a host no more; its streams are cut.
    ///
    /// # Errors
    /// It is not trusted.
    pub async fn remove_host(&self, name: &str) -> Result<TrustedHost> {
        self.send(Method::DELETE, &format!("/v1/hosts/{}", escape(name)), &()).await
    }

    /// Gives a trusted host other addresses.
    ///
    /// # Errors
    /// It is not trusted, or those are none.
    pub async fn change_host(&self, name: &str, request: &HostAddresses) -> Result<TrustedHost> {
        self.send(Method::PATCH, &format!("/v1/hosts/{}", escape(name)), request).await
    }

    /// The metrics in Prometheus' format.
    ///
    /// # Errors
    /// Nobody answers.
    pub async fn metrics(&self) -> Result<String> {
        let (_, body) = self.exchange(Method::GET, "/metrics", Vec::new()).await?;
        String::from_utf8(body).map_err(|_| Error::new(ErrorCode::Internal, "the metrics are not text"))
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        let (status, body) = self.exchange(Method::GET, path, Vec::new()).await?;
        decode(status, &body)
    }

    async fn send<T: DeserializeOwned>(&self, method: Method, path: &str, request: &impl Serialize) -> Result<T> {
        let body = serde_json::to_vec(request).map_err(|error| {
            Error::new(ErrorCode::Internal, format!("the request cannot be written as JSON: {error}"))
        })?;
        let (status, body) = self.exchange(method, path, body).await?;
        decode(status, &body)
    }

    async fn exchange(&self, method: Method, path: &str, body: Vec<u8>) -> Result<(StatusCode, Vec<u8>)> {
        let stream = UnixStream::connect(&self.socket).await.map_err(|error| self.unreachable(&error))?;
        let lost = |error: &dyn std::fmt::Display| {
            Error::new(ErrorCode::DaemonUnreachable, format!("the daemon at {} went away: {error}", self.shown()))
                .with_hint("see its log; running moves resume when it starts again")
        };
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|error| lost(&error))?;
        let driving = tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "transhume")
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| Error::new(ErrorCode::Invalid, format!("{path} is no path of the API: {error}")))?;
        let answer = sender.send_request(request).await.map_err(|error| lost(&error))?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await;
        let body = body.map_err(|error| lost(&error))?.to_bytes().to_vec();
        driving.abort();
        Ok((status, body))
    }

    fn shown(&self) -> std::path::Display<'_> {
        self.socket.display()
    }

    fn unreachable(&self, error: &std::io::Error) -> Error {
        if error.kind() == std::io::ErrorKind::PermissionDenied {
            let message = format!("you may not speak to the daemon at {}", self.shown());
            return Error::new(ErrorCode::PermissionDenied, message)
                .with_hint("run this as the user that runs transhumed, usually root");
        }
        let message = format!("no daemon answers at {}: {error}", self.shown());
        Error::new(ErrorCode::DaemonUnreachable, message)
            .with_hint("start transhumed, or name its socket with --api or TRANSHUME_API")
    }
}

fn decode<T: DeserializeOwned>(status: StatusCode, body: &[u8]) -> Result<T> {
    if status.is_success() {
        return serde_json::from_slice(body).map_err(|error| {
            Error::new(ErrorCode::VersionMismatch, format!("the daemon's answer cannot be read: {error}"))
                .with_hint("install the same version of both")
        });
    }
    Err(serde_json::from_slice(body).unwrap_or_else(|_| {
        let shown = String::from_utf8_lossy(&body[..body.len().min(200)]).into_owned();
        Error::new(ErrorCode::Internal, format!("the daemon answered {status}: {shown}"))
    }))
}

/// `text` as one segment of a path.
fn escape(text: &str) -> String {
    let mut escaped = String::new();
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'_' | b'-' => escaped.push(char::from(byte)),
            _ => escaped.push_str(&format!("%{byte:02X}")),
        }
    }
    escaped
}
