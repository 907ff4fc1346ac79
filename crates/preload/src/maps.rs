//! The mappings of a file, as `/proc/self/maps` lists them.

use crate::protocol::{Failure, FailureKind, Mapping};

/// More mappings of one file than this are no guest's memory.
const MAPPINGS_MAX: usize = 4096;

/// The mappings of the file that `maps` calls `path`, in the order of their addresses.
///
/// # Errors
/// `NotMapped`; `Private` if writes to one of them do not reach the file.
pub(crate) fn mappings_of(maps: &[u8], path: &[u8]) -> Result<Vec<Mapping>, Failure> {
    let mut found = Vec::new();
    for line in maps.split(|byte| *byte == b'\n') {
        let Some((mapping, rights, name)) = parse(line) else { continue };
        if name != path {
            continue;
        }
        // What cannot be written need not be tracked.
        if rights.get(1) != Some(&b'w') {
            continue;
        }
        if rights.get(3) != Some(&b's') {
            return Err(Failure::new(FailureKind::Private, 0));
        }
        if found.len() >= MAPPINGS_MAX {
            return Err(Failure::new(FailureKind::TooMany, 0));
        }
        found.push(mapping);
    }
    if found.is_empty() { Err(Failure::new(FailureKind::NotMapped, 0)) } else { Ok(found) }
}

/// `START-END RIGHTS OFFSET DEVICE INODE  NAME`, numbers in hexadecimal, and the name with its spaces.
fn parse(line: &[u8]) -> Option<(Mapping, &[u8], &[u8])> {
    let (range, rest) = word(line)?;
    let (rights, rest) = word(rest)?;
    let (offset, rest) = word(rest)?;
    let (_device, rest) = word(rest)?;
    let (_inode, rest) = word(rest)?;
    let dash = range.iter().position(|byte| *byte == b'-')?;
    let start = number(range.get(..dash)?)?;
    let end = number(range.get(dash + 1..)?)?;
    let mapping = Mapping { start, end, offset: number(offset)? };
    Some((mapping, rights, rest.trim_ascii_start()))
}

fn word(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let text = text.trim_ascii_start();
    let end = text.iter().position(|byte| *byte == b' ').unwrap_or(text.len());
    (end > 0).then(|| text.split_at(end))
}

fn number(text: &[u8]) -> Option<u64> {
    u64::from_str_radix(std::str::from_utf8(text).ok()?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &[u8] = b"55d0-55d9 r-xp 00000000 fe:00 1234 /usr/bin/vmm\n\
7f00-7f80 rw-s 00000000 00:19 77                         /dev/shm/my ram\n\
7f80-7f90 r--s 00000080 00:19 77                         /dev/shm/my ram\n\
7f90-7fa0 rw-s 00000090 00:19 77                         /dev/shm/my ram\n\
8000-8001 rw-p 00000000 00:19 78                         /dev/shm/private\n\
9000-9001 rw-s 00000000 00:19 79                         /dev/shm/gone (deleted)\n\
ffff-fffff r-xp 00000000 00:00 0                         [vsyscall]\n\
nonsense\n";

    #[test]
    fn the_mappings_that_are_written_are_found_by_the_files_name() {
        let found = mappings_of(MAPS, b"/dev/shm/my ram").expect("it is mapped");
        let expected = [(0x7f00, 0x7f80, 0), (0x7f90, 0x7fa0, 0x90)];
        assert_eq!(found, expected.map(|(start, end, offset)| Mapping { start, end, offset }));
        assert_eq!(mappings_of(MAPS, b"/dev/shm/gone (deleted)").expect("it is mapped").len(), 1);
    }

    #[test]
    fn what_is_not_there_and_what_is_private_is_refused() {
        let kind = |path: &[u8]| mappings_of(MAPS, path).expect_err("it is refused").kind;
        assert_eq!(kind(b"/dev/shm/my"), FailureKind::NotMapped);
        assert_eq!(kind(b"/usr/bin/vmm"), FailureKind::NotMapped);
        assert_eq!(kind(b"/dev/shm/private"), FailureKind::Private);
        assert_eq!(mappings_of(b"", b"x").expect_err("nothing").kind, FailureKind::NotMapped);
    }
}
