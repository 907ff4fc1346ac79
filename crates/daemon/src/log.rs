//! The log. Whoever writes a line waits for nobody and fails at nothing, whatever becomes of the place that the log is
//! written to: a file system may be full or hang, a pipe may be closed or not be read.
//!
//! ```text
//!   a line ──▶ queue, at most 1 MiB ──▶ one thread ──▶ standard error
//!                 │ full                    │ fails
//!                 └─────────▶ lost, counted ◀┘          told as soon as a line can be written again
//! ```

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, ErrorCode};
use parking_lot::{Condvar, Mutex};
use tracing_subscriber::EnvFilter;

use crate::problem::{Result, of_state};

/// How many bytes wait to be written at most. What comes then is lost.
const QUEUE_BYTES_MAX: usize = 1 << 20;
/// How long the end of the process waits for what is queued.
const END_LIMIT: Duration = Duration::from_millis(500);

/// Lines on their way to the place that the log is written to. Clones are the same queue.
#[derive(Clone, Default)]
pub(crate) struct LogQueue {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// A line has come, or was written.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    lines: VecDeque<Vec<u8>>,
    bytes: usize,
    is_writing: bool,
    /// How many lines were lost, and how many of them nobody has been told of.
    lost: u64,
    untold: u64,
}

impl State {
    const fn lose_line(&mut self) {
        self.lost += 1;
        self.untold += 1;
    }
}

impl LogQueue {
    /// A queue whose lines a thread writes to `out`.
    ///
    /// # Errors
    /// There can be no thread.
    pub(crate) fn start(out: impl Write + Send + 'static) -> io::Result<Self> {
        let queue = Self::default();
        let written = queue.clone();
        // It ends with the process.
        std::thread::Builder::new().name("log".to_owned()).spawn(move || written.write_lines(out))?;
        Ok(queue)
    }

    /// How many lines were lost since the start.
    pub(crate) fn lost(&self) -> u64 {
        self.shared.state.lock().lost
    }

    /// Waits until all that was queued is written, or for a moment.
    pub(crate) fn drain(&self) {
        let mut state = self.shared.state.lock();
        let is_behind = |state: &mut State| state.is_writing || !state.lines.is_empty();
        self.shared.changed.wait_while_for(&mut state, is_behind, END_LIMIT);
    }

    fn push(&self, line: &[u8]) {
        let mut state = self.shared.state.lock();
        if state.bytes + line.len() > QUEUE_BYTES_MAX {
            state.lose_line();
            return;
        }
        state.bytes += line.len();
        state.lines.push_back(line.to_owned());
        self.shared.changed.notify_all();
    }

    fn write_lines(&self, mut out: impl Write) {
        loop {
            let line = self.next_line();
            let written = out.write_all(&line).and_then(|()| out.flush());
            let mut state = self.shared.state.lock();
            state.is_writing = false;
            if written.is_err() {
                state.lose_line();
            } else if state.untold > 0 {
                let notice = format!("{} lines of the log are lost: it could not be written\n", state.untold);
                state.untold = 0;
                state.bytes += notice.len();
                state.lines.push_front(notice.into_bytes());
            }
            self.shared.changed.notify_all();
        }
    }

    fn next_line(&self) -> Vec<u8> {
        let mut state = self.shared.state.lock();
        loop {
            if let Some(line) = state.lines.pop_front() {
                state.bytes -= line.len();
                state.is_writing = true;
                return line;
            }
            self.shared.changed.wait(&mut state);
        }
    }
}

impl Write for LogQueue {
    /// Takes one line: a formatted event comes whole.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.push(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The log of this process.
#[derive(Clone)]
pub(crate) struct Log {
    queue: LogQueue,
    /// Changes what is logged; none if a program that embeds the daemon has a log of its own.
    reload: Option<Arc<dyn Fn(EnvFilter) -> bool + Send + Sync>>,
}

impl Log {
    /// Starts the log on the standard error, with what `filter` says.
    ///
    /// # Errors
    /// The filter makes no sense.
    pub(crate) fn start(filter: &str) -> Result<Self> {
        let filter = parse_filter(filter)?;
        let queue = LogQueue::start(io::stderr()).map_err(|error| of_state(error, "starting the log"))?;
        let lines = queue.clone();
        let log = tracing_subscriber::fmt()
            .with_writer(move || lines.clone())
            .with_ansi(false)
            .log_internal_errors(false)
            .with_env_filter(filter)
            .with_filter_reloading();
        let handle = log.reload_handle();
        let is_ours = log.try_init().is_ok();
        let reload = is_ours.then(|| Arc::new(move |filter| handle.reload(filter).is_ok()) as _);
        if is_ours {
            drain_before_panics(&queue);
        }
        Ok(Self { queue, reload })
    }

    /// Logs what `filter` says from now on.
    ///
    /// # Errors
    /// The filter makes no sense.
    pub(crate) fn set_filter(&self, filter: &str) -> Result<()> {
        let filter = parse_filter(filter)?;
        match &self.reload {
            Some(reload) if !reload(filter) => Err(Error::new(ErrorCode::Internal, "the log's filter is gone")),
            _ => Ok(()),
        }
    }

    /// The lines that wait to be written.
    pub(crate) const fn queue(&self) -> &LogQueue {
        &self.queue
    }
}

/// Says `text` beside the log, if anybody is there.
pub(crate) fn say_aside(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

fn parse_filter(filter: &str) -> Result<EnvFilter> {
    EnvFilter::builder().parse(filter).map_err(|error| {
        Error::new(ErrorCode::ConfigInvalid, format!("log is \"{filter}\": {error}"))
            .with_hint("write error, warn, info, debug or trace")
    })
}

/// A panic ends the process: what was logged before it is written first, if that can be.
fn drain_before_panics(queue: &LogQueue) {
    let (queue, report) = (queue.clone(), std::panic::take_hook());
    std::panic::set_hook(Box::new(move |panic| {
        queue.drain();
        report(panic);
    }));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};

    /// A place for lines: it takes one for each answer that it is given, and hangs until then.
    struct Place {
        answers: Receiver<io::Result<()>>,
        taken: Sender<String>,
    }

    impl Write for Place {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            self.answers.recv().expect("the test goes on")?;
            let _ = self.taken.send(String::from_utf8_lossy(line).into_owned());
            Ok(line.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn started() -> (LogQueue, Sender<io::Result<()>>, Receiver<String>) {
        let ((answer, answers), (taken, lines)) = (channel(), channel());
        (LogQueue::start(Place { answers, taken }).expect("a thread"), answer, lines)
    }

    #[test]
    fn a_log_that_hangs_keeps_nobody_waiting_and_what_does_not_fit_is_counted_and_told() {
        let (mut queue, answer, lines) = started();
        let line = [b'x'; 1 << 16];
        for _ in 0..40 {
            queue.write_all(&line).expect("nothing fails");
        }
        let lost = queue.lost();
        assert!((20..=24).contains(&lost), "{lost} of 40 lines of 64 KiB are lost");
        queue.drain();
        for _ in 0..=40 - lost {
            answer.send(Ok(())).expect("it writes");
        }
        queue.drain();
        let told: Vec<String> = lines.try_iter().filter(|line| !line.starts_with('x')).collect();
        assert_eq!(told, [format!("{lost} lines of the log are lost: it could not be written\n")]);
    }

    #[test]
    fn a_log_that_fails_ends_nothing_and_goes_on_when_it_can() {
        let (mut queue, answer, lines) = started();
        for _ in 0..3 {
            queue.write_all(b"lost\n").expect("nothing fails");
            answer.send(Err(io::ErrorKind::StorageFull.into())).expect("it writes");
        }
        queue.drain();
        assert_eq!(queue.lost(), 3);
        queue.write_all(b"kept\n").expect("nothing fails");
        for _ in 0..2 {
            answer.send(Ok(())).expect("it writes");
        }
        queue.drain();
        let lines: Vec<String> = lines.try_iter().collect();
        assert_eq!(lines, ["kept\n", "3 lines of the log are lost: it could not be written\n"]);
    }
}
