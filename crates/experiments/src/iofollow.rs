//! The evaluation of IOFollow, repeated: chapter 5 of the dissertation, a copy that goes where the head of the disk already is.
//!
//! The paper measures a replayer of its own (algorithm 3) and no migration: `replayer` is that one, on the bare model of the
//! paper's disk. Beside it the engine's own schedules and cache are played in the scenes of `interference`, and both
//! papers' ideas together, which no paper has. `docs/paper-iofollow.md` tells what is modelled and what was fitted.

mod chunk_sizes;
mod concurrent;
mod engine;
mod main_results;
mod paper;
mod ratios;
mod replayer;
mod together;

use std::fmt;

use block::Result;

use crate::figure::Evaluation;
use crate::interference::scene::{Scene, Seen};
use crate::runs::{self, About, EvaluationOptions, Progress};
use crate::waio::Setup;
use replayer::{Answered, Replayed};

/// What is played: the paper's replayer, or the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Played {
    Replayer(Replayed),
    Engine(Scene),
}

impl fmt::Display for Played {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Replayer(replayed) => replayed.fmt(out),
            Self::Engine(scene) => scene.fmt(out),
        }
    }
}

/// What came of it.
enum Came {
    OfReplayer(Answered),
    OfEngine(Box<Seen>),
}

impl runs::Scene for Played {
    type Seen = Came;

    fn weight(&self) -> u64 {
        match self {
            Self::Replayer(replayed) => replayed.machines << 12,
            Self::Engine(scene) => scene.weight(),
        }
    }

    fn play(&self, seed: u64) -> Result<Came> {
        Ok(match self {
            Self::Replayer(replayed) => Came::OfReplayer(replayed.play(seed)?),
            Self::Engine(scene) => Came::OfEngine(Box::new(scene.play(seed)?)),
        })
    }

    fn ending(came: &Came) -> String {
        match came {
            Came::OfReplayer(seen) => {
                format!("guest {:.1} ms, copies {:.1} ms", seen.guest.mean_ms(), seen.copy.mean_ms())
            }
            Came::OfEngine(seen) => Scene::ending(seen),
        }
    }
}

/// What came of the evaluation's scenes.
type Runs = runs::Runs<Played>;
/// A figure or a table.
type Study = runs::Study<Setup, Played>;

impl Runs {
    fn replayed(&self, replayed: Replayed) -> &Answered {
        match self.get(&Played::Replayer(replayed)) {
            Came::OfReplayer(seen) => seen,
            Came::OfEngine(_) => unreachable!("a replayer is no engine"),
        }
    }

    fn engine(&self, scene: Scene) -> &Seen {
        match self.get(&Played::Engine(scene)) {
            Came::OfEngine(seen) => seen,
            Came::OfReplayer(_) => unreachable!("an engine is no replayer"),
        }
    }
}

/// A study that is described by a module.
macro_rules! study {
    ($module:ident) => {
        Study { id: $module::ID, is_of_paper: true, scenes: $module::scenes, figure: $module::figure }
    };
}

const STUDIES: &[Study] =
    &[study!(main_results), study!(chunk_sizes), study!(ratios), study!(concurrent), study!(engine), study!(together)];

const PAPER: About = About {
    title: "IOFollow: storage migration that follows the guest",
    page: "docs/paper-iofollow.md",
    about: "The paper's replayer on the bare model of its disk, and the engine's schedules and read cache on the same \
     model. Loads called synthetic are generators with published characteristics of the traces, and no traces. The replayer \
     is not scaled; the engine's images and caches are.",
    scale_max: 256,
};

/// The names of its figures.
pub fn figure_names() -> Vec<&'static str> {
    STUDIES.iter().map(|study| study.id).collect()
}

/// Carries out the evaluation, telling `progress` of every scene.
///
/// # Errors
/// Something that must always hold did not, a trace cannot be read, or there is no figure of a name.
pub fn evaluate(options: &EvaluationOptions, progress: Progress<'_>) -> Result<Evaluation> {
    runs::evaluate(&PAPER, (STUDIES, &Setup::new(options)?), options, progress)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interference::devices::Disk;
    use crate::interference::load::Load;
    use crate::runs::Scene as _;

    #[test]
    fn the_engine_follows_caches_and_redirects_in_one_move() {
        let standard = engine::standard(Load::WebSearch1, 128);
        let together = Scene { order: Some(engine::FOLLOW), read_cache: engine::READ_CACHE, ..standard };
        let [standard, together] = [standard, together.on(Disk::SataFlash)].map(|scene| {
            match Played::Engine(scene).play(1).expect("nothing is violated") {
                Came::OfEngine(seen) => seen,
                Came::OfReplayer(_) => unreachable!("an engine is no replayer"),
            }
        });
        assert!(together.guest.mean_ms() < standard.guest.mean_ms(), "{together:?} and {standard:?}");
        let schedule = together.schedule.expect("it has moved");
        assert!(schedule.runs_chosen > 20 && together.redirect.is_some_and(|status| status.chunks_fetched > 10));
        assert!(together.read_cache.is_some_and(|cache| cache.copy_misses > 20) && standard.read_cache.is_none());
    }
}
