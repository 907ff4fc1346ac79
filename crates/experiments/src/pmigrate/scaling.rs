//! Figures 6 and 7, section 6.2.3 and the network's part of section 6.3: more consumers, processors and ports, and others beside them.

use super::Runs;
use super::Setup;
use super::host::{MIB, WEB_BYTES_PER_SECOND};
use super::scene::{Load, Mapping, Scene, Way};
use crate::figure::{Axis, Figure, Mark, Plot, Series};

const CONSUMERS: [u16; 4] = [1, 2, 4, 8];
const MAPPINGS: [Mapping; 4] = [Mapping::Unoptimised, Mapping::ReadLock, Mapping::RangeLock, Mapping::Once];

/// With processors enough, and 40 MByte/s of the network for each consumer.
fn scaled(setup: &Setup, load: Load, consumers: u16, mapping: Mapping) -> Scene {
    Scene { consumers, cores: 12, mapping, is_limited: true, ..Scene::of_table(load, Way::Paper, setup.scale) }
}

/// Every number of consumers and way of mapping.
pub(super) fn scenes(setup: &Setup, load: Load) -> Vec<Scene> {
    let of = |consumers: u16| MAPPINGS.map(|mapping| scaled(setup, load, consumers, mapping));
    CONSUMERS.into_iter().flat_map(of).collect()
}

/// Figure 6 or 7.
pub(super) fn figure(setup: &Setup, runs: &Runs, (id, title, load): (&'static str, &'static str, Load)) -> Figure {
    let mut figure = Figure::new(
        id,
        title,
        "The paper gives these as plots without numbers, so only shapes are judged. What they measure is Xen's mapping of a guest's pages: by \
         table 9 an unoptimised mapping holds the address space for 26.8 us a page, with the read lock for 8.0 us, with the range \
         lock for 0.8 us. This project's engine maps the memory once and has no such lock; `make bench-range-lock` measures the lock \
         itself on a kernel of today.",
    );
    let rate = |consumers: u16, mapping: Mapping| runs.get(&scaled(setup, load, consumers, mapping)).rate();
    let series = |(colour, mapping): (usize, &Mapping)| Series {
        name: mapping.name().to_owned(),
        colour,
        points: CONSUMERS.iter().map(|count| [f64::from(*count), rate(*count, *mapping)]).collect(),
    };
    figure.plots.push(Plot {
        title: "Network throughput over consumers".to_owned(),
        x: Axis::linear("consumers of 40 MByte/s"),
        y: Axis::linear("MByte/s"),
        bars: false,
        series: MAPPINGS.iter().enumerate().map(series).collect(),
        marks: vec![Mark { label: "paper: vanilla reaches at most 40".to_owned(), colour: 0, x: Some(1.0), y: 40.0 }],
    });
    let [none, read, range] = Mapping::PAPERS.map(|mapping| rate(8, mapping));
    figure.claim(
        "with eight consumers the range lock carries the most, and no optimisation the least",
        none < read * 0.95 && read <= range * 1.02,
        format!("{none:.0}, {read:.0} and {range:.0} MByte/s"),
        "A read lock that nobody waits for is as good as a range lock.",
    );
    let (one, eight) = (rate(1, Mapping::Once), rate(8, Mapping::Once));
    figure.claim(
        "ours carries with eight consumers what eight of them carry alone",
        eight >= one * 7.0,
        format!("{one:.0} and {eight:.0} MByte/s"),
        "Two consumers share each port.",
    );
    let unoptimised = rate(8, Mapping::Unoptimised) / rate(1, Mapping::Unoptimised);
    figure.claim(
        "without optimisation eight consumers are not eight times one",
        unoptimised < 6.0,
        format!("{unoptimised:.1} times"),
        "",
    );
    figure
}

/// Section 6.2.3.
pub(super) const CORES_AND_PORTS: &str = "cores-and-ports";

fn four_consumers(setup: &Setup, cores: usize, ports: usize) -> Scene {
    Scene { consumers: 4, cores, ports, ..Scene::of_table(Load::XenIdle, Way::Paper, setup.scale) }
}

pub(super) fn scenes_of_cores_and_ports(setup: &Setup) -> Vec<Scene> {
    [(4, 4), (4, 1), (1, 4)].map(|(cores, ports)| four_consumers(setup, cores, ports)).into()
}

pub(super) fn cores_and_ports(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        CORES_AND_PORTS,
        "Section 6.2.3: only processors, only ports",
        "Four consumers and the idle guest of table 3. What a consumer waits for beside its processor and the port was given to the model by the \
         first row.",
    );
    let seen = |cores, ports| runs.get(&four_consumers(setup, cores, ports));
    figure.row("four processors, four ports", "s", 149.3, seen(4, 4).seconds).fitted();
    figure.row("four processors, one port", "s", 148.4, seen(4, 1).seconds);
    figure.row("the same: network", "MByte/s", 112.1, seen(4, 1).rate());
    figure.row("one processor, four ports", "s", 377.3, seen(1, 4).seconds);
    figure.row("the same: network", "MByte/s", 49.3, seen(1, 4).rate());
    let points = vec![[0.0, seen(4, 4).seconds], [1.0, seen(4, 1).seconds], [2.0, seen(1, 4).seconds]];
    let mark = |(x, y): (f64, f64)| Mark { label: "paper".to_owned(), colour: 0, x: Some(x), y };
    figure.plots.push(Plot {
        title: "Migration time".to_owned(),
        x: Axis::linear("0: four and four; 1: four processors, one port; 2: one processor, four ports"),
        y: Axis::linear("seconds"),
        bars: true,
        series: vec![Series { name: "ours".to_owned(), colour: 0, points }],
        marks: [(0.0, 149.3), (1.0, 148.4), (2.0, 377.3)].map(mark).into(),
    });
    figure
}

/// Section 6.3.
pub(super) const WEB_SERVER: &str = "web-server";

fn beside_web_server(setup: &Setup) -> Scene {
    let alone = Scene { consumers: 4, ports: 2, ..Scene::of_table(Load::XenIdle, Way::Paper, setup.scale) };
    Scene { has_web_server: true, ..alone }
}

pub(super) fn scenes_of_web_server(setup: &Setup) -> Vec<Scene> {
    vec![beside_web_server(setup)]
}

pub(super) fn web_server(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        WEB_SERVER,
        "Section 6.3: a web server on one of two ports",
        "The engine keeps to what the port's counters say that others leave, by the rules that disks have. The web server asks for what it has \
         in the paper, and gets what the migration leaves it, half of the port at least. Not repeated: the neighbour that goes from 42 to \
         34.6 MByte/s (vanilla: to 38) and the processors' part, whose loads the paper does not state; \
         `cargo xtask test --only vm_beside_others` measures a real move beside real traffic.",
    );
    let seen = runs.get(&beside_web_server(setup));
    figure.row("the web server while the guest migrates", "MByte/s", 91.1, seen.web_rate);
    let shared = seen.port_rates[0];
    let is_no_more = shared > 0.0 && shared <= 17.6 * 1.25;
    figure.row_if("the migration on the port that they share, no more", "MByte/s", 17.6, shared, is_no_more);
    figure.row("the migration on the other port", "MByte/s", 57.2, seen.port_rates[1]);
    let kept = seen.web_rate / (WEB_BYTES_PER_SECOND / MIB) * 100.0;
    figure.row("what the web server keeps", "%", 89.6, kept);
    let series = |(colour, name, value): (usize, &str, f64)| Series {
        name: name.to_owned(),
        colour,
        points: vec![[colour as f64, value]],
    };
    let mark = |(x, y): (f64, f64)| Mark { label: "paper".to_owned(), colour: 0, x: Some(x), y };
    figure.plots.push(Plot {
        title: "Throughput".to_owned(),
        x: Axis::linear("0: web server; 1: migration, shared port; 2: migration, other port"),
        y: Axis::linear("MByte/s"),
        bars: true,
        series: [
            (0, "web server", seen.web_rate),
            (1, "migration, shared port", seen.port_rates[0]),
            (2, "migration, other port", seen.port_rates[1]),
        ]
        .map(series)
        .into(),
        marks: [(0.0, 91.1), (1.0, 17.6), (2.0, 57.2)].map(mark).into(),
    });
    figure
}
