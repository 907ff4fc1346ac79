//! A disk that QEMU was started on through our export, at the host that its machine has moved to, as one that could have been
//! adopted there: so it is released in the same way, with the options that its file had where the machine was started first.

use std::path::Path;

use serde_json::{Map, Value};

use crate::disk::{Disk, Form};
use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::machine::MachineDescription;
use crate::options::{CommandLine, DiskOptions, Sources};
use crate::plan::{AdoptedDisk, AdoptionRequest, Direction, Plan, Step, adoption_steps, arrived, describe};
use crate::qmp::Qmp;

/// Where a disk that has come is now, and what it was.
#[derive(Clone, Copy, Debug)]
pub struct ArrivedImage<'a> {
    /// The file or block device that holds it here.
    pub image: &'a Path,
    /// `file` or `host_device`.
    pub driver: &'a str,
    /// The command line with which its machine was started first.
    pub first_started: &'a MachineDescription,
}

/// Whether a disk waits for its export while that is away.
#[derive(Clone, Debug, PartialEq)]
pub enum ExportWait {
    /// It does.
    Waits,
    /// It does once this is carried out.
    Planned(Box<Plan>),
    /// Nobody can say, and why: the guest may see errors when the export goes away.
    Unknown(String),
}

impl Plan {
    /// What an adoption of a disk would have come to that is reached through our export from the beginning.
    ///
    /// # Errors
    /// `NotFound`; `Refused` if its nodes are none that can be given another file in place; `OptionLoss`; what QMP says.
    pub async fn of_arrived(qmp: &Qmp, request: &AdoptionRequest, image: ArrivedImage<'_>) -> Result<Self> {
        let graph = Graph::read(qmp).await?;
        let mut disk = Disk::find(qmp, &graph, &request.node).await?;
        let nbd = disk.file.clone();
        if nbd.driver != "nbd" {
            return Err(Error::refused(format!("{} is not reached through an export", request.node)));
        }
        if disk.form != Form::Reopen {
            let context = format!("{} has no format node with a name, which could be opened over a file", request.node);
            return Err(Error::refused(context));
        }
        disk.file.driver = image.driver.to_owned();
        let options = first_options(&mut disk, CommandLine::parse(&image.first_started.words));
        options.require_complete()?;
        disk.file.filename = image.image.display().to_string();
        let adopted: AdoptedDisk = arrived(&disk, &nbd.name, options, request, qmp.process_id());
        let image = adopted.image.clone();
        let (steps, undo) = (Vec::new(), Vec::new());
        Ok(Self { direction: Direction::Adopt, disk: adopted, image, steps, undo, resumes: graph.is_running })
    }

    /// Plans that a disk waits for its export while that is away. libvirt 9 cannot say so: the guest would see errors
    /// whenever the daemon is started again.
    ///
    /// # Errors
    /// `NotFound`; `Refused` if it is not on an export, or a node has the name of the new one; `OptionLoss`; what QMP says.
    pub async fn await_export(qmp: &Qmp, sources: &Sources, request: &AdoptionRequest) -> Result<ExportWait> {
        let graph = Graph::read(qmp).await?;
        let by_libvirt = sources.libvirt.as_ref().and_then(|domain| domain.alias_of(&request.node));
        let disk = Disk::find(qmp, &graph, by_libvirt.unwrap_or(&request.node)).await?;
        if disk.file.driver != "nbd" {
            return Err(Error::refused(format!("{} is not reached through an export", request.node)));
        }
        let Some(line) = &sources.command_line else {
            return Ok(ExportWait::Unknown("QEMU's command line cannot be read".to_owned()));
        };
        let options = match DiskOptions::of_unawaited_export(&disk, line) {
            Ok(Some(options)) => options,
            Ok(None) => return Ok(ExportWait::Waits),
            Err(why) => return Ok(ExportWait::Unknown(why)),
        };
        options.require_complete()?;
        let adopted = describe(&disk, options, request, &graph, qmp.process_id())?;
        let (mut steps, mut undo) = adoption_steps(&adopted, request.reconnect_seconds);
        // QEMU had no lock that this daemon would take over.
        steps.retain(|step| *step != Step::TakeLocks);
        undo.retain(|step| *step != Step::DropLocks);
        let image = adopted.image.clone();
        let plan = Self { direction: Direction::Adopt, disk: adopted, image, steps, undo, resumes: graph.is_running };
        Ok(ExportWait::Planned(Box::new(plan)))
    }
}

/// The options that the disk's file had on the first command line, whichever that was.
fn first_options(disk: &mut Disk, line: CommandLine) -> DiskOptions {
    let named = |key: &str, of: &Map<String, Value>| of.get(key).and_then(Value::as_str).map(str::to_owned);
    let first = line.blockdev(&disk.format.name).and_then(|format| match format.get("file")? {
        Value::String(name) => Some((Some(name.clone()), named("filename", line.blockdev(name)?)?)),
        Value::Object(file) => Some((None, named("filename", file)?)),
        _ => None,
    });
    if let Some((name, image)) = first {
        disk.file.name = name.unwrap_or_else(|| disk.file.name.clone());
        disk.file.filename = image;
    }
    DiskOptions::gather(disk, &Sources { command_line: Some(line), ..Sources::default() })
}
