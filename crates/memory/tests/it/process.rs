//! The memory of a real process: a child with the library preloaded writes to a shared file with several threads as fast as it can
//! while the engine copies it to another file. Then it is stopped, and both files are compared byte by byte.
#![allow(unsafe_code, reason = "the child maps memory")]

use std::fs::File;
use std::io::{BufRead, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use env::{EnvRef, RealEnv};
use tokio::net::UnixStream;
use transhume_guest::HugePages;
use transhume_memory::{
    DirtyMap, Error, ErrorKind, GuestMemory, Lane, PAGE_BYTES, Precopy, PrecopyOptions, ProcessMemory, RamFile,
    Receiver, Region, TargetMemory, Tracking, Unpaced, foreign_mappings, mapped_files,
};

const CHILD: &str = "TRANSHUME_TEST_CHILD";
const VARIABLE: &str = "TRANSHUME_PRELOAD_SOCKET";
const THREADS: u64 = 3;
const PATIENCE: Duration = Duration::from_secs(20);

/// Where cargo has put the library.
fn library() -> PathBuf {
    let own = std::env::current_exe().expect("this program");
    let mut folders = own.ancestors().skip(1);
    folders.find_map(|folder| Some(folder.join("libtranshume_preload.so")).filter(|path| path.exists())).expect("built")
}

/// A process that writes to its memory, or would.
struct Writer {
    child: Child,
    socket: PathBuf,
    ram: PathBuf,
    folder: tempfile::TempDir,
    _sockets: tempfile::TempDir,
}

impl Writer {
    fn start(bytes: u64) -> Self {
        Self::start_in(bytes, Path::new("/dev/shm"))
    }

    /// With its memory below `place`.
    fn start_in(bytes: u64, place: &Path) -> Self {
        let folder = tempfile::tempdir_in(place).expect("a folder");
        let sockets = tempfile::tempdir().expect("a folder");
        let (socket, ram) = (sockets.path().join("socket"), folder.path().join("ram"));
        File::create(&ram).expect("made").set_len(bytes).expect("sized");
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--exact", "process::child", "--nocapture", "--test-threads=1"]).env(CHILD, &ram);
        command.env("LD_PRELOAD", library()).env(VARIABLE, &socket);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("started");
        let mut this = Self { child, socket, ram, folder, _sockets: sockets };
        assert_eq!(this.told(), "mapped");
        this
    }

    fn told(&mut self) -> String {
        let output = self.child.stdout.as_mut().expect("piped");
        let (mut line, mut byte) = (Vec::new(), [0]);
        loop {
            output.read_exact(&mut byte).expect("the child lives");
            if byte[0] != b'\n' {
                line.push(byte[0]);
                continue;
            }
            if let Some(said) = line.strip_prefix(b"child: ") {
                return String::from_utf8_lossy(said).into_owned();
            }
            line.clear();
        }
    }

    fn tell(&mut self, what: &str) -> String {
        writeln!(self.child.stdin.as_mut().expect("piped"), "{what}").expect("told");
        self.told()
    }

    fn memory(&self) -> Result<ProcessMemory, Error> {
        let pid = self.child.id();
        let files = mapped_files(pid)?;
        let file = files.into_iter().find(|file| Path::new(&file.name) == self.ram).expect("it is mapped");
        let began = Instant::now();
        let tracking = loop {
            match Tracking::begin(pid, &self.socket, &[&file.name]) {
                Ok(tracking) => break tracking,
                Err(error) => assert!(began.elapsed() < PATIENCE, "{error}"),
            }
        };
        ProcessMemory::open(pid, vec![("ram".to_owned(), file)], tracking)
    }

    /// A target's memory of the same regions.
    fn target(&self, regions: &[Region]) -> (Arc<RamFile>, PathBuf) {
        let path = self.folder.path().join("target");
        // One of an earlier test of the same process.
        let _ = std::fs::remove_file(&path);
        let mut target = RamFile::new();
        for region in regions {
            target.create(region.clone(), &path).expect("made");
        }
        (Arc::new(target), path)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// No test: what the child does.
#[test]
fn child() {
    let Some(ram) = std::env::var_os(CHILD) else { return };
    let file = File::options().read(true).write(true).open(Path::new(&ram)).expect("opened");
    let bytes = file.metadata().expect("there").len() as usize;
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping of a file that is as long.
    let memory =
        unsafe { libc::mmap(std::ptr::null_mut(), bytes, rights, libc::MAP_SHARED, file.as_raw_fd(), 0) } as usize;
    println!("\nchild: mapped");
    let stop = Arc::new(AtomicBool::new(false));
    let mut threads = Vec::new();
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let words: Vec<u64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
        match line.split(' ').next() {
            // Writes anywhere in the first part of the memory, until it is told to stop.
            Some("run") => {
                let limit = words[0] / 8;
                for thread in 0..THREADS {
                    let stop = Arc::clone(&stop);
                    threads.push(std::thread::spawn(move || {
                        let mut state = thread + 1;
                        let mut writes = 0_u64;
                        while !stop.load(Ordering::Relaxed) {
                            state =
                                state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                            let at = (state >> 16) % limit * 8;
                            // SAFETY: it is within the mapping, and every thread may write anything anywhere.
                            unsafe { (memory as *mut u64).byte_add(at as usize).write_volatile(state) };
                            writes += 1;
                        }
                        writes
                    }));
                }
                println!("child: runs");
            }
            Some("stop") => {
                stop.store(true, Ordering::Relaxed);
                let writes: u64 = threads.drain(..).map(|thread| thread.join().expect("it ends")).sum();
                stop.store(false, Ordering::Relaxed);
                println!("child: {writes} writes");
            }
            // Fills a part with something that is no zero.
            Some("fill") => {
                for at in (words[0]..words[0] + words[1]).step_by(8) {
                    // SAFETY: it is within the mapping.
                    unsafe { (memory as *mut u64).byte_add(at as usize).write_volatile(at | 1) };
                }
                println!("child: filled");
            }
            // Of so many pages each writes to the first so many.
            Some("touch") => {
                let pages = bytes as u64 / PAGE_BYTES;
                for page in (0..pages).step_by(words[0] as usize).flat_map(|page| page..(page + words[1]).min(pages)) {
                    // SAFETY: it is within the mapping.
                    unsafe { (memory as *mut u64).byte_add((page * PAGE_BYTES) as usize).write_volatile(words[2]) };
                }
                println!("child: touched");
            }
            _ => println!("child: what is {line}?"),
        }
    }
}

fn first_difference(one: &Path, other: &Path) -> Option<u64> {
    let (one, other) = (File::open(one).expect("there"), File::open(other).expect("there"));
    let length = one.metadata().expect("there").len();
    assert_eq!(length, other.metadata().expect("there").len());
    let (mut ours, mut theirs) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    (0..length).step_by(1 << 20).find_map(|at| {
        let count = (length - at).min(1 << 20) as usize;
        one.read_exact_at(&mut ours[..count], at).expect("read");
        other.read_exact_at(&mut theirs[..count], at).expect("read");
        let found = ours[..count].iter().zip(&theirs[..count]).position(|(ours, theirs)| ours != theirs)?;
        Some(at + found as u64)
    })
}

fn lanes(env: &EnvRef, receiver: &Arc<Receiver>, count: usize) -> Vec<Lane> {
    let lane = |_| {
        let (near, far) = UnixStream::pair().expect("a pair");
        let receiver = Arc::clone(receiver);
        env.spawn(Box::pin(async move {
            // The sender hears of it.
            let _ = receiver.serve(Box::new(far)).await;
        }));
        Lane { transport: Box::new(near), env: env.clone() }
    };
    (0..count).map(lane).collect()
}

/// Copies the memory of a process that writes all the time, and gives where it differs and the file of the target.
async fn copy(writer: &mut Writer, memory: Arc<dyn GuestMemory>, streams: usize) -> Option<u64> {
    let env: EnvRef = Arc::new(RealEnv::new());
    let (target, path) = writer.target(memory.regions());
    let receiver = Arc::new(Receiver::new(target, [3; 16]));
    let options = PrecopyOptions::default();
    let mut precopy = Precopy::new(env.clone(), memory, options, ([3; 16], Arc::new(Unpaced))).expect("begun");
    precopy.connect(lanes(&env, &receiver, streams)).await.expect("connected");
    assert_eq!(writer.tell(&format!("run {}", 24 << 20)), "runs");
    let reason = precopy.converge().await.expect("converged");
    let until = Instant::now() + Duration::from_millis(300);
    precopy.keep_up(|| Instant::now() > until).await.expect("kept up");
    let writes = writer.tell("stop");
    let stopped = Instant::now();
    precopy.finish().await.expect("finished");
    precopy.verify_clean().expect("nothing was written since");
    let progress = precopy.watch()();
    println!("{streams} streams: {writes}, {reason:?}, the rest took {:?}, {progress:?}", stopped.elapsed());
    assert!(receiver.is_complete());
    first_difference(&writer.ram, &path)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_writes_as_fast_as_it_can_arrives_whole() {
    for streams in [1, 2, 4] {
        let mut writer = Writer::start(64 << 20);
        assert_eq!(writer.tell(&format!("fill {} {}", 8 << 20, 40 << 20)), "filled");
        let memory = writer.memory().expect("tracked");
        assert_eq!(copy(&mut writer, Arc::new(memory), streams).await, None);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_memory_in_huge_pages_arrives_whole() {
    let pages = HugePages::take(40).expect("huge pages; as root, with 80 MiB free");
    let mut writer = Writer::start_in(32 << 20, pages.path());
    assert_eq!(writer.tell(&format!("fill {} {}", 4 << 20, 8 << 20)), "filled");
    let memory = writer.memory().expect("tracked");
    assert_eq!(GuestMemory::regions(&memory)[0].page_bytes, 2 << 20);
    let mut dirty = DirtyMap::new(GuestMemory::regions(&memory));
    memory.take_dirty(&mut dirty).expect("scanned");
    dirty.clear();
    assert_eq!(writer.tell(&format!("fill {} 8", 6 << 20)), "filled");
    memory.take_dirty(&mut dirty).expect("scanned");
    assert_eq!(dirty.runs().map(|run| (run.page, run.count)).collect::<Vec<_>>(), [(3 * 512, 512)]);
    assert_eq!(copy(&mut writer, Arc::new(memory), 2).await, None);
}

/// A dirty log that loses one page of each scan.
struct Forgetful(ProcessMemory);

impl GuestMemory for Forgetful {
    fn regions(&self) -> &[Region] {
        GuestMemory::regions(&self.0)
    }
    fn take_dirty(&self, into: &mut DirtyMap) -> Result<(), Error> {
        self.0.take_dirty(into)?;
        if let Some(first) = into.next_run(0, 0, 1) {
            into.remove(first);
        }
        Ok(())
    }
    fn read(&self, region: usize, page: u64, into: &mut [u8]) -> Result<(), Error> {
        self.0.read(region, page, into)
    }
    fn next_data(&self, region: usize, page: u64) -> Result<Option<std::ops::Range<u64>>, Error> {
        self.0.next_data(region, page)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dirty_log_that_loses_a_page_is_caught() {
    let mut writer = Writer::start(32 << 20);
    let memory = Forgetful(writer.memory().expect("tracked"));
    assert_ne!(copy(&mut writer, Arc::new(memory), 2).await, None, "the comparison must see it");
}

#[test]
fn a_large_sparse_memory_is_scanned_within_its_limits() {
    let mut writer = Writer::start(64 << 30);
    let memory = writer.memory().expect("tracked");
    let regions = GuestMemory::regions(&memory).to_vec();
    let mut dirty = DirtyMap::new(&regions);
    // 1 % of it is written: 64 pages that follow each other, or one page here and there, which takes every page table.
    for (pages, every) in [(64_u64, 6400_u64), (1, 100)] {
        let mut spans = Vec::new();
        for value in 0..5 {
            assert_eq!(writer.tell(&format!("touch {every} {pages} {value}")), "touched");
            dirty.clear();
            let began = Instant::now();
            memory.take_dirty(&mut dirty).expect("scanned");
            spans.push(began.elapsed());
            // The first scan finds pages of new page tables, too.
            if value > 0 {
                let full = (64_u64 << 30) / PAGE_BYTES / every * pages;
                assert!((full..=full + pages).contains(&dirty.count()), "{} of {full}", dirty.count());
            }
        }
        dirty.clear();
        let began = Instant::now();
        memory.take_dirty(&mut dirty).expect("scanned");
        let idle = began.elapsed();
        assert!(dirty.is_empty());
        println!("64 GiB, {pages} of {every} pages written: scans of {spans:?}; idle {idle:?}");
    }
    let page = memory.next_data(0, 64).expect("told").expect("there is more");
    assert_eq!(page, 100..101);
}

#[test]
fn who_else_has_the_file_mapped_is_found_and_a_process_that_has_ended_is_told() {
    let mut writer = Writer::start(4 << 20);
    let files = mapped_files(writer.child.id()).expect("it lives");
    let file = files.iter().find(|file| Path::new(&file.name) == writer.ram).expect("it is mapped");
    assert_eq!(foreign_mappings(&file.identity, writer.child.id()), Vec::<u32>::new());
    assert_eq!(foreign_mappings(&file.identity, 1), [writer.child.id()]);
    let memory = writer.memory().expect("tracked");
    let (target, _) = writer.target(GuestMemory::regions(&memory));
    assert_eq!(TargetMemory::regions(&*target), GuestMemory::regions(&memory));
    writer.child.kill().expect("killed");
    writer.child.wait().expect("it ends");
    let error = memory.take_dirty(&mut DirtyMap::new(GuestMemory::regions(&memory))).expect_err("it has ended");
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
}
