//! How long a guest waits at most when layers come and go over its volume.

use transhume_guest::programs::private_folder;

use super::Bench;
use crate::figures::{Goal, Row, Samples};
use crate::load::{NbdLoad, Offer};
use crate::server::{Endpoint, Transhumed, VOLUME};

const VOLUME_BYTES: u64 = 64 << 20;
const RATE: u32 = 20_000;
/// A snapshot that is removed is emptied first, under the load.
const SNAPSHOT: &str = "bench";

pub(crate) fn run(bench: &Bench) -> anyhow::Result<Vec<Row>> {
    let folder = private_folder(bench.memory.path())?;
    let image = folder.path().join("volume.raw");
    transhume_guest::create_filled(&image, VOLUME_BYTES)?;
    let daemon = Transhumed::start(&bench.programs, folder.path())?;
    let endpoint = Endpoint { socket: folder.path().join("nbd.sock"), export: VOLUME };
    daemon.attach(VOLUME, &image, &endpoint.socket, "")?;
    let mut load = NbdLoad::start(&bench.programs, &endpoint, Offer::Rate(RATE))?;
    let mut felt = Felt::default();
    for _ in 0..bench.repeats {
        std::thread::sleep(std::time::Duration::from_millis(30));
        felt.note(&mut load, |felt| &mut felt.quiet)?;
        daemon.run(&["volume", "snapshot", "add", VOLUME, SNAPSHOT])?;
        felt.note(&mut load, |felt| &mut felt.added)?;
        daemon.run(&["volume", "snapshot", "rm", VOLUME, SNAPSHOT])?;
        felt.note(&mut load, |felt| &mut felt.removed)?;
        daemon.run(&["volume", "layer", "add", VOLUME, "throttle", "--iops", "1000000"])?;
        felt.note(&mut load, |felt| &mut felt.throttled)?;
        daemon.run(&["volume", "layer", "rm", VOLUME, "throttle"])?;
        load.mark()?;
    }
    let what = |figure: &str| format!("{} times under {RATE} requests/s: {figure}", bench.repeats);
    Ok(vec![
        Row::new(what("a snapshot taken, longest wait"), "ms", felt.added, Goal::AtMost(10.0))
            .against("30 ms of nothing", felt.quiet),
        Row::new(what("a snapshot removed, longest wait"), "ms", felt.removed, Goal::None),
        Row::new(what("a throttle added, longest wait"), "ms", felt.throttled, Goal::AtMost(10.0)),
    ])
}

/// The longest latencies, in milliseconds.
#[derive(Default)]
struct Felt {
    quiet: Samples,
    added: Samples,
    removed: Samples,
    throttled: Samples,
}

impl Felt {
    fn note(&mut self, load: &mut NbdLoad, of: impl FnOnce(&mut Self) -> &mut Samples) -> anyhow::Result<()> {
        of(self).push(load.mark()?.longest.as_secs_f64() * 1e3);
        Ok(())
    }
}
