//! `cargo xtask mutations --refresh`: patches follow the code that moves around their mistakes.
//!
//! A patch whose context is not what the code says may land at another place that looks alike, and what is seen then proves
//! nothing. `tidy` has all lines of its context fit. Here a patch finds its place by one line of context, and is written anew.
//! Whoever does that looks at the difference.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, ensure};

/// Writes `patch` anew for the code in `root`, if its context does not fit. Says whether it did.
pub(super) fn refresh(root: &Path, patch: &Path, scratch: &Path) -> anyhow::Result<bool> {
    if applies(root, patch)? {
        return Ok(false);
    }
    let text = fs::read_to_string(patch).with_context(|| format!("reading {}", patch.display()))?;
    let head = &text[..text.find("diff --git ").context("a patch has a line `diff --git`")?];
    let names: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("+++ b/")).collect();
    for (side, name) in ["a", "b"].iter().flat_map(|side| names.iter().map(move |name| (side, name))) {
        let copy = scratch.join(side).join(name);
        fs::create_dir_all(copy.parent().context("it lies in a folder")?)?;
        fs::copy(root.join(name), &copy).with_context(|| format!("copying {name}"))?;
    }
    let applied = git(&scratch.join("b"), &["apply", "-C1", "--recount"], Some(patch))?;
    ensure!(applied.status.success(), "does not apply: {}", String::from_utf8_lossy(&applied.stderr).trim());
    // It ends with 1, for there is a difference.
    let differs = git(scratch, &["diff", "--no-index", "--no-color", "--no-prefix", "-U3", "a", "b"], None)?;
    let body = String::from_utf8(differs.stdout).context("a patch is text")?;
    let lines = body.lines().filter(|line| !line.starts_with("index "));
    fs::write(patch, head.to_owned() + &lines.map(|line| format!("{line}\n")).collect::<String>())?;
    ensure!(applies(root, patch)?, "{} does not apply after all", patch.display());
    Ok(true)
}

/// Whether all lines of a patch's context fit.
pub(crate) fn applies(root: &Path, patch: &Path) -> anyhow::Result<bool> {
    Ok(git(root, &["apply", "--check", "--recount"], Some(patch))?.status.success())
}

fn git(folder: &Path, words: &[&str], patch: Option<&Path>) -> anyhow::Result<Output> {
    let patch: Option<PathBuf> = patch.map(std::path::absolute).transpose()?;
    let mut command = Command::new("git");
    command.args(words).args(patch).current_dir(folder);
    // A copy is no repository, and none above it is meant.
    command.env("GIT_CEILING_DIRECTORIES", folder.parent().unwrap_or(folder)).env_remove("GIT_DIR");
    command.output().context("running git")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_patch_follows_its_line_when_what_stands_around_it_changes() {
        let folder = std::env::temp_dir().join(format!("transhume-refresh-{}", std::process::id()));
        let (root, patch) = (folder.join("root"), folder.join("one.patch"));
        fs::create_dir_all(&root).expect("made");
        fs::write(root.join("code"), "new\none\ntwo\nthree\nfour\nother\nlast\n").expect("written");
        let old = "breaks: it\n\ndiff --git a/code b/code\n--- a/code\n+++ b/code\n@@ -1,6 +1,6 @@\n one\n two\n-three\n+3\n four\n five\n six\n";
        fs::write(&patch, old).expect("written");
        assert!(!applies(&root, &patch).expect("git runs"));
        assert!(refresh(&root, &patch, &folder.join("scratch")).expect("it is refreshed"));
        let text = fs::read_to_string(&patch).expect("there");
        assert!(
            text.starts_with("breaks: it\n\ndiff --git a/code b/code\n")
                && text.contains("-three\n+3\n four\n other\n"),
            "{text}"
        );
        assert!(!refresh(&root, &patch, &folder.join("again")).expect("it fits"));
        fs::remove_dir_all(folder).expect("removed");
    }
}
