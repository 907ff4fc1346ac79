//! How long a volume waits for a cache that holds nothing.
//!
//! Nobody waits for the opening of a cache that holds nothing once it has not got on for [`ANSWER_LIMIT`], or takes longer than
//! [`OPENING_LIMIT`] altogether: its volume comes up without it, as it does if that fails. A large cache takes some tens of seconds of a
//! processor, and would be lost at every start if that were not told from a store that does not answer. An opening cannot be called
//! back. What it has asked the flash for may be done whenever that answers, and so it goes on then, to its end. What it writes are the
//! part's generation, its boot, and, where it begins anew, its header and maps.
//! Nobody believes that by mistake:
//!
//! | who opens the same place later | |
//! |---|---|
//! | the same layer, in this process | it is refused until the first opening has ended |
//! | another layer, in this process | the part is not given back before |
//! | the next process | nothing of this one is under way any more, since the store was locked; it is on record that nothing cached is believed, and the part is made anew |

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use block::{Error, ErrorKind, Result};
use uuid::Uuid;

use crate::journal::VolumeJournal;
use crate::overlays::OverlayContext;

/// How long its store may be silent.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// How long all of it may take.
const OPENING_LIMIT: Duration = Duration::from_secs(600);

/// What `opening` gives, which opens the cache of `layer`, and raises `progress` whenever it gets on.
///
/// # Errors
/// Timed out if it does not, or takes too long: it goes on aside, and what it gives is dropped. Busy if an earlier one has not ended.
pub(super) async fn open_in_time<T: Send + 'static>(
    layer: Uuid,
    journal: &Arc<VolumeJournal>,
    context: &OverlayContext,
    progress: &AtomicU64,
    opening: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let Some(turn) = context.lent_parts.begin_opening(layer) else {
        return Err(Error::new(ErrorKind::Busy, "its store has not answered an earlier opening yet"));
    };
    let (caches, journal) = (Arc::clone(&context.caches), Arc::clone(journal));
    let mut opened = env::spawn_with_result(&*context.env, async move {
        let opened = opening.await;
        drop(turn);
        if !journal.document().layers_named().any(|named| named.id == layer) {
            // The volume has moved away from it meanwhile.
            caches.give_back(layer);
        }
        opened
    });
    let began = context.env.now();
    loop {
        let before = progress.load(Ordering::Relaxed);
        match env::timeout(&*context.env, ANSWER_LIMIT, &mut opened).await {
            Some(Ok(opened)) => return opened,
            Some(Err(_)) => return Err(Error::new(ErrorKind::Internal, "whoever was to open it is gone")),
            None if progress.load(Ordering::Relaxed) == before => {
                let context = format!("its store has not answered within {ANSWER_LIMIT:?}");
                return Err(Error::new(ErrorKind::TimedOut, context));
            }
            None if context.env.now().since(began) >= OPENING_LIMIT => {
                let context = format!("it was not open within {OPENING_LIMIT:?}");
                return Err(Error::new(ErrorKind::TimedOut, context));
            }
            None => {}
        }
    }
}
