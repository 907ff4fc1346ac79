//! `/metrics` in Prometheus' text format.

mod caches;
mod machines;

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use api::v1;
use filters::{DirectionWindow, LatencyHistogram};

use crate::daemon::Daemon;
use crate::descriptors::Usage;
use crate::volume::Volume;

/// The upper bounds of the latency buckets, in microseconds.
const BUCKETS_US: [u64; 14] =
    [50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 1_000_000, 10_000_000];

/// All metrics as they are now.
pub(crate) fn render(daemon: &Daemon) -> String {
    let mut out = String::new();
    let volumes = daemon.volumes();
    family(&mut out, "transhume_up_seconds", "gauge", "Seconds since the daemon came up.");
    line(&mut out, "transhume_up_seconds", "", daemon.env.now().since(daemon.started).as_secs_f64());
    family(&mut out, "transhume_request_pool_bytes", "gauge", "Memory of guest requests in flight.");
    line(&mut out, "transhume_request_pool_bytes", "", daemon.pool.in_use().get() as f64);

    let descriptors = Usage::now();
    family(&mut out, "transhume_descriptors", "gauge", "File descriptors that are used.");
    line(&mut out, "transhume_descriptors", "", descriptors.used as f64);
    family(&mut out, "transhume_descriptors_max", "gauge", "How many there may be.");
    line(&mut out, "transhume_descriptors_max", "", descriptors.limit as f64);
    if let Some(log) = &daemon.log_queue {
        family(&mut out, "transhume_log_lost_lines_total", "counter", "Lines of the log that could not be written.");
        line(&mut out, "transhume_log_lost_lines_total", "", log.lost() as f64);
    }

    family(&mut out, "transhume_volume_up", "gauge", "Whether the volume is served.");
    for volume in daemon.shown_volumes() {
        let is_up = volume.state != v1::VolumeState::Down;
        line(&mut out, "transhume_volume_up", &format!("{{volume=\"{}\"}}", volume.name), f64::from(u8::from(is_up)));
    }
    family(&mut out, "transhume_volume_connections", "gauge", "Clients connected.");
    for volume in &volumes {
        line(&mut out, "transhume_volume_connections", &labels(volume, &[]), volume.connections() as f64);
    }
    let snapshots: Vec<_> = volumes.iter().map(|volume| (volume, volume.meter.snapshot())).collect();
    let directions = || {
        snapshots.iter().flat_map(|(volume, snapshot)| {
            [("read", &snapshot.read), ("write", &snapshot.write), ("flush", &snapshot.flush)]
                .map(|(verb, window)| (*volume, verb, window))
        })
    };
    family(&mut out, "transhume_volume_bytes_total", "counter", "Bytes asked for.");
    for (volume, verb, window) in directions() {
        line(&mut out, "transhume_volume_bytes_total", &labels(volume, &[("verb", verb)]), window.bytes as f64);
    }
    family(&mut out, "transhume_volume_errors_total", "counter", "Requests that failed.");
    for (volume, verb, window) in directions() {
        line(&mut out, "transhume_volume_errors_total", &labels(volume, &[("verb", verb)]), window.errors as f64);
    }
    family(&mut out, "transhume_volume_request_seconds", "histogram", "How long requests took.");
    for (volume, verb, window) in directions() {
        histogram(&mut out, volume, verb, window);
    }
    render_layers(&mut out, &volumes);
    caches::render(&mut out, daemon, &volumes);
    render_jobs(&mut out, daemon);
    render_hosts(&mut out, daemon);
    machines::render(&mut out, daemon);
    out
}

fn render_layers(out: &mut String, volumes: &[Arc<Volume>]) {
    type Figure = fn(&v1::Layer) -> Option<u64>;
    let figures: [(&str, &str, Figure); 4] = [
        ("transhume_layer_held_bytes", "What a layer holds that what lies below lacks.", |layer| layer.held_bytes),
        ("transhume_layer_draining", "1 while a layer is being emptied, so that it can be removed.", |layer| {
            let is_emptied = matches!(layer.kind, v1::LayerKind::Overlay | v1::LayerKind::Cache);
            is_emptied.then_some(u64::from(layer.state == v1::LayerState::Draining))
        }),
        ("transhume_layer_limit_iops", "Requests a second that a throttle lets pass.", |layer| layer.iops),
        ("transhume_layer_limit_bytes_per_second", "Bytes a second that a throttle lets pass.", |layer| {
            layer.bytes_per_second
        }),
    ];
    let layers: Vec<_> = volumes.iter().map(|volume| (volume, volume.show_layers())).collect();
    for (name, help, figure) in figures {
        family(out, name, "gauge", help);
        for (volume, layer) in
            layers.iter().flat_map(|(volume, layers)| layers.iter().map(move |layer| (volume, layer)))
        {
            if let Some(value) = figure(layer) {
                line(out, name, &labels(volume, &[("layer", &layer.name)]), value as f64);
            }
        }
    }
}

fn render_hosts(out: &mut String, daemon: &Daemon) {
    let Some(hosts) = &daemon.host_network else { return };
    let counters = &hosts.counters;
    let until = hosts.identity().validity.until;
    let figures: [(&str, &str, &str, f64); 5] = [
        ("transhume_hosts_trusted", "gauge", "Hosts that are trusted.", hosts.trusted().len() as f64),
        ("transhume_host_connections", "gauge", "Connections from other hosts.", counters.connections() as f64),
        (
            "transhume_host_streams_total",
            "counter",
            "Streams of trusted hosts that were let in.",
            counters.accepted.load(Ordering::Relaxed) as f64,
        ),
        (
            "transhume_host_refusals_total",
            "counter",
            "Connections from others that were refused.",
            counters.refused.load(Ordering::Relaxed) as f64,
        ),
        (
            "transhume_host_certificate_until_seconds",
            "gauge",
            "When this host's certificate expires, in seconds since 1970.",
            until as f64,
        ),
    ];
    for (name, kind, help, value) in figures {
        family(out, name, kind, help);
        line(out, name, "", value);
    }
}

fn histogram(out: &mut String, volume: &Volume, verb: &str, window: &DirectionWindow) {
    let name = "transhume_volume_request_seconds";
    for bound in BUCKETS_US {
        let below = at_most(&window.latency, Duration::from_micros(bound));
        let seconds = (bound as f64 / 1e6).to_string();
        line(out, &format!("{name}_bucket"), &labels(volume, &[("verb", verb), ("le", &seconds)]), below as f64);
    }
    let count = window.requests() as f64;
    line(out, &format!("{name}_bucket"), &labels(volume, &[("verb", verb), ("le", "+Inf")]), count);
    line(out, &format!("{name}_sum"), &labels(volume, &[("verb", verb)]), window.latency.sum().as_secs_f64());
    line(out, &format!("{name}_count"), &labels(volume, &[("verb", verb)]), count);
}

/// How many requests took at most `bound`, from the quantiles that the histogram knows.
fn at_most(latency: &LatencyHistogram, bound: Duration) -> u64 {
    let count = latency.count();
    let (mut low, mut high) = (0, count);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        match latency.quantile(middle as f64 / count as f64) <= bound {
            true => low = middle,
            false => high = middle - 1,
        }
    }
    low
}

fn render_jobs(out: &mut String, daemon: &Daemon) {
    let jobs = daemon.jobs(false);
    let labels = |job: &api::v1::Job, extra: &str| format!("{{volume=\"{}\",job=\"{}\"{extra}}}", job.volume, job.id);
    family(out, "transhume_job_state", "gauge", "1 for the state that the job is in.");
    for job in &jobs {
        line(out, "transhume_job_state", &labels(job, &format!(",state=\"{}\"", job.state.name())), 1.0);
    }
    type Figure = fn(&api::v1::Progress) -> f64;
    let figures: [(&str, &str, &str, Figure); 14] = [
        ("transhume_job_bytes", "gauge", "The volume's size.", |progress| progress.bytes_total as f64),
        ("transhume_job_done_bytes", "gauge", "What is in step on both sides.", |progress| progress.bytes_done as f64),
        ("transhume_job_copied_bytes_total", "counter", "Data copied.", |progress| progress.bytes_copied as f64),
        ("transhume_job_mirrored_bytes_total", "counter", "Guest writes to both sides.", |progress| {
            progress.bytes_mirrored as f64
        }),
        ("transhume_job_buffered_bytes", "gauge", "What the source has and the target has yet to get.", |progress| {
            progress.bytes_buffered as f64
        }),
        (
            "transhume_job_throttled_seconds_total",
            "counter",
            "How long guest writes have waited for room in that buffer.",
            |progress| progress.throttled_us as f64 / 1e6,
        ),
        ("transhume_job_verified_bytes_total", "counter", "Bytes compared.", |progress| progress.bytes_verified as f64),
        (
            "transhume_job_iteration",
            "gauge",
            "The pass over what is not in step; the first is over the whole volume.",
            |progress| progress.iteration.into(),
        ),
        (
            "transhume_job_dirty_bytes",
            "gauge",
            "What the guest has made different again since it was copied.",
            |progress| progress.bytes_dirty as f64,
        ),
        ("transhume_job_done_ratio", "gauge", "How far it is, from 0 to 1; it never goes back.", |progress| {
            progress.percent / 100.0
        }),
        ("transhume_job_eta_seconds", "gauge", "Until the switchover; NaN while nothing can be said.", |progress| {
            eta(progress.eta_seconds)
        }),
        ("transhume_job_eta_seconds_min", "gauge", "The same at the fast ones of all rates so far.", |progress| {
            eta(progress.eta_seconds_min)
        }),
        ("transhume_job_eta_seconds_max", "gauge", "The same at the slow ones.", |progress| {
            eta(progress.eta_seconds_max)
        }),
        ("transhume_job_target_losses_total", "counter", "How often the target was lost.", |progress| {
            progress.target_losses as f64
        }),
    ];
    for (name, kind, help, figure) in figures {
        family(out, name, kind, help);
        for job in &jobs {
            if let Some(progress) = &job.progress {
                line(out, name, &labels(job, ""), figure(progress));
            }
        }
    }
}

fn eta(seconds: Option<u64>) -> f64 {
    seconds.map_or(f64::NAN, |seconds| seconds as f64)
}

fn family(out: &mut String, name: &str, kind: &str, help: &str) {
    writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}").expect("a string takes everything");
}

fn line(out: &mut String, name: &str, labels: &str, value: f64) {
    writeln!(out, "{name}{labels} {value}").expect("a string takes everything");
}

/// Names of volumes need no escaping: they are letters, digits, `.`, `_` and `-`.
fn labels(volume: &Volume, more: &[(&str, &str)]) -> String {
    let mut text = format!("{{volume=\"{}\"", volume.name);
    for (key, value) in more {
        write!(text, ",{key}=\"{value}\"").expect("a string takes everything");
    }
    text.push('}');
    text
}
