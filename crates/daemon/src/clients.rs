//! Who may connect to an export.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use env::Env;
use serde::{Deserialize, Serialize};
use vm::QemuProcess;

/// How long a client waits for whoever starts the QEMU of a disk to say which process that is.
const START_LIMIT: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(5);

/// The owner that a unix socket is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketOwner {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

/// Who may connect to an export.
#[derive(Clone, Debug, Default)]
pub struct Clients {
    /// The owner of its unix socket.
    pub owner: Option<SocketOwner>,
    /// The adopted disk: nobody may but the QEMU that it was adopted from.
    pub disk: Option<Arc<vm::AdoptedDisk>>,
    /// A disk that has come with its machine: nobody may but that machine's QEMU. All VMs that came here may run as one user.
    pub machine: Option<MachineGate>,
}

/// The QEMU of a machine that has come with a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MachineClient {
    /// It is about to be started.
    Expected,
    /// It was started as this process.
    Started(QemuProcess),
}

/// Lets in the QEMU of a machine, as it is on record at that moment.
#[derive(Clone)]
pub struct MachineGate(Arc<dyn Fn() -> Option<MachineClient> + Send + Sync>);

impl fmt::Debug for MachineGate {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_tuple("MachineGate").field(&(self.0)()).finish()
    }
}

impl MachineGate {
    /// For whom `on_record` tells.
    pub fn new(on_record: impl Fn() -> Option<MachineClient> + Send + Sync + 'static) -> Self {
        Self(Arc::new(on_record))
    }

    /// Waits until it is known which process is let in. QEMU connects as soon as it runs, which may be before that is stored.
    pub(crate) async fn settle(&self, env: &dyn Env) {
        let began = env.now();
        while (self.0)() == Some(MachineClient::Expected) && env.now().since(began) < START_LIMIT {
            env.sleep(LOOK).await;
        }
    }

    /// Whether the process `pid` is let in.
    pub(crate) fn lets_in(&self, pid: Option<u32>) -> bool {
        match (self.0)() {
            // Nobody is on record for it any more.
            None => true,
            Some(MachineClient::Expected) => false,
            Some(MachineClient::Started(process)) => pid.is_some_and(|pid| process.has_started(pid)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gate(client: Option<MachineClient>) -> MachineGate {
        MachineGate::new(move || client.clone())
    }

    #[test]
    fn only_the_process_that_was_started_is_let_in_and_what_it_has_started() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("it runs");
        let started = QemuProcess::of(child.id()).expect("it runs");
        let own = gate(Some(MachineClient::Started(started.clone())));
        assert!(own.lets_in(Some(child.id())));
        assert!(!own.lets_in(Some(std::process::id())) && !own.lets_in(None));
        let this = QemuProcess::of(std::process::id()).expect("it runs");
        assert!(gate(Some(MachineClient::Started(this))).lets_in(Some(child.id())), "its own child");
        let earlier = QemuProcess { started: started.started.wrapping_sub(1), ..started };
        assert!(!gate(Some(MachineClient::Started(earlier))).lets_in(Some(child.id())), "another one of its number");
        assert!(!gate(Some(MachineClient::Expected)).lets_in(Some(child.id())));
        child.kill().expect("it runs");
        child.wait().expect("it ends");
        assert!(!own.lets_in(Some(std::process::id())));
    }
}
