//! Another QEMU of a machine that has moved: a supervisor or a boot of this host has started it before the daemon ran.
//!
//! Its guest and the one at the other host would be two. So the other host is not told to take the disks, nor to run the guest, while
//! there is one here. Nobody but a person can tell what that is, and ends it. Without an arbiter the other host waits for that word.

use std::sync::Arc;

use api::v1::{Error, ErrorCode};

use super::Machine;
use super::document::{self, MachineDocument, OutgoingMachine};
use crate::daemon::Daemon;
use crate::location::Location;
use crate::problem::Result;
use crate::volume::Volume;

impl Daemon {
    /// After a start: waits while another QEMU runs the machine here.
    pub(super) async fn wait_while_run_beside(self: &Arc<Self>, machine: &Machine, outgoing: &OutgoingMachine) {
        while self.is_known(machine) {
            let Some(who) = self.other_that_runs(&machine.document(), outgoing) else {
                *machine.problem.lock() = None;
                return;
            };
            let error = started_again(&machine.name, &outgoing.host, &who);
            tracing::error!(vm = machine.name, %error, "a VM that has moved was started here again");
            *machine.problem.lock() = Some(error);
            self.env.sleep(super::restart::REST).await;
        }
    }

    /// Refuses to have another host take a disk of a machine that another QEMU runs here.
    ///
    /// # Errors
    /// Who that is.
    pub(crate) fn refuse_beside(&self, volume: &Volume) -> Result<()> {
        let document = volume.document();
        let group = document.job.as_ref().and_then(|job| job.group.as_ref());
        let group = group.filter(|_| document.given_up().is_some());
        let Some(name) = group.and_then(|group| group.machine.as_deref()) else { return Ok(()) };
        let machine = self.machine_on_record(name)?;
        let on_record = machine.as_ref().and_then(|machine| Some((machine, machine.outgoing.as_ref()?)));
        let (who, host) = match on_record {
            Some((machine, outgoing)) => (self.other_that_runs(machine, outgoing), outgoing.host.clone()),
            // A person has had the machine forgotten, and may have added it anew: nothing here has a right to its disk.
            None => (self.user_of_old_image(volume, None), host_of(&document.backend)),
        };
        who.map_or(Ok(()), |who| Err(started_again(name, &host, &who)))
    }

    /// Volumes come back before machines do.
    ///
    /// # Errors
    /// There is none of that name, and one that cannot be read.
    fn machine_on_record(&self, name: &str) -> Result<Option<MachineDocument>> {
        if let Some(machine) = self.machines.get(name) {
            return Ok(Some(machine.document()));
        }
        let mut unreadable = None;
        for document in document::load_all(&self.layout)? {
            match document {
                Ok(document) if document.name == name => return Ok(Some(document)),
                Ok(_) => {}
                Err(error) => unreadable = Some(error),
            }
        }
        unreadable.map_or(Ok(None), Err)
    }

    /// What runs here on the machine's monitor or on the old image of one of its disks, and is not the QEMU that has moved.
    fn other_that_runs(&self, machine: &MachineDocument, outgoing: &OutgoingMachine) -> Option<String> {
        // Without its process on record the one that has moved cannot be told apart.
        if machine.process.is_some() {
            let mut started = self.hypervisors.started_for(&machine.monitor).into_iter();
            if let Some(process) = started.find(|process| machine.process.as_ref() != Some(process)) {
                return Some(format!("another QEMU (process {}) has its monitor", process.pid));
            }
        }
        let volumes = outgoing.volumes.iter().filter_map(|name| self.volume(name).ok());
        volumes.filter_map(|volume| self.user_of_old_image(&volume, machine.process.as_ref())).next()
    }
}

fn host_of(place: &Location) -> String {
    match place {
        Location::Remote(remote) => remote.host.clone(),
        other => other.to_string(),
    }
}

fn started_again(name: &str, host: &str, who: &str) -> Error {
    let message = format!("{name} is at {host} by the commit, and {who} here: its guest may run twice");
    Error::new(ErrorCode::MoveUnfinished, message).with_hint(format!(
        "end that one here, and keep whatever starts it from doing so; {host} is told to run the guest after that"
    ))
}
