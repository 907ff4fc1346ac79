//! What two daemons say of a machine that moves between them.
//!
//! ```text
//!   source                                                target
//!     │ probe, then bytes ──────────────────────────────────▶ │ counts them
//!     │ plan: the command line, the disks, what QEMU says ──▶ │ what stands against it, the command at the target
//!     │ prepare ────────────────────────────────────────────▶ │ on record: it comes
//!     │          (the disks' own moves make their volumes)    │
//!     │ start ──────────────────────────────────────────────▶ │ exports, QEMU, its socket for the memory
//!     │ memory n, then QEMU's own bytes ════════════════════▶ │ ═══▶ QEMU
//!     │ loaded ─────────────────────────────────────────────▶ │ QEMU has all of it
//!     │          (the commit of the disks' group)             │
//!     │ run ────────────────────────────────────────────────▶ │ all disks are held here: the guest runs
//! ```
//!
//! A message is its length (u32, little-endian, at most [`MESSAGE_BYTES_MAX`]) and JSON. Each question has one answer. The
//! connection of `memory` carries nothing but QEMU's bytes after that.

use std::io::{Error as OsError, ErrorKind as OsErrorKind};

use api::v1::{Error, VmChange};
use migrate::stream::BoxTransport;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use uuid::Uuid;
use vm::machine::{MachineDescription, MachineFacts};

/// The longest message: a command line has its place in it.
const MESSAGE_BYTES_MAX: u32 = 1 << 20;

/// What the source asks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "kebab-case")]
pub(super) enum Ask {
    /// What would become of the machine. Changes nothing.
    Plan(Arrival),
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
    },
    /// What follows is one of the connections of QEMU's migration.
    Memory {
        /// The move.
        id: Uuid,
    },
    /// Answered when QEMU has all of the machine.
    Loaded {
        /// The move.
        id: Uuid,
    },
    /// Answered when this host holds all disks and the machine runs.
    Run {
        /// The move.
        id: Uuid,
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
    /// Whether its guest runs.
    pub(super) runs: bool,
}

/// A disk of a machine that comes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ArrivingDisk {
    /// What the volume will be called.
    pub(super) volume: String,
    /// The node and the image, as the command line has them.
    pub(super) node: String,
    pub(super) image: String,
    /// How large it is, in bytes.
    pub(super) size: u64,
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
