//! Opening: what kind of file it is, and which engine suits it.

use std::fs::File;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

use block::{BLOCK_BYTES, Bytes, Error, ErrorKind, Geometry, Result};
use env::Env;
use parking_lot::Mutex;
use rustix::fs::{AtFlags, StatxFlags};

use super::{Engine, FileBackend, Latch, zeroes};
use crate::calls::size_of;
use crate::executor::Executor;
use crate::file_system::{has_lengths_in_memory, is_in_memory};
use crate::helper::{HelpedFile, Helpers};
use crate::lock::{Strength, lock_for_serving};
use crate::open_file::OpenFiles;
use crate::{BackendSpec, CacheMode, obstacle};

/// The largest read or data write: what the NBD protocol's clients send at most, and the largest buffer.
const TRANSFER_BYTES_MAX: u32 = 32 << 20;

/// Requests of a killed process were seen to go on for 56 ms; a busy disk takes longer.
const LOCK_WAIT: Duration = Duration::from_secs(5);

/// Whether the volume may be changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// Reads and writes.
    #[default]
    ReadWrite,
    /// Reads only.
    ReadOnly,
}

/// How a backend is to be opened.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Whether the volume may be changed.
    pub access: Access,
    /// Let the volume appear larger than the file, so that a container in it can grow. Reads past the file's end give
    /// zeroes, writes there extend the file.
    pub advertised_size: Option<Bytes>,
    /// Let the volume end here even if the file is larger, as for a volume that was moved to a larger block device.
    pub size_limit: Option<Bytes>,
    /// The least unit of requests, even if this file takes finer ones: for clients that may meet a coarser one later.
    /// It does not hold where the volume's size is no multiple of it.
    pub request_alignment_min: u32,
    /// The coarsest unit of requests that clients were promised. A file that takes only coarser ones past the page cache is
    /// reached through it, unless that was ruled out; a block device is refused.
    pub request_alignment_max: Option<u32>,
    /// Whether discards, and zeroes that may unmap, give space back. Without it discards do nothing.
    pub trim: bool,
    /// How long to wait for the lock of a server that may be dead with requests still under way. `None` takes no lock:
    /// for inspecting a file that another process serves.
    pub lock_wait: Option<Duration>,
    /// Processes that carry out what the kernel may hold for ever; without them this one does.
    pub helpers: Option<Arc<Helpers>>,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            access: Access::ReadWrite,
            advertised_size: None,
            size_limit: None,
            request_alignment_min: 1,
            request_alignment_max: None,
            trim: true,
            lock_wait: Some(LOCK_WAIT),
            helpers: None,
        }
    }
}

impl OpenOptions {
    /// For reading only.
    #[must_use]
    pub fn read_only() -> Self {
        Self { access: Access::ReadOnly, ..Self::default() }
    }

    /// For a container that may grow up to `size` and is never trimmed.
    #[must_use]
    pub fn growing(size: Bytes) -> Self {
        Self { advertised_size: Some(size.align_up(BLOCK_BYTES)), trim: false, ..Self::default() }
    }
}

/// What direct IO wants to be multiples of.
#[derive(Clone, Copy)]
struct Alignment {
    memory: u32,
    request: u32,
}

/// A file or block device that is open, and how it is reached.
struct Opened {
    is_block_device: bool,
    engine: Engine,
    file: File,
    tail: Option<File>,
    alignment: Alignment,
    length_waits: bool,
}

impl Opened {
    fn open(spec: &BackendSpec, writable: bool, alignment_max: Option<u32>) -> Result<Self> {
        let path = spec.path();
        let shown = path.display();
        let attempt = |error: std::io::Error| Error::from_os(error, format!("looking at {shown}"));
        // Looked at before it is opened: opening a pipe would wait for its other end.
        let kind = std::fs::metadata(path).map_err(attempt)?.file_type();
        let is_block_device = kind.is_block_device();
        if !kind.is_file() && !is_block_device {
            let context = format!("{shown} is neither a file nor a block device");
            return Err(Error::new(ErrorKind::Invalid, context));
        }
        let file = open_at(path, writable, false)?;
        let in_memory = !is_block_device && is_in_memory(&file).map_err(attempt)?;
        let length_waits = !is_block_device && !has_lengths_in_memory(&file).map_err(attempt)?;

        let (engine, file, tail, alignment) = match (spec.cache, in_memory) {
            (CacheMode::Direct, true) => {
                let context = format!(
                    "{shown} is in memory, where there is no direct IO (O_DIRECT is accepted and does nothing): \
                     use cache=auto"
                );
                return Err(Error::new(ErrorKind::Unsupported, context));
            }
            (CacheMode::Auto | CacheMode::Page, true) => (Engine::Memory, file, None, Alignment::NONE),
            (CacheMode::Page, false) => (Engine::PageCache, file, None, Alignment::NONE),
            (CacheMode::Auto | CacheMode::Direct, false) => match open_at(path, writable, true) {
                Ok(direct) => {
                    let alignment = Alignment::of(&direct, is_block_device);
                    let is_too_coarse = alignment_max.is_some_and(|most| alignment.request > most);
                    if is_too_coarse && !is_block_device && spec.cache == CacheMode::Auto {
                        let (engine, alignment, tail) = (Engine::PageCache, Alignment::NONE, None);
                        return Ok(Self { is_block_device, engine, file, tail, alignment, length_waits });
                    }
                    (Engine::Direct, direct, (!is_block_device).then_some(file), alignment)
                }
                Err(error) if spec.cache == CacheMode::Auto && error.kind() == ErrorKind::Invalid => {
                    (Engine::PageCache, file, None, Alignment::NONE)
                }
                Err(error) => return Err(error),
            },
        };
        Ok(Self { is_block_device, engine, file, tail, alignment, length_waits })
    }
}

impl FileBackend {
    /// Opens what `spec` names and locks it against other servers.
    ///
    /// # Errors
    /// One line that says what is in the way and what to do about it; busy if another server has it.
    pub async fn open(spec: &BackendSpec, options: &OpenOptions, env: &dyn Env) -> Result<Self> {
        let path = spec.path();
        let writable = options.access == Access::ReadWrite;
        let shown = path.display();
        let attempt = |error: std::io::Error| Error::from_os(error, format!("looking at {shown}"));
        // A file system that does not answer blocks one thread of its own, and the caller.
        let (threads, named) = (Executor::threads(), spec.clone());
        let alignment_max = options.request_alignment_max;
        let opening = threads.run(move || Ok(Opened::open(&named, writable, alignment_max))).await;
        let opened = opening.map_err(attempt)??;
        let Opened { is_block_device, engine, file, tail, alignment, length_waits } = opened;
        if let Some(most) = alignment_max.filter(|most| alignment.request > *most) {
            let context = format!(
                "{shown} has sectors of {} bytes now, and its clients were promised that requests of {most} bytes are served",
                alignment.request
            );
            return Err(Error::new(ErrorKind::Misaligned, context));
        }
        if let Some(limit) = options.lock_wait {
            let strength = if writable { Strength::Exclusive } else { Strength::Shared };
            lock_for_serving(&file, path, strength, limit, env).await?;
        }
        // The size is looked at under the lock: a dead server's writes may have extended the file until now.
        let look = move || Ok((size_of(&file, is_block_device)?, file));
        let (size, file) = threads.run(look).await.map_err(attempt)?;
        if size == 0 && options.advertised_size.is_none() {
            return Err(Error::new(ErrorKind::Invalid, format!("{shown} is empty: a volume has at least one byte")));
        }
        let visible = options.advertised_size.map_or(Bytes(size), |advertised| advertised.max(Bytes(size)));
        let visible = options.size_limit.map_or(visible, |limit| limit.min(visible));
        let wanted = options.request_alignment_min;
        let alignment_min = if visible.is_multiple_of(wanted.into()) { wanted } else { 1 };
        let geometry = Geometry {
            size: Bytes(size),
            request_alignment: alignment.request.max(alignment_min),
            preferred_bytes: alignment.request.max(4096),
            transfer_bytes_max: TRANSFER_BYTES_MAX,
            read_only: !writable,
        };
        let helpers = options.helpers.clone().filter(|_| engine != Engine::Memory);
        let (has_tail, is_direct) = (tail.is_some(), engine == Engine::Direct);
        let help = move || match helpers {
            Some(helpers) => {
                let helped = HelpedFile::new(&helpers, file, tail, is_direct)?;
                Ok((helped.files().clone(), Some(helped)))
            }
            None => Ok((OpenFiles::here(file, tail), None)),
        };
        let (files, helped) = threads.run(help).await.map_err(attempt)?;
        let executor = if engine == Engine::Memory { Executor::threads() } else { Executor::rings() };
        Ok(Self {
            path: path.to_owned(),
            engine,
            file: files.file,
            tail: files.witness.filter(|_| has_tail),
            executor: executor.with_helper(helped),
            is_block_device,
            size: AtomicU64::new(size),
            advertised: options.advertised_size,
            limit: options.size_limit,
            trim: options.trim,
            geometry,
            memory_alignment: alignment.memory as usize,
            sync_failure: Latch::default(),
            was_cut: AtomicBool::new(false),
            guards_length: AtomicBool::new(false),
            length_waits,
            can: zeroes::Abilities::default(),
            data_run: Mutex::new(None),
        })
    }
}

/// What requests past the page cache must be multiples of; 1 where there is no way past it.
pub(crate) fn direct_alignment_of(file: &File) -> u32 {
    if is_in_memory(file).unwrap_or(false) { 1 } else { Alignment::of(file, false).request }
}

fn open_at(path: &Path, writable: bool, direct: bool) -> Result<File> {
    let flags = if direct { libc::O_DIRECT } else { 0 };
    let attempt = File::options().read(true).write(writable).custom_flags(flags).open(path);
    attempt.map_err(|error| {
        let mode = match (direct, writable) {
            (true, _) => " past the page cache",
            (false, true) => " for reading and writing",
            (false, false) => "",
        };
        match obstacle::of_refusal(path, &error) {
            Some(obstacle) => Error::from_os(error, format!("opening {}{mode} ({obstacle})", path.display())),
            None => Error::from_os(error, format!("opening {}{mode}", path.display())),
        }
    })
}

impl Alignment {
    const NONE: Self = Self { memory: 1, request: 1 };

    /// What the kernel says, or else what every disk takes.
    fn of(file: &File, is_block_device: bool) -> Self {
        let logical = if is_block_device { rustix::fs::ioctl_blksszget(file).unwrap_or(4096) } else { 512 };
        let wanted = StatxFlags::BASIC_STATS | StatxFlags::DIOALIGN;
        let known = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, wanted).ok().filter(|answer| {
            answer.stx_mask & StatxFlags::DIOALIGN.bits() != 0 && answer.stx_dio_offset_align.is_power_of_two()
        });
        match known {
            Some(answer) => Self {
                memory: answer.stx_dio_mem_align.max(1).next_power_of_two().min(4096),
                request: answer.stx_dio_offset_align.max(if is_block_device { logical } else { 1 }),
            },
            None => Self { memory: 4096, request: logical },
        }
    }
}
