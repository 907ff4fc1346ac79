//! An export of a file in memory under fio's nbd engine: 4 KiB random reads and writes.

use std::path::Path;

use anyhow::Context;
use serde_json::Value;

use super::Bench;
use crate::figures::{Goal, Row, Samples};
use crate::server::{Endpoint, Kind, Server};
use transhume_guest::process::output_of;
use transhume_guest::programs::private_folder;

const FILE_BYTES: u64 = 1 << 30;
const KINDS: [Kind; 3] = [Kind::Transhume, Kind::Nbdkit, Kind::StorageDaemon];

#[derive(Default)]
struct Figures {
    iops: Samples,
    cpu_us: Samples,
}

pub(crate) fn run(bench: &Bench) -> anyhow::Result<Vec<Row>> {
    let file = bench.memory.path().join("nbd.raw");
    transhume_guest::create_filled(&file, FILE_BYTES)?;
    let mut rows = Vec::new();
    for (pattern, depth) in [("randread", 16), ("randwrite", 16), ("randread", 1), ("randwrite", 1)] {
        let mut figures: [Figures; 3] = Default::default();
        for _ in 0..bench.runs {
            for (kind, figures) in KINDS.iter().zip(&mut figures) {
                let (iops, cpu_us) = measure(bench, *kind, &file, pattern, depth)?;
                figures.iops.push(iops);
                figures.cpu_us.push(cpu_us);
            }
        }
        rows.extend(rows_of(pattern, depth, &figures));
    }
    std::fs::remove_file(&file).context("removing the measured file")?;
    Ok(rows)
}

fn rows_of(pattern: &str, depth: u32, [ours, nbdkit, qemu]: &[Figures; 3]) -> Vec<Row> {
    let goal = match (pattern, depth) {
        ("randread", 16) => Goal::RatioAtLeast(1.2),
        ("randwrite", 16) => Goal::RatioAtLeast(1.0),
        _ => Goal::RatioAtLeast(0.9),
    };
    let cpu_goal = if depth == 16 { Goal::RatioAtMost(0.8) } else { Goal::None };
    let iops = format!("NBD {pattern} 4 KiB depth {depth}");
    let cpu = format!("NBD {pattern} 4 KiB depth {depth}, server CPU per request");
    vec![
        Row::new(&iops, "IOPS", ours.iops.clone(), goal).against("nbdkit file", nbdkit.iops.clone()),
        Row::new(&iops, "IOPS", ours.iops.clone(), Goal::None).against("qemu-storage-daemon", qemu.iops.clone()),
        Row::new(&cpu, "us", ours.cpu_us.clone(), cpu_goal).against("nbdkit file", nbdkit.cpu_us.clone()),
        Row::new(&cpu, "us", ours.cpu_us.clone(), Goal::None).against("qemu-storage-daemon", qemu.cpu_us.clone()),
    ]
}

/// Requests per second, and the server's microseconds of processor per request.
fn measure(bench: &Bench, kind: Kind, file: &Path, pattern: &str, depth: u32) -> anyhow::Result<(f64, f64)> {
    let folder = private_folder(bench.memory.path())?;
    let server = Server::start(kind, &bench.programs, file, folder.path())?;
    let before = server.cpu()?;
    let (iops, requests) = load(bench, &server.endpoint, pattern, depth, FILE_BYTES)
        .with_context(|| format!("loading {}", kind.name()))?;
    let used = server.cpu()? - before;
    Ok((iops, used.as_secs_f64() * 1e6 / requests.max(1.0)))
}

/// Loads the first `size` bytes of an export by fio's nbd engine, `pattern` as fio calls it, 4 KiB and `depth` at a time; gives
/// requests per second and how many there were.
pub(super) fn load(
    bench: &Bench,
    endpoint: &Endpoint,
    pattern: &str,
    depth: u32,
    size: u64,
) -> anyhow::Result<(f64, f64)> {
    let words = [
        "--name=bench".to_owned(),
        "--ioengine=nbd".into(),
        format!("--uri={}", endpoint.uri()),
        format!("--rw={pattern}"),
        "--bs=4k".into(),
        format!("--iodepth={depth}"),
        format!("--size={size}"),
        "--time_based".into(),
        format!("--runtime={}", bench.seconds),
        "--norandommap".into(),
        "--output-format=json".into(),
    ];
    let printed = output_of(Path::new("fio"), &words)?;
    // fio may say something before its JSON.
    let start = printed.find('{').context("fio prints JSON")?;
    let report: Value = serde_json::from_str(&printed[start..]).context("fio prints JSON")?;
    let job = &report["jobs"][0];
    let side = if pattern == "randread" { &job["read"] } else { &job["write"] };
    let iops = side["iops"].as_f64().context("fio tells IOPS")?;
    let requests = side["total_ios"].as_f64().context("fio counts requests")?;
    Ok((iops, requests))
}
