//! What processes have mapped, as `/proc/PID/maps` tells it.

use std::fs::File;
use std::path::PathBuf;

use crate::error::{Error, ErrorKind, Result};

/// One mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Its first address.
    pub start: u64,
    /// The address behind it.
    pub end: u64,
    /// Where in the file it begins.
    pub offset: u64,
}

/// A file that a process has mapped shared, to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedFile {
    /// Its name as the kernel tells it: with ` (deleted)` behind it if it is not there any more.
    pub name: String,
    /// The device and the number of the file.
    pub identity: (String, u64),
    /// Its mappings, by address.
    pub mappings: Vec<Mapping>,
}

impl MappedFile {
    /// How long it is, if it is mapped as a whole from its beginning, once.
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        let mut mappings = self.mappings.clone();
        mappings.sort_unstable_by_key(|mapping| mapping.offset);
        let mut behind = 0;
        for mapping in &mappings {
            if mapping.offset != behind {
                return None;
            }
            behind += mapping.end - mapping.start;
        }
        (behind > 0).then_some(behind)
    }

    /// Opens it through the mapping of the process `pid`.
    pub(super) fn open(&self, pid: u32) -> Result<File> {
        let first = self.mappings.first();
        let first = first.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("{} is not mapped", self.name)))?;
        let path = PathBuf::from(format!("/proc/{pid}/map_files/{:x}-{:x}", first.start, first.end));
        File::open(&path)
            .map_err(|error| Error::system(format!("opening {} through {}", self.name, path.display()), error))
    }
}

/// The files that the process `pid` has mapped shared, to be written.
///
/// # Errors
/// The process is gone, or may not be looked at.
pub fn mapped_files(pid: u32) -> Result<Vec<MappedFile>> {
    let path = format!("/proc/{pid}/maps");
    let maps = std::fs::read(&path).map_err(|error| Error::system(format!("reading {path}"), error))?;
    Ok(parse(&String::from_utf8_lossy(&maps)))
}

/// The processes beside `own` that have this file mapped shared, to be written: what they write is not seen by `own`'s dirty log.
#[must_use]
pub fn foreign_mappings(identity: &(String, u64), own: u32) -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    // What may not be looked at, or has ended, has nothing mapped that we know of.
    let has_it = |pid: &u32| mapped_files(*pid).is_ok_and(|files| files.iter().any(|file| file.identity == *identity));
    pids.filter(|pid| *pid != own).filter(has_it).collect()
}

fn parse(maps: &str) -> Vec<MappedFile> {
    let mut files: Vec<MappedFile> = Vec::new();
    for line in maps.lines() {
        let Some((identity, name, mapping)) = parse_line(line) else { continue };
        match files.iter_mut().find(|file| file.identity == identity) {
            Some(file) => file.mappings.push(mapping),
            None => files.push(MappedFile { name: name.to_owned(), identity, mappings: vec![mapping] }),
        }
    }
    files
}

/// `START-END RIGHTS OFFSET DEVICE INODE  NAME`, of a file that is shared and written.
fn parse_line(line: &str) -> Option<((String, u64), &str, Mapping)> {
    let mut rest = line;
    let mut word = || {
        let text = rest.trim_start_matches(' ');
        let (word, behind) = text.split_once(' ').unwrap_or((text, ""));
        rest = behind;
        Some(word).filter(|word| !word.is_empty())
    };
    let (range, rights, offset, device, inode) = (word()?, word()?, word()?, word()?, word()?);
    let (start, end) = range.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    let mapping = Mapping { start: number(start)?, end: number(end)?, offset: number(offset)? };
    let inode: u64 = inode.parse().ok()?;
    let name = rest.trim_start_matches(' ');
    let is_meant = rights.starts_with("rw") && rights.ends_with('s') && inode != 0 && name.starts_with('/');
    is_meant.then(|| ((device.to_owned(), inode), name, mapping))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "55d0-55d9 r-xp 00000000 fe:00 1234 /usr/bin/vmm\n\
7f00-7f80 rw-s 00000000 00:19 77                         /dev/shm/my ram\n\
7f90-7fa0 rw-s 00000080 00:19 77                         /dev/shm/my ram\n\
8000-8001 rw-p 00000000 00:19 78                         /dev/shm/private\n\
9000-9001 rw-s 00001000 00:19 79                         /dev/shm/gone (deleted)\n\
a000-a001 rw-s 00000000 00:01 0                          /dev/zero\n\
ffff-fffff r-xp 00000000 00:00 0                         [vsyscall]\nnonsense\n\n";

    #[test]
    fn shared_files_are_found_with_all_of_their_mappings() {
        let files = parse(MAPS);
        let names: Vec<_> = files.iter().map(|file| file.name.as_str()).collect();
        assert_eq!(names, ["/dev/shm/my ram", "/dev/shm/gone (deleted)"]);
        assert_eq!(files[0].identity, ("00:19".to_owned(), 77));
        assert_eq!(files[0].bytes(), Some(0x90));
        assert_eq!(files[1].bytes(), None, "its beginning is not mapped");
        let twice = MappedFile { mappings: vec![files[0].mappings[0]; 2], ..files[0].clone() };
        assert_eq!(twice.bytes(), None);
    }
}
