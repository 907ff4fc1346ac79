//! Plain TCP streams: what the link and the kernel carry without disks and without encryption. It also measures what a
//! server sends to its clients at a rate of its own.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, ChildStdout, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use transhume_guest::{Side, TwoHosts};

/// Bytes of one write: a frame of the wire.
const WRITE_BYTES: usize = 256 << 10;
/// The same at a rate: an answer of a web server.
const ANSWER_BYTES: usize = 64 << 10;
/// A server that was kept waiting longer than this does not send faster afterwards: its clients waited, too.
const LATE_MAX: Duration = Duration::from_millis(20);
const PORT: u16 = 10811;

/// Arguments of `cargo xtask tcp-stream`, which the benchmark starts on both hosts.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Sends to this address; without one it receives.
    #[arg(long)]
    to: Option<String>,
    /// How many bytes are sent.
    #[arg(long, default_value_t = 1 << 30)]
    bytes: u64,
    /// Sends so many bytes a second at most until its input ends, and prints how many it were since the last line for each.
    #[arg(long)]
    rate: Option<u64>,
}

/// Receives one stream, or sends one and prints what it took.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    match (&arguments.to, arguments.rate) {
        (Some(to), Some(rate)) => send_at(to, rate)?,
        (Some(to), None) => println!("{}", send(to, arguments.bytes)?),
        (None, _) => receive()?,
    }
    Ok(())
}

fn receive() -> anyhow::Result<()> {
    let listener = TcpListener::bind(("0.0.0.0", PORT)).context("listening")?;
    println!("ready");
    let (mut stream, _) = listener.accept().context("accepting")?;
    let mut buffer = vec![0; WRITE_BYTES];
    while stream.read(&mut buffer).context("receiving")? > 0 {}
    stream.write_all(&[1]).context("saying that all has come")
}

fn connect(to: &str) -> anyhow::Result<TcpStream> {
    let stream = TcpStream::connect(to).with_context(|| format!("connecting to {to}"))?;
    stream.set_nodelay(true).context("setting up the connection")?;
    Ok(stream)
}

fn end(mut stream: TcpStream) -> anyhow::Result<()> {
    stream.shutdown(std::net::Shutdown::Write).context("ending")?;
    stream.read_exact(&mut [0]).context("hearing that all has come")
}

fn send(to: &str, bytes: u64) -> anyhow::Result<f64> {
    let buffer = vec![7; WRITE_BYTES];
    let mut stream = connect(to)?;
    let started = Instant::now();
    let mut left = bytes;
    while left > 0 {
        let length = left.min(WRITE_BYTES as u64) as usize;
        stream.write_all(&buffer[..length]).context("sending")?;
        left -= length as u64;
    }
    end(stream)?;
    Ok(started.elapsed().as_secs_f64())
}

fn send_at(to: &str, rate: u64) -> anyhow::Result<()> {
    let buffer = vec![7; ANSWER_BYTES];
    let mut stream = connect(to)?;
    let (marking, marks) = mpsc::channel();
    std::thread::spawn(move || {
        for _ in std::io::stdin().lines().map_while(Result::ok) {
            // Nobody listens any more if nothing could be sent.
            let _ = marking.send(());
        }
    });
    let pause = Duration::from_secs_f64(ANSWER_BYTES as f64 / rate as f64);
    let (mut due, mut since, mut sent) = (Instant::now(), Instant::now(), 0);
    loop {
        match marks.try_recv() {
            Ok(()) => {
                println!("{}", f64::from(sent) * ANSWER_BYTES as f64 / since.elapsed().as_secs_f64());
                (since, sent) = (Instant::now(), 0);
            }
            Err(mpsc::TryRecvError::Empty) => {}
            Err(mpsc::TryRecvError::Disconnected) => return end(stream),
        }
        let now = Instant::now();
        std::thread::sleep(due.saturating_duration_since(now));
        due = due.max(now.checked_sub(LATE_MAX).unwrap_or(now)) + pause;
        stream.write_all(&buffer).context("sending")?;
        sent += 1_u32;
    }
}

/// A receiver on the target's host, which is killed when this is dropped.
struct Receiving(Child);

impl Receiving {
    fn start(hosts: &TwoHosts, own: &str) -> anyhow::Result<Self> {
        let mut command = hosts.command(Side::B, own);
        let child = command.arg("tcp-stream").stdout(Stdio::piped()).spawn().context("starting the receiver")?;
        let mut receiving = Self(child);
        let mut line = String::new();
        let output = receiving.0.stdout.take().context("a pipe was asked for")?;
        BufReader::new(output).read_line(&mut line).context("reading from the receiver")?;
        if line.trim() != "ready" {
            bail!("the receiver did not come up: {line}");
        }
        Ok(receiving)
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        // It has ended by itself if all went well.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn own_program() -> anyhow::Result<String> {
    let own = std::env::current_exe().context("asking where this program is")?;
    own.into_os_string().into_string().ok().context("this program has a path in UTF-8")
}

/// Seconds that `bytes` take between the two hosts.
pub(super) fn measure(hosts: &TwoHosts, bytes: u64) -> anyhow::Result<f64> {
    let own = own_program()?;
    let _receiving = Receiving::start(hosts, &own)?;
    let to = format!("{}:{PORT}", hosts.machine(Side::B, 0));
    let mut sender = hosts.command(Side::A, &own);
    let output = sender.args(["tcp-stream", "--to", &to, "--bytes", &bytes.to_string()]).output();
    let output = output.context("starting the sender")?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    said.trim().parse().with_context(|| format!("the sender: {}", String::from_utf8_lossy(&output.stderr)))
}

/// Somebody else's traffic from the source's host to the target's.
pub(super) struct Others {
    sender: Child,
    output: BufReader<ChildStdout>,
    _receiving: Receiving,
}

impl Others {
    /// Begins to send `rate` bytes a second over one link.
    pub(super) fn start(hosts: &TwoHosts, link: usize, rate: u64) -> anyhow::Result<Self> {
        let own = own_program()?;
        let receiving = Receiving::start(hosts, &own)?;
        let to = format!("{}:{PORT}", hosts.machine(Side::B, link));
        let mut sender = hosts.command(Side::A, &own);
        sender.args(["tcp-stream", "--to", &to, "--rate", &rate.to_string()]);
        let mut sender = sender.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("starting the sender")?;
        let output = BufReader::new(sender.stdout.take().context("a pipe was asked for")?);
        Ok(Self { sender, output, _receiving: receiving })
    }

    /// How many bytes a second it was since this was last asked.
    pub(super) fn mark(&mut self) -> anyhow::Result<f64> {
        let input = self.sender.stdin.as_mut().context("a pipe was asked for")?;
        writeln!(input).context("the sender is gone")?;
        let mut said = String::new();
        self.output.read_line(&mut said).context("reading from the sender")?;
        said.trim().parse().context("the sender prints a number")
    }
}

impl Drop for Others {
    fn drop(&mut self) {
        let _ = self.sender.kill();
        let _ = self.sender.wait();
    }
}
