//! The programs that tests of the whole run: built by cargo, found beside whoever asks.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

/// Builds the programs as they are installed, and gives the folder that they are in.
///
/// # Errors
/// They cannot be built.
pub fn build_programs() -> anyhow::Result<PathBuf> {
    // The library is no program, but is needed beside them.
    build(
        "release",
        &["--package", "transhume-cli", "--package", "transhume-guest", "--lib", "--package", "transhume-preload"],
    )
}

/// The folder that was given, or that of the programs as they are installed, which are built.
///
/// # Errors
/// They cannot be built.
pub fn given_or_built(given: Option<PathBuf>) -> anyhow::Result<PathBuf> {
    given.map_or_else(build_programs, Ok)
}

/// The same with every assertion in them, as tests use them.
///
/// # Errors
/// They cannot be built.
pub fn build_debug_programs() -> anyhow::Result<PathBuf> {
    // The whole workspace, as the tests are built: cargo would build the dependencies of some packages a second time.
    build("dev", &["--lib", "--workspace"])
}

fn build(profile: &str, what: &[&str]) -> anyhow::Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .args(["build", "--locked", "--profile", profile, "--bins"])
        .args(what)
        .status()
        .context("running cargo")?;
    if !status.success() {
        bail!("building the programs: {status}");
    }
    Ok(target_folder()?.join(if profile == "dev" { "debug" } else { profile }))
}

/// The programs as they were at `commit`, with every assertion in them: built once, from this repository's history. `TRANSHUME_BEFORE` names
/// a folder that has them already.
///
/// # Errors
/// The history does not go back that far, or they cannot be built.
pub fn programs_of(commit: &str) -> anyhow::Result<PathBuf> {
    if let Some(folder) = std::env::var_os("TRANSHUME_BEFORE") {
        return Ok(folder.into());
    }
    let own = target_folder()?.parent().context("the target folder is in one")?.join("before").join(commit);
    let (tree, target) = (own.join("tree"), own.join("target"));
    let programs = target.join("debug");
    let is_built = own.join("built");
    if is_built.exists() {
        return Ok(programs);
    }
    std::fs::create_dir_all(&tree).with_context(|| format!("creating {}", tree.display()))?;
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut archive = Command::new("git");
    archive.args(["-C"]).arg(root.join("../..")).args(["archive", commit]).stdout(Stdio::piped());
    let mut archive = archive.spawn().context("running git")?;
    let stream = archive.stdout.take().context("it has one")?;
    let unpacked = Command::new("tar").arg("-x").arg("-C").arg(&tree).stdin(stream).status().context("running tar")?;
    if !archive.wait().context("waiting for git")?.success() || !unpacked.success() {
        bail!("commit {commit} is not in the history here: fetch the whole history (`git fetch --unshallow`)");
    }
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build.args(["build", "--locked", "--bins", "--lib", "--workspace"]).current_dir(&tree);
    let status = build.env("CARGO_TARGET_DIR", &target).status().context("running cargo")?;
    if !status.success() {
        bail!("building the programs of {commit}: {status}");
    }
    std::fs::write(is_built, "").context("noting that they are built")?;
    Ok(programs)
}

/// The library that has the kernel track a QEMU's memory, in the folder of the programs or of the tests.
#[must_use]
pub fn preload_library(programs: &Path) -> PathBuf {
    programs.join("libtranshume_preload.so")
}

/// The line of a daemon's `[hosts]` that has it run the QEMU that `PATH` leads to, where that is one that was unpacked beside the
/// distribution's (`make test-qemu10`): it finds its libraries only if a wrapper starts it. Nothing for the distribution's own.
#[must_use]
pub fn vm_program_line() -> String {
    unpacked_qemu()
        .map_or_else(String::new, |(unpacked, wrapper)| format!("vm-program-for = {{ {unpacked:?} = {wrapper:?} }}\n"))
}

/// The QEMU that `PATH` leads to if it is an unpacked one, and the wrapper that starts it.
#[must_use]
pub fn unpacked_qemu() -> Option<(PathBuf, PathBuf)> {
    let path = std::env::var_os("PATH")?;
    let mut programs = std::env::split_paths(&path).map(|folder| folder.join("qemu-system-x86_64"));
    let wrapper = programs.find(|program| program.exists())?;
    let unpacked = wrapper.parent()?.parent()?.join("files/usr/bin/qemu-system-x86_64");
    unpacked.exists().then_some((unpacked, wrapper))
}

/// Where cargo puts what it builds, this program among it.
///
/// # Errors
/// This program was copied to somewhere else.
pub fn target_folder() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("asking where this program is")?;
    let target = own.parent().and_then(Path::parent).context("this program is not in a target folder")?;
    Ok(target.to_owned())
}

/// A folder in `parent` that is removed at the end.
///
/// # Errors
/// It cannot be created there.
pub fn private_folder(parent: &Path) -> anyhow::Result<tempfile::TempDir> {
    tempfile::Builder::new()
        .prefix("transhume-")
        .tempdir_in(parent)
        .with_context(|| format!("creating a folder in {}", parent.display()))
}
