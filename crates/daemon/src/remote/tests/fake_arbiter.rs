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
}

impl FakeArbiter {
    /// What is decided of a move.
    pub(crate) fn set(&self, job: Uuid, ruling: Ruling) {
        self.rulings.lock().insert(job, ruling);
    }

    async fn answers(&self, job: Uuid) -> Result<()> {
        tokio::time::sleep(Duration::from_millis(self.delay_ms.load(Ordering::Relaxed))).await;
        if self.hanging.lock().contains(&job) {
            std::future::pending::<()>().await;
        }
        match self.is_away.load(Ordering::Relaxed) {
            true => Err(Error::new(ErrorCode::ArbiterUnreachable, "the arbiter cannot be asked")),
            false => Ok(()),
        }
    }
}

impl Arbiter for FakeArbiter {
    fn decide(&self, job: Uuid, expected: Ruling, wanted: Ruling) -> BoxFuture<'_, Result<Ruling>> {
        Box::pin(async move {
            self.answers(job).await?;
            let mut rulings = self.rulings.lock();
            let ruling = rulings.entry(job).or_insert(Ruling::Open);
            if *ruling == expected {
                *ruling = wanted;
            }
            Ok(*ruling)
        })
    }

    fn ruling(&self, job: Uuid) -> BoxFuture<'_, Result<Ruling>> {
        Box::pin(async move {
            self.answers(job).await?;
            Ok(self.rulings.lock().get(&job).copied().unwrap_or(Ruling::Open))
        })
    }

    fn forget(&self, job: Uuid) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            self.rulings.lock().remove(&job);
            Ok(())
        })
    }
}
