//! An NBD server that is not ours: nbdkit with a file.

use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use transhume_guest::process::guarded;

/// It answers within this.
const UP_LIMIT: Duration = Duration::from_secs(20);

/// nbdkit, which dies with this.
pub(crate) struct Server {
    child: Option<Child>,
    file: PathBuf,
    socket: PathBuf,
}

impl Server {
    /// Serves `file` at a socket in `folder`.
    pub(crate) fn start(file: PathBuf, folder: &Path) -> anyhow::Result<Self> {
        let mut server = Self { child: None, file, socket: folder.join("server.nbd") };
        server.go_on()?;
        Ok(server)
    }

    /// How its export is named on the command line.
    pub(crate) fn address(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }

    /// The file that it serves.
    pub(crate) fn file(&self) -> &Path {
        &self.file
    }

    /// `kill -9`: what it has written is in the page cache, and stays there.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            // It may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Starts it again.
    pub(crate) fn go_on(&mut self) -> anyhow::Result<()> {
        self.kill();
        // The socket of the one before, if there was one.
        let _ = std::fs::remove_file(&self.socket);
        let mut command = guarded(Path::new("nbdkit"));
        command.args(["--foreground", "--exit-with-parent", "--unix"]).arg(&self.socket);
        command.arg("file").arg(&self.file).stdin(Stdio::null());
        self.child = Some(command.spawn().context("starting nbdkit")?);
        let end = Instant::now() + UP_LIMIT;
        while std::os::unix::net::UnixStream::connect(&self.socket).is_err() {
            ensure!(Instant::now() < end, "nbdkit does not come up");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}
