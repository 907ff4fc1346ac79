//! `transhume vm`: whole machines.

use std::io::IsTerminal;
use std::time::Duration;

use api::Client;
use api::v1::{
    CacheTransfer, CacheTransferRequest, CacheWarmStart, Decision, DiskHandling, Error, ErrorCode, FoundVm, JobState,
    MemoryEngine, Monitor, ResolveRequest, Result, Vm, VmAddRequest, VmMove, VmMovePhase, VmMoveRequest, VmPlan,
    VmPreparation,
};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::args::{HowArgs, VmCommand};
use crate::path::absolute;
use crate::say::print;
use crate::{say, show};

/// How often progress is asked for.
const INTERVAL: Duration = Duration::from_millis(200);

/// Carries out a command, and gives what the program exits with.
pub(crate) async fn run(client: &Client, command: VmCommand, json: bool) -> Result<u8> {
    match command {
        VmCommand::Add(args) => {
            let monitor = match (args.qmp, args.libvirt) {
                (_, Some(domain)) => Monitor::Libvirt(domain),
                (path, None) => Monitor::Qmp(absolute(path.unwrap_or_default())?),
            };
            let vm = client.add_vm(&VmAddRequest { name: args.name, monitor }).await?;
            print(json, &vm, || show_one(&vm))?;
        }
        VmCommand::Rm(args) => {
            let vm = client.remove_vm(&args.name).await?;
            print(json, &vm, || format!("{} is known here no more", vm.name))?;
        }
        VmCommand::Ls(args) if args.found => {
            let found = client.found_vms().await?;
            print(json, &found, || show_found(&found))?;
        }
        VmCommand::Ls(_) => {
            let vms = client.vms().await?;
            print(json, &vms, || show_all(&vms))?;
        }
        VmCommand::Show(args) => {
            let vm = client.vm(&args.name).await?;
            print(json, &vm, || show_one(&vm))?;
        }
        VmCommand::Plan(args) => {
            let plan = client.plan_vm(&args.how.name, &request(&args.how)).await?;
            print(json, &plan, || show_plan(&plan, args.show_command))?;
            return Ok(plan.refusals.first().map_or(0, |refusal| refusal.exit_code));
        }
        VmCommand::Prepare(args) => {
            let preparation = client.prepare_vm(&args.name).await?;
            print(json, &preparation, || show_preparation(&preparation))?;
        }
        VmCommand::Move(args) => {
            let request = VmMoveRequest {
                delete_source: args.delete_source,
                keep_volumes: args.keep_volumes,
                ..request(&args.how)
            };
            let begun = client.move_vm(&args.how.name, &request).await?;
            if args.detach {
                print(json, &begun, || format!("{0} moves to {1}; see `transhume vm watch {0}`", begun.vm, begun.to))?;
                return Ok(0);
            }
            return watch(client, &args.how.name, json).await;
        }
        VmCommand::Watch(args) => return watch(client, &args.name, json).await,
        VmCommand::Cancel(args) => {
            let over = client.cancel_vm(&args.name).await?;
            print(json, &over, || show_move(&over))?;
        }
        VmCommand::Resume(args) => {
            let moving = client.resume_vm(&args.name).await?;
            print(json, &moving, || show_move(&moving))?;
        }
        VmCommand::Release(args) => {
            let vm = client.release_vm(&args.name).await?;
            print(json, &vm, || show_one(&vm))?;
        }
        VmCommand::Resolve(args) => {
            let decision = match (args.take, args.give_back) {
                _ if args.lost => Some(Decision::Lost),
                (true, _) => Some(Decision::Take),
                (false, true) => Some(Decision::GiveBack),
                (false, false) => None,
            };
            let found = client.resolve_vm(&args.name, &ResolveRequest { decision, at_risk: args.risk }).await?;
            print(json, &found, || found.iter().map(show::resolution).collect::<Vec<_>>().join("\n\n"))?;
        }
    }
    Ok(0)
}

fn request(how: &HowArgs) -> VmMoveRequest {
    VmMoveRequest {
        to: how.to.clone(),
        disks: how.disks.clone(),
        bandwidth: how.bandwidth.map(|rate| rate.0).filter(|rate| *rate > 0),
        verify: how.verify.into(),
        strategy: how.strategy.into(),
        schedule: how.head.schedule.into(),
        follow_ratio: how.head.follow_ratio,
        read_cache: how.head.read_cache.map(|size| size.0),
        surrogate: how.head.surrogate.clone(),
        popular_threshold: how.head.popular_threshold,
        surrogate_on_flash: how.head.surrogate_on_flash,
        sole_copy: how.head.sole_copy,
        guest_latency_ms: how.guest_latency.map(|span| span.0),
        channels: how.channels,
        downtime_limit_ms: how.downtime_limit.map(|span| span.0),
        auto_converge: how.auto_converge,
        memory: how.memory.into(),
        memory_cpu_percent: how.memory_cpu,
        postcopy: how.postcopy,
        deadline_ms: how.deadline.map(|span| span.0),
        delete_source: false,
        no_persist: how.no_persist,
        keep_volumes: false,
        caches: CacheTransferRequest {
            transfer: how.cache_transfer.map_or_else(CacheTransfer::default, Into::into),
            at: how.cache_at.clone(),
            wait_ms: how.cache_wait.map(|span| span.0),
            warm_start: if how.cache_warm_with_memory { CacheWarmStart::Memory } else { CacheWarmStart::Switchover },
            in_flight: how.cache_in_flight,
            time_ms: how.cache_time.map(|span| span.0),
        },
    }
}

/// Waits until the move is over, with a line of progress if somebody looks. Ctrl-C leaves it running.
async fn watch(client: &Client, name: &str, json: bool) -> Result<u8> {
    let line = ProgressBar::new_spinner();
    line.set_style(ProgressStyle::with_template("{spinner} {msg}").unwrap_or_else(|_| ProgressStyle::default_bar()));
    if json || !std::io::stderr().is_terminal() {
        line.set_draw_target(ProgressDrawTarget::hidden());
    }
    let over = loop {
        match client.vm_move(name).await {
            Ok(moving) if moving.state.is_over() => break moving,
            Ok(moving) => {
                line.set_message(progress(&moving));
                line.tick();
            }
            // It is being restarted, and knows more afterwards.
            Err(error) if error.code == ErrorCode::DaemonUnreachable => line.set_message("the daemon is away"),
            Err(error) => return Err(error),
        }
        tokio::time::sleep(INTERVAL).await;
    };
    line.finish_and_clear();
    print(json, &over, || show_move(&over))?;
    let unfinished = unfinished_disks(&over).map(|(_, error)| error.clone()).next();
    Ok(over.error.or(unfinished).map_or(0, |error| {
        say::aside(&format!("transhume: {error}"));
        error.exit_code
    }))
}

/// The disks of a machine that has gone of which something is left to do here, as an old image that keeps its name.
fn unfinished_disks(over: &VmMove) -> impl Iterator<Item = (&str, &Error)> {
    let disks = over.disks.iter().filter(|_| over.state == JobState::Done);
    disks.filter_map(|job| Some((job.volume.as_str(), job.error.as_ref()?)))
}

fn progress(moving: &VmMove) -> String {
    let mut parts = vec![format!("{} to {}: {}", moving.vm, moving.to, moving.phase)];
    if moving.phase == VmMovePhase::Disks {
        let disks = moving.disks.iter().filter_map(|job| job.progress.as_ref());
        let percents: Vec<f64> = disks.map(|progress| progress.percent).collect();
        let least = percents.iter().copied().fold(100.0, f64::min);
        parts.push(format!("{least:.0} %"));
    }
    if let Some(memory) =
        moving.memory.as_ref().filter(|_| matches!(moving.phase, VmMovePhase::Memory | VmMovePhase::Postcopy))
    {
        parts.push(format!("{} left of {}", show::bytes(memory.bytes_left), show::bytes(memory.bytes_total)));
        if memory.dirty_bytes_per_second > 0 {
            parts.push(format!("the guest writes {}", show::rate(memory.dirty_bytes_per_second as f64)));
        }
    }
    if let Some(limit) =
        moving.memory_rates.as_ref().and_then(|rates| rates.limit).filter(|_| moving.phase == VmMovePhase::Memory)
    {
        parts.push(format!("{} beside others", show::rate(limit as f64)));
    }
    parts.extend(moving.forecast_seconds.map(|seconds| format!("{} expected", show::time(seconds))));
    parts.join(", ")
}

fn show_all(vms: &[Vm]) -> String {
    if vms.is_empty() {
        return "no VM is known here; `transhume vm add NAME --qmp PATH` adds one that runs".to_owned();
    }
    let line = |vm: &Vm| {
        let facts = vm.facts.as_ref();
        let memory = facts.map_or_else(String::new, |facts| show::bytes(facts.memory_bytes));
        let host = vm.host.as_ref().map_or_else(String::new, |host| format!("  {host}"));
        format!("{:<20} {:<9} {:>9}  {} disks{host}", vm.name, vm.state.to_string(), memory, vm.disks.len())
    };
    vms.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn show_found(found: &[FoundVm]) -> String {
    if found.is_empty() {
        return "no VM runs here that is not known; only those of users whom the daemon may look at are found"
            .to_owned();
    }
    let line = |vm: &FoundVm| {
        let pid = vm.pid.map_or_else(|| "libvirt's".to_owned(), |pid| format!("process {pid}"));
        format!("{:<20} {pid:<16} {}", vm.name, vm.hint)
    };
    found.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn show_one(vm: &Vm) -> String {
    let mut lines = vec![format!("{}: {}", vm.name, vm.state)];
    let host = vm.host.as_ref().map(|host| format!("  other host   {host}"));
    lines.extend(host);
    let pid = vm.pid.map_or_else(String::new, |pid| format!(", process {pid}"));
    lines.push(format!("  monitor      {}{pid}", vm.monitor));
    if let Some(facts) = &vm.facts {
        lines.push(format!("  QEMU         {}, {}, {}", facts.qemu, facts.machine, facts.accelerator));
        lines.push(format!("  memory       {}, {} processors", show::bytes(facts.memory_bytes), facts.vcpus));
    }
    for disk in &vm.disks {
        let volume = disk.volume.as_ref().map_or_else(String::new, |volume| format!(", volume {volume}"));
        lines.push(format!("  disk         {}: {}, {}{volume}", disk.node, disk.file, show::bytes(disk.size_bytes)));
    }
    lines.extend(vm.problem.as_ref().map(|problem| format!("  problem      {problem}")));
    lines.extend(vm.last_move.as_ref().map(|last| format!("  last move    {}", show_move(last))));
    let unfinished = vm.last_move.iter().flat_map(unfinished_disks);
    lines.extend(unfinished.map(|(volume, error)| format!("  unfinished   {volume}: {error}")));
    lines.join("\n")
}

fn show_plan(plan: &VmPlan, with_command: bool) -> String {
    let mut lines = vec![format!("{} to {}", plan.vm, plan.to)];
    let there = plan.memory_resident_bytes.map(|bytes| format!(", {} of it in use", show::bytes(bytes)));
    let dirty = plan.dirty_bytes_per_second.filter(|rate| *rate > 0);
    let dirty = dirty.map(|rate| format!(", {} change", show::rate(rate as f64)));
    let rate = plan.memory_bytes_per_second.map(|rate| format!(", {} can be sent", show::rate(rate as f64)));
    let seen = [there, dirty, rate].into_iter().flatten().collect::<String>();
    lines.push(format!("  memory       {}{seen}", show::bytes(plan.memory_bytes)));
    for disk in &plan.disks {
        let adopted = if disk.volume.is_some() { "" } else { "adopted and " };
        let how = match disk.handling {
            Some(DiskHandling::Shared) => format!("{adopted}handed over at {}", disk.file),
            Some(DiskHandling::Copied) | None => format!("{adopted}copied"),
        };
        lines.push(format!("  disk         {}: {}, {how}", disk.node, show::bytes(disk.size_bytes)));
    }
    lines.extend(plan.seconds.map(|seconds| format!("  takes        about {}", show::time(seconds))));
    lines.extend(plan.downtime_ms.map(|downtime| format!("  downtime     about {}", show::time(downtime / 1e3))));
    let not_parallel = plan.not_parallel.as_ref().map_or_else(String::new, |why| format!(" (not parallel: {why})"));
    let engine = plan.memory_engine.map(|engine| format!("  copied by    {}{not_parallel}", engine_name(engine)));
    lines.extend(engine);
    lines.extend(plan.notes.iter().map(|note| format!("  note         {note}")));
    if with_command {
        lines.push(format!("  command      {}", plan.command.join(" ")));
        let change = |change: &api::v1::VmChange| {
            let to = if change.to.is_empty() { "(nothing)" } else { &change.to };
            format!("  {:<12} {} -> {to}: {}", change.option, change.from, change.why)
        };
        lines.extend(plan.changes.iter().map(change));
    }
    match plan.refusals.as_slice() {
        [] => lines.push("  nothing stands against it".to_owned()),
        refusals => lines.extend(refusals.iter().map(|error: &Error| format!("  refused      {error}"))),
    }
    lines.join("\n")
}

fn show_preparation(preparation: &VmPreparation) -> String {
    let Some(reason) = &preparation.not_parallel else {
        return format!("the parallel engine can copy the memory of {}", preparation.vm);
    };
    let mut lines = vec![format!("the parallel engine cannot copy the memory of {}: {reason}", preparation.vm)];
    lines.push("start it anew with these options:".to_owned());
    for change in &preparation.changes {
        let instead = if change.from.is_empty() { String::new() } else { format!("   (instead of {})", change.from) };
        let option = if change.to.is_empty() {
            format!("no {}", change.option)
        } else {
            format!("{} {}", change.option, change.to)
        };
        lines.push(format!("  {option}{instead}"));
    }
    lines.push("and this in the environment of QEMU itself, not of a program that starts it:".to_owned());
    match preparation.environment.as_slice() {
        [] => lines.push("  (libtranshume_preload.so is not installed beside transhumed: `make install`)".to_owned()),
        environment => lines.extend(environment.iter().map(|entry| format!("  {entry}"))),
    }
    lines.join("\n")
}

const fn engine_name(engine: MemoryEngine) -> &'static str {
    match engine {
        MemoryEngine::Parallel => "the parallel engine",
        MemoryEngine::Qemu | MemoryEngine::Auto => "QEMU",
    }
}

fn foretold(seconds: Option<f64>) -> String {
    seconds.map_or_else(String::new, |seconds| format!(" (expected {})", show::time(seconds)))
}

fn show_move(moved: &VmMove) -> String {
    let elapsed = show::time(moved.elapsed_ms as f64 / 1e3);
    let memory = moved.memory.as_ref().map_or_else(String::new, |memory| {
        let by = moved.memory_engine.map_or_else(String::new, |engine| format!(" by {}", engine_name(engine)));
        format!(", {} of memory sent{by} in {} iterations", show::bytes(memory.bytes_sent), memory.iterations)
    });
    match moved.state {
        JobState::Done => {
            let downtime = moved.downtime_ms.map_or_else(String::new, |downtime| {
                let foretold = foretold(moved.forecast_downtime_ms.map(|forecast| forecast / 1e3));
                format!(", the guest was stopped for {}{foretold}", show::time(downtime / 1e3))
            });
            let foretold = foretold(moved.forecast_seconds);
            format!("{} is at {} after {elapsed}{foretold}{memory}{downtime}", moved.vm, moved.to)
        }
        JobState::Cancelled => format!("{} stays here: the move to {} was cancelled", moved.vm, moved.to),
        JobState::Failed if moved.error.as_ref().is_some_and(|error| error.code == ErrorCode::VmLost) => {
            format!(
                "{} is at {} by its commit, and is not known to run there: the move failed after {elapsed}",
                moved.vm, moved.to
            )
        }
        JobState::Failed => format!("{} stays here: the move to {} was undone after {elapsed}", moved.vm, moved.to),
        _ => format!("{}, {elapsed} so far{memory}", progress(moved)),
    }
}
