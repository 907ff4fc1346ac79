//! Programs of before and of now: over one state directory, and at two hosts. A fleet is never upgraded in one moment.

mod long {
    use std::path::PathBuf;
    use std::sync::OnceLock;

    use transhume_guest::Side;
    use transhume_guest::programs::programs_of;

    use crate::whole_machines::{Place, wait_until};

    /// The last commit in which no record said whether the move of a VM is committed.
    const BEFORE: &str = "00bb9772ac4e8117ce280949694e0b79a92bf68e";
    /// Slow enough for a daemon to be killed while disks are copied.
    const SLOW: &[&str] = &["--bandwidth", "4MiB/s", "--detach"];

    fn before() -> PathBuf {
        static BUILT: OnceLock<PathBuf> = OnceLock::new();
        BUILT.get_or_init(|| programs_of(BEFORE).expect("the programs of before")).clone()
    }

    fn now() -> PathBuf {
        let program = PathBuf::from(env!("CARGO_BIN_EXE_transhumed"));
        program.parent().expect("in a directory").to_owned()
    }

    fn place_of(sides: [bool; 2]) -> Place {
        let before = before();
        let programs = sides.map(|is_old| is_old.then_some(before.as_path()));
        Place::of(programs, |_| String::new(), "", &["disk0.raw", "disk1.qcow2"])
    }

    #[test]
    fn a_vm_goes_from_a_host_of_before_to_one_of_now_and_back() {
        let mut place = place_of([true, false]);
        place.follow_move(Side::A, Side::B);
        place.wait_released(Side::B);
        place.follow_move(Side::B, Side::A);
        place.wait_released(Side::A);
    }

    #[test]
    fn a_host_is_upgraded_and_its_vm_goes_there_and_back() {
        let mut place = place_of([true, true]);
        place.follow_move(Side::A, Side::B);
        for side in Side::BOTH {
            place.hosts.daemon_mut(side).terminate().expect("it ends");
            place.hosts.daemon_mut(side).use_programs(&now());
            place.hosts.daemon_mut(side).start().expect("it knows what the one of before has left");
            place.verify();
        }
        place.wait_released(Side::B);
        place.follow_move(Side::B, Side::A);
    }

    /// One daemon of before is killed in the middle of a move, and one of now comes up in its place.
    fn upgraded_in_the_middle(sides: &[Side]) {
        let mut place = place_of([true, true]);
        place.json(Side::A, &[&["vm", "move", "web1", "--to", "b"], SLOW].concat());
        wait_until(&place, |place| {
            place.json(Side::B, &["volume", "ls"]).as_array().is_some_and(|volumes| volumes.len() == 2)
        });
        for side in sides {
            place.hosts.daemon_mut(*side).kill();
            place.hosts.daemon_mut(*side).use_programs(&now());
            place.hosts.daemon_mut(*side).start().expect("it knows what the one of before has left");
        }
        let is_at_rest = |place: &Place| {
            let state = place.json(Side::A, &["vm", "show", "web1"])["state"].as_str().unwrap_or_default().to_owned();
            state == "running"
        };
        wait_until(&place, is_at_rest);
        place.verify();
        wait_until(&place, |place| {
            let names = place.json(Side::B, &["vm", "ls"]);
            names.as_array().is_some_and(|vms| vms.iter().all(|vm| vm["state"] != "arriving"))
        });
        for side in Side::BOTH {
            place.hosts.daemon_mut(side).terminate().expect("it ends");
            place.hosts.daemon_mut(side).use_programs(&now());
            place.hosts.daemon_mut(side).start().expect("it starts");
        }
        place.follow_move(Side::A, Side::B);
    }

    #[test]
    fn a_move_whose_source_is_upgraded_in_the_middle_is_undone_and_goes_well_the_next_time() {
        upgraded_in_the_middle(&[Side::A]);
    }

    #[test]
    fn a_move_whose_target_is_upgraded_in_the_middle_is_undone_and_goes_well_the_next_time() {
        upgraded_in_the_middle(&[Side::B]);
    }

    #[test]
    fn an_older_daemon_takes_the_state_of_a_newer_one_or_refuses_it_in_one_line() {
        let mut place = place_of([false, false]);
        place.follow_move(Side::A, Side::B);
        place.wait_released(Side::B);
        for side in Side::BOTH {
            let daemon = place.hosts.daemon_mut(side);
            daemon.terminate().expect("it ends");
            daemon.use_programs(&before());
            let logged = daemon.log().len();
            if let Err(error) = daemon.start() {
                let log = daemon.log()[logged..].to_owned();
                let told: Vec<&str> = log.lines().filter(|line| line.contains("layout")).collect();
                assert_eq!(told.len(), 1, "{error:#}");
                daemon.use_programs(&now());
                daemon.start().expect("it is its own state");
            }
        }
        place.verify();
    }
}
