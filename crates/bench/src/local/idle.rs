//! What the stack costs while nothing migrates, on a device in memory: per request of a client, and per call of the device
//! without any protocol.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use serde_json::Value;

use crate::figures::{Goal, Row, Samples};
use crate::load::{NbdLoad, Offer};
use crate::server::{Endpoint, path_word};
use transhume_guest::process::{Process, output_of};
use transhume_guest::programs::private_folder;

use super::Bench;

const PEER: &str = "bare backend";

pub(crate) fn run(bench: &Bench) -> anyhow::Result<Vec<Row>> {
    build_servers()?;
    let memory = format!("mem:{MEMORY_MIB}");
    let mut rows = Vec::new();
    for (client, goal) in [(Client::Fio, Goal::RatioAtMost(1.1)), (Client::Bundles, Goal::None)] {
        for what in ["reads", "writes"] {
            let (mut stack, mut bare) = (Samples::default(), Samples::default());
            for _ in 0..bench.runs {
                stack.push(served(bench, &memory, "stack", client, what)?);
                bare.push(served(bench, &memory, "bare", client, what)?);
            }
            let what = format!("idle stack, {what} of 4 KiB from memory by {}, server CPU per request", client.words());
            rows.push(Row::new(what, "us", stack, goal).against(PEER, bare));
        }
    }
    rows.extend(called(bench)?);
    Ok(rows)
}

/// The popular data of a volume on tmpfs, read from a surrogate on tmpfs: what the redirection adds to a read of the volume itself.
pub(crate) fn surrogate(bench: &Bench) -> anyhow::Result<Vec<Row>> {
    build_servers()?;
    let folder = private_folder(bench.memory.path())?;
    let [volume, store] = ["volume", "surrogate"].map(|name| folder.path().join(name));
    for (path, mib) in [(&volume, MEMORY_MIB), (&store, 2 * MEMORY_MIB)] {
        std::fs::write(path, vec![0xa5; (mib << 20) as usize])?;
    }
    let (file, how) = (format!("file:{}", path_word(&volume)), format!("surrogate:{}", path_word(&store)));
    let mut rows = Vec::new();
    for (client, goal) in [(Client::Fio, Goal::RatioAtMost(1.15)), (Client::Bundles, Goal::None)] {
        let (mut redirected, mut bare) = (Samples::default(), Samples::default());
        for _ in 0..bench.runs {
            redirected.push(served(bench, &file, &how, client, "reads")?);
            bare.push(served(bench, &file, "bare", client, "reads")?);
        }
        let what =
            format!("popular data, reads of 4 KiB from a surrogate by {}, server CPU per request", client.words());
        rows.push(Row::new(what, "us", redirected, goal).against(PEER, bare));
    }
    Ok(rows)
}

fn build_servers() -> anyhow::Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let words = ["build", "--locked", "--release", "--package", "transhume-guest", "--examples"];
    output_of(Path::new(&cargo), &words.map(str::to_owned))?;
    Ok(())
}

/// Who asks; sixteen requests are in flight either way.
#[derive(Clone, Copy)]
enum Client {
    /// fio, as in the rows of NBD: a call for every request or two.
    Fio,
    /// `nbd-load`, whose one call carries all that is due: the server's share of a request is half as large, and what the
    /// stack adds shows twice as much.
    Bundles,
}

impl Client {
    const fn words(self) -> &'static str {
        match self {
            Self::Fio => "fio",
            Self::Bundles => "a client that sends and fetches many at a time",
        }
    }
}

const MEMORY_MIB: u64 = 64;

/// Microseconds of the server's processor per request to `device`, served as `how` says.
fn served(bench: &Bench, device: &str, how: &str, client: Client, what: &str) -> anyhow::Result<f64> {
    let folder = private_folder(bench.memory.path())?;
    let (socket, log) = (folder.path().join("nbd.sock"), folder.path().join("log"));
    let words = [path_word(&socket), device.into(), how.into()];
    let mut server = Process::start(&bench.programs.join("examples/idle_server"), &words, &log)?;
    server.wait_for(&socket, &log)?;
    let endpoint = Endpoint { socket, export: "" };
    let is_read = what == "reads";
    let (requests, used) = match client {
        Client::Fio => {
            let before = server.cpu()?;
            let pattern = if is_read { "randread" } else { "randwrite" };
            let (_, requests) = super::nbd::load(bench, &endpoint, pattern, 16, MEMORY_MIB << 20)?;
            (requests, server.cpu()? - before)
        }
        Client::Bundles => {
            let words = ["io_bytes=4096", if is_read { "read_percent=100" } else { "read_percent=0" }];
            let mut load = NbdLoad::start_with(&bench.programs, &endpoint, Offer::Depth(16), &words)?;
            std::thread::sleep(Duration::from_millis(300));
            load.mark()?;
            let before = server.cpu()?;
            std::thread::sleep(Duration::from_secs(u64::from(bench.seconds)));
            let interval = load.mark()?;
            ((interval.reads + interval.writes) as f64, server.cpu()? - before)
        }
    };
    Ok(used.as_secs_f64() * 1e6 / requests.max(1.0))
}

/// Nanoseconds of processor per call, as the program that measures both in turn tells them.
fn called(bench: &Bench) -> anyhow::Result<Vec<Row>> {
    let program = bench.programs.join("examples/idle_stack");
    let printed = output_of(&program, &[bench.runs.max(5).to_string()])?;
    let mut rows = Vec::new();
    for line in printed.lines() {
        let measured: Value = serde_json::from_str(line).with_context(|| format!("not JSON: {line}"))?;
        let samples = |name: &str| {
            let mut samples = Samples::default();
            measured[name].as_array().into_iter().flatten().filter_map(Value::as_f64).for_each(|ns| samples.push(ns));
            samples
        };
        let what =
            format!("idle stack, a bare call without NBD: {} of 4 KiB", measured["what"].as_str().unwrap_or("?"));
        rows.push(Row::new(what, "ns", samples("stack"), Goal::None).against(PEER, samples("bare")));
    }
    Ok(rows)
}
