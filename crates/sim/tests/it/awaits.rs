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

/// All scenarios played twice. One seed of 49 is played twice on main, in each run of the seeds.
mod long {
    use super::{Keep, sim};

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
