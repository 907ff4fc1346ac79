//! Volumes between hosts: moving one to another host's daemon, taking one of another's, and using one that is elsewhere.
//!
//! ```text
//!  source's journal                                            target's journal
//!
//!  held, epoch e                                               (nothing)
//!    │ move: the job is on record, then a session is opened ──────▶ │
//!    ▼                                                              ▼
//!  held, epoch e, job ═══════ copy, mirror, flushes ═══════════▶ filling
//!    │ all is there and flushed: prepare e+1 ─────────────────────▶ │
//!    │                                                              ▼
//!    │ ◀──────────────────────────────────────────── ready ─── prepared for e+1
//!    │ the guest is held
//!    ▼ one store: THE COMMIT POINT                                  │
//!  given up, e+1, not taken (its file is renamed)                   │
//!    │ take e+1, by opening a forward; again and again ───────────▶ │ flushed, the copy's session closed
//!    │                                                              ▼
//!    │ ◀──────────────────────────────────────────── taken ─── held, epoch e+1, served
//!    ▼ the guest goes on, through the forward
//!  given up, e+1, taken ──▶ the source's file is retired ──▶ given up, e+1
//! ```
//!
//! What a crash of either host at any moment leaves, and what happens by itself:
//!
//! | on record at the source | on record at the target | who holds the volume | what happens when both are back |
//! |---|---|---|---|
//! | job, no session yet | nothing | the source | the job begins, or is undone and the target told so |
//! | job | filling | the source | the copy goes on with what is not flushed there (after a reboot of the source: from the beginning) |
//! | job | prepared | the source | the same: the next session of the copy takes the preparation back |
//! | no job (cancelled, failed) | filling, prepared | the source | the target is told, until it has answered, and removes it |
//! | given up, not taken | prepared | nobody | the source asks the target to take it, again and again; its guest waits |
//! | given up, not taken | held | the target | the same, and the target answers that it has it |
//! | given up, taken | held | the target | the source retires its file and passes its guest's requests on |
//! | given up | held, and opened by a person | the target | the source notes that it was taken; its guest waits until a person says otherwise |
//!
//! Nobody holds the volume twice. The target takes it only when the source asks for the prepared epoch. The source asks
//! only after its own record says that it does not hold the volume any more. If a source is gone for good after it has
//! given the volume up, nobody holds the volume. Then, and only then, a person must decide (`resolve`). With an
//! arbiter, the arbiter decides. *Given up* is its ruling, and the target gets it from the arbiter when the source is
//! silent.
//!
//! The source's progress map is the authority on what the target has. A chunk counts as copied only after a flush that
//! began after its last write and was answered. Such a chunk survives the target's crash. What was written since any
//! lost connection began is sent again. After a reboot of the source the map is not trusted, and the copy begins anew.
//!
//! | module | what it is |
//! |---|---|
//! | `outgoing` | moves from here: what is looked at before, bringing a lost host back |
//! | `commit`, `watch` | the two phases, and the arbiter's part in them, at the source and at the target |
//! | `doubt`, `resolve_asked` | how a commit that may have been decided at the arbiter is settled, and ended without it |
//! | `remote_volume_device` | the device over a volume of another host |
//! | `arriving_export` | what the QEMU of a machine reads of a disk that comes with it |
//! | `arrival` | places for volumes that come here |
//! | `incoming`, `fenced_lane`, `session_authorizer` | volumes that come here, and what other hosts may ask |
//! | `shared_storage` | what this host has read of storage that another one writes |
//! | `aborted_jobs` | moves that are over, so that late messages of theirs do nothing |
//! | `pending_files` | files of volumes that come here and are not on record yet |
//! | `abort_notices` | telling a host that a volume will not arrive, or is used from here no more |
//! | `resolve` | what both have on record, and a person's decision |
//! | `resolve_together`, `give_back` | all disks of a machine go back to this host, or none; how one does |
//! | `opened` | a volume that a person opens at its new host, and whose guest at the old one is kept out |

mod abort_notices;
mod aborted_jobs;
mod arrival;
mod arriving_export;
mod commit;
mod doubt;
mod fenced_lane;
mod give_back;
mod incoming;
mod opened;
mod outgoing;
mod pending_files;
mod remote_volume_device;
mod resolve;
mod resolve_asked;
mod resolve_together;
mod session_authorizer;
mod shared_storage;
#[cfg(test)]
pub(crate) mod tests;
mod watch;

use std::sync::Arc;

use migrate::stream::{Receiver, ReceiverLimits};

pub(crate) use abort_notices::PendingNotice;
pub(crate) use aborted_jobs::AbortedJobs;
pub(crate) use arriving_export::ArrivingExport;
pub(crate) use commit::{GroupRuling, job_journal};
pub(crate) use fenced_lane::FencedLane;
pub(crate) use incoming::{Incoming, size_on_record};
pub(crate) use remote_volume_device::{RemoteDeviceGuard, RemoteVolumeDevice};
pub(crate) use session_authorizer::of_wire;

use crate::daemon::Daemon;
use crate::problem::Result;

/// What serves the streams of other hosts.
///
/// # Errors
/// There are no threads to be had.
pub(crate) fn receiver(daemon: &Arc<Daemon>) -> Result<Arc<Receiver>> {
    let gate = Arc::new(session_authorizer::SessionAuthorizer::new(daemon)?);
    watch::begin(daemon);
    Ok(Receiver::new(Arc::clone(&daemon.env), gate, ReceiverLimits::default()))
}
