//! A guest's memory that lies in files which its QEMU has mapped shared: it can be copied from outside. What of a machine stands against
//! that is told by one reason.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::backends::MemoryBackend;
use super::description::MachineDescription;
use super::facts::MachineFacts;
use super::words::parse;
use crate::error::{Error, Result};
use crate::qmp::Qmp;

/// What the library is called to that a QEMU is started with (`crates/preload`).
const SOCKET_VARIABLE: &str = "TRANSHUME_PRELOAD_SOCKET";
/// Devices and backends by which others write to the guest's memory through mappings of their own, or to pages that they hold.
const FOREIGN: [&str; 3] = ["vhost-user", "vhost-vdpa", "vfio"];

/// A part of a guest's memory in a file of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedMemory {
    /// The id of its `-object`.
    pub id: String,
    /// The file, or the folder in which QEMU has made it.
    pub path: String,
    /// How long it is, in bytes.
    pub bytes: u64,
}

/// The files that all of the memory of the machine of `facts` is in.
///
/// # Errors
/// `Refused` with why it cannot be copied from outside.
pub fn shared_memory(facts: &MachineFacts, description: &MachineDescription) -> Result<Vec<SharedMemory>> {
    if let Some(missing) =
        ["x-ignore-shared"].into_iter().find(|name| !facts.capabilities.iter().any(|one| one == name))
    {
        return Err(Error::refused(format!("QEMU {} has no migration capability {missing}", facts.version)));
    }
    if let Some(foreign) = foreign(description, facts) {
        return Err(Error::refused(format!("{foreign} writes to the guest's memory past QEMU")));
    }
    let mut found = Vec::new();
    for backend in &facts.memory_backends {
        let MemoryBackend { id, bytes, .. } = backend;
        let Some(path) = &backend.path else {
            return Err(Error::refused(format!("the memory {id} is in no file (-object memory-backend-file)")));
        };
        if !backend.is_shared {
            return Err(Error::refused(format!("the memory {id} is not shared (share=on)")));
        }
        if !named_in(description, id) {
            return Err(Error::refused(format!(
                "the memory {id} is not on the command line as -object memory-backend-file"
            )));
        }
        found.push(SharedMemory { id: id.clone(), path: path.display().to_string(), bytes: *bytes });
    }
    let covered: u64 = found.iter().map(|backend| backend.bytes).sum();
    if found.is_empty() || covered != facts.memory_bytes {
        let context = format!("{covered} of {} bytes of memory are in shared files", facts.memory_bytes);
        return Err(Error::refused(context));
    }
    found.sort_by(|one, other| one.id.cmp(&other.id));
    Ok(found)
}

/// The names of the block nodes that read past the page cache into the guest's memory, exports of ours aside: such a read writes to
/// pages that the kernel holds.
///
/// # Errors
/// What QMP says.
pub async fn direct_nodes(qmp: &Qmp) -> Result<Vec<String>> {
    let said = qmp.execute("query-named-block-nodes", json!({ "flat": true })).await?;
    Ok(direct(&said))
}

fn direct(said: &Value) -> Vec<String> {
    let nodes = said.as_array().into_iter().flatten();
    let is_direct = |node: &&Value| {
        let options = node["file"].as_str().unwrap_or_default();
        let is_file = ["file", "host_device", "host_cdrom"].iter().any(|driver| node["drv"] == *driver);
        let is_ring = options.contains("\"aio\": \"io_uring\"") || options.contains("\"aio\": \"native\"");
        is_file && (node["cache"]["direct"] == true || is_ring)
    };
    nodes.filter(is_direct).filter_map(|node| node["node-name"].as_str().map(str::to_owned)).collect()
}

/// Where the library that a QEMU was started with listens, if it has one.
#[must_use]
pub fn preload_socket(pid: u32) -> Option<PathBuf> {
    let environment = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
    let text = String::from_utf8(environment).ok()?;
    let found = text.split('\0').find_map(|entry| entry.strip_prefix(SOCKET_VARIABLE)?.strip_prefix('='));
    found.filter(|path| path.starts_with('/')).map(PathBuf::from)
}

/// What of a machine writes to its memory past QEMU's own mapping.
fn foreign(description: &MachineDescription, facts: &MachineFacts) -> Option<String> {
    let is_foreign = |text: &&String| FOREIGN.iter().any(|name| text.contains(name));
    let mut words =
        parse(&description.words).into_iter().filter(|item| ["device", "netdev", "chardev"].contains(&item.name()));
    let word = words.find(|item| is_foreign(&&item.value().to_owned())).map(|item| item.show());
    word.or_else(|| facts.devices.iter().find(is_foreign).cloned())
}

fn named_in(description: &MachineDescription, id: &str) -> bool {
    parse(&description.words).iter().filter(|item| item.name() == "object").any(|item| {
        let pairs = item.pairs();
        let has =
            |keys: &[&str], value: &str| pairs.iter().any(|(key, is)| keys.contains(&key.as_str()) && is == value);
        has(&["type", "qom-type"], "memory-backend-file") && has(&["id"], id)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn description(words: &[&str]) -> MachineDescription {
        let words = words.iter().map(|&word| word.to_owned()).collect();
        MachineDescription { program: "/usr/bin/qemu-system-x86_64".to_owned(), words }
    }

    #[test]
    fn a_backend_is_found_by_its_id_however_it_is_written() {
        let plain = description(&["-object", "memory-backend-file,id=ram,size=1G,share=on,mem-path=/dev/shm/a"]);
        assert!(named_in(&plain, "ram") && !named_in(&plain, "a"));
        let json = description(&["-object", r#"{"qom-type":"memory-backend-file","id":"ram","share":true}"#]);
        assert!(named_in(&json, "ram"));
        assert!(!named_in(&description(&["-object", "memory-backend-memfd,id=ram,share=on"]), "ram"));
    }

    #[test]
    fn nodes_past_the_page_cache_are_told() {
        let said = json!([
            { "node-name": "a", "drv": "file", "cache": { "direct": true }, "file": "/a" },
            { "node-name": "b", "drv": "file", "cache": { "direct": false }, "file": "/b" },
            { "node-name": "c", "drv": "file", "cache": { "direct": false }, "file": "json:{\"aio\": \"io_uring\"}" },
            { "node-name": "d", "drv": "nbd", "cache": { "direct": true }, "file": "nbd+unix://" },
        ]);
        assert_eq!(direct(&said), ["a", "c"]);
    }
}
