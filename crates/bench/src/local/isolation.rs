//! What clients that ask for much and fetch nothing take from another export of the same daemon: its rate before they come
//! and beside them, in turns, in one run.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;

use crate::figures::{Goal, Row, Samples};
use crate::server::{Endpoint, Transhumed, VOLUME};
use transhume_guest::programs::private_folder;

use super::Bench;

const FILE_BYTES: u64 = 256 << 20;
const CONNECTIONS: usize = 120;
const REQUESTS: u64 = 16;
const REQUEST_BYTES: u32 = 4 << 20;
const OTHER: &str = "other";

pub(crate) fn run(bench: &Bench) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (pattern, depth) in [("randread", 16), ("randwrite", 16)] {
        let (mut before, mut beside) = (Samples::default(), Samples::default());
        for _ in 0..bench.runs {
            let [alone, beside_others] = measure(bench, pattern, depth)?;
            before.push(alone);
            beside.push(beside_others);
        }
        let what = format!(
            "NBD {pattern} 4 KiB depth {depth} beside {CONNECTIONS} clients of another export that fetch nothing"
        );
        rows.push(Row::new(what, "IOPS", beside, Goal::RatioAtLeast(0.9)).against("without them", before));
    }
    Ok(rows)
}

/// Requests per second of one export without the others, and beside them.
fn measure(bench: &Bench, pattern: &str, depth: u32) -> anyhow::Result<[f64; 2]> {
    let folder = private_folder(bench.memory.path())?;
    let daemon = Transhumed::start(&bench.programs, folder.path())?;
    for name in [VOLUME, OTHER] {
        let file = folder.path().join(format!("{name}.raw"));
        transhume_guest::create_filled(&file, FILE_BYTES)?;
        daemon.attach(name, &file, &folder.path().join(format!("{name}.sock")), "")?;
    }
    let endpoint = Endpoint { socket: folder.path().join(format!("{VOLUME}.sock")), export: VOLUME };
    let (alone, _) = super::nbd::load(bench, &endpoint, pattern, depth, FILE_BYTES)?;
    let socket = folder.path().join(format!("{OTHER}.sock"));
    let mut others: Vec<_> = (0..CONNECTIONS).map(|_| connect(&socket, OTHER)).collect::<anyhow::Result<_>>()?;
    // Until then a connection may be kept back for the requests of those before it.
    std::thread::sleep(Duration::from_millis(500));
    others.iter_mut().try_for_each(ask_for_much)?;
    std::thread::sleep(Duration::from_millis(500));
    let (beside, _) = super::nbd::load(bench, &endpoint, pattern, depth, FILE_BYTES)?;
    drop(others);
    Ok([alone, beside])
}

/// A client in its transmission.
pub(super) fn connect(socket: &Path, name: &str) -> anyhow::Result<UnixStream> {
    let mut stream = UnixStream::connect(socket).context("connecting to an export")?;
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).context("reading the greeting")?;
    // Fixed newstyle without zeroes, then NBD_OPT_EXPORT_NAME: the least that leads to the transmission.
    let mut hello = 3_u32.to_be_bytes().to_vec();
    hello.extend_from_slice(b"IHAVEOPT");
    hello.extend_from_slice(&1_u32.to_be_bytes());
    hello.extend_from_slice(&(name.len() as u32).to_be_bytes());
    hello.extend_from_slice(name.as_bytes());
    stream.write_all(&hello)?;
    let mut export = [0; 10];
    stream.read_exact(&mut export).context("reading the export's size")?;
    Ok(stream)
}

/// Asks for 64 MiB, of which nothing is read.
fn ask_for_much(stream: &mut UnixStream) -> anyhow::Result<()> {
    for index in 0..REQUESTS {
        let mut request = 0x2560_9513_u32.to_be_bytes().to_vec();
        // No flags, NBD_CMD_READ.
        request.extend_from_slice(&[0; 4]);
        request.extend_from_slice(&index.to_be_bytes());
        request.extend_from_slice(&(index * u64::from(REQUEST_BYTES)).to_be_bytes());
        request.extend_from_slice(&REQUEST_BYTES.to_be_bytes());
        stream.write_all(&request)?;
    }
    Ok(())
}
