//! How the blows are dealt.

use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use transhume_guest::{Qmp, Side};

use super::act::{Act, VM};
use super::plan::{Blow, End, Stage};
use super::watch::Seen;

/// What fills the target's file system.
pub(super) const FILLER: &str = "filler";
/// A move that does not reach a stage in this time does not reach it.
const STAGE_LIMIT: Duration = Duration::from_secs(6);
const LOOK: Duration = Duration::from_millis(10);
/// After so long a stopped source has nothing on its way any more.
const SILENCE: Duration = Duration::from_millis(200);
/// The exit code of a cancel that was refused: nothing moves, or it is too late.
const WRONG_STATE: i32 = 9;

/// Sends a signal to a process that may be gone.
pub(super) fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid.cast_signed()) {
        let _ = kill_process(pid, signal);
    }
}

impl Act {
    pub(super) fn source_qemu(&self) -> Option<Seen> {
        self.watcher.qemu_in(&self.home)
    }

    pub(super) fn target_qemu(&self) -> Option<Seen> {
        self.watcher.qemu_in(&self.folder_at(self.at.other()))
    }

    /// Waits until the move is so far, for a while.
    pub(super) fn wait_for_stage(&self, stage: Stage) {
        let end = Instant::now() + STAGE_LIMIT;
        let is_reached = || match stage {
            Stage::Asked => true,
            Stage::TargetStarted => self.target_qemu().is_some(),
            Stage::Stopped => self.source_qemu().is_none_or(|seen| seen.status != "running"),
            Stage::TargetRuns => self.target_qemu().is_some_and(|seen| seen.status == "running"),
        };
        while !is_reached() && Instant::now() < end {
            std::thread::sleep(LOOK);
        }
    }

    pub(super) fn strike(&mut self, blow: Blow) -> anyhow::Result<()> {
        match blow {
            Blow::Cut(length) => {
                self.hosts.cut(0)?;
                std::thread::sleep(length);
                self.hosts.mend(0)?;
            }
            Blow::Kill(end, rest) => {
                let side = self.side(end);
                self.hosts.daemon_mut(side).kill();
                std::thread::sleep(rest);
                self.hosts.daemon_mut(side).start()?;
            }
            Blow::KillBoth(rest) => {
                Side::BOTH.into_iter().for_each(|side| self.hosts.daemon_mut(side).kill());
                std::thread::sleep(rest);
                Side::BOTH.into_iter().try_for_each(|side| self.hosts.daemon_mut(side).start())?;
            }
            Blow::Freeze(end, length) => {
                let daemon = self.daemon(self.side(end));
                daemon.signal(Signal::STOP)?;
                std::thread::sleep(length);
                daemon.signal(Signal::CONT)?;
            }
            Blow::FreezeQemu(end, length) => {
                let qemu = match end {
                    End::Source => self.source_qemu(),
                    End::Target => self.target_qemu(),
                };
                if let Some(qemu) = qemu {
                    signal(qemu.pid, Signal::STOP);
                    std::thread::sleep(length);
                    signal(qemu.pid, Signal::CONT);
                }
            }
            Blow::KillTargetQemu => self.before_it_has_loaded(|_, target| {
                signal(target.pid, Signal::KILL);
                Ok(())
            })?,
            Blow::Refuse => self.before_it_has_loaded(|act, target| {
                if let Err(error) = remove_network_card(target) {
                    act.watcher.note(&format!("the device stays: {error:#}"));
                    signal(target.pid, Signal::KILL);
                }
                Ok(())
            })?,
            Blow::Fill => crate::testbed::fill(&self.hosts.incoming(self.at.other()).join(FILLER))?,
            Blow::Cancel => {
                let asked = self.daemon(self.at).ask(&["vm", "cancel", VM])?;
                if let Err((code, said)) = asked {
                    self.watcher.note(&format!("cancel: {code}: {said}"));
                    anyhow::ensure!(code == WRONG_STATE, "cancel: {code}: {said}");
                }
            }
            Blow::HoldMonitor(end, span) => self.hold_monitor(end, span)?,
            Blow::Stop => self.stop_guest()?,
            Blow::Resume => self.resume_guest()?,
            Blow::FillState(end) => self.fill_state(end)?,
            Blow::Crash => {
                if let Some(qemu) = self.source_qemu() {
                    self.has_crashed = true;
                    signal(qemu.pid, Signal::KILL);
                }
            }
        }
        Ok(())
    }

    /// Does something to the target's QEMU, if that surely does not have the machine yet: the source's QEMU is stopped, and
    /// the target's still waits after all that was on its way has come.
    fn before_it_has_loaded(&self, act: impl FnOnce(&Self, &Seen) -> anyhow::Result<()>) -> anyhow::Result<()> {
        let (Some(source), Some(_)) = (self.source_qemu(), self.target_qemu()) else { return Ok(()) };
        signal(source.pid, Signal::STOP);
        std::thread::sleep(SILENCE);
        let waits = self.target_qemu().filter(|target| target.status == "inmigrate");
        let outcome = match waits {
            Some(target) => act(self, &target),
            None => {
                self.watcher.note("too late");
                Ok(())
            }
        };
        signal(source.pid, Signal::CONT);
        outcome
    }
}

/// Takes the network card out of a QEMU that waits for a machine that has one. The card goes at the next reset.
fn remove_network_card(target: &Seen) -> anyhow::Result<()> {
    let mut qmp = Qmp::connect(&target.folder.join("qmp3.sock"), SILENCE)?;
    qmp.execute("device_del", json!({ "id": "net0-device" }))?;
    qmp.execute("system_reset", json!({}))?;
    qmp.wait_for_event("DEVICE_DELETED", Duration::from_secs(2)).context("the card stays")?;
    Ok(())
}
