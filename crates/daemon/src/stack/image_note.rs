//! Whether the image under a cache is as this daemon has left it.
//!
//! What a cache only keeps is believed after a restart in the same boot. But nobody keeps other programs from the image while no daemon
//! runs: a VM that is started on it, a backup that is put back. So the cache's part has a note of how the image was last seen.
//!
//! ```text
//!   a clean stop   nobody writes any more ──▶ as it is ──▶ noted as left
//!   while it runs  looked at every second ──▶ changed ──▶ noted as seen
//!   a start        left: it is exactly so         ──▶ what is cached is believed
//!                  seen: it is hardly newer       ──▶ the same: the last second was ours
//!                  anything else, or another file ──▶ forgotten; what is dirty counts
//! ```
//!
//! After a crash a change within two seconds of the last one that was seen is taken for ours. Of block devices and exports nobody knows when
//! they were changed. An image that does not answer says nothing: nothing is noted, and at a start what is cached is not believed.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use backends::{ImageState, ImageTimes};
use block::{BLOCK_BYTES, Buffer, Device, Extent, Mutation, Result};
use env::EnvRef;

use crate::platform::Backends;

/// How often the image is looked at while it is in use.
const INTERVAL: Duration = Duration::from_secs(1);
/// How much newer than it was seen an image may be after a crash, in nanoseconds.
const SLACK_NS: i64 = 2_000_000_000;
/// The first bytes of a note.
const MAGIC: [u8; 8] = *b"TRANSHUI";
/// The version of its layout.
const VERSION: u32 = 1;
/// What the checksum covers: magic, layout, whether it was left so, and six numbers.
const CHECKED_BYTES: usize = 16 + 6 * 8;

/// How an image was seen last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Note {
    state: ImageState,
    /// Whether nothing of this daemon's was to come any more.
    was_left: bool,
}

impl Note {
    fn encode(&self) -> Buffer {
        let state = &self.state;
        let mut page = Buffer::unpooled(BLOCK_BYTES as usize);
        page[..8].copy_from_slice(&MAGIC);
        page[8..12].copy_from_slice(&VERSION.to_le_bytes());
        page[12..16].copy_from_slice(&u32::from(self.was_left).to_le_bytes());
        let times = [state.times.modified_ns(), state.times.changed_ns()].map(i64::cast_unsigned);
        let numbers = [state.device, state.inode, state.size, times[0], times[1], 0];
        for (number, place) in numbers.into_iter().zip(page[16..CHECKED_BYTES].chunks_exact_mut(8)) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        let crc = crc32fast::hash(&page[..CHECKED_BYTES]);
        page[CHECKED_BYTES..CHECKED_BYTES + 4].copy_from_slice(&crc.to_le_bytes());
        page
    }

    fn decode(page: &[u8]) -> Option<Self> {
        let half = |at: usize| page[at..at + 4].try_into().map(u32::from_le_bytes).ok();
        let word = |number: usize| page[16 + 8 * number..][..8].try_into().map(u64::from_le_bytes).ok();
        let is_sound = page[..8] == MAGIC
            && half(8) == Some(VERSION)
            && half(CHECKED_BYTES) == Some(crc32fast::hash(&page[..CHECKED_BYTES]));
        let times = ImageTimes::new(word(3)?.cast_signed(), word(4)?.cast_signed());
        let state = ImageState { device: word(0)?, inode: word(1)?, size: word(2)?, times };
        is_sound.then_some(Self { state, was_left: half(12)? == 1 })
    }

    /// Whether an image that is in `state` now may have been changed by nobody else.
    fn allows(&self, state: &ImageState) -> bool {
        if self.was_left {
            return self.state == *state;
        }
        let is_same = |one: &ImageState| (one.device, one.inode, one.size);
        let newest = self.state.times.changed_ns().saturating_add(SLACK_NS);
        let is_in_time = state.times.changed_ns().max(state.times.modified_ns()) <= newest;
        is_same(&self.state) == is_same(state) && is_in_time
    }
}

/// Notes in a cache's part how its image is.
pub(super) struct ImageNote {
    backends: Arc<dyn Backends>,
    image: PathBuf,
    part: Device,
    page: Extent,
    /// What was noted last. None once nothing is noted any more. Held by who writes.
    last: tokio::sync::Mutex<Option<Option<Note>>>,
}

impl ImageNote {
    /// In `page` of `part`, of the file at `image`; none if nobody knows when that was changed.
    pub(super) async fn new(backends: &Arc<dyn Backends>, image: &Path, part: &Device, page: Extent) -> Option<Self> {
        // One that does not answer may be a file.
        if matches!(backends.image_state(image).await, Ok(None)) {
            return None;
        }
        let (backends, image, part) = (Arc::clone(backends), image.to_owned(), part.clone());
        Some(Self { backends, image, part, page, last: tokio::sync::Mutex::new(Some(None)) })
    }

    /// Whether the image may be as it was left. A part without a note is an older version's: it says nothing.
    pub(super) async fn is_as_left(&self) -> Result<bool> {
        let read = self.part.read(self.page.offset, Buffer::unpooled(self.page.length.as_usize())).await?;
        let Ok(state) = self.backends.image_state(&self.image).await else { return Ok(false) };
        Ok(Note::decode(&read).zip(state).is_none_or(|(note, state)| note.allows(&state)))
    }

    /// Notes that the image was seen in `state`, if that is anything new.
    async fn see(&self, state: ImageState) -> Result<()> {
        let mut last = self.last.lock().await;
        let Some(before) = *last else { return Ok(()) };
        let note = Note { state, was_left: false };
        if before != Some(note) {
            self.write(note).await?;
            *last = Some(Some(note));
        }
        Ok(())
    }

    /// Nobody writes to the image any more: notes how it is left, for good.
    pub(super) async fn leave(&self) -> Result<()> {
        let mut last = self.last.lock().await;
        if last.take().is_some()
            && let Some(state) = self.backends.image_state(&self.image).await?
        {
            self.write(Note { state, was_left: true }).await?;
        }
        Ok(())
    }

    /// Nothing is noted any more when this returns: the part may be another's.
    pub(super) async fn close(&self) {
        *self.last.lock().await = None;
    }

    async fn write(&self, note: Note) -> Result<()> {
        // It counts in this boot only, so nobody waits for a medium.
        self.part.write(Mutation::data(self.page.offset, note.encode().freeze())).await
    }

    /// Looks at the image until nobody has this any more. It keeps nobody from closing it, or from letting go of it, while it looks.
    pub(super) async fn watch(this: Weak<Self>, env: EnvRef) {
        while let Some((backends, image)) = this.upgrade().map(|note| (Arc::clone(&note.backends), note.image.clone()))
        {
            let looked = backends.image_state(&image).await;
            let Some(note) = this.upgrade() else { return };
            let seen = match looked {
                Ok(Some(state)) => note.see(state).await,
                Ok(None) => Ok(()),
                Err(error) => Err(error),
            };
            if let Err(error) = seen {
                tracing::debug!(part = note.part.name(), error = error.chain(), "how an image is could not be noted");
            }
            drop(note);
            env.sleep(INTERVAL).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(was_left: bool) -> Note {
        let times = ImageTimes::new(70_000_000_000, 71_000_000_000);
        Note { state: ImageState { device: 1, inode: 2, size: 3, times }, was_left }
    }

    #[test]
    fn a_note_comes_back_and_every_changed_byte_of_it_is_told() {
        let page = note(true).encode();
        assert_eq!(Note::decode(&page), Some(note(true)));
        for at in 0..CHECKED_BYTES + 4 {
            let mut changed = Buffer::copy_of(&page);
            changed[at] ^= 0x10;
            assert_eq!(Note::decode(&changed), None, "byte {at} was changed");
        }
        assert_eq!(Note::decode(&[0; BLOCK_BYTES as usize]), None);
    }

    #[test]
    fn an_image_is_believed_as_it_was_left_and_after_a_crash_if_it_is_hardly_newer() {
        let (left, seen) = (note(true), note(false));
        let later = |milliseconds: i64| {
            let (modified, changed) = (left.state.times.modified_ns(), left.state.times.changed_ns());
            ImageState { times: ImageTimes::new(modified, changed + milliseconds * 1_000_000), ..left.state }
        };
        assert!(left.allows(&left.state) && seen.allows(&left.state));
        assert!(!left.allows(&later(1)), "somebody has written to it");
        assert!(seen.allows(&later(1_500)), "the last second before a crash is ours");
        assert!(!seen.allows(&later(2_500)), "nobody of ours was there");
        let older = ImageState { times: ImageTimes::new(0, left.state.times.changed_ns()), ..left.state };
        assert!(!left.allows(&older), "a copy with an old time was put back");
        for other in [
            ImageState { inode: 9, ..left.state },
            ImageState { size: 9, ..left.state },
            ImageState { device: 9, ..left.state },
        ] {
            assert!(!left.allows(&other) && !seen.allows(&other), "{other:?}");
        }
    }
}
