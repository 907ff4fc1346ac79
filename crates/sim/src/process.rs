//! A process of the world: the `Env` that the engine gets, and the power to kill it at any moment.
//!
//! Everything that a process runs is spawned through its `SimEnv`; killing it drops all of that at whatever await it
//! stands. What it had submitted to disks goes on without it (see [`crate::disk`]). Every poll of one of its tasks is
//! a step towards the world's [`CrashPoint`](crate::crash_point::CrashPoint), so that a process can be killed at a chosen await.

use std::collections::BTreeMap;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use env::{Env, EnvRef, Moment, Task};
use parking_lot::Mutex;
use tokio::task::JoinHandle;

use crate::clock;
use crate::rng::Rng;
use crate::world::{Invariant, World, words_of};

/// More tasks than this in one process are an unbounded queue, unless its limit is stated.
const TASKS_MAX: usize = 4096;

/// One life of a process.
#[derive(Clone)]
pub struct Process {
    env: Arc<SimEnv>,
}

/// What the process's code knows of the world.
struct SimEnv {
    world: World,
    rng: Rng,
    dead: Arc<AtomicBool>,
    tasks_max: usize,
    tasks: Arc<Mutex<Tasks>>,
    /// The world's crash point kills it, too.
    counts_polls: bool,
}

/// A task of a process: it counts its polls, does nothing once the process is dead, and tells of a panic.
struct Guarded {
    task: Task,
    world: World,
    dead: Arc<AtomicBool>,
    counts_polls: bool,
}

impl Future for Guarded {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.dead.load(Ordering::Relaxed) {
            return Poll::Pending;
        }
        if self.counts_polls && !self.world.crash_point().step() {
            // Whoever waits for the crash point kills the process; until then nothing of it runs.
            self.dead.store(true, Ordering::Relaxed);
            return Poll::Pending;
        }
        catch_unwind(AssertUnwindSafe(|| self.task.as_mut().poll(context))).unwrap_or_else(|panic| {
            self.world.violate(Invariant::NoPanic, words_of(&*panic));
            Poll::Ready(())
        })
    }
}

#[derive(Default)]
struct Tasks {
    next: u64,
    running: BTreeMap<u64, JoinHandle<()>>,
}

impl Process {
    /// Starts life number `life` of the process.
    #[must_use]
    pub fn start(world: &World, life: u32) -> Self {
        Self::named(world, &format!("process {life}"), true)
    }

    /// Starts life number `life` of another program, `name`, whose polls do not count towards the crash point.
    #[must_use]
    pub fn bystander(world: &World, name: &str, life: u32) -> Self {
        Self::named(world, &format!("{name} {life}"), false)
    }

    /// Starts life number `life` of another program, `name`, which is the one that the crash point kills.
    #[must_use]
    pub fn crash_target(world: &World, name: &str, life: u32) -> Self {
        Self::named(world, &format!("{name} {life}"), true)
    }

    fn named(world: &World, name: &str, counts_polls: bool) -> Self {
        let rng = world.rng(name);
        let (world, dead, tasks) = (world.clone(), Arc::default(), Arc::default());
        Self { env: Arc::new(SimEnv { world, rng, dead, tasks_max: TASKS_MAX, tasks, counts_polls }) }
    }

    /// States how many tasks it may have at once; more of them are a violation.
    ///
    /// # Panics
    /// If it has begun to run.
    #[must_use]
    pub fn with_tasks_max(mut self, tasks_max: usize) -> Self {
        Arc::get_mut(&mut self.env).expect("nobody else has the process yet").tasks_max = tasks_max;
        self
    }

    /// Its environment.
    #[must_use]
    pub fn env(&self) -> EnvRef {
        Arc::clone(&self.env) as EnvRef
    }

    /// Runs `task` in it. The receiver learns nothing if the process dies first.
    pub fn run<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> tokio::sync::oneshot::Receiver<T> {
        env::spawn_with_result(&*self.env, task)
    }

    /// Whether it was killed.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.env.dead.load(Ordering::Relaxed)
    }

    /// Counts a step outside of any poll; false if the process is dead, or dies of it.
    pub(crate) fn step(&self) -> bool {
        if !self.is_dead() && self.env.counts_polls && !self.env.world.crash_point().step() {
            self.env.dead.store(true, Ordering::Relaxed);
        }
        !self.is_dead()
    }

    /// Runs `task`, which observes what the process does and is no part of it. It ends with the process, and its polls
    /// do not count towards the crash point.
    pub(crate) fn look_on(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.env.spawn_counted(Box::pin(task), false);
    }

    /// How many tasks it runs.
    #[must_use]
    pub fn tasks(&self) -> usize {
        self.env.tasks.lock().running.len()
    }

    /// Ends it like SIGKILL: no task of it runs any further. Returns when all are gone.
    pub async fn kill(&self) {
        self.env.dead.store(true, Ordering::Relaxed);
        let running = std::mem::take(&mut self.env.tasks.lock().running);
        running.values().for_each(JoinHandle::abort);
        for task in running.into_values() {
            // An aborted task has nothing to say, unless dropping what it held has panicked.
            if let Err(error) = task.await
                && error.is_panic()
            {
                let panic = error.into_panic();
                let what = format!("a task of a killed process: {}", words_of(&*panic));
                self.env.world.violate(Invariant::NoPanic, what);
            }
        }
    }
}

impl Env for SimEnv {
    fn now(&self) -> Moment {
        self.world.now()
    }

    fn sleep(&self, span: Duration) -> Task {
        Box::pin(clock::sleep(span))
    }

    fn spawn(&self, task: Task) {
        self.spawn_counted(task, self.counts_polls);
    }

    fn random(&self) -> u64 {
        self.rng.any()
    }

    fn wall_clock(&self) -> SystemTime {
        self.world.wall_clock()
    }
}

impl SimEnv {
    fn spawn_counted(&self, task: Task, counts_polls: bool) {
        if self.dead.load(Ordering::Relaxed) {
            return;
        }
        let mut tasks = self.tasks.lock();
        let number = tasks.next;
        tasks.next += 1;
        if tasks.running.len() >= self.tasks_max {
            let what = format!("a process has more than {} tasks at once", self.tasks_max);
            self.world.violate(Invariant::Bounded, what);
        }
        let list = Arc::clone(&self.tasks);
        let guarded = Guarded { task, world: self.world.clone(), dead: Arc::clone(&self.dead), counts_polls };
        let guarded = async move {
            guarded.await;
            list.lock().running.remove(&number);
        };
        let handle = tokio::spawn(guarded);
        tasks.running.insert(number, handle);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::Keep;

    #[test]
    fn a_killed_process_does_nothing_more() {
        clock::run(async {
            let world = World::new(1, Keep::Tail);
            let process = Process::start(&world, 0);
            let env = process.env();
            let steps = Arc::new(Mutex::new(0));
            let counter = Arc::clone(&steps);
            let answer = process.run(async move {
                for _ in 0..1000 {
                    env.sleep(Duration::from_micros(10)).await;
                    *counter.lock() += 1;
                }
            });
            world.sleep(Duration::from_micros(35)).await;
            process.kill().await;
            world.sleep(Duration::from_secs(1)).await;
            assert_eq!(*steps.lock(), 3);
            assert!(answer.await.is_err(), "a dead process answered");
            process.env().spawn(Box::pin(async { panic!("a dead process spawned") }));
            world.sleep(Duration::from_secs(1)).await;
            assert_eq!((process.tasks(), world.violation()), (0, None));
        });
    }

    #[test]
    fn a_panic_is_a_violation() {
        clock::run(async {
            let world = World::new(1, Keep::Tail);
            let process = Process::start(&world, 0);
            process.env().spawn(Box::pin(async { panic!("as planned") }));
            world.violated().await;
            assert_eq!(world.violation().expect("it was noted").invariant, Invariant::NoPanic);
        });
    }
}
