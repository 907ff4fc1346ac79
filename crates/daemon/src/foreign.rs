//! Exports of NBD servers that are not ours, as places of volumes.
//!
//! Such a server has no lock that keeps others out, no epoch and no fence; nobody there knows of us. So an export is
//! examined before it becomes a target: its size, its alignment, and whether it is empty. What is known of it goes into
//! the journal. From then on only the operator's word guarantees that nobody else writes to it. `nbd::NbdBackend` says
//! what becomes of requests when the server is lost.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use api::v1::{self, Error, ErrorCode, StoreRequest, SurrogateRequest};
use block::{BlockDevice, Bytes, Device, ErrorKind, Extent, Geometry};
use env::EnvRef;
use futures::future::join_all;
use nbd::{BackendOptions, DialUri, NbdBackend, NbdDevice, NbdUri};
use serde::{Deserialize, Serialize};

use crate::daemon::Daemon;
use crate::location::Location;
use crate::open_backend::{BackendOpenOptions, CLIENT_SECTOR, OpenBackend};
use crate::pools::NewStore;
use crate::problem::{Result, invalid, of_backend};
use crate::state_dir::check_name;
use crate::volume::Volume;

/// Looking whether an export is empty takes this long at most.
const LOOKING_LIMIT: Duration = Duration::from_secs(3);

/// An export of an NBD server that is not ours, and what is known of it: the daemon starts while its server is away.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForeignExport {
    /// Its address.
    pub nbd: String,
    /// How large the volume is, in bytes; the export may be larger.
    pub size: u64,
    /// What requests are multiples of, in bytes.
    pub request_alignment: u32,
    /// The size of requests that suits its server, in bytes.
    pub preferred_bytes: u32,
    /// The largest request that its server takes, in bytes.
    pub transfer_bytes_max: u32,
    /// Whether all of it was known to read as zeroes when it became a target.
    #[serde(default)]
    pub reads_zero: bool,
    /// The volume of another host that it is, if its address is that of a socket of ours which leads there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_volume: Option<HostVolume>,
}

/// A volume of another host that is used from here, where it stays that host's.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct HostVolume {
    /// The host, as this daemon's trust store calls it.
    pub host: String,
    /// What the volume is called there.
    pub volume: String,
}

impl fmt::Display for HostVolume {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}:{}", self.host, self.volume)
    }
}

impl fmt::Display for ForeignExport {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host_volume {
            Some(volume) => volume.fmt(out),
            None => out.write_str(&self.nbd),
        }
    }
}

impl HostVolume {
    /// What `HOST:VOLUME` means, if `text` is that.
    fn meant_by(text: &str) -> Option<Self> {
        let (host, volume) = text.split_once(':')?;
        let is_meant = host != "file" && [host, volume].iter().all(|name| check_name(name).is_ok());
        is_meant.then(|| Self { host: host.to_owned(), volume: volume.to_owned() })
    }
}

impl ForeignExport {
    /// Its address, as a value.
    pub(crate) fn uri(&self) -> block::Result<NbdUri> {
        self.nbd.parse().map_err(|error| {
            block::Error::new(block::ErrorKind::Invalid, format!("\"{}\" is no address of an export", self.nbd))
                .with_source(error)
        })
    }

    fn geometry(&self, read_only: bool) -> Geometry {
        Geometry {
            size: Bytes(self.size),
            request_alignment: self.request_alignment,
            preferred_bytes: self.preferred_bytes,
            transfer_bytes_max: self.transfer_bytes_max,
            read_only,
        }
    }

    /// Uses it. Its server need not be there yet: the first request waits for it.
    pub(crate) fn open(
        &self,
        open_options: &BackendOpenOptions,
        reconnect_limit: Duration,
        env: &EnvRef,
    ) -> block::Result<Arc<NbdBackend>> {
        let dial = Arc::new(DialUri::new(self.uri()?, Arc::clone(env)));
        let options =
            BackendOptions { reconnect_limit, size_limit: Some(Bytes(self.size)), ..BackendOptions::default() };
        let geometry = self.geometry(open_options.read_only);
        Ok(Arc::new(NbdBackend::expecting(geometry, dial, Arc::clone(env), options)))
    }
}

/// An export of another server, for as long as anything of this process may be on its way there.
pub(crate) struct ForeignUse {
    uri: NbdUri,
    backend: Weak<NbdBackend>,
}

impl Daemon {
    /// Remembers that `held` uses an export. There is no lock on it that would.
    pub(crate) fn note_foreign(&self, export: &ForeignExport, open_backend: &OpenBackend) {
        let (Ok(uri), Some(backend)) = (export.uri(), open_backend.export()) else { return };
        let mut used = self.foreign.lock();
        used.retain(|other| other.backend.strong_count() > 0);
        used.push(ForeignUse { uri, backend: Arc::downgrade(backend) });
    }

    /// Has the servers of all exports in use make durable what they have answered, within `limit`. What they may not
    /// have made durable goes on the records of their volumes.
    pub(crate) async fn flush_foreign(&self, limit: Duration) {
        let used: Vec<_> = {
            let used = self.foreign.lock();
            used.iter().filter_map(|one| Some((one.uri.clone(), one.backend.upgrade()?))).collect()
        };
        let volumes = self.volumes();
        let volumes = &volumes[..];
        join_all(used.iter().map(|(uri, backend)| async move {
            let volume = volumes.iter().find(|volume| is_held_by(volume, backend)).map(|volume| &**volume);
            if let Err(error) = flush_last(backend, volume, limit, &self.env).await {
                tracing::warn!(%uri, error = error.chain(), "what an NBD server has answered may not be durable");
            }
        }))
        .await;
    }

    /// Refuses an export to which requests of another move may still be under way: they could land on what is written next.
    fn refuse_used(&self, uri: &NbdUri) -> Result<()> {
        let mut used = self.foreign.lock();
        used.retain(|other| other.backend.strong_count() > 0);
        if !used.iter().any(|other| other.uri.is_same_export(uri)) {
            return Ok(());
        }
        let message = format!("{uri} is in use here, or has not answered all that an undone move has asked it for");
        Err(Error::new(ErrorCode::Busy, message)
            .with_hint("wait until its server has answered, restart that server, or name another target"))
    }

    /// Looks whether the export at `uri` suits as the target of a move of `volume`.
    pub(crate) async fn prepare_foreign(
        &self,
        volume: &Volume,
        uri: &NbdUri,
        overwrite: bool,
    ) -> Result<ForeignExport> {
        let slot = volume.require_up()?;
        self.refuse_own(volume, uri)?;
        if volume.document().room_to_grow().is_some() {
            let message = format!("{} is a container that grows, and {uri} does not", volume.name);
            return Err(Error::new(ErrorCode::BackendUnusable, message).with_hint("move it to a file"));
        }
        self.refuse_used(uri)?;
        if let Some(kind) = self.surrogates.kind_at(uri) {
            let message = format!("{uri} is a store of a {kind}");
            return Err(Error::new(ErrorCode::InUse, message).with_hint("name another target"));
        }
        let found = inspect(uri, &self.env).await.map_err(|error| of_server(&error))?;
        found.as_target(slot.device().geometry(), overwrite, &self.env).await
    }

    /// Refuses what this daemon serves itself, the volume's own export above all: its copy would wait for itself.
    fn refuse_own(&self, volume: &Volume, uri: &NbdUri) -> Result<()> {
        let is_there = |export: &ForeignExport| export.uri().is_ok_and(|there| there.is_same_export(uri));
        if matches!(&volume.document().backend, Location::Foreign(export) if is_there(export)) {
            let message = format!("{} is on {uri} already", volume.name);
            return Err(Error::new(ErrorCode::TargetSame, message).with_hint("name another target"));
        }
        let own = self.own_export(uri);
        match own {
            Some(own) => Err(Error::new(ErrorCode::TargetSame, format!("{uri} is the export of {own} here"))
                .with_hint("name the file that is to hold the volume, or another server's export")),
            None => Ok(()),
        }
    }

    /// The volume that this daemon serves as `uri`.
    fn own_export(&self, uri: &NbdUri) -> Option<String> {
        let own = self.volumes().into_iter().find(|other| other.uri().is_ok_and(|own| own.is_same_export(uri)));
        own.map(|volume| volume.name.clone())
    }

    /// Makes a surrogate, whose stores may be exports of NBD servers. When this fails nothing was left behind.
    ///
    /// # Errors
    /// There is one of that name, the request makes no sense, or a store cannot be used.
    pub(crate) async fn create_surrogate(&self, request: SurrogateRequest) -> Result<v1::Surrogate> {
        let mut stores = Vec::with_capacity(request.stores.len());
        for store in &request.stores {
            stores.push(self.new_store(store).await?);
        }
        self.surrogates.create(request, stores).await
    }

    /// What a store of a surrogate is to be.
    pub(crate) async fn new_store(&self, store: &StoreRequest) -> Result<NewStore> {
        let size_bytes = store.size_bytes;
        if NbdUri::is_meant(&store.place) {
            return Ok(NewStore::export(self.store_at(&store.place).await?.into(), size_bytes));
        }
        let Some(volume) = HostVolume::meant_by(&store.place) else {
            return self.local_store(store, "surrogate").await;
        };
        let uri = self.reach_host_store(&volume).await?;
        let export = self
            .store_at(&uri)
            .await
            .map_err(|error| Error { message: error.message.replace(&uri, &volume.to_string()), ..error })?;
        Ok(NewStore::export(ForeignExport { host_volume: Some(volume), ..export }.into(), size_bytes))
    }

    /// The export that a store is to be, if it suits that.
    async fn store_at(&self, address: &str) -> Result<ForeignExport> {
        let uri = parse_uri(address)?;
        if let Some(own) = self.own_export(&uri) {
            return Err(Error::new(ErrorCode::TargetSame, format!("{uri} is the export of {own} here"))
                .with_hint("name a file of this host, or an export of another server"));
        }
        let holds = |volume: &Arc<Volume>| match &volume.document().backend {
            Location::Foreign(export) => export.uri().is_ok_and(|held| held.is_same_export(&uri)),
            Location::Local(_) | Location::Remote(_) => false,
        };
        if let Some(volume) = self.volumes().into_iter().find(holds) {
            return Err(Error::new(ErrorCode::InUse, format!("{uri} holds the volume {}", volume.name))
                .with_hint("name another export, or a file of this host"));
        }
        self.refuse_used(&uri)?;
        let found = inspect(&uri, &self.env).await.map_err(|error| of_backend(&error, "the store"))?;
        found.as_store()
    }
}

/// Whether `export` holds `volume`.
fn is_held_by(volume: &Volume, export: &Arc<NbdBackend>) -> bool {
    volume.with_backend(|held| held.export().is_some_and(|held| Arc::ptr_eq(held, export))).unwrap_or(false)
}

/// The last flush of this process, within `limit`. Whether `export` may lack what it has answered goes on the record of
/// the `volume` that it holds, if it holds one: what would be written again dies with the process.
///
/// # Errors
/// What has been answered may not be durable.
pub(crate) async fn flush_last(
    export: &NbdBackend,
    volume: Option<&Volume>,
    limit: Duration,
    env: &EnvRef,
) -> block::Result<()> {
    let late = || Err(block::Error::new(ErrorKind::TimedOut, "no answer"));
    let flushed = env::timeout(&**env, limit, export.flush_answered()).await.unwrap_or_else(late);
    let has_lost = export.has_loss_to_tell() || (flushed.is_err() && export.has_unflushed());
    if has_lost {
        // Whoever takes an earlier loss off the record at this moment leaves this one there.
        export.recall_loss();
    }
    if let Some(volume) = volume {
        let noted = env::timeout(&**env, limit, note_loss(volume, has_lost)).await.unwrap_or_else(late);
        if let Err(error) = noted {
            let error = error.chain();
            tracing::error!(volume = volume.name, error, "what an NBD server may lack could not be recorded");
        }
    }
    flushed
}

/// Has it on record whether what holds `volume` may lack what it has answered, and no guest has been told.
async fn note_loss(volume: &Volume, has_lost: bool) -> block::Result<()> {
    let Some(place) = volume.with_backend(|held| held.place.clone()) else { return Ok(()) };
    // A loss is stored even if one is on record: that may be about to be taken off.
    if !has_lost && !volume.document().has_lost_at(&place) {
        return Ok(());
    }
    volume.journal.update(|document| document.note_loss_at(&place, has_lost)).await
}

/// An export that was looked at.
pub(crate) struct Inspected {
    uri: NbdUri,
    geometry: Geometry,
    tells_extents: bool,
    can_flush: bool,
    device: Device,
}

/// Looks at an export.
pub(crate) async fn inspect(uri: &NbdUri, env: &EnvRef) -> block::Result<Inspected> {
    let export = NbdDevice::connect(uri, env).await?;
    let (geometry, tells_extents, can_flush) = (export.geometry(), export.tells_extents(), export.can_flush());
    Ok(Inspected {
        uri: uri.clone(),
        geometry,
        tells_extents,
        can_flush,
        device: Device::new(&uri.to_string(), export),
    })
}

impl Inspected {
    /// How large it is.
    pub(crate) const fn size(&self) -> Bytes {
        self.geometry.size
    }

    /// All of it, as what is read.
    pub(crate) fn whole(&self) -> ForeignExport {
        self.part(self.geometry.size, self.geometry.request_alignment, false)
    }

    /// All of it as a store, if it suits that. What it holds is overwritten.
    fn as_store(&self) -> Result<ForeignExport> {
        let Self { uri, geometry, .. } = self;
        if geometry.read_only {
            return Err(Error::new(ErrorCode::ReadOnly, format!("{uri} takes no writes"))
                .with_hint("name another store, or have its server serve it writable"));
        }
        if !self.can_flush {
            let message = format!("the server of {uri} cannot be asked to make durable what it was told (no flush)");
            return Err(Error::new(ErrorCode::BackendUnusable, message)
                .with_hint("use a server that can: a store holds what the guest has flushed"));
        }
        let alignment = geometry.request_alignment.max(CLIENT_SECTOR);
        Ok(self.part(geometry.size.align_down(alignment.into()), alignment, false))
    }

    /// The part of it that a volume of the geometry `guest` takes, if it suits that.
    pub(crate) async fn as_target(&self, guest: Geometry, overwrite: bool, env: &EnvRef) -> Result<ForeignExport> {
        let Self { uri, geometry: found, .. } = self;
        let alignment = match guest.size.is_multiple_of(CLIENT_SECTOR.into()) {
            true => found.request_alignment.max(CLIENT_SECTOR),
            false => found.request_alignment,
        };
        refuse_unsuitable(uri, &guest, found, alignment)?;
        let reads_zero = self.tells_extents && is_empty(&self.device, guest.size, env).await?;
        if !reads_zero && !overwrite {
            let what = match self.tells_extents {
                true => "is not empty",
                false => "is on a server that does not say whether it is empty",
            };
            return Err(Error::new(ErrorCode::TargetExists, format!("{uri} {what}"))
                .with_hint("use --overwrite if what it holds may be destroyed"));
        }
        Ok(self.part(guest.size, alignment, reads_zero))
    }

    fn part(&self, size: Bytes, alignment: u32, reads_zero: bool) -> ForeignExport {
        let largest = self.geometry.transfer_bytes_max;
        ForeignExport {
            nbd: self.uri.to_string(),
            size: size.get(),
            request_alignment: alignment,
            preferred_bytes: self.geometry.preferred_bytes,
            transfer_bytes_max: largest - largest % alignment,
            reads_zero,
            host_volume: None,
        }
    }
}

/// Whether the first `size` bytes are known to read as zeroes.
async fn is_empty(export: &Device, size: Bytes, env: &EnvRef) -> Result<bool> {
    let (start, mut next) = (env.now(), Bytes::ZERO);
    while next < size && env.now().since(start) < LOOKING_LIMIT {
        let pieces = export.extents(Extent::between(next, size)).await.map_err(|error| of_server(&error))?;
        for piece in pieces {
            if !piece.state.reads_zero() {
                return Ok(false);
            }
            next = piece.extent.end();
        }
    }
    Ok(next >= size)
}

fn refuse_unsuitable(uri: &NbdUri, guest: &Geometry, found: &Geometry, alignment: u32) -> Result<()> {
    if found.read_only {
        return Err(Error::new(ErrorCode::ReadOnly, format!("{uri} takes no writes")).with_hint("name another target"));
    }
    if found.size < guest.size {
        let message = format!("{uri} has {} and the volume {}", found.size, guest.size);
        return Err(Error::new(ErrorCode::TargetTooSmall, message).with_hint("make it larger, or name another target"));
    }
    if alignment > guest.request_alignment.max(CLIENT_SECTOR) || !found.size.is_multiple_of(alignment.into()) {
        let message =
            format!("{uri} takes multiples of {alignment} bytes only, and the volume's clients may ask for less");
        return Err(Error::new(ErrorCode::BackendUnusable, message).with_hint("name another target"));
    }
    Ok(())
}

/// An address of an export as a user writes it.
pub(crate) fn parse_uri(text: &str) -> Result<NbdUri> {
    text.parse::<NbdUri>().map_err(|error| {
        invalid(
            error.to_string(),
            "write nbd://HOST:PORT/NAME or nbd+unix:///NAME?socket=/PATH; for TLS nbds, and ?tls-certificates=/DIR",
        )
    })
}

/// An error of such a server as a target, as users see it.
pub(crate) fn of_server(error: &block::Error) -> Error {
    use block::ErrorKind;
    let refused = of_backend(error, "the target");
    if nbd::TlsError::of(error).is_some() {
        return refused;
    }
    let hint = match error.kind() {
        ErrorKind::NotFound => "check the address and the export's name; `nbdinfo --list URI` shows what a server has",
        ErrorKind::PermissionDenied => "the server does not let this client have it",
        _ => "see whether the server runs and can be reached from this host (`nbdinfo URI`)",
    };
    refused.with_hint(hint)
}

/// What only a file or block device of this host can do.
pub(crate) fn held_by_server(export: &ForeignExport, what: &str) -> Error {
    Error::new(ErrorCode::WrongState, format!("{} holds the volume, a server that is not ours: {what}", export.nbd))
        .with_hint("move it to a file of this host first (`transhume move NAME --to file:PATH`)")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(size: u64, request_alignment: u32) -> Geometry {
        Geometry {
            size: Bytes(size),
            request_alignment,
            preferred_bytes: 4096,
            transfer_bytes_max: 1 << 20,
            read_only: false,
        }
    }

    #[test]
    fn an_export_that_is_too_small_coarse_or_read_only_is_refused_for_its_reason() {
        let uri = parse_uri("nbd://far:10809/disk").expect("an address");
        let guest = geometry(1 << 20, 512);
        let refused =
            |found: Geometry, alignment| refuse_unsuitable(&uri, &guest, &found, alignment).map_err(|e| e.code);
        assert_eq!(refused(geometry(1 << 20, 512), 512), Ok(()));
        assert_eq!(refused(geometry(2 << 20, 1), 512), Ok(()));
        assert_eq!(refused(geometry(1 << 19, 512), 512), Err(ErrorCode::TargetTooSmall));
        assert_eq!(refused(geometry(1 << 20, 4096), 4096), Err(ErrorCode::BackendUnusable));
        assert_eq!(refused(Geometry { read_only: true, ..guest }, 512), Err(ErrorCode::ReadOnly));
    }
}
