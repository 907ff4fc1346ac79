//! The guest's whole system: busybox, the virtio modules in the order in which they need each other, the load, and an
//! init that starts it. A few megabytes, written anew for every boot.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

use crate::acceleration::Acceleration;
use crate::cpio::Archive;
use crate::network::Network;
use crate::spec::GuestSpec;
use crate::workload::{Load, Workload};

/// What the guest may need; those of the controllers that a kernel has built in are absent, which is fine.
const MODULES: &[&str] = &["virtio_pci", "virtio_blk", "sd_mod", "virtio_scsi"];
/// The same for a guest with a network; what it needs comes with it.
const NETWORK_MODULE: &str = "virtio_net";
const LOAD: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/guest-load"));
const BUSYBOX: &[&str] = &["/bin/busybox", "/usr/bin/busybox"];

/// The newest cloud kernel of this machine and its modules' folder.
///
/// # Errors
/// None is installed.
pub fn kernel() -> anyhow::Result<(PathBuf, PathBuf)> {
    let entries = std::fs::read_dir("/boot").context("looking for a kernel in /boot")?;
    let releases = entries.flatten().filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let release = name.strip_prefix("vmlinuz-")?;
        release.ends_with("-cloud-amd64").then(|| release.to_owned())
    });
    let with_modules = releases.map(|release| {
        let modules = Path::new("/lib/modules").join(&release);
        (PathBuf::from(format!("/boot/vmlinuz-{release}")), modules)
    });
    with_modules
        .filter(|(_, modules)| modules.join("modules.dep").exists())
        .max()
        .context("there is no kernel /boot/vmlinuz-*-cloud-amd64 with modules: run `make setup`")
}

/// The archive of a guest that does what `spec` says.
pub(crate) fn build(modules: &Path, spec: &GuestSpec) -> anyhow::Result<Vec<u8>> {
    let mut archive = Archive::default();
    for folder in ["bin", "dev", "proc", "sys", "tmp", "modules"] {
        archive.folder(folder);
    }
    let busybox = BUSYBOX.iter().find(|path| Path::new(path).exists());
    let busybox = busybox.context("busybox is missing: run `make setup`")?;
    archive.file("bin/busybox", &std::fs::read(busybox).context("reading busybox")?);
    archive.file("bin/guest-load", LOAD);
    let mut names = Vec::new();
    let wanted: Vec<&str> = MODULES.iter().copied().chain(spec.network.as_ref().map(|_| NETWORK_MODULE)).collect();
    for path in in_order(modules, &wanted)? {
        let name = path.file_name().and_then(|name| name.to_str()).context("a module has a name")?;
        let name = name.trim_end_matches(".xz").trim_end_matches(".zst").trim_end_matches(".gz").to_owned();
        archive.file(&format!("modules/{name}"), &unpacked(&path)?);
        names.push(name);
    }
    archive.file("init", init_script(&names, spec).as_bytes());
    Ok(archive.finish())
}

/// The files of `wanted` and all that they need, each after what it needs.
fn in_order(modules: &Path, wanted: &[&str]) -> anyhow::Result<Vec<PathBuf>> {
    let table = std::fs::read_to_string(modules.join("modules.dep")).context("reading modules.dep")?;
    let needs: BTreeMap<&str, Vec<&str>> = table
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(path, needs)| (path, needs.split_whitespace().collect()))
        .collect();
    let mut ordered = Vec::new();
    for name in wanted {
        let is_wanted = |path: &str| path.rsplit('/').next().is_some_and(|file| file.split('.').next() == Some(name));
        if let Some(path) = needs.keys().find(|path| is_wanted(path)) {
            visit(path, &needs, &mut ordered);
        }
    }
    if !ordered.iter().any(|path| path.contains("/virtio_blk.")) {
        bail!("{} has no virtio_blk module", modules.display());
    }
    Ok(ordered.into_iter().map(|path| modules.join(path)).collect())
}

fn visit<'a>(path: &'a str, needs: &BTreeMap<&'a str, Vec<&'a str>>, ordered: &mut Vec<&'a str>) {
    if ordered.contains(&path) {
        return;
    }
    for need in needs.get(path).into_iter().flatten() {
        visit(need, needs, ordered);
    }
    ordered.push(path);
}

/// A module's bytes as insmod takes them.
fn unpacked(path: &Path) -> anyhow::Result<Vec<u8>> {
    let unpacker = match path.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => return std::fs::read(path).with_context(|| format!("reading {}", path.display())),
    };
    let output = Command::new(unpacker).args(["--decompress", "--stdout"]).arg(path).output();
    let output = output.with_context(|| format!("running {unpacker}"))?;
    if !output.status.success() {
        bail!("{unpacker} cannot unpack {}", path.display());
    }
    Ok(output.stdout)
}

/// Two processes that take turns, so that the emulated processor's TLB is emptied hundreds of times a second.
///
/// QEMU below 9.0 under TCG clears a page's dirty bit and leaves the page writable in the TLB. A later write through that
/// entry is never sent, and the guest goes on at the target with an old page (mended by "physmem: Fix migration dirty
/// bitmap coherency with TCG memory access", March 2024). A guest whose kernel is idle keeps its entries for seconds.
const ALTERNATE: &str = "guest-load alternate </dev/null >/dev/null 2>&1 &\n\
                         guest-load alternate </dev/null >/dev/null 2>&1 &\n";

/// Mounts, loads modules, brings the network up, says `@guest booted` and runs the workload with the second serial line
/// as its terminal.
fn init_script(modules: &[String], spec: &GuestSpec) -> String {
    let insmods: String =
        modules.iter().map(|name| format!("busybox insmod /modules/{name} || echo \"no {name}\"\n")).collect();
    let network = spec.network.as_ref().map(Network::init_lines).unwrap_or_default();
    let memory = spec.memory_load.as_ref();
    let work = match &spec.workload {
        Workload::Idle if memory.is_some() => format!("guest-load {}", Load::words(None, memory)),
        Workload::Idle => "while true; do busybox sleep 1000; done".to_owned(),
        Workload::Load(load) => format!("guest-load {}", Load::words(Some(load), memory)),
        Workload::Script(script) => script.clone(),
    };
    let switches = if spec.acceleration == Acceleration::Tcg { ALTERNATE } else { "" };
    format!(
        "#!/bin/busybox sh\n\
         export PATH=/bin\n\
         busybox --install -s /bin\n\
         busybox mount -t proc proc /proc\n\
         busybox mount -t sysfs sys /sys\n\
         busybox mount -t devtmpfs dev /dev\n\
         {insmods}\
         {network}\
         {switches}\
         busybox stty -F /dev/ttyS1 raw -echo\n\
         exec </dev/ttyS1 >/dev/ttyS1 2>&1\n\
         echo \"@guest booted $(busybox cut -d ' ' -f 1 /proc/uptime)\"\n\
         {work}\n\
         busybox poweroff -f\n"
    )
}
