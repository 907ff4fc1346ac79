//! Hooks that are programs of this host.

use std::fs::Metadata;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use api::v1::{Error, ErrorCode};
use futures::future::BoxFuture;
use vm::{Runner, SystemRunner};

use super::{HookOutput, Hooks};
use crate::problem::Result;

/// Write permission of anybody but the owner, and the bit that has files be removed by their owners only.
const OTHERS_WRITE: u32 = 0o022;
const STICKY: u32 = 0o1000;
const EXECUTE: u32 = 0o111;

/// This host's programs.
pub(crate) struct HookPrograms;

impl Hooks for HookPrograms {
    fn check(&self, program: &Path) -> Result<()> {
        let refuse = |why: String, hint: &str| {
            let message = format!("the hook {} is not run: {why}", program.display());
            Err(Error::new(ErrorCode::ConfigInvalid, message).with_hint(hint.to_owned()))
        };
        const CORRECT: &str = "correct `vm-hook` in the section [hosts] of the configuration, and restart the daemon";
        const OWN: &str = "give it and its directories to root, and let nobody else write there (`chmod go-w`)";
        let found = std::fs::canonicalize(program).and_then(|path| Ok((std::fs::metadata(&path)?, path)));
        let (found, path) = match found {
            Ok(found) => found,
            Err(error) => return refuse(error.to_string(), CORRECT),
        };
        if !found.is_file() || found.permissions().mode() & EXECUTE == 0 {
            return refuse("it is no program".to_owned(), CORRECT);
        }
        if !is_safe(&found) {
            return refuse("somebody else than root may change it".to_owned(), OWN);
        }
        for folder in path.ancestors().skip(1) {
            let is_kept = std::fs::metadata(folder).is_ok_and(|found| is_safe(&found));
            if !is_kept {
                return refuse(format!("somebody else than root may replace files in {}", folder.display()), OWN);
            }
        }
        Ok(())
    }

    fn run<'a>(
        &'a self,
        program: &'a Path,
        arguments: &'a [String],
        input: &'a str,
    ) -> BoxFuture<'a, std::io::Result<HookOutput>> {
        Box::pin(async move {
            // Whoever waits has a limit of its own.
            let runner = SystemRunner { limit: Duration::MAX, only_path: true };
            runner.run(program, arguments, &[], input).await
        })
    }
}

/// Whether nobody but root, or whoever runs this daemon, can put something else there.
fn is_safe(found: &Metadata) -> bool {
    let mode = found.permissions().mode();
    let is_own = found.uid() == 0 || found.uid() == rustix::process::geteuid().as_raw();
    let is_shared = found.is_dir() && mode & STICKY != 0;
    is_own && (mode & OTHERS_WRITE == 0 || is_shared)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{Permissions, create_dir, read_to_string, set_permissions, write};
    use std::path::PathBuf;

    fn script(folder: &Path, text: &str) -> PathBuf {
        let path = folder.join("hook");
        write(&path, format!("#!/bin/sh\n{text}\n")).expect("written");
        set_permissions(&path, Permissions::from_mode(0o755)).expect("set");
        path
    }

    #[test]
    fn a_program_that_others_may_replace_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = script(folder.path(), "exit 0");
        HookPrograms.check(&path).expect("it is root's");
        for (mode, what) in [(0o775, "may change it"), (0o757, "may change it"), (0o644, "no program")] {
            set_permissions(&path, Permissions::from_mode(mode)).expect("set");
            let error = HookPrograms.check(&path).expect_err("accepted");
            assert!(error.message.contains(what), "{mode:o}: {error}");
        }
        let open = folder.path().join("open");
        create_dir(&open).expect("made");
        let path = script(&open, "exit 0");
        set_permissions(&open, Permissions::from_mode(0o777)).expect("set");
        let error = HookPrograms.check(&path).expect_err("accepted");
        assert!(error.message.contains("may replace files in"), "{error}");
        assert!(HookPrograms.check(Path::new("/no/such/hook")).is_err());
    }

    #[tokio::test]
    async fn a_hook_gets_its_words_and_input_and_of_the_environment_only_the_path() {
        let folder = tempfile::tempdir().expect("a folder");
        let seen = folder.path().join("seen");
        let path = script(folder.path(), &format!("(echo \"$@\"; cat; /usr/bin/env) >{}", seen.display()));
        let words = ["prepare", "source", "web1"].map(str::to_owned);
        let output = HookPrograms.run(&path, &words, "{}\n").await.expect("it runs");
        assert!(output.success, "{output:?}");
        let seen = read_to_string(&seen).expect("it was written");
        let (said, environment) = seen.split_at("prepare source web1\n{}\n".len());
        assert_eq!(said, "prepare source web1\n{}\n");
        // A shell adds these itself.
        let names = environment.lines().filter_map(|line| line.split('=').next());
        let others: Vec<&str> = names.filter(|name| !["PATH", "PWD", "SHLVL", "_", "OLDPWD"].contains(name)).collect();
        assert_eq!(others, Vec::<&str>::new(), "{environment}");
    }

    #[tokio::test]
    async fn a_hook_that_nobody_waits_for_any_more_ends_with_its_children() {
        let folder = tempfile::tempdir().expect("a folder");
        let pid = folder.path().join("pid");
        let path = script(folder.path(), &format!("sleep 1000 & echo $! >{}; wait", pid.display()));
        let env = env::RealEnv::new();
        let hung = HookPrograms.run(&path, &[], "");
        assert!(env::timeout(&env, Duration::from_millis(500), hung).await.is_none());
        let pid: u32 = read_to_string(&pid).expect("written").trim().parse().expect("a number");
        let mut looks = (0..500).map(|_| {
            std::thread::sleep(Duration::from_millis(10));
            vm::QemuProcess::of(pid).is_none()
        });
        assert!(looks.any(|is_gone| is_gone), "what it has started goes on");
    }
}
