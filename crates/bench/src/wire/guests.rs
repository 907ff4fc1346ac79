//! Moves of volumes that a guest works on meanwhile.

use std::time::Duration;

use transhume_guest::Interval;

use super::pair::{Content, Pair};
use super::{GBIT, WireBench, limited, mib, peers};
use crate::figures::{Goal, Row, Samples};
use crate::load::{NbdLoad, Offer};
use crate::reserve::Reserve;
use crate::server::Endpoint;

/// Requests a second of the guest whose volume moves.
const GUEST_RATE: u32 = 2_000;
/// The same while the network is cut: what it writes on a link that is full must be copied again.
const GUEST_RATE_CUT: u32 = 500;
/// How long the network is away.
const OUTAGE: Duration = Duration::from_secs(10);

/// QEMU's mirror to an export on the other host, with a guest at work.
pub(super) fn mirror(bench: &WireBench, bits_per_second: u64) -> anyhow::Result<Vec<Row>> {
    let pair = Pair::start(bench, limited(bits_per_second), Content::Random)?;
    let mut ours = Loaded::default();
    let mut theirs = Loaded::default();
    for _ in 0..bench.runs {
        let volume = pair.attach()?;
        ours.push(bench, (&pair, &volume.endpoint), || Ok(pair.order_move(&volume)?.seconds))?;
        pair.take_back(volume)?;
        let mut qemu = peers::Mirror::start(&pair)?;
        let endpoint = qemu.endpoint.clone();
        theirs.push(bench, (&pair, &endpoint), || qemu.mirror())?;
    }
    let gbit = bits_per_second / GBIT;
    let what = |figure: &str| format!("{} at {GUEST_RATE} requests/s, {gbit} Gbit/s, TLS: {figure}", mib(bench.bytes));
    let name = "blockdev-mirror to a remote export, plain TCP";
    // With the headers of Ethernet, IP and TCP in packets of 1514 bytes.
    let limit = bench.bytes as f64 * 8.0 / bits_per_second as f64 * 1514.0 / 1448.0;
    let goal = if gbit == 1 { Goal::AtMost(1.02 * limit) } else { Goal::RatioAtMost(0.7) };
    Ok(vec![
        Row::new(what("time"), "s", ours.seconds, goal).against(name, theirs.seconds),
        Row::new(what("p99 of the guest"), "ms", ours.p99_ms, Goal::RatioAtMost(0.5)).against(name, theirs.p99_ms),
        Row::new(what("requests answered"), "IOPS", ours.iops, Goal::None).against(name, theirs.iops),
    ])
}

/// Moves under load.
#[derive(Default)]
struct Loaded {
    seconds: Samples,
    p99_ms: Samples,
    iops: Samples,
}

impl Loaded {
    fn push(
        &mut self,
        bench: &WireBench,
        (pair, endpoint): (&Pair, &Endpoint),
        migrate: impl FnOnce() -> anyhow::Result<f64>,
    ) -> anyhow::Result<()> {
        let mut load = NbdLoad::start(&bench.programs, endpoint, Offer::Rate(GUEST_RATE))?;
        // A move over a slow link lasts longer than what is merely free stays at hand.
        let _reserve = Reserve::create(bench.memory.path(), pair.bytes * 5 / 4)?;
        std::thread::sleep(Duration::from_millis(500));
        load.mark()?;
        let seconds = migrate()?;
        let during = load.mark()?;
        self.seconds.push(seconds);
        self.p99_ms.push(during.p99.as_secs_f64() * 1e3);
        self.iops.push(during.iops());
        Ok(())
    }
}

/// The network is away in the middle of a move.
pub(super) fn cut(bench: &WireBench) -> anyhow::Result<Vec<Row>> {
    let pair = Pair::start(bench, limited(GBIT), Content::Random)?;
    let (mut ours, mut expected) = (Samples::default(), Samples::default());
    let (mut before, mut meanwhile, mut p99) = (Samples::default(), Samples::default(), Samples::default());
    let mut again = Samples::default();
    for _ in 0..2 * bench.runs {
        let undisturbed = loaded_move(bench, &pair, |_| Ok(()))?.seconds;
        expected.push(undisturbed + OUTAGE.as_secs_f64());
        let mut felt = None;
        let disturbed = loaded_move(bench, &pair, |load| {
            std::thread::sleep(Duration::from_secs_f64(undisturbed / 3.0));
            let before = load.mark()?;
            pair.hosts.cut(0)?;
            std::thread::sleep(OUTAGE);
            felt = Some((before, load.mark()?));
            pair.hosts.mend(0)
        })?;
        ours.push(disturbed.seconds);
        again.push(disturbed.bytes_again as f64 / f64::from(1 << 20));
        if let Some((copying, cut)) = felt {
            before.push(Interval::iops(&copying));
            meanwhile.push(cut.iops());
            p99.push(cut.p99.as_secs_f64() * 1e3);
        }
    }
    let what = format!("{} at {GUEST_RATE_CUT} requests/s, 1 Gbit/s, cut for {} s", mib(bench.bytes), OUTAGE.as_secs());
    Ok(vec![
        Row::new(format!("{what}: time"), "s", ours, Goal::RatioAtMost(1.05))
            .against("the same undisturbed, and the outage", expected),
        Row::new("the same: the guest's requests while cut", "IOPS", meanwhile, Goal::RatioAtLeast(0.99))
            .against("before", before),
        Row::new("the same: the guest's p99 while cut", "ms", p99, Goal::None),
        Row::new("the same: sent twice", "MiB", again, Goal::None),
    ])
}

/// A move under load, `meanwhile` something else is done.
fn loaded_move(
    bench: &WireBench,
    pair: &Pair,
    meanwhile: impl FnOnce(&mut NbdLoad) -> anyhow::Result<()>,
) -> anyhow::Result<super::pair::Moved> {
    let volume = pair.attach()?;
    let mut load = NbdLoad::start(&bench.programs, &volume.endpoint, Offer::Rate(GUEST_RATE_CUT))?;
    pair.warm()?;
    load.mark()?;
    let moved = std::thread::scope(|scope| {
        let moving = scope.spawn(|| pair.order_move(&volume));
        let outcome = meanwhile(&mut load);
        let moved = moving.join().map_err(|_| anyhow::anyhow!("moving has panicked"))?;
        outcome.and(moved)
    })?;
    // It bails if a request has failed.
    load.mark()?;
    drop(load);
    pair.take_back(volume)?;
    Ok(moved)
}
