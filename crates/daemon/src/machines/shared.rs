//! Disks that lie where both hosts reach them: which ones they are, and what makes sure of that.
//!
//! A path says nothing by itself: the same one may lead to another disk at another host. So the source puts a file beside the
//! image, whose name nobody could guess, and the target says whether it sees it. Of a block device both compare what the storage
//! says of itself. An export of an NBD server is the same for both if neither reaches it through itself. The target opens none
//! of them before its configuration lists it.

use std::path::{Component, Path};
use std::sync::Arc;

use api::v1::{DiskHandling, Error, ErrorCode, VmDisk, VmMoveRequest};
use block::Bytes;
use nbd::NbdUri;

use super::channel::{Answer, Ask, SharedDisk};
use super::departing_caches::lone_cache;
use super::document::{MachineDisk, MachineDocument};
use crate::daemon::Daemon;
use crate::document::random_uuid;
use crate::foreign::{ForeignExport, inspect, of_server};
use crate::hosts::HostName;
use crate::location::{Location, parse_backend};
use crate::platform::Backends;
use crate::problem::{Result, invalid};
use crate::stack::ArrivingCache;

/// How one disk goes, and why.
pub(super) struct Handling {
    /// Where it is and stays, if it is not copied.
    pub(super) place: Option<Location>,
    /// Whether that is a container that grows.
    pub(super) grows: bool,
    /// Why it cannot stay where it is.
    pub(super) why: Option<Error>,
}

/// A disk of which the other host is asked whether it reaches it.
struct Asked {
    index: usize,
    place: Location,
    grows: bool,
}

impl Handling {
    const fn copied(why: Option<Error>) -> Self {
        Self { place: None, grows: false, why }
    }

    pub(super) const fn kind(&self) -> DiskHandling {
        if self.place.is_some() { DiskHandling::Shared } else { DiskHandling::Copied }
    }
}

impl Daemon {
    /// How each disk goes to `host`: as `request` says, or by whether that reaches it where it is.
    pub(super) async fn handle_disks(
        self: &Arc<Self>,
        host: &HostName,
        disks: &[VmDisk],
        request: &VmMoveRequest,
    ) -> Result<Vec<Handling>> {
        let unknown = request.disks.iter().find(|choice| !disks.iter().any(|disk| disk.node == choice.node));
        if let Some(choice) = unknown {
            let nodes: Vec<_> = disks.iter().map(|disk| disk.node.as_str()).collect();
            return Err(invalid(
                format!("the VM has no disk {}", choice.node),
                format!("its disks are {}", nodes.join(", ")),
            ));
        }
        let chosen = |disk: &VmDisk| {
            let choice = request.disks.iter().find(|choice| choice.node == disk.node);
            choice.map(|choice| choice.handling)
        };
        let mut asked = Vec::new();
        let mut handled = Vec::with_capacity(disks.len());
        for disk in disks {
            let why = match chosen(disk) {
                Some(DiskHandling::Copied) => None,
                Some(DiskHandling::Shared) | None => match self.place_of(disk) {
                    Ok((place, grows)) => {
                        asked.push(Asked { index: handled.len(), place, grows });
                        None
                    }
                    Err(why) => Some(why),
                },
            };
            handled.push(Handling::copied(why));
        }
        self.ask_which_are_shared(host, disks, &mut handled, asked).await?;
        for (disk, handling) in disks.iter().zip(&handled) {
            if let (Some(DiskHandling::Shared), Some(why)) = (chosen(disk), &handling.why) {
                let message = format!("{} cannot stay where it is: {}", disk.node, why.message);
                return Err(Error { message, ..why.clone() });
            }
        }
        Ok(handled)
    }

    async fn ask_which_are_shared(
        &self,
        host: &HostName,
        disks: &[VmDisk],
        handled: &mut [Handling],
        asked: Vec<Asked>,
    ) -> Result<()> {
        if asked.is_empty() {
            return Ok(());
        }
        let mut question = Vec::with_capacity(asked.len());
        for Asked { index, place, grows } in &asked {
            let identity = place.local_path().and_then(|path| self.backends.device_identity(path).ok().flatten());
            let mark = place.local_path().filter(|_| identity.is_none()).map(|_| random_uuid(&*self.env));
            let disk = &disks[*index];
            let size = (disk.volume.is_some() && !grows).then_some(disk.size_bytes);
            question.push(SharedDisk { place: place.clone(), size, mark, identity });
        }
        let answered = self.ask_with_marks(host, question).await;
        let refusals = match answered {
            Ok(Answer::Shared { refusals }) if refusals.len() == asked.len() => refusals,
            Ok(_) => return Err(not_said(host, "it has answered something else")),
            // Copying is no answer to that: the disk may lie where both hosts reach it.
            Err(error) if error.code == ErrorCode::HostUnreachable => return Err(not_said(host, &error.message)),
            Err(error) => return Err(error),
        };
        for (Asked { index, place, grows }, refusal) in asked.into_iter().zip(refusals) {
            handled[index] = match refusal {
                None => Handling { place: Some(place), grows, why: None },
                why => Handling::copied(why),
            };
        }
        Ok(())
    }

    /// Asks while the marks are there, and removes them whatever is answered.
    async fn ask_with_marks(&self, host: &HostName, mut disks: Vec<SharedDisk>) -> Result<Answer> {
        let mut left = Vec::new();
        for disk in &mut disks {
            let (Some(image), Some(mark)) = (disk.place.local_path(), disk.mark) else { continue };
            match self.backends.leave_mark(image, mark) {
                Ok(()) => left.push((image.to_owned(), mark)),
                // Nobody could prove anything there.
                Err(error) => {
                    tracing::info!(image = %image.display(), %error, "whether a disk is shared cannot be found out");
                    disk.mark = None;
                }
            }
        }
        let answer = self.ask_about_machine(host, Ask::Share { disks }).await;
        for (image, mark) in left {
            if let Err(error) = self.backends.remove_mark(&image, mark) {
                tracing::warn!(image = %image.display(), %mark, %error, "a mark beside an image could not be removed");
            }
        }
        answer
    }

    /// Where a disk is and whether that is a container that grows, if it could stay there.
    fn place_of(&self, disk: &VmDisk) -> Result<(Location, bool)> {
        let Some(name) = &disk.volume else {
            let spec = parse_backend(&format!("file:{}", disk.file), backends::CacheMode::Auto)?;
            return Ok((Location::Local(spec), false));
        };
        let document = self.volume(name)?.document();
        let refuse = |why: &str, hint: &str| Err(invalid(format!("{name} {why}"), hint));
        match document.backend.clone() {
            _ if !document.layers.is_empty() && lone_cache(&document).is_none() => {
                refuse("has layers", "remove them first")
            }
            Location::Remote(_) => refuse("is at another host", "move the VM from there"),
            place @ (Location::Local(_) | Location::Foreign(_)) => Ok((place, document.room_to_grow().is_some())),
        }
    }

    /// Which of these disks this host reaches where they are.
    pub(super) async fn answer_which_are_shared(&self, disks: &[SharedDisk]) -> Answer {
        let mut refusals = Vec::with_capacity(disks.len());
        for disk in disks {
            refusals.push(self.look_at_shared(disk).await.err());
        }
        Answer::Shared { refusals }
    }

    async fn look_at_shared(&self, disk: &SharedDisk) -> Result<()> {
        self.may_share(&disk.place)?;
        let found = match &disk.place {
            Location::Local(spec) => {
                let lacks = |what: &str| {
                    Error::new(ErrorCode::BackendMissing, format!("{} {what}", spec.path().display()))
                        .with_hint("mount the same storage at both hosts, under the same path")
                };
                self.is_same_storage(spec.path(), disk).map_err(lacks)?;
                self.backends.size(spec.path()).map_err(|error| lacks(&format!("cannot be looked at here: {error}")))?
            }
            Location::Foreign(export) => {
                let uri: NbdUri = export.uri().map_err(|error| of_server(&error))?;
                inspect(&uri, &self.env).await.map_err(|error| of_server(&error))?.size()
            }
            Location::Remote(remote) => return Err(invalid(format!("{remote} is no storage"), "copy it")),
        };
        if let Some(size) = disk.size.map(Bytes).filter(|size| !reaches(&disk.place, found, *size)) {
            let message = format!("{} has {found} here and {size} there", disk.place);
            return Err(Error::new(ErrorCode::BackendUnusable, message).with_hint("copy it: --disk NODE=copied"));
        }
        Ok(())
    }

    /// Whether `path` leads to the same disk here as at the source, or why that is not known.
    fn is_same_storage(&self, path: &Path, disk: &SharedDisk) -> std::result::Result<(), &'static str> {
        let here = self.backends.device_identity(path).ok().flatten();
        match (&disk.identity, here, disk.mark) {
            (Some(there), Some(here), _) if *there == here => Ok(()),
            (Some(_), Some(_), _) => Err("is another device here than there, or one that has no worldwide name"),
            (Some(_), None, _) => Err("is a block device there, and none here"),
            (None, Some(_), _) => Err("is a block device here, and none there"),
            (None, None, None) => Err("is on storage where the other host may make no files"),
            (None, None, Some(mark)) if self.backends.has_mark(path, mark).unwrap_or(false) => Ok(()),
            (None, None, Some(_)) => Err("is on other storage here than there"),
        }
    }

    /// Whether this host's configuration lets disks of others stay at `place`.
    pub(super) fn may_share(&self, place: &Location) -> Result<()> {
        let listed = self.config.hosts.as_ref().map(|hosts| hosts.shared_storage.as_slice()).unwrap_or_default();
        let is_listed = match place {
            Location::Local(spec) => {
                listed.iter().any(|folder| lies_in(&*self.backends, spec.path(), Path::new(folder)))
            }
            Location::Foreign(export) => listed.iter().any(|start| is_export_at(export, start)),
            Location::Remote(_) => false,
        };
        if is_listed {
            return Ok(());
        }
        let message = format!("{place} is on no storage that this host says it shares");
        Err(Error::new(ErrorCode::HostRefused, message)
            .with_hint("list it as `shared-storage` in the section [hosts] there, if both hosts reach it"))
    }

    /// Where the volume `name` is and stays that comes from `host` with a machine, if it is not copied.
    /// With it, whether it is a container that grows, and the cache that it is to have here.
    pub(crate) fn shared_place_of(&self, host: &str, name: &str) -> Option<(Location, bool, Option<ArrivingCache>)> {
        let of = |document: MachineDocument| {
            document.incoming.filter(|incoming| incoming.host == host)?;
            let disk = document.disks.into_iter().find(|disk: &MachineDisk| disk.volume == name)?;
            Some((disk.shared?, disk.grows, disk.cache))
        };
        self.machines.list().into_iter().find_map(|machine| of(machine.document()))
    }
}

fn not_said(host: &HostName, why: &str) -> Error {
    let message = format!("{host} does not say which disks can stay where they are: {why}");
    Error::new(ErrorCode::HostUnreachable, message).with_hint(
        "ask again when it answers; a version of transhumed that knows no such disks takes --disk NODE=copied of each",
    )
}

/// An export may be larger than the volume on it.
fn reaches(place: &Location, found: Bytes, wanted: Bytes) -> bool {
    match place {
        Location::Foreign(_) => found >= wanted,
        Location::Local(_) | Location::Remote(_) => found == wanted,
    }
}

/// Whether `path` leads into `folder`, with whatever links there are on the way.
fn lies_in(backends: &dyn Backends, path: &Path, folder: &Path) -> bool {
    let is_plain = path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    if !is_plain || !path.starts_with(folder) {
        return false;
    }
    // What does not resolve is not there, and is refused for that.
    // Names of devices are links, which only root makes.
    let devices = Path::new("/dev");
    match (backends.resolve(path), backends.resolve(folder)) {
        (Ok(leads_to), Ok(_)) if path.starts_with(devices) => leads_to.starts_with(devices),
        (Ok(path), Ok(folder)) => path.starts_with(folder),
        _ => true,
    }
}

/// Whether `export` is one of those whose addresses begin with `start`, and is no other one at each host.
fn is_export_at(export: &ForeignExport, start: &str) -> bool {
    let Ok(uri) = export.uri() else { return false };
    NbdUri::is_meant(start) && uri.socket().is_none() && export.nbd.starts_with(start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::RealBackends;

    #[test]
    fn a_path_lies_in_a_folder_only_where_it_leads_there() {
        let folder = tempfile::tempdir().expect("a folder");
        let (shared, private) = (folder.path().join("shared"), folder.path().join("private"));
        std::fs::create_dir(&shared).expect("a folder");
        std::fs::create_dir(&private).expect("a folder");
        std::fs::write(private.join("secret"), "x").expect("a file");
        std::fs::write(shared.join("disk.raw"), "x").expect("a file");
        std::os::unix::fs::symlink(private.join("secret"), shared.join("link")).expect("a link");
        assert!(lies_in(&RealBackends::default(), &shared.join("disk.raw"), &shared));
        assert!(!lies_in(&RealBackends::default(), &shared.join("../private/secret"), &shared));
        assert!(!lies_in(&RealBackends::default(), &shared.join("link"), &shared), "a link leads out of the folder");
        assert!(!lies_in(&RealBackends::default(), &private.join("secret"), &shared));
    }
}
