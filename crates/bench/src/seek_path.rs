//! A file on ext4 on a block device that takes a hard disk's time: see crates/sim/examples/seek_disk.rs.
//!
//! ```text
//!  image on ext4 ─▶ loop device, direct IO ─▶ FUSE (nbdfuse) ─▶ NBD ─▶ seek_disk: the model's time ─▶ file in memory
//! ```
//!
//! The file system is made and filled past the model, which takes a second.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use transhume_guest::process::{Process, output_of};

use crate::server::path_word;

/// Where the disk is on the page.
const DISK: &str = "disk.img";
/// The image lies in pieces of this size, in an order of their own, with others between them.
const PIECE_BYTES: u64 = 32 << 20;

/// The path; all of it is gone when this is dropped.
pub(crate) struct SeekPath {
    /// The image.
    pub(crate) image: PathBuf,
    /// How many extents the image has on its file system.
    pub(crate) pieces: u64,
    // Dropped in this order.
    _mounted: FileSystem,
    _loop_device: LoopDevice,
    _fuse: FuseMount,
    _nbdfuse: Process,
    _disk: Process,
    statistics: PathBuf,
}

/// Which disk.
pub(crate) struct Disk {
    /// How large the image is.
    pub(crate) image_bytes: u64,
    /// The disk has this part of its cylinders.
    pub(crate) shrink: u64,
    /// The model's clock goes so many times as fast.
    pub(crate) speed: u32,
}

impl SeekPath {
    /// Makes the disk in `folder`, which is in memory, and the way to it. Needs root.
    pub(crate) fn create(seek_disk: &Path, folder: &Path, disk: &Disk) -> anyhow::Result<Self> {
        ensure!(rustix::process::geteuid().is_root(), "only root may mount and attach");
        let (file, fuse, mount) = (folder.join(DISK), folder.join("fuse"), folder.join("fs"));
        for directory in [&fuse, &mount] {
            std::fs::create_dir(directory).context("creating a place to mount at")?;
        }
        let pieces = fill(&file, &mount, disk.image_bytes)?;
        let (socket, statistics) = (folder.join("disk.sock"), folder.join("disk.statistics"));
        let words = [
            ("--socket", path_word(&socket)),
            ("--file", path_word(&file)),
            ("--shrink", disk.shrink.to_string()),
            ("--speed", disk.speed.to_string()),
            ("--statistics", path_word(&statistics)),
        ];
        let words: Vec<String> = words.into_iter().flat_map(|(name, value)| [name.to_owned(), value]).collect();
        let log = folder.join("disk.log");
        let mut served = start_at_once(&path_word(seek_disk), words, &log)?;
        served.wait_for(&socket, &log)?;
        let through = fuse.join(DISK);
        let words = vec![path_word(&through), format!("nbd+unix:///?socket={}", path_word(&socket))];
        let log = folder.join("nbdfuse.log");
        let mut nbdfuse = start_at_once("nbdfuse", words, &log)?;
        nbdfuse.wait_for(&through, &log)?;
        let fuse = FuseMount(fuse);
        let loop_device = LoopDevice::attach(&through, true)?;
        let mounted = FileSystem::mount(&loop_device, mount)?;
        let image = mounted.0.join("volume.raw");
        Ok(Self {
            image,
            pieces,
            _mounted: mounted,
            _loop_device: loop_device,
            _fuse: fuse,
            _nbdfuse: nbdfuse,
            _disk: served,
            statistics,
        })
    }

    /// By how many milliseconds answers were later than the model's, on average and at most, on the model's clock.
    pub(crate) fn lateness(&self) -> anyhow::Result<(f64, f64)> {
        let text = std::fs::read_to_string(&self.statistics).context("reading what the disk counted")?;
        let (mut answers, mut late, mut most) = (0.0, 0.0, 0.0_f64);
        for line in text.lines() {
            let field = |name: &str| {
                let value = line.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
                value.and_then(|value| value.parse::<f64>().ok()).with_context(|| format!("no {name} in {line}"))
            };
            answers += field("answers")?;
            late += field("answers")? * field("late_us")?;
            most = most.max(field("late_us_most")?);
        }
        ensure!(answers > 0.0, "the disk was never asked");
        Ok((late / answers / 1e3, most / 1e3))
    }
}

/// Starts a program that runs as soon as it can: a disk does not wait for a processor that others use.
fn start_at_once(program: &str, words: Vec<String>, log: &Path) -> anyhow::Result<Process> {
    let words: Vec<String> = ["--rr", "1", program].map(str::to_owned).into_iter().chain(words).collect();
    Process::start(Path::new("chrt"), &words, log)
}

/// Makes the file system, with an image in pieces that lie in another order than in the image, and spaces between them. Gives the number
/// of its extents.
fn fill(file: &Path, mount: &Path, image_bytes: u64) -> anyhow::Result<u64> {
    let disk = File::create(file).context("creating the disk")?;
    disk.set_len(image_bytes * 5 / 2).context("sizing the disk")?;
    let words = ["-q", "-F", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0", &path_word(file)];
    tool("mkfs.ext4", &words)?;
    let loop_device = LoopDevice::attach(file, false)?;
    let mounted = FileSystem::mount(&loop_device, mount.to_owned())?;
    let create = |name: &str| File::create(mounted.0.join(name)).context("creating a file on the disk");
    let (image, other) = (create("volume.raw")?, create("other.raw")?);
    let noise = noise();
    let count = image_bytes / PIECE_BYTES;
    for turn in 0..count {
        // 3 and the count have no common divisor: each piece has its turn.
        let piece = turn * 3 % count;
        for place in 0..PIECE_BYTES / noise.len() as u64 {
            let offset = piece * PIECE_BYTES + place * noise.len() as u64;
            image.write_all_at(&noise, offset).context("filling the image")?;
        }
        image.sync_data().context("filling the image")?;
        other.write_all_at(&noise, turn * noise.len() as u64).context("filling the disk")?;
        other.sync_data().context("filling the disk")?;
    }
    let told = output_of(Path::new("filefrag"), &[path_word(&mounted.0.join("volume.raw"))])?;
    let pieces = told.rsplit(": ").next().and_then(|words| words.split(' ').next()?.parse().ok());
    pieces.with_context(|| format!("filefrag counts extents: {told}"))
}

/// A MiB that nothing makes shorter.
fn noise() -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let words = (0..1 << 17).flat_map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.collect()
}

/// A file as a block device.
struct LoopDevice(String);

impl LoopDevice {
    fn attach(file: &Path, is_direct: bool) -> anyhow::Result<Self> {
        let direct = if is_direct { "--direct-io=on" } else { "--direct-io=off" };
        let device = Self(tool("losetup", &["--find", "--show", direct, &path_word(file)])?.trim().to_owned());
        let told = tool("losetup", &["--list", "--noheadings", "--output", "DIO", &device.0])?;
        ensure!(told.trim() == if is_direct { "1" } else { "0" }, "the loop device has its own idea of direct IO");
        Ok(device)
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        if let Err(error) = tool("losetup", &["--detach", &self.0]) {
            eprintln!("{error:#}");
        }
    }
}

/// A file system, unmounted when this is dropped.
struct FileSystem(PathBuf);

impl FileSystem {
    fn mount(device: &LoopDevice, mount: PathBuf) -> anyhow::Result<Self> {
        tool("mount", &["-o", "noatime", &device.0, &path_word(&mount)])?;
        Ok(Self(mount))
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        unmount(&[&path_word(&self.0)]);
    }
}

/// Where nbdfuse is mounted.
struct FuseMount(PathBuf);

impl Drop for FuseMount {
    fn drop(&mut self) {
        // The loop device lets its file go a moment after it is detached.
        unmount(&["--lazy", &path_word(&self.0)]);
    }
}

fn unmount(words: &[&str]) {
    if let Err(error) = tool("umount", words) {
        eprintln!("{error:#}");
    }
}

fn tool(program: &str, words: &[&str]) -> anyhow::Result<String> {
    let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
    output_of(Path::new(program), &words)
}
