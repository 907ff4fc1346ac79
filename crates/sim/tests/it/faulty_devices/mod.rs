//! Devices that do not do what they say.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use block::{
    Buffer, Bytes, Device, Extent, ExtentState, ExtentStatus, Filter, IoFuture, Mutation, MutationKind, ready,
};
use sim::host::{Mistakes, Role};
use sim::world::World;
use transhume_sim as sim;

/// The mistake of putting what `wrap` makes over every device of `role`.
pub(crate) fn wrapping(role: Role, wrap: impl Fn(&World, Device) -> Device + Send + Sync + 'static) -> Mistakes {
    let wrap = move |world: &World, of: Role, device: Device| if of == role { wrap(world, device) } else { device };
    Mistakes { wrap: Some(Arc::new(wrap)), ..Mistakes::default() }
}

/// Answers one write in so many without carrying it out.
pub(crate) struct DropsWrites {
    lower: Device,
    one_in: u64,
    writes: AtomicU64,
}

impl DropsWrites {
    pub(crate) fn over(lower: Device, one_in: u64) -> Device {
        let name = lower.name().to_owned();
        Device::new(&name, Self { lower, one_in, writes: AtomicU64::new(0) })
    }
}

impl Filter for DropsWrites {
    fn lower(&self) -> &Device {
        &self.lower
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        if self.writes.fetch_add(1, Ordering::Relaxed) % self.one_in == self.one_in - 1 {
            return ready(Ok(()));
        }
        Box::pin(self.lower.write(mutation))
    }
}

/// Says of one write in so many that it has failed, and has carried it out.
pub(crate) struct FailsWrites {
    lower: Device,
    one_in: u64,
    writes: AtomicU64,
}

impl FailsWrites {
    pub(crate) fn over(lower: Device, one_in: u64) -> Device {
        let name = lower.name().to_owned();
        Device::new(&name, Self { lower, one_in, writes: AtomicU64::new(0) })
    }
}

impl Filter for FailsWrites {
    fn lower(&self) -> &Device {
        &self.lower
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        let fails = self.writes.fetch_add(1, Ordering::Relaxed) % self.one_in == self.one_in - 1;
        Box::pin(async move {
            self.lower.write(mutation).await?;
            if fails { Err(block::Error::new(block::ErrorKind::Io, "as it says")) } else { Ok(()) }
        })
    }
}

/// Answers flushes without flushing, and forced access without forcing anything.
pub(crate) struct FlushesNothing {
    lower: Device,
}

impl FlushesNothing {
    pub(crate) fn over(lower: Device) -> Device {
        let name = lower.name().to_owned();
        Device::new(&name, Self { lower })
    }
}

impl Filter for FlushesNothing {
    fn lower(&self) -> &Device {
        &self.lower
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(self.lower.write(mutation.with_fua(false)))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        ready(Ok(()))
    }
}

/// Loses forced unit access.
pub(crate) struct ForgetsForcedAccess {
    lower: Device,
}

impl ForgetsForcedAccess {
    pub(crate) fn over(lower: Device) -> Device {
        let name = lower.name().to_owned();
        Device::new(&name, Self { lower })
    }
}

impl Filter for ForgetsForcedAccess {
    fn lower(&self) -> &Device {
        &self.lower
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(self.lower.write(mutation.with_fua(false)))
    }
}

/// Answers zeroes and discards that may give space back without doing anything.
pub(crate) struct ForgetsDiscards {
    lower: Device,
}

impl ForgetsDiscards {
    pub(crate) fn over(lower: Device) -> Device {
        let name = lower.name().to_owned();
        Device::new(&name, Self { lower })
    }
}

impl Filter for ForgetsDiscards {
    fn lower(&self) -> &Device {
        &self.lower
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        match mutation.kind() {
            MutationKind::Zeroes { may_unmap: true } | MutationKind::Discard => ready(Ok(())),
            _ => Box::pin(self.lower.write(mutation)),
        }
    }
}

/// Says that everything is a hole, whatever it reads.
pub(crate) struct KeepsHoles {
    lower: Device,
}

impl KeepsHoles {
    pub(crate) fn over(lower: Device) -> Device {
        let name = lower.name().to_owned();
        Device::new(&name, Self { lower })
    }
}

impl Filter for KeepsHoles {
    fn lower(&self) -> &Device {
        &self.lower
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(self.lower.read(offset, buffer))
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        ready(Ok(vec![ExtentStatus { extent, state: ExtentState::Hole }]))
    }
}
