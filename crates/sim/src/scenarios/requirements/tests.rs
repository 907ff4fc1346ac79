//! Every scenario has its requirement, and a mistake or a reason.

use std::collections::BTreeSet;
use std::path::Path;

use super::*;
use crate::scenarios::SCENARIOS;

#[test]
fn every_scenario_says_what_it_must_show() {
    let names: Vec<&str> = SCENARIOS.iter().map(|scenario| scenario.name).collect();
    let duties: Vec<&str> = REQUIREMENTS.iter().map(|requirement| requirement.scenario).collect();
    assert_eq!(names, duties);
    let silent: Vec<_> = REQUIREMENTS
        .iter()
        .filter(|requirement| requirement.occurs.is_empty())
        .map(|requirement| requirement.scenario)
        .collect();
    assert!(silent.is_empty(), "{silent:?} name nothing that must occur");
}

/// `cargo xtask mutations --scenarios` prints them.
#[test]
fn every_scenario_is_the_target_of_a_mistake_or_says_why_not() {
    let patches = Path::new(env!("CARGO_MANIFEST_DIR")).join("mutations");
    let mut proved = BTreeSet::new();
    for entry in patches.read_dir().expect("the mistakes are there") {
        let path = entry.expect("it can be read").path();
        if path.extension().is_some_and(|extension| extension == "patch") {
            let text = std::fs::read_to_string(&path).expect("a patch is text");
            let head = text.lines().take_while(|line| !line.starts_with("diff "));
            proved.extend(head.filter_map(|line| line.strip_prefix("scenario: ").map(str::to_owned)));
        }
    }
    for requirement in REQUIREMENTS {
        let is_proved = proved.remove(requirement.scenario);
        assert_ne!(is_proved, !requirement.unproved.is_empty(), "{}: {:?}", requirement.scenario, requirement.unproved);
    }
    assert!(proved.is_empty(), "mistakes name scenarios that are not there: {proved:?}");
}
