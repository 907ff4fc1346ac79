//! The words that are not about disks: sockets, logs, the terminal, and how QEMU begins.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::description::{Change, TargetMemory, TargetPlaces};
use super::migration::SOCKET_PATH_BYTES_MAX;
use super::words::{Item, Pieces, escaped, json_object};
use crate::error::{Error, ErrorKind, Result};

/// Our own monitor's socket, in the machine's folder.
const MONITOR: &str = "transhume.qmp";
const HOOK: &str = "start the target with a hook of your own";
const TERMINAL: &str = "nobody is at the target's terminal";
const PLACED: &str = "it is in the machine's own folder at the target";

/// Options that have a character device's short form as their value.
const SHORT_FORMS: [&str; 7] = ["serial", "parallel", "monitor", "qmp", "qmp-pretty", "debugcon", "gdb"];

/// Rewrites one command line.
pub(super) struct Rewriter<'a> {
    folder: &'a str,
    machine_type: Option<&'a str>,
    /// The files of its memory that no word has named yet.
    memory: Vec<&'a TargetMemory>,
    /// The names in the folder that are in use.
    names: BTreeSet<String>,
    pub(super) monitor: PathBuf,
    pub(super) changes: Vec<Change>,
}

impl<'a> Rewriter<'a> {
    pub(super) fn new(places: &'a TargetPlaces) -> Result<Self> {
        let shown = places.folder.display();
        let folder = places.folder.to_str().filter(|_| places.folder.is_absolute());
        let folder = folder.ok_or_else(|| Error::new(ErrorKind::Invalid, format!("{shown} is no absolute path")))?;
        let mut this = Self {
            folder,
            machine_type: places.machine_type.as_deref(),
            memory: places.memory.iter().collect(),
            names: BTreeSet::new(),
            monitor: PathBuf::new(),
            changes: Vec::new(),
        };
        this.monitor = this.place_socket(MONITOR)?.into();
        Ok(this)
    }

    /// Refuses what cannot be had at another host.
    pub(super) fn refuse(&self, items: &[Item]) -> Result<()> {
        let is_libvirts = |item: &&Item| item.name() == "chardev" && item.value().contains("id=charmonitor");
        if items.iter().find(is_libvirts).is_some() {
            let context = "libvirt has started this QEMU and passes it open files: migrate the domain with libvirt";
            return Err(Error::refused(context));
        }
        for item in items {
            let pairs = item.pairs();
            let has = |names: &[&str]| pairs.iter().find(|(key, _)| names.contains(&key.as_str()));
            let kind = pairs.iter().find(|(key, _)| key == "type" || key == "qom-type").map_or("", |(_, value)| value);
            let reason = match item.name() {
                "add-fd" => Some("it is an open file of this process".to_owned()),
                "netdev" | "net" | "nic" | "chardev" | "device" | "object" => {
                    has(&["fd", "fds", "vhostfd", "vhostfds"])
                        .map(|(key, _)| format!("{key}= is an open file of this process"))
                        .or_else(|| secret(item, kind, has(&["file"]).is_some()))
                }
                "snapshot" => Some("its disks' writes are in temporary files of this host".to_owned()),
                "readconfig" => Some("what that file says of disks and sockets is not read".to_owned()),
                "drive" | "blockdev" if item.value().contains("/dev/fdset/") => {
                    Some("a descriptor set is of this process".to_owned())
                }
                _ => None,
            };
            if let Some(reason) = reason {
                return Err(Error::refused(format!("{}: {reason}; {HOOK}", item.show())));
            }
        }
        Ok(())
    }

    /// The words for the target.
    pub(super) fn rewrite(&mut self, items: Vec<Item>) -> Result<Vec<Item>> {
        let has = |name: &str| items.iter().any(|item| item.name() == name);
        let has_device = |name: &str| items.iter().any(|item| item.name() == "device" && is_device(item, name));
        let mut added = Vec::new();
        if has("nographic") && !has("nodefaults") {
            // Without these, -nographic has a serial line and a monitor at the terminal.
            if !has("serial") && !has_device("isa-serial") {
                added.push(Item::new("-serial", Some("null")));
            }
            if !has("monitor") {
                added.push(Item::new("-monitor", Some("none")));
            }
        }
        let is_graphic = has("curses") || has("sdl");
        let is_headless = ["display", "nographic", "vnc", "spice"].into_iter().any(has);
        if is_graphic || !is_headless {
            added.push(Item::new("-display", Some("none")));
        }
        for item in &added {
            self.note(item.option.as_deref().unwrap_or_default(), "", item.value(), TERMINAL);
        }
        let has_type = items.iter().filter(|item| is_machine(item)).any(|item| type_of(item).is_some());
        if let Some(machine) = self.machine_type.filter(|_| !has_type) {
            added.push(Item::new("-machine", Some(machine)));
            self.note("-machine", "", machine, "the default type may be another one in another QEMU");
        }
        let mut kept = Vec::new();
        for item in items {
            let option = item.option.clone().unwrap_or_default();
            let from = item.value().to_owned();
            let rewritten = self.rewrite_item(item)?;
            match rewritten {
                Rewritten::Kept(item) => kept.push(item),
                Rewritten::Changed(item, why) => {
                    self.note(&option, &from, item.value(), why);
                    kept.push(item);
                }
                Rewritten::Removed(why) => self.note(&option, &from, "", why),
            }
        }
        kept.extend(added);
        let monitor = format!("unix:{},server=on,wait=off", escaped(&self.monitor.display().to_string()));
        let ours = [("-S", None), ("-incoming", Some("defer")), ("-qmp", Some(monitor.as_str()))];
        for (option, value) in ours {
            self.note(option, "", value.unwrap_or_default(), "the machine waits for its memory, and is steered here");
            kept.push(Item::new(option, value));
        }
        Ok(kept)
    }

    fn note(&mut self, option: &str, from: &str, to: &str, why: &str) {
        let change =
            Change { option: option.to_owned(), from: from.to_owned(), to: to.to_owned(), why: why.to_owned() };
        self.changes.push(change);
    }

    fn rewrite_item(&mut self, mut item: Item) -> Result<Rewritten> {
        match item.name() {
            "S" | "incoming" | "loadvm" | "preconfig" => {
                Ok(Rewritten::Removed("the machine comes with its memory, not from the beginning"))
            }
            "daemonize" => Ok(Rewritten::Removed("whoever starts QEMU at the target keeps it as a child")),
            "curses" | "sdl" => Ok(Rewritten::Removed(TERMINAL)),
            "display" => {
                let kind = item.pairs().into_iter().find(|(key, _)| key == "type").map(|(_, kind)| kind);
                let is_terminal = kind.is_some_and(|kind| ["gtk", "sdl", "curses", "cocoa"].contains(&kind.as_str()));
                Ok(if is_terminal { changed(&mut item, "none".to_owned(), TERMINAL) } else { Rewritten::Kept(item) })
            }
            "machine" | "M" => Ok(self.rewrite_machine(item)),
            "D" | "pidfile" => {
                let placed = self.place(item.value());
                Ok(changed(&mut item, placed, PLACED))
            }
            "chardev" => self.rewrite_chardev(item),
            "object" => Ok(self.rewrite_memory(item)),
            "vnc" => match item.value().strip_prefix("unix:").map(Pieces::parse) {
                Some(mut pieces) => {
                    let placed = self.place_socket(pieces.first().unwrap_or_default())?;
                    pieces.set_first(&placed);
                    Ok(changed(&mut item, format!("unix:{}", pieces.join()), PLACED))
                }
                None => Ok(Rewritten::Kept(item)),
            },
            "spice" => {
                let mut pieces = Pieces::parse(item.value());
                let Some(path) = pieces.get("addr").filter(|_| pieces.is_on("unix")).map(str::to_owned) else {
                    return Ok(Rewritten::Kept(item));
                };
                let placed = self.place_socket(&path)?;
                pieces.set("addr", &placed);
                Ok(changed(&mut item, pieces.join(), PLACED))
            }
            name if SHORT_FORMS.contains(&name) => self.rewrite_short_form(item),
            _ => Ok(Rewritten::Kept(item)),
        }
    }

    /// Refuses a memory that no word has named.
    pub(super) fn check_memory(&self) -> Result<()> {
        match self.memory.first() {
            Some(memory) => Err(Error::refused(format!("no -object memory-backend-file is called {}", memory.id))),
            None => Ok(()),
        }
    }

    /// Has a memory of its own file where the target has made it.
    fn rewrite_memory(&mut self, mut item: Item) -> Rewritten {
        let pairs = item.pairs();
        let get =
            |keys: &[&str]| pairs.iter().find(|(key, _)| keys.contains(&key.as_str())).map(|(_, value)| value.as_str());
        if get(&["type", "qom-type"]) != Some("memory-backend-file") {
            return Rewritten::Kept(item);
        }
        let Some(at) = self.memory.iter().position(|memory| Some(memory.id.as_str()) == get(&["id"])) else {
            return Rewritten::Kept(item);
        };
        let path = self.memory.remove(at).path.display().to_string();
        let value = match json_object(item.value()) {
            Some(mut object) => {
                object.insert("mem-path".to_owned(), path.into());
                Value::Object(object).to_string()
            }
            None => {
                let mut pieces = Pieces::parse(item.value());
                pieces.set("mem-path", &path);
                pieces.join()
            }
        };
        changed(&mut item, value, "the memory is copied into this file, which the target has made")
    }

    fn rewrite_machine(&self, mut item: Item) -> Rewritten {
        let (Some(machine), Some(given)) = (self.machine_type, type_of(&item)) else { return Rewritten::Kept(item) };
        if machine == given {
            return Rewritten::Kept(item);
        }
        let mut pieces = Pieces::parse(item.value());
        if pieces.first() == Some(&given) {
            pieces.set_first(machine)
        } else {
            pieces.set("type", machine)
        }
        changed(&mut item, pieces.join(), "the alias may be another machine in another QEMU")
    }

    fn rewrite_chardev(&mut self, mut item: Item) -> Result<Rewritten> {
        let mut pieces = Pieces::parse(item.value());
        let backend = pieces.first().or_else(|| pieces.get("backend")).unwrap_or_default().to_owned();
        let path = pieces.get("path").map(str::to_owned);
        let mut why = None;
        match (backend.as_str(), path) {
            ("stdio", _) => {
                pieces.remove(|key| ["signal", "nosignal", "backend"].contains(&key));
                if pieces.first() == Some("stdio") {
                    pieces.set_first("null")
                } else {
                    pieces.set("backend", "null")
                }
                why = Some(TERMINAL);
            }
            // A socket without a file is in the host's network namespace.
            ("socket", Some(path)) if !pieces.is_on("abstract") => {
                self.place_server(&mut pieces, "path", &path, &item)?;
                why = Some(PLACED);
            }
            ("file", Some(path)) => {
                pieces.set("path", &self.place(&path));
                why = Some(PLACED);
            }
            _ => {}
        }
        if let Some(log) = pieces.get("logfile").map(str::to_owned) {
            pieces.set("logfile", &self.place(&log));
            why = why.or(Some(PLACED));
        }
        Ok(match why {
            Some(why) => changed(&mut item, pieces.join(), why),
            None => Rewritten::Kept(item),
        })
    }

    fn rewrite_short_form(&mut self, mut item: Item) -> Result<Rewritten> {
        let (mux, rest) = match item.value().strip_prefix("mon:") {
            Some(rest) => ("mon:", rest.to_owned()),
            None => ("", item.value().to_owned()),
        };
        if rest == "stdio" || rest.starts_with("stdio,") {
            return Ok(match item.name() {
                "monitor" => changed(&mut item, "none".to_owned(), TERMINAL),
                // Each of these is a device of the guest's.
                "serial" | "parallel" | "debugcon" => changed(&mut item, "null".to_owned(), TERMINAL),
                _ => Rewritten::Removed(TERMINAL),
            });
        }
        if let Some(path) = rest.strip_prefix("file:") {
            let placed = self.place(path);
            return Ok(changed(&mut item, format!("{mux}file:{placed}"), PLACED));
        }
        let Some(socket) = rest.strip_prefix("unix:") else { return Ok(Rewritten::Kept(item)) };
        let mut pieces = Pieces::parse(socket);
        let path = pieces.first().unwrap_or_default().to_owned();
        if item.name() == "qmp" && Path::new(&path).ends_with(MONITOR) {
            return Ok(Rewritten::Removed("an earlier move has added it, and this one adds its own"));
        }
        self.place_server(&mut pieces, "", &path, &item)?;
        Ok(changed(&mut item, format!("{mux}unix:{}", pieces.join()), PLACED))
    }

    /// Gives a listening socket its place; `key` is where its path is, or empty for the first piece.
    fn place_server(&mut self, pieces: &mut Pieces, key: &str, path: &str, item: &Item) -> Result<()> {
        if !pieces.is_on("server") {
            let context = format!("{}: it connects to a program of this host; {HOOK}", item.show());
            return Err(Error::refused(context));
        }
        let placed = self.place_socket(path)?;
        if key.is_empty() {
            pieces.set_first(&placed)
        } else {
            pieces.set(key, &placed)
        }
        // QEMU would wait for a client before our monitor is there.
        if pieces.get("wait") != Some("off") {
            pieces.set("wait", "off");
        }
        Ok(())
    }

    fn place_socket(&mut self, path: &str) -> Result<String> {
        let placed = self.place(path);
        if placed.len() <= SOCKET_PATH_BYTES_MAX {
            return Ok(placed);
        }
        let context = format!("{placed}: longer than the {SOCKET_PATH_BYTES_MAX} bytes of a socket's path");
        Err(Error::new(ErrorKind::Invalid, context))
    }

    /// A path in the folder for what is at `path` here, under its own name if that is free.
    fn place(&mut self, path: &str) -> String {
        let name = Path::new(path).file_name().and_then(|name| name.to_str()).unwrap_or("file").to_owned();
        let mut unique = name.clone();
        let mut count = 1;
        while !self.names.insert(unique.clone()) {
            unique = format!("{name}-{count}");
            count += 1;
        }
        format!("{}/{unique}", self.folder.trim_end_matches('/'))
    }
}

enum Rewritten {
    Kept(Item),
    Changed(Item, &'static str),
    Removed(&'static str),
}

fn changed(item: &mut Item, value: String, why: &'static str) -> Rewritten {
    item.value = Some(value);
    Rewritten::Changed(item.clone(), why)
}

fn secret(item: &Item, kind: &str, has_file: bool) -> Option<String> {
    if item.name() != "object" {
        return None;
    }
    let is_secret = kind == "secret" && has_file || kind.starts_with("tls-creds") || kind == "secret_keyring";
    is_secret.then(|| "its keys are of this host and are not sent".to_owned())
}

fn is_machine(item: &Item) -> bool {
    ["machine", "M"].contains(&item.name())
}

fn type_of(item: &Item) -> Option<String> {
    let pieces = Pieces::parse(item.value());
    is_machine(item).then(|| pieces.get("type").or_else(|| pieces.first()).map(str::to_owned)).flatten()
}

fn is_device(item: &Item, name: &str) -> bool {
    let pairs = item.pairs();
    pairs.iter().any(|(key, value)| ["type", "driver"].contains(&key.as_str()) && value == name)
}
