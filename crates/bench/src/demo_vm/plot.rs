//! The latency of pages over time, drawn with letters.

use std::fmt::Write;
use std::time::Duration;

use transhume_guest::ProbeSeries;

/// How much time one column is.
const SLOT: Duration = Duration::from_millis(100);
/// So many columns stand beside each other.
const WIDTH: usize = 60;
/// What a row stands for: pages that took that long, in milliseconds, and how it is called.
const LEVELS: [(f64, &str); 6] =
    [(1000.0, "1 s"), (300.0, "300 ms"), (100.0, "100 ms"), (30.0, "30 ms"), (10.0, "10 ms"), (0.0, "less")];

/// Something that happened.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Mark {
    /// By which the plot shows it.
    pub(super) letter: char,
    /// What it is.
    pub(super) what: &'static str,
    /// When, in milliseconds since 1970; or since the plot's start, of what [`since`] gives.
    pub(super) unix_ms: f64,
}

/// The phases that a daemon's log tells, and their letters.
const PHASES: [(&str, char, &str); 3] = [
    ("copying memory", 'm', "the disk is copied and compared, the memory goes"),
    ("switching over", 'w', "the guest is stopped; the rest of the memory goes"),
    ("finishing", 'c', "the commit: it is the other host's"),
];

/// The phases of the move in the source's log.
pub(super) fn marks_of(log: &str) -> Vec<Mark> {
    let mark = |line: &str| {
        let (_, phase) = line.split_once("a VM moves ")?.1.split_once("phase=")?;
        let (_, letter, what) = PHASES.into_iter().find(|(name, ..)| phase.trim().starts_with(name))?;
        Some(Mark { letter, what, unix_ms: unix_ms(line.split(' ').next()?)? })
    };
    log.lines().filter_map(mark).collect()
}

/// The same in the order of time, counted from another moment.
pub(super) fn since(mut marks: Vec<Mark>, start_unix_ms: f64) -> Vec<Mark> {
    marks.iter_mut().for_each(|mark| mark.unix_ms -= start_unix_ms);
    marks.sort_by(|one, other| one.unix_ms.total_cmp(&other.unix_ms));
    marks
}

/// The time of day of a line like `2026-11-23T23:17:49.964656Z`, with its day, in milliseconds since 1970.
fn unix_ms(stamp: &str) -> Option<f64> {
    let (day, time) = stamp.trim_end_matches('Z').split_once('T')?;
    let mut day = day.split('-').map(|part| part.parse::<i64>().ok());
    let (year, month, day) = (day.next()??, day.next()??, day.next()??);
    // The years begin in March, so that the day of a leap year is a year's last.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day - 1 - 719_468;
    let mut time = time.split(':').map(|part| part.parse::<f64>().ok());
    let (hours, minutes, seconds) = (time.next()??, time.next()??, time.next()??);
    Some((days as f64 * 86_400.0 + hours * 3_600.0 + minutes * 60.0 + seconds) * 1e3)
}

/// Draws the longest latency of each slot, and below it the marks, which count from the series' start.
pub(super) fn draw(series: &ProbeSeries, marks: &[Mark]) -> String {
    let slots = series.timeline(SLOT);
    let mut out = String::new();
    let letter_of = |number: usize| -> char {
        let mut inside = marks.iter().filter(|mark| (mark.unix_ms / SLOT.as_secs_f64() / 1e3) as usize == number);
        match (inside.next(), inside.next()) {
            (None, _) => ' ',
            (Some(mark), None) => mark.letter,
            // Their times are told below.
            (Some(_), Some(_)) => '*',
        }
    };
    for (panel, columns) in slots.chunks(WIDTH).enumerate() {
        for (level, name) in LEVELS {
            let cell = |slot: &transhume_guest::TimelineSlot| {
                let reaches = slot.answered > 0 && slot.longest.as_secs_f64() * 1e3 >= level;
                match (reaches, slot.answered < slot.made) {
                    (_, true) => '!',
                    (true, false) => '#',
                    (false, false) => ' ',
                }
            };
            let cells: String = columns.iter().map(cell).collect();
            // Writing to a string cannot fail.
            let _ = writeln!(out, "  {name:>7} |{}", cells.trim_end());
        }
        let first = panel * WIDTH;
        let letters: String = (first..first + columns.len()).map(letter_of).collect();
        let _ = writeln!(out, "  {:>7} +{}", "", "-".repeat(columns.len()));
        let _ = writeln!(out, "  {:>7}  {}", format!("{} s", first / 10), letters.trim_end());
    }
    out
}

#[cfg(test)]
mod tests {
    use transhume_guest::Probe;

    use super::*;

    #[test]
    fn the_moments_of_a_log_are_found() {
        let log = "2026-11-23T23:17:48.987522Z  INFO x: a VM moves vm=\"web1\" host=b phase=copying memory\n\
                   2026-11-23T23:17:49.000000Z  INFO x: something else\n\
                   2026-11-23T23:17:49.718136Z  INFO x: a VM moves vm=\"web1\" host=b phase=switching over\n";
        let marks = marks_of(log);
        assert_eq!(marks.iter().map(|mark| mark.letter).collect::<String>(), "mw");
        assert_eq!(marks[0].unix_ms.round(), 1_795_475_868_988.0);
        assert_eq!((marks[1].unix_ms - marks[0].unix_ms).round(), 731.0);
        assert_eq!(unix_ms("2000-02-29T00:00:00Z"), Some(951_782_400_000.0));
        assert_eq!(unix_ms("1970-01-01T00:00:01Z"), Some(1000.0));
    }

    #[test]
    fn a_late_page_is_tall_a_lost_one_is_told_and_marks_stand_below() {
        let ms = Duration::from_millis;
        let probe = |at, latency: Option<u64>| Probe { at: ms(at), latency: latency.map(ms) };
        let series = ProbeSeries::new(vec![probe(0, Some(2)), probe(110, Some(120)), probe(210, None)]);
        let mark = |letter, unix_ms| Mark { letter, what: "", unix_ms };
        let drawn = draw(&series, &[mark('o', 150.0), mark('s', 210.0), mark('r', 220.0)]);
        let lines: Vec<&str> = drawn.lines().collect();
        assert_eq!(lines[1], "   300 ms |  !");
        assert_eq!(lines[2], "   100 ms | #!");
        assert_eq!(lines[5], "     less |##!");
        assert_eq!(lines[7], "      0 s   o*");
    }
}
