//! When the operator's hook is run in the move of a machine, and what it is told. The network of a machine is made by it.
//!
//! ```text
//!   source   prepare ───────────────────── switchover ─ (the commit) ─────── released
//!   target     prepare ── start ─ (QEMU) ───── switchover ─ (the commit) ─ running
//!   either   abandoned, in place of what follows: the machine stays at the source
//! ```
//!
//! `prepare` and `start` are waited for, and may refuse the move. The others are too late to refuse anything: what they say is
//! logged. `switchover` and `running` are run beside the move, which waits for neither: the guest is stopped then, or has just
//! been. `released`, `running` and `abandoned` are run again after a restart of the daemon that does not know whether they were.
//!
//! The hooks of one machine are run one after the other, in the order in which the move comes to them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, ErrorCode, VmFacts};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::oneshot;
use uuid::Uuid;
use vm::machine::{MachineDescription, NetworkBackend};

use super::channel::Arrival;
use super::document::{IncomingMachine, MachineDocument, OutgoingMachine};
use super::{Begin, Machine, show_facts};
use crate::daemon::Daemon;
use crate::problem::Result;

/// How much of what a hook has printed is shown.
const SAID_BYTES_SHOWN: usize = 400;
/// The layout of what it is told.
const HOOK_VERSION: u32 = 1;

/// What a move comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum HookPhase {
    Prepare,
    Start,
    Switchover,
    Running,
    Released,
    Abandoned,
}

impl HookPhase {
    const fn name(self) -> &'static str {
        match self {
            Self::Prepare => "prepare",
            Self::Start => "start",
            Self::Switchover => "switchover",
            Self::Running => "running",
            Self::Released => "released",
            Self::Abandoned => "abandoned",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum HookSide {
    Source,
    Target,
}

/// What a hook is told, but for the phase: docs/vm.md describes it.
#[derive(Clone, Serialize)]
pub(super) struct HookInput {
    version: u32,
    side: HookSide,
    vm: String,
    #[serde(rename = "move")]
    id: Uuid,
    host: String,
    runs: bool,
    disks: Vec<HookDisk>,
    networks: Vec<NetworkBackend>,
    command: Vec<String>,
    facts: Option<VmFacts>,
    sockets: PathBuf,
    user: Option<String>,
}

#[derive(Clone, Serialize)]
struct HookDisk {
    volume: String,
    node: String,
    image: String,
}

/// The order of the hooks of each machine.
#[derive(Default)]
pub(super) struct HookTurns(Mutex<BTreeMap<String, oneshot::Receiver<()>>>);

/// The next one comes when this is dropped.
struct HookTurn {
    before: Option<oneshot::Receiver<()>>,
    _done: oneshot::Sender<()>,
}

impl HookTurns {
    fn take(&self, name: &str) -> HookTurn {
        let (done, next) = oneshot::channel();
        let mut turns = self.0.lock();
        let before = turns.insert(name.to_owned(), next);
        turns.retain(|_, last| last.try_recv() == Err(oneshot::error::TryRecvError::Empty));
        HookTurn { before, _done: done }
    }
}

impl HookTurn {
    async fn come(&mut self) {
        if let Some(before) = self.before.take() {
            // It is over when its sender is gone.
            let _ = before.await;
        }
    }
}

impl Daemon {
    /// The hook of this host and how long it may take, if there is one.
    fn vm_hook(&self) -> Option<(&Path, Duration)> {
        let hosts = self.config.hosts.as_ref()?;
        Some((hosts.vm_hook.as_deref()?, Duration::from_secs(hosts.vm_hook_seconds)))
    }

    /// Refuses a hook that cannot be run.
    pub(super) fn check_hook(&self) -> Result<()> {
        self.vm_hook().map_or(Ok(()), |(program, _)| self.hook_runner.check(program))
    }

    fn hook_input(
        &self,
        (side, vm, id, host): (HookSide, &str, Uuid, &str),
        runs: bool,
        description: Option<&MachineDescription>,
    ) -> HookInput {
        let words = |description: &MachineDescription| {
            std::iter::once(&description.program).chain(&description.words).cloned().collect()
        };
        HookInput {
            version: HOOK_VERSION,
            side,
            vm: vm.to_owned(),
            id,
            host: host.to_owned(),
            runs,
            disks: Vec::new(),
            networks: description.map(MachineDescription::networks).unwrap_or_default(),
            command: description.map(words).unwrap_or_default(),
            facts: None,
            sockets: self.machine_folder(vm),
            user: self.config.hosts.as_ref().and_then(|hosts| hosts.vm_user.clone()),
        }
    }

    /// What the source's hook is told of a machine that moves to `host`.
    pub(super) fn hook_at_source(&self, arrival: &Arrival, host: &str) -> HookInput {
        let of = (HookSide::Source, arrival.name.as_str(), arrival.id, host);
        let disk = |disk: &super::channel::ArrivingDisk| HookDisk {
            volume: disk.volume.clone(),
            node: disk.node.clone(),
            image: disk.image.clone(),
        };
        HookInput {
            disks: arrival.disks.iter().map(disk).collect(),
            facts: Some(show_facts(&arrival.facts)),
            ..self.hook_input(of, arrival.runs, Some(&arrival.description))
        }
    }

    /// The same after a restart, which has forgotten some of it.
    pub(super) fn hook_at_source_again(&self, name: &str, outgoing: &OutgoingMachine) -> HookInput {
        let of = (HookSide::Source, name, outgoing.id, outgoing.host.as_str());
        let disk = |volume: &String| HookDisk { volume: volume.clone(), node: String::new(), image: String::new() };
        HookInput {
            disks: outgoing.volumes.iter().map(disk).collect(),
            ..self.hook_input(of, outgoing.ran, outgoing.description.as_ref())
        }
    }

    /// What the target's hook is told.
    pub(super) fn hook_at_target(&self, machine: &Machine, incoming: &IncomingMachine) -> HookInput {
        let MachineDocument { disks, description, .. } = machine.document();
        let (command, facts) = match machine.begin.lock().clone() {
            Some(Begin::Command(begin)) => {
                let (command, facts, _) = *begin;
                (Some(command), Some(facts))
            }
            Some(Begin::Domain(_)) | None => (None, None),
        };
        // What QEMU is started with here, as long as that is known.
        let started = command.map(|command| MachineDescription { program: command.program, words: command.words });
        let of = (HookSide::Target, machine.name.as_str(), incoming.id, incoming.host.as_str());
        let disks = disks.into_iter();
        HookInput {
            disks: disks.map(|disk| HookDisk { volume: disk.volume, node: disk.node, image: disk.image }).collect(),
            facts: facts.as_ref().map(show_facts),
            ..self.hook_input(of, incoming.runs, started.or(description).as_ref())
        }
    }

    /// Runs this host's hook, if there is one, after those of the same machine that were asked for before.
    ///
    /// # Errors
    /// It cannot be run, fails, or takes too long; with what it said.
    pub(super) async fn run_hook(&self, phase: HookPhase, input: HookInput) -> Result<()> {
        if self.vm_hook().is_none() {
            return Ok(());
        }
        let turn = self.machines.hook_turns.take(&input.vm);
        self.run_hook_in_turn(phase, input, turn).await
    }

    async fn run_hook_in_turn(&self, phase: HookPhase, input: HookInput, mut turn: HookTurn) -> Result<()> {
        let Some((program, limit)) = self.vm_hook() else { return Ok(()) };
        turn.come().await;
        let (vm, side) = (input.vm.as_str(), if input.side == HookSide::Source { "source" } else { "target" });
        let refuse = |why: String| {
            let message =
                format!("the hook {} refuses {} of {vm} at the {side}: {why}", program.display(), phase.name());
            Error::new(ErrorCode::VmRefused, message)
                .with_hint("remove the cause and move it again; docs/vm.md says what a hook is told and may do")
        };
        self.hook_runner.check(program)?;
        let mut told = serde_json::to_value(&input).expect("plain data serialises");
        told["phase"] = phase.name().into();
        let (words, told) = ([phase.name(), side, vm].map(str::to_owned), format!("{told:#}\n"));
        let began = self.env.now();
        let ended = env::timeout(&*self.env, limit, self.hook_runner.run(program, &words, &told)).await;
        let output =
            ended.ok_or_else(|| refuse(format!("it did not end within {} s and was killed", limit.as_secs())))?;
        let output = output.map_err(|error| refuse(error.to_string()))?;
        let took_ms = self.env.now().since(began).as_millis();
        let (out, err) = (shortened(&output.stdout), shortened(&output.stderr));
        tracing::info!(vm, phase = phase.name(), side, success = output.success, took_ms, out, err, "a hook has run");
        let why = if err.is_empty() { "it has failed without a word".to_owned() } else { err };
        if output.success { Ok(()) } else { Err(refuse(why)) }
    }

    /// The same where it is too late to refuse anything.
    pub(super) async fn tell_hook(&self, phase: HookPhase, input: HookInput) {
        if let Err(error) = self.run_hook(phase, input).await {
            tracing::error!(%error, "a hook has failed; the move goes on");
        }
    }

    /// The same, and nobody waits for it.
    pub(super) fn tell_hook_beside(self: &Arc<Self>, phase: HookPhase, input: HookInput) {
        if self.vm_hook().is_none() {
            return;
        }
        let turn = self.machines.hook_turns.take(&input.vm);
        let daemon = Arc::clone(self);
        self.env.spawn(Box::pin(async move {
            if let Err(error) = daemon.run_hook_in_turn(phase, input, turn).await {
                tracing::error!(%error, "a hook has failed; the move goes on");
            }
        }));
    }

    /// Tells the target's hook that a machine runs here, which is on record as due, and takes that off the record.
    pub(super) fn tell_running(self: &Arc<Self>, machine: &Arc<Machine>, incoming: &IncomingMachine) {
        if self.vm_hook().is_none() {
            return;
        }
        let input = self.hook_at_target(machine, incoming);
        let turn = self.machines.hook_turns.take(&input.vm);
        let (daemon, machine) = (Arc::clone(self), Arc::clone(machine));
        self.env.spawn(Box::pin(async move {
            if let Err(error) = daemon.run_hook_in_turn(HookPhase::Running, input, turn).await {
                tracing::error!(%error, "a hook has failed; the VM runs all the same");
            }
            if daemon.is_known(&machine)
                && let Err(error) = daemon.update_machine(&machine, |document| document.arrived = None)
            {
                tracing::warn!(vm = machine.name, %error, "the hook is run again after the next start");
            }
        }));
    }

    /// What is put on record when a machine runs here: nothing where no hook is to hear of it.
    pub(super) fn due_of(&self, incoming: IncomingMachine) -> Option<IncomingMachine> {
        self.vm_hook().map(|_| incoming)
    }
}

/// The end of what was printed, in one line.
fn shortened(text: &str) -> String {
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let cut = words.len().saturating_sub(SAID_BYTES_SHOWN);
    let start = (cut..=words.len()).find(|at| words.is_char_boundary(*at)).unwrap_or_default();
    words[start..].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_hooks_of_one_machine_take_turns_and_those_of_others_do_not_wait() {
        let turns = HookTurns::default();
        let (mut first, mut second) = (turns.take("web1"), turns.take("web1"));
        first.come().await;
        let mut other = turns.take("web2");
        other.come().await;
        let mut waiting = Box::pin(second.come());
        assert!(futures::poll!(&mut waiting).is_pending());
        drop(first);
        waiting.await;
        drop((second, other));
        assert!(turns.take("web3").before.is_none());
        assert_eq!(turns.0.lock().len(), 1, "those that are over are forgotten");
    }

    #[test]
    fn what_is_shown_of_a_long_output_is_its_end() {
        assert_eq!(shortened(" a\n b "), "a b");
        let long = "é".repeat(SAID_BYTES_SHOWN);
        assert_eq!(shortened(&long).len(), SAID_BYTES_SHOWN);
    }
}
