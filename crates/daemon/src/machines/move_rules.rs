//! What stands against a move of a machine whatever the other host says, and what follows from its request for each disk.

use std::time::Duration;

use api::v1::{Error, ErrorCode, MemoryEngine, Monitor, MoveRequest, Strategy, VmMoveRequest};
use vm::machine::MachineFacts;

use super::document::MachineDocument;
use super::is_moved;
use crate::hypervisor::refused_state;
use crate::problem::Result;

/// Refuses a machine that is not here, or not all of it.
pub(super) fn refuse_absent(document: &MachineDocument) -> Result<()> {
    if let Some(moved) = document.last_move.as_ref().filter(|_| is_moved(document)) {
        return Err(Error::new(ErrorCode::WrongState, format!("{} is at {}", document.name, moved.to))
            .with_hint(format!("ask transhumed on {}", moved.to)));
    }
    if let Some(incoming) = &document.incoming {
        return Err(Error::new(ErrorCode::Busy, format!("{} comes from {} just now", document.name, incoming.host))
            .with_hint("wait until it runs here"));
    }
    if let Some(following) = &document.following {
        let message = format!("the memory of {} still comes from {}", document.name, following.host);
        return Err(Error::new(ErrorCode::Busy, message).with_hint("wait until all of it is here"));
    }
    Ok(())
}

/// All that stands against a move by this request.
pub(super) fn refusals_of(document: &MachineDocument, facts: &MachineFacts, request: &VmMoveRequest) -> Vec<Error> {
    [refuse_options(document, request), refuse_state(facts)].into_iter().filter_map(Result::err).collect()
}

/// Refuses a guest in a state that its QEMU cannot carry.
pub(super) fn refuse_state(facts: &MachineFacts) -> Result<()> {
    let refused = vm::machine::refuse_state(&facts.run_state, facts.version);
    refused.map_err(|error| refused_state(&error))
}

/// Refuses what libvirt's own migration is not asked for here.
pub(super) fn refuse_options(document: &MachineDocument, request: &VmMoveRequest) -> Result<()> {
    let is_many = request.channels.is_some_and(|channels| channels > 1);
    if is_many && matches!(document.monitor, Monitor::Libvirt(_)) {
        return Err(Error::new(ErrorCode::VmRefused, "the memory of a libvirt domain goes over one connection")
            .with_hint("leave --channels out"));
    }
    if request.memory_cpu_percent.is_some_and(|percent| !(1..=100).contains(&percent)) {
        return Err(Error::new(ErrorCode::Invalid, "the memory's share of the processors is 1 to 100 percent")
            .with_hint("leave --memory-cpu out for all of it"));
    }
    if request.memory_cpu_percent.is_some() && request.memory == MemoryEngine::Qemu {
        return Err(Error::new(ErrorCode::VmRefused, "QEMU limits no processors while it sends memory")
            .with_hint("leave --memory-cpu out, or have `--memory parallel` copy it"));
    }
    if request.postcopy && is_many {
        return Err(Error::new(ErrorCode::VmRefused, "memory that follows the guest goes over one connection")
            .with_hint("leave --channels or --postcopy out"));
    }
    if request.postcopy && matches!(document.monitor, Monitor::Libvirt(_)) {
        return Err(Error::new(ErrorCode::VmRefused, "the memory of a libvirt domain does not follow its guest")
            .with_hint("leave --postcopy out; --auto-converge and a longer --downtime-limit help a busy guest"));
    }
    Ok(())
}

/// The move of a disk that goes with its machine.
pub(super) fn disk_request(request: &VmMoveRequest, shared: bool) -> MoveRequest {
    // Of a disk of which nothing is copied no head is to be spared.
    let head = match shared {
        true => MoveRequest::default(),
        false => MoveRequest {
            schedule: request.schedule,
            follow_ratio: request.follow_ratio,
            read_cache: request.read_cache,
            surrogate: request.surrogate.clone(),
            popular_threshold: request.popular_threshold,
            surrogate_on_flash: request.surrogate_on_flash,
            sole_copy: request.sole_copy,
            ..MoveRequest::default()
        },
    };
    MoveRequest {
        to: request.to.clone(),
        shared,
        bandwidth: request.bandwidth,
        verify: request.verify,
        strategy: request.strategy,
        // For those that track it is no wish: they end by it.
        deadline_ms: request
            .deadline_ms
            .filter(|_| !matches!(request.strategy, Strategy::Dbt | Strategy::IncrementalDbt)),
        // What both hosts reach is nobody's to delete.
        delete_source: request.delete_source && !shared,
        // Where the machine is started next is no question of one disk.
        no_persist: true,
        ..head
    }
}

/// When the disks are to be there so that the memory, which is expected to take so many seconds, is in time, too.
pub(super) fn deadline_of_disks(deadline_ms: u64, memory_seconds: f64) -> u64 {
    let memory_ms = Duration::try_from_secs_f64(memory_seconds).map_or(u64::MAX, |span| span.as_millis() as u64);
    deadline_ms.saturating_sub(memory_ms).max(deadline_ms / 2).max(1)
}
