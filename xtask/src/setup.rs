//! `cargo xtask setup`: what tests, demo and benchmarks need from the distribution.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

use crate::guest_programs;

/// A package and a file that shows that it is installed; `*` stands for anything in the last component.
const PACKAGES: &[(&str, &str)] = &[
    ("qemu-system-x86", "/usr/bin/qemu-system-x86_64"),
    ("qemu-utils", "/usr/bin/qemu-img"),
    ("qemu-block-extra", "/usr/lib/x86_64-linux-gnu/qemu/block-ssh.so"),
    ("linux-image-cloud-amd64", "/boot/vmlinuz-*-cloud-amd64"),
    ("busybox-static", "/bin/busybox"),
    ("nbdkit", "/usr/bin/nbdkit"),
    ("libnbd-bin", "/usr/bin/nbdinfo"),
    ("fio", "/usr/bin/fio"),
    ("e2fsprogs", "/sbin/mkfs.ext4"),
    ("kmod", "/sbin/modinfo"),
    ("cpio", "/bin/cpio"),
    ("xz-utils", "/usr/bin/xz"),
    ("b3sum", "/usr/bin/b3sum"),
    ("iproute2", "/sbin/ip"),
    ("jq", "/usr/bin/jq"),
    ("strace", "/usr/bin/strace"),
    ("xfsprogs", "/sbin/mkfs.xfs"),
    ("bindfs", "/usr/bin/bindfs"),
    ("etcd-server", "/usr/bin/etcd"),
    ("libfaketime", "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"),
    ("libvirt-daemon", "/usr/sbin/libvirtd"),
    ("libvirt-daemon-driver-qemu", "/usr/lib/x86_64-linux-gnu/libvirt/connection-driver/libvirt_driver_qemu.so"),
    ("libvirt-clients", "/usr/bin/virsh"),
];

/// Arguments of `cargo xtask setup`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Only say what is missing; exit with 1 if anything is.
    #[arg(long)]
    check: bool,
    /// Unpack the programs, too, that the guests of `bench-vm --only guests` run.
    #[arg(long)]
    guest_programs: bool,
}

/// Installs what is missing, or says what is.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let missing: Vec<&str> =
        PACKAGES.iter().filter(|(_, witness)| !exists(witness)).map(|(package, _)| *package).collect();
    if missing.is_empty() {
        return guest_programs(arguments);
    }
    let command = format!("apt-get install -y --no-install-recommends {}", missing.join(" "));
    if arguments.check || !is_root() {
        bail!("these packages are missing: {}. As root: {command}", missing.join(", "));
    }
    eprintln!("installing: {}", missing.join(", "));
    apt(&["update"])?;
    let install = ["install", "-y", "--no-install-recommends"];
    apt(&[&install[..], &missing[..]].concat())?;
    guest_programs(arguments)
}

/// Unpacks the programs of guests if they are not there, or says that they are not.
fn guest_programs(arguments: &Arguments) -> anyhow::Result<()> {
    if !arguments.guest_programs || guest_programs::are_there()? {
        return Ok(());
    }
    if arguments.check {
        bail!("the guests' programs are not unpacked: run `cargo xtask setup --guest-programs`");
    }
    eprintln!("unpacking the guests' programs");
    if is_root() {
        apt(&["update"])?;
    }
    guest_programs::unpack()
}

fn apt(words: &[&str]) -> anyhow::Result<()> {
    let status = Command::new("apt-get")
        .args(words)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdout(Stdio::null())
        .status()
        .context("running apt-get; on another distribution install the packages by their names there")?;
    if !status.success() {
        bail!("apt-get {} failed: {status}", words.join(" "));
    }
    Ok(())
}

fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|own| std::os::unix::fs::MetadataExt::uid(&own) == 0)
}

fn exists(pattern: &str) -> bool {
    let path = Path::new(pattern);
    let (Some(folder), Some(name)) = (path.parent(), path.file_name().and_then(|name| name.to_str())) else {
        return false;
    };
    let Some((prefix, suffix)) = name.split_once('*') else { return path.exists() };
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .any(|name| name.len() >= prefix.len() + suffix.len() && name.starts_with(prefix) && name.ends_with(suffix))
}
