//! Who runs when: the longest first, as many at once as the processors bear.

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::process::{self, Outcome};
use super::say;

/// A test that takes longer hangs. The slowest takes three minutes, beside others five.
const HANG: Duration = Duration::from_secs(900);
/// A test that nobody has measured takes so long, and keeps so many processors busy.
const UNKNOWN: (f64, f64) = (0.5, 0.5);
/// What keeps no processor busy takes some memory and some turns all the same.
const PROCESSORS_MIN: f64 = 0.15;

/// A process of tests that is to run.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Task {
    pub(super) name: String,
    pub(super) path: PathBuf,
    pub(super) folder: PathBuf,
    pub(super) arguments: Vec<String>,
    /// What it is expected to take.
    pub(super) seconds: f64,
    /// How many processors it is expected to keep busy, on average.
    pub(super) processors: f64,
    /// Nothing runs beside it.
    pub(super) is_alone: bool,
    /// What no two tests may use at once.
    pub(super) shared: Option<&'static str>,
    /// A task that takes longer hangs.
    pub(super) limit: Duration,
    /// How many tests it must say to have run, if it is a program of tests.
    pub(super) tests: Option<usize>,
}

impl Task {
    /// One of which nothing but its name is known.
    pub(super) fn named(name: String) -> Self {
        let (seconds, processors) = UNKNOWN;
        let (path, folder, arguments) = (PathBuf::new(), PathBuf::new(), Vec::new());
        Self {
            name,
            path,
            folder,
            arguments,
            seconds,
            processors,
            is_alone: false,
            shared: None,
            limit: HANG,
            tests: None,
        }
    }
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:7.1} s {:4.1} processors  {}", self.seconds, self.processors, self.name)
    }
}

/// What waits, and what is in use.
struct Queue {
    /// The shortest first.
    waiting: Vec<Task>,
    running: usize,
    /// Processors that those who run are expected to keep busy.
    busy: f64,
    shared: BTreeSet<&'static str>,
    has_lonely: bool,
    limits: Limits,
}

/// What may be in use at once.
#[derive(Clone, Copy)]
struct Limits {
    tasks: usize,
    processors: f64,
}

impl Queue {
    fn new(mut waiting: Vec<Task>, limits: Limits) -> Self {
        // Those that run alone come last: nobody waits for them with processors idle.
        waiting.sort_by(|one, other| other.is_alone.cmp(&one.is_alone).then(one.seconds.total_cmp(&other.seconds)));
        Self { waiting, running: 0, busy: 0.0, shared: BTreeSet::new(), has_lonely: false, limits }
    }

    /// The longest task that fits beside those that run. None may mean that one must end first.
    fn next(&mut self) -> Option<Task> {
        let place = self.waiting.iter().rposition(|task| self.fits(task))?;
        let task = self.waiting.remove(place);
        self.running += 1;
        self.busy += cost(&task);
        self.has_lonely |= task.is_alone;
        self.shared.extend(task.shared);
        Some(task)
    }

    fn fits(&self, task: &Task) -> bool {
        if self.running == 0 {
            return true;
        }
        let is_free = task.shared.is_none_or(|shared| !self.shared.contains(shared));
        !task.is_alone
            && !self.has_lonely
            && is_free
            && self.running < self.limits.tasks
            && self.busy + cost(task) <= self.limits.processors
    }

    fn end(&mut self, task: &Task) {
        self.running -= 1;
        self.busy -= cost(task);
        self.has_lonely &= !task.is_alone;
        if let Some(shared) = task.shared {
            self.shared.remove(shared);
        }
    }
}

fn cost(task: &Task) -> f64 {
    task.processors.max(PROCESSORS_MIN)
}

/// Runs all `tasks`, at most `at_once` at a time. What is `beside` them runs one after the other and is given no room.
pub(super) fn run_all(tasks: Vec<Task>, beside: Vec<Task>, at_once: usize) -> anyhow::Result<Vec<Outcome>> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let limits = Limits { tasks: at_once, processors: cores as f64 };
    let queue = Mutex::new(Queue::new(tasks, limits));
    let (has_ended, outcomes) = (Condvar::new(), Mutex::new(Vec::new()));
    // One that cannot be run is a failed one: all others run, and are reported, as ever.
    let run = |task: &Task| {
        process::run(task).unwrap_or_else(|error| {
            say(format_args!("--- {} could not be run: {error:#}", task.name));
            Outcome::failed(&task.name)
        })
    };
    let worker = || {
        loop {
            let mut waiting = lock(&queue);
            let task = loop {
                if let Some(task) = waiting.next() {
                    break task;
                }
                if waiting.waiting.is_empty() {
                    return;
                }
                waiting = has_ended.wait(waiting).unwrap_or_else(PoisonError::into_inner);
            };
            drop(waiting);
            let outcome = run(&task);
            lock(&queue).end(&task);
            has_ended.notify_all();
            lock(&outcomes).push(outcome);
        }
    };
    std::thread::scope(|scope| {
        let mut workers: Vec<_> = (0..at_once).map(|_| scope.spawn(worker)).collect();
        workers.push(scope.spawn(|| {
            for task in &beside {
                // Whoever holds the outcomes holds up all others: first it runs.
                let outcome = run(task);
                lock(&outcomes).push(outcome);
            }
        }));
        for worker in workers {
            worker.join().map_err(|_| anyhow::anyhow!("a thread has panicked"))?;
        }
        anyhow::Ok(())
    })?;
    Ok(outcomes.into_inner().unwrap_or_else(PoisonError::into_inner))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(name: &str, seconds: f64, processors: f64) -> Task {
        Task { seconds, processors, ..Task::named(name.to_owned()) }
    }

    fn queue(tasks: Vec<Task>) -> Queue {
        Queue::new(tasks, Limits { tasks: 3, processors: 2.0 })
    }

    fn next(queue: &mut Queue) -> Option<String> {
        queue.next().map(|task| task.name)
    }

    #[test]
    fn one_that_cannot_be_started_has_failed_and_all_others_run() {
        let echo = Task { path: "/bin/true".into(), folder: "/".into(), ..task("own there", 1.0, 0.1) };
        let gone = Task { path: "/nowhere".into(), folder: "/nowhere".into(), ..task("own gone", 2.0, 0.1) };
        let outcomes = run_all(vec![gone.clone(), echo], vec![gone], 1).expect("they are run");
        let failed = outcomes.iter().filter(|outcome| !outcome.is_good).count();
        assert_eq!((outcomes.len(), failed), (3, 2));
    }

    #[test]
    fn the_longest_that_fits_the_processors_comes_first() {
        let mut queue = queue(vec![task("short", 1.0, 0.1), task("long", 9.0, 1.5), task("next", 8.0, 1.0)]);
        assert_eq!(next(&mut queue).as_deref(), Some("long"));
        assert_eq!(next(&mut queue).as_deref(), Some("short"), "next needs a processor that is busy");
        assert_eq!(next(&mut queue), None);
        queue.end(&task("long", 9.0, 1.5));
        assert_eq!(next(&mut queue).as_deref(), Some("next"));
    }

    #[test]
    fn a_task_that_needs_more_than_all_processors_runs_when_nothing_else_does() {
        let mut queue = queue(vec![task("small", 1.0, 0.5), task("huge", 9.0, 5.0)]);
        assert_eq!(next(&mut queue).as_deref(), Some("huge"));
        assert_eq!(next(&mut queue), None);
    }

    #[test]
    fn one_that_runs_alone_comes_last_and_has_nobody_beside_it() {
        let lonely = Task { is_alone: true, ..task("alone", 99.0, 0.1) };
        let mut queue = queue(vec![lonely.clone(), task("other", 1.0, 0.1), task("third", 0.5, 0.1)]);
        assert_eq!(next(&mut queue).as_deref(), Some("other"));
        assert_eq!(next(&mut queue).as_deref(), Some("third"));
        assert_eq!(next(&mut queue), None);
        queue.end(&task("other", 1.0, 0.1));
        queue.end(&task("third", 0.5, 0.1));
        assert_eq!(next(&mut queue).as_deref(), Some("alone"));
        queue.waiting.push(task("late", 1.0, 0.1));
        assert_eq!(next(&mut queue), None);
        queue.end(&lonely);
        assert_eq!(next(&mut queue).as_deref(), Some("late"));
    }

    #[test]
    fn what_two_tests_share_has_one_of_them_at_a_time() {
        let user = |name: &str, seconds| Task { shared: Some("libvirt"), ..task(name, seconds, 0.1) };
        let mut queue = queue(vec![user("one", 2.0), user("two", 1.0), task("other", 0.5, 0.1)]);
        assert_eq!(next(&mut queue).as_deref(), Some("one"));
        assert_eq!(next(&mut queue).as_deref(), Some("other"));
        queue.end(&user("one", 2.0));
        assert_eq!(next(&mut queue).as_deref(), Some("two"));
    }
}
