//! Two daemons that trust each other, and the network between them, which can be cut.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::Value;
use transhume_guest::write_identity;

use super::{HANG, World};

/// The configuration of a host that takes volumes.
pub(crate) const TAKES: &str = "incoming-dirs = [\"INCOMING\"]\n";

/// Two hosts; volumes move from `a` to `b`.
pub(crate) struct Pair {
    pub(crate) a: World,
    pub(crate) b: World,
    /// From `a` to `b`.
    pub(crate) network: Network,
}

impl Pair {
    /// Two running daemons that trust each other; `b` takes volumes.
    pub(crate) fn new() -> Self {
        Self::with(["", TAKES]).0
    }

    /// The same; `a` takes volumes, too.
    pub(crate) fn both_ways() -> Self {
        let (pair, port) = Self::with([TAKES, TAKES]);
        pair.b.json(&["trust", "--change", "a", "--address", &format!("127.0.0.1:{port}")]);
        pair
    }

    /// The same; `b`'s identity was made in another program, good in these years.
    pub(crate) fn with_identity_of_b(years: std::ops::Range<i32>) -> Self {
        let make = |b: &World| write_identity(&b.daemon.state(), "b", years).expect("written");
        let (pair, port) = Self::of(host("a", TAKES), host_before("b", TAKES, make));
        pair.b.json(&["trust", "--change", "a", "--address", &format!("127.0.0.1:{port}")]);
        pair
    }

    /// The same with so much in each one's section `[hosts]`, where INCOMING is a folder of its own. Gives the port of `a`, too,
    /// which `b` does not know.
    pub(crate) fn with([more_of_a, more_of_b]: [&str; 2]) -> (Self, u16) {
        Self::of(host("a", more_of_a), host("b", more_of_b))
    }

    fn of((a, port_of_a): (World, u16), (b, port): (World, u16)) -> (Self, u16) {
        let code = b.json(&["trust", "--invite"])["code"].as_str().expect("a code").to_owned();
        a.json(&["trust", &format!("127.0.0.1:{port}"), &code]);
        let network = Network::to(port);
        a.json(&["trust", "--change", "b", "--address", &format!("127.0.0.1:{}", network.port)]);
        (Self { a, b, network }, port_of_a)
    }

    /// `a` has given `x` up, and `b` has not taken it: connections for that do not come about. Gives the epoch of what is
    /// neither's.
    pub(crate) fn give_up_untaken(&self) -> u64 {
        self.a.json(&["move", "x", "--to", "b", "--bandwidth", "2MiB/s", "--detach"]);
        self.wait_for_move("it copies", |job| job["progress"]["bytes_copied"].as_u64() > Some(0));
        self.network.close();
        self.a.json(&["set", "x", "--bandwidth", "0"]);
        wait_until("it is given up", || (self.at_a("x")["backend"] == "b:x").then_some(()));
        assert_eq!(self.at_b("x")["arrival"]["stage"], "prepared");
        self.at_a("x")["epoch"].as_u64().expect("a number")
    }

    /// Where `b` puts the volume `name`.
    pub(crate) fn arrived(&self, name: &str) -> PathBuf {
        self.b.path("incoming").join(format!("{name}.raw"))
    }

    /// What `a` says of volume `x`.
    pub(crate) fn at_a(&self, name: &str) -> Value {
        self.a.json(&["volume", "show", name])
    }

    /// What `b` says of it.
    pub(crate) fn at_b(&self, name: &str) -> Value {
        self.b.json(&["volume", "show", name])
    }

    /// The names of the volumes that `b` has.
    pub(crate) fn volumes_at_b(&self) -> Vec<String> {
        let volumes = self.b.json(&["volume", "ls"]);
        let names = volumes.as_array().expect("a list").iter().map(|volume| volume["name"].as_str());
        names.map(|name| name.expect("a name").to_owned()).collect()
    }

    /// Waits until `a`'s only move under way is as `is` wants it.
    pub(crate) fn wait_for_move(&self, what: &str, is: impl Fn(&Value) -> bool) -> Value {
        let start = Instant::now();
        loop {
            let job = self.a.json(&["jobs", "--all"])[0].clone();
            if is(&job) {
                return job;
            }
            assert!(start.elapsed() < HANG, "never: {what}, but {job}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Whether a move is over, one way or the other.
pub(crate) fn is_over(job: &Value) -> bool {
    ["done", "failed", "cancelled"].iter().any(|over| job["state"] == *over)
}

/// Waits until `look` finds something.
pub(crate) fn wait_until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < HANG, "never: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A running daemon that speaks to others, and its port.
pub(crate) fn host(name: &str, more: &str) -> (World, u16) {
    host_before(name, more, |_| {})
}

/// The same, after something was done to its directory.
fn host_before(name: &str, more: &str, prepare: impl FnOnce(&World)) -> (World, u16) {
    let mut world = World::without_daemon();
    let port = transhume_guest::free_port().expect("a port");
    let incoming = world.path("incoming");
    std::fs::create_dir(&incoming).expect("created");
    let more = more.replace("INCOMING", &incoming.display().to_string());
    let text = format!("[hosts]\nname = \"{name}\"\nlisten = [\"127.0.0.1:{port}\"]\n{more}");
    let config = world.path("config.toml");
    std::fs::write(&config, text).expect("written");
    world.daemon.arguments = vec!["--config".to_owned(), config.display().to_string()];
    prepare(&world);
    world.start();
    (world, port)
}

/// A network between two hosts: connections to its port are passed on, unless it is cut.
pub(crate) struct Network {
    pub(crate) port: u16,
    shared: Arc<Shared>,
}

struct Shared {
    /// No connection comes about.
    is_closed: AtomicBool,
    /// They come about, and nothing gets through.
    is_mute: AtomicBool,
    /// How many bytes get through a second, each way of each connection; 0 for all.
    rate: AtomicU64,
    streams: Mutex<Vec<TcpStream>>,
}

impl Network {
    fn to(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let own = listener.local_addr().expect("it has one").port();
        let shared = Arc::new(Shared {
            is_closed: AtomicBool::new(false),
            is_mute: AtomicBool::new(false),
            rate: AtomicU64::new(0),
            streams: Mutex::default(),
        });
        let passing = Arc::clone(&shared);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if passing.is_mute.load(Ordering::SeqCst) {
                    passing.streams.lock().push(stream);
                    continue;
                }
                let peer = TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], port)));
                if let (false, Ok(peer)) = (passing.is_closed.load(Ordering::SeqCst), peer) {
                    passing.pass(&stream, &peer);
                }
            }
        });
        Self { port: own, shared }
    }

    /// Ends every connection, and lets none through any more.
    pub(crate) fn cut(&self) {
        self.close();
        for stream in self.shared.streams.lock().drain(..) {
            // It may have ended by itself.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Lets no more connections through; those that are there go on.
    pub(crate) fn close(&self) {
        self.shared.is_closed.store(true, Ordering::SeqCst);
    }

    /// Lets nothing through on connections that are new from now on; nobody is told.
    pub(crate) fn mute(&self) {
        self.shared.is_mute.store(true, Ordering::SeqCst);
    }

    /// Lets connections through again.
    pub(crate) fn mend(&self) {
        self.shared.is_closed.store(false, Ordering::SeqCst);
        self.shared.is_mute.store(false, Ordering::SeqCst);
    }

    /// Lets so many bytes through a second, each way of each connection.
    pub(crate) fn slow_down(&self, bytes_per_second: u64) {
        self.shared.rate.store(bytes_per_second, Ordering::SeqCst);
    }
}

impl Shared {
    fn pass(self: &Arc<Self>, one: &TcpStream, other: &TcpStream) {
        for (from, to) in [(one, other), (other, one)] {
            let [mut from, mut to] = [from, to].map(|stream| stream.try_clone().expect("cloned"));
            to.set_nodelay(true).expect("set");
            self.streams.lock().push(from.try_clone().expect("cloned"));
            let shared = Arc::clone(self);
            std::thread::spawn(move || {
                let mut buffer = vec![0; 1 << 16];
                while let Ok(length @ 1..) = from.read(&mut buffer) {
                    if let rate @ 1.. = shared.rate.load(Ordering::SeqCst) {
                        std::thread::sleep(Duration::from_secs_f64(length as f64 / rate as f64));
                    }
                    if to.write_all(&buffer[..length]).is_err() {
                        break;
                    }
                }
                let _ = to.shutdown(Shutdown::Both);
            });
        }
    }
}
