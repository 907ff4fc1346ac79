//! When the daemon that was here before lived last, and whether somebody has used the target of its move since.
//!
//! ```text
//!   while anything moves ──▶ the time is noted twice a second, in STATE/alive
//!   a start finds a move ──▶ its target was changed by nobody after that ──▶ it goes on
//!                            it was ──▶ the move waits for a word, and touches nothing
//! ```
//!
//! The target of a move is the daemon's own file, as long as the daemon lives. Whoever finds it dead may go on by hand: copies again to the
//! same name, and starts a VM there. So a target that was changed since is neither written nor deleted before somebody says so. Of block
//! devices and exports nobody knows when they were changed.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use backends::ImageTimes;
use env::EnvRef;
use uuid::Uuid;

use crate::audit::unix_ms;
use crate::document::JobDocument;
use crate::state_dir::Layout;

/// How often the time is noted.
const INTERVAL: Duration = Duration::from_millis(500);
/// So much later than the last note a change is still taken for that daemon's own: it may have been busy.
const SLACK: Duration = Duration::from_secs(5);
/// The same of a target that another program was seen to use.
const SLACK_IN_USE: Duration = Duration::from_secs(1);
/// The file begins anew when it has so many notes.
const NOTES_MAX: usize = 4096;

/// When the daemon that was here before lived last; none if nobody knows. A power loss takes the newest notes and leaves what was written to
/// the target, so notes of another boot than `boot` say nothing.
pub(crate) fn last_alive(layout: &Layout, boot: [u8; 16]) -> Option<SystemTime> {
    let notes = layout.files().read(&layout.alive()).ok()?;
    let complete = &notes[..notes.iter().rposition(|byte| *byte == b'\n')?];
    let last = complete.rsplit(|byte| *byte == b'\n').next()?;
    let (milliseconds, noted_boot) = std::str::from_utf8(last).ok()?.split_once(' ')?;
    if noted_boot.parse() != Ok(Uuid::from_bytes(boot)) {
        return None;
    }
    UNIX_EPOCH.checked_add(Duration::from_millis(milliseconds.parse().ok()?))
}

/// Notes that this daemon lives, for as long as `moves` tells whether anything moves: none ends it.
pub(crate) async fn note_life(env: EnvRef, layout: Layout, boot: [u8; 16], moves: impl Fn() -> Option<bool>) {
    let (path, mut notes) = (layout.alive(), NOTES_MAX);
    while let Some(moves) = moves() {
        if moves {
            let note = format!("{} {}\n", unix_ms(env.wall_clock()), Uuid::from_bytes(boot));
            notes += 1;
            let noted = match notes > NOTES_MAX {
                true => layout.files().write(&path, note.as_bytes()).inspect(|()| notes = 0),
                false => layout.files().append(&path, note.as_bytes()),
            };
            if let Err(error) = noted {
                tracing::debug!(%error, "that the daemon lives could not be noted");
            }
        }
        env.sleep(INTERVAL).await;
    }
}

/// Whether somebody has changed the target of `job` since the daemon that was here before has ended, which was `last_alive` then. `times` are
/// those of the target as it is now; `was_in_use` says that another program was seen to use it.
pub(crate) fn is_target_disturbed(
    last_alive: Option<SystemTime>,
    job: &JobDocument,
    times: Option<ImageTimes>,
    was_in_use: bool,
) -> bool {
    if job.disturbed {
        return true;
    }
    let was_in_use = was_in_use || job.target_was_in_use;
    let Some(times) = times else { return was_in_use };
    if let Some(rested) = job.rested {
        return rested.target != times;
    }
    let left = job.left_unix_ms.map(|left| UNIX_EPOCH + Duration::from_millis(left));
    let Some(alive) = [last_alive, left].into_iter().flatten().min() else { return false };
    let begun = job.begun_unix_ms.unwrap_or(0).max(job.record.started_unix_ms);
    let alive = alive.max(UNIX_EPOCH + Duration::from_millis(begun));
    let newest = alive + if was_in_use { SLACK_IN_USE } else { SLACK };
    let newest = newest.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    // A copy may bring an old time along.
    u128::try_from(times.modified_ns().max(times.changed_ns())).is_ok_and(|changed| changed > newest)
}
