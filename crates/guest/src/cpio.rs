//! The `newc` archive that a kernel unpacks as its first root: a header of hexadecimal numbers, a name and the bytes,
//! each padded to four.

/// An archive being written.
#[derive(Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

const FOLDER: u32 = 0o040_755;
const EXECUTABLE: u32 = 0o100_755;

impl Archive {
    pub(crate) fn folder(&mut self, name: &str) {
        self.entry(name, FOLDER, &[]);
    }

    /// A file that anybody may read and run.
    pub(crate) fn file(&mut self, name: &str, content: &[u8]) {
        self.entry(name, EXECUTABLE, content);
    }

    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        let content_bytes = u32::try_from(content.len()).expect("nothing in a first root has 4 GiB");
        let name_bytes = u32::try_from(name.len() + 1).expect("names are short");
        // inode, mode, uid, gid, links, mtime, size, device (2), special device (2), name size, checksum
        let fields = [self.entries, mode, 0, 0, 1, 0, content_bytes, 0, 0, 0, 0, name_bytes, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn cpio_itself_lists_and_unpacks_what_was_written() {
        let mut archive = Archive::default();
        archive.folder("etc");
        archive.file("etc/hello", b"hello\n");
        let bytes = archive.finish();
        let folder = tempfile::tempdir().unwrap();
        let mut cpio = Command::new("cpio")
            .args(["--extract", "--make-directories", "--quiet"])
            .current_dir(folder.path())
            .stdin(Stdio::piped())
            .spawn()
            .expect("cpio is there: run `make setup`");
        cpio.stdin.take().unwrap().write_all(&bytes).unwrap();
        assert!(cpio.wait().unwrap().success());
        assert_eq!(std::fs::read(folder.path().join("etc/hello")).unwrap(), b"hello\n");
    }
}
