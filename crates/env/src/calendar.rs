//! The calendar (UTC) of a wall clock, for messages and certificates that people read.

use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds since 1970; 0 for what was before.
#[must_use]
pub fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The year, month and day of a second since 1970: the algorithm `civil_from_days` of Howard Hinnant.
#[must_use]
pub const fn civil(unix_seconds: u64) -> (u64, u8, u8) {
    let days = unix_seconds / 86_400 + 719_468;
    let era = days / 146_097;
    let of_era = days % 146_097;
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year_of_era + era * 400 + if month <= 2 { 1 } else { 0 };
    (year, month as u8, day as u8)
}

/// The date of a second since 1970, as `YYYY-MM-DD`.
#[must_use]
pub fn date(unix_seconds: u64) -> String {
    let (year, month, day) = civil(unix_seconds);
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, shown) in [
            (0, "1970-01-01"),
            (951_782_399, "2000-02-28"),
            (951_782_400, "2000-02-29"),
            (951_868_800, "2000-03-01"),
            (1_795_305_600, "2026-11-22"),
            (4_102_444_800, "2100-01-01"),
        ] {
            assert_eq!(date(seconds), shown);
        }
    }
}
