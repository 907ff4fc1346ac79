//! When the target's QEMU is started: while the end of the disks is copied, so that the memory need not wait for it.
//!
//! QEMU reads the first sector of a disk when it starts, and guesses the disk's geometry from it. Exports of disks that arrive
//! answer reads from the copy. So the beginning must be copied: the strategies that copy in the order of the volume have that at
//! half of the disk. It is not started sooner than it takes: until the memory is sent, QEMU lets devices be plugged and unplugged.

use std::pin::pin;
use std::time::Duration;

use api::v1::{Error, ErrorCode, Job, Schedule, Strategy, VmMoveRequest};
use futures::future::{Either, select};
use vm::machine::{DomainDefinition, TargetDomain};

use super::attempt::{MachineMove, START_LIMIT};
use super::budget;
use super::channel::{Answer, Ask};
use crate::daemon::Daemon;
use crate::jobs::MachineMember;
use crate::problem::Result;

/// How often the copies are looked at.
const LOOK: Duration = Duration::from_millis(50);
/// So much of each disk is copied by then, in percent, and the rest takes no longer than this, in seconds.
const PERCENT_MIN: f64 = 50.0;
const SECONDS_LEFT_MAX: u64 = 1;

impl MachineMove {
    /// Waits until the disks are complete, and has the target's QEMU started on them, shortly before if that is possible.
    /// Gives where libvirt is to bring a domain, if it does that.
    pub(super) async fn disks_and_qemu(&self, daemon: &Daemon, member: &MachineMember) -> Result<Option<TargetDomain>> {
        let dividing = async {
            match self.request.bandwidth {
                Some(limit) => budget::divide(&*daemon.env, &self.disks, limit).await,
                None => std::future::pending().await,
            }
        };
        match select(Box::pin(self.start_on_disks(daemon, member)), pin!(dividing)).await {
            Either::Left((started, _)) => started,
            Either::Right((never, _)) => match never {},
        }
    }

    async fn start_on_disks(&self, daemon: &Daemon, member: &MachineMember) -> Result<Option<TargetDomain>> {
        let mut ready = pin!(member.disks_ready());
        let is_ready = match select(ready.as_mut(), pin!(self.nearly_copied(daemon))).await {
            Either::Left(_) => true,
            Either::Right(_) => false,
        };
        let postcopy = self.request.postcopy;
        let definition = self.definition_now().await?.map(Box::new);
        let ask = Ask::Start { id: self.id, channels: self.channels(daemon), postcopy, definition };
        let target = match self.ask(daemon, START_LIMIT, ask).await? {
            Answer::Domain(target) => Some(self.departure.checked(target)?),
            _ => None,
        };
        if !is_ready {
            ready.await;
        }
        self.refuse_other_devices().await.map(|()| target)
    }

    /// Waits until the copies of all disks are about to be complete; for ever if their order is another one.
    async fn nearly_copied(&self, daemon: &Daemon) {
        if !copies_beginning_first(&self.request) {
            return std::future::pending().await;
        }
        while !self.disks.iter().all(|disk| is_nearly_copied(&disk.job.show())) {
            daemon.env.sleep(LOOK).await;
        }
    }

    /// A domain of libvirt as it is now. The other host was told of it before the disks were copied: what was changed since would be
    /// undone there.
    async fn definition_now(&self) -> Result<Option<DomainDefinition>> {
        let Some(told) = &self.departure.arrival.domain else { return Ok(None) };
        let now = self.departure.hypervisor.definition().await?;
        let now = now.filter(|(now, _)| now.uuid == told.uuid).map(|(now, _)| now);
        let now = now.ok_or_else(|| {
            let message = format!("libvirt has another domain {} than when the move began", told.name);
            Error::new(ErrorCode::VmRefused, message).with_hint("move it again")
        })?;
        Ok(Some(DomainDefinition { folder: told.folder.clone(), ..now }))
    }

    /// What was plugged or unplugged since the move was asked for is not so at the target.
    async fn refuse_other_devices(&self) -> Result<()> {
        let now = self.departure.hypervisor.facts().await?.devices;
        let Some(device) = self.departure.arrival.facts.devices.symmetric_difference(&now).next() else {
            return Ok(());
        };
        let message = format!("{device} was plugged or unplugged while the disks of {} were copied", self.name);
        Err(Error::new(ErrorCode::VmRefused, message).with_hint("move it again"))
    }
}

/// Whether the beginning of each disk is copied before its other half.
const fn copies_beginning_first(request: &VmMoveRequest) -> bool {
    matches!(request.schedule, Schedule::Sequential)
        && matches!(request.strategy, Strategy::Mirror | Strategy::Dbt | Strategy::Snapshot)
}

fn is_nearly_copied(job: &Job) -> bool {
    // One that stays where it is has been there all along.
    if job.request.shared {
        return true;
    }
    job.progress.as_ref().is_some_and(|progress| {
        progress.percent >= PERCENT_MIN && progress.eta_seconds.is_some_and(|left| left <= SECONDS_LEFT_MAX)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemu_is_started_early_only_where_the_beginning_of_its_disks_is_copied() {
        let plain = VmMoveRequest::default();
        assert!(copies_beginning_first(&plain));
        assert!(copies_beginning_first(&VmMoveRequest { read_cache: Some(1 << 24), ..plain.clone() }));
        for schedule in [Schedule::Follow, Schedule::ColdFirst] {
            assert!(!copies_beginning_first(&VmMoveRequest { schedule, ..plain.clone() }), "{schedule}");
        }
        assert!(!copies_beginning_first(&VmMoveRequest { strategy: Strategy::Auto, ..plain }));
    }
}
