//! Answers of earlier versions are read by this one's types, and nothing that they say gets another name or is lost.

use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use transhume_api::v1;

/// Where `read` lacks what `recorded` says, or says it otherwise.
fn difference(at: &str, recorded: &Value, read: &Value) -> Option<String> {
    match (recorded, read) {
        (Value::Object(recorded), Value::Object(read)) => recorded.iter().find_map(|(key, value)| {
            let at = format!("{at}.{key}");
            match read.get(key) {
                Some(read) => difference(&at, value, read),
                None => Some(format!("{at} is gone")),
            }
        }),
        (Value::Array(recorded), Value::Array(read)) if recorded.len() == read.len() => {
            let mut pairs = recorded.iter().zip(read).enumerate();
            pairs.find_map(|(number, (recorded, read))| difference(&format!("{at}[{number}]"), recorded, read))
        }
        _ if recorded == read => None,
        _ => Some(format!("{at} was {recorded} and is {read}")),
    }
}

fn check<T: DeserializeOwned + Serialize>(name: &str, recorded: &Value) {
    let read: T = serde_json::from_value(recorded.clone()).unwrap_or_else(|error| panic!("{name}: {error}"));
    let said = serde_json::to_value(&read).expect("it is JSON");
    if let Some(difference) = difference("", recorded, &said) {
        panic!("{name}: {difference}");
    }
}

#[test]
fn answers_of_earlier_versions_are_read_whole() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
    let mut count = 0;
    for version in std::fs::read_dir(folder).expect("fixtures are part of the checkout").flatten() {
        let Ok(answers) = std::fs::read_dir(version.path().join("api")) else { continue };
        for answer in answers.flatten() {
            let name = answer.path().display().to_string();
            let recorded: Value = serde_json::from_slice(&std::fs::read(answer.path()).expect("read")).expect("JSON");
            let stem = answer.path().file_stem().expect("a name").to_string_lossy().into_owned();
            match &stem {
                stem if stem.ends_with("-version") => check::<v1::Version>(&name, &recorded),
                stem if stem.ends_with("-status") => check::<v1::Status>(&name, &recorded),
                stem if stem.ends_with("-volumes") => check::<Vec<v1::Volume>>(&name, &recorded),
                stem if stem.contains("-volumes-") => check::<v1::Volume>(&name, &recorded),
                stem if stem.ends_with("-jobs") => check::<Vec<v1::Job>>(&name, &recorded),
                stem if stem.contains("-jobs-") => check::<v1::Job>(&name, &recorded),
                stem if stem.ends_with("-hosts") => check::<Vec<v1::TrustedHost>>(&name, &recorded),
                stem if stem.ends_with("-host") => check::<v1::Host>(&name, &recorded),
                stem => panic!("nobody knows what {stem} answers"),
            }
            count += 1;
        }
    }
    assert!(count >= 30, "only {count} answers were found");
}
