//! How a paper's evaluation is carried out. Its figures name scenes. Each scene is played once, several at a time, and
//! every figure is made of the results.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use block::{Error, ErrorKind, Result};

use crate::figure::{Evaluation, Figure};

/// What to carry out.
#[derive(Clone, Debug)]
pub struct EvaluationOptions {
    /// Everything is so many times smaller than the paper's.
    pub scale: u64,
    /// Only these figures; all of the paper's if it is empty.
    pub only: Vec<String>,
    /// Where all randomness is from.
    pub seed: u64,
    /// How many scenes are played at once.
    pub jobs: usize,
    /// Where the user's own traces are; generators alone are played without.
    pub traces: Option<PathBuf>,
    /// How whoever reads the report repeats it.
    pub command: String,
}

/// Told of every scene that was played.
pub type Progress<'a> = &'a (dyn Fn(String) + Sync);

/// Something of a paper's that can be played in the world.
pub(crate) trait Scene: Copy + Ord + Display + Send + Sync {
    /// What came of it.
    type Seen: Send;

    /// How long it takes to play, against others.
    fn weight(&self) -> u64;

    /// Plays it.
    ///
    /// # Errors
    /// Something that must always hold did not.
    fn play(&self, seed: u64) -> Result<Self::Seen>;

    /// How it ended, for the progress.
    fn ending(seen: &Self::Seen) -> String;
}

/// A figure or a table: the scenes that it needs and what it makes of them.
pub(crate) struct Study<Setup, S: Scene> {
    pub(crate) id: &'static str,
    /// What the paper does not have is carried out where it is asked for.
    pub(crate) is_of_paper: bool,
    pub(crate) scenes: fn(&Setup) -> Vec<S>,
    pub(crate) figure: fn(&Setup, &Runs<S>) -> Figure,
}

/// What the page of a paper's evaluation says of itself.
pub(crate) struct About {
    /// The paper.
    pub(crate) title: &'static str,
    /// The page of the documentation that tells how it is repeated.
    pub(crate) page: &'static str,
    /// What was measured, on what.
    pub(crate) about: &'static str,
    /// No scale divides by more.
    pub(crate) scale_max: u64,
}

/// Plays what the figures asked for need, and makes the paper's page of them.
///
/// # Errors
/// Something that must always hold did not, there is no figure of a name, or no such scale.
pub(crate) fn evaluate<Setup, S: Scene>(
    paper: &About,
    (studies, setup): (&[Study<Setup, S>], &Setup),
    options: &EvaluationOptions,
    progress: Progress<'_>,
) -> Result<Evaluation> {
    if !(1..=paper.scale_max).contains(&options.scale) {
        let context = format!("a scale of 1:{} is none from 1:1 to 1:{}", options.scale, paper.scale_max);
        return Err(Error::new(ErrorKind::Invalid, context));
    }
    let figures = carry_out(studies, setup, options, progress)?;
    Ok(Evaluation {
        title: paper.title.to_owned(),
        page: paper.page.to_owned(),
        command: format!("{}, seed {}, scale 1:{}", options.command, options.seed, options.scale),
        about: paper.about.to_owned(),
        seed: options.seed,
        scale: options.scale,
        figures,
    })
}

/// Plays what the figures asked for need, and makes them.
///
/// # Errors
/// Something that must always hold did not, or there is no figure of a name.
fn carry_out<Setup, S: Scene>(
    studies: &[Study<Setup, S>],
    setup: &Setup,
    options: &EvaluationOptions,
    progress: Progress<'_>,
) -> Result<Vec<Figure>> {
    if let Some(name) = options.only.iter().find(|name| studies.iter().all(|study| study.id != name.as_str())) {
        let known: Vec<&str> = studies.iter().map(|study| study.id).collect();
        return Err(Error::new(ErrorKind::Invalid, format!("there is no `{name}`, only {}", known.join(", "))));
    }
    let is_asked_for = |study: &&Study<Setup, S>| match options.only.is_empty() {
        true => study.is_of_paper,
        false => options.only.iter().any(|name| name == study.id),
    };
    let studies: Vec<&Study<Setup, S>> = studies.iter().filter(is_asked_for).collect();
    let scenes = studies.iter().flat_map(|study| (study.scenes)(setup)).collect();
    let runs = Runs::play(scenes, options.seed, options.jobs, progress)?;
    Ok(studies.iter().map(|study| (study.figure)(setup, &runs)).collect())
}

/// What came of every scene.
pub(crate) struct Runs<S: Scene> {
    seen: BTreeMap<S, S::Seen>,
}

impl<S: Scene> Runs<S> {
    /// Plays `scenes` with `seed`, `jobs` at once, and tells `progress` of each.
    fn play(scenes: BTreeSet<S>, seed: u64, jobs: usize, progress: Progress<'_>) -> Result<Self> {
        let mut order: Vec<S> = scenes.into_iter().collect();
        // The longest first, so that nobody waits for one at the end.
        order.sort_by_key(|scene| (std::cmp::Reverse(scene.weight()), *scene));
        let (next, seen) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
        let failed: Mutex<Option<Error>> = Mutex::new(None);
        let lock = "nobody panics while holding this";
        let worker = || {
            while let Some(scene) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
                match scene.play(seed) {
                    Ok(what) => {
                        let mut seen = seen.lock().expect(lock);
                        progress(format!("{}/{}: {scene}: {}", seen.len() + 1, order.len(), S::ending(&what)));
                        seen.insert(*scene, what);
                    }
                    Err(error) => {
                        next.store(order.len(), Ordering::Relaxed);
                        failed.lock().expect(lock).get_or_insert(error);
                    }
                }
            }
        };
        std::thread::scope(|scope| (0..jobs.max(1)).for_each(|_| drop(scope.spawn(worker))));
        match failed.into_inner().expect(lock) {
            Some(error) => Err(error),
            None => Ok(Self { seen: seen.into_inner().expect(lock) }),
        }
    }

    /// What came of `scene`.
    ///
    /// # Panics
    /// If the figure that asks has not said that it needs it.
    pub(crate) fn get(&self, scene: &S) -> &S::Seen {
        self.seen.get(scene).unwrap_or_else(|| panic!("a figure uses {scene} without asking for it"))
    }
}
