//! What has occurred, and what had to.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::ensure;

use crate::plan::Place;

/// In fewer cycles than this something may be left out by chance.
const ENOUGH_CYCLES: u32 = 20;
/// What must be met whatever the seed: requests of the load, and what is drawn for each act.
const DUTIES: [&str; 8] = [
    "discards",
    "zeroes",
    "zeroes that keep their space",
    "forced writes",
    "writes to an end within a block",
    "volumes of odd sizes",
    "volumes of even sizes",
    "cycles in which two volumes moved at once",
];
/// The daemon was started while the server was away on which a volume was, or to which it was on its way.
pub(crate) const STARTS_WITHOUT_SERVER: &str = "starts without the server of a volume";

/// What has been done.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) acts: u32,
    pub(crate) cycles: u32,
    pub(crate) moved: u32,
    pub(crate) faults: BTreeMap<String, u32>,
    pub(crate) strategies: BTreeMap<&'static str, u32>,
    /// How often each thing has occurred that may have to.
    occurred: BTreeMap<String, u64>,
}

impl Tally {
    /// Something has occurred so many times.
    pub(crate) fn note(&mut self, what: &str, times: u64) {
        *self.occurred.entry(what.to_owned()).or_default() += times;
    }

    /// Requests that a load has counted by its names.
    pub(crate) fn note_requests(&mut self, counted: &BTreeMap<String, u64>) {
        for (name, times) in counted {
            let what = match name.as_str() {
                "zeroes_kept" => "zeroes that keep their space",
                "forced" => "forced writes",
                "partial" => "writes to an end within a block",
                name => name,
            };
            self.note(what, *times);
        }
    }

    /// A volume of so many bytes is moved.
    pub(crate) fn note_size(&mut self, bytes: u64) {
        let is_odd = !bytes.is_multiple_of(4096);
        self.note(if is_odd { "volumes of odd sizes" } else { "volumes of even sizes" }, 1);
    }

    /// A move to a place has ended with the volume there.
    pub(crate) fn note_arrival(&mut self, place: Place) {
        self.moved += 1;
        self.note(&arrivals(place), 1);
    }

    /// Tells everything.
    pub(crate) fn tell(&self, took: Duration) {
        println!(
            "{} cycles in {} acts in {:.0} s, {} moves done; nothing was lost",
            self.cycles,
            self.acts,
            took.as_secs_f64(),
            self.moved
        );
        let listed = |counts: &mut dyn Iterator<Item = String>| counts.collect::<Vec<_>>().join(", ");
        println!("blows: {}", listed(&mut self.faults.iter().map(|(fault, count)| format!("{fault} {count}"))));
        if !self.strategies.is_empty() {
            println!(
                "strategies: {}",
                listed(&mut self.strategies.iter().map(|(name, count)| format!("{name} {count}")))
            );
        }
        if !self.occurred.is_empty() {
            println!("occurred: {}", listed(&mut self.occurred.iter().map(|(what, count)| format!("{what} {count}"))));
        }
    }

    /// Fails if something never occurred that had to, in cycles enough for it.
    pub(crate) fn fulfilled(&self, places: &[Place]) -> anyhow::Result<()> {
        let starts = places.contains(&Place::Server).then(|| STARTS_WITHOUT_SERVER.to_owned());
        let places = places.iter().map(|place| arrivals(*place)).chain(starts);
        let never: Vec<String> = DUTIES
            .into_iter()
            .map(str::to_owned)
            .chain(places)
            .filter(|what| self.occurred.get(what).is_none_or(|times| *times == 0))
            .collect();
        ensure!(self.cycles < ENOUGH_CYCLES || never.is_empty(), "never occurred: {}", never.join(", "));
        Ok(())
    }
}

fn arrivals(place: Place) -> String {
    format!("moves to {place:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_never_occurred_fails_a_run_that_was_long_enough() {
        let mut tally = Tally { cycles: ENOUGH_CYCLES, ..Tally::default() };
        for what in DUTIES.into_iter().filter(|what| *what != "discards") {
            tally.note(what, 1);
        }
        tally.note_arrival(Place::Xfs);
        tally.note_requests(&[("discards".to_owned(), 0)].into());
        let said = tally.fulfilled(&[Place::Xfs, Place::Ext4]).unwrap_err().to_string();
        assert_eq!(said, "never occurred: discards, moves to Ext4");
        tally.note_requests(&[("discards".to_owned(), 7)].into());
        tally.note_arrival(Place::Ext4);
        tally.fulfilled(&[Place::Xfs, Place::Ext4]).unwrap();
        Tally { cycles: ENOUGH_CYCLES - 1, ..Tally::default() }.fulfilled(&Place::ALL).unwrap();
    }
}
