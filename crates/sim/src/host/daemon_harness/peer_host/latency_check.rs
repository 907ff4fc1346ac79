//! How the guest fares while the hosts cannot reach each other and the volume is still at the first.
//!
//! ```text
//!   the way is gone                       the loss is known                             the way is back
//!        ├────────── WAIT_MAX at most ────────────┼──────── CALM_MAX a request at most ────────┤
//! ```
//!
//! A request is a write that the other host is to have, too, and waits until that has answered or is given up. What is asked
//! after that goes to the source alone. Once the guest is held for the switchover, or anything else happens to it, this has
//! nothing to say.

use std::time::Duration;

use env::Moment;
use migrate::Phase;

use crate::guest::Guest;
use crate::host::Host;
use crate::world::Invariant;

/// So long a request may wait for a host that cannot be reached: a stream that is owed an answer counts as dead when it has
/// heard nothing for two seconds, and it looks at the clock five times a second. When one of two is dead the other one is asked
/// to end it, and may turn out to be dead itself then: 2.5 s were seen in the most of seeds, and never 3.
const WAIT_MAX: Duration = Duration::from_secs(3);
/// So long one may take that was asked after that.
const CALM_MAX: Duration = Duration::from_millis(100);
/// This part of what was asked is answered while the way is gone, if that is long enough to say so.
const SHARE_MIN: f64 = 0.9;
const LONG: Duration = Duration::from_secs(5);
const MANY: u64 = 100;
/// How often somebody looks.
const INTERVAL: Duration = Duration::from_millis(20);

/// What ends this, because it is about something else.
const DISTURBANCES: [&str; 3] = ["crash", "power-loss", "reconnect"];

impl Host {
    /// Looks after the guest from now on, while the hosts cannot reach each other for `span`.
    pub(super) fn watch_guest_for(&self, span: Duration) {
        if self.shared.setup.has_machine {
            // It may be stopped for its switchover, for as long as that may take.
            return;
        }
        if let Some(peer) = &self.shared.daemon_harness.peer {
            *peer.shared.troubles.lock() += 1;
        }
        let host = self.clone();
        self.shared.world.spawn(async move { host.watch_guest(span).await });
    }

    async fn watch_guest(&self, span: Duration) {
        let world = &self.shared.world;
        let guest = &self.shared.guest;
        let (began, before, disturbances) = (world.now(), guest.progress(), self.disturbances());
        let until = began + span;
        let mut share = None;
        loop {
            world.sleep(INTERVAL).await;
            if self.disturbances() != disturbances || !self.works_at_the_source() {
                return;
            }
            let now = world.now();
            if let Some(what) = what_waits(guest, began, now.min(until), now) {
                world.violate(Invariant::AsTold, what);
                return;
            }
            if now >= until {
                share.get_or_insert_with(|| guest.progress().since(&before));
            }
            if now >= until + WAIT_MAX {
                break;
            }
        }
        let Some((asked, answered)) = share.filter(|(asked, _)| span >= LONG && *asked >= MANY) else { return };
        world.event(format_args!("{answered} of {asked} requests were answered while the hosts were apart"));
        if (answered as f64) < SHARE_MIN * asked as f64 {
            let what = format!("only {answered} of {asked} requests were answered in {span:?} without the other host");
            world.violate(Invariant::AsTold, what);
        }
    }

    /// What has happened that is not the way's.
    fn disturbances(&self) -> ([u64; 3], u64) {
        let troubles = self.shared.daemon_harness.peer.as_ref().map_or(0, |peer| *peer.shared.troubles.lock());
        (DISTURBANCES.map(|class| self.shared.world.count(class)), troubles)
    }

    /// Whether the guest's requests need this host alone, and nobody holds them.
    fn works_at_the_source(&self) -> bool {
        let phase = self.control().map(|control| control.snapshot().phase);
        let is_free = phase.is_none_or(|phase| {
            matches!(phase, Phase::Preparing | Phase::Copying | Phase::Verifying | Phase::PreSwitch | Phase::TargetLost)
        });
        is_free && self.holder() == 0
    }
}

/// What says that a request has waited too long, if one has: the way was gone from `began` to `until`, or is still.
fn what_waits(guest: &Guest, began: Moment, until: Moment, now: Moment) -> Option<String> {
    let is_known = began + WAIT_MAX;
    guest.waits().into_iter().find_map(|(asked, took)| {
        let took = took.unwrap_or_else(|| now.since(asked));
        let waited = (asked + took).since(began.max(asked));
        let limit = if asked > is_known && asked + CALM_MAX < until { CALM_MAX } else { WAIT_MAX };
        let is_late = waited > limit && asked + took > began;
        is_late.then(|| format!("a request waited for {waited:?} while the hosts were apart, at most {limit:?} may be"))
    })
}
