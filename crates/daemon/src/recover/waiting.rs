//! Moves that wait for their targets after a start: what is on record of that, and what whoever asks is told.

use api::v1::{Error, ErrorCode};

use crate::audit::unix_ms;
use crate::daemon::Daemon;
use crate::jobs::JobHandle;
use crate::problem::of_backend;
use crate::volume::Volume;

/// Stops a move whose target another program has used, until somebody says that it goes on.
pub(super) async fn stop_for_word(volume: &Volume, handle: &JobHandle, error: &block::Error) {
    let name = &volume.name;
    let error = Error::new(ErrorCode::WrongState, format!("the move of {name} waits for a word: {}", error.chain()));
    tracing::error!(volume = name, %error, "a move does not go on by itself");
    handle.stop_for(error.with_hint(format!(
        "if nobody needs what is there, `transhume resume {name}` copies over it; `transhume cancel {name}` gives the move up and leaves \
         the target as it is"
    )));
    let noted = volume.journal.update_job(|job| (job.disturbed, job.paused) = (true, true)).await;
    if let Err(error) = noted {
        tracing::warn!(volume = name, error = error.chain(), "that a move waits for a word could not be noted");
    }
}

/// Has it on record that another program uses the target, if that is what `error` says. Only the record knows it, so the target is not
/// tried again while this gives false: it could not be stored.
pub(super) async fn note_use(volume: &Volume, error: &block::Error) -> bool {
    let is_noted = volume.document().job.as_ref().is_none_or(|job| job.target_was_in_use);
    if error.kind() != block::ErrorKind::Busy || is_noted {
        return true;
    }
    let noted = volume.journal.update_job(|job| job.target_was_in_use = true).await;
    if let Err(error) = &noted {
        tracing::warn!(volume = volume.name, error = error.chain(), "that a target is in use could not be noted");
    }
    noted.is_ok()
}

/// Has it on record when the last daemon lived that had the target open, and how it saw that: this one may end before it has.
pub(super) async fn note_left(daemon: &Daemon, volume: &Volume) {
    let Some(alive) = daemon.last_life.alive.map(unix_ms) else { return };
    let noted = volume.journal.update_job(|job| {
        if job.left_unix_ms.is_none() {
            (job.left_unix_ms, job.left_target) = (Some(alive), daemon.last_life.target_of(job.uuid));
        }
    });
    let noted = noted.await;
    if let Err(error) = noted {
        tracing::warn!(volume = volume.name, error = error.chain(), "when a move was left could not be noted");
    }
}

pub(super) fn say_what_it_waits_for(volume: &Volume, handle: &JobHandle, error: &block::Error) {
    let name = &volume.name;
    let error = of_backend(error, &format!("the move of {name} waits for its target"));
    tracing::warn!(volume = name, %error, "a move cannot go on yet");
    let hint = error.hint.clone().unwrap_or_default();
    let hint = format!("{hint}; it is tried again by itself; `transhume cancel {name}` gives the move up");
    handle.waits_for(Some(error.with_hint(hint)));
}

pub(super) fn cancelled(volume: &Volume) -> Error {
    let message = format!("the move of {} was cancelled; the guest is on the source", volume.name);
    Error::new(ErrorCode::MoveCancelled, message)
}
