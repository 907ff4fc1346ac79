//! What goes on beside every phase: the target is flushed now and then, and the progress map follows.

use std::time::Duration;

use block::{Error, Result};

use crate::strategy::mirror::filter::Shared;
use crate::strategy::mirror::map_pages::Part;
use crate::strategy::mirror::tracker::{Mode, Tracker};

/// How often to look.
const LOOK: Duration = Duration::from_millis(250);
/// Flush after so much has been copied.
const UNFLUSHED_BYTES_MAX: u64 = 1 << 30;
/// The progress map follows after so many looks.
const LOOKS_MAX: u32 = 20;
/// Flushes take no more than one of so many parts of the time, unless they are that far apart.
const FLUSH_PART: u32 = 20;

impl Shared {
    /// Walks over the volume a part at a time: guest requests get in between.
    pub(crate) async fn in_parts<T>(&self, from: T, step: impl Fn(&mut Tracker, T) -> Option<T>) {
        let mut next = Some(from);
        while let Some(from) = next {
            next = self.tracker(|tracker| step(tracker, from));
            if next.is_some() {
                crate::pace::yield_now().await;
            }
        }
    }

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
        let covers = self.tracker(|tracker| {
            tracker.counts.unflushed = 0;
            tracker.flushes_detached
        });
        self.in_parts(Part::default(), Tracker::begin_flush).await;
        let target = session.target.clone();
        let flush = Box::pin(async move { target.flush().await });
        let flushed = self.finish_target(flush, session.number).await;
        match flushed {
            Ok(()) => {
                let end = |tracker: &mut Tracker, from| {
                    tracker.is_current(session.number).then(|| tracker.end_flush(from)).flatten()
                };
                self.in_parts(Part::default(), end).await;
                self.tracker(|tracker| tracker.cover_flushes(session.number, covers));
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
        let mut from = 0;
        loop {
            // Let go after every page: guest writes that wait for the map get in between.
            let mut writer = map.lock().await;
            let Some(number) = self.tracker(|tracker| tracker.take_stale_page(from)) else { break };
            from = number + 1;
            // The page is filled when it is written, with what is true then.
            let mut page = writer.copied_page(number as usize);
            let mut skipped = writer.skipped_pages(number as usize);
            let mut next = Some(0);
            while let Some(at) = next {
                next = self.tracker(|tracker| {
                    tracker.fill_skipped_pages(number, at, &mut skipped);
                    tracker.fill_copied_page(number, at, &mut page)
                });
            }
            // Why a chunk was not sent is known before it counts as copied.
            let written = match writer.set_skipped_pages(number as usize, skipped).await {
                Ok(()) => writer.set_copied_page(number as usize, page).await,
                error => error,
            };
            if let Err(error) = written {
                self.tracker(|tracker| tracker.mark_stale_page(number));
                return Err(error);
            }
            drop(writer);
            crate::pace::yield_now().await;
        }
        let mut next = Some(0);
        while let Some(at) = next {
            let mut writer = map.lock().await;
            let (idle, more) = self.tracker(|tracker| tracker.take_idle(at));
            next = more;
            writer.set_active(&idle, false).await?;
            drop(writer);
            crate::pace::yield_now().await;
        }
        Ok(())
    }

    /// Flushes and writes down, for as long as it is polled.
    pub(crate) async fn run_map_writer(&self) {
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
            let flushed = !any || mode == Mode::InDoubt || self.flush_target().await.is_ok();
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
