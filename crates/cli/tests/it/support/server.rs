//! NBD servers that are not ours.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::{HANG, World};

/// A server on a socket, gone when this is dropped.
pub(crate) struct Server {
    /// Its process.
    pub(crate) child: Child,
    /// Where it listens.
    pub(crate) socket: PathBuf,
}

impl Server {
    /// Starts a program and waits until it answers on `socket`.
    pub(crate) fn start(program: &str, socket: PathBuf, arguments: &[&str]) -> Self {
        let _ = std::fs::remove_file(&socket);
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null());
        let child = command.spawn().unwrap_or_else(|error| panic!("{program}: {error}: run `make setup`"));
        let start = Instant::now();
        while std::os::unix::net::UnixStream::connect(&socket).is_err() {
            assert!(start.elapsed() < HANG, "{program} does not come up");
            std::thread::sleep(Duration::from_millis(10));
        }
        Self { child, socket }
    }

    /// nbdkit on the socket `far.sock` of the world.
    pub(crate) fn nbdkit(world: &World, arguments: &[&str]) -> Self {
        Self::nbdkit_at(world, "far.sock", arguments)
    }

    /// nbdkit on another socket of the world.
    pub(crate) fn nbdkit_at(world: &World, name: &str, arguments: &[&str]) -> Self {
        let socket = world.path(name);
        let text = socket.display().to_string();
        let own = ["--foreground", "--exit-with-parent", "--unix", &text];
        Self::start("nbdkit", socket, &[&own, arguments].concat())
    }

    /// How it is named on the command line.
    pub(crate) fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An empty file of `bytes` for a server to serve.
pub(crate) fn empty(world: &World, name: &str, bytes: u64) -> PathBuf {
    let path = world.path(name);
    std::fs::File::create(&path).and_then(|file| file.set_len(bytes)).expect("created");
    path
}

/// A path as text.
pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}
