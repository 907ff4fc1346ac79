//! The memory of another process: a named file that it maps shared, whose dirty log is the kernel's (`PAGEMAP_SCAN`, Linux 6.7).
//!
//! The process itself registers the mapping with a userfaultfd ([`Tracking`]); from here every scan says which pages were written
//! since the last one and protects them again. Writes through other mappings of the file are not seen: [`foreign_mappings`] tells
//! who has one.
//!
//! The file is read by `pread`, so that holes stay holes, and no page tables grow here. It is opened through `/proc/PID/map_files`:
//! whatever its name says by now, it is what the process has mapped.

mod maps;
mod pagemap;
mod tracking;

use std::fs::File;
use std::ops::Range;

use parking_lot::Mutex;
use rustix::fs::SeekFrom;
use rustix::io::Errno;

pub use maps::{MappedFile, Mapping, foreign_mappings, mapped_files};
pub use tracking::Tracking;

use self::pagemap::Pagemap;
use crate::dirty_map::{DirtyMap, PageRun};
use crate::error::{Error, ErrorKind, Result};
use crate::guest_memory::GuestMemory;
use crate::ram_file::{page_bytes_of, read_at};
use crate::region::{PAGE_BYTES, Region};

/// Files that a process has mapped as its guest's memory.
pub struct ProcessMemory {
    regions: Vec<Region>,
    files: Vec<File>,
    tracking: Tracking,
    pagemap: Pagemap,
}

impl ProcessMemory {
    /// The memory of the process `pid`: each file with its name for the other side, and their tracking.
    ///
    /// # Errors
    /// It is not there, or may not be looked at; `Invalid` if a file is not mapped as a whole; `Unsupported` by this kernel.
    pub fn open(pid: u32, mapped: Vec<(String, MappedFile)>, tracking: Tracking) -> Result<Self> {
        let (mut regions, mut files) = (Vec::new(), Vec::new());
        let of_all: Vec<_> = mapped.iter().map(|(_, mapped)| mapped.mappings.clone()).collect();
        if tracking.mappings() != of_all {
            return Err(Error::new(ErrorKind::NotTracked, "the mappings of the memory are not those that are tracked"));
        }
        for (name, mapped) in mapped {
            let file = mapped.open(pid)?;
            let length =
                file.metadata().map_err(|error| Error::system(format!("reading {}", mapped.name), error))?.len();
            let page_bytes = page_bytes_of(&file)?.unwrap_or(PAGE_BYTES);
            let bytes = mapped.bytes().filter(|bytes| *bytes <= length && bytes.is_multiple_of(page_bytes));
            let bytes = bytes.ok_or_else(|| {
                let context =
                    format!("{} has {length} bytes, and is not mapped as a whole from its beginning", mapped.name);
                Error::new(ErrorKind::Invalid, context)
            })?;
            regions.push(Region { name, bytes, page_bytes });
            files.push(file);
        }
        let this = Self { regions, files, tracking, pagemap: Pagemap::open(pid)? };
        // A kernel that cannot do it says so before anything is copied.
        this.take_dirty(&mut DirtyMap::new(&this.regions))?;
        Ok(this)
    }
}

impl GuestMemory for ProcessMemory {
    fn regions(&self) -> &[Region] {
        &self.regions
    }

    fn take_dirty(&self, into: &mut DirtyMap) -> Result<()> {
        let into = Mutex::new(into);
        for (region, mappings) in self.tracking.mappings().iter().enumerate() {
            for mapping in mappings {
                self.pagemap.take_written(mapping.start..mapping.end, |written| {
                    let mut into = into.lock();
                    for written in written {
                        let at = written.start - mapping.start + mapping.offset;
                        let count = (written.end - written.start) / PAGE_BYTES;
                        into.insert(PageRun { region, page: at / PAGE_BYTES, count });
                    }
                })?;
            }
        }
        // Afterwards: what was so then was so during the scan.
        self.pagemap.check()?;
        match self.tracking.is_held() {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::NotTracked, "what is written to the memory is not tracked any more")),
        }
    }

    fn read(&self, region: usize, page: u64, into: &mut [u8]) -> Result<()> {
        let file = self.files.get(region);
        let file = file.ok_or_else(|| Error::new(ErrorKind::Invalid, format!("there is no region {region}")))?;
        let read = read_at(file, page * PAGE_BYTES, into);
        read.map_err(|error| Error::system(format!("reading the memory {}", self.regions[region].name), error))
    }

    fn next_data(&self, region: usize, page: u64) -> Result<Option<Range<u64>>> {
        let (Some(file), Some(about)) = (self.files.get(region), self.regions.get(region)) else { return Ok(None) };
        let pages = about.pages();
        if page >= pages {
            return Ok(None);
        }
        let failed = |errno: Errno| Error::system(format!("looking for holes in {}", about.name), errno);
        let start = match rustix::fs::seek(file, SeekFrom::Data(page * PAGE_BYTES)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(None),
            // hugetlbfs tells no holes.
            Err(Errno::INVAL) => return Ok(Some(page..pages)),
            Err(errno) => return Err(failed(errno)),
        };
        let end = rustix::fs::seek(file, SeekFrom::Hole(start)).map_err(failed)?;
        let (first, last) = (start / PAGE_BYTES, end.div_ceil(PAGE_BYTES).min(pages));
        Ok((first < last).then_some(first..last))
    }
}
