//! What the network to another host carries at most, as both hosts know their interfaces.

use std::collections::BTreeMap;
use std::time::Duration;

use migrate::stream::{LinkCounters, Remote};

use super::addresses;
use crate::daemon::Daemon;

/// How long the other host may take to say what its interfaces are.
const ANSWER_MAX: Duration = Duration::from_millis(250);

/// What the connections of a session carry at most, in bytes a second: all of their interfaces together, at the end where that
/// is less. Nothing if neither end knows.
pub(crate) async fn capacity(daemon: &Daemon, remote: &Remote) -> Option<u64> {
    let interfaces = daemon.hosts.interfaces()?;
    let [here, there] = addresses(&remote.paths());
    let answered = env::timeout(&*daemon.env, ANSWER_MAX, remote.usage(&there)).await;
    // A host that does not say, or is lost, says nothing of what it carries.
    let there = answered.and_then(Result::ok).flatten().unwrap_or_default();
    [together(&interfaces.look(&here)), together(&there)].into_iter().flatten().min()
}

/// What these interfaces, of which one may have several addresses, carry together. Nothing if one of them is not known.
fn together(found: &[Option<LinkCounters>]) -> Option<u64> {
    let known: Option<BTreeMap<&str, u64>> = found
        .iter()
        .map(|counters| counters.as_ref().map(|counters| (&*counters.interface, counters.capacity)))
        .collect();
    let known = known.filter(|known| !known.is_empty() && known.values().all(|capacity| *capacity > 0))?;
    Some(known.values().sum())
}

#[cfg(test)]
mod tests {
    use super::*;
    use migrate::stream::MigrationCounters;

    fn card(name: &str, capacity: u64) -> Option<LinkCounters> {
        let migrations = MigrationCounters::default();
        Some(LinkCounters { interface: name.to_owned(), at_ns: 0, received: 0, sent: 0, capacity, migrations })
    }

    #[test]
    fn a_card_counts_once_whatever_addresses_it_has_and_one_that_nobody_knows_makes_the_end_unknown() {
        assert_eq!(together(&[card("a", 5), card("b", 7), card("a", 5)]), Some(12));
        assert_eq!(together(&[card("a", 5), card("b", 0)]), None);
        assert_eq!(together(&[card("a", 5), None]), None);
        assert_eq!(together(&[]), None);
    }
}
