//! An arbiter in memory.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use api::v1::{Error, ErrorCode};
use futures::future::BoxFuture;
use parking_lot::Mutex;
use uuid::Uuid;

use crate::arbiter::{Arbiter, Ruling};
use crate::problem::Result;

/// An arbiter whose answers take a while.
#[derive(Default)]
pub(crate) struct FakeArbiter {
    rulings: Mutex<BTreeMap<Uuid, Ruling>>,
    /// How long, in milliseconds.
    pub(crate) delay_ms: AtomicU64,
    /// It does not answer about these moves at all.
    pub(crate) hanging: Mutex<Vec<Uuid>>,
    /// It cannot be asked.
    pub(crate) is_away: AtomicBool,
    /// It decides on commits, and nobody hears of that. Nothing else is decided.
    pub(crate) is_unheard: AtomicBool,
    /// It decides nothing that it is asked for.
    pub(crate) is_deaf: AtomicBool,
}

fn unreachable() -> Error {
    Error::new(ErrorCode::ArbiterUnreachable, "the arbiter cannot be asked")
}

impl FakeArbiter {
    /// What is decided of a move.
    pub(crate) fn set(&self, job: Uuid, ruling: Ruling) {
        self.rulings.lock().insert(job, ruling);
    }

    /// Whether a commit was decided.
    pub(super) fn has_committed(&self) -> bool {
        self.rulings.lock().values().any(|ruling| *ruling == Ruling::Committed)
    }

    /// It answers again, and knows what it has decided.
    pub(super) fn is_back(&self) {
        self.is_unheard.store(false, Ordering::Relaxed);
        self.is_away.store(false, Ordering::Relaxed);
    }

    /// It is restored from a state of before all moves.
    pub(super) fn restore(&self) {
        self.rulings.lock().clear();
        self.is_unheard.store(false, Ordering::Relaxed);
    }

    async fn answers(&self, job: Uuid) -> Result<()> {
        tokio::time::sleep(Duration::from_millis(self.delay_ms.load(Ordering::Relaxed))).await;
        if self.hanging.lock().contains(&job) {
            std::future::pending::<()>().await;
        }
        match self.is_away.load(Ordering::Relaxed) {
            true => Err(unreachable()),
            false => Ok(()),
        }
    }
}

impl Arbiter for FakeArbiter {
    fn decide(&self, job: Uuid, expected: Ruling, wanted: Ruling) -> BoxFuture<'_, Result<Ruling>> {
        Box::pin(async move {
            self.answers(job).await?;
            let is_announced = matches!(expected, Ruling::Unknown);
            let is_unheard = self.is_unheard.load(Ordering::Relaxed) && !is_announced;
            if (is_unheard && wanted != Ruling::Committed) || (self.is_deaf.load(Ordering::Relaxed) && !is_announced) {
                return Err(unreachable());
            }
            let mut rulings = self.rulings.lock();
            let ruling = rulings.entry(job).or_insert(Ruling::Unknown);
            if *ruling == expected {
                *ruling = wanted;
            }
            if is_unheard { Err(unreachable()) } else { Ok(*ruling) }
        })
    }

    fn ruling(&self, job: Uuid) -> BoxFuture<'_, Result<Ruling>> {
        Box::pin(async move {
            self.answers(job).await?;
            Ok(self.rulings.lock().get(&job).copied().unwrap_or(Ruling::Unknown))
        })
    }

    fn forget(&self, job: Uuid) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            self.rulings.lock().remove(&job);
            Ok(())
        })
    }
}
