//! What an earlier version has left behind, in a folder of its own.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde_json::Value;
use transhume_guest::Daemon;

use super::tool;

/// A slot of a journal, as docs/journal.md draws it.
const SLOT_BYTES: usize = 65536;
/// Where a slot's document begins.
const DOCUMENT_AT: usize = 32;
/// Where the boot's identity is in a progress map, and where the checksum of what is before it.
const BOOT_AT: usize = 24;
const MAP_CHECK_AT: usize = 56;

/// Daemons that were killed in some stage, and their files.
pub(crate) struct Left {
    /// The daemons before their folder, so that they are gone first.
    daemons: Vec<(String, Daemon)>,
    ports: Vec<(String, u16)>,
    folder: tempfile::TempDir,
}

impl Left {
    /// Unpacks `archive`, and has what it says of its own place and boot be true of this one.
    pub(crate) fn unpack(archive: &Path) -> Self {
        let folder = tempfile::Builder::new().prefix("th").tempdir().expect("a temporary directory");
        let root = folder.path().display().to_string();
        tool("tar", &["-C", &root, "-xzf", &archive.display().to_string()]);
        let about: Value =
            serde_json::from_slice(&std::fs::read(folder.path().join("about.json")).expect("read")).expect("JSON");
        let old = about["root"].as_str().expect("text").to_owned();
        let mut replaced = vec![(old.clone(), root)];
        let mut ports = Vec::new();
        for (host, port) in ["a", "b"].iter().zip(about["stage"]["ports"].as_array().into_iter().flatten()) {
            let new = transhume_guest::free_port().expect("a port");
            replaced.push((format!("127.0.0.1:{port}"), format!("127.0.0.1:{new}")));
            ports.push(((*host).to_owned(), new));
        }
        for path in files(folder.path()) {
            settle(&path, &replaced);
        }
        Self { daemons: Vec::new(), ports, folder }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// What the guest must read.
    pub(crate) fn expected(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).expect("read")
    }

    /// Where a volume of the first host is served.
    pub(crate) fn uri(&self, name: &str) -> String {
        format!("nbd+unix:///{name}?socket={}", self.path(&format!("{name}.sock")).display())
    }

    /// Starts a daemon of this version over what `host` had.
    pub(crate) fn start(&mut self, host: &str) {
        let programs = Path::new(env!("CARGO_BIN_EXE_transhumed")).parent().expect("in a directory");
        let mut daemon = Daemon::new(programs, &self.path(host));
        let config = self.path(host).join("config.toml");
        if config.exists() {
            daemon.arguments = vec!["--config".to_owned(), config.display().to_string()];
        }
        daemon.start().expect("the daemon starts");
        self.daemons.push((host.to_owned(), daemon));
    }

    /// Starts both hosts, and tells the first where the second is now.
    pub(crate) fn start_hosts(&mut self) {
        self.start("b");
        self.start("a");
        let (_, port) = self.ports.iter().find(|(host, _)| host == "b").expect("it has two hosts");
        let address = format!("127.0.0.1:{port}");
        self.daemon("a").json(&["trust", "--change", "b", "--address", &address]).expect("changed");
    }

    pub(crate) fn daemon(&self, host: &str) -> &Daemon {
        &self.daemons.iter().find(|(name, _)| name == host).expect("it was started").1
    }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("listed").flatten();
    entries.flat_map(|entry| if entry.path().is_dir() { files(&entry.path()) } else { vec![entry.path()] }).collect()
}

/// Has the file at `path` say what is true in this place and this boot.
fn settle(path: &Path, replaced: &[(String, String)]) {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut bytes = std::fs::read(path).expect("read");
    match name.as_str() {
        "journal" => bytes.chunks_mut(SLOT_BYTES).for_each(|slot| settle_slot(slot, replaced)),
        "progress" => settle_map(&mut bytes),
        _ if name.ends_with(".json") || name.ends_with(".toml") => {
            bytes = replace(&String::from_utf8(bytes).expect("text"), replaced).into_bytes();
        }
        _ => return,
    }
    std::fs::write(path, bytes).expect("written");
}

fn replace(text: &str, replaced: &[(String, String)]) -> String {
    replaced.iter().fold(text.to_owned(), |text, (old, new)| text.replace(old, new))
}

fn settle_slot(slot: &mut [u8], replaced: &[(String, String)]) {
    if !slot.starts_with(b"TRANSHUJ") {
        return;
    }
    let length = u32::from_le_bytes(slot[12..16].try_into().expect("four bytes")) as usize;
    let document = String::from_utf8(slot[DOCUMENT_AT..DOCUMENT_AT + length].to_vec()).expect("JSON");
    let mut document: Value = serde_json::from_str(&replace(&document, replaced)).expect("JSON");
    settle_identities(&mut document);
    let document = document.to_string().into_bytes();
    slot[DOCUMENT_AT..].fill(0);
    slot[DOCUMENT_AT..DOCUMENT_AT + document.len()].copy_from_slice(&document);
    slot[12..16].copy_from_slice(&(document.len() as u32).to_le_bytes());
    let mut check = crc32fast::Hasher::new();
    check.update(&slot[..24]);
    check.update(&slot[28..DOCUMENT_AT]);
    check.update(&document);
    slot[24..28].copy_from_slice(&check.finalize().to_le_bytes());
}

/// Has every file that is on record with its identity be known by the one that it has here.
fn settle_identities(value: &mut Value) {
    let place = value["spec"].as_str().and_then(|spec| spec.strip_prefix("file:")).map(str::to_owned);
    if let (Some(place), Some(identity)) = (place, value.get_mut("identity").filter(|identity| !identity.is_null())) {
        let file = std::fs::metadata(place.split(',').next().expect("a path")).expect("it was unpacked");
        let born = file.created().ok().and_then(|born| born.duration_since(std::time::UNIX_EPOCH).ok());
        identity["device"] = file.dev().into();
        identity["inode"] = file.ino().into();
        identity["born_ns"] = born.map(|born| born.as_nanos() as u64).into();
    }
    match value {
        Value::Object(fields) => fields.values_mut().for_each(settle_identities),
        Value::Array(items) => items.iter_mut().for_each(settle_identities),
        _ => {}
    }
}

fn settle_map(map: &mut [u8]) {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("read");
    let boot: uuid::Uuid = boot.trim().parse().expect("an identity");
    map[BOOT_AT..BOOT_AT + 16].copy_from_slice(boot.as_bytes());
    let check = crc32fast::hash(&map[..MAP_CHECK_AT]);
    map[MAP_CHECK_AT..MAP_CHECK_AT + 4].copy_from_slice(&check.to_le_bytes());
}
