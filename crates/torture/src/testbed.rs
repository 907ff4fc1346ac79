//! The machine that is tortured: a daemon, and the places where its volume can be.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use transhume_guest::Daemon;

use crate::plan::Place;
use crate::server::Server;
use transhume_guest::process::output_of;

/// So many lines of a log are told.
const LOG_LINES_TOLD: usize = 25;

/// Room on a file system for two volumes, each with what its moves leave. An XFS is not made smaller.
const ROOM_BYTES: u64 = 320 << 20;
/// More workers than a small machine has processors: with one of them stalled, new connections come to the others.
const WORKERS: usize = 4;
/// The surrogate of an act, with a part for each of two volumes in each of two stores: too little for all that a guest writes.
pub(crate) const SURROGATE: &str = "fast";
const SURROGATE_STORE: &str = "size=48MiB";
const SURROGATE_PART: &str = "20MiB";
/// The cache of an act, and what a volume has of it: less than the volume.
const CACHE: &str = "ssd";
const CACHE_STORE: &str = "size=32MiB";
const CACHE_PART: &str = "12MiB";
/// What it holds is in the volume's disk again after so long.
const DRAIN_LIMIT: Duration = Duration::from_secs(60);
/// A volume that waits for a server is up that long after it.
const RETURN_LIMIT: Duration = Duration::from_secs(30);
/// Room on the small file system beside one volume: too little for two.
const SMALL_SPARE_BYTES: u64 = 18 << 20;
const FILLER: &str = "filler";
const FILLER_PIECE: usize = 64 << 10;

/// The folder of an act, its mounts and its block device.
pub(crate) struct Testbed {
    /// The daemon.
    pub(crate) daemon: Daemon,
    folder: PathBuf,
    mounts: Vec<PathBuf>,
    device: Option<LoopDevice>,
    server: Option<Server>,
    /// Where the stores of the surrogate are: on no disk that a volume is on.
    memory: tempfile::TempDir,
}

impl Testbed {
    /// Makes the places for a volume of `bytes` and others, and starts a daemon. Without root there is no place but the machine's
    /// disk.
    pub(crate) fn set(programs: &Path, folder: &Path, bytes: u64) -> anyhow::Result<Self> {
        let memory = tempfile::tempdir_in("/dev/shm").context("a folder in memory")?;
        let (daemon, mounts, device) = (Daemon::new(programs, folder), Vec::new(), None);
        let mut testbed = Self { daemon, folder: folder.into(), mounts, device, server: None, memory };
        let config = folder.join("config.toml");
        std::fs::write(&config, format!("workers = {WORKERS}\n")).context("writing the daemon's configuration")?;
        testbed.daemon.arguments = vec!["--config".into(), text(&config)];
        std::fs::create_dir(testbed.directory(Place::Disk)).context("creating a folder")?;
        let served = folder.join("served.img");
        sized(&served, bytes)?;
        testbed.server = Some(Server::start(served, folder)?);
        if crate::alone::is_root() {
            testbed.mount(Place::Memory, &["-t", "tmpfs", "-o", &format!("size={ROOM_BYTES}"), "none"])?;
            testbed.make(Place::Ext4, ROOM_BYTES, &["mkfs.ext4", "-q", "-m", "0"])?;
            testbed.make(Place::Xfs, ROOM_BYTES, &["mkfs.xfs", "-q"])?;
            let words = ["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal"];
            testbed.make(Place::Small, bytes.next_multiple_of(4096) + SMALL_SPARE_BYTES, &words)?;
            let image = folder.join("device.img");
            sized(&image, bytes)?;
            testbed.device = Some(LoopDevice::over(&image)?);
        }
        testbed.daemon.start()?;
        testbed.make_surrogate()?;
        testbed.make_cache()?;
        Ok(testbed)
    }

    fn make_surrogate(&self) -> anyhow::Result<()> {
        let stores =
            ["s0", "s1"].map(|name| format!("file:{},{SURROGATE_STORE}", text(&self.memory.path().join(name))));
        let words = ["surrogate", "create", SURROGATE, "--partition", SURROGATE_PART, "--chunk", "256KiB"];
        let stores = ["--store", &stores[0], "--store", &stores[1]];
        self.daemon.json(&[&words[..], &stores[..]].concat()).map(drop)
    }

    fn make_cache(&self) -> anyhow::Result<()> {
        let store = format!("file:{},{CACHE_STORE}", text(&self.memory.path().join("c0")));
        self.daemon.json(&["cache", "create", CACHE, "--store", &store]).map(drop)
    }

    /// Puts a cache into the path of a volume's guest.
    pub(crate) fn add_cache(&self, volume: &str, mode: &str) -> anyhow::Result<()> {
        let words = ["volume", "layer", "add", volume, "cache", "--cache", CACHE, "--size", CACHE_PART, "--mode", mode];
        self.daemon.json(&words).map(drop)
    }

    /// Takes the caches out that volumes still have, because they have stayed where they were.
    pub(crate) fn take_caches_out(&self) -> anyhow::Result<()> {
        let end = Instant::now() + DRAIN_LIMIT;
        loop {
            let shown = self.daemon.json(&["cache", "show", CACHE])?;
            let parts = shown["partitions"].as_array().cloned().unwrap_or_default();
            if parts.is_empty() {
                return Ok(());
            }
            ensure!(Instant::now() < end, "a cache is not given back: {shown}");
            for part in &parts {
                let volume = part["volume"].as_str().unwrap_or_default();
                // One that has moved has left its part already, and gives it back aside.
                let _ = self.daemon.ask(&["volume", "layer", "rm", volume, "cache"])?;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until no volume has a part of the surrogate: until what it held is where the volume is.
    pub(crate) fn wait_for_surrogate(&self) -> anyhow::Result<()> {
        let end = Instant::now() + DRAIN_LIMIT;
        loop {
            let shown = self.daemon.json(&["surrogate", "show", SURROGATE])?;
            if shown["partitions"].as_array().is_none_or(Vec::is_empty) {
                return Ok(());
            }
            ensure!(Instant::now() < end, "the surrogate is not given back: {shown}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The folder with everything in it.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Where a volume can be.
    pub(crate) fn places(&self) -> Vec<Place> {
        let is_there = |place: &Place| match place {
            Place::Disk => true,
            Place::Device => self.device.is_some(),
            Place::Server => self.server.is_some(),
            Place::Memory | Place::Ext4 | Place::Xfs | Place::Small => !self.mounts.is_empty(),
        };
        Place::ALL.into_iter().filter(is_there).collect()
    }

    fn directory(&self, place: Place) -> PathBuf {
        self.folder.join(match place {
            Place::Memory => "memory",
            Place::Ext4 => "ext4",
            Place::Xfs => "xfs",
            Place::Small => "small",
            Place::Disk | Place::Device | Place::Server => "disk",
        })
    }

    /// The file or block device that a volume at `place` is in; `name` is the file's.
    pub(crate) fn path(&self, place: Place, name: &str) -> PathBuf {
        match (&self.device, &self.server, place) {
            (Some(device), _, Place::Device) => device.path.clone(),
            (_, Some(server), Place::Server) => server.file().into(),
            _ => self.directory(place).join(name),
        }
    }

    /// How a volume at `place`, in the file or block device `path`, is named on the command line.
    pub(crate) fn address(&self, place: Place, path: &Path) -> String {
        match (&self.server, place) {
            (Some(server), Place::Server) => server.address(),
            _ => format!("file:{}", path.display()),
        }
    }

    /// The daemon ends, and the server; the daemon starts, and `length` later the server, for which the volumes wait.
    pub(crate) fn start_without_server(&mut self, length: Duration) -> anyhow::Result<()> {
        // One of two ends politely.
        match length.as_millis().is_multiple_of(2) {
            true => self.daemon.terminate()?,
            false => self.daemon.kill(),
        }
        self.server.as_mut().context("only who has a server is drawn this")?.kill();
        self.daemon.start()?;
        std::thread::sleep(length);
        self.server.as_mut().context("it is there")?.go_on()?;
        self.wait_until_up()
    }

    /// Waits until all volumes are up: by themselves, or because the daemon is restarted as they say.
    fn wait_until_up(&mut self) -> anyhow::Result<()> {
        let mut end = Instant::now() + RETURN_LIMIT;
        let mut is_restarted = false;
        loop {
            let volumes = self.daemon.json(&["volume", "ls"])?;
            let mut volumes = volumes.as_array().into_iter().flatten();
            let Some(down) = volumes.find(|volume| !volume["problem"].is_null()) else { return Ok(()) };
            if Instant::now() >= end {
                // What whoever asks something of the volume is told, too.
                let name = down["name"].as_str().unwrap_or_default();
                let told = self.daemon.ask(&["plan", name, "--to", &text(&self.folder.join("nowhere"))])?;
                let problem = format!("{}; {}", down["problem"], told.map_or_else(|(_, said)| said, |_| String::new()));
                let is_named = problem.contains("restart");
                ensure!(is_named && !is_restarted, "the server is back, and the volume is not: {problem}");
                println!("     restarted as the volume says: {problem}");
                self.daemon.terminate()?;
                self.daemon.start()?;
                (end, is_restarted) = (Instant::now() + RETURN_LIMIT, true);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// All files at all places.
    pub(crate) fn files(&self) -> anyhow::Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        for place in Place::ALL.into_iter().filter(|place| place.is_file()) {
            let Ok(entries) = std::fs::read_dir(self.directory(place)) else { continue };
            for entry in entries {
                let path = entry.context("listing files")?.path();
                if !path.ends_with("lost+found") {
                    files.push(path);
                }
            }
        }
        Ok(files)
    }

    /// Fills the small file system to the last block.
    pub(crate) fn fill(&self) -> anyhow::Result<()> {
        fill(&self.directory(Place::Small).join(FILLER))
    }

    /// Gives the small file system its room again.
    pub(crate) fn empty(&self) {
        // It is there only if it was filled.
        let _ = std::fs::remove_file(self.directory(Place::Small).join(FILLER));
    }

    /// Makes a file system in a file, and mounts it.
    fn make(&mut self, place: Place, bytes: u64, words: &[&str]) -> anyhow::Result<()> {
        let image = self.directory(place).with_extension("image");
        sized(&image, bytes)?;
        run(words[0], &[&words[1..], &[&text(&image)]].concat())?;
        self.mount(place, &["-o", "loop", &text(&image)])
    }

    fn mount(&mut self, place: Place, words: &[&str]) -> anyhow::Result<()> {
        let directory = self.directory(place);
        std::fs::create_dir(&directory).context("creating a folder")?;
        run("mount", &[words, &[&text(&directory)]].concat())?;
        self.mounts.push(directory);
        Ok(())
    }

    /// Ends everything, and copies what would be gone with its mounts into the folder.
    pub(crate) fn keep(&mut self) -> anyhow::Result<()> {
        self.daemon.kill();
        for mount in &self.mounts {
            let kept = PathBuf::from(format!("{}-files", mount.display()));
            run("cp", &["-a", "--sparse=always", &text(mount), &text(&kept)])?;
        }
        Ok(())
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        self.daemon.kill();
        for mount in self.mounts.drain(..) {
            // What is still busy goes with its last user.
            let _ = run("umount", &["-l", &text(&mount)]);
        }
    }
}

/// A block device over a file, which is gone when nobody has it open any more.
struct LoopDevice {
    path: PathBuf,
    _open: std::fs::File,
}

impl LoopDevice {
    fn over(image: &Path) -> anyhow::Result<Self> {
        let printed = output_of(Path::new("losetup"), &["--find".into(), "--show".into(), text(image)])?;
        let path = PathBuf::from(printed.trim());
        let open = std::fs::File::open(&path).with_context(|| format!("opening {}", path.display()))?;
        // Detaching what is in use detaches it when it is closed last.
        run("losetup", &["--detach", &text(&path)])?;
        Ok(Self { path, _open: open })
    }
}

/// A path as a word.
pub(crate) fn text(path: &Path) -> String {
    path.display().to_string()
}

fn sized(path: &Path, bytes: u64) -> anyhow::Result<()> {
    let file = std::fs::File::create(path).with_context(|| format!("creating {}", path.display()))?;
    file.set_len(bytes).context("sizing a file")
}

/// Fills the file system of `path` to the last block with a file there.
pub(crate) fn fill(path: &Path) -> anyhow::Result<()> {
    let mut file = std::fs::File::options().create(true).append(true).open(path).context("filling")?;
    let piece = vec![1; FILLER_PIECE];
    for length in [FILLER_PIECE, 4096] {
        while file.write_all(&piece[..length]).is_ok() {}
    }
    // Blocks that were only promised are taken now.
    let _ = file.sync_data();
    Ok(())
}

/// Runs a program, which must succeed.
pub(crate) fn run(program: &str, words: &[&str]) -> anyhow::Result<()> {
    let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
    output_of(Path::new(program), &words).map(drop)
}

/// What BLAKE3 makes of a file.
pub(crate) fn digest_of(path: &Path) -> anyhow::Result<String> {
    let printed = output_of(Path::new("b3sum"), &["--no-names".into(), text(path)])?;
    match printed.trim() {
        "" => bail!("b3sum printed nothing"),
        digest => Ok(digest.to_owned()),
    }
}

/// The end of what a daemon has logged.
pub(crate) fn tell_log(daemon: &Daemon) {
    let log = daemon.log();
    let lines: Vec<&str> = log.lines().collect();
    eprintln!("\n{}", lines[lines.len().saturating_sub(LOG_LINES_TOLD)..].join("\n"));
}
