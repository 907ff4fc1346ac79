//! A host's own path: what stands between the load and the volume's export, and lets through so many bytes of answers. In the paper a VM
//! with a warm cache reads 15,000 times a second, and a good quarter of that is its storage's, which has 8,000: something of the host's is
//! full, and the storage is not.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::Context;

/// What the answer to a read of 4 KiB takes, with its header.
const ANSWER_BYTES: f64 = 4096.0 + 28.0;
/// For how long of idling it may catch up.
const BURST: Duration = Duration::from_millis(50);
/// How much is passed on at once.
const PIECE_BYTES: usize = 32 << 10;

/// The path of one host. It passes on connections until the process ends.
pub(super) struct HostPath {
    socket: PathBuf,
}

impl HostPath {
    /// A path in `folder` to the export whose socket is at `export`, which need not be there yet. It lets through the answers to so many reads
    /// of 4 KiB a second.
    pub(super) fn start(export: PathBuf, reads_per_second: u64, folder: &Path, name: &str) -> anyhow::Result<Self> {
        let socket = folder.join(format!("path-{name}.sock"));
        let listener = UnixListener::bind(&socket).context("listening for the load")?;
        let meter = Arc::new(Mutex::new(Meter::new(reads_per_second as f64 * ANSWER_BYTES, Instant::now())));
        std::thread::spawn(move || {
            for load in listener.incoming().flatten() {
                // A load that nobody serves sees the end of its connection.
                let Ok(server) = UnixStream::connect(&export) else { continue };
                let meter = Arc::clone(&meter);
                if let (Ok(load), Ok(server)) = (load.try_clone(), server.try_clone()) {
                    std::thread::spawn(move || pass(load, server, None));
                }
                std::thread::spawn(move || pass(server, load, Some(&meter)));
            }
        });
        Ok(Self { socket })
    }

    /// Where the load asks for the export `name`.
    pub(super) fn uri(&self, name: &str) -> String {
        format!("nbd+unix:///{name}?socket={}", self.socket.display())
    }
}

/// When the next bytes may go.
struct Meter {
    bytes_per_second: f64,
    next: Instant,
}

impl Meter {
    const fn new(bytes_per_second: f64, now: Instant) -> Self {
        Self { bytes_per_second, next: now }
    }

    /// When bytes may go that are there `now`.
    fn admit(&mut self, bytes: usize, now: Instant) -> Instant {
        let at = self.next.max(now.checked_sub(BURST).unwrap_or(now));
        self.next = at + Duration::from_secs_f64(bytes as f64 / self.bytes_per_second);
        self.next
    }
}

fn pass(mut from: UnixStream, mut to: UnixStream, meter: Option<&Mutex<Meter>>) {
    let mut buffer = vec![0; PIECE_BYTES];
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        if let Some(meter) = meter {
            let now = Instant::now();
            let at = meter.lock().expect("nobody panics with it").admit(length, now);
            std::thread::sleep(at.saturating_duration_since(now));
        }
        if to.write_all(&buffer[..length]).is_err() {
            break;
        }
    }
    // The other side may be gone.
    let _ = to.shutdown(Shutdown::Both);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_go_as_fast_as_the_path_is() {
        let now = Instant::now();
        let mut meter = Meter::new(1000.0, now);
        assert_eq!(meter.admit(500, now), now + Duration::from_millis(500));
        assert_eq!(meter.admit(500, now), now + Duration::from_secs(1), "both at once");
        let later = now + Duration::from_secs(10);
        assert_eq!(
            meter.admit(1000, later),
            later + Duration::from_secs(1) - BURST,
            "more than the burst was saved up"
        );
    }
}
