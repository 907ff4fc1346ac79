//! What two daemons say of a machine that moves between them.
//!
//! ```text
//!   source                                                target
//!     │ probe, then bytes ──────────────────────────────────▶ │ counts them
//!     │ share: disks that may lie where both reach them ────▶ │ which of them it reaches
//!     │ plan: the command line, the disks, what QEMU says ──▶ │ what stands against it, the command at the target
//!     │ prepare ────────────────────────────────────────────▶ │ on record: it comes
//!     │          (the disks' own moves make their volumes)    │
//!     │ start ──────────────────────────────────────────────▶ │ exports, QEMU, its socket for the memory
//!     │ takes-memory: regions ──────────────────────────────▶ │ whether the parallel engine may copy them here
//!     │ pages n, then the engine's own bytes ═══════════════▶ │ ═══▶ the memory's files (parallel engine)
//!     │ memory n, then QEMU's own bytes ════════════════════▶ │ ═══▶ QEMU
//!     │ control, then libvirt's own bytes ══════════════════▶ │ ═══▶ libvirt, of a domain of libvirt
//!     │ usage: addresses, every second meanwhile ───────────▶ │ what their interfaces have carried
//!     │ cache, then the transfer's own bytes ═══════════════▶ │ the cache of a disk that stays where it is
//!     │ export, then NBD's own bytes, of no machine ════════▶ │ the server of a volume
//!     │ loaded ─────────────────────────────────────────────▶ │ QEMU has all of it
//!     │          (the commit of the disks' group)             │
//!     │ run ────────────────────────────────────────────────▶ │ all disks are held here: the guest runs
//!     │ rejoin, then memory 0 again ════════════════════════▶ │ post-copy, after a lost connection
//! ```
//!
//! A message is its length (u32, little-endian, at most [`MESSAGE_BYTES_MAX`]) and JSON. Each question has one answer. The
//! connections of `memory`, `control`, `pages`, `cache` and `export` carry nothing but those bytes after that.

use std::io::{Error as OsError, ErrorKind as OsErrorKind};
use std::net::IpAddr;

use api::v1::{Error, VmChange};
use memory::Region;
use migrate::stream::{BoxTransport, LinkCounters};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use uuid::Uuid;
use vm::machine::{DomainDefinition, MachineDescription, MachineFacts, TargetDomain};

use crate::location::Location;
use crate::stack::ArrivingCache;

/// The longest message: a command line has its place in it.
const MESSAGE_BYTES_MAX: u32 = 1 << 20;

/// What the source asks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "kebab-case")]
pub(super) enum Ask {
    /// What would become of the machine. Changes nothing.
    Plan(Arrival),
    /// Which of these disks this host reaches where they are. Changes nothing. Whoever does not know this question does not know
    /// disks that stay where they are, so no other that names one is asked before it is answered.
    Share {
        /// The disks.
        disks: Vec<SharedDisk>,
    },
    /// How fast this host is reached: so many bytes follow, and are answered when all are there.
    Probe {
        /// How many, 64 MiB at most.
        bytes: u64,
    },
    /// The machine comes: its name is taken from here on.
    Prepare(Arrival),
    /// Its disks are there: starts its QEMU on them.
    Start {
        /// The move.
        id: Uuid,
        /// How QEMU takes the memory.
        channels: u8,
        /// Whether the guest may run before all of it is there.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        postcopy: bool,
        /// A domain of libvirt as it is now: its operator may have changed it while the disks were copied.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        definition: Option<Box<DomainDefinition>>,
    },
    /// Whether this host takes such a memory by the parallel engine. Changes nothing. Whoever does not know this question does not know
    /// that engine.
    TakesMemory {
        /// The move.
        id: Uuid,
        /// The memory.
        regions: Vec<Region>,
    },
    /// What follows is a stream of the parallel engine (`memory::wire`).
    Pages {
        /// The move.
        id: Uuid,
    },
    /// What follows is the transfer of a disk's cache (`migrate::CacheDeparture`). Whoever does not know this question is asked for no
    /// disk with a cache.
    Cache {
        /// The move.
        id: Uuid,
        /// The disk.
        volume: String,
    },
    /// What follows is a connection to the NBD server of a volume of the target, which this host uses as a store.
    Export {
        /// The volume.
        volume: String,
    },
    /// What follows is one of the connections of QEMU's migration.
    Memory {
        /// The move.
        id: Uuid,
    },
    /// What follows is a connection of libvirt's to libvirt.
    Control {
        /// The move.
        id: Uuid,
    },
    /// Answered when QEMU has all of the machine.
    Loaded {
        /// The move.
        id: Uuid,
        /// Whether its guest ran when it was stopped for the switch, and is to run there. An earlier version takes what was said before.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        runs: Option<bool>,
    },
    /// Answered when this host holds all disks and the machine runs.
    Run {
        /// The move.
        id: Uuid,
    },
    /// The connection of its memory was lost while that followed the guest: answered when the target waits for another one.
    Rejoin {
        /// The move.
        id: Uuid,
    },
    /// Answered when the target has all of the memory that followed the guest; refused if it has not.
    Whole {
        /// The move.
        id: Uuid,
    },
    /// What the interfaces of the target have carried that have these addresses. Whoever does not know this question is not asked
    /// again.
    Usage {
        /// The addresses, 64 at most.
        addresses: Vec<IpAddr>,
    },
    /// It does not come.
    Abandon {
        /// The move.
        id: Uuid,
    },
}

/// A machine that comes, or would.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Arrival {
    /// The move.
    pub(super) id: Uuid,
    /// The machine.
    pub(super) name: String,
    /// How its QEMU was started.
    pub(super) description: MachineDescription,
    /// What that QEMU says.
    pub(super) facts: MachineFacts,
    /// Its disks.
    pub(super) disks: Vec<ArrivingDisk>,
    /// How libvirt describes it, of a domain of libvirt. Its QEMU is started by libvirt then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) domain: Option<DomainDefinition>,
    /// Whether its guest runs.
    pub(super) runs: bool,
    /// Whether its guest may run there before all of its memory is there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) postcopy: bool,
    /// Its memory, if the parallel engine copies it. QEMU does otherwise.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) memory: Vec<Region>,
    /// Whether its disks stay volumes of the host that it comes to.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) keeps_volumes: bool,
}

impl Arrival {
    /// The same without what is in a domain's definition: a plan does not need it, and there may be secrets in it.
    pub(super) fn without_definition(mut self) -> Self {
        if let Some(domain) = &mut self.domain {
            (domain.live, domain.persistent) = (String::new(), None);
        }
        self
    }
}

/// A disk of a machine that comes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ArrivingDisk {
    /// What the volume will be called.
    pub(super) volume: String,
    /// The node and the image, as the command line has them; of a domain of libvirt the disk's name in the guest.
    pub(super) node: String,
    pub(super) image: String,
    /// Its format as QEMU has it open; nothing if the source is of a version that does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) format: Option<String>,
    /// How large it is, in bytes.
    pub(super) size: u64,
    /// Where it is and stays, if both hosts reach it there. It is copied otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) shared: Option<Location>,
    /// Whether that is a container that grows.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) grows: bool,
    /// Its cache, if it is to have one there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) cache: Option<ArrivingCache>,
}

/// A disk that may lie where both hosts reach it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SharedDisk {
    /// Where the source has it.
    pub(super) place: Location,
    /// How large it is, in bytes; none of a container that grows, and of what nobody has opened yet.
    pub(super) size: Option<u64>,
    /// What the source has put beside a file just now: whoever finds it there looks at the same storage.
    pub(super) mark: Option<Uuid>,
    /// What a block device is, whoever looks at it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) identity: Option<String>,
}

/// What the target answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "kebab-case")]
pub(super) enum Answer {
    /// It is done.
    Done,
    /// What a plan has found.
    Planned {
        /// What stands against it.
        refusals: Vec<Error>,
        /// What QEMU would be started with.
        command: Vec<String>,
        /// What of that differs.
        changes: Vec<VmChange>,
    },
    /// Of each disk in turn, what stands against its being used here where it is.
    Shared {
        /// Nothing if it can be.
        refusals: Vec<Option<Error>>,
    },
    /// Of each address in turn, what its interface has carried; nothing where there is none.
    Usage {
        /// The counters.
        counters: Vec<Option<LinkCounters>>,
    },
    /// libvirt may bring the domain, with this definition.
    Domain(TargetDomain),
    /// It is not done.
    Refused {
        /// Why.
        error: Error,
    },
}

/// Sends one message.
pub(super) async fn send(transport: &mut BoxTransport, message: &impl Serialize) -> std::io::Result<()> {
    let text = serde_json::to_vec(message).map_err(|error| OsError::new(OsErrorKind::InvalidData, error))?;
    let length = u32::try_from(text.len()).ok().filter(|length| *length <= MESSAGE_BYTES_MAX);
    let length = length.ok_or_else(|| OsError::new(OsErrorKind::InvalidData, "the message is too long"))?;
    let mut bytes = length.to_le_bytes().to_vec();
    bytes.extend_from_slice(&text);
    transport.write_all(&bytes).await?;
    transport.flush().await
}

/// Receives one message.
pub(super) async fn receive<T: DeserializeOwned>(transport: &mut BoxTransport) -> std::io::Result<T> {
    let length = transport.read_u32_le().await?;
    if length > MESSAGE_BYTES_MAX {
        return Err(OsError::new(OsErrorKind::InvalidData, "the message is too long"));
    }
    let mut text = vec![0; length as usize];
    transport.read_exact(&mut text).await?;
    serde_json::from_slice(&text).map_err(|error| OsError::new(OsErrorKind::InvalidData, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_message_arrives_as_it_was_sent_and_a_long_one_is_refused() {
        let (near, far) = tokio::io::duplex(1 << 16);
        let (mut near, mut far): (BoxTransport, BoxTransport) = (Box::new(near), Box::new(far));
        let ask = Ask::Run { id: Uuid::from_u128(7) };
        send(&mut near, &ask).await.expect("sent");
        assert_eq!(receive::<Ask>(&mut far).await.expect("received"), ask);

        near.write_all(&(MESSAGE_BYTES_MAX + 1).to_le_bytes()).await.expect("sent");
        let error = receive::<Ask>(&mut far).await.expect_err("it was read");
        assert_eq!(error.kind(), OsErrorKind::InvalidData);
    }
}
