//! Runs plans: steps that QEMU's graph shows as done are skipped, and a failure before the decisive step undoes the
//! plan.

use std::io;
use std::path::Path;
use std::time::Duration;

use futures::future::BoxFuture;
use serde_json::{Value, json};

use crate::descriptor;
use crate::disk::Form;
use crate::error::{Error, ErrorKind, Result};
use crate::graph::{Graph, Node};
use crate::plan::{AdoptedDisk, Direction, ExpectedSize, Plan, Step};
use crate::qmp::Qmp;

/// How long to wait for QEMU's connection to our export. QEMU goes on as soon as it is admitted. On a busy machine that
/// may be before the server counts it.
const EXPORT_WAIT: Duration = Duration::from_secs(2);
/// How often it is looked for.
const EXPORT_LOOK: Duration = Duration::from_millis(5);

/// What a running plan needs of whoever serves the export.
pub trait Surroundings: Send {
    /// Takes QEMU-compatible locks on the image, or keeps those that are held. While adopted no other program may open
    /// it; QEMU itself holds none then.
    fn take_locks(&mut self) -> BoxFuture<'_, io::Result<()>>;

    /// Drops the locks, if they are held: QEMU is about to take its own.
    fn drop_locks(&mut self) -> BoxFuture<'_, io::Result<()>>;

    /// Whether QEMU is connected to our export. Commands that drain are not sent while it is not: they would block the
    /// guest until `reconnect-delay` runs out.
    fn is_export_connected(&mut self) -> bool;

    /// Called before each step that is really carried out, and awaited. An error stops the plan there, without undoing,
    /// as a crash would.
    fn before(&mut self, _step: usize, _what: &Step) -> BoxFuture<'_, io::Result<()>> {
        Box::pin(async { Ok(()) })
    }
}

/// Where a disk stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskState {
    /// QEMU reads and writes the image itself, and no node of ours is there.
    Outside,
    /// QEMU reads and writes the image itself; nodes of a plan that was not finished are there.
    Prepared,
    /// QEMU goes through us.
    Inside,
    /// The guest's device is gone (hot-unplugged).
    DeviceGone,
}

/// Which way a recovery should go where both are possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecoveryGoal {
    /// Finish the plan.
    Forward,
    /// Undo it, if its decisive step was not done.
    Back,
}

/// Reads from the graph where a disk stands.
#[must_use]
pub fn disk_state(disk: &AdoptedDisk, graph: &Graph) -> DiskState {
    let names = &disk.nodes;
    let Some(frontend) = graph.frontend(&disk.qom_path) else { return DiskState::DeviceGone };
    let is_inside = match disk.form {
        Form::Reopen => graph.child(&names.format, "file").is_some_and(|child| child.name == names.nbd),
        Form::Replace | Form::Direct => {
            // Others may have put nodes over ours since: a snapshot has it as its backing file.
            frontend.root.as_deref().is_some_and(|root| graph.reaches(root, &names.nbd))
        }
    };
    if is_inside {
        DiskState::Inside
    } else if graph.node(&names.nbd).is_some() {
        DiskState::Prepared
    } else {
        DiskState::Outside
    }
}

/// The node of another program's that lies over an adopted disk, and has what the guest writes.
#[must_use]
pub fn cover_of<'a>(disk: &AdoptedDisk, graph: &'a Graph) -> Option<&'a Node> {
    let root = graph.frontend(&disk.qom_path)?.root.as_deref()?;
    graph.cover_of(root, &disk.nodes.format)
}

/// Has the header of `cover`, which lies over an adopted disk, name the image itself as below it instead of our export.
///
/// # Errors
/// What QEMU says.
pub async fn name_image(qmp: &Qmp, disk: &AdoptedDisk, cover: &Node, image: &Path) -> Result<()> {
    let graph = Graph::read(qmp).await?;
    let root = graph.frontend(&disk.qom_path).and_then(|frontend| frontend.root.as_deref()).unwrap_or(&cover.name);
    let image = image.to_str().ok_or_else(|| {
        Error::new(ErrorKind::Invalid, format!("QEMU takes no such name of a file: {}", image.display()))
    })?;
    let arguments = json!({ "device": root, "image-node-name": cover.name, "backing-file": image });
    done(qmp.execute("change-backing-file", arguments).await)
}

/// Runs an adoption. Returns for how long the guest was stopped, if it was.
///
/// # Errors
/// What a step says. What was done before the decisive step has been undone then, unless the error leaves doubt
/// ([`Error::leaves_doubt`]). In that case [`recover`] reads the truth from the graph once QEMU answers again.
pub async fn adopt(qmp: &Qmp, plan: &Plan, surroundings: &mut dyn Surroundings) -> Result<Option<Duration>> {
    run(qmp, plan, surroundings, Stopped::BySomebodyElse).await
}

/// Runs a release. Returns for how long the guest was stopped, if it was.
///
/// # Errors
/// As [`adopt`]; the locks are held again then.
pub async fn release(qmp: &Qmp, plan: &Plan, surroundings: &mut dyn Surroundings) -> Result<Option<Duration>> {
    run(qmp, plan, surroundings, Stopped::BySomebodyElse).await
}

/// Reads where an interrupted plan stands and finishes it or undoes it. An adoption whose decisive step was done is
/// finished, whatever the wish; the same holds for a release. Gives where the disk stands afterwards.
///
/// # Errors
/// `ExportDisconnected` if QEMU must reach our export first; what a step says.
pub async fn recover(
    qmp: &Qmp,
    plan: &Plan,
    goal: RecoveryGoal,
    surroundings: &mut dyn Surroundings,
) -> Result<DiskState> {
    let graph = Graph::read(qmp).await?;
    let now = disk_state(&plan.disk, &graph);
    let is_decided = match (plan.direction, now) {
        (_, DiskState::DeviceGone) => {
            forget(qmp, &plan.disk, surroundings).await?;
            return Ok(DiskState::DeviceGone);
        }
        (Direction::Adopt, DiskState::Inside) | (Direction::Release, DiskState::Outside | DiskState::Prepared) => true,
        (Direction::Adopt, DiskState::Outside | DiskState::Prepared) | (Direction::Release, DiskState::Inside) => false,
    };
    tracing::info!(volume = plan.disk.volume, ?now, ?goal, is_decided, "recovering a plan");
    let stopped = if plan.resumes { Stopped::ByThisPlan } else { Stopped::BySomebodyElse };
    // A guest that we have stopped goes on first, before the export is asked for anything.
    let is_stopped_by_us = stopped == Stopped::ByThisPlan && plan.pauses() && !graph.is_running;
    if !is_decided && (is_stopped_by_us || goal == RecoveryGoal::Back) {
        undo(qmp, plan, surroundings, stopped).await?;
    }
    if is_decided || goal == RecoveryGoal::Forward {
        run(qmp, plan, surroundings, stopped).await?;
    }
    Ok(disk_state(&plan.disk, &Graph::read(qmp).await?))
}

/// Removes our nodes after the device itself has gone, and drops the locks.
///
/// # Errors
/// What QMP and the locks say.
pub async fn forget(qmp: &Qmp, disk: &AdoptedDisk, surroundings: &mut dyn Surroundings) -> Result<()> {
    let names = &disk.nodes;
    for node in [&names.format, &names.nbd] {
        let step = Step::DeleteNode { node: node.clone() };
        let graph = Graph::read(qmp).await?;
        // Whoever unplugged the device may have put the format node to another use: then it is theirs.
        let is_held = graph.holders(node).next().is_some();
        if !is_held && !is_done(&step, &graph) {
            carry_out(qmp, &step, disk, &graph, surroundings).await?;
        }
    }
    surroundings.drop_locks().await.map_err(|error| locks("dropped", error))
}

/// Who has stopped a guest that is found stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stopped {
    /// An earlier run of this plan, which did not come to resume it; or this run.
    ByThisPlan,
    /// Somebody else, who wants it to stay so.
    BySomebodyElse,
}

async fn run(
    qmp: &Qmp,
    plan: &Plan,
    surroundings: &mut dyn Surroundings,
    mut stopped: Stopped,
) -> Result<Option<Duration>> {
    let decisive = plan.steps.iter().position(is_decisive).unwrap_or(plan.steps.len());
    let mut graph = Graph::read(qmp).await?;
    let mut is_stale = false;
    let mut passed = plan.steps.get(decisive).is_some_and(|step| is_done(step, &graph));
    let (mut stopped_at, mut stopped_for) = (None, None);
    if !passed && is_prepared_while_stopped(plan, &graph) {
        // The guest may have run since then, and what it has made grow would read as zeroes.
        undo(qmp, plan, surroundings, stopped).await?;
        graph = Graph::read(qmp).await?;
    }
    for (index, step) in plan.steps.iter().enumerate() {
        let belongs_before = index < decisive && !matches!(step, Step::TakeLocks | Step::DropLocks);
        // The guest may be stopped: the graph is read again only where a step depends on what others may have done.
        if is_stale && depends_on_others(step) {
            graph = Graph::read(qmp).await?;
            is_stale = false;
        }
        let is_unwanted = *step == Step::Resume && stopped == Stopped::BySomebodyElse;
        if (passed && belongs_before) || is_done(step, &graph) || is_unwanted {
            continue;
        }
        if *step == Step::Pause {
            stopped_at = Some(qmp.env().now());
            stopped = Stopped::ByThisPlan;
        }
        if let Err(error) = surroundings.before(index, step).await {
            let context = format!("stopped before {}", step.describe());
            return Err(Error::new(ErrorKind::Disconnected, context).with_source(error));
        }
        tracing::info!(volume = plan.disk.volume, step = step.describe(), "running a plan");
        let outcome = if index == decisive && plan.pauses() && graph.is_running {
            Err(resumed_by_somebody(step))
        } else {
            carry_out(qmp, step, &plan.disk, &graph, surroundings).await
        };
        if let Err(error) = outcome {
            if passed {
                return Err(error.unsettled());
            }
            if error.leaves_doubt() {
                return Err(error);
            }
            tracing::warn!(volume = plan.disk.volume, %error, "undoing a plan");
            undo(qmp, plan, surroundings, stopped).await.map_err(|second| {
                let context = format!("{error}; and undoing it failed");
                Error::new(second.kind(), context).with_source(second).unsettled()
            })?;
            return Err(error);
        }
        passed |= index == decisive;
        if *step == Step::Resume {
            stopped_for = stopped_at.map(|start| qmp.env().now().since(start));
        }
        is_stale |= !matches!(step, Step::TakeLocks | Step::DropLocks);
    }
    Ok(stopped_for)
}

/// Undoes what it can. After a failed step the next ones are still tried: the guest must go on.
async fn undo(qmp: &Qmp, plan: &Plan, surroundings: &mut dyn Surroundings, stopped: Stopped) -> Result<()> {
    let mut first = Ok(());
    for step in &plan.undo {
        let graph = Graph::read(qmp).await?;
        let is_unwanted = *step == Step::Resume && stopped == Stopped::BySomebodyElse;
        if is_done(step, &graph) || is_unwanted {
            continue;
        }
        if let Err(error) = carry_out(qmp, step, &plan.disk, &graph, surroundings).await {
            tracing::warn!(volume = plan.disk.volume, step = step.describe(), %error, "undoing a plan");
            first = first.and(Err(error));
        }
    }
    first
}

/// Whether a node exists already that may only be added while the guest is stopped.
fn is_prepared_while_stopped(plan: &Plan, graph: &Graph) -> bool {
    let after = plan.steps.iter().skip_while(|step| **step != Step::Pause);
    after.into_iter().any(|step| matches!(step, Step::AddNode { .. }) && is_done(step, graph))
}

/// Whether a step depends on what others may have done since the graph was read. What the plan itself has done since
/// then is known without it.
fn depends_on_others(step: &Step) -> bool {
    matches!(step, Step::Pause | Step::Reopen { .. } | Step::SetDrive { .. } | Step::DeleteNode { .. })
}

fn resumed_by_somebody(step: &Step) -> Error {
    let context = format!("the guest must stand still for {}, and somebody has resumed it", step.describe());
    Error::new(ErrorKind::UnexpectedGraph, context)
}

fn is_decisive(step: &Step) -> bool {
    matches!(step, Step::Reopen { .. } | Step::SetDrive { .. })
}

/// Whether the graph shows that a step is done. Locks are not in the graph; whoever keeps them knows.
fn is_done(step: &Step, graph: &Graph) -> bool {
    match step {
        Step::AddNode { node, .. } => graph.node(node).is_some(),
        Step::SetIothread { node, .. } => graph.holders(node).next().is_some(),
        Step::Reopen { format, to, .. } => graph.child(format, "file").is_some_and(|child| child.name == *to),
        Step::SetDrive { qom_path, to, .. } => {
            graph.frontend(qom_path).is_some_and(|frontend| frontend.root.as_deref() == Some(to))
        }
        Step::DeleteNode { node } => graph.node(node).is_none(),
        Step::Pause => !graph.is_running,
        Step::Resume => graph.is_running,
        Step::TakeLocks | Step::DropLocks => false,
    }
}

/// Whether QEMU is connected to our export, now or within [`EXPORT_WAIT`].
async fn comes_to_be_connected(qmp: &Qmp, surroundings: &mut dyn Surroundings) -> bool {
    let begun = qmp.env().now();
    while !surroundings.is_export_connected() {
        if qmp.env().now().since(begun) >= EXPORT_WAIT {
            return false;
        }
        qmp.env().sleep(EXPORT_LOOK).await;
    }
    true
}

async fn carry_out(
    qmp: &Qmp,
    step: &Step,
    disk: &AdoptedDisk,
    graph: &Graph,
    surroundings: &mut dyn Surroundings,
) -> Result<()> {
    let is_inside = disk_state(disk, graph) == DiskState::Inside;
    // `cont` drains nothing: a guest that we have stopped goes on, and waits for its export itself.
    let may_drain = !matches!(step, Step::TakeLocks | Step::DropLocks | Step::Resume);
    if may_drain && is_inside && !comes_to_be_connected(qmp, surroundings).await {
        let context = format!(
            "QEMU is not connected to the export of {}: {} would block the guest; start the daemon or run rescue first",
            disk.volume,
            step.describe()
        );
        return Err(Error::new(ErrorKind::ExportDisconnected, context));
    }
    match step {
        Step::AddNode { node, options, size } => {
            descriptor::add_node(qmp, options).await?;
            check_size(qmp, node, *size).await
        }
        Step::SetIothread { node, iothread, like } => {
            let iothread = if runs_in_main_loop(qmp, like).await? { Value::Null } else { iothread.as_str().into() };
            done(qmp.execute("x-blockdev-set-iothread", json!({ "node-name": node, "iothread": iothread })).await)
        }
        Step::Reopen { from, format, options, .. } => {
            require(graph.child(format, "file").is_some_and(|child| child.name == *from), step)?;
            done(qmp.execute("blockdev-reopen", json!({ "options": [options] })).await)
        }
        Step::SetDrive { qom_path, from, to } => {
            let root = graph.frontend(qom_path).and_then(|frontend| frontend.root.as_deref());
            require(root == Some(from), step)?;
            done(qmp.execute("qom-set", json!({ "path": qom_path, "property": "drive", "value": to })).await)
        }
        Step::DeleteNode { node } => {
            done(qmp.execute("blockdev-del", json!({ "node-name": node })).await)?;
            descriptor::forget(qmp, graph.node(node)).await
        }
        Step::Pause => done(qmp.execute("stop", json!({})).await),
        Step::Resume => done(qmp.execute("cont", json!({})).await),
        Step::TakeLocks => surroundings.take_locks().await.map_err(|error| locks("taken", error)),
        Step::DropLocks => surroundings.drop_locks().await.map_err(|error| locks("dropped", error)),
    }
}

/// Whether a node that a device uses runs in the main loop. QMP does not tell, but it refuses to move such a node, and
/// takes a move to where it is already as done.
async fn runs_in_main_loop(qmp: &Qmp, node: &str) -> Result<bool> {
    let arguments = json!({ "node-name": node, "iothread": null, "force": true });
    match qmp.execute("x-blockdev-set-iothread", arguments).await {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == ErrorKind::Qemu => Ok(false),
        Err(error) => Err(error),
    }
}

fn done(answer: Result<Value>) -> Result<()> {
    answer.map(drop)
}

fn locks(what: &str, error: io::Error) -> Error {
    Error::new(ErrorKind::Locks, format!("the image's locks could not be {what}")).with_source(error)
}

fn require(holds: bool, step: &Step) -> Result<()> {
    if holds {
        return Ok(());
    }
    let context = format!("somebody has changed QEMU's graph: {} does not find what it expects", step.describe());
    Err(Error::new(ErrorKind::UnexpectedGraph, context))
}

async fn check_size(qmp: &Qmp, node: &str, expected: Option<ExpectedSize>) -> Result<()> {
    let Some(expected) = expected else { return Ok(()) };
    let graph = Graph::read(qmp).await?;
    let shown = graph.node(node).and_then(|node| node.virtual_bytes);
    let fits = match (shown, expected) {
        (None, _) => true,
        (Some(shown), ExpectedSize::Exactly(bytes)) => shown.next_multiple_of(512) == bytes.next_multiple_of(512),
        (Some(shown), ExpectedSize::AtLeast(bytes)) => shown >= bytes,
    };
    if fits {
        return Ok(());
    }
    let context = format!("the export shows {} bytes where the image has {expected:?}", shown.unwrap_or_default());
    Err(Error::new(ErrorKind::Refused, context))
}
