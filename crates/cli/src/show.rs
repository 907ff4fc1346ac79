//! Answers in words and tables.

mod caches;

use std::fmt::Write;
use std::time::{Duration, SystemTime};

use api::v1::{
    Arrival, ArrivalStage, CheckedDisk, GuestIo, Host, Invitation, Job, JobState, Layer, LayerKind, LayerState, Plan,
    Progress, Rates, Redirection, Resolution, Status, Surrogate, TrustedHost, Volume, VolumeState,
};
use comfy_table::{Table, presets};

pub(crate) use caches::{cache, caches};

/// A count of bytes for people: `1.5 GiB`.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    let power = (count.ilog2() / 10) as usize;
    let (whole, unit) = (count as f64 / (1_u64 << (10 * power)) as f64, UNITS[power - 1]);
    if whole.fract() == 0.0 { format!("{whole:.0} {unit}") } else { format!("{whole:.1} {unit}") }
}

/// Bytes a second for people.
pub(crate) fn rate(bytes_per_second: f64) -> String {
    format!("{}/s", bytes(bytes_per_second.max(0.0) as u64))
}

/// How fast a move may be.
pub(crate) fn limits(job: &Job) -> String {
    let most = match job.request.bandwidth {
        Some(most) => format!("{} is copied at {} at most", job.volume, rate(most as f64)),
        None => format!("{} is copied without a limit", job.volume),
    };
    let reserve = job.request.reserve.map(|reserve| format!(", and at {} whatever others want", rate(reserve as f64)));
    let deadline = job.request.deadline_ms.map(|deadline| deadline as f64 / 1e3);
    let deadline = deadline.map(|deadline| format!(", and is to be over {} after its start", time(deadline)));
    most + &reserve.unwrap_or_default() + &deadline.unwrap_or_default()
}

/// What others leave to a move that is under way; nothing where there are no others.
pub(crate) fn left_by_others(rates: &Rates) -> Option<String> {
    let held = rates.paths.iter().filter(|path| path.limit.is_some());
    let (limit, others) =
        held.fold((0, 0), |(limit, others), path| (limit + path.limit.unwrap_or(0), others + path.others));
    let held = (limit > 0).then(|| format!("held to {} beside others' {}", rate(limit as f64), rate(others as f64)));
    let late = rates.at_risk.then(|| "its deadline is at risk".to_owned());
    let parts: Vec<String> = held.into_iter().chain(late).collect();
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// A time for people: `850 us`, `1.3 ms`, `42 s`, `3 min 10 s`.
pub(crate) fn time(seconds: f64) -> String {
    match seconds {
        short if short < 0.001 => format!("{:.0} us", short * 1e6),
        short if short < 1.0 => format!("{:.1} ms", short * 1e3),
        some if some < 100.0 => format!("{some:.1} s"),
        long if long < 7200.0 => format!("{:.0} min {:.0} s", (long / 60.0).floor(), long % 60.0),
        long => format!("{:.0} h {:.0} min", (long / 3600.0).floor(), (long % 3600.0) / 60.0),
    }
}

/// Microseconds for people.
pub(crate) fn us(microseconds: u64) -> String {
    time(microseconds as f64 / 1e6)
}

/// What a guest does and feels, in a few words.
pub(crate) fn guest(guest: &GuestIo) -> String {
    if guest.iops < 0.5 {
        return "guest idle".to_owned();
    }
    format!("guest {:.0} IOPS, p99 {}", guest.iops, us(guest.latency_us_p99))
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header);
    table
}

const fn state(state: VolumeState) -> &'static str {
    match state {
        VolumeState::Serving => "serving",
        VolumeState::Moving => "moving",
        VolumeState::Incoming => "incoming",
        VolumeState::Forwarding => "forwarding",
        VolumeState::Down => "down",
        VolumeState::Unknown => "unknown",
    }
}

/// Volumes as a table.
pub(crate) fn volumes(volumes: &[Volume]) -> String {
    if volumes.is_empty() {
        return "no volumes; `transhume volume attach` or `transhume adopt` makes one".to_owned();
    }
    let mut table = table(&["NAME", "STATE", "SIZE", "CLIENTS", "IOPS", "VM", "BACKEND", "EXPORT"]);
    for volume in volumes {
        table.add_row([
            volume.name.clone(),
            state(volume.state).to_owned(),
            bytes(volume.size_bytes),
            volume.connections.to_string(),
            format!("{:.0}", volume.guest.iops),
            volume.vm.as_ref().map_or("-".to_owned(), |vm| vm.monitor.to_string()),
            volume.backend.clone(),
            volume.export.clone(),
        ]);
    }
    let mut text = table.to_string();
    for volume in volumes {
        if let Some(problem) = &volume.problem {
            write!(text, "\n{}: {problem}", volume.name).expect("a string takes everything");
        }
    }
    text
}

/// One volume.
pub(crate) fn volume(volume: &Volume) -> String {
    let mut lines = vec![
        ("name", volume.name.clone()),
        ("state", state(volume.state).to_owned()),
        ("size", format!("{} ({} bytes)", bytes(volume.size_bytes), volume.size_bytes)),
        ("backend", volume.backend.clone()),
        ("export", volume.export.clone()),
        ("epoch", volume.epoch.to_string()),
        ("clients", volume.connections.to_string()),
        ("guest", guest(&volume.guest)),
    ];
    if volume.read_only {
        lines.push(("writes", "refused".to_owned()));
    }
    if let Some(vm) = &volume.vm {
        lines.push(("vm", format!("{} ({}, node {}, {})", vm.monitor, vm.state, vm.node, vm.format)));
    }
    if let Some(job) = volume.job {
        lines.push(("job", job.to_string()));
    }
    if let Some(arrival) = &volume.arrival {
        lines.push(("from", arrived(arrival)));
    }
    for layer in &volume.layers {
        let key = match layer.kind {
            LayerKind::Overlay => "snapshot",
            LayerKind::Cache => "cache",
            LayerKind::Throttle | LayerKind::Redirect | LayerKind::Unknown => "layer",
        };
        lines.push((key, one_layer(layer)));
    }
    if let Some(problem) = &volume.problem {
        lines.push(("problem", problem.clone()));
    }
    lines.into_iter().map(|(key, value)| format!("{key:<8} {value}\n")).collect()
}

/// Snapshots as a table, the oldest first.
pub(crate) fn snapshots(snapshots: &[Layer]) -> String {
    if snapshots.is_empty() {
        return "no snapshots; `transhume volume snapshot add` takes one".to_owned();
    }
    let mut table = table(&["SNAPSHOT", "TAKEN", "WRITTEN SINCE", "STATE"]);
    for snapshot in snapshots {
        table.add_row([
            snapshot.name.clone(),
            snapshot.created_unix_ms.map_or("-".to_owned(), moment),
            snapshot.held_bytes.map_or("-".to_owned(), bytes),
            if snapshot.state == LayerState::Draining { "being removed" } else { "there" }.to_owned(),
        ]);
    }
    table.to_string()
}

/// Layers as a table, the lowest first.
pub(crate) fn layers(layers: &[Layer]) -> String {
    if layers.is_empty() {
        return "no layers".to_owned();
    }
    let mut table = table(&["LAYER", "NAME", "WHAT IT DOES"]);
    for layer in layers {
        let kind = match layer.kind {
            LayerKind::Overlay => "snapshot",
            LayerKind::Throttle => "throttle",
            LayerKind::Redirect => "surrogate",
            LayerKind::Cache => "cache",
            LayerKind::Unknown => "unknown",
        };
        table.add_row([kind.to_owned(), layer.name.clone(), one_layer(layer)]);
    }
    table.to_string()
}

/// Surrogates as a table.
pub(crate) fn surrogates(surrogates: &[Surrogate]) -> String {
    if surrogates.is_empty() {
        return "no surrogates; `transhume surrogate create` makes one".to_owned();
    }
    let mut table = table(&["SURROGATE", "STORES", "A PART", "IN USE", "STATE"]);
    for surrogate in surrogates {
        table.add_row([
            surrogate.name.clone(),
            surrogate.stores.len().to_string(),
            bytes(surrogate.partition_bytes),
            format!("{} of {}", surrogate.partitions.len(), surrogate.partitions_max),
            if surrogate.draining { "draining" } else { "there" }.to_owned(),
        ]);
    }
    table.to_string()
}

/// One surrogate.
pub(crate) fn surrogate(surrogate: &Surrogate) -> String {
    let mut lines: Vec<(&str, String)> = vec![("name", surrogate.name.clone())];
    for store in &surrogate.stores {
        let made = if store.made { ", made by the daemon" } else { "" };
        lines.push(("store", format!("{} ({}{made})", store.place, bytes(surrogate.bytes))));
    }
    let (used, max) = (surrogate.partitions.len(), surrogate.partitions_max);
    lines.push(("parts", format!("{used} of {max} in use, {} each", bytes(surrogate.partition_bytes))));
    if surrogate.draining {
        lines.push(("state", "draining: no further volume gets a part".to_owned()));
    }
    for partition in &surrogate.partitions {
        let redirection = partition.redirection.as_ref().map_or("not open".to_owned(), redirection);
        let in_stores = match (partition.lost_store, partition.rebuild_left_bytes) {
            (_, Some(left)) => format!("; {} are still to be copied to its other store", bytes(left)),
            (Some(number), None) => format!("; STORE {number} IS LOST"),
            (None, None) => String::new(),
        };
        lines.push(("volume", format!("{}: {redirection}{in_stores}", partition.volume)));
    }
    lines.into_iter().map(|(key, value)| format!("{key:<8} {value}\n")).collect()
}

/// What a redirection has done, in one line.
pub(crate) fn redirection(redirection: &Redirection) -> String {
    let reads = redirection.reads_redirected + redirection.reads_merged + redirection.reads_at_source;
    let writes = redirection.writes_redirected + redirection.writes_at_source;
    let mut line = format!(
        "{} of {reads} reads and {} of {writes} writes by the surrogate, {} of {} places in use",
        redirection.reads_redirected,
        redirection.writes_redirected,
        redirection.places - redirection.places_free.min(redirection.places),
        redirection.places
    );
    if redirection.has_failed {
        line.push_str("; THE SURROGATE HAS FAILED");
    }
    line
}

/// How long ago a moment was.
fn moment(unix_ms: u64) -> String {
    let then = SystemTime::UNIX_EPOCH + Duration::from_millis(unix_ms);
    let ago = SystemTime::now().duration_since(then).unwrap_or_default();
    format!("{} ago", time(ago.as_secs_f64()))
}

fn one_layer(layer: &Layer) -> String {
    match layer.kind {
        LayerKind::Overlay => {
            let held = layer.held_bytes.map_or("what was written since".to_owned(), bytes);
            format!("{}: holds {held}", layer.name)
        }
        LayerKind::Throttle => {
            let iops = layer.iops.map(|iops| format!("{iops} requests/s"));
            let bandwidth = layer.bytes_per_second.map(|rate| self::rate(rate as f64));
            format!("at most {}", iops.into_iter().chain(bandwidth).collect::<Vec<_>>().join(" and "))
        }
        LayerKind::Redirect => {
            let held = layer.held_bytes.map_or("what was written since".to_owned(), bytes);
            let drains = if layer.state == LayerState::Draining { ", which goes back" } else { "" };
            format!("{}: holds {held}{drains}", layer.name)
        }
        LayerKind::Cache => caches::layer(layer),
        LayerKind::Unknown => "of a later daemon".to_owned(),
    }
}

/// Where a volume comes from.
fn arrived(arrival: &Arrival) -> String {
    let from = format!("{} (as {} there)", arrival.host, arrival.volume);
    match arrival.stage {
        ArrivalStage::Filling => format!("{from}, which holds it and fills this copy"),
        ArrivalStage::Prepared => format!("{from}; ready to be taken under epoch {}", arrival.epoch),
        ArrivalStage::Held if arrival.used => format!("{from}, whose guest uses it from there"),
        ArrivalStage::Held => format!("{from}, whose guest may use it from there until it is detached there"),
        ArrivalStage::Unknown => from,
    }
}

/// What two hosts have on record of a volume.
pub(crate) fn resolution(found: &Resolution) -> String {
    let mut lines = vec![("volume", found.volume.clone()), ("here", found.here.clone())];
    if let (Some(host), Some(there)) = (&found.host, &found.there) {
        lines.push(("there", format!("{there} ({host})")));
    }
    lines.extend(found.arbiter.iter().map(|arbiter| ("arbiter", arbiter.clone())));
    lines.push(("so", found.verdict.clone()));
    lines.extend(found.risk.iter().map(|risk| ("risk", risk.clone())));
    lines.extend(found.done.iter().map(|done| ("done", done.clone())));
    lines.into_iter().map(|(key, value)| format!("{key:<8} {value}\n")).collect()
}

/// The daemon as a whole.
pub(crate) fn status(status: &Status) -> String {
    let mut text = format!(
        "transhumed {} (process {}), up {}, state in {}\n\n{}\n",
        status.daemon.version,
        status.daemon.pid,
        time(status.uptime_seconds),
        status.state_dir,
        volumes(&status.volumes)
    );
    if !status.jobs.is_empty() {
        write!(text, "\n{}", jobs(&status.jobs)).expect("a string takes everything");
    }
    text
}

/// When a move will be over, and between which that lies.
pub(crate) fn eta(progress: &Progress) -> Option<String> {
    let short = |seconds: u64| time(seconds as f64);
    let between = progress.eta_seconds_min.zip(progress.eta_seconds_max);
    let between = between.map(|(least, most)| format!(" ({} to {})", short(least), short(most)));
    progress.eta_seconds.map(|eta| format!("{}{}", short(eta), between.unwrap_or_default()))
}

/// Moves as a table.
pub(crate) fn jobs(jobs: &[Job]) -> String {
    if jobs.is_empty() {
        return "no moves under way".to_owned();
    }
    let mut table = table(&["JOB", "VOLUME", "STATE", "DONE", "RATE", "LEFT", "GUEST", "TO"]);
    for job in jobs {
        let progress = job.progress.as_ref().filter(|_| !job.state.is_over());
        let dash = || "-".to_owned();
        table.add_row([
            job.id.to_string(),
            job.volume.clone(),
            match (progress, job.state) {
                (Some(progress), JobState::Running) => progress.phase.clone(),
                _ => job.state.name().to_owned(),
            },
            progress.map_or_else(dash, |progress| format!("{:.0} %", progress.percent)),
            progress.map_or_else(dash, |progress| rate(progress.rate as f64)),
            progress.and_then(eta).unwrap_or_else(dash),
            job.guest.as_ref().filter(|_| progress.is_some()).map_or_else(dash, guest),
            job.target.clone(),
        ]);
    }
    let mut text = table.to_string();
    for job in jobs {
        if let Some(error) = &job.error {
            write!(text, "\njob {}: {error}", job.id).expect("a string takes everything");
        }
    }
    text
}

/// What a move would cost.
pub(crate) fn plan(plan: &Plan) -> String {
    let mut text = format!(
        "Moving {} from {} to {}\n\n  to copy     {} of {} ({} of holes are not copied)\n  at          {}\n  \
         guest       writes {}\n  time        about {} ({} to {}) in {} passes\n  stall       about {} at the switchover\n",
        plan.volume,
        plan.source,
        plan.target,
        bytes(plan.bytes_to_copy),
        bytes(plan.bytes_total),
        bytes(plan.bytes_zero),
        rate(plan.copy_bytes_per_second as f64),
        rate(plan.guest_write_bytes_per_second),
        time(plan.seconds),
        time(plan.seconds_min),
        time(plan.seconds_max),
        plan.passes,
        us(plan.stall_us),
    );
    for note in &plan.notes {
        writeln!(text, "  note        {note}").expect("a string takes everything");
    }
    match &plan.refusal {
        Some(refusal) => writeln!(text, "\nIt would be refused now: {refusal}").expect("a string takes everything"),
        None => text.push_str("\nNothing stands in its way.\n"),
    }
    text
}

/// A volume that was just adopted.
pub(crate) fn adopted(volume: &Volume) -> String {
    let Volume { name, export, backend, .. } = volume;
    format!("{name} is adopted: its VM goes on through {export}, on {backend}{}", stop(volume))
}

/// A volume that was just released.
pub(crate) fn released(volume: &Volume) -> String {
    format!("{} is back with its VM, on {}{}", volume.name, volume.backend, stop(volume))
}

/// For how long the guest was stopped for that.
fn stop(volume: &Volume) -> String {
    let stopped = volume.vm.as_ref().and_then(|vm| vm.stopped_us);
    stopped.map_or_else(String::new, |span| format!(" (the guest was stopped for {})", us(span)))
}

/// Disks that were looked at.
pub(crate) fn checked_disks(disks: &[CheckedDisk]) -> String {
    if disks.is_empty() {
        return "no disks".to_owned();
    }
    let mut text = String::new();
    for disk in disks {
        if disk.node.is_empty() {
            writeln!(text, "{}\n    not looked at: {}", disk.vm, disk.reasons.join("; "))
                .expect("a string takes everything");
            continue;
        }
        let verdict = if disk.adoptable { "can be adopted" } else { "cannot be adopted" };
        writeln!(text, "{}  node {}  {}  {}  {}", disk.vm, disk.node, disk.format, bytes(disk.size_bytes), disk.file)
            .and_then(|()| writeln!(text, "    {verdict} ({})", disk.device))
            .expect("a string takes everything");
        for line in disk.reasons.iter().chain(&disk.notes) {
            writeln!(text, "    - {line}").expect("a string takes everything");
        }
    }
    text
}

/// This host as others know it.
pub(crate) fn host(host: &Host, is_new: bool) -> String {
    let lines = [
        ("name", host.name.clone()),
        ("fingerprint", host.fingerprint.clone()),
        ("addresses", if host.addresses.is_empty() { "not known here".to_owned() } else { host.addresses.join(", ") }),
        ("listens", host.listen.join(", ")),
        ("good until", host.certificate_until.clone()),
    ];
    let mut text: String = lines.into_iter().map(|(key, value)| format!("{key:<12} {value}\n")).collect();
    if host.plaintext {
        text.push_str(
            "plaintext    without encryption, to and from hosts that have it set, too: for measurements only\n",
        );
    }
    if let Some(problem) = &host.problem {
        writeln!(text, "problem      {problem}").expect("a string takes everything");
    }
    if is_new {
        text.push_str("\nThis identity is new: remove this host on the others, and pair them anew.\n");
    }
    text
}

/// A code, and what to do with it.
pub(crate) fn invitation(invitation: &Invitation) -> String {
    let Invitation { code, seconds, tries, addresses, port, .. } = invitation;
    let address = addresses.first().cloned().unwrap_or_else(|| format!("HOST:{port}"));
    let whole = if addresses.is_empty() { ", with this host's address for HOST" } else { "" };
    format!(
        "The code is {code}\n\nOn the other host, within {} minutes{whole}:\n  transhume trust {address} {code}\n\n\
         It is good once, for {tries} tries. Tell it only to whom you would give these disks.",
        seconds / 60
    )
}

/// A host that was just paired with this one.
pub(crate) fn paired(host: &TrustedHost) -> String {
    let TrustedHost { name, fingerprint, addresses, .. } = host;
    let mut text = format!(
        "{name} and this host trust each other\n  fingerprint  {fingerprint}\n  addresses    {}\n",
        addresses.join(", ")
    );
    if let Some(ahead) = host.clock_ahead_seconds {
        let way = if ahead > 0 { "ahead of" } else { "behind" };
        writeln!(
            text,
            "  note         its clock is {} {way} this host's: set the wrong one",
            time(ahead.unsigned_abs() as f64)
        )
        .expect("a string takes everything");
    }
    text
}

/// The hosts that are trusted.
pub(crate) fn trusted_hosts(hosts: &[TrustedHost]) -> String {
    if hosts.is_empty() {
        return "no other host is trusted; `transhume trust --invite` lets one join".to_owned();
    }
    let mut table = table(&["NAME", "ADDRESSES", "FINGERPRINT"]);
    for host in hosts {
        table.add_row([host.name.clone(), host.addresses.join(", "), host.fingerprint.clone()]);
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_counts_are_short_and_right() {
        assert_eq!(time(0.00085), "850 us");
        assert_eq!(time(0.0013), "1.3 ms");
        assert_eq!(time(42.0), "42.0 s");
        assert_eq!(time(190.0), "3 min 10 s");
        assert_eq!(time(7260.0), "2 h 1 min");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(2 << 30), "2 GiB");
    }
}
