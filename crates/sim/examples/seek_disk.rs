//! Serves a file over NBD in the time that a hard disk takes: each request is answered when the head of the seek model
//! ([`HardDisk`]) is done with it, on the machine's clock.
//!
//! ```text
//!  NBD ──▶ Spindle: model ──── next moment ────▶ a thread of its own waits ──▶ the file ──▶ answer
//! ```
//!
//! One head serves all connections, one movement at a time, in the order of the model's elevator: inwards only, then
//! from the outside again, reads first. The disk's volatile cache answers writes, and a flush empties it. So the file
//! belongs where it costs no time: in memory.
//!
//! A `statistics` file gets a line each second: how often the head was asked for something, and how much later than the
//! model's moment the answers were. That is what the machine adds.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use block::{
    BlockDevice, Buffer, BufferPool, Bytes, Device, Error, Extent, ExtentState, ExtentStatus, Geometry, IoFuture,
    Mutation, MutationKind,
};
use clap::Parser;
use env::{EnvRef, Moment, RealEnv};
use nbd::{Export, Exports, Limits, serve_connection};
use parking_lot::{Condvar, Mutex};
use tokio::sync::oneshot;
use transhume_sim::model::{HardDisk, HardDiskFigures, Model, Request, Ticket};

/// What may wait in the server for the head; far more than any client has outstanding.
const POOL: Bytes = Bytes::mib(256);

/// Serves a file over NBD in the time that a Seagate ST31000524AS takes.
#[derive(Parser)]
struct Arguments {
    /// The unix socket.
    #[arg(long)]
    socket: PathBuf,
    /// The file, which is there; its size is the disk's.
    #[arg(long)]
    file: PathBuf,
    /// The disk has this part of its cylinders only, so that a seek over the file is as long as over a file so many
    /// times as large.
    #[arg(long, default_value_t = 1)]
    shrink: u64,
    /// The model's clock goes so many times as fast as the machine's.
    #[arg(long, default_value_t = 1)]
    speed: u32,
    /// Where a line goes each second in which something was answered.
    #[arg(long)]
    statistics: PathBuf,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments = Arguments::parse();
    let file = File::options().read(true).write(true).open(&arguments.file)?;
    let size = Bytes(file.metadata()?.len());
    let figures = HardDiskFigures::ST31000524AS;
    let figures = HardDiskFigures { capacity: figures.capacity / arguments.shrink.max(1), ..figures };
    if size.0 > figures.capacity {
        return Err("the file is larger than the disk".into());
    }
    let spindle = Arc::new(Spindle::new(figures, arguments.speed.max(1)));
    let (head, statistics) = (Arc::clone(&spindle), File::create(&arguments.statistics)?);
    std::thread::spawn(move || head.turn(&statistics));
    let device = Device::new("disk", SeekDisk { spindle, file, size });
    let env: EnvRef = Arc::new(RealEnv::new());
    let export = Export::new("", BufferPool::new(POOL), move || device.clone());
    let exports: Arc<dyn Exports> = Arc::new(vec![Arc::new(export)]);
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let listener = tokio::net::UnixListener::bind(&arguments.socket)?;
        // Nothing that a client asks for comes as fast as a poll pays for.
        let limits = Limits { busy_poll: Duration::ZERO, ..Limits::default() };
        loop {
            let (stream, _) = listener.accept().await?;
            tokio::spawn(serve_connection(stream, Arc::clone(&exports), Arc::clone(&env), limits));
        }
    })
}

/// The model of a disk on the machine's clock.
struct Spindle {
    started: Instant,
    speed: u32,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    model: HardDisk,
    waiting: HashMap<Ticket, oneshot::Sender<()>>,
    tickets: u64,
    done: Vec<Ticket>,
    answers: Answers,
}

/// What was answered within a second.
#[derive(Default)]
struct Answers {
    count: u64,
    late: Duration,
    late_most: Duration,
}

impl State {
    /// Lets happen what is over by `now`, and answers.
    fn advance(&mut self, now: Moment) {
        let due = self.model.next();
        self.model.advance(now, &mut self.done);
        for ticket in self.done.drain(..) {
            if let Some(waiting) = self.waiting.remove(&ticket) {
                // Whoever dropped a request does not wait for it.
                let _ = waiting.send(());
                let late = now.since(due.unwrap_or(now));
                self.answers.count += 1;
                self.answers.late += late;
                self.answers.late_most = self.answers.late_most.max(late);
            }
        }
    }
}

impl Spindle {
    fn new(figures: HardDiskFigures, speed: u32) -> Self {
        let state = State {
            model: HardDisk::new(figures),
            waiting: HashMap::new(),
            tickets: 0,
            done: Vec::new(),
            answers: Answers::default(),
        };
        Self { started: Instant::now(), speed, state: Mutex::new(state), changed: Condvar::new() }
    }

    fn now(&self) -> Moment {
        Moment(self.started.elapsed() * self.speed)
    }

    /// Puts a request to the disk and waits until it is done.
    async fn serve(&self, request: Request) {
        let receiver = {
            let mut state = self.state.lock();
            // What is over is over before the head hears of this one.
            let now = self.now();
            state.advance(now);
            state.tickets += 1;
            let ticket = Ticket(state.tickets);
            let (sender, receiver) = oneshot::channel();
            state.waiting.insert(ticket, sender);
            state.model.submit(now, ticket, request);
            self.changed.notify_one();
            receiver
        };
        // The thread that answers ends with the program.
        let _ = receiver.await;
    }

    /// Drives the model for ever.
    fn turn(&self, mut statistics: &File) {
        let mut second = 0;
        let mut state = self.state.lock();
        loop {
            state.advance(self.now());
            if self.started.elapsed().as_secs() > second && state.answers.count > 0 {
                second = self.started.elapsed().as_secs();
                let Answers { count, late, late_most } = std::mem::take(&mut state.answers);
                let (late_us, most_us) = (late.as_micros() / u128::from(count), late_most.as_micros());
                let line = format!("second={second} answers={count} late_us={late_us} late_us_most={most_us}\n");
                // Who reads it sees that lines are missing.
                let _ = statistics.write_all(line.as_bytes());
            }
            match state.model.next() {
                Some(at) => {
                    let wait = at.since(self.now()) / self.speed;
                    if !wait.is_zero() {
                        self.changed.wait_for(&mut state, wait);
                    }
                }
                None => self.changed.wait(&mut state),
            }
        }
    }
}

/// The file behind the head.
struct SeekDisk {
    spindle: Arc<Spindle>,
    file: File,
    size: Bytes,
}

impl BlockDevice for SeekDisk {
    fn geometry(&self) -> Geometry {
        Geometry::of_size(self.size)
    }

    fn read(&self, offset: Bytes, mut buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            self.spindle.serve(Request::read(offset.0, buffer.len() as u64)).await;
            self.file
                .read_exact_at(&mut buffer, offset.0)
                .map_err(|error| Error::from_os(error, "reading the file"))?;
            Ok(buffer)
        })
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let extent = mutation.extent();
            // Zeroes without bytes and discards are a matter of metadata: a write of one block.
            let length = match mutation.kind() {
                MutationKind::Data(_) => extent.length.0,
                MutationKind::Zeroes { .. } | MutationKind::Discard => extent.length.0.min(block::BLOCK_BYTES),
            };
            self.spindle.serve(Request::write(extent.offset.0, length)).await;
            let zeroes;
            let bytes: &[u8] = match mutation.kind() {
                MutationKind::Data(data) => data,
                MutationKind::Zeroes { .. } => {
                    zeroes = vec![0; extent.length.0 as usize];
                    &zeroes
                }
                MutationKind::Discard => &[],
            };
            self.file
                .write_all_at(bytes, extent.offset.0)
                .map_err(|error| Error::from_os(error, "writing the file"))?;
            if mutation.fua {
                self.spindle.serve(Request::flush()).await;
            }
            Ok(())
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(async move {
            self.spindle.serve(Request::flush()).await;
            Ok(())
        })
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        block::ready(Ok(vec![ExtentStatus { extent, state: ExtentState::Data }]))
    }
}
