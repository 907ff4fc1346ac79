//! A device of the world: a model that says when, and contents that say what.
//!
//! One task drives a model with one timer, however many requests are under way. A write takes effect when it is done and
//! a read sees the contents at its end. Faults are not here: see [`crate::disk`].

use std::sync::Arc;

use block::{BlockDevice, Buffer, Bytes, Device, Extent, ExtentStatus, Geometry, IoFuture, Mutation, MutationKind};
use env::Moment;
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use super::contents::{Contents, Origin};
use super::{Model, Request, Ticket, Verb};
use crate::numbers::NumberMap;
use crate::world::World;

/// A volume on a modelled device. Clones are the same volume.
#[derive(Clone)]
pub struct Volume {
    shared: Arc<Shared>,
}

struct Shared {
    name: String,
    world: World,
    size: Bytes,
    contents: Mutex<Contents>,
    drive: Arc<Drive>,
    /// Where on the model the volume begins.
    start: u64,
    /// What was asked of it in every second.
    traffic: Mutex<Vec<Traffic>>,
}

/// Requests that a volume was asked for within a second of its world.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
}

/// A model and those who wait for it; several volumes may lie on one.
struct Drive {
    state: Mutex<State>,
    kick: Notify,
}

struct State {
    model: Box<dyn Model>,
    waiting: NumberMap<Ticket, oneshot::Sender<()>>,
    count: u64,
    /// What the driving task's timer is set to.
    armed: Moment,
    done: Vec<Ticket>,
}

impl Drive {
    /// Sets a task to drive `model`.
    fn start(world: &World, model: Box<dyn Model>) -> Arc<Self> {
        let state = State {
            model,
            waiting: NumberMap::default(),
            count: 0,
            armed: Moment(std::time::Duration::MAX),
            done: Vec::new(),
        };
        let drive = Arc::new(Self { state: Mutex::new(state), kick: Notify::new() });
        let (driven, clock) = (Arc::clone(&drive), world.clone());
        world.spawn(async move {
            loop {
                let kicked = driven.kick.notified();
                match driven.advance(clock.now()) {
                    Some(at) => {
                        tokio::select! {
                            biased;
                            () = kicked => {}
                            () = clock.sleep_until(at) => {}
                        }
                    }
                    None => kicked.await,
                }
            }
        });
        drive
    }

    /// Lets happen what has happened by `now`; says when there is more to do.
    fn advance(&self, now: Moment) -> Option<Moment> {
        let mut state = self.state.lock();
        let mut done = std::mem::take(&mut state.done);
        state.model.advance(now, &mut done);
        for ticket in done.drain(..) {
            if let Some(waiting) = state.waiting.remove(&ticket) {
                // Whoever dropped a request does not wait for it.
                let _ = waiting.send(());
            }
        }
        state.done = done;
        let next = state.model.next();
        state.armed = next.unwrap_or(Moment(std::time::Duration::MAX));
        next
    }

    async fn serve(&self, world: &World, request: Request) {
        let receiver = {
            let mut state = self.state.lock();
            state.count += 1;
            let ticket = Ticket(state.count);
            let (sender, receiver) = oneshot::channel();
            state.waiting.insert(ticket, sender);
            state.model.submit(world.now(), ticket, request);
            if state.model.next().is_some_and(|next| next < state.armed) {
                self.kick.notify_one();
            }
            receiver
        };
        // The driving task ends with the world only.
        let _ = receiver.await;
    }
}

impl Volume {
    /// A volume of `size` bytes that has `model` for itself.
    #[must_use]
    pub fn new(world: &World, name: &str, size: Bytes, origin: Origin, model: impl Model + 'static) -> Self {
        let drive = Drive::start(world, Box::new(model));
        Self::on(world, name, size, origin, drive, 0)
    }

    /// Another volume of `size` bytes on the same model, which begins at its byte `start`.
    #[must_use]
    pub fn beside(&self, name: &str, size: Bytes, origin: Origin, start: u64) -> Self {
        Self::on(&self.shared.world, name, size, origin, Arc::clone(&self.shared.drive), start)
    }

    fn on(world: &World, name: &str, size: Bytes, origin: Origin, drive: Arc<Drive>, start: u64) -> Self {
        let contents = Mutex::new(Contents::new(size, origin));
        let shared = Shared {
            name: name.to_owned(),
            world: world.clone(),
            size,
            contents,
            drive,
            start,
            traffic: Mutex::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// A handle that the engine runs on.
    #[must_use]
    pub fn device(&self) -> Device {
        Device::new(&self.shared.name, VolumeDevice { volume: self.clone() })
    }

    /// Looks at what it holds.
    pub fn inspect<T>(&self, look: impl FnOnce(&Contents) -> T) -> T {
        look(&self.shared.contents.lock())
    }

    /// What it was asked for in every second since the world began, up to the last one with a request.
    #[must_use]
    pub fn traffic(&self) -> Vec<Traffic> {
        self.shared.traffic.lock().clone()
    }

    fn count(&self, verb: Verb) {
        let second = self.shared.world.now().0.as_secs() as usize;
        let mut traffic = self.shared.traffic.lock();
        if traffic.len() <= second {
            traffic.resize(second + 1, Traffic::default());
        }
        match verb {
            Verb::Read => traffic[second].reads += 1,
            Verb::Write => traffic[second].writes += 1,
            Verb::Flush => {}
        }
    }

    /// Puts `extent` of this volume at the same place of `target`, as a data mover below both does it. The devices are
    /// asked for it, but no buffer holds the bytes. Nobody may write there meanwhile.
    pub async fn copy_to(&self, target: &Self, extent: Extent) {
        self.serve(Request::read(extent.offset.0, extent.length.0)).await;
        target.serve(Request::write(extent.offset.0, extent.length.0)).await;
        let source = self.shared.contents.lock();
        target.shared.contents.lock().copy_from(&source, extent);
    }

    async fn serve(&self, request: Request) {
        self.count(request.verb);
        let request = Request { offset: request.offset + self.shared.start, ..request };
        self.shared.drive.serve(&self.shared.world, request).await;
    }
}

struct VolumeDevice {
    volume: Volume,
}

impl BlockDevice for VolumeDevice {
    fn geometry(&self) -> Geometry {
        Geometry::of_size(self.volume.shared.size)
    }

    fn read(&self, offset: Bytes, mut buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            self.volume.serve(Request::read(offset.0, buffer.len() as u64)).await;
            self.volume.shared.contents.lock().read(offset, &mut buffer);
            Ok(buffer)
        })
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let extent = mutation.extent();
            // Zeroes without bytes and discards are a matter of metadata: a write of one block.
            let length = match mutation.kind() {
                MutationKind::Data(_) => extent.length.0,
                MutationKind::Zeroes { .. } | MutationKind::Discard => extent.length.0.min(block::BLOCK_BYTES),
            };
            self.volume.serve(Request::write(extent.offset.0, length)).await;
            self.volume.shared.contents.lock().apply(&mutation);
            if mutation.fua {
                self.volume.serve(Request::flush()).await;
            }
            Ok(())
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(async move {
            self.volume.serve(Request::flush()).await;
            Ok(())
        })
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        block::ready(Ok(self.volume.shared.contents.lock().extents(extent)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;
    use crate::log::Keep;
    use crate::model::{HardDisk, HardDiskFigures};

    #[test]
    fn two_volumes_on_one_disk_have_their_own_bytes_and_one_head() {
        clock::run(async {
            let world = World::new(1, Keep::Tail);
            let disk = HardDisk::new(HardDiskFigures::ST31000524AS);
            let one = Volume::new(&world, "one", Bytes::gib(100), Origin::Filled, disk);
            let other = one.beside("other", Bytes::gib(100), Origin::Empty, 500 << 30);
            let (first, second) = (one.device(), other.device());
            let alone = {
                let began = world.now();
                for index in 0..50 {
                    first.read(Bytes::mib(index), Buffer::unpooled(1 << 20)).await.expect("models do not fail");
                }
                world.now() - began
            };
            let began = world.now();
            for index in 50..75 {
                let (near, far) = (Buffer::unpooled(1 << 20), Buffer::unpooled(1 << 20));
                let pair =
                    futures::future::join(first.read(Bytes::mib(index), near), second.read(Bytes::mib(index), far));
                let (near, far) = pair.await;
                assert!(near.expect("models do not fail")[0] != 0 && far.expect("models do not fail")[0] == 0);
            }
            let together = world.now() - began;
            assert!(together > alone * 2, "{together:?} for the same bytes with seeks, {alone:?} without");
        });
    }
}
