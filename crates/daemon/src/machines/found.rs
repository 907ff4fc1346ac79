//! Machines that run on this host and are not known to the daemon.

use std::collections::BTreeSet;

use api::v1::{FoundVm, Monitor};
use vm::machine::FoundMachine;

use super::document::MachineDocument;
use crate::daemon::Daemon;
use crate::state_dir::check_name;

impl Daemon {
    /// Every machine that runs here and was not added, with the command that adds it.
    pub(crate) async fn found_machines(&self) -> Vec<FoundVm> {
        let known: Vec<_> = self.machines.list().iter().map(|machine| machine.document()).collect();
        let is_known = |found: &FoundMachine| {
            // It may have been started again since it was added.
            let is_its = |document: &MachineDocument| {
                let has_pid = document.process.as_ref().is_some_and(|process| process.pid == found.pid);
                let on_monitor =
                    |path: &std::path::PathBuf| document.monitor == Monitor::Qmp(path.display().to_string());
                has_pid || found.monitors.iter().any(on_monitor)
            };
            known.iter().any(is_its)
        };
        let mut taken: BTreeSet<String> = known.iter().map(|document| document.name.clone()).collect();
        let mut shown = Vec::new();
        for found in self.hypervisors.found() {
            if !found.is_libvirts && !is_known(&found) {
                shown.push(shown_as(&found, &mut taken));
            }
        }
        for domain in self.hypervisors.domains().await {
            let monitor = Monitor::Libvirt(domain.clone());
            if known.iter().any(|document| document.monitor == monitor) {
                continue;
            }
            let name = free_name(&domain, &mut taken);
            let hint = format!("transhume vm add {name} --libvirt {}", quoted(&domain));
            shown.push(FoundVm { name, pid: None, monitor: Some(monitor), hint });
        }
        shown
    }
}

fn shown_as(found: &FoundMachine, taken: &mut BTreeSet<String>) -> FoundVm {
    let own = found.name.clone().unwrap_or_else(|| format!("vm-{}", found.pid));
    let name = free_name(&own, taken);
    // Whoever has started it has most likely taken the first one.
    let path = found.monitors.last().map(|path| path.display().to_string());
    let hint = match &path {
        Some(path) => format!("transhume vm add {name} --qmp {}", quoted(path)),
        None => "it has no QMP monitor on a unix socket: start it with `-qmp unix:PATH,server=on,wait=off`".to_owned(),
    };
    FoundVm { name, pid: Some(found.pid), monitor: path.map(Monitor::Qmp), hint }
}

/// `name` as a machine may be called, and as none is yet.
fn free_name(name: &str, taken: &mut BTreeSet<String>) -> String {
    let is_kept = |letter: char| letter.is_ascii_alphanumeric() || ".-_".contains(letter);
    let mut plain: String = name.chars().map(|letter| if is_kept(letter) { letter } else { '-' }).take(56).collect();
    if check_name(&plain).is_err() {
        plain = format!("vm-{}", plain.trim_matches(|letter: char| !letter.is_ascii_alphanumeric()));
    }
    let mut numbered = (2..).map(|number| format!("{plain}-{number}"));
    let free = if taken.contains(&plain) { numbered.find(|name| !taken.contains(name)) } else { None };
    let free = free.unwrap_or(plain);
    taken.insert(free.clone());
    free
}

/// As a shell takes it for one word.
fn quoted(word: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "/._-+=:@,".contains(letter);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(name: &str, monitors: &[&str]) -> FoundMachine {
        let monitors = monitors.iter().map(Into::into).collect();
        FoundMachine { pid: 7, name: Some(name.to_owned()), monitors, is_libvirts: false }
    }

    #[test]
    fn each_machine_comes_with_the_command_that_adds_it_by_a_name_that_is_free() {
        let mut taken = BTreeSet::from(["web1".to_owned()]);
        let mut hint = |name: &str, monitors: &[&str]| shown_as(&found(name, monitors), &mut taken).hint;
        assert_eq!(hint("web1", &["/run/a.qmp", "/run/b.qmp"]), "transhume vm add web1-2 --qmp /run/b.qmp");
        assert_eq!(hint("my vm", &["/run/it's"]), r"transhume vm add my-vm --qmp '/run/it'\''s'");
        assert!(hint("db1", &[]).contains("no QMP monitor"));
        for odd in ["", "..", "-", "ü"] {
            let name = free_name(odd, &mut BTreeSet::new());
            check_name(&name).unwrap_or_else(|error| panic!("{odd:?} became {name:?}: {error}"));
        }
    }
}
