//! The arbiter of two hosts: a third party that never forgets, and that a host cannot always ask.
//!
//! What is asked of it may not arrive, arrive long after whoever has asked has given it up, be carried out and not be
//! answered, or be answered when the switchover waits for it no more. Whoever asks dies meanwhile as at any other moment.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ::daemon::arbiter::{Arbiter, Ruling};
use api::v1::{Error, ErrorCode};
use futures::future::BoxFuture;
use parking_lot::Mutex;
use uuid::Uuid;

use crate::rng::Rng;
use crate::world::World;

/// How long an answer takes.
const ANSWER_MAX: Duration = Duration::from_millis(3);
/// How long a host waits for an answer that does not come.
const PATIENCE: Duration = Duration::from_secs(3);
/// How late something may arrive.
const LATE_MAX: Duration = Duration::from_secs(20);
/// How long the trouble with it lasts at most: less than a switchover, or long enough that everybody notices.
const TROUBLES_MS: [u64; 4] = [5, 300, 3000, 15_000];

/// How long what is decided arrives late.
const DELAYS_MS: [u64; 3] = [20, 1000, 30_000];

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Question {
    /// That a move be committed.
    Commit,
    /// That a commit be taken back, or a move forgotten.
    Withdraw,
    /// What was decided.
    Ruling,
}

/// What happens to a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Answered,
    /// The same, so slowly that the commit is in doubt meanwhile.
    Slow,
    /// It does not arrive.
    Lost,
    /// It is carried out, and nobody hears of that.
    Unheard,
    /// The same, later.
    Late,
}

/// The arbiter. Clones are the same.
#[derive(Clone)]
pub(super) struct FakeArbiter {
    shared: Arc<Shared>,
}

struct Shared {
    world: World,
    rng: Rng,
    rulings: Mutex<BTreeMap<Uuid, Ruling>>,
    /// How many causes there are why it is hard to ask.
    troubles: Mutex<u32>,
    /// The same of why commits arrive late.
    delays: Mutex<u32>,
}

impl FakeArbiter {
    pub(super) fn new(world: &World) -> Self {
        let shared = Shared {
            world: world.clone(),
            rng: world.rng("arbiter"),
            rulings: Mutex::default(),
            troubles: Mutex::new(0),
            delays: Mutex::new(0),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Whether a move was committed.
    pub(super) fn has_committed(&self) -> bool {
        self.shared.rulings.lock().values().any(|ruling| *ruling == Ruling::Committed)
    }

    /// It is hard to ask for a while.
    pub(super) fn trouble(&self) {
        let Shared { world, rng, troubles, .. } = &*self.shared;
        let span = rng.up_to(Duration::from_millis(rng.pick(&TROUBLES_MS)));
        *troubles.lock() += 1;
        world.fault("arbiter-trouble", format_args!("the arbiter is hard to ask for {span:?}"));
        let (fake_arbiter, sleeper) = (self.clone(), world.clone());
        world.spawn(async move {
            sleeper.sleep(span).await;
            *fake_arbiter.shared.troubles.lock() -= 1;
        });
    }

    /// Commits arrive late for a while, and questions get lost. What is taken back is so at once.
    pub(super) fn delay(&self) {
        let Shared { world, rng, delays, .. } = &*self.shared;
        let span = rng.up_to(Duration::from_millis(rng.pick(&DELAYS_MS)));
        *delays.lock() += 1;
        world.fault("arbiter-late", format_args!("what is committed at the arbiter arrives late for {span:?}"));
        let (fake_arbiter, sleeper) = (self.clone(), world.clone());
        world.spawn(async move {
            sleeper.sleep(span).await;
            *fake_arbiter.shared.delays.lock() -= 1;
        });
    }

    fn fate(&self, question: Question) -> Fate {
        if *self.shared.delays.lock() > 0 {
            return match question {
                Question::Commit => self.shared.rng.pick(&[Fate::Late, Fate::Slow, Fate::Answered]),
                Question::Ruling => self.shared.rng.pick(&[Fate::Lost, Fate::Lost, Fate::Answered]),
                Question::Withdraw => Fate::Answered,
            };
        }
        match *self.shared.troubles.lock() {
            0 => Fate::Answered,
            _ => self.shared.rng.pick(&[Fate::Lost, Fate::Slow, Fate::Unheard, Fate::Late, Fate::Answered]),
        }
    }

    /// Carries out `act`, as it may happen to what is asked of it.
    async fn ask<T>(
        &self,
        question: Question,
        what: String,
        act: impl FnOnce(&mut BTreeMap<Uuid, Ruling>) -> T + Send + 'static,
    ) -> Result<T, Error>
    where
        T: std::fmt::Debug + Send,
    {
        let Shared { world, rng, .. } = &*self.shared;
        world.sleep(rng.up_to(ANSWER_MAX)).await;
        let fate = self.fate(question);
        let carry_out = move |fake_arbiter: &Self| {
            let outcome = act(&mut fake_arbiter.shared.rulings.lock());
            fake_arbiter.shared.world.event(format_args!("the arbiter: {what}: {outcome:?}"));
            outcome
        };
        match fate {
            Fate::Answered | Fate::Slow => {
                let outcome = carry_out(self);
                let until_answered = if fate == Fate::Slow { PATIENCE } else { ANSWER_MAX };
                world.sleep(rng.up_to(until_answered)).await;
                return Ok(outcome);
            }
            Fate::Lost => {}
            Fate::Unheard => drop(carry_out(self)),
            Fate::Late => {
                let (fake_arbiter, span) = (self.clone(), rng.up_to(LATE_MAX));
                world.spawn(async move {
                    fake_arbiter.shared.world.sleep(span).await;
                    drop(carry_out(&fake_arbiter));
                });
            }
        }
        world.sleep(rng.up_to(PATIENCE)).await;
        Err(Error::new(ErrorCode::ArbiterUnreachable, "the arbiter cannot be asked"))
    }
}

impl Arbiter for FakeArbiter {
    fn decide(&self, job: Uuid, expected: Ruling, wanted: Ruling) -> BoxFuture<'_, Result<Ruling, Error>> {
        let what = format!("{wanted:?} after {expected:?}");
        let question = if wanted == Ruling::Committed { Question::Commit } else { Question::Withdraw };
        Box::pin(self.ask(question, what, move |rulings| {
            let ruling = rulings.entry(job).or_insert(Ruling::Unknown);
            if *ruling == expected {
                *ruling = wanted;
            }
            *ruling
        }))
    }

    fn ruling(&self, job: Uuid) -> BoxFuture<'_, Result<Ruling, Error>> {
        Box::pin(self.ask(Question::Ruling, "what is it?".to_owned(), move |rulings| {
            rulings.get(&job).copied().unwrap_or(Ruling::Unknown)
        }))
    }

    fn forget(&self, job: Uuid) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(self.ask(Question::Withdraw, "forget it".to_owned(), move |rulings| {
            rulings.remove(&job);
        }))
    }
}
