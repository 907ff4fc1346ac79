//! What a person may try when a machine is on record as being under way, and nothing is.

use api::v1::{Decision, Error, ResolveRequest};

use super::Host;
use super::machine::NAME;
use crate::process::Process;

type Tried = Result<(), Error>;

async fn try_all(core: ::daemon::Core) -> Vec<(&'static str, Tried)> {
    let take = ResolveRequest { decision: Some(Decision::Take), at_risk: false };
    vec![
        ("cancel", core.cancel_machine_move(NAME).await.map(drop)),
        ("resolve --take", core.resolve_machine(NAME, take).await.map(drop)),
        ("release", core.release_machine(NAME).await.map(drop)),
        ("rm", core.remove_machine(NAME).await.map(drop)),
    ]
}

impl Host {
    /// Tries each of them at both hosts, and gives what became of that.
    pub(crate) async fn try_ways_out(&self) -> Vec<String> {
        let mut tried = Vec::new();
        for (host, (process, core)) in self.cores() {
            // It may die meanwhile.
            for (what, outcome) in process.run(try_all(core)).await.unwrap_or_default() {
                let outcome = outcome.map_or_else(|error| error.to_string(), |()| "done".to_owned());
                tried.push(format!("{what} at {host}: {outcome}"));
            }
        }
        tried.iter().for_each(|tried| self.shared.world.event(format_args!("{tried}")));
        tried
    }

    fn cores(&self) -> Vec<(&'static str, (Process, ::daemon::Core))> {
        let own = {
            let now = self.shared.now.lock();
            now.process.clone().zip(now.core.clone())
        };
        let other = self.shared.daemon_harness.peer.as_ref().and_then(|peer| peer.core());
        own.map(|own| ("a", own)).into_iter().chain(other.map(|other| ("b", other))).collect()
    }
}
