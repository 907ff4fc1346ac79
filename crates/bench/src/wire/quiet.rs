//! Moves of volumes that nobody uses: what the wire, the processors and the links give.

use std::time::Duration;

use anyhow::Context;
use transhume_guest::{Side, TwoHostsSpec};

use super::pair::{Content, Pair};
use super::{GBIT, WireBench, limited, mib, peers, rate, tcp};
use crate::figures::{Goal, Row, Samples};
use transhume_guest::process::memory_peak_of;

/// A whole move over a fast link against one plain TCP stream that nobody reads or writes a disk for.
pub(super) fn throughput(bench: &WireBench) -> anyhow::Result<Vec<Row>> {
    let bytes = 4 * bench.bytes;
    let pair = Pair::of(bench, limited(10 * GBIT), Content::Random, bytes)?;
    let (mut ours, mut plain) = (Samples::default(), Samples::default());
    for _ in 0..bench.runs {
        ours.push(rate(bytes, pair.move_over()?.seconds));
        plain.push(rate(bytes, tcp::measure(&pair.hosts, bytes)?));
    }
    let what = format!("{} that nothing makes shorter, 10 Gbit/s, TLS: a whole move", mib(bytes));
    let mut rows = vec![
        Row::new(what, "MB/s", ours, Goal::RatioAtLeast(0.85)).against("one plain TCP stream, 256 KiB writes", plain),
    ];
    rows.extend(memory(&pair)?);
    Ok(rows)
}

/// The daemons' memory after what was moved before.
fn memory(pair: &Pair) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    // The pools: of copies 64 MiB here, of what arrives 128 MiB there.
    for (side, what, pool) in [(Side::A, "source", 64.0), (Side::B, "target", 128.0)] {
        let pid = pair.hosts.daemon(side).pid().context("the daemon runs")?;
        let mut peak = Samples::default();
        peak.push(memory_peak_of(pid)? as f64 / f64::from(1 << 20));
        rows.push(Row::new(
            format!("the same: memory of the {what}'s daemon, most"),
            "MiB",
            peak,
            Goal::AtMost(pool + 64.0),
        ));
    }
    Ok(rows)
}

/// Without a limit, from memory to memory: what the processors do is what counts.
pub(super) fn nbdcopy(bench: &WireBench) -> anyhow::Result<Vec<Row>> {
    let encrypted = Pair::start(bench, TwoHostsSpec::default(), Content::Random)?;
    let plain = Pair::start(bench, TwoHostsSpec { plaintext: true, ..TwoHostsSpec::default() }, Content::Random)?;
    let (mut with, mut without, mut peer) = (Samples::default(), Samples::default(), Samples::default());
    for _ in 0..bench.runs {
        with.push(encrypted.move_over()?.seconds);
        peer.push(peers::nbdcopy(&encrypted)?);
        without.push(plain.move_over()?.seconds);
    }
    let name = "nbdcopy to nbdkit, plain TCP";
    let what = |how: &str| format!("{}, idle, memory to memory, no limit, {how}: time of the move", mib(bench.bytes));
    Ok(vec![
        Row::new(what("TLS"), "s", with, Goal::RatioAtMost(1.1)).against(name, peer.clone()),
        Row::new(what("not encrypted"), "s", without, Goal::RatioAtMost(0.8)).against(name, peer),
    ])
}

/// The PMigrate paper's four ports.
pub(super) fn links(bench: &WireBench) -> anyhow::Result<Vec<Row>> {
    let four = Pair::start(bench, TwoHostsSpec { links: 4, ..limited(GBIT) }, Content::Random)?;
    let one = Pair::start(bench, limited(GBIT), Content::Random)?;
    let (mut of_four, mut of_one) = (Samples::default(), Samples::default());
    for _ in 0..bench.runs {
        of_four.push(rate(bench.bytes, four.move_over()?.seconds));
        of_one.push(rate(bench.bytes, one.move_over()?.seconds));
    }
    let limit = GBIT as f64 / 8e6;
    let what = format!("{} over four links of 1 Gbit/s, TLS: a whole move", mib(bench.bytes));
    Ok(vec![
        Row::new(what, "MB/s", of_four, Goal::RatioAtLeast(3.76)).against("over one", of_one.clone()),
        Row::new(
            "the same over one link: share of what it carries",
            "share",
            of_one.map(|rate| rate / limit),
            Goal::None,
        ),
    ])
}

/// The paper's section 6.2.3: streams on fewer links than there are, and links with fewer cores.
pub(super) fn cores(bench: &WireBench) -> anyhow::Result<Vec<Row>> {
    let bytes = bench.bytes / 2;
    let pair = |links, more| {
        let spec = TwoHostsSpec { links, more, ..limited(GBIT) };
        Pair::of(bench, spec, Content::Random, bytes)
    };
    let one = pair(1, "streams = 1\n")?;
    let two = pair(2, "streams = 2\n")?;
    let four = pair(4, "streams = 4\n")?;
    let crowded = pair(1, "streams = 4\n")?;
    let mut times: [Samples; 6] = Default::default();
    for _ in 0..bench.runs {
        times[0].push(one.move_over()?.seconds);
        times[1].push(crowded.move_over()?.seconds);
        times[2].push(two.move_over()?.seconds);
        times[3].push(four.move_over()?.seconds);
        one.on_one_core(true)?;
        times[4].push(one.move_over()?.seconds);
        one.on_one_core(false)?;
        four.on_one_core(true)?;
        times[5].push(four.move_over()?.seconds);
        four.on_one_core(false)?;
    }
    let [of_one, crowded, of_two, of_four, one_core, four_one_core] = times;
    let peer = of_one.clone();
    let all = [
        ("1 stream over 1 link of 1 Gbit/s", of_one),
        ("4 streams over 1 link (the paper: 148.4 s)", crowded),
        ("2 streams over 2 links", of_two),
        ("4 streams over 4 links (the paper: 149.3 s)", of_four),
        ("1 stream over 1 link, all on one core", one_core),
        ("4 streams over 4 links, all on one core (the paper: 377 s)", four_one_core),
    ];
    let row = |(what, samples): (&str, Samples)| {
        let row = Row::new(format!("{}, {what}: time", mib(bytes)), "s", samples, Goal::None);
        row.against("1 stream over 1 link", peer.clone())
    };
    Ok(all.into_iter().map(row).collect())
}

/// Half of the image is zeroes and of the rest half of every block can be made shorter.
pub(super) fn reduce(bench: &WireBench) -> anyhow::Result<Vec<Row>> {
    let one = Pair::start(bench, limited(GBIT), Content::Reducible)?;
    let four = Pair::start(bench, TwoHostsSpec { links: 4, ..limited(GBIT) }, Content::Reducible)?;
    let plain = TwoHostsSpec { more: "streams = 1\ncompression = \"off\"\n", ..limited(GBIT) };
    let plain = Pair::start(bench, plain, Content::Reducible)?;
    let random = Pair::start(bench, limited(GBIT), Content::Random)?;
    let (mut of_four, mut of_plain) = (Samples::default(), Samples::default());
    let (mut bytes_a_second, mut all) = (Samples::default(), Samples::default());
    let mut sent = Samples::default();
    for _ in 0..bench.runs {
        let moved = one.move_over()?;
        sent.push(moved.bytes_sent as f64 / bench.bytes as f64);
        bytes_a_second.push(rate(moved.bytes_sent, moved.seconds));
        let moved = random.move_over()?;
        all.push(rate(moved.bytes_sent, moved.seconds));
        of_four.push(rate(bench.bytes, four.move_over()?.seconds));
        of_plain.push(rate(bench.bytes, plain.move_over()?.seconds));
    }
    let what = format!("{}, half zeroes, the rest half compressible", mib(bench.bytes));
    Ok(vec![
        Row::new(format!("{what}, 1 Gbit/s: what went over the wire"), "share", sent, Goal::None),
        Row::new("the same: bytes sent a second", "MB/s", bytes_a_second, Goal::RatioAtLeast(0.95))
            .against("of what nothing makes shorter", all),
        Row::new(format!("{what}, four links of 1 Gbit/s"), "MB/s", of_four, Goal::RatioAtLeast(3.98))
            .against("one stream over one link without compression", of_plain),
    ])
}

/// How long others send before anything is measured.
const BEFORE_OTHERS: Duration = Duration::from_secs(3);
/// The paper's web server: what it sends when nobody else uses its card, in bytes a second.
const OTHERS_RATE: u64 = 101_700_000;

/// The paper's section 6.3: two cards, one of which a web server uses.
pub(super) fn beside(bench: &WireBench) -> anyhow::Result<Vec<Row>> {
    let spec = TwoHostsSpec { links: 2, ..limited(GBIT) };
    let pair = Pair::start(bench, spec, Content::Random)?;
    let (mut before, mut during) = (Samples::default(), Samples::default());
    let (mut shared, mut free) = (Samples::default(), Samples::default());
    for _ in 0..bench.runs {
        let volume = pair.attach()?;
        pair.warm()?;
        let mut others = tcp::Others::start(&pair.hosts, 0, OTHERS_RATE)?;
        // So long that both hosts have seen it.
        std::thread::sleep(BEFORE_OTHERS);
        before.push(others.mark()? / 1e6);
        let [shared_before, free_before] = [pair.sent_over(0)?, pair.sent_over(1)?];
        let seconds = pair.order_move(&volume)?.seconds;
        let sent = others.mark()? / 1e6;
        let over = |link, before| Ok::<_, anyhow::Error>(rate(pair.sent_over(link)? - before, seconds));
        let (over_shared, over_free) = (over(0, shared_before)?, over(1, free_before)?);
        drop(others);
        pair.take_back(volume)?;
        during.push(sent);
        shared.push((over_shared - sent).max(0.0));
        free.push(over_free);
    }
    let what = format!("{} over two links of 1 Gbit/s, others on one of them", mib(bench.bytes));
    Ok(vec![
        Row::new(
            format!("{what}: what the others send (the paper: 91.1 of 101.7)"),
            "MB/s",
            during,
            Goal::RatioAtLeast(91.1 / 101.7),
        )
        .against("before", before),
        Row::new("the same: the move over the free link (the paper: 57.2)", "MB/s", free, Goal::AtLeast(57.2)),
        Row::new("the same: the move over the shared link (the paper: 17.6)", "MB/s", shared, Goal::None),
    ])
}
