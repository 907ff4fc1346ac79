//! What each command asks of the daemon.

use api::Client;
use api::v1::{
    AdoptRequest, AttachRequest, CheckRequest, CheckedDisk, Decision, Error, ErrorCode, HostAddresses, InviteRequest,
    Job, Monitor, MoveRequest, PairRequest, PlanRequest, ResolveRequest, Result, SetRequest, VolumeState,
};

use crate::args::{AdoptArgs, Command, Common, MoveArgs, PlanArgs, TrustArgs, VolumeCommand};
use crate::path::{absolute, absolute_backend};
use crate::rate::Rate;
use crate::say::print;
use crate::{caches, layers, report, say, show, surrogates, vm, watch};

/// Carries out a command, and gives what the program exits with.
pub(crate) async fn run(command: Command, common: &Common) -> Result<u8> {
    match command {
        Command::Move(args) => {
            let client = client(common);
            client.check_version().await?;
            start_move(&client, args, common.json).await
        }
        Command::Watch(args) => {
            let client = client(common);
            client.check_version().await?;
            watch::watch(&client, args.name.as_deref(), common.json).await
        }
        Command::Vm(command) => {
            let client = client(common);
            client.check_version().await?;
            vm::run(&client, command, common.json).await
        }
        Command::Adopt(args) if args.check => {
            let client = client(common);
            client.check_version().await?;
            check(&client, &args, common.json).await
        }
        command => ask(command, common).await.map(|()| 0),
    }
}

fn client(common: &Common) -> Client {
    Client::new(common.api.strip_prefix("unix:").unwrap_or(&common.api))
}

async fn ask(command: Command, common: &Common) -> Result<()> {
    let (client, json) = (client(common), common.json);
    if let Command::Version = command {
        return version(&client, json).await;
    }
    client.check_version().await?;
    match command {
        Command::Volume(command) => volume(&client, command, json).await,
        Command::Adopt(args) => adopt(&client, args, json).await,
        Command::Release(args) => {
            let volume = client.release(&args.name).await?;
            print(json, &volume, || show::released(&volume))
        }
        Command::Status => {
            let status = client.status().await?;
            print(json, &status, || show::status(&status))
        }
        Command::Pause(args) => steer(&client, &args.name, "pause", json).await,
        Command::Resume(args) => steer(&client, &args.name, "resume", json).await,
        Command::Cancel(args) => steer(&client, &args.name, "cancel", json).await,
        Command::Set(args) => {
            let (bandwidth, reserve) = (bandwidth_of(args.bandwidth, args.slow)?, args.reserve.map(|rate| rate.0));
            let deadline_ms = args.deadline.map(|span| span.0);
            let job = client.set(&args.name, &SetRequest { bandwidth, reserve, deadline_ms }).await?;
            print(json, &job, || show::limits(&job))
        }
        Command::Plan(args) => {
            let request = PlanRequest { request: move_request(&args)? };
            if args.all_disks {
                let plans = client.plan_all(&args.name, &request).await?;
                return print(json, &plans, || plans.iter().map(show::plan).collect::<Vec<_>>().join("\n\n"));
            }
            let plan = client.plan(&args.name, &request).await?;
            print(json, &plan, || show::plan(&plan))
        }
        Command::Resolve(args) => {
            let decision = match (args.take, args.give_back) {
                (true, _) => Some(Decision::Take),
                (false, true) => Some(Decision::GiveBack),
                (false, false) => None,
            };
            let resolution = client.resolve(&args.name, &ResolveRequest { decision, at_risk: args.risk }).await?;
            print(json, &resolution, || show::resolution(&resolution))
        }
        Command::Jobs(args) => {
            let jobs = client.jobs(args.all).await?;
            print(json, &jobs, || show::jobs(&jobs))
        }
        Command::Host(args) => {
            let host = if args.renew { client.renew_host().await? } else { client.host().await? };
            print(json, &host, || show::host(&host, args.renew))
        }
        Command::Surrogate(command) => surrogates::surrogate(&client, command, json).await,
        Command::Cache(command) => Box::pin(caches::cache(&client, command, json)).await,
        Command::Trust(args) => trust(&client, args, json).await,
        Command::Move(_)
        | Command::Watch(_)
        | Command::Vm(_)
        | Command::Copy(_)
        | Command::Rescue(_)
        | Command::Version => Ok(()),
    }
}

async fn version(client: &Client, json: bool) -> Result<()> {
    let daemon = client.version().await;
    let value = serde_json::json!({
        "version": env!("CARGO_PKG_VERSION"),
        "api": api::API_VERSION,
        "daemon": daemon.as_ref().ok(),
    });
    print(json, &value, || {
        let ours = concat!("transhume ", env!("CARGO_PKG_VERSION"));
        match &daemon {
            Ok(daemon) => {
                format!("{ours}\ntranshumed {} (process {}, API {})", daemon.version, daemon.pid, daemon.api.join(", "))
            }
            Err(error) => format!("{ours}\ntranshumed: {error}"),
        }
    })
}

async fn volume(client: &Client, command: VolumeCommand, json: bool) -> Result<()> {
    match command {
        VolumeCommand::Attach(args) => {
            let request = AttachRequest {
                name: args.name,
                backend: absolute_backend(&args.backend)?,
                export: args.export,
                read_only: args.read_only,
                accept_tombstone: args.accept_tombstone,
            };
            let volume = client.attach(&request).await?;
            print(json, &volume, || {
                format!("{} ({}) is served at {}", volume.name, show::bytes(volume.size_bytes), volume.export)
            })
        }
        VolumeCommand::Ls => {
            let volumes = client.volumes().await?;
            print(json, &volumes, || show::volumes(&volumes))
        }
        VolumeCommand::Show(args) => {
            let volume = client.volume(&args.name).await?;
            print(json, &volume, || show::volume(&volume))
        }
        VolumeCommand::Detach(args) => {
            let volume = client.detach(&args.name).await?;
            print(json, &volume, || match volume.state {
                VolumeState::Incoming => format!("{} does not come; what was here of it is removed", volume.name),
                _ => format!("{} is no longer served; its bytes are in {}", volume.name, volume.backend),
            })
        }
        VolumeCommand::Accept(args) => {
            let volume = client.accept(&args.name).await?;
            print(json, &volume, || format!("{} is served from {} again", volume.name, volume.backend))
        }
        VolumeCommand::Snapshot(command) => layers::snapshot(client, command, json).await,
        VolumeCommand::Layer(command) => layers::layer(client, command, json).await,
    }
}

fn monitors(args: &AdoptArgs) -> Result<Vec<Monitor>> {
    let sockets = args.qmp.iter().map(|path| Ok(Monitor::Qmp(absolute(path)?)));
    let domains = args.libvirt.iter().map(|domain| Ok(Monitor::Libvirt(domain.clone())));
    sockets.chain(domains).collect()
}

/// Every disk of every VM. A VM that does not answer does not keep the others from being looked at.
async fn check(client: &Client, args: &AdoptArgs, json: bool) -> Result<u8> {
    let monitors = monitors(args)?;
    let (mut disks, mut failed) = (Vec::new(), Vec::new());
    for monitor in &monitors {
        match client.check(&CheckRequest { monitor: monitor.clone() }).await {
            Ok(found) => disks.extend(found),
            Err(error) if monitors.len() == 1 || error.code == ErrorCode::DaemonUnreachable => return Err(error),
            Err(error) => {
                disks.push(CheckedDisk::of_silent_vm(&monitor.to_string(), &error));
                failed.push(error);
            }
        }
    }
    print(json, &disks, || show::checked_disks(&disks))?;
    // The document is complete: what there is to say besides goes to the standard error alone.
    if let Some(first) = failed.first() {
        say::aside(&format!("transhume: {first}"));
        return Ok(first.exit_code);
    }
    let refused = disks.iter().filter(|disk| !disk.adoptable).count();
    if refused > 0 {
        say::aside(&format!("transhume: {refused} of {} disks cannot be adopted as they are", disks.len()));
        return Ok(ErrorCode::NotAdoptable.exit_code());
    }
    Ok(0)
}

async fn adopt(client: &Client, args: AdoptArgs, json: bool) -> Result<()> {
    let mut monitors = monitors(&args)?;
    let (Some(monitor), true, Some(node), Some(name)) = (monitors.pop(), monitors.is_empty(), args.node, args.name)
    else {
        let error = Error::new(ErrorCode::Invalid, "one VM, one --node and one --name make an adoption");
        return Err(error.with_hint("give each once, or use --check"));
    };
    let (accept_option_loss, accept_tombstone) = (args.accept_option_loss, args.accept_tombstone);
    let format = args.format.map(|format| format.name().to_owned());
    let request = AdoptRequest { monitor, node, name, accept_option_loss, accept_tombstone, format };
    let volume = client.adopt(&request).await?;
    print(json, &volume, || show::adopted(&volume))
}

async fn trust(client: &Client, args: TrustArgs, json: bool) -> Result<()> {
    match args {
        TrustArgs { invite: true, name, .. } => {
            let invitation = client.invite(&InviteRequest { name }).await?;
            print(json, &invitation, || show::invitation(&invitation))
        }
        TrustArgs { remove: Some(name), .. } => {
            let host = client.remove_host(&name).await?;
            print(json, &host, || format!("{name} is trusted no more; on it, `transhume trust --remove` does the same"))
        }
        TrustArgs { change: Some(name), address: addresses, .. } => {
            let host = client.change_host(&name, &HostAddresses { addresses }).await?;
            print(json, &host, || format!("{name} is reached at {}", host.addresses.join(", ")))
        }
        TrustArgs { host: Some(address), code: Some(code), name, .. } => {
            let host = client.pair(&PairRequest { address, code, name }).await?;
            print(json, &host, || show::paired(&host))
        }
        _ => {
            let hosts = client.trusted_hosts().await?;
            print(json, &hosts, || show::trusted_hosts(&hosts))
        }
    }
}

async fn steer(client: &Client, name: &str, action: &str, json: bool) -> Result<()> {
    let job = client.steer(name, action).await?;
    print(json, &job, || match action {
        "cancel" => format!("the move of {name} is cancelled; the guest is on {}", job.source),
        _ => format!("the move of {name} is {}", job.state.name()),
    })
}

/// A rate below this is more often a unit that was forgotten than meant.
const BANDWIDTH_MIN: u64 = 64 << 10;

fn bandwidth_of(rate: Option<Rate>, slow: bool) -> Result<Option<u64>> {
    let Some(Rate(bytes)) = rate else { return Ok(None) };
    if (1..BANDWIDTH_MIN).contains(&bytes) && !slow {
        let message = format!("a bandwidth of {bytes} bytes a second would take very long");
        let hint = "write a unit, as in 200MiB/s, or say --slow as well if it is meant";
        return Err(Error::new(ErrorCode::Invalid, message).with_hint(hint));
    }
    Ok(Some(bytes))
}

fn move_request(args: &PlanArgs) -> Result<MoveRequest> {
    Ok(MoveRequest {
        to: absolute_backend(&args.to)?,
        // Only a disk of a whole VM is handed over.
        shared: false,
        bandwidth: bandwidth_of(args.bandwidth, args.slow)?.filter(|rate| *rate > 0),
        reserve: args.reserve.map(|rate| rate.0).filter(|rate| *rate > 0),
        verify: args.verify.into(),
        strategy: args.how.strategy.into(),
        schedule: args.how.head.schedule.into(),
        follow_ratio: args.how.head.follow_ratio,
        hot_blocks: args.how.hot_blocks,
        skip_zero: args.how.skip_zero,
        downtime_limit_ms: args.how.downtime_limit.map(|span| span.0),
        deadline_ms: args.how.deadline.map(|span| span.0),
        on_no_converge: args.how.on_no_converge.map(Into::into),
        buffer: args.how.buffer.map(|size| size.0),
        read_cache: args.how.head.read_cache.map(|size| size.0),
        surrogate: args.how.head.surrogate.clone(),
        popular_threshold: args.how.head.popular_threshold,
        surrogate_on_flash: args.how.head.surrogate_on_flash,
        sole_copy: args.how.head.sole_copy,
        overwrite: args.overwrite,
        delete_source: false,
        no_persist: args.no_persist,
        persist_hook: args.persist_hook.as_deref().map(absolute).transpose()?,
    })
}

async fn start_move(client: &Client, args: MoveArgs, json: bool) -> Result<u8> {
    let request = MoveRequest { delete_source: args.delete_source, ..move_request(&args.plan)? };
    if args.plan.all_disks {
        return start_move_of_all(client, &args, &request, json).await;
    }
    let job = client.start_move(&args.plan.name, &request).await?;
    if args.detach {
        print(json, &job, || {
            format!("job {}: {} moves to {}; see `transhume watch {}`", job.id, job.volume, job.target, job.volume)
        })?;
        return Ok(0);
    }
    let over = watch::wait(client, &job, json).await?;
    // The report carries the error, so that programs read one document.
    print(json, &report::to_json(&over), || report::to_words(&over))?;
    Ok(over.error.map_or(0, |error| {
        say::aside(&format!("transhume: {error}"));
        error.exit_code
    }))
}

/// All disks of a VM: one document with a report for each.
async fn start_move_of_all(client: &Client, args: &MoveArgs, request: &MoveRequest, json: bool) -> Result<u8> {
    let jobs = client.start_move_of_all(&args.plan.name, request).await?;
    if args.detach {
        print(json, &jobs, || {
            let line = |job: &Job| format!("job {}: {} moves to {}", job.id, job.volume, job.target);
            jobs.iter().map(line).collect::<Vec<_>>().join("\n")
        })?;
        return Ok(0);
    }
    let mut over = Vec::with_capacity(jobs.len());
    for job in &jobs {
        over.push(watch::wait(client, job, json).await?);
    }
    let documents: Vec<_> = over.iter().map(report::to_json).collect();
    print(json, &documents, || over.iter().map(report::to_words).collect::<Vec<_>>().join("\n"))?;
    let errors: Vec<&Error> = over.iter().filter_map(|job| job.error.as_ref()).collect();
    errors.iter().for_each(|error| say::aside(&format!("transhume: {error}")));
    Ok(errors.first().map_or(0, |error| error.exit_code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bandwidth_without_its_unit_is_refused_unless_it_is_meant() {
        let refused = bandwidth_of(Some(Rate(200)), false).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Invalid);
        assert!(refused.hint.as_deref().is_some_and(|hint| hint.contains("--slow")), "{refused:?}");
        assert_eq!(bandwidth_of(Some(Rate(200)), true).unwrap(), Some(200));
        assert_eq!(bandwidth_of(Some(Rate(BANDWIDTH_MIN)), false).unwrap(), Some(BANDWIDTH_MIN));
        assert_eq!(bandwidth_of(Some(Rate(0)), false).unwrap(), Some(0), "no limit any more");
        assert_eq!(bandwidth_of(None, false).unwrap(), None);
    }
}
