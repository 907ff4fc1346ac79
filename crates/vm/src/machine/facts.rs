//! What a machine is, what a host has, and why the one may not go to the other.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::backends::{MemoryBackend, huge_pages_free, huge_pages_needed};
use super::migration::run_state;
use crate::error::{Error, ErrorKind, Result};
use crate::persist::{RunOutput, Runner, SystemRunner};
use crate::qmp::{Qmp, Version};

/// What QEMU needs beside the guest's memory.
const OVERHEAD_BYTES: u64 = 64 << 20;
/// How long a QEMU may take to say what it is.
const ASK_LIMIT: Duration = Duration::from_secs(30);
/// The guest's processors are the host's own, whatever it has.
const HOST_CPUS: [&str; 2] = ["host-", "max-"];

/// A host's processor.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuFacts {
    /// Its name, as `/proc/cpuinfo` has it.
    pub model: String,
    /// What it can do.
    pub flags: BTreeSet<String>,
}

/// A machine, as its QEMU tells it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineFacts {
    /// QEMU's version.
    pub version: Version,
    /// The machine's type by its versioned name, whatever alias it was started with.
    pub machine_type: String,
    /// Its name, if it has one.
    pub name: Option<String>,
    /// Its UUID, if it has one.
    pub uuid: Option<String>,
    /// The guest's memory, with what was plugged in.
    pub memory_bytes: u64,
    /// Virtual processors.
    pub vcpus: u32,
    /// Their type, such as `host-x86_64-cpu`.
    pub cpu_type: String,
    /// `kvm`, or `tcg` for anything else.
    pub accelerator: String,
    /// Such as `running` or `paused`.
    pub run_state: String,
    /// Why QEMU would not migrate it now, in QEMU's words.
    pub blocked_reasons: Vec<String>,
    /// The migration capabilities that this QEMU has.
    pub capabilities: Vec<String>,
    /// The devices that were given by somebody, by name and type; what the machine itself has is not among them.
    pub devices: BTreeSet<String>,
    /// The processor of the host that it runs on.
    pub cpu: CpuFacts,
    /// What its memory is made of.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory_backends: Vec<MemoryBackend>,
    /// What its first processor can do, by the registers of CPUID: a named model is what the host and this QEMU make of it. Empty
    /// where QEMU does not say, as for other architectures than x86.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub cpu_features: BTreeMap<String, u32>,
}

/// What a host offers to a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostFacts {
    /// The version of its QEMU.
    pub version: Version,
    /// The machine types which that QEMU knows, aliases among them.
    pub machine_types: Vec<String>,
    /// Memory that is free or can be freed.
    pub memory_available_bytes: u64,
    /// How many huge pages are free, by their size in bytes.
    #[serde(default)]
    pub huge_pages_free: BTreeMap<u64, u64>,
    /// Its processor.
    pub cpu: CpuFacts,
    /// Whether there is a `/dev/kvm`.
    pub has_kvm: bool,
}

/// What stands against a move, for code to match on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum RefusalKind {
    /// The target's QEMU does not know the machine's type.
    MachineType,
    /// The target's QEMU is too old.
    Version,
    /// The target has too little memory.
    Memory,
    /// The target has too few huge pages.
    HugePages,
    /// The target cannot run the machine's processors.
    Cpu,
    /// QEMU says that this machine cannot be migrated, with a device of the host for instance.
    Blocked,
    /// The source's QEMU lacks what this needs.
    Capability,
    /// The QEMU that waits at the target has another machine: a device was plugged or unplugged since the start.
    OtherMachine,
}

/// A reason against a move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// Which one.
    pub kind: RefusalKind,
    /// In words.
    pub reason: String,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.reason)
    }
}

impl MachineFacts {
    /// Asks QEMU, which runs on this host.
    ///
    /// # Errors
    /// What QMP says.
    pub async fn read(qmp: &Qmp) -> Result<Self> {
        let ask = async |command: &str| qmp.execute(command, json!({})).await;
        let type_of = async |path: &str| -> Result<String> {
            let said = qmp.execute("qom-get", json!({ "path": path, "property": "type" })).await?;
            Ok(said.as_str().unwrap_or_default().to_owned())
        };
        let text = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
        let memory = ask("query-memory-size-summary").await?;
        let processors = ask("query-cpus-fast").await?;
        let first = processors[0]["qom-path"].as_str();
        let blocked = ask("query-migrate").await?;
        let capabilities = ask("query-migrate-capabilities").await?;
        let no_uuid = |uuid: &String| uuid.chars().all(|letter| "0-".contains(letter));
        Ok(Self {
            version: qmp.version(),
            machine_type: machine_name(&type_of("/machine").await?, &ask("query-machines").await?),
            name: text(&ask("query-name").await?["name"]),
            uuid: text(&ask("query-uuid").await?["UUID"]).filter(|uuid| !no_uuid(uuid)),
            memory_bytes: ["base-memory", "plugged-memory"].iter().filter_map(|part| memory[part].as_u64()).sum(),
            vcpus: processors.as_array().map_or(0, Vec::len) as u32,
            cpu_type: match first {
                Some(path) => type_of(path).await?,
                None => String::new(),
            },
            accelerator: if ask("query-kvm").await?["enabled"] == true { "kvm" } else { "tcg" }.to_owned(),
            run_state: run_state(qmp).await?,
            blocked_reasons: blocked["blocked-reasons"].as_array().into_iter().flatten().filter_map(text).collect(),
            capabilities: capabilities
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(|one| text(&one["capability"]))
                .collect(),
            devices: devices(qmp).await?,
            cpu: CpuFacts::here(),
            memory_backends: MemoryBackend::read_all(qmp).await?,
            cpu_features: match first {
                Some(path) => cpu_features(qmp, path).await,
                None => BTreeMap::new(),
            },
        })
    }

    /// How the machine that a QEMU at the target waits with differs from this one. Asked before the memory is sent:
    /// QEMU refuses a device that the target lacks only at the end. It says nothing at all of one that the target has
    /// beyond the source's, which the guest then finds as it is after a reset.
    #[must_use]
    pub fn differences(&self, target: &Self) -> Vec<Refusal> {
        let mut reasons = Vec::new();
        let mut compare = |what: &str, here: &dyn std::fmt::Display, there: &dyn std::fmt::Display| {
            let (here, there) = (here.to_string(), there.to_string());
            if here != there {
                reasons.push(format!("the machine has {what} {here}, and the target's has {there}"));
            }
        };
        compare("the type", &self.machine_type, &target.machine_type);
        compare("bytes of memory:", &self.memory_bytes, &target.memory_bytes);
        compare("virtual processors:", &self.vcpus, &target.vcpus);
        compare("processors of type", &self.cpu_type, &target.cpu_type);
        reasons.extend(self.lacking_features(target));
        let plugged = self.devices.difference(&target.devices);
        reasons.extend(plugged.map(|device| format!("the target's machine lacks the device {device}")));
        let unplugged = target.devices.difference(&self.devices);
        reasons.extend(unplugged.map(|device| format!("only the target's machine has the device {device}")));
        reasons.into_iter().map(|reason| Refusal { kind: RefusalKind::OtherMachine, reason }).collect()
    }

    /// What the guest's processors can do and those of the target's machine cannot. QEMU starts a named model without what the host
    /// lacks, and says so only in its log. The guest would find out by an illegal instruction, after the commit.
    fn lacking_features(&self, target: &Self) -> Option<String> {
        if target.cpu_features.is_empty() {
            return None;
        }
        let lacking = self.cpu_features.iter().filter_map(|(register, bits)| {
            let missing = bits & !target.cpu_features.get(register).copied().unwrap_or_default();
            let numbers = (0..u32::BITS).filter(|bit| missing >> bit & 1 == 1).map(|bit| bit.to_string());
            (missing != 0).then(|| format!("CPUID {register} bits {}", numbers.collect::<Vec<_>>().join(", ")))
        });
        let lacking: Vec<_> = lacking.collect();
        (!lacking.is_empty()).then(|| {
            format!(
                "the target's processors lack what the guest's have: {}; a -cpu model that both hosts have moves between them",
                lacking.join("; ")
            )
        })
    }

    /// What stands against a move to a host; nothing if it may go. All reasons are found at once.
    #[must_use]
    pub fn refusals(&self, target: &HostFacts) -> Vec<Refusal> {
        let mut found = Vec::new();
        let mut refuse = |kind, reason: String| found.push(Refusal { kind, reason });
        for reason in &self.blocked_reasons {
            refuse(RefusalKind::Blocked, format!("QEMU does not migrate this machine: {reason}"));
        }
        for needed in ["pause-before-switchover", "return-path", "late-block-activate"] {
            if !self.capabilities.iter().any(|name| name == needed) {
                refuse(RefusalKind::Capability, format!("QEMU {} has no migration capability {needed}", self.version));
            }
        }
        let (ours, theirs) = (self.version, target.version);
        match version_of_type(&self.machine_type) {
            // A versioned type is the same in every later version, and QEMU sends what that type had.
            Some(least) if (theirs.major, theirs.minor) < least => {
                let reason = format!(
                    "QEMU {theirs} at the target is older than the machine's type {} allows",
                    self.machine_type
                );
                refuse(RefusalKind::Version, reason);
            }
            None if (theirs.major, theirs.minor) < (ours.major, ours.minor) => {
                let machine = &self.machine_type;
                let reason = format!(
                    "QEMU {theirs} at the target is older than {ours} here, and {machine} is no versioned machine type"
                );
                refuse(RefusalKind::Version, reason);
            }
            _ if !target.machine_types.contains(&self.machine_type) => {
                let reason = format!("QEMU {theirs} at the target has no machine type {}", self.machine_type);
                refuse(RefusalKind::MachineType, reason);
            }
            _ => {}
        }
        // Huge pages are set aside beforehand, and are no part of what else is free.
        let huge = self.memory_backends.iter().filter(|backend| backend.huge_page_bytes.is_some());
        let huge_bytes: u64 = huge.map(|backend| backend.bytes).sum();
        for (page, needed) in huge_pages_needed(&self.memory_backends) {
            let free = target.huge_pages_free.get(&page).copied().unwrap_or_default();
            if needed > free {
                let reason = format!(
                    "the machine's memory is {needed} huge pages of {} KiB, and the target has {free} of them free \
                     (free_hugepages in /sys/kernel/mm/hugepages)",
                    page >> 10
                );
                refuse(RefusalKind::HugePages, reason);
            }
        }
        let needed = self.memory_bytes.saturating_sub(huge_bytes).saturating_add(OVERHEAD_BYTES);
        if needed > target.memory_available_bytes {
            let (needed, there) = (needed >> 20, target.memory_available_bytes >> 20);
            refuse(RefusalKind::Memory, format!("the machine needs {needed} MiB, and the target has {there} MiB left"));
        }
        if self.accelerator == "kvm" {
            found.extend(self.cpu_refusal(target).map(|reason| Refusal { kind: RefusalKind::Cpu, reason }));
        }
        found
    }

    fn cpu_refusal(&self, target: &HostFacts) -> Option<String> {
        if !target.has_kvm {
            return Some("the machine runs under KVM, which the target does not have".to_owned());
        }
        let is_host = HOST_CPUS.iter().any(|prefix| self.cpu_type.starts_with(prefix));
        if !is_host || self.cpu.flags == target.cpu.flags {
            return None;
        }
        let list = |one: &BTreeSet<String>, other: &BTreeSet<String>| -> String {
            let names: Vec<&str> = one.difference(other).map(String::as_str).collect();
            if names.is_empty() { "none".to_owned() } else { names.join(" ") }
        };
        let (here, there) = (&self.cpu, &target.cpu);
        Some(format!(
            "the guest has the host's own processor ({}), and the target's ({}) differs: it lacks {}, and has {} more; \
             a named -cpu model moves between them",
            here.model,
            there.model,
            list(&here.flags, &there.flags),
            list(&there.flags, &here.flags),
        ))
    }
}

impl HostFacts {
    /// What this host has, with `program` as its QEMU.
    ///
    /// # Errors
    /// `NotFound` if the program cannot be run or does not say what it is.
    pub async fn read(program: &Path) -> Result<Self> {
        Self::read_with(program, &SystemRunner { limit: ASK_LIMIT, ..SystemRunner::default() }).await
    }

    /// The same with a runner of the caller's.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub async fn read_with(program: &Path, runner: &dyn Runner) -> Result<Self> {
        let ask = async |arguments: &[&str]| -> Result<RunOutput> {
            let shown = format!("{} {}", program.display(), arguments.join(" "));
            let arguments: Vec<String> = arguments.iter().map(|&argument| argument.to_owned()).collect();
            let ran = runner.run(program, &arguments, &[], "").await;
            let ran = ran.map_err(|error| Error::new(ErrorKind::NotFound, shown.clone()).with_source(error))?;
            if ran.success {
                return Ok(ran);
            }
            Err(Error::new(ErrorKind::NotFound, format!("{shown} failed: {}", ran.stderr.trim())))
        };
        let said = ask(&["--version"]).await?.stdout;
        let unknown = || Error::new(ErrorKind::NotFound, format!("{} does not tell its version", program.display()));
        let version = parse_version(&said).ok_or_else(unknown)?;
        let machine_types = parse_machines(&ask(&["-machine", "help"]).await?.stdout);
        Ok(Self {
            version,
            machine_types,
            memory_available_bytes: memory_available(&read_text("/proc/meminfo")),
            huge_pages_free: huge_pages_free(),
            cpu: CpuFacts::here(),
            has_kvm: Path::new("/dev/kvm").exists(),
        })
    }
}

impl CpuFacts {
    fn here() -> Self {
        Self::parse(&read_text("/proc/cpuinfo"))
    }

    /// The first processor of a `/proc/cpuinfo`.
    fn parse(text: &str) -> Self {
        let value = |names: &[&str]| {
            let mut pairs = text.lines().filter_map(|line| line.split_once(':'));
            pairs.find(|(name, _)| names.contains(&name.trim())).map(|(_, value)| value.trim()).unwrap_or_default()
        };
        // On ARM they are called features, and a processor has numbers where others have a name.
        let flags = value(&["flags", "Features"]).split_whitespace().map(str::to_owned).collect();
        Self { model: value(&["model name", "CPU part"]).to_owned(), flags }
    }
}

/// The children of the two places where QEMU keeps the devices that it was given.
async fn devices(qmp: &Qmp) -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for place in ["/machine/peripheral", "/machine/peripheral-anon"] {
        let said = qmp.execute("qom-list", json!({ "path": place })).await?;
        for one in said.as_array().into_iter().flatten() {
            let child = one["type"].as_str().and_then(|text| text.strip_prefix("child<")?.strip_suffix('>'));
            let name = one["name"].as_str().unwrap_or_default();
            found.extend(child.map(|child| format!("{name} ({child})")));
        }
    }
    Ok(found)
}

/// The features of the processor at `path` in QEMU's object tree, as `LEAF.SUBLEAF.REGISTER`; none if it does not say.
async fn cpu_features(qmp: &Qmp, path: &str) -> BTreeMap<String, u32> {
    let asked = json!({ "path": path, "property": "feature-words" });
    qmp.execute("qom-get", asked).await.map_or_else(|_| BTreeMap::new(), |words| parse_features(&words))
}

fn parse_features(words: &Value) -> BTreeMap<String, u32> {
    let word = |word: &Value| {
        let leaf = word["cpuid-input-eax"].as_u64()?;
        let subleaf = word["cpuid-input-ecx"].as_u64().map(|subleaf| format!(".{subleaf}")).unwrap_or_default();
        let register = word["cpuid-register"].as_str()?;
        Some((format!("{leaf:#x}{subleaf}.{register}"), u32::try_from(word["features"].as_u64()?).ok()?))
    };
    words.as_array().into_iter().flatten().filter_map(word).collect()
}

/// What cannot be read counts as empty: the refusals then say that something is missing.
fn read_text(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// The name that `-machine` takes, from the type in QEMU's object tree.
fn machine_name(of_object: &str, machines: &Value) -> String {
    let name = of_object.strip_suffix("-machine").unwrap_or(of_object);
    let named = |one: &&Value| one["alias"] == name && one["name"] != name;
    let aliased = machines.as_array().into_iter().flatten().find(named);
    aliased.and_then(|one| one["name"].as_str()).unwrap_or(name).to_owned()
}

/// The version at the end of a machine type's name: 7.2 of `pc-q35-7.2`. Distributions have numbers of their own
/// (`pc-q35-rhel9.2.0`), which say nothing of QEMU's version.
fn version_of_type(name: &str) -> Option<(u64, u64)> {
    let (major, minor) = name.rsplit_once('-')?.1.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

fn parse_version(said: &str) -> Option<Version> {
    let number =
        said.split_once("version ")?.1.split(|letter: char| !letter.is_ascii_digit() && letter != '.').next()?;
    let mut parts = number.split('.').map(|part| part.parse::<u64>().ok());
    Some(Version { major: parts.next()??, minor: parts.next()??, micro: parts.next().flatten().unwrap_or_default() })
}

/// The first words of the lines after the heading.
fn parse_machines(said: &str) -> Vec<String> {
    said.lines().skip(1).filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect()
}

fn memory_available(meminfo: &str) -> u64 {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:")).unwrap_or_default();
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().unwrap_or_default();
    kib.saturating_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(text: &str) -> CpuFacts {
        CpuFacts::parse(&format!("processor\t: 0\nmodel name\t: A CPU\nflags\t\t: {text}\n\nflags : other"))
    }

    fn machine() -> MachineFacts {
        MachineFacts {
            version: Version { major: 8, minor: 2, micro: 0 },
            machine_type: "pc-q35-7.2".to_owned(),
            name: None,
            uuid: None,
            memory_bytes: 1 << 30,
            vcpus: 1,
            cpu_type: "host-x86_64-cpu".to_owned(),
            accelerator: "kvm".to_owned(),
            run_state: "running".to_owned(),
            blocked_reasons: Vec::new(),
            capabilities: ["pause-before-switchover", "return-path", "late-block-activate"].map(str::to_owned).to_vec(),
            devices: BTreeSet::from(["vda (virtio-blk-pci)".to_owned()]),
            cpu: flags("sse avx"),
            memory_backends: Vec::new(),
            cpu_features: BTreeMap::new(),
        }
    }

    fn host() -> HostFacts {
        HostFacts {
            version: Version { major: 7, minor: 2, micro: 22 },
            machine_types: vec!["q35".to_owned(), "pc-q35-7.2".to_owned()],
            memory_available_bytes: (1 << 30) + OVERHEAD_BYTES,
            huge_pages_free: BTreeMap::new(),
            cpu: flags("sse avx"),
            has_kvm: true,
        }
    }

    fn kinds(machine: &MachineFacts, host: &HostFacts) -> Vec<RefusalKind> {
        machine.refusals(host).into_iter().map(|refusal| refusal.kind).collect()
    }

    #[test]
    fn a_machine_goes_to_a_host_that_has_what_it_needs_and_to_no_other() {
        use RefusalKind::*;
        // An older QEMU that knows the machine's type is no obstacle.
        assert_eq!(kinds(&machine(), &host()), []);
        let newer = MachineFacts { machine_type: "pc-q35-8.2".to_owned(), ..machine() };
        assert_eq!(kinds(&newer, &host()), [Version]);
        let plain = MachineFacts { machine_type: "microvm".to_owned(), ..machine() };
        assert_eq!(kinds(&plain, &host()), [Version]);
        let older = MachineFacts { machine_type: "pc-q35-2.4".to_owned(), ..machine() };
        assert_eq!(kinds(&older, &host()), [MachineType]);
        assert_eq!(kinds(&machine(), &HostFacts { memory_available_bytes: 1 << 30, ..host() }), [Memory]);
        assert_eq!(kinds(&machine(), &HostFacts { has_kvm: false, ..host() }), [Cpu]);
        let blocked = MachineFacts { blocked_reasons: vec!["vfio".to_owned()], capabilities: vec![], ..machine() };
        assert_eq!(kinds(&blocked, &host()), [Blocked, Capability, Capability, Capability]);
    }

    #[test]
    fn huge_pages_are_asked_of_the_target_and_other_memory_only_for_the_rest() {
        let pages = MemoryBackend { bytes: 1 << 30, huge_page_bytes: Some(2 << 20), ..MemoryBackend::default() };
        let huge = MachineFacts { memory_backends: vec![pages], ..machine() };
        assert_eq!(kinds(&huge, &host()), [RefusalKind::HugePages]);
        let few = HostFacts { huge_pages_free: BTreeMap::from([(2 << 20, 511), (1 << 30, 1)]), ..host() };
        assert_eq!(kinds(&huge, &few), [RefusalKind::HugePages]);
        let enough = HostFacts {
            huge_pages_free: BTreeMap::from([(2 << 20, 512)]),
            memory_available_bytes: OVERHEAD_BYTES,
            ..host()
        };
        assert_eq!(kinds(&huge, &enough), []);
    }

    #[test]
    fn only_a_guest_with_the_hosts_own_processor_minds_another_one() {
        let other = HostFacts { cpu: flags("sse amx"), ..host() };
        let refusals = machine().refusals(&other);
        assert_eq!(refusals.len(), 1, "{refusals:?}");
        let reason = &refusals[0].reason;
        assert!(reason.contains("lacks avx") && reason.contains("has amx more"), "{reason}");
        let named = MachineFacts { cpu_type: "Skylake-Server-x86_64-cpu".to_owned(), ..machine() };
        assert_eq!(kinds(&named, &other), []);
        let emulated = MachineFacts { accelerator: "tcg".to_owned(), ..machine() };
        assert_eq!(kinds(&emulated, &HostFacts { has_kvm: false, ..other }), []);
    }

    #[test]
    fn another_machine_at_the_target_is_told_in_full() {
        assert_eq!(machine().differences(&machine()), []);
        let devices = BTreeSet::from(["net0 (e1000)".to_owned()]);
        let other = MachineFacts { vcpus: 2, devices, ..machine() };
        let reasons: Vec<String> = machine().differences(&other).iter().map(ToString::to_string).collect();
        assert_eq!(reasons.len(), 3, "{reasons:?}");
        assert!(reasons[1].contains("lacks the device vda") && reasons[2].contains("only the target"), "{reasons:?}");
    }

    #[test]
    fn processors_that_lack_what_the_guest_has_are_told_and_others_are_not() {
        let word = |ecx: u64, ebx: u64| {
            json!([
                { "cpuid-input-eax": 1, "cpuid-register": "ECX", "features": ecx },
                { "cpuid-input-eax": 7, "cpuid-input-ecx": 0, "cpuid-register": "EBX", "features": ebx },
            ])
        };
        let with = |words: Value| MachineFacts { cpu_features: parse_features(&words), ..machine() };
        let guest = with(word(1 << 19 | 1 << 20, 1 << 5));
        assert_eq!(guest.differences(&guest), []);
        assert_eq!(guest.differences(&with(word(0xffff_ffff, 0xff))), [], "what it has beyond is no loss");
        assert_eq!(guest.differences(&machine()), [], "an earlier version does not say");
        let found = guest.differences(&with(word(1 << 19, 0)));
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].reason.contains("CPUID 0x1.ECX bits 20; CPUID 0x7.0.EBX bits 5"), "{}", found[0].reason);
    }

    #[test]
    fn what_programs_and_the_kernel_print_is_understood() {
        let version = parse_version("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7)\nCopyright");
        assert_eq!(version, Some(Version { major: 7, minor: 2, micro: 22 }));
        assert_eq!(parse_version("QEMU emulator version 9.1\n"), Some(Version { major: 9, minor: 1, micro: 0 }));
        assert_eq!(parse_version("bash: no"), None);
        let machines = "Supported machines are:\nq35   Standard PC (alias of pc-q35-7.2)\npc-q35-7.2  Standard PC\n";
        assert_eq!(parse_machines(machines), ["q35", "pc-q35-7.2"]);
        assert_eq!(memory_available("MemTotal: 1 kB\nMemAvailable:   12 kB\n"), 12 << 10);
        assert_eq!(version_of_type("pc-i440fx-7.2"), Some((7, 2)));
        assert_eq!(version_of_type("pc-q35-rhel9.2.0"), None);
        assert_eq!(version_of_type("microvm"), None);
        let machines = json!([{ "name": "virt-7.2", "alias": "virt" }]);
        assert_eq!(machine_name("virt-7.2-machine", &machines), "virt-7.2");
        assert_eq!(machine_name("virt-machine", &machines), "virt-7.2");
        assert_eq!(machine_name("microvm-machine", &machines), "microvm");
    }
}
