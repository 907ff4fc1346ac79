//! Tables 3.2 and 3.3: a guest on a hard disk, alone and beside a migration. `tables::hard_disk` tells how it is modelled.

use crate::figure::{Experiment, Figure};
use crate::tables::hard_disk::{Load, PIECES, RANDOM_PARTS, Reader, measure, measure_cached};

use super::{Runs, Setup};

pub(super) const TABLE_2: &str = "table-3.2";
pub(super) const TABLE_3: &str = "table-3.3";
const SEED: u64 = 1;

/// What the guest gets beside a migration at `rate` that reads pieces of `piece`, in MB/s.
fn beside(load: Load, rate: u64, piece: u64) -> f64 {
    measure(load, false, Some(Reader { rate, piece }), SEED).0.megabytes_a_second()
}

/// The migration reads halves of a MiB, as Linux hands them to a SATA disk.
fn in_halves(load: Load, rate: u64, paper: f64, ours: f64) -> Experiment {
    let halves = beside(load, rate, PIECES[1]);
    let shows = (halves - paper).abs() <= (ours - paper).abs() / 2.0 || (halves < paper && paper < ours);
    Experiment { seen: format!("pieces of 512 KiB leave the guest {halves:.2} MB/s"), shows }
}

pub(super) fn table_2(_: &Setup, _: &Runs) -> Figure {
    let mut figure = Figure::new(
        TABLE_2,
        "Table 3.2: a guest's MB/s beside a migration at 20.8 MB/s",
        "60 % reads, 32 KiB in sequence or 4 KiB at random, on the bare model of the ST31000524AS by its data sheet. One \
         request is outstanding. The migration reads 1 MiB at a time. How large the guest's file and the host's cache are \
         is not stated.",
    );
    let rate = 20_800_000;
    let alone = |load| measure(load, false, None, SEED).0.megabytes_a_second();
    figure.row("sequential, no migration", "MB/s", 58.44, alone(Load::Sequential));
    let sequential = beside(Load::Sequential, rate, PIECES[0]);
    figure.row("sequential, beside the migration", "MB/s", 19.43, sequential).explain(
        "How often the guest gets in between two pieces hangs on what the migration reads at a time, which is not stated.",
        &in_halves(Load::Sequential, rate, 19.43, sequential),
    );
    let random = alone(Load::Random);
    figure.row("random, no migration", "MB/s", 5.46, random).explain(
        "5.46 MB/s are 1,333 requests of 4 KiB a second: no head of 7200 rpm does that. The guest was served from a cache.",
        &served_from_a_cache(),
    );
    figure.row("random, beside the migration", "MB/s", 0.85, beside(Load::Random, rate, PIECES[0]));
    figure
}

/// The guest's file is somewhat larger than the host's page cache.
fn served_from_a_cache() -> Experiment {
    let seen = RANDOM_PARTS.map(|parts| (parts, measure_cached(parts, SEED).megabytes_a_second()));
    let words = seen.map(|(parts, ours)| format!("{ours:.2} MB/s with {:.1} times the cache", parts as f64 / 10.0));
    let (most, least) = (seen[0].1, seen[seen.len() - 1].1);
    Experiment {
        seen: format!("a page cache of 5 GB and a file of: {}", words.join(", ")),
        shows: least < 5.46 && 5.46 < most,
    }
}

pub(super) fn table_3(_: &Setup, _: &Runs) -> Figure {
    let mut figure = Figure::new(
        TABLE_3,
        "Table 3.3: a guest's MB/s beside faster migrations",
        "The sequential guest of table 3.2. The paper's times are its rates over 15.35 GB. That is an identity: they are shown and \
         not judged.",
    );
    for (rate, paper, seconds) in [(10_260_000, 42.25, 1498.0), (40_140_000, 9.29, 382.0)] {
        let megabytes = rate as f64 / 1e6;
        let ours = beside(Load::Sequential, rate, PIECES[0]);
        figure.row(format!("beside {megabytes:.2} MB/s"), "MB/s", paper, ours).explain(
            "How often the guest gets in between two pieces hangs on what the migration reads at a time, which is not stated.",
            &in_halves(Load::Sequential, rate, paper, ours),
        );
        figure.beside(format!("15 GB at {megabytes:.2} MB/s"), "s", seconds, 15e9 / rate as f64);
    }
    figure
}
