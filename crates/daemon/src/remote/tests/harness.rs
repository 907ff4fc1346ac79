//! Two daemons in one process, on tokio's paused clock: volumes in memory, and a network that a test can cut.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind as OsErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use api::v1::{AttachRequest, Error, ErrorCode, JobState, MoveRequest};
use backends::{BackendSpec, PreparedTarget, Retired, Retiring, TargetError, TargetOrigin, TargetRequest};
use block::{Buffer, Bytes, Data, Device, MemDevice, Mutation};
use env::testing::PausedEnv;
use env::{Env, EnvRef, Moment, RealFiles, Task};
use futures::future::BoxFuture;
use migrate::Journal;
use migrate::stream::{BoxTransport, Dialer, PeerName};
use nbd::NbdUri;
use nbd::server::Export;
use parking_lot::Mutex;
use tokio::task::AbortHandle;

use super::fake_arbiter::FakeArbiter;
use crate::arbiter::Arbiter;
use crate::config::{Config, HostsConfig};
use crate::core::Core;
use crate::daemon::Daemon;
use crate::document::VolumeDocument;
use crate::hosts::{HostName, Reception};
use crate::hypervisor::{Hypervisors, NoHypervisors};
use crate::open_backend::{BackendOpenOptions, OpenBackend};
use crate::platform::{
    Backends, FreeSpace, Hosts, Network, OverlayBackends, OverlayOpening, Platform, StoreFile, WorkerSpawner,
};
use crate::problem::Result;
use crate::volume::Volume;
use crate::workers::Worker;

/// What the hosts call each other.
const NAMES: [&str; 2] = ["a", "b"];

/// How large a progress map is at most here.
const STORE_BYTES: Bytes = Bytes::mib(1);

/// Two hosts; volumes move from the first to the second.
pub(crate) struct Pair {
    pub(crate) a: Machine,
    pub(crate) b: Machine,
    pub(crate) between: Arc<Between>,
}

/// A machine and its daemon.
pub(crate) struct Machine {
    own: usize,
    core: Option<Core>,
    env: Arc<Mortal>,
    pub(crate) disks: Arc<Disks>,
    pub(crate) clients: Arc<Clients>,
    between: Arc<Between>,
    pub(crate) hosts: HostsConfig,
    pub(crate) arbiter: Option<Arc<FakeArbiter>>,
    pub(crate) hypervisors: Arc<dyn Hypervisors>,
    /// What other hosts ask is answered on threads. The clock must not be a paused one.
    pub(crate) has_threads: bool,
    folder: tempfile::TempDir,
    lives: u64,
}

impl Pair {
    /// Both run; the second takes volumes.
    pub(crate) async fn start() -> Self {
        Self::start_with(None).await
    }

    /// The same; the first asks an arbiter.
    pub(crate) async fn start_with(arbiter: Option<Arc<FakeArbiter>>) -> Self {
        let between = Arc::<Between>::default();
        let takes = HostsConfig { incoming_dirs: vec!["/incoming".into()], streams: 1, ..HostsConfig::default() };
        let gives = HostsConfig { streams: 1, ..HostsConfig::default() };
        let mut a = Machine::new(0, &between, gives);
        let mut b = Machine::new(1, &between, takes);
        a.arbiter = arbiter;
        a.start().await;
        b.start().await;
        Self { a, b, between }
    }

    /// A volume `x` of a MiB at the first host.
    pub(crate) async fn attach(&self) -> Arc<Volume> {
        self.attach_as("x").await
    }

    /// The same under another name.
    pub(crate) async fn attach_as(&self, name: &str) -> Arc<Volume> {
        let path = format!("/disks/{name}");
        self.a.disks.make(Path::new(&path), Bytes::mib(1));
        let data = Data::copy_of(&[7; 1 << 20]);
        self.a.disks.device(&path).write(Mutation::data(Bytes(0), data)).await.expect("written");
        let request = AttachRequest {
            name: name.to_owned(),
            backend: format!("file:{path}"),
            export: format!("nbd+unix:///{name}?socket=/run/{name}.sock"),
            read_only: false,
            accept_tombstone: false,
        };
        self.a.core().attach(request).await.expect("attached");
        self.a.volume(name)
    }

    /// Moves it to the second host.
    pub(crate) async fn moved(&self) -> Arc<Volume> {
        self.attach().await;
        self.a.begin_move("x", "b").await;
        self.a.core().job_over("x").await;
        let job = self.a.core().jobs().remove(0);
        assert_eq!(job.state, JobState::Done, "{:?}", job.error);
        self.b.volume("x")
    }

    /// A file that is not there is no volume's at the second host, and one that is there stays.
    pub(crate) fn has_file(&self, path: &str) -> bool {
        self.b.disks.file(Path::new(path)).is_ok()
    }

    /// The first host has given it up, and the second has not taken it: connections for that do not come about.
    pub(crate) async fn given_up_untaken(&self) {
        self.attach().await;
        self.between.has_one_session.store(true, Ordering::Relaxed);
        self.a.begin_move("x", "b").await;
        self.wait("it is given up", || self.a.document("x").backend.local_path().is_none()).await;
    }

    /// What a client of the volume reads at `machine`.
    pub(crate) async fn contents(machine: &Machine, name: &str) -> Vec<u8> {
        let slot = machine.volume(name).slot().expect("it is up");
        let size = slot.device().size().as_usize();
        slot.device().read(Bytes(0), Buffer::unpooled(size)).await.expect("read").to_vec()
    }

    /// Waits until `is`.
    pub(crate) async fn wait(&self, what: &str, is: impl Fn() -> bool) {
        for _ in 0..600_000 {
            if is() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        panic!("never: {what}; {:#?}", self.a.core().jobs());
    }
}

impl Machine {
    fn new(own: usize, between: &Arc<Between>, hosts: HostsConfig) -> Self {
        Self {
            own,
            core: None,
            env: Mortal::shared(0),
            disks: Arc::default(),
            clients: Arc::default(),
            between: Arc::clone(between),
            hosts,
            arbiter: None,
            hypervisors: Arc::new(NoHypervisors),
            has_threads: false,
            folder: tempfile::tempdir().expect("a folder"),
            lives: 0,
        }
    }

    /// Starts the daemon on what the one before has left.
    pub(crate) async fn start(&mut self) {
        self.lives += 1;
        self.env = Mortal::shared(self.lives * 2 + self.own as u64);
        let state = self.state_dir();
        for folder in ["", "volumes", "jobs", "retired", "machines", "groups"] {
            std::fs::create_dir_all(state.join(folder)).expect("made");
        }
        let hosts = PeerHosts { between: Arc::clone(&self.between), own: self.own, arbiter: self.arbiter.clone() };
        let ground = Platform {
            env: Arc::clone(&self.env) as _,
            files: RealFiles::shared(),
            backends: Arc::clone(&self.disks) as _,
            network: Arc::clone(&self.clients) as _,
            hosts: Arc::new(hosts),
            spawner: Arc::new(Beside(Arc::clone(&self.env) as _, self.has_threads)),
            monitors: Arc::default(),
            hypervisors: Arc::clone(&self.hypervisors),
            hooks: Arc::new(crate::hooks::NoHooks),
            // Two machines.
            boot: [7 + self.own as u8; 16],
            map_page_chunks: migrate::ProgressMap::PAGE_CHUNKS,
        };
        let config = Config {
            request_pool_mib: 64,
            copy_pool_mib: 8,
            socket_dir: Some("/run".into()),
            hosts: Some(self.hosts.clone()),
            ..Config::default()
        };
        self.core = Some(Core::start(ground, config, &state).await.expect("it starts"));
    }

    /// Ends the daemon as `kill -9` does.
    pub(crate) fn kill(&mut self) {
        self.env.kill();
        self.between.receptions.lock()[self.own] = None;
        self.between.cut();
        self.clients.offered.lock().clear();
        self.core = None;
    }

    pub(crate) fn state_dir(&self) -> PathBuf {
        self.folder.path().join("state")
    }

    pub(crate) const fn core(&self) -> &Core {
        self.core.as_ref().expect("it runs")
    }

    pub(crate) fn daemon(&self) -> &Arc<Daemon> {
        self.core().daemon()
    }

    pub(crate) fn volume(&self, name: &str) -> Arc<Volume> {
        self.daemon().volume(name).expect("there is one")
    }

    pub(crate) fn document(&self, name: &str) -> Arc<VolumeDocument> {
        self.volume(name).document()
    }

    pub(crate) async fn begin_move(&self, name: &str, to: &str) {
        let request = MoveRequest { to: to.to_owned(), ..MoveRequest::default() };
        self.core().start_move(name, request).await.expect("it begins");
    }
}

/// The clock, and tasks that end with their daemon.
struct Mortal {
    paused: EnvRef,
    tasks: Mutex<Vec<AbortHandle>>,
    is_dead: AtomicBool,
}

impl Mortal {
    fn shared(seed: u64) -> Arc<Self> {
        Arc::new(Self { paused: PausedEnv::shared(seed), tasks: Mutex::default(), is_dead: AtomicBool::new(false) })
    }

    fn kill(&self) {
        self.is_dead.store(true, Ordering::Relaxed);
        self.tasks.lock().drain(..).for_each(|task| task.abort());
    }
}

impl Env for Mortal {
    fn now(&self) -> Moment {
        self.paused.now()
    }
    fn sleep(&self, span: Duration) -> Task {
        self.paused.sleep(span)
    }
    fn spawn(&self, task: Task) {
        if !self.is_dead.load(Ordering::Relaxed) {
            let mut tasks = self.tasks.lock();
            tasks.retain(|task| !task.is_finished());
            tasks.push(tokio::spawn(task).abort_handle());
        }
    }
    fn random(&self) -> u64 {
        self.paused.random()
    }
    fn wall_clock(&self) -> SystemTime {
        // Epochs begin with the date.
        self.paused.wall_clock() + Duration::from_secs(1_800_000_000)
    }
}

/// Files in memory, by their paths; each new one has another number.
#[derive(Default)]
pub(crate) struct Disks {
    files: Mutex<BTreeMap<PathBuf, File>>,
    stores: Mutex<BTreeMap<PathBuf, Device>>,
    numbers: AtomicU64,
    /// Nothing gets another name.
    pub(crate) is_read_only: AtomicBool,
    /// What another program has locked.
    pub(crate) locked: Mutex<BTreeSet<PathBuf>>,
    /// The threads on which files were made and removed.
    pub(crate) threads: Mutex<BTreeSet<String>>,
    /// What happens when a target's file is removed.
    pub(crate) on_discard: Mutex<Option<Box<dyn Fn() + Send + Sync>>>,
}

#[derive(Clone)]
pub(crate) struct File {
    number: u64,
    device: Device,
}

impl Disks {
    /// Makes a file.
    pub(crate) fn make(&self, path: &Path, size: Bytes) -> u64 {
        let number = 1 + self.numbers.fetch_add(1, Ordering::Relaxed);
        let device = Device::new(&path.display().to_string(), MemDevice::new(size));
        self.files.lock().insert(path.to_owned(), File { number, device });
        number
    }

    /// What is in the file of this name.
    pub(crate) fn device(&self, path: &str) -> Device {
        self.file(Path::new(path)).expect("there is one").device
    }

    /// The names of all files.
    pub(crate) fn paths(&self) -> Vec<PathBuf> {
        self.files.lock().keys().cloned().collect()
    }

    /// Somebody gives a file another name.
    pub(crate) fn rename(&self, from: &Path, to: &Path) {
        let mut files = self.files.lock();
        if let Some(file) = files.remove(from) {
            files.insert(to.to_owned(), file);
        }
    }

    fn note_thread(&self) {
        let name = std::thread::current().name().unwrap_or_default().to_owned();
        self.threads.lock().insert(name);
    }

    pub(crate) fn file(&self, path: &Path) -> std::io::Result<File> {
        self.files.lock().get(path).cloned().ok_or_else(|| OsErrorKind::NotFound.into())
    }
}

impl Backends for Disks {
    fn open_store<'a>(&'a self, path: &'a Path, _: &'a dyn Env) -> BoxFuture<'a, block::Result<StoreFile>> {
        let size = if path.ends_with("journal") { Journal::<VolumeDocument>::bytes_needed() } else { STORE_BYTES };
        // A volume is made under another name than its own.
        let name = path.parent().and_then(Path::file_name).unwrap_or_default().to_string_lossy();
        let name = name.trim_start_matches('.').trim_end_matches(".new").to_owned();
        let key = Path::new(&name).join(path.file_name().unwrap_or_default());
        let mut stores = self.stores.lock();
        let store = stores.entry(key).or_insert_with(|| Device::new(&name, MemDevice::new(size)));
        let device = store.clone();
        Box::pin(async move { Ok(StoreFile { device, forget_failed_sync: Box::new(|| ()) }) })
    }

    fn open_backend<'a>(
        &'a self,
        spec: &'a BackendSpec,
        _: &'a BackendOpenOptions,
        _: &'a dyn Env,
    ) -> BoxFuture<'a, block::Result<OpenBackend>> {
        let file = match self.locked.lock().contains(spec.path()) {
            true => Err(block::Error::new(block::ErrorKind::Busy, "somebody has it")),
            false => self.file(spec.path()).map_err(|error| block::Error::from_os(error, "opening")),
        };
        Box::pin(async move { file.map(|file| OpenBackend::over(spec.clone(), file.device)) })
    }

    fn prepare<'a>(
        &'a self,
        request: &'a TargetRequest<'a>,
        _: &'a dyn Env,
    ) -> BoxFuture<'a, Result<PreparedTarget, TargetError>> {
        let path = request.spec.path();
        self.note_thread();
        let made = match self.file(path) {
            Ok(file) => Err(TargetError::NotEmpty { path: path.to_owned(), size: file.device.size() }),
            Err(_) => Ok(self.make(path, request.size)),
        };
        Box::pin(async move {
            made.map(|number| PreparedTarget::elsewhere(request.spec.clone(), TargetOrigin::Created, true, number))
        })
    }

    fn check(&self, target: &PreparedTarget) -> Result<(), TargetError> {
        match self.file(target.spec.path()) {
            Ok(file) if file.number == target.number() => Ok(()),
            _ => Err(TargetError::Replaced { path: target.spec.path().to_owned() }),
        }
    }

    fn discard<'a>(&'a self, target: &'a PreparedTarget, _: &'a dyn Env) -> BoxFuture<'a, Result<(), TargetError>> {
        self.note_thread();
        self.on_discard.lock().iter().for_each(|happens| happens());
        if self.check(target).is_ok() {
            self.files.lock().remove(target.spec.path());
        }
        Box::pin(std::future::ready(Ok(())))
    }

    fn retire(&self, source: &Retiring<'_>, _: &Path) -> Result<Retired, TargetError> {
        let (source, epoch) = (source.path, source.epoch);
        if self.is_read_only.load(Ordering::Relaxed) {
            return Err(TargetError::ReadOnly { path: source.to_owned() });
        }
        let to: PathBuf = format!("{}.moved-{epoch}", source.display()).into();
        let mut files = self.files.lock();
        if let Some(file) = files.remove(source) {
            files.insert(to.clone(), file);
        }
        Ok(Retired::File { from: source.to_owned(), to })
    }

    fn put_away(&self, source: &Retiring<'_>, keep: &Path) -> Result<(), TargetError> {
        if self.locked.lock().contains(source.path) {
            return Err(TargetError::InUse { path: source.path.to_owned(), holder: "a QEMU has it".to_owned() });
        }
        self.retire(source, keep).map(drop)
    }

    fn bring_back(&self, source: &Retiring<'_>) -> Result<(), TargetError> {
        let moved = PathBuf::from(format!("{}.moved-{}", source.path.display(), source.epoch));
        let mut files = self.files.lock();
        if let Some(file) = files.remove(&moved) {
            files.insert(source.path.to_owned(), file);
        }
        Ok(())
    }

    fn is_deleted(&self, source: &Retiring<'_>) -> Result<bool, TargetError> {
        Ok(self.file(source.path).is_err())
    }

    fn delete(&self, _: &Retired) -> Result<(), TargetError> {
        Ok(())
    }

    fn remove(&self, path: &Path) -> std::io::Result<()> {
        self.files.lock().remove(path);
        Ok(())
    }

    fn drop_page_cache<'a>(&'a self, _: &'a Path) -> BoxFuture<'a, std::io::Result<()>> {
        // There is none.
        Box::pin(async { Ok(()) })
    }

    fn size(&self, path: &Path) -> std::io::Result<Bytes> {
        self.file(path).map(|file| file.device.size())
    }
}

impl OverlayBackends for Disks {
    fn make_overlay<'a>(
        &'a self,
        beside: &'a Path,
        number: u32,
        length: Bytes,
        _: OverlayOpening<'a>,
    ) -> BoxFuture<'a, block::Result<Device>> {
        self.make(&overlay(beside, number), length);
        Box::pin(async move { Ok(self.device(&overlay(beside, number).display().to_string())) })
    }

    fn open_overlay<'a>(
        &'a self,
        beside: &'a Path,
        number: u32,
        _: OverlayOpening<'a>,
    ) -> BoxFuture<'a, block::Result<Device>> {
        let file = self.file(&overlay(beside, number)).map_err(|error| block::Error::from_os(error, "opening"));
        Box::pin(async move { file.map(|file| file.device) })
    }

    fn remove_overlay(&self, beside: &Path, number: u32) -> std::io::Result<()> {
        self.files.lock().remove(&overlay(beside, number));
        Ok(())
    }

    fn overlays(&self, beside: &Path) -> std::io::Result<Vec<u32>> {
        let files = self.files.lock();
        Ok((1..100).filter(|number| files.contains_key(&overlay(beside, *number))).collect())
    }

    fn free_space(&self, _: &Path) -> std::io::Result<Option<FreeSpace>> {
        Ok(Some(FreeSpace { file_system: 1, free: Bytes::gib(1) }))
    }
}

/// The name of an overlay's file.
fn overlay(beside: &Path, number: u32) -> PathBuf {
    let mut name = beside.as_os_str().to_owned();
    name.push(format!(".overlay-{number}"));
    name.into()
}

/// Where clients may come.
#[derive(Default)]
pub(crate) struct Clients {
    offered: Mutex<BTreeMap<String, Arc<Export>>>,
}

impl Clients {
    /// Whether clients may come to the volume `name`.
    pub(crate) fn may_come_to(&self, name: &str) -> bool {
        self.offered.lock().contains_key(name)
    }
}

impl Network for Clients {
    fn offer<'a>(
        &'a self,
        uri: &'a NbdUri,
        export: Arc<Export>,
        _: crate::clients::Clients,
    ) -> BoxFuture<'a, Result<()>> {
        self.offered.lock().insert(uri.export.clone(), export);
        Box::pin(async { Ok(()) })
    }

    fn withdraw<'a>(&'a self, uri: &'a NbdUri) -> BoxFuture<'a, ()> {
        self.offered.lock().remove(&uri.export);
        Box::pin(async {})
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }
}

struct Beside(EnvRef, bool);

impl WorkerSpawner for Beside {
    fn spawn_worker(&self, name: &str) -> Result<Worker> {
        let is_copy = name.starts_with("copy");
        if self.1 && !is_copy { Worker::start(name) } else { Ok(Worker::beside(Arc::clone(&self.0))) }
    }

    fn abort_process(&self) {
        panic!("a migration has panicked");
    }
}

/// The network between the two.
#[derive(Default)]
pub(crate) struct Between {
    receptions: Mutex<[Option<Arc<dyn Reception>>; 2]>,
    /// No connections to either come about.
    is_closed: [AtomicBool; 2],
    /// After the first connections no more come about: those of a move, which are there when it begins.
    pub(super) has_one_session: AtomicBool,
    passing: Mutex<Vec<AbortHandle>>,
}

impl Between {
    /// Lets no more connections through; those that are there go on.
    pub(crate) fn close(&self) {
        self.is_closed.iter().for_each(|closed| closed.store(true, Ordering::Relaxed));
    }

    /// Lets connections through again.
    pub(crate) fn mend(&self) {
        self.has_one_session.store(false, Ordering::Relaxed);
        (0..2).for_each(|host| self.open_to(host));
    }

    /// Lets connections to one of them through again.
    pub(crate) fn open_to(&self, host: usize) {
        self.is_closed[host].store(false, Ordering::Relaxed);
    }

    /// Ends every connection.
    pub(crate) fn cut(&self) {
        self.passing.lock().drain(..).for_each(|passing| passing.abort());
    }

    fn connect(&self, own: usize) -> block::Result<BoxTransport> {
        self.connect_for(own, false)
    }

    /// A connection about a volume, or about a machine.
    fn connect_for(&self, own: usize, is_about_machine: bool) -> block::Result<BoxTransport> {
        let lost = || block::Error::new(block::ErrorKind::Disconnected, format!("{} is away", NAMES[1 - own]));
        let reception = self.receptions.lock()[1 - own].clone().ok_or_else(lost)?;
        if self.is_closed[1 - own].load(Ordering::Relaxed) {
            return Err(lost());
        }
        let ((near, mut one), (mut other, far)) = (tokio::io::duplex(1 << 18), tokio::io::duplex(1 << 18));
        let passing = tokio::spawn(async move {
            // Either end may go first.
            let _ = tokio::io::copy_bidirectional(&mut one, &mut other).await;
        });
        self.passing.lock().push(passing.abort_handle());
        let peer = PeerName(NAMES[own].to_owned());
        tokio::spawn(async move {
            // How it ended, both daemons log.
            let _ = match is_about_machine {
                true => reception.serve_machine(Box::new(far), peer, Box::new(|_| ())).await,
                false => reception.serve(Box::new(far), peer, Box::new(|_| ())).await,
            };
        });
        Ok(Box::new(near))
    }
}

struct PeerHosts {
    between: Arc<Between>,
    own: usize,
    arbiter: Option<Arc<FakeArbiter>>,
}

impl Hosts for PeerHosts {
    fn dialer(&self, host: &HostName) -> Result<Arc<dyn Dialer>> {
        if host.as_str() != NAMES[1 - self.own] {
            return Err(Error::new(ErrorCode::HostUnknown, format!("{host} is not trusted")));
        }
        Ok(Arc::new(Way { between: Arc::clone(&self.between), own: self.own }))
    }

    fn machine_connection<'a>(&'a self, host: &'a HostName, _: u16) -> BoxFuture<'a, Result<BoxTransport>> {
        let lost = |error: block::Error| Error::new(ErrorCode::HostUnreachable, format!("{host}: {}", error.chain()));
        let connected = self.between.connect_for(self.own, true).map_err(lost);
        Box::pin(std::future::ready(connected))
    }

    fn arbiter(&self) -> Option<Arc<dyn Arbiter>> {
        self.arbiter.clone().map(|fake_arbiter| fake_arbiter as _)
    }

    fn listen(&self, reception: Arc<dyn Reception>) -> BoxFuture<'_, Result<()>> {
        self.between.receptions.lock()[self.own] = Some(reception);
        Box::pin(async { Ok(()) })
    }
}

struct Way {
    between: Arc<Between>,
    own: usize,
}

impl Dialer for Way {
    fn dial(&self, _: u16) -> BoxFuture<'_, block::Result<BoxTransport>> {
        let connected = self.between.connect(self.own);
        Box::pin(async move { connected })
    }

    fn opened(&self, _: u16, request: &migrate::stream::SessionRequest) {
        if request.role == migrate::stream::Role::Copy && self.between.has_one_session.load(Ordering::Relaxed) {
            self.between.close();
        }
    }
}
