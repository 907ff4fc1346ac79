//! A QEMU's words: which are options, which are their values, and what is in a value.

use serde_json::{Map, Value};

/// QEMU's options without a value; every other one has the next word.
const FLAGS: [&str; 47] = [
    "S",
    "alt-grab",
    "async-teardown",
    "audio-help",
    "ctrl-grab",
    "curses",
    "daemonize",
    "enable-fips",
    "enable-kvm",
    "enable-sync-profile",
    "full-screen",
    "h",
    "help",
    "localtime",
    "mem-prealloc",
    "no-acpi",
    "no-fd-bootchk",
    "no-frame",
    "no-hpet",
    "no-kvm",
    "no-kvm-irqchip",
    "no-kvm-pit",
    "no-kvm-pit-reinjection",
    "no-quit",
    "no-reboot",
    "no-shutdown",
    "no-user-config",
    "nodefaults",
    "nodefconfig",
    "nographic",
    "nohpet",
    "nouserconfig",
    "old-param",
    "only-migratable",
    "portrait",
    "preconfig",
    "rtc-td-hack",
    "s",
    "sdl",
    "semihosting",
    "singlestep",
    "snapshot",
    "tdf",
    "usb",
    "version",
    "win2k-hack",
    "xen-attach",
];
/// Another of these, whose name is two others' beginning.
const XEN_FLAGS: [&str; 2] = ["xen-create", "xen-domid-restrict"];

/// An option with its value, or an image without an option.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Item {
    /// The option as it is given, with its dashes; none for an image that stands alone.
    pub(super) option: Option<String>,
    /// Its value, if it has one.
    pub(super) value: Option<String>,
}

impl Item {
    pub(super) fn new(option: &str, value: Option<&str>) -> Self {
        Self { option: Some(option.to_owned()), value: value.map(str::to_owned) }
    }

    /// The option's name without dashes. An image that stands alone is `-hda` of it.
    pub(super) fn name(&self) -> &str {
        match &self.option {
            None => "hda",
            Some(option) => bare(option),
        }
    }

    pub(super) fn value(&self) -> &str {
        self.value.as_deref().unwrap_or_default()
    }

    /// As one line for people.
    pub(super) fn show(&self) -> String {
        self.option.iter().chain(&self.value).map(String::as_str).collect::<Vec<_>>().join(" ")
    }

    /// What is in the value at the top: its keys and their values as text.
    pub(super) fn pairs(&self) -> Vec<(String, String)> {
        if let Some(object) = json_object(self.value()) {
            let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            return object.iter().map(|(key, value)| (key.clone(), text(value))).collect();
        }
        crate::options::split(self.value(), "type")
    }
}

fn bare(option: &str) -> &str {
    option.strip_prefix("--").or_else(|| option.strip_prefix('-')).unwrap_or(option)
}

/// Tells options from values.
pub(super) fn parse(words: &[String]) -> Vec<Item> {
    let mut items = Vec::new();
    let mut rest = words.iter();
    while let Some(word) = rest.next() {
        // A dash alone is an image for QEMU too.
        if !word.starts_with('-') || word == "-" {
            items.push(Item { option: None, value: Some(word.clone()) });
            continue;
        }
        let is_flag = FLAGS.contains(&bare(word)) || XEN_FLAGS.contains(&bare(word));
        let value = if is_flag { None } else { rest.next().cloned() };
        items.push(Item { option: Some(word.clone()), value });
    }
    items
}

/// The words again.
pub(super) fn unparse(items: &[Item]) -> Vec<String> {
    items.iter().flat_map(|item| item.option.iter().chain(&item.value).cloned()).collect()
}

/// The value's object, if it is JSON.
pub(super) fn json_object(value: &str) -> Option<Map<String, Value>> {
    if !value.starts_with('{') {
        return None;
    }
    match serde_json::from_str(value).ok()? {
        Value::Object(object) => Some(object),
        _ => None,
    }
}

/// A comma within a value is written twice.
pub(super) fn escaped(text: &str) -> String {
    text.replace(',', ",,")
}

/// `a=1,b,noc` in its pieces, which stay as they are unless one is changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pieces(Vec<String>);

impl Pieces {
    pub(super) fn parse(text: &str) -> Self {
        let mut pieces = vec![String::new()];
        let mut letters = text.chars().peekable();
        while let Some(letter) = letters.next() {
            if letter == ',' && letters.next_if_eq(&',').is_none() {
                pieces.push(String::new());
            } else {
                pieces.last_mut().expect("pieces starts with one").push(letter);
            }
        }
        Self(pieces)
    }

    pub(super) fn join(&self) -> String {
        self.0.iter().map(|piece| escaped(piece)).collect::<Vec<_>>().join(",")
    }

    /// The first piece, if it is a value without a key.
    pub(super) fn first(&self) -> Option<&str> {
        self.0.first().map(String::as_str).filter(|piece| !piece.contains('='))
    }

    pub(super) fn set_first(&mut self, value: &str) {
        if let Some(piece) = self.0.first_mut() {
            value.clone_into(piece);
        }
    }

    /// A key's value. `key` alone is `on`, `nokey` is `off`.
    pub(super) fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().rev().find_map(|piece| match piece.split_once('=') {
            Some((name, value)) => (name == key).then_some(value),
            None if piece == key => Some("on"),
            None if piece.strip_prefix("no") == Some(key) => Some("off"),
            None => None,
        })
    }

    pub(super) fn is_on(&self, key: &str) -> bool {
        self.get(key).is_some_and(|value| ["on", "yes", "true", "y"].contains(&value))
    }

    /// Gives a key its value, in the place that it had.
    pub(super) fn set(&mut self, key: &str, value: &str) {
        let is_of = |piece: &String| match piece.split_once('=') {
            Some((name, _)) => name == key,
            None => piece == key || piece.strip_prefix("no") == Some(key),
        };
        let place = self.0.iter().position(is_of);
        self.0.retain({
            let mut seen = false;
            move |piece| !is_of(piece) || !std::mem::replace(&mut seen, true)
        });
        let piece = format!("{key}={value}");
        match place {
            Some(place) => self.0[place] = piece,
            None => self.0.push(piece),
        }
    }

    /// Takes out the pieces whose key is chosen, and gives their keys.
    pub(super) fn remove(&mut self, is_chosen: impl Fn(&str) -> bool) -> Vec<String> {
        let key = |piece: &String| piece.split_once('=').map_or(piece.as_str(), |(key, _)| key).to_owned();
        let removed = self.0.iter().map(key).filter(|key| is_chosen(key)).collect();
        self.0.retain(|piece| !is_chosen(&key(piece)));
        removed
    }

    pub(super) fn remove_first(&mut self) {
        if !self.0.is_empty() {
            self.0.remove(0);
        }
    }
}

/// `{"file": {"driver": "nbd"}}` as `file.driver=nbd`.
pub(super) fn flatten(object: &Map<String, Value>) -> String {
    fn add(prefix: &str, object: &Map<String, Value>, pieces: &mut Vec<String>) {
        for (key, value) in object {
            let key = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
            match value {
                Value::Object(inner) => add(&key, inner, pieces),
                Value::Bool(flag) => pieces.push(format!("{key}={}", if *flag { "on" } else { "off" })),
                Value::String(text) => pieces.push(format!("{key}={}", escaped(text))),
                other => pieces.push(format!("{key}={other}")),
            }
        }
    }
    let mut pieces = Vec::new();
    add("", object, &mut pieces);
    pieces.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{nest, split};
    use proptest::prelude::*;

    #[test]
    fn flags_have_no_value_and_pieces_keep_their_form() {
        let words = ["-S", "-nographic", "--blockdev", "a=b", "disk.img", "-append", "-x y"].map(str::to_owned);
        let items = parse(&words);
        let names: Vec<&str> = items.iter().map(Item::name).collect();
        assert_eq!(names, ["S", "nographic", "blockdev", "hda", "append"]);
        let mut pieces = Pieces::parse("socket,id=c,path=/a,,b,server,nowait");
        assert_eq!((pieces.first(), pieces.get("path")), (Some("socket"), Some("/a,b")));
        assert!(pieces.is_on("server") && !pieces.is_on("wait"));
        pieces.set("path", "/c,d");
        assert_eq!(pieces.join(), "socket,id=c,path=/c,,d,server,nowait");
        pieces.set("wait", "off");
        assert_eq!(pieces.remove(|key| key == "id"), ["id"]);
        assert_eq!(pieces.join(), "socket,path=/c,,d,server,wait=off");
    }

    proptest! {
        #[test]
        fn words_that_nobody_changes_come_out_as_they_went_in(words in proptest::collection::vec("[-a-eS,=. ]{0,6}", 0..12)) {
            prop_assert_eq!(unparse(&parse(&words)), words);
        }

        #[test]
        fn pieces_come_out_as_they_went_in(pieces in proptest::collection::vec("[a-c=][a-c=.,]{0,4}", 1..6)) {
            let pieces = Pieces(pieces);
            prop_assert_eq!(Pieces::parse(&pieces.join()), pieces);
        }

        #[test]
        fn what_is_flattened_nests_again(
            pairs in proptest::collection::btree_map("[a-c]{1,2}|[a-c]\\.[d-f]\\.[0-3]", "[a-c,=/]{1,5}", 0..6)
        ) {
            // A key that is a value and a prefix is another thing for `-drive`.
            let clash = pairs.keys().any(|key| pairs.keys().any(|other| other.starts_with(&format!("{key}."))));
            prop_assume!(!clash);
            let nested = nest(&pairs.into_iter().collect::<Vec<_>>());
            prop_assert_eq!(nest(&split(&flatten(&nested), "none")), nested);
        }
    }
}
