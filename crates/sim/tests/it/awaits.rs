//! A process killed at every await that a small move has, one run for each.

use sim::log::Keep;
use transhume_sim as sim;

#[test]
fn a_move_survives_a_death_at_every_await() {
    let scenario = sim::scenarios::find("await").expect("it is listed");
    for seed in 0..2 {
        let mut deaths = 0;
        for poll in 0.. {
            let result = scenario.for_seed(seed).dying_only_at_poll(poll).play(seed, Keep::Tail);
            let log = result.log.join("\n");
            assert!(result.violation.is_none(), "seed {seed}, poll {poll}: {:?}\n{log}", result.violation);
            if result.deaths == 0 {
                break;
            }
            deaths += 1;
        }
        assert!(deaths > 50, "seed {seed}: only {deaths} awaits were found");
    }
}

/// All scenarios played twice. One seed of 49 is played twice on main, in each run of the seeds. And moves of machines whose daemons
/// are killed at every await.
mod long {
    use super::{Keep, sim};

    /// How many seeds of each scenario, for either daemon.
    const SEEDS: usize = 2;

    /// A daemon of a machine's move is killed at every await that it has, one run for each.
    fn survives_at_every_await(name: &str) {
        let scenario = sim::scenarios::find(name).expect("it is listed");
        for kills_peer in [false, true] {
            let seeds = (0..).filter(|seed| scenario.for_seed(*seed).kills_peer() == kills_peer);
            for seed in seeds.take(SEEDS) {
                let mut deaths = 0;
                for poll in 0.. {
                    let result = scenario.for_seed(seed).dying_only_at_poll(poll).play(seed, Keep::Tail);
                    let log = result.log.join("\n");
                    assert!(
                        result.violation.is_none(),
                        "{name}, seed {seed}, poll {poll}: {:?}\n{log}",
                        result.violation
                    );
                    if result.deaths == 0 {
                        break;
                    }
                    deaths += 1;
                }
                println!("{name}: {deaths} awaits of seed {seed}, at the other host: {kills_peer}");
                assert!(deaths > 50, "{name}, seed {seed}: only {deaths} awaits were found");
            }
        }
    }

    #[test]
    fn a_machine_survives_a_death_at_every_await_of_either_daemon() {
        survives_at_every_await("machine-await");
    }

    #[test]
    fn a_machine_whose_memory_follows_survives_a_death_at_every_await_of_either_daemon() {
        survives_at_every_await("machine-postcopy-await");
    }

    #[test]
    fn a_machine_whose_memory_is_copied_from_outside_survives_a_death_at_every_await_of_either_daemon() {
        survives_at_every_await("machine-parallel-await");
    }

    #[test]
    fn a_machine_on_shared_storage_survives_a_death_at_every_await_of_either_daemon() {
        survives_at_every_await("machine-sharing-await");
    }

    #[test]
    fn every_scenario_is_the_same_run_twice() {
        for scenario in sim::scenarios::SCENARIOS {
            let (one, two) = (scenario.for_seed(3).play(3, Keep::Tail), scenario.for_seed(3).play(3, Keep::All));
            assert_eq!((one.log_hash, one.polls), (two.log_hash, two.polls), "{}", scenario.name);
            let is_right = one.violation.is_none() || scenario.unmended().is_some();
            assert!(is_right, "{}: {:?}\n{}", scenario.name, one.violation, one.log.join("\n"));
        }
    }
}
