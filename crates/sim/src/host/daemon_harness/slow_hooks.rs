//! The operator's hooks on both hosts, where they take their time: they have nothing against anything.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ::daemon::{HookOutput, Hooks, HostsConfig, NoHooks};
use env::EnvRef;
use futures::future::BoxFuture;

use super::Host;
use crate::process::Process;
use crate::rng::Rng;

/// How long one takes at most.
const SPAN_MAX: Duration = Duration::from_millis(40);
const PROGRAM: &str = "/etc/transhume/hook";

struct SlowHooks {
    env: EnvRef,
    rng: Rng,
}

impl Hooks for SlowHooks {
    fn check(&self, _: &Path) -> Result<(), api::v1::Error> {
        Ok(())
    }

    fn run<'a>(&'a self, _: &'a Path, _: &'a [String], _: &'a str) -> BoxFuture<'a, std::io::Result<HookOutput>> {
        Box::pin(async {
            self.env.sleep(self.rng.up_to(SPAN_MAX)).await;
            Ok(HookOutput { success: true, stdout: String::new(), stderr: String::new() })
        })
    }
}

impl Host {
    /// What runs hooks for `process`.
    pub(super) fn hooks(&self, process: &Process) -> Arc<dyn Hooks> {
        match self.shared.setup.others.have_slow_hooks {
            true => Arc::new(SlowHooks { env: process.env(), rng: self.shared.world.rng("hooks") }),
            false => Arc::new(NoHooks),
        }
    }

    /// The same configuration with the hook, if there is one.
    pub(super) fn with_hook(&self, hosts: HostsConfig) -> HostsConfig {
        let vm_hook = self.shared.setup.others.have_slow_hooks.then(|| PROGRAM.into());
        HostsConfig { vm_hook, ..hosts }
    }
}
