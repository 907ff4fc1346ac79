//! A QEMU process's command line: `-blockdev` and `-drive`, in JSON and in `key=value` form.

use std::fs;
use std::io;

use serde_json::{Map, Value};

/// What a command line says of disks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CommandLine {
    /// Every `-blockdev`, nested as JSON would have it; values of the `key=value` form are text.
    pub blockdevs: Vec<Map<String, Value>>,
    /// Every `-drive` (and `-hda` and its like), nested in the same way.
    pub drives: Vec<Map<String, Value>>,
    /// Options that name files with more configuration, which are not read.
    pub elsewhere: Vec<String>,
}

impl CommandLine {
    /// The command line of the process `pid`; `None` if it is no QEMU (libvirt opens the monitor itself).
    ///
    /// # Errors
    /// The process is gone, or may not be looked at.
    pub fn of_process(pid: u32) -> io::Result<Option<Self>> {
        let bytes = fs::read(format!("/proc/{pid}/cmdline"))?;
        let arguments: Vec<String> =
            bytes.split(|byte| *byte == 0).map(|argument| String::from_utf8_lossy(argument).into_owned()).collect();
        let program = arguments.first().map(String::as_str).unwrap_or_default();
        let name = program.rsplit('/').next().unwrap_or_default();
        let is_qemu = name.starts_with("qemu") || name == "kvm";
        Ok(is_qemu.then(|| Self::parse(&arguments)))
    }

    /// Understands the arguments of a QEMU. What it does not understand it leaves out.
    #[must_use]
    pub fn parse(arguments: &[String]) -> Self {
        let mut found = Self::default();
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            let Some(option) = argument.strip_prefix("--").or_else(|| argument.strip_prefix('-')) else { continue };
            match option {
                "blockdev" => found.blockdevs.extend(rest.next().and_then(|value| parse_blockdev(value))),
                "drive" => found.drives.extend(rest.next().map(|value| nest(&split(value, "file")))),
                "hda" | "hdb" | "hdc" | "hdd" | "sd" | "mtdblock" | "pflash" => {
                    let file = rest.next().map(|value| ("file".to_owned(), value.clone()));
                    found.drives.extend(file.map(|pair| nest(&[pair])));
                }
                "readconfig" => found.elsewhere.extend(rest.next().map(|file| format!("-readconfig {file}"))),
                _ => {}
            }
        }
        found
    }

    /// The `-blockdev` with this node name.
    #[must_use]
    pub fn blockdev(&self, node_name: &str) -> Option<&Map<String, Value>> {
        self.blockdevs.iter().find(|blockdev| blockdev.get("node-name").and_then(Value::as_str) == Some(node_name))
    }

    /// The `-drive` with this id, or of this image if its id was given by QEMU.
    #[must_use]
    pub fn drive(&self, id: &str, image: &str) -> Option<&Map<String, Value>> {
        let has_id = |drive: &&Map<String, Value>| drive.get("id").and_then(Value::as_str) == Some(id);
        let is_of_image = |drive: &&Map<String, Value>| drive_image(drive) == Some(image) && !drive.contains_key("id");
        self.drives.iter().find(has_id).or_else(|| self.drives.iter().find(is_of_image))
    }
}

/// The image that a `-drive` names.
pub(super) fn drive_image(drive: &Map<String, Value>) -> Option<&str> {
    match drive.get("file")? {
        Value::String(path) => Some(path),
        Value::Object(file) => file.get("filename")?.as_str(),
        _ => None,
    }
}

fn parse_blockdev(value: &str) -> Option<Map<String, Value>> {
    if value.starts_with('{') {
        return match serde_json::from_str(value).ok()? {
            Value::Object(object) => Some(object),
            _ => None,
        };
    }
    Some(nest(&split(value, "driver")))
}

/// Splits `a=1,b=2`; a comma within a value is written twice; a first piece without `=` is `implied`'s value.
pub(crate) fn split(text: &str, implied: &str) -> Vec<(String, String)> {
    let mut pieces = vec![String::new()];
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        if letter == ',' && letters.next_if_eq(&',').is_none() {
            pieces.push(String::new());
        } else {
            pieces.last_mut().expect("pieces starts with one").push(letter);
        }
    }
    let pair = |(index, piece): (usize, &String)| match piece.split_once('=') {
        Some((key, value)) => (key.to_owned(), value.to_owned()),
        None if index == 0 => (implied.to_owned(), piece.clone()),
        // QEMU's old short form of a flag: `foo` is `foo=on`, `nofoo` is `foo=off`.
        None => (piece.clone(), "on".to_owned()),
    };
    pieces.iter().enumerate().filter(|(_, piece)| !piece.is_empty()).map(pair).collect()
}

/// Turns `file.driver=file` into `{"file": {"driver": "file"}}`. A key that is both a value and a prefix keeps both:
/// the value goes to `filename` (`file=PATH,file.locking=off`, as `-drive` allows it).
pub(crate) fn nest(pairs: &[(String, String)]) -> Map<String, Value> {
    let mut root = Map::new();
    for (key, value) in pairs {
        let mut parts: Vec<&str> = key.split('.').collect();
        let last = parts.pop().unwrap_or_default();
        let mut place = &mut root;
        for part in parts {
            let entry = place.entry(part).or_insert_with(|| Value::Object(Map::new()));
            if let Value::String(text) = entry {
                let text = std::mem::take(text);
                *entry = Value::Object(Map::from_iter([("filename".to_owned(), text.into())]));
            }
            place = match entry {
                Value::Object(object) => object,
                _ => return root,
            };
        }
        match place.get_mut(last) {
            Some(Value::Object(object)) => drop(object.insert("filename".to_owned(), value.clone().into())),
            _ => drop(place.insert(last.to_owned(), value.clone().into())),
        }
    }
    root
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn parse(arguments: &[&str]) -> CommandLine {
        CommandLine::parse(&arguments.iter().map(|argument| (*argument).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn both_forms_of_blockdev_say_the_same() {
        let found = parse(&[
            "qemu-system-x86_64",
            "-blockdev",
            r#"{"driver":"file","node-name":"f0","filename":"/a,b","cache":{"direct":true}}"#,
            "--blockdev",
            "file,node-name=f1,filename=/a,,b,cache.direct=on",
        ]);
        assert_eq!(found.blockdev("f0").expect("f0 is there")["filename"], "/a,b");
        let second = Value::Object(found.blockdev("f1").expect("f1 is there").clone());
        let expected = json!({"driver": "file", "node-name": "f1", "filename": "/a,b", "cache": {"direct": "on"}});
        assert_eq!(second, expected);
    }

    #[test]
    fn drives_are_found_by_id_and_by_image() {
        let found = parse(&[
            "qemu",
            "-drive",
            "file=/a,if=none,id=d0,format=raw,file.locking=off",
            "-hda",
            "/b",
            "-drive",
            "/c,if=virtio,cache.direct=on",
        ]);
        assert_eq!(drive_image(found.drive("d0", "").expect("by id")), Some("/a"));
        assert_eq!(found.drive("d0", "").expect("by id")["file"]["locking"], "off");
        assert!(found.drive("ide0-hd0", "/b").is_some());
        assert_eq!(found.drive("virtio0", "/c").expect("by image")["cache"]["direct"], "on");
        assert!(found.drive("other", "/a").is_none(), "a drive with an id was taken for another");
    }

    proptest! {
        #[test]
        fn garbage_is_never_a_panic(values in proptest::collection::vec("[-{}\",=.a-d]{0,24}", 0..12)) {
            let mut arguments = vec!["qemu".to_owned()];
            for value in values {
                arguments.extend(["-blockdev".to_owned(), value.clone(), "-drive".to_owned(), value]);
            }
            let _ = CommandLine::parse(&arguments);
        }
    }
}
