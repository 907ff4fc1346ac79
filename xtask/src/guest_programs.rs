//! Debian's programs for guests: what `bench-vm --only guests` runs, with everything that they need. The packages are unpacked below the
//! folder of what is built, not installed: the host gets no service, no user and no database.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};

use crate::programs::target_folder;

/// Where they are below the folder of what is built.
const FOLDER: &str = "guest-programs";
/// What the guests run; the rest follows from it.
const PACKAGES: [&str; 3] = ["memcached", "postgresql-15", "dbench"];
/// What the programs do not need of what their packages ask for: translations, the scripts that install them, and PostgreSQL's compiler.
const LEFT_OUT: [&str; 8] = ["perl", "libperl", "libllvm", "libz3", "locales", "libc-l10n", "dpkg", "debconf"];
/// What is in the packages, takes much of a disk, and is read by no program.
const UNREAD: [&str; 5] = [
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "usr/lib/postgresql/15/lib/bitcode",
    "usr/lib/x86_64-linux-gnu/gconv",
];

/// Whether they are there.
pub(crate) fn are_there() -> anyhow::Result<bool> {
    Ok(target_folder()?.join(FOLDER).exists())
}

/// Downloads and unpacks them.
pub(crate) fn unpack() -> anyhow::Result<()> {
    let target = target_folder()?;
    // Everything is made under another name: what has the right one is whole.
    let (unfinished, packages) = (target.join("guest-programs.new"), target.join("guest-programs.packages"));
    for folder in [&unfinished, &packages] {
        if folder.exists() {
            std::fs::remove_dir_all(folder).with_context(|| format!("removing {}", folder.display()))?;
        }
        std::fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    }
    let names = names(&packages)?;
    let download = ["-qq", "-o", "APT::Sandbox::User=root", "download"];
    run(Command::new("apt-get").args(download).args(&names).current_dir(&packages))?;
    for entry in std::fs::read_dir(&packages).context("listing the packages")? {
        let path = entry.context("listing the packages")?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            run(Command::new("dpkg-deb").arg("--extract").args([&path, &unfinished]))?;
        }
    }
    for unread in UNREAD.map(|unread| unfinished.join(unread)).iter().filter(|unread| unread.exists()) {
        std::fs::remove_dir_all(unread).with_context(|| format!("removing {}", unread.display()))?;
    }
    std::fs::rename(&unfinished, target.join(FOLDER)).context("naming the guests' programs")?;
    std::fs::remove_dir_all(&packages).context("removing the packages")
}

/// The packages that a system without any would need for these.
fn names(folder: &Path) -> anyhow::Result<Vec<String>> {
    let nothing: PathBuf = folder.join("nothing-installed");
    std::fs::write(&nothing, "").context("writing an empty list of packages")?;
    let listed = Command::new("apt-get")
        .args(["-qq", "-y", "--no-install-recommends", "--print-uris", "-o"])
        .arg(format!("Dir::State::status={}", nothing.display()))
        .arg("install")
        .args(PACKAGES)
        .output()
        .context("running apt-get")?;
    ensure!(listed.status.success(), "apt-get lists no packages: {}", String::from_utf8_lossy(&listed.stderr).trim());
    let names: Vec<String> = String::from_utf8_lossy(&listed.stdout).lines().filter_map(name_in).collect();
    ensure!(!names.is_empty(), "apt-get lists no packages for {}", PACKAGES.join(", "));
    Ok(names)
}

/// The package of a line `'URI' NAME_VERSION_ARCHITECTURE.deb SIZE HASH`, if it is needed.
fn name_in(line: &str) -> Option<String> {
    let name = line.split_whitespace().nth(1)?.split_once('_')?.0;
    let is_left_out = LEFT_OUT.iter().any(|start| name.starts_with(start)) || name.ends_with("-perl");
    (!is_left_out).then(|| name.to_owned())
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    let status = command.stdout(Stdio::null()).status().with_context(|| format!("running {command:?}"))?;
    ensure!(status.success(), "{command:?} failed: {status}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_are_read_from_what_apt_would_fetch() {
        let line = |name: &str| format!("'http://deb.debian.org/{name}' {name}_1.2-3_amd64.deb 1234 SHA256:abcd");
        assert_eq!(name_in(&line("libevent-2.1-7")).as_deref(), Some("libevent-2.1-7"));
        assert_eq!(name_in(&line("libjson-perl")), None, "only scripts of packages need it");
        assert_eq!(name_in(&line("libllvm14")), None, "queries are not compiled");
        assert_eq!(name_in("Reading package lists..."), None, "that is no package");
    }
}
