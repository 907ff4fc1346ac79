//! The options that are understood, with the type that QMP wants. The command line has them all as text.

use serde_json::{Map, Value};

#[derive(Clone, Copy)]
enum Kind {
    Text,
    Flag,
    Number,
    /// Taken as it is.
    Any,
}

const COMMON: [(&str, Kind); 6] = [
    ("discard", Kind::Text),
    ("detect-zeroes", Kind::Text),
    ("read-only", Kind::Flag),
    ("auto-read-only", Kind::Flag),
    ("force-share", Kind::Flag),
    ("cache", Kind::Any),
];

const FILE: [(&str, Kind); 7] = [
    ("aio", Kind::Text),
    ("aio-max-batch", Kind::Number),
    ("locking", Kind::Text),
    ("pr-manager", Kind::Text),
    ("drop-cache", Kind::Flag),
    ("x-check-cache-dropped", Kind::Flag),
    ("x-fixed", Kind::Flag),
];

const RAW: [(&str, Kind); 2] = [("offset", Kind::Number), ("size", Kind::Number)];

const QCOW2: [(&str, Kind); 11] = [
    ("lazy-refcounts", Kind::Flag),
    ("pass-discard-request", Kind::Flag),
    ("pass-discard-snapshot", Kind::Flag),
    ("pass-discard-other", Kind::Flag),
    ("discard-no-unref", Kind::Flag),
    ("overlap-check", Kind::Any),
    ("cache-size", Kind::Number),
    ("l2-cache-size", Kind::Number),
    ("l2-cache-entry-size", Kind::Number),
    ("refcount-cache-size", Kind::Number),
    ("cache-clean-interval", Kind::Number),
];

/// Identity, not options: what they name is found in the graph.
const IDENTITY: [&str; 5] = ["driver", "node-name", "file", "filename", "backing"];

fn kind_of(driver: &str, key: &str) -> Option<Kind> {
    let own: &[(&str, Kind)] = match driver {
        "raw" => &RAW,
        "qcow2" => &QCOW2,
        _ => &FILE,
    };
    COMMON.iter().chain(own).find(|(name, _)| *name == key).map(|(_, kind)| *kind)
}

/// The options of a node of `driver` in QMP's types, and the names of those that are not understood.
pub(super) fn typed(driver: &str, given: &Map<String, Value>) -> (Map<String, Value>, Vec<String>) {
    let mut options = Map::new();
    let mut unknown = Vec::new();
    for (key, value) in given.iter().filter(|(key, _)| !IDENTITY.contains(&key.as_str())) {
        let value = match kind_of(driver, key) {
            None => None,
            Some(Kind::Any) if key == "cache" => cache(value),
            Some(Kind::Any | Kind::Text) => Some(value.clone()),
            Some(Kind::Flag) => flag(value),
            Some(Kind::Number) => number(value),
        };
        match value {
            Some(value) => drop(options.insert(key.clone(), value)),
            None => unknown.push(key.clone()),
        }
    }
    (options, unknown)
}

fn cache(value: &Value) -> Option<Value> {
    let mut typed = Map::new();
    for (key, value) in value.as_object()? {
        match key.as_str() {
            "direct" | "no-flush" => drop(typed.insert(key.clone(), flag(value)?)),
            // The backend's own, kept by the device.
            "writeback" => {}
            _ => return None,
        }
    }
    Some(Value::Object(typed))
}

/// `on` and `off`, as the command line has them, or JSON's.
pub(crate) fn flag(value: &Value) -> Option<Value> {
    match value {
        Value::Bool(_) => Some(value.clone()),
        Value::String(text) => match text.as_str() {
            "on" | "yes" | "true" | "y" => Some(true.into()),
            "off" | "no" | "false" | "n" => Some(false.into()),
            _ => None,
        },
        _ => None,
    }
}

/// A number, with the suffixes that `-drive` allows.
fn number(value: &Value) -> Option<Value> {
    let Value::String(text) = value else { return value.is_u64().then(|| value.clone()) };
    let digits = text.trim_end_matches(|letter: char| !letter.is_ascii_digit());
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift).map(Value::from)
}
