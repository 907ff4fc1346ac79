//! Has a process register its memory: a question to the library that it was started with (`crates/preload`, whose `protocol` has the
//! words). Tracking ends with the connection.

use std::fs::File;
use std::io::{ErrorKind as OsErrorKind, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::maps::Mapping;
use crate::error::{Error, ErrorKind, Result};

/// How long an answer may take.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// No answer is longer.
const ANSWER_BYTES_MAX: u32 = 256 << 10;
const DEVICE: &str = "/dev/userfaultfd";

/// A process's memory is tracked as long as this lives.
#[derive(Debug)]
pub struct Tracking {
    /// Of each file in turn.
    mappings: Vec<Vec<Mapping>>,
    /// What the process gives up when it is closed.
    connection: UnixStream,
}

impl Tracking {
    /// Has the process `pid`, whose library listens at `socket`, track the files that it calls `names`. It blocks for the answers, which
    /// take some microseconds. The library serves one connection at a time.
    ///
    /// # Errors
    /// `NotTracked` if nobody listens, or another process does; `Unsupported`, `Denied`, `NotFound`, `Invalid` by what the library says.
    pub fn begin(pid: u32, socket: &Path, names: &[&str]) -> Result<Self> {
        let silent = |error| {
            let context = format!("the process {pid} does not answer at {}", socket.display());
            Error::new(ErrorKind::NotTracked, context).with_source(error)
        };
        let mut connection = UnixStream::connect(socket).map_err(silent)?;
        connection.set_read_timeout(Some(ANSWER_LIMIT)).map_err(silent)?;
        connection.set_write_timeout(Some(ANSWER_LIMIT)).map_err(silent)?;
        let hello = ask(&mut connection, "hello 1", None).map_err(silent)?;
        if hello != format!("ok {pid}") {
            let context = format!("at {} another process answers than {pid}: {hello:.60}", socket.display());
            return Err(Error::new(ErrorKind::NotTracked, context));
        }
        let mut mappings = Vec::new();
        for name in names {
            let question = format!("register {name}");
            let mut answer = ask(&mut connection, &question, None).map_err(silent)?;
            if answer.starts_with("error denied") {
                // Its user may not make a userfaultfd. What we may open it may use.
                let device = File::open(DEVICE).map_err(|error| Error::system(format!("opening {DEVICE}"), error))?;
                answer = ask(&mut connection, &question, Some(&device)).map_err(silent)?;
            }
            mappings.push(parse(&answer).map_err(|refusal| refused(refusal, name))?);
        }
        Ok(Self { mappings, connection })
    }

    /// Whether the process still holds it.
    pub(super) fn is_held(&self) -> bool {
        let mut byte = [0; 1];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        // Nothing comes unasked but the end.
        matches!(rustix::net::recv(&self.connection, &mut byte, flags), Err(rustix::io::Errno::AGAIN))
    }

    /// What is tracked of each file in turn.
    pub(super) fn mappings(&self) -> &[Vec<Mapping>] {
        &self.mappings
    }
}

fn ask(connection: &mut UnixStream, question: &str, device: Option<&File>) -> std::io::Result<String> {
    let length = u32::try_from(question.len()).map_err(std::io::Error::other)?.to_le_bytes();
    match device {
        Some(device) => {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let descriptors = [device.as_fd()];
            control.push(SendAncillaryMessage::ScmRights(&descriptors));
            let sent = sendmsg(&*connection, &[IoSlice::new(&length)], &mut control, SendFlags::empty())?;
            connection.write_all(&length[sent..])?;
        }
        None => connection.write_all(&length)?,
    }
    connection.write_all(question.as_bytes())?;
    let mut length = [0; 4];
    connection.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length > ANSWER_BYTES_MAX {
        return Err(OsErrorKind::InvalidData.into());
    }
    let mut text = vec![0; length as usize];
    connection.read_exact(&mut text)?;
    String::from_utf8(text).map_err(|error| std::io::Error::new(OsErrorKind::InvalidData, error))
}

/// The mappings of an answer, or what it says instead.
fn parse(answer: &str) -> Result<Vec<Mapping>, &str> {
    let list = answer.strip_prefix("ok ").ok_or(answer)?;
    let mapping = |text: &str| {
        let number = |text| u64::from_str_radix(text, 16).ok();
        let (range, offset) = text.split_once('+')?;
        let (start, end) = range.split_once('-')?;
        let mapping = Mapping { start: number(start)?, end: number(end)?, offset: number(offset)? };
        (mapping.start < mapping.end).then_some(mapping)
    };
    list.split(' ').map(mapping).collect::<Option<_>>().ok_or(answer)
}

fn refused(answer: &str, name: &str) -> Error {
    let kind = answer.strip_prefix("error ").and_then(|rest| rest.split(' ').next()).unwrap_or_default();
    let (kind, context) = match kind {
        "unsupported" => {
            (ErrorKind::Unsupported, "the kernel cannot track what is written to shared memory (Linux 6.7 can)")
        }
        "denied" => (ErrorKind::Denied, "the process may not make a userfaultfd"),
        "not-mapped" => (ErrorKind::NotFound, "the process has not mapped it"),
        "private" => (ErrorKind::Invalid, "its mapping is private: what is written does not reach the file"),
        "busy" => (ErrorKind::NotTracked, "something else has a userfaultfd on it"),
        _ => (ErrorKind::NotTracked, "the process refuses"),
    };
    Error::new(kind, format!("{name} is not tracked: {context} ({answer:.60})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_mappings_or_a_refusal() {
        let mapping = |start, end, offset| Mapping { start, end, offset };
        assert_eq!(
            parse("ok 1000-2000+0 3000-4000+1000"),
            Ok(vec![mapping(0x1000, 0x2000, 0), mapping(0x3000, 0x4000, 0x1000)])
        );
        for bad in ["ok", "ok ", "ok 1-2", "ok 2-1+0", "ok x-y+z", "error denied 1", ""] {
            assert_eq!(parse(bad), Err(bad));
        }
        let kind = |answer| refused(answer, "ram").kind();
        assert_eq!(kind("error unsupported 22"), ErrorKind::Unsupported);
        assert_eq!(kind("error private 0"), ErrorKind::Invalid);
        assert_eq!(kind("nonsense"), ErrorKind::NotTracked);
    }

    #[test]
    fn a_socket_that_nobody_listens_at_is_told() {
        let error = Tracking::begin(1, Path::new("/nowhere"), &["ram"]).expect_err("nobody");
        assert_eq!(error.kind(), ErrorKind::NotTracked);
    }
}
