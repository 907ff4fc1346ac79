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

/// Why a patch that applies may make another mistake than is meant, or none. Lines may have moved since it was written, so what it
/// replaces is looked for in the whole file.
pub(crate) fn is_unclear(root: &Path, patch: &Path) -> anyhow::Result<Option<String>> {
    let text = fs::read_to_string(patch).with_context(|| format!("reading {}", patch.display()))?;
    for file in text.split("\n--- a/").skip(1) {
        let name = file.lines().next().unwrap_or_default();
        let code = fs::read_to_string(root.join(name)).with_context(|| format!("reading {name}"))?;
        let code: Vec<&str> = code.lines().collect();
        for hunk in file.split("\n@@ ").skip(1) {
            let hunk = hunk.split("\ndiff --git ").next().unwrap_or_default();
            let side = |sign: char| {
                let lines = hunk.lines().skip(1).filter(move |line| line.is_empty() || line.starts_with([' ', sign]));
                lines.map(|line| line.get(1..).unwrap_or_default()).collect::<Vec<_>>()
            };
            let (old, new) = (side('-'), side('+'));
            if old == new {
                return Ok(Some(format!("a part of it changes nothing in {name}")));
            }
            let places = code.windows(old.len().max(1)).filter(|lines| *lines == old).count();
            if places != 1 {
                return Ok(Some(format!("a part of it fits {places} places of {name}: give it more context")));
            }
        }
    }
    Ok(None)
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
    fn a_patch_that_fits_two_places_or_changes_nothing_is_unclear() {
        let root = std::env::temp_dir().join(format!("transhume-unclear-{}", std::process::id()));
        let patch = root.join("one.patch");
        fs::create_dir_all(&root).expect("made");
        fs::write(root.join("code"), "a\none\ntwo\nend\nb\none\ntwo\nend\nc\n").expect("written");
        let unclear = |body: &str| {
            let text = format!("breaks: it\n\ndiff --git a/code b/code\n--- a/code\n+++ b/code\n{body}");
            fs::write(&patch, text).expect("written");
            assert!(applies(&root, &patch).expect("git runs"), "{body}");
            is_unclear(&root, &patch).expect("it is read")
        };
        assert_eq!(unclear("@@ -1,5 +1,5 @@\n a\n one\n-two\n+2\n end\n b\n"), None);
        assert_eq!(unclear("@@ -2,5 +2,5 @@ fn x() {\n b\n one\n-two\n+2\n end\n c\n"), None, "it has moved");
        assert!(unclear("@@ -6,3 +6,3 @@\n one\n-two\n+2\n end\n").expect("why").contains("2 places"));
        assert!(unclear("@@ -5,3 +5,3 @@\n b\n one\n two\n").expect("why").contains("nothing"));
        fs::remove_dir_all(root).expect("removed");
    }

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
