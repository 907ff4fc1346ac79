//! What goes on beside every phase: the target is flushed now and then, and the progress map follows.

use std::time::Duration;

use block::{Error, Result};

use crate::strategy::mirror::filter::Shared;

/// How often to look.
const LOOK: Duration = Duration::from_millis(250);
/// Flush after so much has been copied.
const UNFLUSHED_BYTES_MAX: u64 = 1 << 30;
/// The progress map follows after so many looks.
const LOOKS_MAX: u32 = 20;
/// Flushes take no more than one of so many parts of the time, unless they are that far apart.
const FLUSH_PART: u32 = 20;

impl Shared {
    /// Flushes the target. Done means that all that was answered there before is durable.
    ///
    /// # Errors
    /// The target has failed, or is gone: the mirror is dropped, unless the commit is in doubt.
    pub(crate) async fn flush_target(&self) -> Result<()> {
        // Two flushes under way could not be told apart in the tracker.
        let _turn = self.flushing.lock().await;
        let Some(session) = self.tracker(|tracker| tracker.session().cloned()) else {
            return Err(Error::new(block::ErrorKind::Disconnected, "there is no target to flush"));
        };
        self.tracker(|tracker| {
            tracker.counts.unflushed = 0;
            tracker.begin_flush();
        });
        let target = session.target.clone();
        let flush = Box::pin(async move { target.flush().await });
        let flushed = self.finish_target(flush, session.number).await;
        match flushed {
            Ok(()) => {
                self.tracker(|tracker| tracker.is_current(session.number).then(|| tracker.end_flush()));
                Ok(())
            }
            Err(error) => {
                let context = format!("flushing the target: {}", error.chain());
                self.fail_target(session.number, Error::new(error.kind(), context));
                Err(error)
            }
        }
    }

    /// Brings the progress map up to date.
    pub(crate) async fn sync_map(&self) -> Result<()> {
        let Some(map) = &self.map else { return Ok(()) };
        let mut writer = map.lock().await;
        for number in self.tracker(|tracker| tracker.take_stale_pages()) {
            // The page is filled when it is written, with what is true then.
            let filled = writer.update_had(number as usize, |page| {
                self.tracker(|tracker| tracker.fill_had_page(number, page));
            });
            filled.await?;
        }
        let idle = self.tracker(|tracker| tracker.take_idle());
        writer.set_active(&idle, false).await
    }

    /// Flushes and writes down, for as long as it is polled.
    pub(crate) async fn keep_up(&self) {
        let looks_between =
            |span: Duration| (span.as_millis() / LOOK.as_millis()).clamp(1, u128::from(LOOKS_MAX)) as u32;
        let (mut looks, mut unsynced, mut wanted) = (0, 0, looks_between(self.flush_interval));
        loop {
            self.env.sleep(LOOK).await;
            looks += 1;
            unsynced += 1;
            let (unflushed, any, mode) = self.tracker(|tracker| {
                (tracker.counts.unflushed, tracker.has_unflushed() && tracker.session().is_some(), tracker.mode())
            });
            let is_much = unflushed >= UNFLUSHED_BYTES_MAX;
            if !is_much && looks < wanted {
                continue;
            }
            looks = 0;
            let began = self.env.now();
            // A failure has been noted where the driver looks; without one the map may follow.
            let flushed =
                !any || mode == crate::strategy::mirror::tracker::Mode::InDoubt || self.flush_target().await.is_ok();
            wanted = looks_between((self.env.now().since(began) * FLUSH_PART).max(self.flush_interval));
            if !is_much && unsynced < LOOKS_MAX {
                continue;
            }
            unsynced = 0;
            if flushed && let Err(error) = self.sync_map().await {
                self.fail_map(error);
            }
        }
    }
}
