//! What a volume has of a surrogate: a slot of its store, or of both of its stores as one device.

use std::sync::Arc;

use api::v1::{self, ErrorCode};
use backends::BackendSpec;
use block::{Bytes, Device, Error, ErrorKind, Extent, Geometry, IoFuture};
use filters::{MemberLoss, Redirect, RedirectHeader, Region, ReplicaPair};
use uuid::Uuid;

use super::Surrogate;
use crate::location::Location;
use crate::problem::{Result, of_record};
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

    /// Where the part of `layer` is in each store, and the store that is on record as lost for it.
    fn place_of(&self, layer: Uuid) -> block::Result<(Extent, Option<usize>)> {
        let document = self.document();
        let found = document.find(layer).map(|partition| (document.extent_of(partition), partition.place.lost));
        found.ok_or_else(|| {
            let context = format!("the surrogate {} has no part of layer {layer}", document.name);
            Error::new(ErrorKind::NotFound, context)
        })
    }

    /// What the part of `layer` has of store `number`.
    async fn member(&self, layer: Uuid, number: usize, extent: Extent) -> block::Result<Device> {
        let name = format!("store {number} of {}'s part for {layer}", self.name());
        Ok(Device::new(&name, Region::new(self.device(number).await?, extent)?))
    }

    /// The same, and what it says of itself, if it is what was left there.
    async fn known_member(&self, layer: Uuid, number: usize, extent: Extent) -> block::Result<Member> {
        let device = self.member(layer, number, extent).await?;
        let header = Redirect::inspect(&device).await?;
        if header.id != *layer.as_bytes() {
            let context = format!("{} holds another volume's data", device.name());
            return Err(Error::new(ErrorKind::Invalid, context));
        }
        self.check_generation(layer, number, &device, header.owner_pages()).await?;
        Ok(Member { device, header })
    }

    /// The new partition of `layer` as one device, whatever is in it.
    ///
    /// # Errors
    /// It has none, or a store cannot be opened.
    pub(crate) async fn new_partition(self: &Arc<Self>, layer: Uuid) -> block::Result<Device> {
        let (extent, _) = self.place_of(layer)?;
        let mut members = Vec::new();
        for number in 0..self.stores() {
            members.push(self.member(layer, number, extent).await?);
        }
        Ok(self.join(layer, members, None)?.device)
    }

    /// The partition of `layer` as one device. Of two stores one that is not there, or not what was left there, is lost from here on, which
    /// is on record.
    ///
    /// # Errors
    /// It has none, or no store of it can be used.
    pub(crate) async fn partition(self: &Arc<Self>, layer: Uuid) -> block::Result<SurrogatePart> {
        let opened = self.open_partition(layer).await;
        // A store that was refused.
        self.close_unused().await;
        opened
    }

    async fn open_partition(self: &Arc<Self>, layer: Uuid) -> block::Result<SurrogatePart> {
        let (extent, lost) = self.place_of(layer)?;
        let mut members = Members { surrogate: self, layer, lost, known: Vec::new() };
        for number in 0..self.stores() {
            // Nobody asks a lost one anything, so it need not be there.
            members.known.push(match lost == Some(number) {
                true => None,
                false => Some(self.known_member(layer, number, extent).await),
            });
        }
        members.lose_unfit().await?;
        let header = members.stamp().await?;
        let Members { lost, known, .. } = members;
        let devices = known.into_iter().map(|member| match member {
            Some(Ok(member)) => member.device,
            _ => lost_member("a lost store", extent.length),
        });
        let part = self.join(layer, devices.collect(), lost)?;
        if let (Some(pair), None) = (&part.pair, lost) {
            // A power loss may have left other maps in each store.
            pair.copy_to_second(&[header.maps()]).await?;
        }
        Ok(part)
    }

    fn join(
        self: &Arc<Self>,
        layer: Uuid,
        mut members: Vec<Device>,
        lost: Option<usize>,
    ) -> block::Result<SurrogatePart> {
        let name = format!("{}'s part for {layer}", self.name());
        match (members.pop(), members.pop()) {
            (Some(second), Some(first)) => {
                let pair = ReplicaPair::new([first, second], lost, self.lost_member(layer))?;
                Ok(SurrogatePart { device: Device::new(&name, pair.clone()), pair: Some(pair) })
            }
            (Some(only), None) => Ok(SurrogatePart { device: only, pair: None }),
            (None, _) => Err(Error::new(ErrorKind::Internal, "a surrogate without stores")),
        }
    }

    fn lost_member(self: &Arc<Self>, layer: Uuid) -> Arc<LostMember> {
        Arc::new(LostMember { surrogate: Arc::clone(self), layer })
    }
}

/// What a part has of a store, as it was left there.
struct Member {
    device: Device,
    header: RedirectHeader,
}

/// What a part has of its stores while it is opened.
struct Members<'a> {
    surrogate: &'a Arc<Surrogate>,
    layer: Uuid,
    /// The store that is on record as lost.
    lost: Option<usize>,
    /// By the number of the store; none of the one that is lost.
    known: Vec<Option<block::Result<Member>>>,
}

impl Members<'_> {
    /// Of two stores one that cannot be used is lost if the other one can be, which is on record when this returns.
    ///
    /// # Errors
    /// No store can be used, or that could not be stored.
    async fn lose_unfit(&mut self) -> block::Result<()> {
        let unfit = self.known.iter().position(|member| matches!(member, Some(Err(_))));
        let Some(number) = unfit else { return Ok(()) };
        let Some(Err(error)) = self.known[number].take() else { return Ok(()) };
        if self.lost.is_some() || !self.known.iter().any(|member| matches!(member, Some(Ok(_)))) {
            return Err(error);
        }
        self.surrogate.lost_member(self.layer).note(number, &error).await.map_err(of_record)?;
        self.lost = Some(number);
        Ok(())
    }

    /// Begins a generation in all stores that are not lost, and gives what they say of themselves.
    async fn stamp(&mut self) -> block::Result<RedirectHeader> {
        let members = self.known.iter().flatten().filter_map(|member| member.as_ref().ok());
        let Some(header) = members.map(|member| member.header).next() else {
            return Err(Error::new(ErrorKind::Internal, "a surrogate without stores"));
        };
        let Some(pages) = header.owner_pages() else { return Ok(header) };
        let generation = self.surrogate.begin_generation(self.layer).map_err(of_record)?;
        for number in 0..self.known.len() {
            let Some(Ok(member)) = &self.known[number] else { continue };
            let stamped = self.surrogate.stamp((self.layer, generation), number, &member.device, pages).await;
            if let Err(error) = stamped {
                self.known[number] = Some(Err(error));
                self.lose_unfit().await?;
            }
        }
        self.surrogate.end_generation(self.layer, generation).map_err(of_record)?;
        Ok(header)
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

impl LostMember {
    /// Has store `number`, which was lost and is `part` now, say that it has everything in `generation`.
    async fn stamp(&self, number: usize, part: &Device, generation: u64) -> block::Result<()> {
        match Redirect::inspect(part).await?.owner_pages() {
            Some(pages) => self.surrogate.stamp((self.layer, generation), number, part, pages).await,
            None => Ok(()),
        }
    }

    /// Has it on record that store `number` is not lost, if `generation` is the newest one still. Gives whether it is.
    fn note_found(&self, number: usize, generation: Option<u64>) -> block::Result<bool> {
        let mut is_newest = true;
        let noted = self.surrogate.update(|document| {
            let Some(partition) = document.find_mut(self.layer) else { return Ok(()) };
            is_newest = partition.newest_generation() == generation;
            if is_newest && partition.place.has_lost(number) {
                partition.place.lost = None;
            }
            Ok(())
        });
        noted.map_err(|error| Error::new(ErrorKind::Io, error.message))?;
        Ok(is_newest)
    }
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

    fn note_whole<'a>(&'a self, member: usize, device: &'a Device) -> IoFuture<'a, ()> {
        Box::pin(async move {
            loop {
                let generation = self.surrogate.newest_generation(self.layer);
                if let Some(generation) = generation {
                    self.stamp(member, device, generation).await?;
                }
                // One that is begun meanwhile may be in the other store alone.
                if self.note_found(member, generation)? {
                    return Ok(());
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};
    use std::time::Duration;

    use api::v1::SurrogateRequest;
    use block::{Buffer, ChunkSize, Mutation};
    use env::{EnvRef, RealEnv, RealFiles};

    use super::*;
    use crate::places::{Places, User};
    use crate::platform::RealBackends;
    use crate::pools::{NewStore, PartStores, PoolContext, Renewal};
    use crate::state_dir::Layout;
    use crate::surrogates::Surrogates;

    const LAYER: Uuid = Uuid::from_u128(7);
    const BYTES: u64 = 4 << 20;

    /// A folder with a state directory and the files of stores.
    struct Stand {
        folder: tempfile::TempDir,
    }

    impl Stand {
        /// A surrogate of so many stores in which volume `a` has a new part.
        async fn new(stores: usize) -> Self {
            let stand = Self { folder: tempfile::tempdir().expect("a folder") };
            std::fs::create_dir_all(stand.layout().surrogates()).expect("it is made");
            let surrogates = stand.surrogates();
            let places = Places::default();
            let stores = (0..stores).map(|number| {
                let path = stand.path(number);
                let place = places.take(&path, User::Store("surrogate"));
                NewStore::local(BackendSpec::file(path), Some(BYTES), place)
            });
            let request = SurrogateRequest {
                name: "fast".to_owned(),
                stores: Vec::new(),
                partition_bytes: Some(BYTES),
                chunk_bytes: Some(64 << 10),
            };
            surrogates.create(request, stores.collect()).await.expect("it is made");
            let surrogate = surrogates.get("fast").expect("it was made");
            surrogate.take(LAYER, "a").expect("there is room");
            let part = surrogate.new_partition(LAYER).await.expect("its stores are there");
            let chunk = ChunkSize::new(64 << 10).expect("a chunk size");
            let header = RedirectHeader::new(Bytes::mib(8), chunk, part.size(), *LAYER.as_bytes()).expect("it fits");
            Redirect::create(&part, &header).await.expect("it takes it");
            stand
        }

        fn layout(&self) -> Layout {
            Layout::new(self.folder.path(), RealFiles::shared())
        }

        fn path(&self, number: usize) -> PathBuf {
            self.folder.path().join(format!("store-{number}"))
        }

        fn surrogates(&self) -> Surrogates {
            let env: EnvRef = Arc::new(RealEnv::new());
            let backends = Arc::new(RealBackends::default());
            Surrogates::load(&PoolContext::new(self.layout(), backends, env, Duration::from_secs(1))).expect("readable")
        }

        /// A process that opens the part, writes `byte` to its last page, and ends. Gives which store is on record as lost.
        async fn live(&self, byte: u8) -> block::Result<Option<usize>> {
            let surrogate = self.surrogates().get("fast").expect("it is on record");
            let part = surrogate.partition(LAYER).await?.device;
            let page = Buffer::copy_of(&[byte; 4096]).freeze();
            part.write(Mutation::data(part.size() - Bytes(4096), page)).await?;
            part.flush().await?;
            Ok(surrogate.place_of(LAYER)?.1)
        }

        /// A process that opens the part, whose stores are copied then, writes 2 to its last page, and is told to end. Gives the copies.
        async fn live_while_copied(&self) -> block::Result<Vec<Vec<u8>>> {
            let surrogate = self.surrogates().get("fast").expect("it is on record");
            let SurrogatePart { device, pair } = surrogate.partition(LAYER).await?;
            let copies = (0..surrogate.stores()).map(|number| self.copy(number)).collect();
            device.write(Mutation::data(device.size() - Bytes(4096), Buffer::copy_of(&[2; 4096]).freeze())).await?;
            device.flush().await?;
            let pages = Redirect::inspect(&device).await?.owner_pages().expect("it has room for them");
            let stores = pair.map_or_else(|| PartStores::Only(device.clone()), PartStores::Pair);
            Renewal::new(&surrogate, LAYER, pages, stores).leave().await;
            Ok(copies)
        }

        /// What a process finds there.
        async fn read(&self) -> block::Result<u8> {
            let surrogate = self.surrogates().get("fast").expect("it is on record");
            let part = surrogate.partition(LAYER).await?.device;
            Ok(part.read(part.size() - Bytes(4096), Buffer::unpooled(4096)).await?[0])
        }

        fn copy(&self, number: usize) -> Vec<u8> {
            std::fs::read(self.path(number)).expect("it is there")
        }
    }

    fn put(path: &Path, bytes: &[u8]) {
        // Another file under the same name, as whoever puts a copy back makes one.
        let _ = std::fs::remove_file(path);
        std::fs::write(path, bytes).expect("it is written");
    }

    #[tokio::test]
    async fn of_two_stores_one_that_is_missing_empty_older_or_the_other_one_is_lost_and_nothing_of_it_is_read() {
        for number in [0, 1] {
            for what in ["missing", "empty", "older", "the other"] {
                let stand = Stand::new(2).await;
                assert_eq!(stand.live(1).await.expect("both are there"), None);
                let older = stand.copy(number);
                assert_eq!(stand.live(2).await.expect("both are there"), None);
                let other = stand.copy(1 - number);
                match what {
                    "missing" => std::fs::remove_file(stand.path(number)).expect("it is there"),
                    "empty" => put(&stand.path(number), &[0; BYTES as usize]),
                    "older" => put(&stand.path(number), &older),
                    _ => put(&stand.path(number), &other),
                }
                assert_eq!(stand.read().await.expect("the other one has everything"), 2, "store {number} is {what}");
                assert_eq!(
                    stand.live(3).await.expect("the other one goes on"),
                    Some(number),
                    "store {number} is {what}"
                );
                assert_eq!(stand.read().await.expect("the other one has everything"), 3, "store {number} is {what}");
            }
        }
    }

    #[tokio::test]
    async fn a_store_that_was_refused_is_let_go_and_the_right_one_is_found_by_the_same_process() {
        let stand = Stand::new(1).await;
        stand.live(1).await.expect("it is there");
        let older = stand.copy(0);
        stand.live(2).await.expect("it is there");
        let last = stand.copy(0);
        put(&stand.path(0), &older);
        let surrogate = stand.surrogates().get("fast").expect("it is on record");
        for _ in 0..2 {
            let refused = surrogate.partition(LAYER).await.map(drop).expect_err("it was believed");
            assert_eq!(refused.kind(), ErrorKind::Fenced, "{refused:?}");
        }
        let other = stand.read().await.expect_err("it was believed");
        assert_eq!(other.kind(), ErrorKind::Fenced, "it is locked still: {other:?}");
        put(&stand.path(0), &last);
        let part = surrogate.partition(LAYER).await.expect("it is as it was left").device;
        put(&stand.path(0), &older);
        surrogate.partition(LAYER).await.map(drop).expect_err("it was believed");
        let page = part.read(part.size() - Bytes(4096), Buffer::unpooled(4096)).await.expect("it is in use");
        assert_eq!(page[0], 2);
    }

    #[tokio::test]
    async fn a_store_that_was_copied_while_its_part_was_open_is_not_believed_after_a_clean_stop() {
        for number in [0, 1] {
            let stand = Stand::new(2).await;
            stand.live(1).await.expect("both are there");
            let copies = stand.live_while_copied().await.expect("both are there");
            put(&stand.path(number), &copies[number]);
            assert_eq!(stand.read().await.expect("the other one has everything"), 2, "store {number} is a copy");
            assert_eq!(stand.live(3).await.expect("the other one goes on"), Some(number));
        }
        let stand = Stand::new(1).await;
        stand.live(1).await.expect("it is there");
        let copies = stand.live_while_copied().await.expect("it is there");
        let last = stand.copy(0);
        put(&stand.path(0), &copies[0]);
        stand.read().await.expect_err("it was believed");
        put(&stand.path(0), &last);
        assert_eq!(stand.read().await.expect("it is as it was left"), 2);
    }

    #[tokio::test]
    async fn the_only_store_is_refused_if_it_is_not_what_was_left_and_believed_once_it_is_back() {
        let stand = Stand::new(1).await;
        stand.live(1).await.expect("it is there");
        let older = stand.copy(0);
        stand.live(2).await.expect("it is there");
        for wrong in [older, vec![0; BYTES as usize]] {
            let last = stand.copy(0);
            put(&stand.path(0), &wrong);
            stand.read().await.expect_err("it was believed");
            put(&stand.path(0), &last);
            assert_eq!(stand.read().await.expect("it is as it was left"), 2);
        }
    }
}
