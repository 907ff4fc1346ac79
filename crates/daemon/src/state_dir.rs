//! The state directory: what is where, and the lock that keeps a second daemon out.
//!
//! ```text
//! STATE/lock                     held while a daemon runs
//! STATE/audit.jsonl              who asked for what
//! STATE/remembered.json          options of disks that were released, for their next adoption
//! STATE/alive                    when a daemon with moves under way lived last
//! STATE/abandoned.json           volumes that will not arrive on other hosts, which have not been told yet
//! STATE/jobs/ID.json             moves that are over
//! STATE/jobs/last                the last number that was given to a move: none is given twice
//! STATE/hosts/identity.pem        this host's key and certificate, mode 0600
//! STATE/hosts/trusted.json        the hosts that it trusts
//! STATE/retired/                 what a block device's tombstone has overwritten
//! STATE/volumes/NAME/journal     the volume's journal (docs/journal.md)
//! STATE/volumes/NAME/progress    which chunks a move has copied, for a restart within this boot
//! STATE/volumes/.NAME.new        a volume that is being made; removed at the next start
//! STATE/volumes/.NAME.gone       a volume that is being removed; removed at the next start
//! STATE/machines/NAME.json       a VM that is known here, and its move (docs/vm.md)
//! STATE/surrogates/NAME.json     a surrogate, and whose its parts are (docs/surrogates.md)
//! STATE/caches/NAME.json         a cache, and whose its parts are (docs/caches.md)
//! STATE/groups/ID/journal        whether volumes that switch over together have (docs/journal.md)
//! ```

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use api::v1::{Error, ErrorCode};
use block::Bytes;
use env::{Env, Files, FilesRef, RealFiles, unless_missing};
use rustix::fs::{FlockOperation, Mode, flock};
use uuid::Uuid;

use crate::problem::{Result, invalid, of_state};

/// How long the lock of a process that is already dead is waited for.
const DEAD_OWNER_WAIT: Duration = Duration::from_secs(20);

/// The state directory, locked.
pub(crate) struct StateDir {
    layout: Layout,
    /// Held for the daemon's life; none where nobody else can come.
    _lock: Option<File>,
}

/// Where things are below a state directory, for those who may only look.
#[derive(Clone)]
pub(crate) struct Layout {
    root: PathBuf,
    files: FilesRef,
}

impl Layout {
    /// The state directory `root` among `files`.
    pub(crate) fn new(root: &Path, files: FilesRef) -> Self {
        Self { root: root.to_owned(), files }
    }

    /// Where all of it is.
    pub(crate) fn files(&self) -> &dyn Files {
        &*self.files
    }

    pub(crate) fn files_shared(&self) -> FilesRef {
        FilesRef::clone(&self.files)
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn volumes(&self) -> PathBuf {
        self.root.join("volumes")
    }

    pub(crate) fn groups(&self) -> PathBuf {
        self.root.join("groups")
    }

    pub(crate) fn machines(&self) -> PathBuf {
        self.root.join("machines")
    }

    pub(crate) fn surrogates(&self) -> PathBuf {
        self.root.join("surrogates")
    }

    pub(crate) fn caches(&self) -> PathBuf {
        self.root.join("caches")
    }

    /// The sockets by which volumes of other hosts are used here.
    pub(crate) fn host_stores(&self) -> PathBuf {
        self.root.join("host-stores")
    }

    /// What is on record of the machine `name`.
    pub(crate) fn machine(&self, name: &str) -> PathBuf {
        self.machines().join(format!("{name}.json"))
    }

    /// The record of the group `id`.
    pub(crate) fn group_journal(&self, id: Uuid) -> PathBuf {
        self.groups().join(id.to_string()).join("journal")
    }

    pub(crate) fn jobs(&self) -> PathBuf {
        self.root.join("jobs")
    }

    pub(crate) fn retired(&self) -> PathBuf {
        self.root.join("retired")
    }

    pub(crate) fn alive(&self) -> PathBuf {
        self.root.join("alive")
    }

    pub(crate) fn remembered(&self) -> PathBuf {
        self.root.join("remembered.json")
    }

    pub(crate) fn abandoned(&self) -> PathBuf {
        self.root.join("abandoned.json")
    }

    pub(crate) fn arriving(&self) -> PathBuf {
        self.root.join("arriving.json")
    }

    pub(crate) fn audit(&self) -> PathBuf {
        self.root.join("audit.jsonl")
    }

    pub(crate) fn hosts(&self) -> PathBuf {
        self.root.join("hosts")
    }

    pub(crate) fn identity(&self) -> PathBuf {
        self.hosts().join("identity.pem")
    }

    pub(crate) fn trusted_hosts(&self) -> PathBuf {
        self.hosts().join("trusted.json")
    }

    pub(crate) fn volume(&self, name: &str) -> PathBuf {
        self.volumes().join(name)
    }

    pub(crate) fn journal(&self, name: &str) -> PathBuf {
        self.volume(name).join("journal")
    }

    pub(crate) fn progress(&self, name: &str) -> PathBuf {
        self.volume(name).join("progress")
    }

    /// Forgets, durably, which chunks a move has copied.
    pub(crate) fn forget_progress(&self, name: &str) -> Result<()> {
        let path = self.progress(name);
        let removed = unless_missing(self.files.remove_file(&path));
        removed.map_err(|error| of_state(error, format!("removing {}", path.display())))?;
        self.sync(&self.volume(name))
    }

    fn create(&self, path: &Path) -> Result<()> {
        self.files.create_directory(path).map_err(|error| of_state(error, format!("creating {}", path.display())))
    }

    /// Begins the directory `name` below `parent`, with a journal of `bytes` zeroes in it, under a name that does not count yet.
    fn begin(&self, parent: &Path, name: &str, bytes: Bytes) -> Result<PathBuf> {
        let directory = parent.join(format!(".{name}.new"));
        self.remove_tree(&directory)?;
        self.create(&directory)?;
        let journal = directory.join("journal");
        // Real zeroes, not an unwritten extent: a store must not need the file system's own journal.
        let made = self.files.create_zeroed(&journal, bytes.get());
        made.map_err(|error| of_state(error, format!("creating {}", journal.display())))?;
        self.sync(&directory)?;
        Ok(directory)
    }

    /// Makes what was begun by [`begin`](Self::begin) count.
    fn finish(&self, parent: &Path, name: &str) -> Result<()> {
        let new = parent.join(format!(".{name}.new"));
        let renamed = self.files.rename(&new, &parent.join(name));
        renamed.map_err(|error| of_state(error, format!("making {} count", new.display())))?;
        self.sync(parent)
    }

    /// Removes the directory `name` below `parent`: from here on it does not count, crash or not.
    fn remove(&self, parent: &Path, name: &str) -> Result<()> {
        let (directory, gone) = (parent.join(name), parent.join(format!(".{name}.gone")));
        self.remove_tree(&gone)?;
        let renamed = self.files.rename(&directory, &gone);
        renamed.map_err(|error| of_state(error, format!("removing {}", directory.display())))?;
        self.sync(parent)?;
        self.remove_tree(&gone)
    }

    /// Removes what a crash has left half made, or half removed, below `parent`.
    fn sweep(&self, parent: &Path) -> Result<()> {
        for entry in self.list(parent)? {
            let name = entry.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.starts_with('.') && (name.ends_with(".new") || name.ends_with(".gone")) {
                self.remove_tree(&entry)?;
            }
        }
        Ok(())
    }

    fn sync(&self, directory: &Path) -> Result<()> {
        let synced = self.files.sync_directory(directory);
        synced.map_err(|error| of_state(error, format!("syncing {}", directory.display())))
    }

    fn remove_tree(&self, path: &Path) -> Result<()> {
        let removed = unless_missing(self.files.remove_directory(path));
        removed.map_err(|error| of_state(error, format!("removing {}", path.display())))
    }

    fn list(&self, path: &Path) -> Result<Vec<PathBuf>> {
        self.files.list(path).map_err(|error| of_state(error, format!("listing {}", path.display())))
    }

    /// The documents in `directory`: `NAME.json`.
    pub(crate) fn documents(&self, directory: &Path) -> std::io::Result<Vec<PathBuf>> {
        let mut paths = self.files.list(directory)?;
        paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
        Ok(paths)
    }

    /// Removes the document at `path`, if it is there, durably.
    pub(crate) fn remove_document(&self, path: &Path) -> Result<()> {
        let removed = unless_missing(self.files.remove_file(path));
        removed.map_err(|error| of_state(error, format!("removing {}", path.display())))?;
        self.sync(path.parent().expect("a document is in a directory"))
    }

    /// Removes a file that is only good while a job runs.
    pub(crate) fn drop_file(&self, path: &Path) {
        if let Err(error) = unless_missing(self.files.remove_file(path)) {
            tracing::warn!(%error, path = %path.display(), "could not be removed");
        }
    }

    /// Replaces the file at `path` by `text`, whole or not at all.
    pub(crate) fn write_atomically(&self, path: &Path, text: &str) -> Result<()> {
        let replaced = env::replace_file(&*self.files, path, text.as_bytes());
        replaced.map_err(|error| of_state(error, format!("writing {}", path.display())))
    }
}

impl StateDir {
    /// Creates the directory if needed and locks it, waiting for a daemon that was killed a moment ago.
    pub(crate) async fn open(root: &Path, env: &dyn Env) -> Result<Self> {
        std::fs::create_dir_all(root).map_err(|error| of_state(error, format!("creating {}", root.display())))?;
        // Volumes' contents may be seen through sockets below it.
        let private = rustix::fs::chmod(root, Mode::from_raw_mode(0o700));
        private.map_err(|error| of_state(error.into(), format!("protecting {}", root.display())))?;
        let lock = lock_as_owner(root, env).await?;
        Self::over(Layout::new(root, RealFiles::shared()), Some(lock))
    }

    /// The directory of `layout`, which `lock` keeps others out of; what a crash has left in it is swept away.
    pub(crate) fn over(layout: Layout, lock: Option<File>) -> Result<Self> {
        let by_kind = [layout.volumes(), layout.groups(), layout.machines(), layout.surrogates(), layout.caches()];
        for directory in by_kind.iter().chain(&[layout.jobs(), layout.retired()]) {
            layout.create(directory)?;
        }
        layout.sweep(&layout.volumes())?;
        layout.sweep(&layout.groups())?;
        Ok(Self { layout, _lock: lock })
    }

    /// Keeps daemons out while volumes are rescued, beside others who do the same. Waits as [`open`](Self::open) does.
    pub(crate) async fn share(root: &Path, env: &dyn Env) -> Result<File> {
        lock_root(root, FlockOperation::NonBlockingLockShared, env).await
    }

    pub(crate) fn layout(&self) -> Layout {
        self.layout.clone()
    }

    /// The volumes that there are.
    pub(crate) fn volume_names(&self) -> Result<Vec<String>> {
        let mut names: Vec<String> = Vec::new();
        for entry in self.layout.list(&self.layout.volumes())? {
            match entry.file_name().and_then(|name| name.to_str()) {
                Some(name) if check_name(name).is_ok() => names.push(name.to_owned()),
                _ => tracing::warn!(path = %entry.display(), "is no volume and is left alone"),
            }
        }
        names.sort();
        Ok(names)
    }

    /// Begins a volume: the directory with a preallocated journal of `journal_bytes` zeroes, under a name that does
    /// not count yet.
    pub(crate) fn begin_volume(&self, name: &str, journal_bytes: Bytes) -> Result<PathBuf> {
        self.layout.begin(&self.layout.volumes(), name, journal_bytes)
    }

    /// Makes the volume begun by [`begin_volume`](Self::begin_volume) count.
    pub(crate) fn finish_volume(&self, name: &str) -> Result<()> {
        self.layout.finish(&self.layout.volumes(), name)
    }

    /// Drops a volume that was begun and does not count yet.
    pub(crate) fn abandon_volume(&self, name: &str) {
        let new = self.layout.volumes().join(format!(".{name}.new"));
        if let Err(error) = self.layout.remove_tree(&new) {
            tracing::warn!(%error, "what a failed attach left could not be removed; the next start tries again");
        }
    }

    /// Removes a volume: from here on it does not count, crash or not.
    pub(crate) fn remove_volume(&self, name: &str) -> Result<()> {
        self.layout.remove(&self.layout.volumes(), name)
    }

    /// The groups that there are.
    pub(crate) fn groups(&self) -> Result<Vec<Uuid>> {
        let entries = self.layout.list(&self.layout.groups())?;
        let id = |path: &PathBuf| path.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse().ok());
        Ok(entries.iter().filter_map(id).collect())
    }

    /// Begins the record of the group `id`; gives its journal.
    pub(crate) fn begin_group(&self, id: Uuid, journal_bytes: Bytes) -> Result<PathBuf> {
        Ok(self.layout.begin(&self.layout.groups(), &id.to_string(), journal_bytes)?.join("journal"))
    }

    /// Makes the record begun by [`begin_group`](Self::begin_group) count.
    pub(crate) fn finish_group(&self, id: Uuid) -> Result<()> {
        self.layout.finish(&self.layout.groups(), &id.to_string())
    }

    /// Removes the record of the group `id`, which no volume's journal names any more.
    pub(crate) fn remove_group(&self, id: Uuid) {
        if let Err(error) = self.layout.remove(&self.layout.groups(), &id.to_string()) {
            tracing::warn!(%error, "the record of a group that is over stays until the next start");
        }
    }

    /// Makes the file of a progress map of `bytes`.
    pub(crate) fn make_progress(&self, name: &str, bytes: Bytes) -> Result<PathBuf> {
        let path = self.layout.progress(name);
        let reserved = self.layout.files.reserve(&path, bytes.get());
        reserved.map_err(|error| of_state(error, format!("creating {}", path.display())))?;
        Ok(path)
    }

    /// Removes the progress map, if there is one.
    pub(crate) fn drop_progress(&self, name: &str) {
        self.layout.drop_file(&self.layout.progress(name));
    }
}

/// Whether `name` may be a volume's name; it becomes a file's name, a part of paths of the API and of QEMU's node names.
pub(crate) fn check_name(name: &str) -> Result<()> {
    let good = name.chars().all(|character| character.is_ascii_alphanumeric() || "._-".contains(character));
    let starts_well = name.chars().next().is_some_and(|first| first.is_ascii_alphanumeric());
    if good && starts_well && name.len() <= 64 {
        return Ok(());
    }
    Err(invalid(
        format!("\"{}\" cannot be the name of a volume", name.escape_default()),
        "use up to 64 letters, digits, `.`, `_` and `-`, a letter or digit first",
    ))
}

/// What the process is that has the state directory.
#[derive(Debug, PartialEq, Eq)]
enum OwnerState {
    Alive,
    /// It is gone; what holds the lock ends soon.
    Gone,
    /// It was killed, and some of its threads, by name, wait in the kernel for a device.
    Hangs(String),
}

impl OwnerState {
    fn of(owner: &str) -> Self {
        let process = Path::new("/proc").join(owner);
        if owner.is_empty() || !process.exists() {
            return if owner.is_empty() { Self::Alive } else { Self::Gone };
        }
        match state_of(&process) {
            Some(found) if !found.is_ending => return Self::Alive,
            _ => {}
        }
        let threads = std::fs::read_dir(process.join("task")).into_iter().flatten().flatten();
        let hangs = threads.filter_map(|thread| state_of(&thread.path())).filter(|found| found.waits);
        let names: Vec<String> = hangs.map(|found| found.name).collect();
        if names.is_empty() { Self::Gone } else { Self::Hangs(names.join(", ")) }
    }
}

/// What the kernel says of a process or thread.
#[derive(Debug, PartialEq, Eq)]
struct ThreadState {
    name: String,
    /// It waits in the kernel for a device or a server, whatever is sent to it.
    waits: bool,
    /// It will not run any more. Its end may still wait for something.
    is_ending: bool,
}

/// `PF_EXITING` of the kernel.
const IS_EXITING: u64 = 4;

/// The state of a process or thread, by its directory below `/proc`.
fn state_of(directory: &Path) -> Option<ThreadState> {
    parse_stat(&std::fs::read_to_string(directory.join("stat")).ok()?)
}

/// `PID (NAME) STATE PPID PGRP SESSION TTY TPGID FLAGS ...`, where a name may have anything in it.
fn parse_stat(stat: &str) -> Option<ThreadState> {
    let (before, after) = stat.rsplit_once(')')?;
    let words: Vec<&str> = after.split_whitespace().collect();
    let state = *words.first()?;
    let flags: u64 = words.get(6).and_then(|flags| flags.parse().ok()).unwrap_or_default();
    let is_ending = matches!(state, "Z" | "X") || flags & IS_EXITING != 0;
    Some(ThreadState { name: before.split_once('(')?.1.to_owned(), waits: state == "D", is_ending })
}

/// Opens and locks what keeps others out, waiting for an owner that was killed a moment ago.
async fn lock_root(root: &Path, how: FlockOperation, env: &dyn Env) -> Result<File> {
    let path = root.join("lock");
    let attempt = |error: std::io::Error| of_state(error, format!("locking {}", path.display()));
    let mut file = File::options().create(true).truncate(false).read(true).write(true).open(&path).map_err(attempt)?;
    let start = env.now();
    loop {
        match flock(&file, how) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::WOULDBLOCK) => {}
            Err(error) => return Err(attempt(error.into())),
        }
        let mut owner = String::new();
        std::io::Seek::rewind(&mut file).and_then(|()| file.read_to_string(&mut owner)).map_err(attempt)?;
        let owner = owner.trim();
        let state = OwnerState::of(owner);
        if state == OwnerState::Alive || env.now().since(start) > DEAD_OWNER_WAIT {
            return Err(refusal(root, owner, &state, how));
        }
        env.sleep(Duration::from_millis(20)).await;
    }
}

/// Why the directory, which the process `owner` has, is not there for somebody who would lock it.
fn refusal(root: &Path, owner: &str, state: &OwnerState, how: FlockOperation) -> Error {
    if let OwnerState::Hangs(threads) = state {
        let message = format!(
            "transhumed (process {owner}) has died, and still has {}: {threads} of it wait in the kernel",
            root.display()
        );
        return Error::new(ErrorCode::StateLocked, message).with_hint(
            "a device does not answer (`journalctl -k`, /proc/PID/task/*/stack): it must answer or fail first",
        );
    }
    let root = root.display();
    let (message, hint) = match how {
        FlockOperation::NonBlockingLockShared => (
            format!("a transhumed uses {root} (process {owner})"),
            "it serves the volume itself; rescue is for when it cannot start",
        ),
        _ => (
            format!("another transhumed (process {owner}) uses {root}"),
            "stop that one first, or give this one another --state-dir",
        ),
    };
    Error::new(ErrorCode::StateLocked, message).with_hint(hint)
}

/// The same for a daemon, which leaves its number there.
async fn lock_as_owner(root: &Path, env: &dyn Env) -> Result<File> {
    let mut file = lock_root(root, FlockOperation::NonBlockingLockExclusive, env).await?;
    std::io::Seek::rewind(&mut file)
        .and_then(|()| file.set_len(0))
        .and_then(|()| writeln!(file, "{}", std::process::id()))
        .map_err(|error| of_state(error, format!("locking {}", root.join("lock").display())))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_second_daemon_is_kept_out_and_half_made_volumes_are_swept() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let env = env::RealEnv::new();
        let state = StateDir::open(directory.path(), &env).await.expect("the first gets it");
        let error = StateDir::open(directory.path(), &env).await.err().expect("a second got it");
        assert_eq!(error.code, ErrorCode::StateLocked);

        let error = StateDir::share(directory.path(), &env).await.expect_err("a rescue got it");
        assert!(error.hint.as_deref().is_some_and(|hint| hint.contains("rescue")), "{error:?}");

        state.begin_volume("whole", Bytes::kib(192)).expect("begun");
        state.finish_volume("whole").expect("counts");
        state.begin_volume("half", Bytes::kib(192)).expect("begun");
        assert_eq!(state.layout().journal("whole").metadata().expect("there").len(), 192 << 10);
        drop(state);
        let state = StateDir::open(directory.path(), &env).await.expect("free again");
        assert_eq!(state.volume_names().expect("listed"), ["whole"]);
        assert!(!state.layout().volumes().join(".half.new").exists());
        state.remove_volume("whole").expect("removed");
        assert_eq!(state.volume_names().expect("listed").len(), 0);
    }

    #[tokio::test]
    async fn a_rescue_waits_for_what_a_dead_daemon_leaves_behind() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let env = env::RealEnv::new();
        let lock = lock_as_owner(directory.path(), &env).await.expect("the first gets it");
        // Nobody has this number.
        std::fs::write(directory.path().join("lock"), "4194305").expect("written");
        let (begun, limit) = (std::time::Instant::now(), Duration::from_millis(300));
        let (shared, ()) = futures::join!(StateDir::share(directory.path(), &env), async {
            env.sleep(limit).await;
            drop(lock);
        });
        shared.expect("it is free then");
        assert!(begun.elapsed() >= limit, "it was not waited for");
    }

    #[test]
    fn a_process_is_alive_or_gone_and_a_thread_that_hangs_is_seen() {
        assert_eq!(OwnerState::of(&std::process::id().to_string()), OwnerState::Alive);
        assert_eq!(OwnerState::of("4194305"), OwnerState::Gone);
        let state = |name: &str, waits, is_ending| Some(ThreadState { name: name.to_owned(), waits, is_ending });
        assert_eq!(parse_stat("12 (iou-wrk-(9) x) D 1 2"), state("iou-wrk-(9) x", true, false));
        assert_eq!(parse_stat("12 (a) Z 1 12 12 0 -1 4227084 0"), state("a", false, true));
        // As one that was killed and waits for a server that it tells of the end of its files.
        assert_eq!(parse_stat("12 (transhumed) D 1 12 12 0 -1 4195588 0"), state("transhumed", true, true));
        assert_eq!(parse_stat("12 (transhumed) D 1 12 12 0 -1 4195584 0"), state("transhumed", true, false));
        let mut child = std::process::Command::new("true").spawn().expect("started");
        let process = PathBuf::from("/proc").join(child.id().to_string());
        while !std::fs::read_to_string(process.join("stat")).expect("it is a child").contains(") Z ") {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(OwnerState::of(&child.id().to_string()), OwnerState::Gone, "nothing of it hangs");
        child.wait().expect("it has ended");
    }

    #[test]
    fn names_that_would_be_paths_are_refused() {
        for name in ["web1", "a", "A.b_c-9"] {
            assert!(check_name(name).is_ok(), "{name} was refused");
        }
        for name in ["", ".", "..", ".hidden", "a/b", "a b", "-x", "ä", &"x".repeat(65)] {
            assert!(check_name(name).is_err(), "{name} was accepted");
        }
    }
}
