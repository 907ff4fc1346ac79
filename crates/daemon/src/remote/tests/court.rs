//! An arbiter in memory.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use api::v1::{Error, ErrorCode};
use futures::future::BoxFuture;
use parking_lot::Mutex;
use uuid::Uuid;

use crate::arbiter::{Arbiter, Verdict};
use crate::problem::Result;

/// An arbiter whose answers take a while.
#[derive(Default)]
pub(super) struct Court {
    verdicts: Mutex<BTreeMap<Uuid, Verdict>>,
    /// How long, in milliseconds.
    pub(super) delay_ms: AtomicU64,
    /// It does not answer about these moves at all.
    pub(super) hanging: Mutex<Vec<Uuid>>,
    /// It cannot be asked.
    pub(super) is_away: AtomicBool,
}

impl Court {
    /// What is decided of a move.
    pub(super) fn set(&self, job: Uuid, verdict: Verdict) {
        self.verdicts.lock().insert(job, verdict);
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

impl Arbiter for Court {
    fn decide(&self, job: Uuid, expected: Verdict, wanted: Verdict) -> BoxFuture<'_, Result<Verdict>> {
        Box::pin(async move {
            self.answers(job).await?;
            let mut verdicts = self.verdicts.lock();
            let verdict = verdicts.entry(job).or_insert(Verdict::Open);
            if *verdict == expected {
                *verdict = wanted;
            }
            Ok(*verdict)
        })
    }

    fn verdict(&self, job: Uuid) -> BoxFuture<'_, Result<Verdict>> {
        Box::pin(async move {
            self.answers(job).await?;
            Ok(self.verdicts.lock().get(&job).copied().unwrap_or(Verdict::Open))
        })
    }

    fn forget(&self, job: Uuid) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            self.verdicts.lock().remove(&job);
            Ok(())
        })
    }
}
