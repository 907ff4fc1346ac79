//! The engine's own schedules and its read cache, in real moves: what the paper's replayer leaves out.

use crate::figure::Figure;
use crate::interference::devices::{CacheMode, Disk};
use crate::interference::load::Load;
use crate::interference::scene::{CHUNK_BYTES, Order, Scene};

use super::paper::TRACES;
use super::{Played, Runs};
use crate::waio::Setup;

pub(super) const ID: &str = "iofollow-engine";
/// The read cache, at the paper's scale.
pub(super) const READ_CACHE: u64 = 2 << 30;
pub(super) const FOLLOW: Order = Order::Follow { ratio: 2 };

/// A move of 15 GB past the page cache, one chunk at a time and as fast as it goes, to a device that is in nobody's way.
pub(super) fn standard(load: Load, scale: u64) -> Scene {
    Scene {
        cache: CacheMode::Off,
        target: Disk::NvmeFlash,
        rate: None,
        window_bytes: CHUNK_BYTES,
        has_neighbours: false,
        ..Scene::of_waio(load, scale)
    }
}

pub(super) fn loads(setup: &Setup) -> impl Iterator<Item = Load> + '_ {
    TRACES.iter().map(|trace| trace.load).chain(setup.recordings.iter().copied())
}

/// Alone, standard, cold first, following, following with the cache, standard below the host's page cache.
fn ways(load: Load, scale: u64) -> [Scene; 6] {
    let standard = standard(load, scale);
    let follow = Scene { order: Some(FOLLOW), ..standard };
    [
        Scene { order: None, ..standard },
        standard,
        Scene { order: Some(Order::ColdFirst), ..standard },
        follow,
        Scene { read_cache: READ_CACHE, ..follow },
        Scene { cache: CacheMode::WriteBack, ..follow },
    ]
}

const NAMES: [&str; 6] =
    ["alone", "standard", "cold first", "IOFollow", "IOFollow and its cache", "IOFollow below a page cache of 5 GB"];

/// The same from flash, in the standard order and where following is asked for.
fn on_flash(load: Load, scale: u64) -> [Scene; 2] {
    let standard = Scene { source: Disk::NvmeFlash, ..standard(load, scale) };
    [standard, Scene { order: Some(FOLLOW), ..standard }]
}

pub(super) fn scenes(setup: &Setup) -> Vec<Played> {
    let of = |load| ways(load, setup.scale).into_iter().chain(on_flash(load, setup.scale));
    loads(setup).flat_map(of).map(Played::Engine).collect()
}

pub(super) fn figure(setup: &Setup, runs: &Runs) -> Figure {
    let mut figure = Figure::new(
        ID,
        "The engine's schedules and its read cache",
        "Moves of 15 GB by dirty block tracking, 1 MiB at a time, as fast as they go, cache mode none, one request \
         outstanding. Following takes two requests for one copy; the standard order takes no turns, and copies whenever the \
         last copy has ended. So it is faster, and its guest waits longer. The cache has 2 GiB; the paper never measured \
         one.",
    )
    .against("standard")
    .assumed();
    for load in loads(setup) {
        let ways = ways(load, setup.scale);
        let name = load.name();
        let standard = runs.engine(ways[1]);
        for (scene, way) in ways.into_iter().zip(NAMES) {
            let seen = runs.engine(scene);
            figure.beside(format!("{name}, {way}: guest"), "ms", standard.guest.mean_ms(), seen.guest.mean_ms());
            if scene.order.is_some() {
                figure.beside(format!("{name}, {way}: a chunk"), "ms", standard.copy.mean_ms(), seen.copy.mean_ms());
                let [one, other] = [standard, seen].map(|seen| seen.copied_rate(scene.scale));
                figure.beside(format!("{name}, {way}: migration"), "MB/s", one, other);
            }
            if let Some(cache) = seen.read_cache {
                let hits = cache.guest_hits as f64 * 100.0 / (cache.guest_hits + cache.guest_misses).max(1) as f64;
                figure.words_beside(format!("{name}, {way}: guest reads from it"), "%", "", hits);
            }
        }
        let [guest, follow] = [ways[1], ways[3]].map(|scene| runs.engine(scene).guest.mean_ms());
        figure.claim(
            format!("{name}: the guest is answered sooner beside IOFollow"),
            follow < guest,
            format!("{follow:.1} ms, {guest:.1} beside the standard"),
            "",
        );
        let [copy, follow] = [ways[1], ways[3]].map(|scene| runs.engine(scene).copy.mean_ms());
        figure.claim(
            format!("{name}: a chunk is read sooner by IOFollow"),
            follow < copy,
            format!("{follow:.1} ms, {copy:.1} by the standard"),
            "",
        );
        let [uncached, cached] = [ways[3], ways[4]].map(|scene| runs.engine(scene).guest.mean_ms());
        figure.claim(
            format!("{name}: the cache costs the guest nothing"),
            cached <= uncached * 1.03,
            format!("{cached:.1} ms, {uncached:.1} without"),
            "",
        );
        let [standard, follow] = on_flash(load, setup.scale).map(|scene| runs.engine(scene));
        let (iops, time) = (standard.guest.mean_ms() / follow.guest.mean_ms(), follow.seconds / standard.seconds);
        figure.claim(
            format!("{name}: on flash, following that is asked for switches itself off"),
            iops >= 0.98 && time <= 1.01,
            format!("{:.1} % of the guest's requests a second, {:.1} % of the time", iops * 100.0, time * 100.0),
            "",
        );
    }
    figure
}
