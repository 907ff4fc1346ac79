//! How a move ends, once the record of its group says what became of it.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use api::v1::{Error, ErrorCode, JobState, VmMovePhase};
use futures::future::{Either, join, select};

use super::super::Machine;
use super::super::channel::Ask;
use super::super::ending::{Ends, abandon_there, end_here, give_back_adopted, note_end, run_there};
use super::super::hooks::HookPhase;
use super::super::postcopy::PostcopyTarget;
use super::MachineMove;
use crate::daemon::Daemon;
use crate::jobs::{Committed, MachineMember, NotCommitted, Outcome};
use crate::problem::Result;

/// How long it may take over the connection that the move has used: nobody hears that one of its ends is gone.
const FIRST_TELL_LIMIT: Duration = Duration::from_secs(2);
/// How long the disks of a move that is undone wait for its guest to go on.
const GO_ON_FIRST: Duration = Duration::from_secs(2);

impl MachineMove {
    /// What became of the commit. Nobody runs while that is not known.
    pub(super) async fn settle(&self, daemon: &Arc<Daemon>, member: &MachineMember) -> Outcome {
        let since = daemon.env.now();
        let settled = async {
            loop {
                match member.settle().await {
                    Ok(outcome) => {
                        self.is_committed.store(matches!(outcome, Outcome::Committed(_)), Ordering::Release);
                        self.note_doubt(daemon, None);
                        return outcome;
                    }
                    Err(doubt) => self.wait_in_doubt(daemon, since, &doubt).await,
                }
            }
        };
        if !self.is_asked.load(Ordering::Acquire) {
            return settled.await;
        }
        match select(pin!(settled), pin!(self.keep_still(daemon))).await {
            Either::Left((outcome, _)) => outcome,
            Either::Right((never, _)) => match never {},
        }
    }

    /// The machine goes on here.
    pub(super) async fn undo(&self, daemon: &Arc<Daemon>, machine: &Machine, error: Error, proof: &NotCommitted) {
        tracing::warn!(vm = self.name, host = %self.host, %error, "the move of a VM is undone");
        let rest = async {
            for disk in &self.disks {
                match error.code {
                    ErrorCode::MoveCancelled => _ = disk.job.cancel(),
                    _ => disk.job.fail(error.clone()),
                }
            }
            abandon_there(daemon, &self.host, self.id);
            daemon.restore_autostart(machine).await;
            for disk in &self.disks {
                disk.job.wait().await;
            }
            for cache in &self.caches {
                daemon.keep_cache(cache).await;
            }
        };
        // First its guest, which may be stopped.
        let mut outgoing = machine.document().outgoing.unwrap_or_else(|| self.outgoing.clone());
        outgoing.ran = self.ran();
        outgoing.stopped = Some(self.is_stopped());
        let hypervisor = &*self.departure.hypervisor;
        let going_on = pin!(daemon.go_on_here(machine, &outgoing, Some(hypervisor), proof));
        match select(going_on, pin!(daemon.env.sleep(GO_ON_FIRST))).await {
            Either::Left(((), _)) => rest.await,
            // It takes long: the disks do not wait for it.
            Either::Right(((), going_on)) => _ = join(going_on, rest).await,
        }
        give_back_adopted(daemon, machine, &outgoing.adopted).await;
        daemon.tell_hook(HookPhase::Abandoned, self.told(daemon)).await;
        let outcome = if error.code == ErrorCode::MoveCancelled { JobState::Cancelled } else { JobState::Failed };
        self.end(daemon, machine, (outcome, Some(error)), Ends::Here).await;
    }

    /// The machine is at the other host: has it run there, and ends what is here of it.
    pub(super) async fn finish(&self, daemon: &Arc<Daemon>, machine: &Machine, proof: &Committed) {
        self.enter(VmMovePhase::Finishing);
        self.state.lock().outcome = JobState::Finishing;
        machine.may_be_forgotten.store(true, Ordering::Release);
        self.may_close.send_replace(true);
        let has_ended = self.end_if_it_ran(daemon, machine, proof).await;
        let running = async {
            let told = self.ask_within(daemon, FIRST_TELL_LIMIT, Ask::Run { id: self.id }).await;
            let told = match told {
                Err(error) if error.code != ErrorCode::VmLost => run_there(daemon, machine, &self.host, self.id).await,
                told => told,
            };
            let mut state = self.state.lock();
            state.downtime = state.stopped.map(|stopped| daemon.env.now().since(stopped));
            told
        };
        let ending = async {
            // Its memory is nobody's any more, whatever the other host says. libvirt ends its own.
            if !has_ended && self.is_ended_at_commit() {
                daemon.end_machine(machine, Some(&*self.departure.hypervisor), proof.into()).await;
            }
        };
        let (told, ()) = join(running, ending).await;
        let followed = match told {
            Ok(()) => self.follow(daemon, machine).await,
            Err(error) => Err(error),
        };
        self.departure.hypervisor.leave().await;
        let volumes = self.disks.iter().map(|disk| Arc::clone(&disk.volume)).collect();
        end_here(daemon, machine, volumes, proof).await;
        daemon.tell_hook(HookPhase::Released, self.told(daemon)).await;
        match followed {
            Ok(()) => self.end(daemon, machine, (JobState::Done, None), Ends::There).await,
            Err(error) => self.end(daemon, machine, (JobState::Failed, Some(error)), Ends::There).await,
        }
    }

    /// Waits until the other host has all of the memory, if that follows the guest.
    async fn follow(&self, daemon: &Arc<Daemon>, machine: &Machine) -> Result<()> {
        if !self.request.postcopy {
            return Ok(());
        }
        self.enter(VmMovePhase::Postcopy);
        let target = PostcopyTarget { host: &self.host, id: self.id };
        let followed = Box::pin(daemon.follow(machine, &target, &|status| self.note_memory(status))).await;
        self.enter(VmMovePhase::Finishing);
        followed
    }

    async fn end(
        &self,
        daemon: &Arc<Daemon>,
        machine: &Machine,
        (outcome, error): (JobState, Option<Error>),
        ends: Ends,
    ) {
        {
            let mut state = self.state.lock();
            (state.phase, state.outcome, state.error) = (VmMovePhase::Over, outcome, error);
        }
        let shown = self.show(daemon);
        note_end(daemon, machine, shown, ends).await;
    }
}
