//! Memory that follows its guest (post-copy).
//!
//! ```text
//!   source's QEMU                                            target's QEMU
//!     active, one pass over the memory ════════════════════▶ active
//!     pre-switchover, the guest is stopped
//!     postcopy-active ══ the devices' state ═══════════════▶ postcopy-active, the guest is stopped: loaded
//!       │ the disks are held
//!       ▼ THE COMMIT of the group                              │
//!     never runs again ────────── run ─────────────────────▶ the guest runs
//!       │ ◀───────────────── the pages that it waits for ────  │
//!       │ ═══════════════════ all other pages ═══════════════▶ │
//!     completed: QEMU is ended                               completed
//! ```
//!
//! The commit comes after the target has loaded the devices and before its guest runs. Until then the source has all of the memory,
//! and a cancelled QEMU of it goes on, if its connection was not lost: so the daemon holds its end open until the commit, whatever
//! becomes of the way between the hosts. Were the commit before the devices' state is sent, a target that refuses that state
//! would cost the guest.
//!
//! After the commit each host has a part of the memory. A connection that is lost then pauses both QEMUs: the guest stops at the next
//! page that it lacks, and the source asks the target to take another connection until that is there. The QEMU of the source
//! is ended only when its migration is completed. The disks are the target's from the commit on: to mirror them back over the
//! link that may be lost would give the source disks without the memory that goes with them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use api::v1::{Error, ErrorCode};
use uuid::Uuid;
use vm::machine::MigrationStatus;

use super::Machine;
use super::channel::{Answer, Ask};
use super::document::{IncomingMachine, LastWord, MemoryFate, OutgoingMachine};
use super::ending::no_answer;
use super::memory::carry_held;
use super::outgoing::call;
use crate::audit::Peer;
use crate::daemon::Daemon;
use crate::hosts::HostName;
use crate::hypervisor::{Hypervisor, MemoryFlow, OnStatus};
use crate::problem::Result;

/// What a plan says of it.
pub(super) const NOTE: &str = "--postcopy: from the switchover until all memory is there, the guest needs both hosts. A link that is lost stops it until the link is back; the end of the source's QEMU or host loses its memory, and the disks stay whole at the target";

/// How often a QEMU is asked how far its memory is.
const LOOK: Duration = Duration::from_millis(100);
/// How often a connection is tried again, at most.
const REST_MAX: Duration = Duration::from_secs(5);
/// How long one try may take.
const REJOIN_LIMIT: Duration = Duration::from_secs(15);
/// How long a target takes to hear that its connection is cut.
const CUT_LIMIT: Duration = Duration::from_secs(5);
/// A connection through which nothing has come for so long is cut: its guest may wait for a page.
const SILENCE_LIMIT: Duration = Duration::from_secs(10);
/// How often a move that was not committed is made whole, so that it can be undone.
const WHOLE_TRIES: u32 = 4;

/// To whom the memory of a machine follows, and by which move.
pub(super) struct PostcopyTarget<'a> {
    pub(super) host: &'a HostName,
    pub(super) id: Uuid,
}

impl Daemon {
    /// Waits until the other host has all memory of a machine that runs there, and makes a lost connection again.
    ///
    /// # Errors
    /// The QEMU of either host has ended before, or a person has given the memory up.
    pub(super) async fn follow(
        self: &Arc<Self>,
        machine: &Machine,
        target: &PostcopyTarget<'_>,
        noted: OnStatus<'_>,
    ) -> Result<()> {
        let mut rest = LOOK;
        let sent = AtomicU64::new(0);
        let noted = |status: &MigrationStatus| {
            sent.store(status.bytes_transferred, Ordering::Relaxed);
            noted(status);
        };
        let (mut before, mut since) = (0, self.env.now());
        loop {
            if machine.is_given_up.load(Ordering::Acquire) {
                return Err(given_up(machine, target.host));
            }
            let document = machine.document();
            let looked = async {
                if document.process.is_some() && self.has_ended(machine) {
                    // What answers at its monitor now was started since, and knows nothing of the memory.
                    return Err(Error::new(
                        ErrorCode::QmpUnreachable,
                        format!("the QEMU of {} has ended", document.name),
                    ));
                }
                let hypervisor = self.hypervisors.reach(&document.monitor).await?;
                let flow = hypervisor.memory_flow(&noted).await?;
                let now = sent.load(Ordering::Relaxed);
                if now != before || flow != MemoryFlow::Following {
                    (before, since) = (now, self.env.now());
                } else if self.env.now().since(since) >= SILENCE_LIMIT {
                    // A link that is cut says nothing.
                    tracing::warn!(vm = machine.name, host = %target.host, "no memory gets through to a guest that needs it");
                    machine.cut.send_modify(|times| *times += 1);
                    since = self.env.now();
                }
                if flow == MemoryFlow::Cut {
                    tracing::warn!(vm = machine.name, host = %target.host, "the memory that follows a guest is cut off");
                    self.rejoin(machine, &*hypervisor, target).await?;
                    tracing::info!(vm = machine.name, host = %target.host, "the memory follows its guest again");
                    self.note_rejoined(machine, target);
                }
                Ok::<_, Error>(flow)
            };
            match looked.await {
                Ok(MemoryFlow::Complete) => {
                    *machine.problem.lock() = None;
                    return Ok(());
                }
                Ok(_) => {
                    *machine.problem.lock() = None;
                    rest = LOOK;
                }
                Err(error) if error.code == ErrorCode::QmpUnreachable && self.has_ended(machine) => {
                    // It may have ended because it was done.
                    match self.ask_about_machine(target.host, Ask::Whole { id: target.id }).await {
                        Ok(_) => return Ok(()),
                        Err(error) if error.code == ErrorCode::WrongState => {
                            return Err(lost_for_good(machine, target.host));
                        }
                        Err(error) if is_final(&error) => return Err(lost_there(machine, target.host, &error)),
                        Err(error) => *machine.problem.lock() = Some(error),
                    }
                    rest = (rest * 2).min(REST_MAX);
                }
                Err(error) if is_final(&error) => return Err(lost_there(machine, target.host, &error)),
                Err(error) => {
                    tracing::warn!(vm = machine.name, host = %target.host, %error, "the memory does not follow its guest");
                    *machine.problem.lock() = Some(stuck(machine, target.host, &error));
                    rest = (rest * 2).min(REST_MAX);
                }
            }
            self.env.sleep(rest).await;
        }
    }

    /// Whether the QEMU of a machine is known to have ended; one whose process is not known has if nothing answers for it.
    fn has_ended(&self, machine: &Machine) -> bool {
        !machine.document().process.is_some_and(|process| self.hypervisors.lives(&process))
    }

    fn note_rejoined(&self, machine: &Machine, target: &PostcopyTarget<'_>) {
        let what = serde_json::json!({ "host": target.host.to_string(), "move": target.id });
        self.note(&Peer::daemon(), ("vm.rejoin", &machine.name), what, None);
    }

    /// Gives the memory another connection instead of one that was lost.
    async fn rejoin(
        self: &Arc<Self>,
        machine: &Machine,
        hypervisor: &dyn Hypervisor,
        target: &PostcopyTarget<'_>,
    ) -> Result<()> {
        let joining = async {
            self.ask_about_machine(target.host, Ask::Rejoin { id: target.id }).await?;
            let mut other = self.machine_channel(target.host).await?;
            call(&mut other, target.host, Ask::Memory { id: target.id }).await?;
            let outlet = hypervisor.recover_outgoing(&self.migration_place(&machine.name)).await?;
            let (_, near) = outlet.accept().await.map_err(|error| {
                Error::new(ErrorCode::QmpRefused, format!("QEMU does not connect again: {error}"))
                    .with_hint("it is tried again")
            })?;
            let env = Arc::clone(&self.env);
            let cut = machine.cut.subscribe();
            self.env.spawn(Box::pin(async move {
                // QEMU says when it has lost it.
                let (_, may_close) = tokio::sync::watch::channel(true);
                let _ = carry_held(&env, (near, other), (may_close, cut)).await;
            }));
            Ok(())
        };
        env::timeout(&*self.env, REJOIN_LIMIT, joining).await.unwrap_or_else(|| Err(no_answer(target.host)))
    }

    /// After a restart: has a QEMU that lost its connection before the commit in a state in which it can be cancelled.
    /// Gives whether it can be.
    pub(super) async fn make_whole(self: &Arc<Self>, machine: &Machine, outgoing: &OutgoingMachine) -> bool {
        let Ok(host) = HostName::new(&outgoing.host) else { return false };
        let target = PostcopyTarget { host: &host, id: outgoing.id };
        for _ in 0..WHOLE_TRIES {
            let made = async {
                let hypervisor = self.hypervisors.reach(&machine.document().monitor).await?;
                // A guest that runs here has all of its memory here, whatever became of what was sent.
                if hypervisor.run_state().await.is_ok_and(|state| state == "running") {
                    return Ok(());
                }
                match hypervisor.memory_flow(&|_| {}).await? {
                    MemoryFlow::Cut => self.rejoin(machine, &*hypervisor, &target).await,
                    MemoryFlow::Complete | MemoryFlow::Following => Ok(()),
                }
            };
            match made.await {
                Ok(()) => return true,
                Err(error) => tracing::warn!(vm = machine.name, %error, "a move in post-copy is not whole yet"),
            }
            self.env.sleep(LOOK).await;
        }
        false
    }

    /// Waits for another connection of a machine's memory.
    pub(super) async fn rejoin_arrival(self: &Arc<Self>, host: &str, id: Uuid) -> Result<Answer> {
        let (machine, coming) = match self.coming_machine(host, id) {
            Ok(coming) => coming,
            // The other host still has a part of the memory: it has not come.
            Err(_) => return self.last_word_on(host, id).and_then(|()| Err(is_whole(id))),
        };
        let hypervisor = self.hypervisor_of(&machine).await?;
        // The other host knows that its end is lost; this one may not yet.
        machine.cut.send_modify(|times| *times += 1);
        let began = self.env.now();
        while hypervisor.memory_flow(&|_| {}).await? != MemoryFlow::Cut {
            if self.env.now().since(began) > CUT_LIMIT {
                let message = format!("the QEMU of {} has not lost its connection", machine.name);
                return Err(Error::new(ErrorCode::QmpBusy, message).with_hint("it is asked again"));
            }
            self.env.sleep(LOOK / 10).await;
        }
        hypervisor.recover_incoming(&coming.folder).await.map(|()| Answer::Done)
    }

    /// Says whether all memory of a machine that runs here is here.
    pub(super) async fn is_arrival_whole(&self, host: &str, id: Uuid) -> Result<Answer> {
        let Ok((machine, _)) = self.coming_machine(host, id) else {
            return self.last_word_on(host, id).map(|()| Answer::Done);
        };
        match self.hypervisor_of(&machine).await?.memory_flow(&|_| {}).await? {
            MemoryFlow::Complete => Ok(Answer::Done),
            MemoryFlow::Following | MemoryFlow::Cut => Err(cut_off(&machine)),
        }
    }

    /// Looks after a machine that runs here until all of its memory is here.
    pub(super) fn tend_memory(self: &Arc<Self>, machine: &Arc<Machine>) {
        let (daemon, machine) = (Arc::clone(self), Arc::clone(machine));
        let env = Arc::clone(&self.env);
        env.spawn(Box::pin(async move {
            let mut fate = MemoryFate::Whole;
            while daemon.is_known(&machine) {
                let looked = async { daemon.hypervisor_of(&machine).await?.memory_flow(&|_| {}).await };
                let problem = match looked.await {
                    Ok(MemoryFlow::Complete) => break,
                    Err(error) if error.code == ErrorCode::QmpUnreachable && daemon.has_ended(&machine) => {
                        fate = MemoryFate::Lost;
                        break;
                    }
                    Ok(MemoryFlow::Following) => None,
                    Ok(MemoryFlow::Cut) => Some(cut_off(&machine)),
                    Err(error) => Some(error),
                };
                *machine.problem.lock() = problem;
                daemon.env.sleep(LOOK).await;
            }
            if !daemon.is_known(&machine) {
                return;
            }
            *machine.problem.lock() = (fate == MemoryFate::Lost).then(|| lost_here(&machine));
            // The source asks for it until it has it.
            while let Err(error) = daemon.update_machine(&machine, |document| {
                let word =
                    |following: IncomingMachine| LastWord { id: following.id, host: following.host, memory: fate };
                document.last_word = document.following.take().map(word).or_else(|| document.last_word.take());
            }) {
                tracing::error!(vm = machine.name, %error, "what became of the memory of a VM could not be stored");
                daemon.env.sleep(REST_MAX).await;
            }
        }));
    }

    /// Fails unless all memory of the move `id` of `host` has come here.
    fn last_word_on(&self, host: &str, id: Uuid) -> Result<()> {
        let found = self.machines.list().into_iter().find_map(|machine| {
            let word = machine.document().last_word.filter(|word| word.id == id && word.host == host)?;
            Some((machine, word.memory))
        });
        let (message, hint) = match found {
            Some((_, MemoryFate::Whole)) => return Ok(()),
            Some((machine, MemoryFate::Lost)) => (
                format!("the QEMU of {} has ended here before all of its memory was here", machine.name),
                "its disks are whole here: start it anew as after a crash",
            ),
            None => (format!("no VM comes from {host} by the move {id}, or has"), "see whether it runs here"),
        };
        Err(Error::new(ErrorCode::MoveFailed, message).with_hint(hint))
    }

    /// Gives up memory that follows its guest and never will be whole: a person says so. Gives what was done.
    ///
    /// # Errors
    /// No memory follows a guest here.
    pub(super) async fn give_up_memory(self: &Arc<Self>, machine: &Machine) -> Result<String> {
        let document = machine.document();
        let name = &machine.name;
        let is_sending = document.outgoing.as_ref().is_some_and(|outgoing| outgoing.postcopy)
            && machine.outgoing().is_none_or(|moving| moving.is_committed());
        if document.following.is_none() && !is_sending {
            return Err(Error::new(ErrorCode::WrongState, format!("no memory of {name} follows its guest"))
                .with_hint(format!("`transhume vm show {name}` says where it is")));
        }
        if document.following.is_some() {
            self.end_without_memory(&document).await;
            return Ok(format!("the QEMU of {name} is ended here; start it anew on its disks, as after a crash"));
        }
        machine.is_given_up.store(true, Ordering::Release);
        Ok(format!("the QEMU of {name} is ended here, and the move ends as failed"))
    }
}

/// The connection was lost while the devices' state was sent, with this host's daemon, and the other QEMU has ended of that. QEMU neither
/// takes that back nor goes on.
pub(super) fn lost_with_daemon(name: &str) -> Error {
    let message = format!("the daemon ended while the state of the devices of {name} was sent: its guest cannot go on");
    Error::new(ErrorCode::MoveFailed, message).with_hint(format!(
        "its disks are whole here: end its QEMU, `transhume vm rm {name}`, and start it anew as after a crash"
    ))
}

/// Whether that is an answer after which nothing comes any more.
fn is_final(error: &Error) -> bool {
    error.code == ErrorCode::MoveFailed
}

fn is_whole(id: Uuid) -> Error {
    Error::new(ErrorCode::WrongState, format!("all memory of the move {id} is here already"))
        .with_hint("see whether the VM runs here")
}

/// What is here of the memory is of no use any more.
fn lost_there(machine: &Machine, host: &HostName, error: &Error) -> Error {
    let message = format!("{host} cannot take the rest of the memory of {} any more: {}", machine.name, error.message);
    Error::new(ErrorCode::MoveFailed, message).with_hint(format!(
        "its disks are whole at {host}: see that no QEMU of it is left there, and start it anew as after a crash"
    ))
}

fn lost_here(machine: &Machine) -> Error {
    let message = format!("the QEMU of {} has ended before all of its memory was here", machine.name);
    Error::new(ErrorCode::MoveFailed, message).with_hint(format!(
        "its disks are whole here: start it anew on them as after a crash; `transhume vm rm {}` forgets this one",
        machine.name
    ))
}

fn given_up(machine: &Machine, host: &HostName) -> Error {
    let name = &machine.name;
    Error::new(ErrorCode::MoveFailed, format!("the memory of {name} that had not reached {host} was given up by hand"))
        .with_hint(format!(
            "its disks are whole at {host}: `transhume vm resolve {name} --lost` there ends its QEMU; start it anew as after a crash"
        ))
}

/// The other half of the memory is gone.
fn lost_for_good(machine: &Machine, host: &HostName) -> Error {
    let name = &machine.name;
    let message =
        format!("the QEMU of {name} has ended here before {host} had all of its memory, and its guest waits there");
    Error::new(ErrorCode::MoveFailed, message)
        .with_hint(format!("its disks are whole at {host}: end its QEMU there, and start it anew as after a crash"))
}

fn stuck(machine: &Machine, host: &HostName, error: &Error) -> Error {
    let message =
        format!("a part of the memory of {} is here, and does not reach {host}: {}", machine.name, error.message);
    Error::new(error.code, message).with_hint(format!(
        "keep the QEMUs of both hosts, and see that {host} is reached: the guest goes on then. If that never will be, \
         `transhume vm resolve {} --lost` gives it up",
        machine.name
    ))
}

fn cut_off(machine: &Machine) -> Error {
    let host = machine.document().following.map(|following| following.host).unwrap_or_default();
    let message =
        format!("a part of the memory of {} is still at {host}, which is not reached: its guest waits", machine.name);
    Error::new(ErrorCode::WrongState, message)
        .with_hint(format!(
            "keep the QEMUs of both hosts, and see that the hosts reach each other: the guest goes on then. If the other QEMU has \
             ended, `transhume vm resolve {} --lost` ends this one", machine.name
        ))
}
