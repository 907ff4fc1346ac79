//! QEMU's own migration of memory and devices, driven over QMP.
//!
//! ```text
//!  source   setup ─▶ active ─▶ pre-switchover ──switch_over──▶ device ─▶ completed (guest: postmigrate)
//!             │         │        │ guest stopped, disks still its own       │
//!             └─────────┴────────┴──cancel──▶ cancelled: the guest runs     └─resume: only if the target never ran
//!  target   setup ─▶ active ──────────────────────────────────────▶ completed (guest: paused) ── start_guest
//!
//!  post-copy:
//!  source   active ─▶ pre-switchover ──switch_over──▶ postcopy-active ─────────────▶ completed
//!  target   active ─────────────────────────────────▶ postcopy-active (guest: paused) ── start_guest ─▶ completed
//!                                                        ▲     │ the connection is lost, on both sides
//!                                                        └── postcopy-paused: recover_incoming, then recover_outgoing
//! ```
//!
//! A source in `postcopy-active` still has all of the memory, and can be cancelled and resumed as long as its connection is open
//! and the target's guest has not run (tried with QEMU 7.2). In `postcopy-paused` QEMU 7.2 never ends a cancel: recover first.

use std::path::Path;
use std::time::Duration;

use futures::future::{Either, select};
use serde_json::{Map, Value, json};
use tokio::sync::broadcast::error::RecvError;

use super::status::{MigrationPhase, MigrationStatus};
use crate::error::{Error, ErrorKind, Result};
use crate::qmp::{Qmp, Version};

/// How often QEMU is asked beside its events: the numbers change without an event.
const LOOK: Duration = Duration::from_millis(100);
/// How long a guest may take to run again, and a cancelled migration to end. Both wait for requests in flight.
const SETTLE_LIMIT: Duration = Duration::from_secs(60);
/// How long a completed migration may take until QEMU's run state says so.
const POSTMIGRATE_LIMIT: Duration = Duration::from_secs(5);
/// Since this version QEMU carries a guest that sleeps. An older one wakes it.
const CARRIES_SUSPENDED: u64 = 9;
/// How long a cancelled migration is left alone before it is taken for one that waits in vain.
const CANCEL_QUIET: Duration = Duration::from_secs(1);
/// Bytes of a unix socket's path, without the zero that ends it.
pub(super) const SOCKET_PATH_BYTES_MAX: usize = 107;

/// How a migration is run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MigrationOptions {
    /// 0: one plain stream. Otherwise multifd with so many connections beside the first one.
    ///
    /// QEMU 7.2 may wait for ever if a connection of multifd's ends at the switch: its migration thread waits for the
    /// channel with the lock that the guest and the monitor need, and only killing that QEMU helps. With one stream the
    /// migration fails, and the guest goes on. Whoever relays the connections can hold them open at the source's side.
    pub channels: u8,
    /// Bytes a second; 0 sets no limit.
    pub bandwidth_bytes_max: u64,
    /// How long the guest may be stopped for the last memory. QEMU goes on copying until it can keep to it.
    pub downtime_limit: Duration,
    /// Whether QEMU slows the guest's processors down if it makes memory dirty faster than it is sent.
    pub auto_converge: bool,
    /// Whether the guest may run at the target before all of its memory is there. Only with one plain stream.
    pub postcopy: bool,
    /// Whether memory in files that QEMU has mapped shared is left out: somebody else copies it. Only with one plain stream.
    pub ignores_shared: bool,
}

/// Where the migration of this QEMU stands, outgoing or incoming.
///
/// # Errors
/// What QMP says.
pub async fn status(qmp: &Qmp) -> Result<MigrationStatus> {
    Ok(MigrationStatus::parse(&qmp.execute("query-migrate", json!({})).await?))
}

/// Sets the source up. Capabilities that somebody has left on are switched off: both sides must agree on them.
///
/// # Errors
/// `Refused` if this QEMU lacks a capability that is needed; what QMP says.
pub async fn prepare_outgoing(qmp: &Qmp, options: &MigrationOptions) -> Result<()> {
    let mut wanted = common_capabilities(options);
    // The order is ours then: the last bytes of the disks first, then the switch.
    wanted.push(Wanted { name: "pause-before-switchover", is_required: true });
    if options.auto_converge {
        wanted.push(Wanted { name: "auto-converge", is_required: false });
    }
    set_capabilities(qmp, &wanted).await?;
    let mut parameters = steering(Some(options.bandwidth_bytes_max), Some(options.downtime_limit));
    set_channels(&mut parameters, options);
    if options.postcopy {
        parameters.insert("max-postcopy-bandwidth".to_owned(), options.bandwidth_bytes_max.into());
    }
    qmp.execute("migrate-set-parameters", Value::Object(parameters)).await.map(drop)
}

/// Begins the migration to whatever listens on `socket`. QEMU connects `1 + channels` times. QEMU before 8.0 takes the
/// first connection that the target sees for the main one: whoever passes the connections on keeps their order.
///
/// # Errors
/// What QMP says. That nobody listens may only show as a phase of `failed`.
pub async fn begin_outgoing(qmp: &Qmp, socket: &Path) -> Result<()> {
    qmp.execute("migrate", json!({ "uri": uri(socket)? })).await.map(drop)
}

/// Changes the bandwidth and the accepted downtime, before or while memory is copied.
///
/// # Errors
/// What QMP says.
pub async fn steer(qmp: &Qmp, bandwidth_bytes_max: Option<u64>, downtime_limit: Option<Duration>) -> Result<()> {
    let parameters = steering(bandwidth_bytes_max, downtime_limit);
    if parameters.is_empty() {
        return Ok(());
    }
    qmp.execute("migrate-set-parameters", Value::Object(parameters)).await.map(drop)
}

/// Sets the target up, with the options that the source was given.
///
/// # Errors
/// As [`prepare_outgoing`].
pub async fn prepare_incoming(qmp: &Qmp, options: &MigrationOptions) -> Result<()> {
    set_capabilities(qmp, &common_capabilities(options)).await?;
    let mut parameters = Map::new();
    set_channels(&mut parameters, options);
    if parameters.is_empty() {
        return Ok(());
    }
    qmp.execute("migrate-set-parameters", Value::Object(parameters)).await.map(drop)
}

/// Has the target listen on `socket`. It exists when this returns.
///
/// # Errors
/// What QMP says. A QEMU that was not started with `-incoming defer`, or that listens already, refuses.
pub async fn begin_incoming(qmp: &Qmp, socket: &Path) -> Result<()> {
    qmp.execute("migrate-incoming", json!({ "uri": uri(socket)? })).await.map(drop)
}

/// Waits until `until` holds, and gives the status that it holds for. QEMU's events wake it, and it looks every 100 ms
/// beside.
///
/// # Errors
/// `Migration` with QEMU's words if the migration fails or is cancelled first; `TimedOut` after `limit`; what QMP says.
pub async fn wait_for(
    qmp: &Qmp,
    until: impl Fn(&MigrationStatus) -> bool,
    limit: Option<Duration>,
) -> Result<MigrationStatus> {
    let begun = qmp.env().now();
    let mut events = qmp.events();
    loop {
        let now = status(qmp).await?;
        if until(&now) {
            return Ok(now);
        }
        if now.phase.has_failed() {
            let words = now.error.as_deref().unwrap_or("QEMU does not say why");
            let context = format!("the migration of the memory is {}: {words}", now.phase);
            return Err(Error::new(ErrorKind::Migration, context));
        }
        let waited = qmp.env().now().since(begun);
        let left = limit.map(|limit| limit.saturating_sub(waited));
        if left == Some(Duration::ZERO) {
            let context = format!("the migration of the memory is still {} after {} s", now.phase, waited.as_secs());
            return Err(Error::new(ErrorKind::TimedOut, context));
        }
        let mut pause = qmp.env().sleep(left.map_or(LOOK, |left| left.min(LOOK)));
        loop {
            let next = std::pin::pin!(events.recv());
            match select(next, pause).await {
                Either::Left((Ok(event), later)) if event.name != "MIGRATION" => pause = later,
                // A phase has changed, or events were missed.
                Either::Left((Ok(_) | Err(RecvError::Lagged(_)), _)) => break,
                Either::Left((Err(RecvError::Closed), later)) => {
                    later.await;
                    break;
                }
                Either::Right(_) => break,
            }
        }
    }
}

/// Stops the guest of a source whose memory is still copied: what is left of it does not change any more.
///
/// A guest that QEMU itself has stopped for the switch is started again by QEMU if the connection fails then. QEMU before 8.1
/// does that without taking the disks back, and dies of the guest's next write. One that was stopped before stays stopped, until
/// [`resume`] takes the disks back and starts it.
///
/// # Errors
/// What QMP says.
pub async fn stop_guest(qmp: &Qmp) -> Result<()> {
    qmp.execute("stop", json!({})).await.map(drop)
}

/// Lets a source in `pre-switchover` send the rest. From here on QEMU gives the disks up.
///
/// # Errors
/// What QMP says; it refuses in any other phase.
pub async fn switch_over(qmp: &Qmp) -> Result<()> {
    qmp.execute("migrate-continue", json!({ "state": "pre-switchover" })).await.map(drop)
}

/// Has a source that copies memory stop its guest at the end of the pass, and send the rest of the memory after the devices' state. It
/// waits in `pre-switchover` as ever. With little left QEMU sends that before, as without this.
///
/// # Errors
/// What QMP says; it refuses if no migration is under way, or the capability was not set.
pub async fn start_postcopy(qmp: &Qmp) -> Result<()> {
    qmp.execute("migrate-start-postcopy", json!({})).await.map(drop)
}

/// Has a target in `postcopy-paused` listen on `socket` for the connection that is made again. It exists when this returns.
///
/// # Errors
/// What QMP says; it refuses in any other phase.
pub async fn recover_incoming(qmp: &Qmp, socket: &Path) -> Result<()> {
    qmp.execute("migrate-recover", json!({ "uri": uri(socket)? })).await.map(drop)
}

/// Has a source in `postcopy-paused` go on over a new connection to `socket`. What the target lacks is sent, whatever was sent before.
///
/// # Errors
/// What QMP says; it refuses in any other phase.
pub async fn recover_outgoing(qmp: &Qmp, socket: &Path) -> Result<()> {
    qmp.execute("migrate", json!({ "uri": uri(socket)?, "resume": true })).await.map(drop)
}

/// Cancels the migration and waits until none is under way. Fine if there is none. It may come too late: then the phase
/// is `completed` afterwards.
///
/// # Errors
/// `Refused` if its connection was lost in post-copy: QEMU 7.2 would never end. `TimedOut`; what QMP says.
pub async fn cancel(qmp: &Qmp) -> Result<()> {
    let phase = status(qmp).await?.phase;
    if !phase.is_under_way() {
        return Ok(());
    }
    if matches!(phase, MigrationPhase::PostcopyPaused | MigrationPhase::PostcopyRecover) {
        let context = format!("the migration is in {phase}: it is made whole again before it is cancelled");
        return Err(Error::refused(context));
    }
    qmp.execute("migrate_cancel", json!({})).await?;
    let begun = qmp.env().now();
    loop {
        let left = SETTLE_LIMIT.saturating_sub(qmp.env().now().since(begun));
        match wait_for(qmp, |now| !now.phase.is_under_way(), Some(left.min(CANCEL_QUIET))).await {
            Err(error) if error.kind() == ErrorKind::TimedOut && left > CANCEL_QUIET => end_vain_wait(qmp).await,
            Err(error) if error.kind() == ErrorKind::TimedOut => {
                let context =
                    format!("the migration of the memory is not cancelled after {} s", SETTLE_LIMIT.as_secs());
                return Err(Error::new(ErrorKind::TimedOut, context));
            }
            ended => return ended.map(drop),
        }
    }
}

/// Wakes a migration that was cancelled at the moment it was about to wait for the switch. QEMU looks at the phase
/// before it waits and not after, so it would wait for ever (seen with 7.2). It only goes on to fail: the phase is not
/// the one of a switch, and a wake-up too many is taken back at the next wait.
async fn end_vain_wait(qmp: &Qmp) {
    if let Err(error) = qmp.execute("migrate-continue", json!({ "state": "cancelling" })).await {
        // It has ended meanwhile.
        tracing::debug!(%error, "the cancelled migration is not woken");
    }
}

/// Has the guest run at the source again: after a cancelled or a failed migration, and after a completed one. Only for
/// a guest that does not run at the target and never will: two would write to the same disks. Done if it runs.
///
/// # Errors
/// `Refused` while a migration waits for the switch or is past it: cancel it first. `TimedOut`; what QMP says.
pub async fn resume(qmp: &Qmp) -> Result<()> {
    let phase = status(qmp).await?.phase;
    if matches!(phase, MigrationPhase::PreSwitchover | MigrationPhase::Device) {
        let context = format!("the migration is in {phase}: cancel it before the guest is resumed");
        return Err(Error::refused(context));
    }
    run_guest(qmp, "source").await
}

/// Starts the guest at the target and announces its network addresses. From here on the source's must never run again.
///
/// # Errors
/// `Refused` if not everything is loaded: QEMU would keep the wish and start the guest when it likes. What QMP says.
pub async fn start_guest(qmp: &Qmp) -> Result<()> {
    if !is_loaded(qmp).await? {
        let phase = status(qmp).await?.phase;
        return Err(Error::refused(format!("the target has not loaded the machine: its migration is {phase}")));
    }
    run_guest(qmp, "target").await?;
    // QEMU has announced itself when it had loaded, while the disks were not yet its own; switches may have learnt
    // otherwise since.
    let rounds = json!({ "initial": 50, "max": 550, "rounds": 5, "step": 100 });
    if let Err(error) = qmp.execute("announce-self", rounds).await {
        // The guest runs: its own traffic tells the switches a little later.
        tracing::warn!(%error, "the guest's network addresses are not announced");
    }
    Ok(())
}

/// Whether the target has everything and only waits to be started. In post-copy the memory may follow.
///
/// # Errors
/// What QMP says.
pub async fn is_loaded(qmp: &Qmp) -> Result<bool> {
    let phase = status(qmp).await?.phase;
    let has_devices = phase == MigrationPhase::Completed || phase.is_postcopy();
    Ok(has_devices && run_state(qmp).await? != "inmigrate")
}

/// Whether a run state is that of a guest which QEMU has stopped for a migration.
#[must_use]
pub fn is_stopped_for_switch(state: &str) -> bool {
    matches!(state, "finish-migrate" | "postmigrate")
}

/// Refuses a guest in a state that this QEMU cannot give to another one.
///
/// # Errors
/// `Refused`, with what helps.
pub fn refuse_state(state: &str, version: Version) -> Result<()> {
    if state == "suspended" && version.major < CARRIES_SUSPENDED {
        let context = format!(
            "the guest sleeps (S3), and QEMU {version} cannot carry that to another host: wake it first (`system_wakeup`)"
        );
        return Err(Error::refused(context));
    }
    Ok(())
}

/// Makes sure that a source whose migration is completed is as that has left it.
///
/// # Errors
/// `Refused` if somebody has let its guest run, or has stopped it by another command since; `TimedOut`; what QMP says.
pub async fn verify_stopped(qmp: &Qmp) -> Result<()> {
    let begun = qmp.env().now();
    loop {
        let state = run_state(qmp).await?;
        match state.as_str() {
            "postmigrate" => return Ok(()),
            // The migration says that it is completed a moment before the guest's state does.
            "finish-migrate" if qmp.env().now().since(begun) < POSTMIGRATE_LIMIT => qmp.env().sleep(LOOK / 20).await,
            "finish-migrate" => {
                return Err(Error::new(ErrorKind::TimedOut, "QEMU does not come to the end of its migration"));
            }
            _ => {
                let context =
                    format!("the guest is {state}: another client of its monitor has let it run at the source");
                return Err(Error::refused(context));
            }
        }
    }
}

/// Has QEMU end.
///
/// # Errors
/// What QMP says.
pub async fn quit(qmp: &Qmp) -> Result<()> {
    match qmp.execute("quit", json!({})).await {
        // It may end before it answers.
        Err(error) if error.kind() == ErrorKind::Disconnected => Ok(()),
        answered => answered.map(drop),
    }
}

/// QEMU's run state, such as `running` or `postmigrate`.
///
/// # Errors
/// What QMP says.
pub async fn run_state(qmp: &Qmp) -> Result<String> {
    let said = qmp.execute("query-status", json!({})).await?;
    Ok(said["status"].as_str().unwrap_or_default().to_owned())
}

async fn run_guest(qmp: &Qmp, side: &str) -> Result<()> {
    let begun = qmp.env().now();
    loop {
        let state = run_state(qmp).await?;
        if is_live(&state) {
            return Ok(());
        }
        // QEMU itself starts the guest at the end of a cancelled migration, and takes no `cont` before.
        let is_settling = state == "finish-migrate" || status(qmp).await?.phase == MigrationPhase::Cancelling;
        if !is_settling {
            qmp.execute("cont", json!({})).await?;
            if is_live(&run_state(qmp).await?) {
                return Ok(());
            }
        }
        if qmp.env().now().since(begun) >= SETTLE_LIMIT {
            let context = format!("the guest at the {side} is still {state} after {} s", SETTLE_LIMIT.as_secs());
            return Err(Error::new(ErrorKind::TimedOut, context));
        }
        qmp.env().sleep(LOOK).await;
    }
}

/// One that sleeps goes on when it is woken.
fn is_live(state: &str) -> bool {
    matches!(state, "running" | "suspended")
}

struct Wanted {
    name: &'static str,
    is_required: bool,
}

/// What both sides must have on.
fn common_capabilities(options: &MigrationOptions) -> Vec<Wanted> {
    let mut wanted = vec![
        Wanted { name: "events", is_required: false },
        // The source hears that the target has loaded everything, or why not, before it counts as completed.
        Wanted { name: "return-path", is_required: true },
        // The target leaves the disks alone until its guest is started.
        Wanted { name: "late-block-activate", is_required: true },
    ];
    if options.channels > 0 {
        wanted.push(Wanted { name: "multifd", is_required: true });
    }
    if options.postcopy {
        wanted.push(Wanted { name: "postcopy-ram", is_required: true });
    }
    if options.ignores_shared {
        // Since QEMU 8.1 only files with a name are left out.
        wanted.push(Wanted { name: "x-ignore-shared", is_required: true });
    }
    wanted
}

async fn set_capabilities(qmp: &Qmp, wanted: &[Wanted]) -> Result<()> {
    let said = qmp.execute("query-migrate-capabilities", json!({})).await?;
    let changes = capability_changes(&said, wanted)?;
    if changes.is_empty() {
        return Ok(());
    }
    qmp.execute("migrate-set-capabilities", json!({ "capabilities": changes })).await.map(drop)
}

/// What is to be set, of all that this QEMU has. QEMU checks the whole set at once.
fn capability_changes(said: &Value, wanted: &[Wanted]) -> Result<Vec<Value>> {
    let known: Vec<(&str, bool)> = said
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|one| Some((one["capability"].as_str()?, one["state"].as_bool()?)))
        .collect();
    let is_missing = |one: &&Wanted| one.is_required && !known.iter().any(|(name, _)| *name == one.name);
    if let Some(missing) = wanted.iter().find(is_missing) {
        let context = format!("this QEMU has no migration capability {}: it is too old for this", missing.name);
        return Err(Error::refused(context));
    }
    let wish = |name: &str| wanted.iter().any(|one| one.name == name);
    let differing = known.iter().filter(|(name, state)| *state != wish(name));
    Ok(differing.map(|(name, _)| json!({ "capability": name, "state": wish(name) })).collect())
}

fn set_channels(parameters: &mut Map<String, Value>, options: &MigrationOptions) {
    if options.channels > 0 {
        parameters.insert("multifd-channels".to_owned(), options.channels.into());
    }
}

fn steering(bandwidth_bytes_max: Option<u64>, downtime_limit: Option<Duration>) -> Map<String, Value> {
    let mut parameters = Map::new();
    if let Some(bytes) = bandwidth_bytes_max {
        parameters.insert("max-bandwidth".to_owned(), bytes.into());
    }
    if let Some(limit) = downtime_limit {
        // QEMU takes no more than 2000 s.
        let milliseconds = limit.as_millis().min(2_000_000) as u64;
        parameters.insert("downtime-limit".to_owned(), milliseconds.into());
    }
    parameters
}

fn uri(socket: &Path) -> Result<String> {
    match socket.to_str() {
        Some(text) if text.len() <= SOCKET_PATH_BYTES_MAX => Ok(format!("unix:{text}")),
        Some(text) => Err(Error::new(ErrorKind::Invalid, format!("{text}: too long for a socket's path"))),
        None => Err(Error::new(ErrorKind::Invalid, format!("{}: not UTF-8, as QEMU needs it", socket.display()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(channels: u8) -> MigrationOptions {
        let downtime_limit = Duration::from_millis(300);
        let (bandwidth_bytes_max, auto_converge, postcopy, ignores_shared) = (0, false, false, false);
        MigrationOptions { channels, bandwidth_bytes_max, downtime_limit, auto_converge, postcopy, ignores_shared }
    }

    #[test]
    fn only_differences_are_set_and_what_was_left_on_goes_off() {
        let said = json!([
            { "capability": "xbzrle", "state": true },
            { "capability": "events", "state": true },
            { "capability": "return-path", "state": false },
            { "capability": "late-block-activate", "state": false },
            { "capability": "multifd", "state": true },
        ]);
        let changes = capability_changes(&said, &common_capabilities(&options(0))).expect("all are there");
        let expected = json!([
            { "capability": "xbzrle", "state": false },
            { "capability": "return-path", "state": true },
            { "capability": "late-block-activate", "state": true },
            { "capability": "multifd", "state": false },
        ]);
        assert_eq!(Value::Array(changes), expected);
    }

    #[test]
    fn a_capability_that_is_missing_is_named() {
        let said = json!([
            { "capability": "return-path", "state": false },
            { "capability": "late-block-activate", "state": false },
        ]);
        assert!(capability_changes(&said, &common_capabilities(&options(0))).is_ok(), "events are not required");
        let error = capability_changes(&said, &common_capabilities(&options(2))).expect_err("no multifd");
        assert!(error.kind() == ErrorKind::Refused && error.to_string().contains("multifd"), "{error}");
    }

    #[test]
    fn a_socket_that_qemu_would_cut_is_refused() {
        assert_eq!(uri(Path::new("/run/a")).expect("short"), "unix:/run/a");
        assert_eq!(uri(Path::new(&"/a".repeat(60))).expect_err("long").kind(), ErrorKind::Invalid);
    }
}
