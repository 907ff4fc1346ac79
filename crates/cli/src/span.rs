//! Spans of time as people write them: `200ms`, `5s`, `10min`, `2h`.

/// Milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span(pub(crate) u64);

/// Units and what one of them is in milliseconds. A number needs one: a bare 5 could be anything.
const UNITS: &[(&str, f64)] = &[("ms", 1.0), ("s", 1e3), ("min", 60e3), ("m", 60e3), ("h", 3600e3), ("d", 86_400e3)];

impl std::str::FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refused = || format!("\"{text}\" is no span of time: write 200ms, 5s, 10min, 2h or 1d");
        let lower = text.trim().to_ascii_lowercase();
        let end = lower.find(|character: char| !character.is_ascii_digit() && character != '.').ok_or_else(refused)?;
        let number: f64 = lower[..end].parse().map_err(|_| refused())?;
        let unit = lower[end..].trim();
        let (_, factor) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(refused)?;
        let milliseconds = number * factor;
        if (1.0..1e15).contains(&milliseconds) { Ok(Self(milliseconds as u64)) } else { Err(refused()) }
    }
}

/// A span, or `0` for none.
pub(crate) fn span_or_none(text: &str) -> Result<Span, String> {
    if text.trim() == "0" { Ok(Span(0)) } else { text.parse() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_read_as_people_write_them() {
        for (text, milliseconds) in
            [("200ms", 200), ("5s", 5000), ("1.5s", 1500), ("10min", 600_000), ("2h", 7_200_000), ("1d", 86_400_000)]
        {
            assert_eq!(text.parse(), Ok(Span(milliseconds)), "{text}");
        }
        for text in ["", "soon", "5", "0ms", "0s", "-5s", "1e9s", "3 fortnights"] {
            assert!(text.parse::<Span>().is_err(), "{text} was accepted");
        }
        assert_eq!((span_or_none("0"), span_or_none("2h")), (Ok(Span(0)), Ok(Span(7_200_000))));
        assert!(span_or_none("0s").is_err());
    }
}
