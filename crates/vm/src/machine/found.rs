//! The QEMUs that run on this host, whoever has started them, and the monitors by which they could be steered.

use std::fs;
use std::path::{Path, PathBuf};

use super::description::MachineDescription;
use super::words::{Item, Pieces, parse};

/// A QEMU that runs on this host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FoundMachine {
    /// Its process.
    pub pid: u32,
    /// Its name, if it was given one.
    pub name: Option<String>,
    /// The unix sockets of its QMP monitors.
    pub monitors: Vec<PathBuf>,
    /// Whether libvirt has started it, and keeps its monitor.
    pub is_libvirts: bool,
}

impl FoundMachine {
    /// Every QEMU that this process may look at, by their numbers.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let mut pids: Vec<u32> = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
        pids.sort_unstable();
        pids.into_iter().filter_map(Self::of_process).collect()
    }

    /// What the process `pid` is, if it is a QEMU that runs a machine.
    #[must_use]
    pub fn of_process(pid: u32) -> Option<Self> {
        let description = MachineDescription::of_process(pid).ok().flatten()?;
        let program = Path::new(&description.program).file_name()?.to_str()?;
        // qemu-img and qemu-nbd are no machines.
        if !program.starts_with("qemu-system-") && !["qemu-kvm", "kvm"].contains(&program) {
            return None;
        }
        let folder = fs::read_link(format!("/proc/{pid}/cwd")).unwrap_or_else(|_| PathBuf::from("/"));
        Some(Self { pid, ..Self::of_words(&description.words, &folder) })
    }

    /// The unix sockets of the QMP monitors that a QEMU was started with; relative paths count from `folder`.
    #[must_use]
    pub fn monitors_of(description: &MachineDescription, folder: &Path) -> Vec<PathBuf> {
        Self::of_words(&description.words, folder).monitors
    }

    /// The same by its words; relative paths count from `folder`.
    fn of_words(words: &[String], folder: &Path) -> Self {
        let items = parse(words);
        let of = |name: &'static str| items.iter().filter(move |item| item.name() == name);
        let direct = of("qmp").chain(of("qmp-pretty")).filter_map(short_form);
        let chardevs = of("mon").filter_map(control).filter_map(|id| {
            let chardev = of("chardev").find(|item| value(item, "id").as_deref() == Some(&id))?;
            let is_server =
                value(chardev, "type").as_deref() == Some("socket") && listens(&Pieces::parse(chardev.value()));
            value(chardev, "path").filter(|_| is_server)
        });
        Self {
            pid: 0,
            name: of("name").next_back().and_then(|item| value(item, "guest").or_else(|| value(item, "type"))),
            monitors: direct.chain(chardevs).map(|path| folder.join(path)).collect(),
            is_libvirts: of("chardev").any(|item| value(item, "id").as_deref() == Some("charmonitor")),
        }
    }
}

/// The path of `unix:PATH,server=on`.
fn short_form(item: &Item) -> Option<String> {
    let pieces = Pieces::parse(item.value());
    let path = pieces.first()?.strip_prefix("unix:")?.to_owned();
    listens(&pieces).then_some(path)
}

/// The character device of a monitor that speaks QMP.
fn control(item: &Item) -> Option<String> {
    let is_control = value(item, "mode").as_deref() == Some("control");
    value(item, "chardev").or_else(|| value(item, "type")).filter(|_| is_control)
}

fn listens(pieces: &Pieces) -> bool {
    pieces.is_on("server")
}

fn value(item: &Item, key: &str) -> Option<String> {
    item.pairs().into_iter().find(|(name, _)| name == key).map(|(_, value)| value).filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(words: &[&str]) -> FoundMachine {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        FoundMachine::of_words(&words, Path::new("/home/vm"))
    }

    #[test]
    fn monitors_are_found_in_both_forms_and_names_too() {
        let one = found(&[
            "-name",
            "guest=web1,debug-threads=on",
            "-qmp",
            "unix:/run/a.qmp,server=on,wait=off",
            "-qmp",
            "unix:b.qmp,server,nowait",
            "-chardev",
            "socket,id=m,path=/run/c,,d.qmp,server=on,wait=off",
            "-mon",
            "chardev=m,mode=control",
        ]);
        assert_eq!(one.name.as_deref(), Some("web1"));
        assert_eq!(one.monitors, ["/run/a.qmp", "/home/vm/b.qmp", "/run/c,d.qmp"].map(PathBuf::from));
        assert!(!one.is_libvirts);
        assert_eq!(found(&["-name", "db1"]).name.as_deref(), Some("db1"));
    }

    #[test]
    fn what_is_no_qmp_server_is_no_monitor() {
        let none = found(&[
            "-monitor",
            "unix:/run/human,server=on,wait=off",
            "-qmp",
            "tcp:localhost:4444,server=on",
            "-qmp",
            "unix:/run/client",
            "-chardev",
            "socket,id=h,path=/run/human2,server=on",
            "-mon",
            "chardev=h",
        ]);
        assert_eq!(none.monitors, Vec::<PathBuf>::new());
        let libvirts = found(&["-chardev", "socket,id=charmonitor,fd=25,server=on,wait=off"]);
        assert!(libvirts.is_libvirts && libvirts.monitors.is_empty());
    }

    #[test]
    fn a_process_that_is_no_qemu_is_no_machine() {
        assert_eq!(FoundMachine::of_process(std::process::id()), None);
    }
}
