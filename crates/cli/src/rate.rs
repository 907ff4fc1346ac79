//! Rates and sizes as people write them: `200MiB/s`, `1Gbit/s`, `50M`, `64MiB`.

/// Bytes a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rate(pub(crate) u64);

/// Units and what one of them is in bytes, longest first.
const UNITS: &[(&str, f64)] = &[
    ("tbit", 1e12 / 8.0),
    ("gbit", 1e9 / 8.0),
    ("mbit", 1e6 / 8.0),
    ("kbit", 1e3 / 8.0),
    ("tib", 1_099_511_627_776.0),
    ("gib", 1_073_741_824.0),
    ("mib", 1_048_576.0),
    ("kib", 1_024.0),
    ("tb", 1e12),
    ("gb", 1e9),
    ("mb", 1e6),
    ("kb", 1e3),
    ("t", 1_099_511_627_776.0),
    ("g", 1_073_741_824.0),
    ("m", 1_048_576.0),
    ("k", 1_024.0),
    ("b", 1.0),
    ("", 1.0),
];

/// Bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size(pub(crate) u64);

impl std::str::FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refused = || format!("\"{text}\" is no size: write 64MiB, 1GiB, or a number of bytes");
        let is_rate = text.contains('/') || text.to_ascii_lowercase().contains("bit");
        match text.parse::<Rate>() {
            Ok(Rate(bytes)) if !is_rate && bytes > 0 => Ok(Self(bytes)),
            _ => Err(refused()),
        }
    }
}

impl std::str::FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refused =
            || format!("\"{text}\" is no rate: write 200MiB/s, 1Gbit/s, a number of bytes a second, or 0 for no limit");
        let lower = text.trim().to_ascii_lowercase();
        let lower = lower.strip_suffix("/s").unwrap_or(&lower);
        let end = lower.find(|character: char| !character.is_ascii_digit() && character != '.').unwrap_or(lower.len());
        let number: f64 = lower[..end].parse().map_err(|_| refused())?;
        let unit = lower[end..].trim();
        let (_, factor) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(refused)?;
        let bytes = number * factor;
        if bytes.is_finite() && (bytes >= 1.0 || number == 0.0) && bytes < 1e18 {
            Ok(Self(bytes as u64))
        } else {
            Err(refused())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them_and_rates_are_none() {
        assert_eq!("64MiB".parse(), Ok(Size(64 << 20)));
        for text in ["64MiB/s", "1Gbit", "0", "much"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }

    #[test]
    fn rates_are_read_as_people_write_them() {
        for (text, bytes) in [
            ("200MiB/s", 200 << 20),
            ("1Gbit/s", 125_000_000),
            ("1.5GB/s", 1_500_000_000),
            ("4096", 4096),
            ("50M", 50 << 20),
            ("0", 0),
        ] {
            assert_eq!(text.parse(), Ok(Rate(bytes)), "{text}");
        }
        for text in ["", "fast", "10 parsecs", "-5M", "1e9", "0.1", "MiB"] {
            assert!(text.parse::<Rate>().is_err(), "{text} was accepted");
        }
    }
}
