//! A host as the engine feels it: its tasks stop, slow down or end, and its clocks are wrong.
//!
//! | fault | what it does |
//! |---|---|
//! | [`Machine::crash`] | everything ends at its await, as in [`crate::process`]; links and disks are told by whoever plays |
//! | [`Machine::pause`] | no task runs until it is resumed, timers that ended meanwhile are noticed then; devices and links go on |
//! | [`Machine::set_slow`] | every time a task could run it has to wait for a processor first, up to a stated time |
//! | [`Machine::set_clock_rate`] | its clock runs too fast or too slow, by parts per million; timers with it |
//! | [`Machine::step_wall_clock`] | its wall clock jumps; the monotonic one does not |
//!
//! Clocks of real machines are off by up to about 200 ppm (crystals), and wall clocks jump by hours when somebody
//! corrects them. The engine gets all of it through its [`env::Env`] and nothing else.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, SystemTime};

use env::{Env, EnvRef, Moment, Task};
use parking_lot::Mutex;

use crate::clock;
use crate::process::Process;
use crate::rng::Rng;
use crate::world::World;

/// A host with one process. Clones are the same host.
#[derive(Clone)]
pub struct Machine {
    env: Arc<MachineEnv>,
    process: Process,
    name: &'static str,
}

struct MachineEnv {
    inner: EnvRef,
    state: Arc<State>,
}

struct State {
    world: World,
    rng: Rng,
    now: Mutex<Condition>,
}

struct Condition {
    is_paused: bool,
    /// Tasks that wanted to run while it was paused.
    waiting: Vec<Waker>,
    /// A task waits up to this for a processor.
    slow: Duration,
    /// Parts per million that its clock is too fast.
    rate_ppm: i64,
    /// When the rate was last changed, and what the clock showed then.
    since: (Moment, Moment),
    wall_ahead: Duration,
    wall_behind: Duration,
}

impl Machine {
    /// A host on which life number `life` of a process begins.
    #[must_use]
    pub fn start(world: &World, name: &'static str, life: u32) -> Self {
        let process = Process::start(world, life);
        let now = world.now();
        let condition = Condition {
            is_paused: false,
            waiting: Vec::new(),
            slow: Duration::ZERO,
            rate_ppm: 0,
            since: (now, now),
            wall_ahead: Duration::ZERO,
            wall_behind: Duration::ZERO,
        };
        let state = State { world: world.clone(), rng: world.rng(name), now: Mutex::new(condition) };
        let env = MachineEnv { inner: process.env(), state: Arc::new(state) };
        Self { env: Arc::new(env), process, name }
    }

    /// What the engine on it gets.
    #[must_use]
    pub fn env(&self) -> EnvRef {
        Arc::clone(&self.env) as EnvRef
    }

    /// Ends everything on it at once.
    pub async fn crash(&self) {
        self.env.state.world.fault("host-crash", format_args!("{}", self.name));
        self.process.kill().await;
    }

    /// Stops all its tasks, as the suspension of a VM or a long trap of its kernel does.
    pub fn pause(&self) {
        self.env.state.world.fault("host-pause", format_args!("{}", self.name));
        self.env.state.now.lock().is_paused = true;
    }

    /// Lets them go on.
    pub fn resume(&self) {
        let waiting = {
            let mut now = self.env.state.now.lock();
            now.is_paused = false;
            std::mem::take(&mut now.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }

    /// From now on a task waits up to `longest` for a processor each time it could run; zero ends that.
    pub fn set_slow(&self, longest: Duration) {
        if !longest.is_zero() {
            self.env.state.world.fault("host-slow", format_args!("{}: up to {longest:?}", self.name));
        }
        self.env.state.now.lock().slow = longest;
    }

    /// From now on its clock runs too fast by `ppm` parts per million, or too slow if that is negative.
    ///
    /// # Panics
    /// If the clock would stand still or run backwards.
    pub fn set_clock_rate(&self, ppm: i64) {
        assert!(ppm > -1_000_000, "a clock runs forward");
        self.env.state.world.fault("clock-rate", format_args!("{}: {ppm} ppm", self.name));
        let shown = self.env.now();
        let mut now = self.env.state.now.lock();
        now.since = (self.env.state.world.now(), shown);
        now.rate_ppm = ppm;
    }

    /// Its wall clock jumps forward, or back.
    pub fn step_wall_clock(&self, step: Duration, forward: bool) {
        self.env.state.world.fault("clock-step", format_args!("{}: {step:?}", self.name));
        let mut now = self.env.state.now.lock();
        match forward {
            true => now.wall_ahead += step,
            false => now.wall_behind += step,
        }
    }
}

impl Condition {
    /// What its clock shows when the world's shows `true_now`.
    fn shown(&self, true_now: Moment) -> Moment {
        let (began, shown) = self.since;
        let passed = (true_now - began).as_nanos() as i128;
        let passed = passed * i128::from(1_000_000 + self.rate_ppm) / 1_000_000;
        shown + Duration::from_nanos(passed as u64)
    }
}

impl Env for MachineEnv {
    fn now(&self) -> Moment {
        self.state.now.lock().shown(self.inner.now())
    }

    fn sleep(&self, span: Duration) -> Task {
        let rate_ppm = self.state.now.lock().rate_ppm;
        let nanos = span.as_nanos() * 1_000_000 / (1_000_000 + rate_ppm) as u128;
        self.inner.sleep(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)))
    }

    fn spawn(&self, task: Task) {
        self.inner.spawn(Box::pin(Scheduled { task, state: Arc::clone(&self.state), turn: None }));
    }

    fn random(&self) -> u64 {
        self.inner.random()
    }

    fn wall_clock(&self) -> SystemTime {
        let drift = self.now();
        let epoch = self.inner.wall_clock() - self.inner.now().0;
        let now = self.state.now.lock();
        epoch + drift.0 + now.wall_ahead - now.wall_behind
    }
}

/// A task of a host: it runs when the host lets it.
struct Scheduled {
    task: Task,
    state: Arc<State>,
    /// Its wait for a processor.
    turn: Option<Task>,
}

impl Future for Scheduled {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<()> {
        let slow = {
            let mut now = self.state.now.lock();
            if now.is_paused {
                now.waiting.push(task.waker().clone());
                return Poll::Pending;
            }
            now.slow
        };
        if !slow.is_zero() && self.turn.is_none() {
            let wait = self.state.rng.up_to(slow);
            self.turn = Some(Box::pin(clock::sleep(wait)));
        }
        if let Some(turn) = &mut self.turn {
            if turn.as_mut().poll(task).is_pending() {
                return Poll::Pending;
            }
            self.turn = None;
        }
        self.task.as_mut().poll(task)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::Keep;

    /// A machine whose task counts the seconds on its clock.
    fn counting(world: &World) -> (Machine, Arc<Mutex<u64>>) {
        let machine = Machine::start(world, "host", 0);
        let count = Arc::new(Mutex::new(0));
        let (env, counter) = (machine.env(), Arc::clone(&count));
        machine.env().spawn(Box::pin(async move {
            loop {
                env.sleep(Duration::from_secs(1)).await;
                *counter.lock() += 1;
            }
        }));
        (machine, count)
    }

    #[test]
    fn a_paused_host_does_nothing_and_goes_on_where_it_was() {
        clock::run(async {
            let world = World::new(1, Keep::Tail);
            let (machine, count) = counting(&world);
            world.sleep(Duration::from_millis(3500)).await;
            machine.pause();
            world.sleep(Duration::from_secs(60)).await;
            assert_eq!(*count.lock(), 3);
            machine.resume();
            world.sleep(Duration::from_millis(10)).await;
            assert_eq!(*count.lock(), 4, "a timer that ended in the pause was not noticed, or more than one was");
            world.sleep(Duration::from_secs(10)).await;
            assert_eq!(*count.lock(), 14);
        });
    }

    #[test]
    fn a_slow_host_does_less_in_the_same_time() {
        clock::run(async {
            let world = World::new(1, Keep::Tail);
            let (machine, count) = counting(&world);
            machine.set_slow(Duration::from_secs(2));
            world.sleep(Duration::from_secs(100)).await;
            assert!((35..70).contains(&*count.lock()), "{} of 100 seconds", count.lock());
            machine.set_slow(Duration::ZERO);
            let before = *count.lock();
            world.sleep(Duration::from_secs(100)).await;
            assert!(*count.lock() >= before + 98);
        });
    }

    #[test]
    fn a_clock_that_is_too_fast_shows_more_and_its_timers_end_early() {
        clock::run(async {
            let world = World::new(1, Keep::Tail);
            let (machine, count) = counting(&world);
            machine.set_clock_rate(100_000);
            world.sleep(Duration::from_secs(100)).await;
            let shown = machine.env().now().0.as_secs_f64();
            assert!((shown - 110.0).abs() < 0.001, "{shown}");
            assert!((108..=110).contains(&*count.lock()), "{}", count.lock());
            machine.set_clock_rate(-500_000);
            world.sleep(Duration::from_secs(10)).await;
            let shown = machine.env().now().0.as_secs_f64();
            assert!((shown - 115.0).abs() < 0.001, "{shown}");
        });
    }

    #[test]
    fn a_step_of_the_wall_clock_leaves_the_other_clock_alone() {
        clock::run(async {
            let world = World::new(1, Keep::Tail);
            let machine = Machine::start(&world, "host", 0);
            let (wall, now) = (machine.env().wall_clock(), machine.env().now());
            machine.step_wall_clock(Duration::from_secs(7200), false);
            assert_eq!(wall - Duration::from_secs(7200), machine.env().wall_clock());
            machine.step_wall_clock(Duration::from_secs(7260), true);
            assert_eq!(wall + Duration::from_secs(60), machine.env().wall_clock());
            assert_eq!(now, machine.env().now());
        });
    }

    #[test]
    fn nothing_of_a_crashed_host_runs_paused_or_not() {
        clock::run(async {
            let world = World::new(1, Keep::Tail);
            let (machine, count) = counting(&world);
            world.sleep(Duration::from_millis(2500)).await;
            machine.pause();
            machine.crash().await;
            machine.resume();
            world.sleep(Duration::from_secs(10)).await;
            assert_eq!(*count.lock(), 2);
        });
    }
}
