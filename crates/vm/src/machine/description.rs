//! What a QEMU is started with, and what must differ for the same machine on another host.
//!
//! The guest must find the same devices, so every word stays that does not name something of this host: its images,
//! its sockets, its terminal. What is changed is told, word for word, so that an operator can check it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::disks;
use super::rewrite::Rewriter;
use super::words::{parse, unparse};
use crate::error::Result;
use crate::plan::ExportAddress;

/// What a QEMU is started with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineDescription {
    /// The program, by its whole path.
    pub program: String,
    /// Its words, without the program.
    pub words: Vec<String>,
}

/// Where the machine's things are at the target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetPlaces {
    /// Where its sockets and logs go: a folder of this machine's own. Its path is short, because a socket's may have
    /// no more than 107 bytes.
    pub folder: PathBuf,
    /// Its disks. All that it writes to must be here.
    pub disks: Vec<TargetDisk>,
    /// The versioned name of its type ([`MachineFacts`](super::MachineFacts)). An alias such as `q35` means another
    /// machine in another version of QEMU.
    pub machine_type: Option<String>,
    /// Its memory, as far as it is to lie in files that the target has made.
    pub memory: Vec<TargetMemory>,
}

/// A part of the machine's memory, and the file that it is in at the target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetMemory {
    /// The id of its `-object memory-backend-file`.
    pub id: String,
    /// The file.
    pub path: PathBuf,
}

/// A disk of the machine, and where it is at the target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetDisk {
    /// The image's name, as the command line gives it.
    pub image: String,
    /// The name of its format node (of its only node, if it has one), or its `-drive`'s id, as the command line gives
    /// it. It counts more than the image: a disk that has moved before has another image than the command line says.
    pub node: String,
    /// Its format as it was adopted, where that is known: a `-drive` that does not name it is given it, and is not probed.
    pub format: Option<String>,
    /// The export that the target's QEMU opens instead.
    pub export: ExportAddress,
}

/// What starts the machine at the target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetCommand {
    /// The program.
    pub program: String,
    /// Its words, without the program.
    pub words: Vec<String>,
    /// What differs from the source.
    pub changes: Vec<Change>,
    /// The socket of the monitor that is ours there.
    pub monitor: PathBuf,
}

/// One difference between the source's words and the target's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// The option, such as `-drive`.
    pub option: String,
    /// What it said; empty if it was not there.
    pub from: String,
    /// What it says; empty if it is not there any more.
    pub to: String,
    /// Why.
    pub why: String,
}

impl TargetCommand {
    /// The same with `program`, which is what the target has of the source's.
    #[must_use]
    pub fn run_by(mut self, program: &Path) -> Self {
        let own = program.display().to_string();
        if own != self.program {
            let why = "the target's configuration says so".to_owned();
            self.changes.push(Change { option: "(program)".to_owned(), from: self.program, to: own.clone(), why });
            self.program = own;
        }
        self
    }
}

impl MachineDescription {
    /// What the process `pid` was started with; `None` if it is no QEMU. A relative path in it counts from the folder
    /// that this QEMU was started in.
    ///
    /// # Errors
    /// The process is gone, or may not be looked at; its words are not UTF-8.
    pub fn of_process(pid: u32) -> io::Result<Option<Self>> {
        let bytes = fs::read(format!("/proc/{pid}/cmdline"))?;
        let text = String::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        let mut words = text.strip_suffix('\0').unwrap_or(&text).split('\0').map(str::to_owned);
        let called = words.next().unwrap_or_default();
        let program = fs::read_link(format!("/proc/{pid}/exe"))?;
        let program = program.to_str().ok_or_else(|| io::Error::other("the program's path is not UTF-8"))?;
        // What an upgrade of the package has replaced; its successor has the same path.
        let program = program.strip_suffix(" (deleted)").unwrap_or(program);
        let is_qemu = |path: &str| {
            let name = Path::new(path).file_name().and_then(|name| name.to_str()).unwrap_or_default();
            name.starts_with("qemu") || name == "kvm"
        };
        let found = Self { program: program.to_owned(), words: words.collect() };
        Ok((is_qemu(&found.program) || is_qemu(&called)).then_some(found))
    }

    /// What starts the same machine at the target: it waits for the migration and does not run by itself.
    ///
    /// # Errors
    /// `Refused` for what cannot be had there, by its option and with what to do instead; `NotFound` for a disk that
    /// the words do not name; `Invalid` for a folder that is no place for sockets.
    pub fn for_target(&self, places: &TargetPlaces) -> Result<TargetCommand> {
        let mut items = parse(&self.words);
        let mut rewriter = Rewriter::new(places)?;
        rewriter.refuse(&items)?;
        rewriter.changes.extend(disks::point_to_exports(&mut items, &places.disks)?);
        let items = rewriter.rewrite(items)?;
        rewriter.check_memory()?;
        let monitor = rewriter.monitor.clone();
        Ok(TargetCommand { program: self.program.clone(), words: unparse(&items), changes: rewriter.changes, monitor })
    }
}

#[cfg(test)]
#[path = "description_tests.rs"]
mod tests;
