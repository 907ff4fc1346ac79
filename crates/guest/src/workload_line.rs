//! The line to a guest's workload: QEMU's input and output, or a socket that it listens on.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{ChildStdin, ChildStdout};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use anyhow::Context;

use crate::event::Event;

/// The connection to the QEMU that has the guest. What comes from it is read by a thread until it ends. Connections to
/// QEMUs that had the guest before are read too, for as long as they last.
pub(crate) struct WorkloadLine {
    input: Box<dyn Write + Send>,
    events: Receiver<(Instant, Event)>,
    is_closed: Arc<AtomicBool>,
    /// The sockets, the present one last; none of pipes.
    streams: Vec<UnixStream>,
}

impl WorkloadLine {
    /// Over QEMU's own input and output.
    pub(crate) fn over_pipes(input: ChildStdin, output: ChildStdout) -> Self {
        let (sender, events) = mpsc::channel();
        Self { input: Box::new(input), events, is_closed: start_reader(output, sender), streams: Vec::new() }
    }

    /// To nobody, until a socket is followed.
    pub(crate) fn disconnected() -> Self {
        let (_, events) = mpsc::channel();
        Self { input: Box::new(std::io::sink()), events, is_closed: Arc::default(), streams: Vec::new() }
    }

    /// Connects to a socket, waiting until somebody listens, and goes on with what comes from there. What still comes
    /// from former connections is not lost.
    pub(crate) fn follow(&mut self, path: &Path, limit: Duration) -> anyhow::Result<()> {
        let stream = dial(path, limit)?;
        let (input, output) = (stream.try_clone().context("cloning")?, stream.try_clone().context("cloning")?);
        let (sender, events) = mpsc::channel();
        let former = std::mem::replace(&mut self.events, events);
        let forward = sender.clone();
        std::thread::spawn(move || {
            for event in former {
                if forward.send(event).is_err() {
                    return;
                }
            }
        });
        self.is_closed = start_reader(output, sender);
        self.input = Box::new(input);
        self.streams.push(stream);
        Ok(())
    }

    pub(crate) fn send(&mut self, line: &str) -> std::io::Result<()> {
        writeln!(self.input, "{line}").and_then(|()| self.input.flush())
    }

    /// What is read; it is disconnected once all was read and every other end is gone.
    pub(crate) fn events(&self) -> &Receiver<(Instant, Event)> {
        &self.events
    }

    /// Whether the present other end is gone.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Ends the connections to sockets. What had come by then is still read. Pipes end with QEMU alone.
    pub(crate) fn close(&mut self) {
        for stream in &self.streams {
            // The other end may have closed it. Without this the reader would keep the connection open.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for WorkloadLine {
    fn drop(&mut self) {
        self.close();
    }
}

fn dial(path: &Path, limit: Duration) -> anyhow::Result<UnixStream> {
    let end = Instant::now() + limit;
    loop {
        match UnixStream::connect(path) {
            Ok(stream) => return Ok(stream),
            Err(error) if Instant::now() >= end => {
                return Err(error).with_context(|| format!("connecting to {}", path.display()));
            }
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// Starts the thread that reads one connection; the mark is set when it ends.
fn start_reader(output: impl Read + Send + 'static, sender: Sender<(Instant, Event)>) -> Arc<AtomicBool> {
    let is_closed = Arc::new(AtomicBool::new(false));
    let mark = Arc::clone(&is_closed);
    std::thread::spawn(move || {
        read(output, &sender);
        mark.store(true, Ordering::Release);
    });
    is_closed
}

/// Reads lines to the end. One that is cut off by the end is dropped: a number in it may have lost digits. One whose
/// beginning went to nobody does not begin as an event does, and is a line like others.
fn read(output: impl Read, sender: &Sender<(Instant, Event)>) {
    let mut output = BufReader::new(output);
    let mut line = Vec::new();
    while let Ok(1..) = output.read_until(b'\n', &mut line) {
        if line.last() != Some(&b'\n') {
            return;
        }
        let event = Event::parse(&String::from_utf8_lossy(&line));
        if sender.send((Instant::now(), event)).is_err() {
            return;
        }
        line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_is_cut_at_either_end_is_never_taken_for_an_event() {
        let (sender, events) = mpsc::channel();
        read(&b"ten=12\n@load done ok=1 errors=0\r\n@load memory pages=8 wrong=0 rewritten=7"[..], &sender);
        drop(sender);
        let events: Vec<Event> = events.iter().map(|(_, event)| event).collect();
        let done = Event::Done { is_right: true, totals: None };
        assert_eq!(events, [Event::Line("ten=12".into()), done]);
    }
}
