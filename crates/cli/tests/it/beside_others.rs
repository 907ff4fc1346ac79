//! Moves beside others who use the same network, and beside each other: hosts in network namespaces, joined by links of a limited
//! rate.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rand::{Rng, SeedableRng};
use serde_json::Value;
use transhume_guest::{Daemon, OtherTraffic, Side, SwitchedHosts, TwoHosts, TwoHostsSpec};

const MEBIBYTE: u64 = 1 << 20;
const HANG: Duration = Duration::from_secs(120);

/// Two paired hosts with one link of so many megabits a second, and where everything of theirs is.
fn two_hosts(megabits: u64) -> (TwoHosts, tempfile::TempDir) {
    let folder = tempfile::Builder::new().prefix("tr").tempdir().expect("a temporary directory");
    let programs = Path::new(env!("CARGO_BIN_EXE_transhumed")).parent().expect("in a directory");
    let spec = TwoHostsSpec {
        link_bits_per_second: Some(megabits * 1_000_000),
        more: "streams = 4\n",
        ..TwoHostsSpec::default()
    };
    let mut hosts = TwoHosts::new(programs, folder.path(), spec).expect("two networks; run `make setup`, as root");
    hosts.start().expect("both daemons start");
    hosts.pair().expect("paired");
    (hosts, folder)
}

/// A volume at `a` that nothing makes shorter.
fn attach(hosts: &TwoHosts, folder: &Path, size: u64) {
    attach_at(hosts.daemon(Side::A), &folder.join("a"), "x", size);
}

/// A volume `name` of the daemon in `folder`.
fn attach_at(daemon: &Daemon, folder: &Path, name: &str, size: u64) {
    let image = folder.join("disk.img");
    let mut bytes = vec![0; size as usize];
    rand_chacha::ChaCha8Rng::seed_from_u64(1).fill_bytes(&mut bytes);
    std::fs::write(&image, bytes).expect("written");
    let backend = format!("file:{}", image.display());
    let export = format!("nbd+unix:///{name}?socket={}", folder.join("x.sock").display());
    daemon.json(&["volume", "attach", name, "--backend", &backend, "--export", &export]).expect("attached");
}

fn job(hosts: &TwoHosts) -> Value {
    hosts.daemon(Side::A).json(&["jobs", "--all"]).expect("listed")[0].clone()
}

fn wait_for(hosts: &TwoHosts, what: &str, is: impl Fn(&Value) -> bool) -> Value {
    let began = Instant::now();
    loop {
        let job = job(hosts);
        if is(&job) {
            return job;
        }
        let is_over = ["done", "failed", "cancelled"].iter().any(|over| job["state"] == *over);
        assert!(!is_over && began.elapsed() < HANG, "never: {what}: {job}\n{}", hosts.daemon(Side::A).log());
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn a_deadline_that_its_own_bandwidth_does_not_allow_is_foretold_and_not_kept() {
    let (hosts, folder) = two_hosts(800);
    attach(&hosts, folder.path(), 16 * MEBIBYTE);
    let how = ["x", "--to", "b", "--verify", "off", "--bandwidth", "4MiB/s", "--deadline", "2s"];
    let daemon = hosts.daemon(Side::A);
    let plan = daemon.json(&[&["plan"], &how[..]].concat()).expect("planned");
    let notes = plan["notes"].to_string();
    assert!(notes.contains("the deadline of 2 s cannot be kept"), "{notes}");
    let report = daemon.json(&[&["move"], &how[..]].concat()).expect("it is moved");
    assert_eq!((&report["state"], &report["rates"]["deadline_kept"]), (&"done".into(), &false.into()), "{report}");
    let notes = report["rates"]["notes"].to_string();
    assert!(notes.contains("longer than its deadline of 2 s") && notes.contains("its deadline has passed"), "{notes}");
    assert!(notes.contains("cannot be kept with this bandwidth"), "{notes}");
}

#[test]
fn a_move_over_a_slow_network_is_foretold_to_take_as_long_as_that_takes() {
    let (hosts, folder) = two_hosts(80);
    attach(&hosts, folder.path(), 40 * MEBIBYTE);
    let daemon = hosts.daemon(Side::A);
    let how = ["x", "--to", "b", "--verify", "off"];
    let plan = daemon.json(&[&["plan"], &how[..]].concat()).expect("planned");
    assert_eq!(plan["copy_bytes_per_second"], 10_000_000, "{plan}");
    assert!(plan["notes"].to_string().contains("what the network to the other host carries"), "{plan}");
    // Another move than the one that was planned is looked at for itself.
    let how = ["x", "--to", "b:y", "--verify", "off"];
    let report = daemon.json(&[&["move"], &how[..]].concat()).expect("it is moved");
    let foretold = &report["prediction"];
    let error = foretold["seconds_error_percent"].as_f64().expect("nothing has disturbed it");
    assert!(foretold["planned"] == false && (-30.0..30.0).contains(&error), "{report}");
}

#[test]
fn a_reserve_that_makes_no_sense_is_refused() {
    let (hosts, folder) = two_hosts(800);
    attach(&hosts, folder.path(), MEBIBYTE);
    let elsewhere = format!("file:{}", folder.path().join("other.img").display());
    for (arguments, part) in [
        (&["--to", "b", "--reserve", "20MB/s", "--bandwidth", "10MB/s"][..], "more than the bandwidth"),
        (&["--to", &elsewhere, "--reserve", "20MB/s"], "does not go to one"),
    ] {
        let output = hosts.daemon(Side::A).run(&[&["move", "x"], arguments].concat()).expect("the program runs");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && said.contains(part), "{arguments:?}: {said}");
    }
}

/// Measurements of links that others use: they need the processors to themselves. The rates themselves are decided on main by the unit
/// tests of `migrate` and of the daemon's `rates`, in virtual time.
mod long {
    use super::*;

    #[test]
    fn others_keep_their_share_of_a_link_until_the_move_has_a_reserve_and_get_out_of_its_way_when_they_end() {
        let _alone = alone();
        let (hosts, folder) = two_hosts(160);
        attach(&hosts, folder.path(), 700 * MEBIBYTE);
        let others = OtherTraffic::start(&hosts, 12_000_000);
        let alone = others.rate(Duration::from_secs(3));
        assert!(alone > 8e6, "the link carries {alone} bytes a second of one connection");
        hosts.daemon(Side::A).json(&["move", "x", "--to", "b", "--detach"]).expect("it begins");
        wait_for(&hosts, "it gives way", |job| job["progress"]["rates"]["limit"].is_u64());
        std::thread::sleep(Duration::from_secs(2));
        let before = job(&hosts)["progress"]["bytes_copied"].as_u64().unwrap_or(0);
        let beside = others.rate(Duration::from_secs(8));
        let during = job(&hosts);
        // Four connections against one would leave it a fifth of the link.
        assert!(beside > 0.8 * alone, "others got {beside} of {alone}: {}", during["progress"]["rates"]);
        assert!(during["progress"]["bytes_copied"].as_u64().is_some_and(|copied| copied > before), "{during}");
        let path = &during["progress"]["rates"]["paths"][0];
        assert_eq!((&path["interface"], &path["other_interface"]), (&"wire0".into(), &"wire0".into()), "{path}");
        assert_eq!((&path["capacity"], &path["streams"]), (&20_000_000.into(), &4.into()), "{path}");

        let set = hosts.daemon(Side::A).json(&["set", "x", "--reserve", "14MB/s"]).expect("changed");
        assert_eq!(set["request"]["reserve"], 14_000_000);
        wait_for(&hosts, "it has its reserve", |job| {
            job["progress"]["rates"]["limit"].as_u64().is_some_and(|limit| limit >= 14_000_000)
                && job["progress"]["rates"]["paths"][0]["ours"].as_u64().is_some_and(|ours| ours > 10_000_000)
        });
        others.stop();
        wait_for(&hosts, "the whole link is its own", |job| job["progress"]["rates"]["limit"].is_null());
        hosts.daemon(Side::A).json(&["cancel", "x"]).expect("cancelled");
        let rates = job(&hosts)["report"]["rates"]["paths"][0].clone();
        assert!(rates["others_max"].as_u64().is_some_and(|others| others > 6_000_000), "{rates}");
    }

    #[test]
    fn a_deadline_is_kept_against_others_and_the_report_says_so() {
        let _alone = alone();
        let (hosts, folder) = two_hosts(160);
        attach(&hosts, folder.path(), 200 * MEBIBYTE);
        // They want all of it, and with it the move would get a few percent.
        let others = OtherTraffic::start(&hosts, 20_000_000);
        std::thread::sleep(Duration::from_secs(1));
        let report = hosts.daemon(Side::A).json(&["move", "x", "--to", "b", "--verify", "off", "--deadline", "25s"]);
        let report = report.expect("it is moved");
        others.stop();
        let rates = &report["rates"];
        assert_eq!((&report["state"], &rates["deadline_kept"]), (&"done".into(), &true.into()), "{report}");
        assert!(rates["paths"][0]["others_max"].as_u64().is_some_and(|others| others > 4_000_000), "{rates}");
    }

    #[test]
    fn moves_from_two_hosts_into_one_share_its_link_and_what_others_leave_of_it() {
        let _alone = alone();
        const SPAN: Duration = Duration::from_secs(5);
        let (hosts, _folder) = drained(160, 640 * MEBIBYTE);
        begin(&hosts, 1);
        std::thread::sleep(SPAN);
        begin(&hosts, 2);
        let is_fair = |first: u64, late: u64| first.min(late) * 10 > first.max(late) * 3;
        // Whoever comes late is none of the others to whoever was first, nor the other way round.
        soon(3, || {
            let ([first, late], jobs) = copied(&hosts, SPAN);
            let rates = jobs.each_ref().map(|job| job["progress"]["rates"].to_string());
            // The link carries 20 MB/s.
            let is_full = first + late > SPAN.as_secs() * 16_000_000;
            let is_free = jobs.iter().all(|job| job["progress"]["rates"]["limit"].is_null());
            let why = || format!("{first} and {late}, nobody else is there: {rates:?}");
            if is_fair(first, late) && is_full && is_free { Ok(()) } else { Err(why()) }
        });

        let enter = |number| hosts.enter(number).expect("entered");
        let others = OtherTraffic::between(|| enter(1), || enter(0), hosts.machine(0), 8_000_000);
        soon(5, || {
            let before = others.arrived();
            let ([first, late], jobs) = copied(&hosts, SPAN);
            let arrived = others.arrived() - before;
            let rates = jobs.each_ref().map(|job| job["progress"]["rates"].to_string());
            let is_left_to_others = arrived > SPAN.as_secs() * 6_400_000;
            let is_used = first + late > SPAN.as_secs() * 6_000_000;
            let why = || format!("{first} and {late}, and others {arrived}: {rates:?}");
            if is_fair(first, late) && is_left_to_others && is_used { Ok(()) } else { Err(why()) }
        });
        others.stop();
    }

    /// What measures a link under load measures the processors too, unless it has them to itself.
    fn alone() -> MutexGuard<'static, ()> {
        static ALONE: Mutex<()> = Mutex::new(());
        ALONE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Two hosts with a volume each, that are paired with a third one.
    fn drained(megabits: u64, size: u64) -> (SwitchedHosts, tempfile::TempDir) {
        let folder = tempfile::Builder::new().prefix("tr").tempdir().expect("a temporary directory");
        let programs = Path::new(env!("CARGO_BIN_EXE_transhumed")).parent().expect("in a directory");
        let hosts = SwitchedHosts::start(programs, folder.path(), 3, megabits * 1_000_000, "streams = 4\n");
        let hosts = hosts.expect("three networks; run `make setup`, as root");
        for source in [1, 2] {
            hosts.pair(0, source).expect("paired");
            attach_at(hosts.daemon(source), hosts.folder(source), &format!("x{source}"), size);
        }
        (hosts, folder)
    }

    fn begin(hosts: &SwitchedHosts, source: usize) {
        let move_it = ["move", &format!("x{source}"), "--to", "h0", "--verify", "off", "--detach"];
        hosts.daemon(source).json(&move_it).expect("it begins");
    }

    /// What the moves of both sources copy within `span`, and how they stand at its end.
    fn copied(hosts: &SwitchedHosts, span: Duration) -> ([u64; 2], [Value; 2]) {
        let jobs = || [1, 2].map(|source| hosts.daemon(source).json(&["jobs", "--all"]).expect("listed")[0].clone());
        let count = |job: &Value| job["progress"]["bytes_copied"].as_u64().unwrap_or(0);
        let before = jobs();
        std::thread::sleep(span);
        let after = jobs();
        ([0, 1].map(|number| count(&after[number]) - count(&before[number])), after)
    }

    /// Looks until what is asked for is so, and then no more: what a loud machine spoils is so a little later. What does not
    /// come to be in `looks` of them is a failure.
    fn soon(looks: u32, mut look: impl FnMut() -> Result<(), String>) {
        let mut why = String::new();
        for _ in 0..looks {
            match look() {
                Ok(()) => return,
                Err(error) => why = error,
            }
        }
        panic!("{why}");
    }
}
