//! QMP's messages: one JSON object a line. Unknown fields and values pass.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::QemuError;

/// The longest line that is read. QEMU's largest answers (every block node of a large VM) are some hundred KiB.
pub(crate) const LINE_BYTES_MAX: usize = 16 << 20;

/// QEMU's version, as its greeting tells it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Version {
    /// 7 in 7.2.22.
    pub major: u64,
    /// 2 in 7.2.22.
    pub minor: u64,
    /// 22 in 7.2.22.
    pub micro: u64,
}

impl Version {
    /// From what `query-version` and the greeting say.
    pub(crate) fn parse(said: &Value) -> Self {
        let number = |name: &str| said["qemu"][name].as_u64().unwrap_or_default();
        Self { major: number("major"), minor: number("minor"), micro: number("micro") }
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}

/// Something that QEMU tells without being asked.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Its name, such as `SHUTDOWN`.
    pub name: String,
    /// What it carries.
    pub data: Value,
}

/// One line of QEMU's.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Message {
    Greeting(Version),
    Answer {
        id: Option<u64>,
        result: Result<Value, QemuError>,
    },
    Event(Event),
    /// A JSON object of none of these kinds: a later QMP may have more.
    Unknown,
}

/// Understands one line; an error says what it is instead.
pub(crate) fn parse(line: &[u8]) -> Result<Message, String> {
    let value: Value = serde_json::from_slice(line).map_err(|error| format!("not JSON: {error}"))?;
    let Value::Object(mut object) = value else {
        return Err("not a JSON object".to_owned());
    };
    if let Some(qmp) = object.get("QMP") {
        return Ok(Message::Greeting(Version::parse(&qmp["version"])));
    }
    let id = object.get("id").and_then(Value::as_u64);
    if let Some(value) = object.remove("return") {
        return Ok(Message::Answer { id, result: Ok(value) });
    }
    if let Some(error) = object.get("error") {
        let text = |name: &str| error[name].as_str().unwrap_or("not said").to_owned();
        let error = QemuError { class: text("class"), description: text("desc") };
        return Ok(Message::Answer { id, result: Err(error) });
    }
    if let Some(name) = object.get("event").and_then(Value::as_str) {
        let name = name.to_owned();
        return Ok(Message::Event(Event { name, data: object.remove("data").unwrap_or(Value::Null) }));
    }
    Ok(Message::Unknown)
}

/// What asks for `command`, on one line, without the line's end. libvirt gives commands ids of its own.
pub(crate) fn request(id: Option<u64>, command: &str, arguments: &Value) -> String {
    let mut object = Map::new();
    object.insert("execute".to_owned(), command.into());
    if arguments.as_object().is_some_and(|arguments| !arguments.is_empty()) {
        object.insert("arguments".to_owned(), arguments.clone());
    }
    if let Some(id) = id {
        object.insert("id".to_owned(), id.into());
    }
    Value::Object(object).to_string()
}

/// Cuts a stream of bytes into lines.
#[derive(Default)]
pub(crate) struct Lines {
    pub(crate) bytes: Vec<u8>,
    /// Up to here no line end was seen: a long line is not searched again from its start.
    searched: usize,
}

impl Lines {
    /// The next whole line that is not blank, if there is one; an error if it is too long.
    pub(crate) fn next(&mut self) -> Result<Option<Vec<u8>>, String> {
        loop {
            let Some(found) = self.bytes[self.searched..].iter().position(|byte| *byte == b'\n') else {
                self.searched = self.bytes.len();
                if self.bytes.len() > LINE_BYTES_MAX {
                    return Err(format!("a line of more than {LINE_BYTES_MAX} bytes"));
                }
                return Ok(None);
            };
            let end = self.searched + found + 1;
            let line: Vec<u8> = self.bytes.drain(..end).collect();
            self.searched = 0;
            if !line.iter().all(u8::is_ascii_whitespace) {
                return Ok(Some(line));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_kind_of_message_is_understood_with_fields_that_nobody_knows() {
        let greeting = br#"{"QMP":{"version":{"qemu":{"micro":2,"minor":0,"major":10},"package":"x"},"new":1}}"#;
        assert_eq!(parse(greeting), Ok(Message::Greeting(Version { major: 10, minor: 0, micro: 2 })));
        let answer = parse(br#"{"return":{"a":1},"id":7,"new":[]}"#);
        assert_eq!(answer, Ok(Message::Answer { id: Some(7), result: Ok(serde_json::json!({"a": 1})) }));
        let refusal = parse(br#"{"error":{"class":"GenericError","desc":"no","new":1},"id":8}"#);
        let error = QemuError { class: "GenericError".to_owned(), description: "no".to_owned() };
        assert_eq!(refusal, Ok(Message::Answer { id: Some(8), result: Err(error) }));
        let event = parse(br#"{"timestamp":{},"event":"NEW_ONE","data":{"x":1}}"#);
        let expected = Event { name: "NEW_ONE".to_owned(), data: serde_json::json!({"x": 1}) };
        assert_eq!(event, Ok(Message::Event(expected)));
        assert_eq!(parse(br#"{"something":"else"}"#), Ok(Message::Unknown));
    }

    #[test]
    fn lines_are_cut_wherever_the_stream_was() {
        let mut lines = Lines::default();
        lines.bytes.extend_from_slice(b"{\"a\"");
        assert_eq!(lines.next(), Ok(None));
        lines.bytes.extend_from_slice(b":1}\r\n\r\n{}\n{");
        assert_eq!(lines.next(), Ok(Some(b"{\"a\":1}\r\n".to_vec())));
        assert_eq!(lines.next(), Ok(Some(b"{}\n".to_vec())));
        assert_eq!(lines.next(), Ok(None));
    }

    #[test]
    fn a_line_without_an_end_is_an_error_before_it_fills_the_memory() {
        let mut lines = Lines { bytes: vec![b'x'; LINE_BYTES_MAX + 1], searched: 0 };
        assert!(lines.next().is_err());
    }

    proptest! {
        #[test]
        fn garbage_is_an_error_and_never_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
            let _ = parse(&bytes);
        }

        #[test]
        fn damaged_messages_are_never_a_panic(position in 0_usize..80, byte in any::<u8>()) {
            let mut line = br#"{"error":{"class":"GenericError","desc":"no"},"id":8,"return":{},"event":"X"}"#.to_vec();
            let position = position % line.len();
            line[position] = byte;
            let _ = parse(&line);
        }
    }
}
