//! The durable memory of a move in an evaluation.

use std::time::Duration;

use block::IoFuture;
use migrate::{JobJournal, Phase};
use sim::model::Volume;
use sim::world::{Invariant, World};

/// How long it takes to store something.
const STORE_TIME: Duration = Duration::from_millis(1);

/// Takes its time, and looks at both sides at the commit where the source alone is the volume.
pub(crate) struct MoveJournal {
    pub(crate) world: World,
    /// Source and target. None where a surrogate holds some of the volume: what its guest reads at the target that guest checks.
    pub(crate) compared: Option<[Volume; 2]>,
}

impl MoveJournal {
    fn store(&self) -> IoFuture<'_, ()> {
        Box::pin(async move {
            self.world.sleep(STORE_TIME).await;
            Ok(())
        })
    }
}

impl JobJournal for MoveJournal {
    fn record(&self, _: Phase) -> IoFuture<'_, ()> {
        self.store()
    }

    fn commit(&self) -> IoFuture<'_, ()> {
        if let Some([source, target]) = &self.compared {
            let differs = source.inspect(|source| target.inspect(|target| source.first_difference(target)));
            if let Some(block) = differs {
                self.world.violate(Invariant::EqualAtSwitch, format!("block {block} differs at the commit"));
            }
        }
        self.store()
    }
}
