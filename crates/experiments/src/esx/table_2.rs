//! Table 2: write latency with Exchange (3.3).

use super::Runs;
use super::exchange::scene;
use super::grid::Setup;
use super::scene::Scene;
use super::way::Way;
use crate::figure::Figure;

pub(super) const ID: &str = "table-2";
/// Milliseconds of the paper. Its values are those of the first copy, so moves by DBT end within it here; mirroring has no
/// other phase.
const ENTRIES: [(Way, f64); 3] =
    [(Way::DbtFirstCopy, 3.622), (Way::IncrementalDbtFirstCopy, 3.571), (Way::PaperMirror, 3.338)];
const ALONE_MS: f64 = 0.777;

pub(super) fn scenes(setup: &Setup) -> Vec<Scene> {
    ENTRIES.iter().map(|(way, _)| *way).chain([Way::Mirror]).map(|way| scene(way, 1, setup.scale)).collect()
}

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "Table 2: write latency with Exchange",
        "The mean over the first copy, as in the paper: the moves by DBT end within it. What a command costs the modelled array \
         was chosen so that a write takes as long without a migration. The paper's penalties do not follow from its \
         latencies (3.571 ms are 4.6 times 0.777 ms, it says 3.6; 3.338 ms are 4.3 times, it says 3.3). Its two values of the \
         passes after the first copy are not repeated.",
    ).assumed();
    let alone = runs.get(&scene(Way::PaperMirror, 1, setup.scale)).before.write_mean_ms();
    figure.row("no migration", "ms", ALONE_MS, alone).fitted();
    for (way, paper) in ENTRIES {
        let ours = runs.get(&scene(way, 1, setup.scale)).during.write_mean_ms();
        figure.row(format!("write latency: {}", way.name()), "ms", paper, ours);
        figure.row(format!("the same, against no migration: {}", way.name()), "x", paper / ALONE_MS, ours / alone);
    }
    let latency = |way: Way| runs.get(&scene(way, 1, setup.scale)).during.write_mean_ms();
    let (mirror, dbt) = (latency(Way::PaperMirror), latency(Way::DbtFirstCopy));
    figure.claim(
        "a write takes several times longer while the disk is copied, and mirroring is not worse than DBT",
        mirror > 1.5 * alone && mirror <= dbt * 1.05,
        format!("{alone:.2} ms alone, {mirror:.2} ms with mirroring, {dbt:.2} ms with DBT"),
        "A mirrored write waits twice for the array's processors.",
    );
    let ours = latency(Way::Mirror);
    figure.claim("ours costs no more than the paper's mover", ours <= mirror * 1.05, format!("{ours:.2} ms"), "");
    figure
}
