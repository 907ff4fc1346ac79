//! Moves to a file system whose server stops, or to a block device over it: nothing of it answers, nothing fails.

use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::support::fuse::{self, FuseDevice};
use crate::support::load::Load;
use crate::support::{HANG, World, has_copied, same};
use serde_json::Value;

const BYTES: u64 = 16 << 20;
/// The guest is held for 250 ms by a target that is silent, for 750 ms if it was lately. More is slowness of the machine,
/// and much more is a guest that hangs.
const GUEST_WAITS: Duration = Duration::from_secs(2);
/// What an operator waits for.
const OPERATOR_WAITS: Duration = Duration::from_secs(2);
/// How long a daemon may be away: it gives a target that is in use three seconds, and the machine may be slow.
const RESTART: Duration = Duration::from_secs(20);
/// How long the server is stopped.
const STOPPED: Duration = Duration::from_millis(1500);

/// A volume under load, and where it is to go.
struct Scene {
    // Before the daemon, which cannot end while the server is stopped.
    far: FuseDevice,
    load: Load,
    world: World,
}

/// When the server is stopped.
#[derive(Clone, Copy, Debug)]
enum Moment {
    Copying,
    Verifying,
    PreSwitch,
}

impl Moment {
    const ALL: [Self; 3] = [Self::Copying, Self::Verifying, Self::PreSwitch];

    const fn phase(self) -> &'static str {
        match self {
            Self::Copying => "copying",
            Self::Verifying => "verifying",
            Self::PreSwitch => "pre-switch",
        }
    }
}

impl Scene {
    /// `has_zeroes` says whether the guest writes zeroes, too.
    fn new(seed: u64, has_zeroes: bool) -> Option<Self> {
        if let Some(why) = fuse::is_missing() {
            eprintln!("left out: {why}");
            return None;
        }
        let world = World::new();
        let image = world.image("disk.img", BYTES, 65536);
        let uri = world.attach("x", &image);
        let load = Load::start_with(&uri, &image, seed, has_zeroes);
        let far = FuseDevice::new(&world, BYTES);
        Some(Self { far, load, world })
    }

    fn begin(&self) -> u64 {
        let to = self.far.target();
        let words = ["move", "x", "--to", &to, "--overwrite", "--verify", "full", "--bandwidth", "12MiB/s", "--detach"];
        self.world.json(&words)["id"].as_u64().expect("a number")
    }

    /// Lets the move come to `moment`, and stops the server there.
    fn stop_at(&self, moment: Moment) {
        let is_there = |job: &Value| job["progress"]["phase"] == moment.phase();
        match moment {
            Moment::Copying => drop(self.world.wait_until_job("nothing is copied", has_copied(BYTES / 4))),
            Moment::Verifying => drop(self.world.wait_until_job("nothing is compared", is_there)),
            Moment::PreSwitch => {
                // The flush takes so long that it is seen, which a guest would take for silence.
                self.load.rest(true);
                let _slow = self.far.slow_syncs();
                self.world.wait_until_job("nothing is flushed", is_there);
                self.far.stop();
                self.load.rest(false);
            }
        }
        self.far.stop();
        let job = self.world.json(&["jobs"])[0].clone();
        assert!(is_there(&job), "the move is elsewhere than in {moment:?}: {job}");
    }

    /// The guest and those who ask go on beside the server that is stopped.
    fn go_on_beside(&self, moment: Moment) {
        self.load.take_longest();
        let start = Instant::now();
        while start.elapsed() < STOPPED {
            self.load.goes_on_beside(moment.phase(), &self.world);
            let status = self.asked(&["status"]);
            assert!(status.to_string().contains("\"x\""), "{status}");
        }
        self.guest_waited(&format!("{moment:?}"));
    }

    fn guest_waited(&self, when: &str) {
        let longest = self.load.take_longest();
        println!("{when}: the guest's longest request took {} ms", longest.as_millis());
        assert!(longest < GUEST_WAITS, "{when}: a request of the guest took {longest:?}\n{}", self.world.log());
    }

    /// What the command line says, and in time.
    fn asked(&self, words: &[&str]) -> Value {
        let start = Instant::now();
        let mut child = self
            .world
            .command(&[words, &["--json"]].concat())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program runs");
        while child.try_wait().expect("a child").is_none() {
            if start.elapsed() > HANG {
                let _ = child.kill();
                panic!("{words:?} does not end\n{}", self.world.log());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let took = start.elapsed();
        let output = child.wait_with_output().expect("it has ended");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words:?}: {said}");
        assert!(took < OPERATOR_WAITS, "{words:?} took {took:?}\n{}", self.world.log());
        println!("{words:?} took {} ms", took.as_millis());
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    /// The server goes on, and the block device can be a target again.
    fn recover(&self) {
        self.far.go_on();
        let start = Instant::now();
        let to = self.far.target();
        while !self.world.json(&["plan", "x", "--to", &to, "--overwrite"])["refusal"].is_null() {
            assert!(start.elapsed() < HANG, "the block device is not free again\n{}", self.world.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The move ends well, and what the guest wrote is behind the file system.
    fn ends_well(self, id: u64) {
        let over = self.world.wait_for_job(id);
        let log = self.world.log();
        assert_eq!((&over["state"], &over["report"]["equal"]), (&"done".into(), &true.into()), "{over}\n{log}");
        self.load.goes_on_beside("moved", &self.world);
        self.guest_waited("until the end");
        same(&self.far.file, &self.load.finish());
    }
}

#[test]
fn a_move_to_a_file_system_that_stops_can_be_cancelled_in_every_phase_and_begun_again() {
    let Some(scene) = Scene::new(61, true) else { return };
    for moment in Moment::ALL {
        let id = scene.begin();
        scene.stop_at(moment);
        scene.go_on_beside(moment);
        assert_eq!(scene.asked(&["cancel", "x"])["state"], "cancelled", "{moment:?}");
        assert_eq!(scene.world.wait_for_job(id)["state"], "cancelled", "{moment:?}");
        scene.load.goes_on_beside("cancelled", &scene.world);
        scene.guest_waited("cancelled");
        scene.recover();
        scene.guest_waited("recovered");
    }
    let id = scene.begin();
    scene.ends_well(id);
}

#[test]
fn a_move_to_a_file_system_that_stops_goes_on_with_it_from_every_phase() {
    let Some(scene) = Scene::new(62, true) else { return };
    let id = scene.begin();
    for moment in Moment::ALL {
        scene.stop_at(moment);
        scene.go_on_beside(moment);
        scene.far.go_on();
    }
    scene.ends_well(id);
}

#[test]
fn a_daemon_that_ends_while_the_file_system_stops_comes_back_without_it_and_goes_on_with_it() {
    // The kernel lets no process go that has zeroes under way at a block device that does not answer.
    let Some(mut scene) = Scene::new(63, false) else { return };
    for is_killed in [false, true] {
        let id = scene.begin();
        scene.stop_at(Moment::Copying);
        let start = Instant::now();
        if is_killed {
            scene.world.kill();
        } else {
            scene.world.terminate();
        }
        println!("killed {is_killed}: the daemon was down after {} ms", start.elapsed().as_millis());
        scene.world.start();
        let took = start.elapsed();
        println!("killed {is_killed}: it was up again after {} ms", took.as_millis());
        assert!(took < RESTART, "the daemon was away for {took:?}\n{}", scene.world.log());
        scene.load.goes_on_beside("started again", &scene.world);
        // The guest has waited for the daemon.
        scene.load.take_longest();
        scene.asked(&["status"]);
        if is_killed {
            scene.far.go_on();
            return scene.ends_well(id);
        }
        assert_eq!(scene.asked(&["cancel", "x"])["state"], "cancelled");
        assert_eq!(scene.world.wait_for_job(id)["state"], "cancelled");
        scene.recover();
    }
}

#[test]
fn a_target_in_a_file_system_that_stops_holds_neither_the_moved_guest_nor_those_of_other_volumes() {
    let Some(scene) = Scene::new(64, true) else { return };
    // More volumes than there are workers, so that some share one with the volume that is moved.
    let others: Vec<_> = (0..8_u64)
        .map(|number| {
            let (name, seed) = (format!("other-{number}"), 65 + 8 * number);
            let image = scene.world.image(&format!("{name}.img"), 4 << 20, 65536);
            let load = Load::start_with(&scene.world.attach(&name, &image), &image, seed, true);
            (image, load)
        })
        .collect();
    let to = scene.far.file_target();
    let words = ["move", "x", "--to", &to, "--bandwidth", "4MiB/s", "--detach"];
    let id = scene.world.json(&words)["id"].as_u64().expect("a number");
    scene.world.wait_until_job("nothing is copied", has_copied(BYTES / 4));
    scene.far.stop();
    for (_, load) in &others {
        load.take_longest();
    }
    scene.go_on_beside(Moment::Copying);
    for (_, load) in &others {
        load.goes_on_beside("beside a target that is silent", &scene.world);
        let longest = load.take_longest();
        assert!(longest < GUEST_WAITS, "another volume's request took {longest:?}\n{}", scene.world.log());
    }
    scene.far.go_on();
    let over = scene.world.wait_for_job(id);
    assert_eq!(over["state"], "done", "{over}\n{}", scene.world.log());
    for (image, load) in others {
        same(&image, &load.finish());
    }
    scene.load.finish();
}
