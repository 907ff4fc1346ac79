//! What a volume has of a surrogate: a slot of its store, or of both of its stores as one device.

use std::sync::Arc;

use api::v1::{self, ErrorCode};
use backends::BackendSpec;
use block::{Bytes, Device, Error, ErrorKind, Geometry, IoFuture};
use filters::{MemberLoss, Redirect, Region, ReplicaPair};
use uuid::Uuid;

use super::Surrogate;
use crate::location::Location;
use crate::problem::Result;
use crate::reject_all::reject_all;

impl Surrogate {
    /// How the API shows it.
    pub(crate) fn show(&self) -> v1::Surrogate {
        self.document().show()
    }

    /// Whether what it holds is held by one device alone.
    pub(crate) fn is_sole(&self) -> bool {
        self.stores() < 2
    }

    /// The unit of what is popular, in bytes.
    pub(crate) fn chunk_bytes(&self) -> u64 {
        self.document().settings.chunk_bytes
    }

    /// Where those of its stores are that lie on this host.
    pub(crate) fn specs(&self) -> Vec<BackendSpec> {
        self.document().stores.iter().filter_map(|store| store.place.local().cloned()).collect()
    }

    /// Where its stores are.
    pub(crate) fn places(&self) -> Vec<Location> {
        self.document().stores.iter().map(|store| store.place.clone()).collect()
    }

    /// Gives a partition to `layer` of `volume`. Done means durable.
    ///
    /// # Errors
    /// It is being drained or full, or that could not be stored.
    pub(crate) fn take(&self, layer: Uuid, volume: &str) -> Result<()> {
        self.update(|document| document.take(layer, volume))
    }

    /// What volume `layer`'s part lacks in store `number`, if that is on record as lost for it: a place for it there.
    pub(crate) async fn lost_part(&self, layer: Uuid) -> block::Result<Option<Device>> {
        let found = {
            let document = self.document();
            document.find(layer).and_then(|partition| Some((partition.place.lost?, document.extent_of(partition))))
        };
        let Some((number, extent)) = found else { return Ok(None) };
        let name = format!("store {number} of {}'s part for {layer}", self.name());
        Ok(Some(Device::new(&name, Region::new(self.device(number).await?, extent)?)))
    }

    /// Which of its two stores is lost for some volume.
    ///
    /// # Errors
    /// It has one store, or none is lost, or both are.
    pub(crate) fn lost_store(&self) -> Result<usize> {
        self.document().lost_store()
    }

    /// Refuses what would need parts for so many more volumes, if there are fewer or it is being drained.
    pub(crate) fn check_room(&self, volumes: usize) -> Result<()> {
        self.document().check_room(volumes)
    }

    /// The partition of `layer` as one device.
    ///
    /// # Errors
    /// It has none, or a store cannot be opened.
    pub(crate) async fn partition(self: &Arc<Self>, layer: Uuid) -> block::Result<SurrogatePart> {
        let found = {
            let document = self.document();
            document.find(layer).map(|partition| (document.extent_of(partition), partition.place.lost))
        };
        let Some((extent, lost)) = found else {
            let context = format!("the surrogate {} has no part of layer {layer}", self.name());
            return Err(Error::new(ErrorKind::NotFound, context));
        };
        let name = format!("{}'s part for {layer}", self.name());
        let mut members = Vec::new();
        for number in 0..self.stores() {
            let member = format!("store {number} of {name}");
            members.push(match lost == Some(number) {
                // Nobody asks it anything, so it need not be there.
                true => lost_member(&member, extent.length),
                false => Device::new(&member, Region::new(self.device(number).await?, extent)?),
            });
        }
        match (members.pop(), members.pop()) {
            (Some(second), Some(first)) => {
                let loss = Arc::new(LostMember { surrogate: Arc::clone(self), layer });
                let pair = ReplicaPair::new([first, second], lost, loss)?;
                let device = Device::new(&name, pair.clone());
                // A power loss may have left other maps in each store. A new part has none yet.
                if let (Ok(header), None) = (Redirect::inspect(&device).await, lost) {
                    pair.copy_to_second(&[header.maps()]).await?;
                }
                Ok(SurrogatePart { device, pair: Some(pair) })
            }
            (Some(only), None) => Ok(SurrogatePart { device: only, pair: None }),
            (None, _) => Err(Error::new(ErrorKind::Internal, "a surrogate without stores")),
        }
    }
}

/// A volume's part of a surrogate.
pub(crate) struct SurrogatePart {
    /// What holds it.
    pub(crate) device: Device,
    /// The same, if it is in two stores.
    pub(crate) pair: Option<ReplicaPair>,
}

/// What stands for the part of a store that is lost.
fn lost_member(name: &str, size: Bytes) -> Device {
    reject_all(name, Geometry::of_size(size), ErrorKind::Disconnected, "this store of the surrogate is lost")
}

/// Has it on record that a store lacks something of a partition.
struct LostMember {
    surrogate: Arc<Surrogate>,
    layer: Uuid,
}

impl MemberLoss for LostMember {
    fn note<'a>(&'a self, member: usize, error: &'a Error) -> IoFuture<'a, ()> {
        let surrogate = &self.surrogate;
        tracing::error!(
            surrogate = surrogate.name(),
            store = member,
            error = error.chain(),
            "a store of a surrogate is lost"
        );
        let noted = surrogate.update(|document| {
            let of_it = document.find_mut(self.layer).map(|partition| &mut partition.place);
            let gone =
                || api::v1::Error::new(ErrorCode::Internal, "a part of a surrogate that was given back is written to");
            of_it.ok_or_else(gone)?.lost = Some(member);
            Ok(())
        });
        block::ready(noted.map_err(|error| Error::new(ErrorKind::Io, error.message)))
    }

    fn note_whole(&self, member: usize) -> IoFuture<'_, ()> {
        let noted = self.surrogate.update(|document| {
            let of_it = document.find_mut(self.layer).map(|partition| &mut partition.place);
            if let Some(place) = of_it.filter(|place| place.lost == Some(member)) {
                place.lost = None;
            }
            Ok(())
        });
        block::ready(noted.map_err(|error| Error::new(ErrorKind::Io, error.message)))
    }
}
