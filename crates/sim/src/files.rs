//! The daemon's small files in the world: what a power loss leaves of them, and a store that is full.
//!
//! Names change in the order in which the changes were asked for. A power loss takes back any number of the newest
//! changes that no sync of their directory has made durable (a journalling file system). Bytes that were written
//! through are durable. Of appended bytes any beginning may be durable. Every step counts towards the world's crash
//! point, so that a process can be killed between any two of them. What is at `journal` and `progress` is on disks of
//! its own. Only their names are here.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use env::Files;
use parking_lot::{Mutex, MutexGuard};

use crate::disk::Disk;
use crate::process::Process;
use crate::rng::Rng;
use crate::world::World;

/// What is under a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entry {
    Directory,
    File(usize),
}

type Tree = BTreeMap<PathBuf, Entry>;

/// A change of names.
#[derive(Clone, Debug)]
enum Change {
    Link(PathBuf, Entry),
    Unlink(PathBuf),
    Rename(PathBuf, PathBuf),
}

impl Change {
    fn touches(&self, directory: &Path) -> bool {
        let is_in = |path: &Path| path.parent() == Some(directory);
        match self {
            Self::Link(path, _) | Self::Unlink(path) => is_in(path),
            Self::Rename(from, to) => is_in(from) || is_in(to),
        }
    }

    fn apply(&self, tree: &mut Tree) {
        let below = |tree: &Tree, path: &Path| -> Vec<(PathBuf, Entry)> {
            let found = tree.iter().filter(|(name, _)| name.starts_with(path));
            found.map(|(name, entry)| (name.clone(), *entry)).collect()
        };
        match self {
            Self::Link(path, entry) => {
                tree.insert(path.clone(), *entry);
            }
            Self::Unlink(path) => tree.retain(|name, _| !name.starts_with(path)),
            Self::Rename(from, to) => {
                for (name, entry) in below(tree, from) {
                    tree.remove(&name);
                    let rest = name.strip_prefix(from).expect("it begins so");
                    // Joining nothing would add a slash.
                    let place = if rest.as_os_str().is_empty() { to.clone() } else { to.join(rest) };
                    tree.insert(place, entry);
                }
            }
        }
    }
}

/// The bytes of a file, and how many of them are durable.
#[derive(Default)]
struct Contents {
    bytes: Vec<u8>,
    durable: usize,
}

#[derive(Default)]
struct State {
    tree: Tree,
    durable: Tree,
    pending: Vec<Change>,
    contents: Vec<Contents>,
    is_full: bool,
    /// So often a write or a sync fails.
    failing: f64,
    /// Names of the volume's own file system that could not be removed the first time.
    stubborn: BTreeSet<String>,
    /// Told each time that a machine's document is durable.
    watcher: Option<Arc<dyn Fn() + Send + Sync>>,
}

/// The file system that the daemon's state directory is on. It outlives processes. Clones are the same.
#[derive(Clone)]
pub(crate) struct SimFiles {
    world: World,
    rng: Arc<Rng>,
    /// Hold what is at `progress`, by the volume's directory. The first is that of any other.
    maps: Arc<Mutex<Vec<(String, Disk)>>>,
    state: Arc<Mutex<State>>,
}

impl SimFiles {
    pub(crate) fn new(world: &World, map: &Disk) -> Self {
        let rng = Arc::new(world.rng("files"));
        let maps = Arc::new(Mutex::new(vec![(String::new(), map.clone())]));
        Self { world: world.clone(), rng, maps, state: Arc::default() }
    }

    /// What is at `progress` of the volume `name` is on `map`.
    pub(crate) fn add_map(&self, name: &str, map: &Disk) {
        self.maps.lock().push((name.to_owned(), map.clone()));
    }

    fn map_at(&self, path: &Path) -> Disk {
        let directory = path.parent().and_then(Path::file_name).unwrap_or_default();
        let maps = self.maps.lock();
        let (_, map) = maps.iter().find(|(name, _)| directory == name.as_str()).unwrap_or(&maps[0]);
        map.clone()
    }

    /// The same as `process` sees them.
    pub(crate) fn of(&self, process: &Process) -> Arc<dyn Files> {
        Arc::new(LifeFiles { files: self.clone(), process: process.clone() })
    }

    /// What there is in a directory.
    pub(crate) fn below(&self, directory: &str) -> impl Iterator<Item = String> {
        let state = self.state.lock();
        let names = state.tree.keys().filter(|path| path.parent() == Some(Path::new(directory)));
        names.map(|path| path.display().to_string()).collect::<Vec<_>>().into_iter()
    }

    /// The text of a file.
    pub(crate) fn contents(&self, path: &str) -> Option<String> {
        let state = self.state.lock();
        let number = state.file(Path::new(path)).ok()?;
        Some(String::from_utf8_lossy(&state.contents[number].bytes).into_owned())
    }

    /// Nothing can be written while it is full.
    pub(crate) fn set_full(&self, is_full: bool) {
        self.state.lock().is_full = is_full;
    }

    /// From now on so many writes and syncs fail. What a failed one was about may be there or not, and is not durable.
    pub(crate) fn set_failing(&self, part: f64) {
        self.state.lock().failing = part;
    }

    /// Whether the removal of `name`, which lies beside the volume, fails: the first time that it is asked for while files
    /// fail. Whoever asks again finds it gone.
    pub(crate) fn refuses_to_remove(&self, name: String) -> bool {
        let mut state = self.state.lock();
        let refuses = state.failing > 0.0 && !state.stubborn.contains(&name);
        if refuses {
            self.world.fault("file-error", format_args!("removing {name}"));
            state.stubborn.insert(name);
        }
        refuses
    }

    /// Tells `watcher` each time that a document of a machine is durable, or durably gone.
    pub(crate) fn watch(&self, watcher: impl Fn() + Send + Sync + 'static) {
        self.state.lock().watcher = Some(Arc::new(watcher));
    }

    /// Nobody is told any more.
    pub(crate) fn unwatch(&self) {
        let watcher = self.state.lock().watcher.take();
        drop(watcher);
    }

    /// Takes the power away.
    pub(crate) fn lose_power(&self) {
        let mut state = self.state.lock();
        let kept = self.rng.below(state.pending.len() as u64 + 1) as usize;
        let lost = state.pending.len() - kept;
        let pending = std::mem::take(&mut state.pending);
        let State { durable, contents, tree, .. } = &mut *state;
        pending[..kept].iter().for_each(|change| change.apply(durable));
        tree.clone_from(durable);
        for file in contents {
            let kept = self.rng.within(file.durable as u64..=file.bytes.len() as u64) as usize;
            file.bytes.truncate(kept);
            file.durable = kept;
        }
        self.world.event(format_args!("files lost {lost} changes of names"));
    }
}

impl State {
    fn change(&mut self, change: Change) {
        change.apply(&mut self.tree);
        self.pending.push(change);
    }

    fn file(&self, path: &Path) -> Result<usize> {
        match self.tree.get(path) {
            Some(Entry::File(number)) => Ok(*number),
            Some(Entry::Directory) => Err(ErrorKind::IsADirectory.into()),
            None => Err(ErrorKind::NotFound.into()),
        }
    }

    /// The file at `path`, made if there is none; its directory has to be there.
    fn make(&mut self, path: &Path) -> Result<usize> {
        let directory = path.parent().ok_or(ErrorKind::InvalidInput)?;
        match self.file(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            found => return found,
        }
        if self.tree.get(directory) != Some(&Entry::Directory) {
            return Err(ErrorKind::NotFound.into());
        }
        self.contents.push(Contents::default());
        let number = self.contents.len() - 1;
        self.change(Change::Link(path.to_owned(), Entry::File(number)));
        Ok(number)
    }
}

/// The files as one life of a process sees them.
struct LifeFiles {
    files: SimFiles,
    process: Process,
}

impl LifeFiles {
    /// One step of a living process.
    fn step(&self) -> Result<MutexGuard<'_, State>> {
        match self.process.step() {
            true => Ok(self.files.state.lock()),
            false => Err(Error::other("the process is dead")),
        }
    }

    /// Whether a step fails now that brings something to the disk.
    fn fails(&self, state: &State, what: &str, path: &Path) -> bool {
        let fails = self.files.rng.chance(state.failing);
        if fails {
            self.files.world.fault("file-error", format_args!("{what} {}", path.display()));
        }
        fails
    }

    /// One that needs room.
    fn filling_step(&self) -> Result<MutexGuard<'_, State>> {
        let state = self.step()?;
        if state.is_full {
            self.files.world.fault("no-space", format_args!("a file of the daemon's"));
            return Err(ErrorKind::StorageFull.into());
        }
        Ok(state)
    }
}

impl Files for LifeFiles {
    fn create_directory(&self, path: &Path) -> Result<()> {
        let mut state = self.filling_step()?;
        let mut missing: Vec<_> = path.ancestors().filter(|path| !state.tree.contains_key(*path)).collect();
        missing.reverse();
        missing.into_iter().for_each(|path| state.change(Change::Link(path.to_owned(), Entry::Directory)));
        Ok(())
    }

    fn list(&self, directory: &Path) -> Result<Vec<PathBuf>> {
        let state = self.step()?;
        state.tree.get(directory).ok_or(ErrorKind::NotFound)?;
        Ok(state.tree.keys().filter(|path| path.parent() == Some(directory)).cloned().collect())
    }

    fn read(&self, path: &Path) -> Result<Vec<u8>> {
        let state = self.step()?;
        let number = state.file(path)?;
        Ok(state.contents[number].bytes.clone())
    }

    fn write(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let mut state = self.filling_step()?;
        let number = state.make(path)?;
        if self.fails(&state, "writing", path) {
            let kept = self.files.rng.within(0..=bytes.len() as u64) as usize;
            state.contents[number] = Contents { bytes: bytes[..kept].to_vec(), durable: 0 };
            return Err(Error::other("injected"));
        }
        state.contents[number] = Contents { bytes: bytes.to_vec(), durable: bytes.len() };
        Ok(())
    }

    fn create_zeroed(&self, path: &Path, _length: u64) -> Result<()> {
        let mut state = self.filling_step()?;
        if state.tree.contains_key(path) {
            return Err(ErrorKind::AlreadyExists.into());
        }
        state.make(path).map(drop)
    }

    fn reserve(&self, path: &Path, _length: u64) -> Result<()> {
        let mut state = self.filling_step()?;
        if !state.tree.contains_key(path) {
            self.files.map_at(path).blank();
        }
        state.make(path).map(drop)
    }

    fn append(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let mut state = self.filling_step()?;
        let number = state.make(path)?;
        state.contents[number].bytes.extend_from_slice(bytes);
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        let mut state = self.step()?;
        state.tree.get(from).ok_or(ErrorKind::NotFound)?;
        state.change(Change::Rename(from.to_owned(), to.to_owned()));
        Ok(())
    }

    fn remove_file(&self, path: &Path) -> Result<()> {
        let mut state = self.step()?;
        state.file(path)?;
        state.change(Change::Unlink(path.to_owned()));
        Ok(())
    }

    fn remove_directory(&self, path: &Path) -> Result<()> {
        let mut state = self.step()?;
        state.tree.get(path).ok_or(ErrorKind::NotFound)?;
        state.change(Change::Unlink(path.to_owned()));
        Ok(())
    }

    fn sync_directory(&self, path: &Path) -> Result<()> {
        let mut state = self.step()?;
        state.tree.get(path).ok_or(ErrorKind::NotFound)?;
        if self.fails(&state, "syncing", path) {
            return Err(Error::other("injected"));
        }
        let through = state.pending.iter().rposition(|change| change.touches(path)).map_or(0, |last| last + 1);
        let settled: Vec<_> = state.pending.drain(..through).collect();
        settled.iter().for_each(|change| change.apply(&mut state.durable));
        let watcher = state.watcher.clone().filter(|_| path.ends_with("machines"));
        drop(state);
        watcher.into_iter().for_each(|watcher| watcher());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;
    use crate::disk::Timing;
    use crate::log::Keep;

    #[test]
    fn a_power_loss_takes_back_names_that_were_not_synced_newest_first_and_no_others() {
        let mut seen = [false; 2];
        for seed in 0..40 {
            clock::run(async {
                let world = World::new(seed, Keep::Tail);
                let map = Disk::new(&world, "map", block::Bytes::kib(64), 512, Timing::FLASH);
                let files = SimFiles::new(&world, &map);
                let process = Process::start(&world, 1);
                let life = files.of(&process);
                let (old, new) = (Path::new("/state/old"), Path::new("/state/new"));
                life.create_directory(Path::new("/state")).expect("made");
                life.sync_directory(Path::new("/")).expect("synced");
                life.write(old, b"old").expect("written");
                life.sync_directory(Path::new("/state")).expect("synced");
                life.write(new, b"new").expect("written");
                life.rename(new, old).expect("renamed");
                files.lose_power();
                let found = life.read(old).expect("one of them is there");
                assert!(found == b"old" || found == b"new", "{found:?}");
                assert!(found != b"new" || life.read(new).is_err(), "a name was kept and the one before it was not");
                seen[usize::from(found == b"new")] = true;
                process.kill().await;
                assert!(life.write(old, b"dead").is_err() && life.read(old).is_err(), "a dead process goes on");
            });
        }
        assert_eq!(seen, [true; 2]);
    }
}
