//! Disks of running VMs: adopting them, releasing them, and finding out after a restart how far that had come.
//!
//! ```text
//!                    the plan is on record, the export listens         QEMU goes through us
//!  (no volume) ─────────────────────────────▶ adopting ─────────────────────────▶ adopted
//!       ▲                                        │ refused, undone                  │ release: the plan is on record
//!       │                                        ▼                                  ▼
//!       └──────────────────────────────── the volume is removed ◀──────────── releasing
//!                                                         QEMU has its own file again
//! ```
//!
//! The journal says which way it goes; how far it has come, QEMU's graph says (crate `vm`).

mod cover;
mod disk_state;
mod ended;
mod last_sector;
mod monitor;
mod recover;
mod surroundings;
mod watch;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use api::v1::{self, AdoptRequest, CheckRequest, CheckedDisk, Error, ErrorCode};
use backends::{BackendSpec, CacheMode};
use vm::{Adoptability, AdoptionRequest, ExportAddress, Plan};

use crate::audit::Peer;
use crate::daemon::{Daemon, NewVolume};
use crate::document::{AdoptionDirection, AdoptionDocument, VolumeDocument};
use crate::location::require_local;
use crate::open_backend::{BackendOpenOptions, MovedRule, QemuRule, suited};
use crate::problem::{Result, of_backend, of_vm};
use crate::sockets::SOCKET_NAME;
use crate::state_dir::check_name;
use crate::volume::Volume;
use disk_state::Reached;
use surroundings::VolumeSurroundings;

pub(crate) use monitor::{is_block_device, persist};
pub(crate) use recover::recover;
pub(crate) use watch::watch;

/// How long QEMU may take to let go of a connection whose node it has deleted.
const HANG_UP_LIMIT: Duration = Duration::from_secs(10);
/// How long QEMU may take to reach us again after a restart, before somebody must look.
const RECONNECT_LIMIT: Duration = Duration::from_secs(120);
/// How often that is looked at.
const INTERVAL: Duration = Duration::from_millis(50);

impl Daemon {
    /// Every disk of a VM, and whether it can be adopted.
    pub(crate) async fn check_adoption(&self, request: CheckRequest) -> Result<Vec<CheckedDisk>> {
        let vm = self.reach(&request.monitor).await?;
        let reports = vm::inventory(&vm.qmp, &vm.sources).await.map_err(|error| of_vm(&error))?;
        let shown = request.monitor.to_string();
        Ok(reports.into_iter().map(|report| show(&shown, report)).collect())
    }

    /// Adopts a running VM's disk. When this fails, the VM is as it was and nothing is left behind.
    pub(crate) async fn adopt(self: &Arc<Self>, request: AdoptRequest) -> Result<v1::Volume> {
        check_name(&request.name)?;
        let vm = self.reach(&request.monitor).await?;
        let socket = self.socket_dir.join(&request.name).join(SOCKET_NAME);
        let wanted = AdoptionRequest {
            node: request.node.clone(),
            volume: request.name.clone(),
            export: ExportAddress { socket: socket.clone(), name: request.name.clone() },
            accept_option_loss: request.accept_option_loss,
            format: request.format.clone(),
            reconnect_seconds: self.config.reconnect_delay_seconds,
        };
        let plan = Plan::adopt(&vm.qmp, &vm.sources, &wanted).await.map_err(|error| of_vm(&error))?;
        let size_advertised = room_to_grow(&plan);
        let mut new = NewVolume {
            name: request.name.clone(),
            backend: BackendSpec::file(&plan.disk.image).with_cache(cache_of(&plan.disk)),
            export: format!("nbd+unix:///{}?socket={}", request.name, socket.display()),
            read_only: false,
            socket_owner: vm.owner,
            adoption: Some(AdoptionDocument {
                monitor: request.monitor.clone(),
                node: request.node.clone(),
                format: plan.disk.format.clone(),
                size_advertised,
                direction: AdoptionDirection::Adopting,
                plan: plan.clone(),
            }),
        };
        self.refuse_known(&new)?;
        // A container ends where it ends today.
        if size_advertised.is_none() {
            last_sector::fill_up(&plan.disk)?;
            new.backend = suited(new.backend, &*self.backends)?;
        }
        let open_options = BackendOpenOptions {
            size_advertised: size_advertised.map(block::Bytes),
            qemu: QemuRule::Later,
            moved: if request.accept_tombstone { MovedRule::AcceptUnknown } else { MovedRule::Refuse },
            ..BackendOpenOptions::default()
        };
        let volume = self.make_volume(new, open_options).await?;
        let _operation = volume.operation.lock().await;
        if let Err(error) = require_same_image(&volume, &plan) {
            self.drop_volume(&volume).await?;
            return Err(of_vm(&error));
        }
        let mut surroundings = VolumeSurroundings::new(&volume);
        match vm::adopt(&vm.qmp, &plan, &mut surroundings).await {
            Ok(stopped_for) => {
                set_state(&volume, AdoptionDirection::Adopted, None).await?;
                ended::watch_end(self, &volume);
                Ok(self.with_stop(volume.show(), stopped_for))
            }
            Err(error) => {
                let answer = of_vm(&error);
                if error.leaves_doubt() {
                    self.settle_later(&volume);
                } else {
                    self.drop_volume(&volume).await?;
                }
                Err(answer)
            }
        }
    }

    /// Gives a disk back to its VM. When this fails, it stays adopted.
    pub(crate) async fn release(self: &Arc<Self>, name: &str) -> Result<v1::Volume> {
        let volume = self.volume(name)?;
        let _operation = volume.begin_operation(&*self.env).await?;
        self.release_alone(&volume).await
    }

    /// The same of a volume with which nothing else is under way.
    pub(crate) async fn release_alone(self: &Arc<Self>, volume: &Arc<Volume>) -> Result<v1::Volume> {
        let name = &volume.name;
        let document = volume.document();
        let Some(adoption) = &document.adoption else {
            let message = format!("{name} was not adopted from a VM");
            return Err(
                Error::new(ErrorCode::WrongState, message).with_hint(format!("use `transhume volume detach {name}`"))
            );
        };
        volume.refuse_moving()?;
        crate::stack::require_complete_backend(&document, "transhume release")?;
        crate::stack::require_no_cache(&document)?;
        let shown = volume.show();
        if volume.slot().is_none() {
            self.release_down(volume, adoption).await?;
            self.remove_volume(volume).await?;
            self.let_go_elsewhere(&document).await;
            return Ok(shown);
        }
        let vm = match self.reach_adopted(volume, adoption).await? {
            Reached::Adopted(vm) => vm,
            // A VM that has gone has nothing to be given back to.
            Reached::Successor(_) | Reached::Nobody => {
                self.remove_volume(volume).await?;
                self.let_go_elsewhere(&document).await;
                return Ok(shown);
            }
        };
        let image = require_local(&document.backend, "its disk cannot be given back to its VM")?;
        require_name(volume)?;
        force_reconnect(volume, &vm, adoption).await;
        self.uncover(volume, adoption, &vm).await?;
        let is_block_device = volume.with_backend(|open_backend| open_backend.is_block_device()).unwrap_or_default();
        let driver = if is_block_device { "host_device" } else { "file" };
        let guest_runs = vm::Graph::read(&vm.qmp).await.map_err(|error| of_vm(&error))?.is_running;
        let plan = Plan::release(&adoption.plan.disk, image.path(), Some(driver), guest_runs);
        set_state(volume, AdoptionDirection::Releasing, Some(plan.clone())).await?;
        let mut surroundings = VolumeSurroundings::new(volume);
        let stopped_for = match vm::release(&vm.qmp, &plan, &mut surroundings).await {
            Ok(stopped_for) => stopped_for,
            Err(error) => {
                if error.leaves_doubt() {
                    self.settle_later(volume);
                } else {
                    set_state(volume, AdoptionDirection::Adopted, None).await?;
                }
                return Err(of_vm(&error));
            }
        };
        self.remember(&plan);
        self.drop_volume(volume).await?;
        Ok(self.with_stop(shown, stopped_for))
    }

    /// A volume as it is shown to the caller that has had it adopted or released. It includes the time that the guest
    /// was stopped, which the audit log keeps.
    fn with_stop(&self, mut shown: v1::Volume, stopped_for: Option<Duration>) -> v1::Volume {
        let stopped_us = stopped_for.map(|span| u64::try_from(span.as_micros()).unwrap_or(u64::MAX));
        if let Some(stopped_us) = stopped_us {
            let cost = serde_json::json!({ "stopped_us": stopped_us });
            self.audit.record(self.env.wall_clock(), &Peer::daemon(), ("guest.stopped", &shown.name), cost, None);
        }
        if let Some(vm) = &mut shown.vm {
            vm.stopped_us = stopped_us;
        }
        shown
    }

    /// Removes a volume that QEMU has just let go of.
    async fn drop_volume(&self, volume: &Volume) -> Result<()> {
        let start = self.env.now();
        while volume.connections() > 0 && self.env.now().since(start) < HANG_UP_LIMIT {
            self.env.sleep(INTERVAL).await;
        }
        self.remove_volume(volume).await.map(drop)
    }

    /// Finds out in the background what a plan has come to whose end is in doubt.
    fn settle_later(self: &Arc<Self>, volume: &Arc<Volume>) {
        let (daemon, volume) = (Arc::clone(self), Arc::clone(volume));
        tokio::spawn(async move { recover(&daemon, &volume).await });
    }
}

/// Makes QEMU connect to the export again after a restart. Its NBD client notices that the connection is gone only when
/// the guest asks for something. An idle guest asks for nothing, so this function reads a sector instead.
async fn force_reconnect(volume: &Volume, vm: &monitor::Vm, adoption: &AdoptionDocument) {
    if volume.connections() > 0 {
        return;
    }
    let line = format!("qemu-io {} \"read 0 512\"", adoption.plan.disk.nodes.nbd);
    let arguments = serde_json::json!({ "command-line": line });
    if let Err(error) = vm.qmp.execute("human-monitor-command", arguments).await {
        tracing::warn!(volume = volume.name, %error, "QEMU could not be asked to connect again");
    }
}

/// Refuses to have QEMU open the image by a name that leads to something else by now. The right one is still open here, so a
/// move saves its bytes.
fn require_name(volume: &Volume) -> Result<()> {
    let checked = volume.with_backend(|open_backend| open_backend.require_name()).unwrap_or(Ok(()));
    checked.map_err(|error| {
        let name = &volume.name;
        of_backend(&error, "the image").with_hint(format!(
            "the guest's bytes are in the file that is still open here: `transhume move {name} --to file:NEW` brings them to \
             another one, and {name} can be released from there; do not restart the daemon before"
        ))
    })
}

/// Refuses an image that was replaced between the look at QEMU's process and its opening here.
fn require_same_image(volume: &Volume, plan: &Plan) -> vm::Result<()> {
    let opened = volume.with_backend(|open_backend| open_backend.metadata()).flatten();
    match (opened, plan.disk.process_id) {
        (Some(opened), Some(pid)) => vm::require_writer(pid, &opened, &plan.disk.image),
        _ => Ok(()),
    }
}

/// Records which way it goes, and by which plan if that is another one.
async fn set_state(volume: &Volume, direction: AdoptionDirection, plan: Option<Plan>) -> Result<()> {
    let change = |document: &mut VolumeDocument| {
        if let Some(adoption) = &mut document.adoption {
            adoption.direction = direction;
            if let Some(plan) = plan {
                adoption.plan = plan;
            }
        }
    };
    volume.journal.update(change).await.map_err(|error| of_backend(&error, "the volume's journal"))
}

/// How an adopted disk is reached: as QEMU reached it, so that a guest whose host caches its disk keeps that. Past the
/// page cache means where the file system can do that.
pub(crate) fn cache_of(disk: &vm::AdoptedDisk) -> CacheMode {
    match disk.options.file.get("cache").and_then(|cache| cache["direct"].as_bool()) {
        Some(false) => CacheMode::Page,
        Some(true) | None => CacheMode::Auto,
    }
}

/// How large a container may become: all of its disk written, its metadata, and as much again for snapshots in it. A
/// raw image does not grow.
fn room_to_grow(plan: &Plan) -> Option<u64> {
    (plan.disk.format != "raw").then(|| {
        let disk = plan.disk.disk_bytes.unwrap_or_default().max(plan.disk.image_bytes.unwrap_or_default());
        (2 * disk + (1 << 30)).next_multiple_of(1 << 20)
    })
}

fn show(vm: &str, report: vm::DiskReport) -> CheckedDisk {
    let (adoptable, reasons, mut notes) = match report.verdict {
        Adoptability::Adoptable { form, options_from } => {
            (true, Vec::new(), vec![format!("by {form}; its options are known from {options_from:?}")])
        }
        Adoptability::LosesOptions { unknown, .. } => {
            (false, vec![format!("with --accept-option-loss only; not known: {}", unknown.join(", "))], Vec::new())
        }
        Adoptability::Refused { reason } => (false, vec![reason], Vec::new()),
        Adoptability::Adopted => (false, vec!["it is adopted already".to_owned()], Vec::new()),
    };
    notes.extend(report.iothread.map(|iothread| format!("served by the iothread {iothread}")));
    notes.extend(report.throttle_group.map(|group| format!("in the throttle group {group}")));
    CheckedDisk {
        vm: vm.to_owned(),
        node: report.node,
        device: format!("{}, {}", report.device, report.device_type),
        format: report.format,
        file: PathBuf::from(&report.image).display().to_string(),
        size_bytes: report.bytes.unwrap_or_default(),
        adoptable,
        reasons,
        notes,
    }
}
