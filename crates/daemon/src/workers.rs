//! The data plane: one thread a core, each with an event loop of its own. A connection stays on its worker.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use env::{Env, EnvRef, Moment, Task};
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

use crate::problem::{Result, of_state};

/// The nice value of workers that give way: about a third of an equal's share.
const YIELDING_NICE: i32 = 5;

/// How late its timers may be, in nanoseconds; the kernel's default is 50 us.
const TIMER_SLACK: Option<NonZeroU64> = NonZeroU64::new(1000);

/// Where work is done: on a thread with an event loop, or beside the caller. The thread ends when this is dropped, and
/// what runs on it is torn down. A thread that yields may end later: nobody waits for it.
pub struct Worker(Kind);

enum Kind {
    Thread(Thread),
    Beside(EnvRef),
}

struct Thread {
    handle: Handle,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
    /// Whether whoever drops this waits for its end.
    is_awaited: bool,
}

impl Worker {
    /// A worker that is none: its work is done among the caller's tasks.
    #[must_use]
    pub const fn beside(env: EnvRef) -> Self {
        Self(Kind::Beside(env))
    }

    /// Starts a worker whose thread is called `name`.
    pub(crate) fn start(name: &str) -> Result<Self> {
        Self::start_with(name, || ())
    }

    /// Starts a worker whose thread gives way to others: where the processors are short, the guest's work comes first.
    /// Whoever drops it does not wait for its end: requests to a target that is silent end when that answers.
    pub(crate) fn start_yielding(name: &str) -> Result<Self> {
        let mut worker = Self::start_with(name, || {
            // Where it is not allowed the copy competes as an equal.
            let _ = set_nice(true);
            // Its short sleeps must not become longer than requested.
            let _ = rustix::thread::set_current_timer_slack(TIMER_SLACK);
        })?;
        if let Kind::Thread(thread) = &mut worker.0 {
            thread.is_awaited = false;
        }
        Ok(worker)
    }

    fn start_with(name: &str, begin: impl FnOnce() + Send + 'static) -> Result<Self> {
        let failed = |error| of_state(error, format!("starting the worker {name}"));
        let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            begin();
            // The sender is never used: it is dropped when the worker shall end.
            let _ = runtime.block_on(stopped);
            runtime.shutdown_background();
        });
        let thread = Some(thread.map_err(failed)?);
        Ok(Self(Kind::Thread(Thread { handle, stop: Some(stop), thread, is_awaited: true })))
    }

    /// Whether its thread gives way to others from now on; the receiver learns whether the kernel allows that. A worker that is
    /// none has nothing to say.
    pub(crate) fn give_way(&self, gives_way: bool) -> oneshot::Receiver<bool> {
        match &self.0 {
            Kind::Thread(_) => self.spawn(async move { set_nice(gives_way) }),
            Kind::Beside(_) => oneshot::channel().1,
        }
    }

    /// Runs `work` on it. The receiver learns nothing if that panics.
    pub(crate) fn spawn<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> oneshot::Receiver<T> {
        match &self.0 {
            Kind::Thread(thread) => {
                let (sender, receiver) = oneshot::channel();
                thread.handle.spawn(async move {
                    // The receiver may have gone: then nobody wants the value.
                    let _ = sender.send(work.await);
                });
                receiver
            }
            Kind::Beside(env) => env::spawn_with_result(&**env, work),
        }
    }

    /// Runs `work` on it and gives what that gives.
    pub(crate) async fn run<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> T {
        self.spawn(work).await.expect("work on a worker neither panics nor is aborted while it is awaited")
    }
}

/// Gives the calling thread alone (on Linux) another share of the processors, if it may have that.
fn set_nice(gives_way: bool) -> bool {
    rustix::process::setpriority_process(None, if gives_way { YIELDING_NICE } else { 0 }).is_ok()
}

/// Runs `start`, which starts a process. A process has the share of the processors of the thread that starts it, for as long as it
/// lives. So a thread that gives way is an equal meanwhile, if it may.
pub(crate) fn start_as_equal<T>(start: impl FnOnce() -> T) -> T {
    let gives_way = rustix::process::getpriority_process(None).is_ok_and(|nice| nice == YIELDING_NICE);
    if gives_way && !set_nice(false) {
        tracing::warn!("what is started gets less of the processors than others: CAP_SYS_NICE is missing");
        return start();
    }
    let started = start();
    if gives_way {
        // Anybody may give way.
        let _ = set_nice(true);
    }
    started
}

impl Drop for Thread {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && self.is_awaited
            && thread.thread().id() != std::thread::current().id()
        {
            // A panic on the thread was reported when it happened.
            let _ = thread.join();
        }
    }
}

/// Workers that take connections in turn.
pub(crate) struct Workers {
    workers: Vec<Worker>,
    next: AtomicUsize,
}

impl Workers {
    /// Starts `count` of them.
    pub(crate) fn start(count: usize) -> Result<Self> {
        Self::start_each(count, |number| Worker::start(&format!("data-{number}")))
    }

    /// Starts `count` that give way to the others, called `name-NUMBER`.
    pub(crate) fn start_yielding(name: &str, count: usize) -> Result<Self> {
        Self::start_each(count, |number| Worker::start_yielding(&format!("{name}-{number}")))
    }

    fn start_each(count: usize, start: impl Fn(usize) -> Result<Worker>) -> Result<Self> {
        let workers = (0..count.max(1)).map(start).collect::<Result<_>>()?;
        Ok(Self { workers, next: AtomicUsize::new(0) })
    }

    /// Whether they give way to others from now on, as far as the kernel allows it.
    pub(crate) fn give_way(&self, gives_way: bool) {
        // Nobody waits for it.
        self.workers.iter().for_each(|worker| drop(worker.give_way(gives_way)));
    }

    /// The world of `env` as each of them sees it: what is spawned there runs on that worker, whoever asks for it.
    pub(crate) fn environments(&self, env: &EnvRef) -> Vec<EnvRef> {
        let each = |worker: &Worker| match &worker.0 {
            Kind::Thread(thread) => {
                Arc::new(OnWorker { env: Arc::clone(env), handle: thread.handle.clone() }) as EnvRef
            }
            Kind::Beside(env) => Arc::clone(env),
        };
        self.workers.iter().map(each).collect()
    }

    /// The worker whose turn it is to take a connection.
    pub(crate) fn next(&self) -> &Worker {
        &self.workers[self.next.fetch_add(1, Ordering::Relaxed) % self.workers.len()]
    }
}

/// An environment whose tasks run on one worker. Its sleeps are for those tasks.
struct OnWorker {
    env: EnvRef,
    handle: Handle,
}

impl Env for OnWorker {
    fn now(&self) -> Moment {
        self.env.now()
    }

    fn sleep(&self, span: Duration) -> Task {
        self.env.sleep(span)
    }

    fn spawn(&self, task: Task) {
        self.handle.spawn(task);
    }

    fn random(&self) -> u64 {
        self.env.random()
    }

    fn yield_cpu(&self) {
        self.env.yield_cpu();
    }

    fn wall_clock(&self) -> SystemTime {
        self.env.wall_clock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_worker_gives_way_until_it_is_told_not_to_if_the_kernel_allows_that() {
        let worker = Worker::start_yielding("copy").expect("started");
        let nice = || worker.run(async { rustix::process::getpriority_process(None).expect("a nice value") });
        assert_eq!(nice().await, YIELDING_NICE);
        let is_allowed = worker.give_way(false).await.expect("it answers");
        assert_eq!(nice().await, if is_allowed { 0 } else { YIELDING_NICE });
        assert!(worker.give_way(true).await.expect("it answers"), "anybody may give way");
        assert_eq!(nice().await, YIELDING_NICE);
    }

    #[tokio::test]
    async fn a_process_that_a_worker_starts_does_not_give_way_with_it() {
        let worker = Worker::start_yielding("copy").expect("started");
        let is_allowed = worker.give_way(false).await.expect("it answers");
        assert!(worker.give_way(true).await.expect("it answers"), "anybody may give way");
        let started = worker.run(async {
            let started = start_as_equal(|| std::process::Command::new("nice").output());
            let own = rustix::process::getpriority_process(None).expect("a nice value");
            (String::from_utf8(started.expect("it runs").stdout).expect("a number"), own)
        });
        let (nice, own) = started.await;
        assert_eq!(nice.trim(), if is_allowed { "0" } else { "5" });
        assert_eq!(own, YIELDING_NICE, "the worker itself gives way on");
    }

    #[tokio::test]
    async fn nobody_waits_for_a_worker_that_gives_way() {
        const LONG: Duration = Duration::from_secs(60);
        let worker = Worker::start_yielding("copy").expect("started");
        let (answer, answered) = std::sync::mpsc::channel::<()>();
        let (begin, begun) = oneshot::channel();
        // As one whose last requests are to a target that says nothing.
        drop(worker.spawn(async move {
            let _ = begin.send(());
            let _ = answered.recv_timeout(LONG);
        }));
        begun.await.expect("it has begun");
        let start = std::time::Instant::now();
        drop(worker);
        assert!(start.elapsed() < LONG / 2, "whoever dropped the worker waited for what it waited for");
        drop(answer);
    }

    #[tokio::test]
    async fn what_is_spawned_in_a_workers_world_runs_on_that_worker() {
        let env: EnvRef = Arc::new(env::RealEnv::new());
        let workers = Workers::start_yielding("wire", 2).expect("started");
        for (number, world) in workers.environments(&env).iter().enumerate() {
            let name = env::spawn_with_result(&**world, async { std::thread::current().name().map(str::to_owned) });
            assert_eq!(name.await.expect("it ran"), Some(format!("wire-{number}")));
        }
    }
}
