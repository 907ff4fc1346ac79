//! Open files of a backend: with descriptors in this process, or without any.
//!
//! A process that ends closes its descriptors, and some file systems ask their server at each of them (FUSE, NFS). If
//! that server does not answer, the process stays in the kernel, with its sockets and the locks of all else. So files
//! of which this process has no use itself are parked:
//!
//! ```text
//!   opened, locked ──▶ sent into a socket, whose other end is closed ──▶ descriptors are closed: the server answers still
//!                          │ it keeps the files open, and their locks
//!                          ├──▶ the helper of their device looks at the message, and has descriptors of them
//!                          └──▶ so does a thread here for one call, where there is no helper
//! ```
//!
//! When a socket goes, the kernel lets go of what is in it, and asks nobody. A descriptor that only names the file stays
//! here: the kernel asks nobody about that one, either.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};

/// How many files are parked together: one that is served, and its witness.
const FILES_MAX: usize = 2;

/// A file that is open, with a descriptor here or without one.
#[derive(Clone)]
pub(crate) struct OpenFile(Arc<Place>);

enum Place {
    Here(Arc<File>),
    Parked {
        parked: Arc<Parked>,
        index: usize,
        /// Names it, and reaches none of its bytes.
        name: File,
    },
}

impl OpenFile {
    /// A file with its descriptor.
    pub(crate) fn here(file: File) -> Self {
        Self(Arc::new(Place::Here(Arc::new(file))))
    }

    /// The file with this `index` among those that are parked.
    fn parked(file: &File, parked: &Arc<Parked>, index: usize) -> io::Result<Self> {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let name = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self(Arc::new(Place::Parked { parked: Arc::clone(parked), index, name: File::from(name) })))
    }

    /// The file, if there is a descriptor of it here.
    pub(crate) fn descriptor(&self) -> Option<&Arc<File>> {
        match &*self.0 {
            Place::Here(file) => Some(file),
            Place::Parked { .. } => None,
        }
    }

    /// What says which file it is, and how long. Its bytes need not be reached by that.
    pub(crate) fn name(&self) -> &File {
        match &*self.0 {
            Place::Here(file) => file,
            Place::Parked { name, .. } => name,
        }
    }

    /// Does `work` with the file. Where that is parked it may wait for the file system, if only to close it again.
    pub(crate) fn with<T>(&self, work: impl FnOnce(&File) -> io::Result<T>) -> io::Result<T> {
        match &*self.0 {
            Place::Here(file) => work(file),
            Place::Parked { parked, index, .. } => {
                let files: Vec<File> = parked.files()?.into_iter().map(File::from).collect();
                let outcome = work(&files[*index]);
                files.into_iter().for_each(|file| parked.close(file));
                outcome
            }
        }
    }

    /// What closing it here has said since this was asked last. A file system may write out what it has of the file then,
    /// and tells of a loss nobody else.
    pub(crate) fn take_close_failure(&self) -> io::Result<()> {
        match &*self.0 {
            Place::Parked { parked, .. } => parked.close_failure.lock().take().map_or(Ok(()), Err),
            Place::Here(_) => Ok(()),
        }
    }

    /// Whether it is the same open file, and not only the same file.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Files that a socket keeps open.
pub(crate) struct Parked {
    /// None once they are let go of.
    socket: Mutex<Option<OwnedFd>>,
    count: usize,
    close_failure: Mutex<Option<io::Error>>,
}

impl Parked {
    /// Parks `files`, whose descriptors are the caller's to close.
    pub(crate) fn new(files: &[BorrowedFd<'_>]) -> io::Result<Self> {
        let (socket, sender) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !ancillary.push(SendAncillaryMessage::ScmRights(files)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        sendmsg(&sender, &[IoSlice::new(&[0])], &mut ancillary, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
        Ok(Self { socket: Mutex::new(Some(socket)), count: files.len(), close_failure: Mutex::default() })
    }

    /// How many there are.
    pub(crate) const fn count(&self) -> usize {
        self.count
    }

    /// Does something with the socket, by which another process can [look at them](parked_in).
    pub(crate) fn with_socket<T>(&self, work: impl FnOnce(BorrowedFd<'_>) -> io::Result<T>) -> io::Result<T> {
        match &*self.socket.lock() {
            Some(socket) => work(socket.as_fd()),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn files(&self) -> io::Result<Vec<OwnedFd>> {
        self.with_socket(|socket| parked_in(socket, self.count))
    }

    fn close(&self, file: File) {
        if let Err(error) = nix::unistd::close(file) {
            self.close_failure.lock().get_or_insert_with(|| error.into());
        }
    }

    /// Lets go of them, whoever still knows of this. Not the last one to do so asks no server.
    pub(crate) fn let_go(&self) {
        let socket = self.socket.lock().take();
        drop(socket);
    }
}

/// Descriptors of all `count` files that are parked in `socket`. They stay there.
pub(crate) fn parked_in(socket: BorrowedFd<'_>, count: usize) -> io::Result<Vec<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    recvmsg(socket, &mut [IoSliceMut::new(&mut [0])], &mut ancillary, flags)?;
    let files = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    let files: Vec<OwnedFd> = files.flatten().collect();
    // The kernel leaves out those that there is no room for.
    if files.len() == count { Ok(files) } else { Err(io::Error::from_raw_os_error(libc::EMFILE)) }
}

/// A file that is served, its other open description where it has one, and who keeps both where they are parked.
#[derive(Clone)]
pub(crate) struct OpenFiles {
    pub(crate) file: OpenFile,
    pub(crate) witness: Option<OpenFile>,
    pub(crate) parked: Option<Arc<Parked>>,
}

impl OpenFiles {
    /// With their descriptors.
    pub(crate) fn here(file: File, witness: Option<File>) -> Self {
        Self { file: OpenFile::here(file), witness: witness.map(OpenFile::here), parked: None }
    }

    /// Without any. May wait for the file system, which hears that they are closed. If they cannot be parked, they stay.
    pub(crate) fn parked(file: File, witness: Option<File>) -> Self {
        match Self::park(&file, witness.as_ref()) {
            Ok(files) => files,
            Err(error) => {
                tracing::warn!(%error, "a file stays open here: a server that hangs may keep this process from ending");
                Self::here(file, witness)
            }
        }
    }

    fn park(file: &File, witness: Option<&File>) -> io::Result<Self> {
        let files: Vec<BorrowedFd<'_>> = std::iter::once(file).chain(witness).map(AsFd::as_fd).collect();
        let parked = Arc::new(Parked::new(&files)?);
        let witness = witness.map(|witness| OpenFile::parked(witness, &parked, 1)).transpose()?;
        Ok(Self { file: OpenFile::parked(file, &parked, 0)?, witness, parked: Some(parked) })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::*;
    use crate::lock::{SERVER_BYTE, Strength, is_locked_by_others, try_lock};

    /// Whether this process has a descriptor by which the file could be written or read.
    fn has_descriptor(inode: u64) -> bool {
        let open = std::fs::read_dir("/proc/self/fd").expect("it is there").flatten();
        let numbers = open.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        numbers.filter(|number| is_file(*number, inode)).any(|number| {
            let details = std::fs::read_to_string(format!("/proc/self/fdinfo/{number}")).unwrap_or_default();
            let flags = details.lines().find_map(|line| line.strip_prefix("flags:"));
            let flags = flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok()).unwrap_or_default();
            flags & libc::O_PATH == 0
        })
    }

    fn is_file(number: i32, inode: u64) -> bool {
        std::fs::metadata(format!("/proc/self/fd/{number}")).is_ok_and(|found| found.ino() == inode)
    }

    #[test]
    fn a_parked_file_stays_open_with_its_lock_and_without_a_descriptor_until_it_is_let_go_of() {
        let (_, path) = tempfile::NamedTempFile::new_in("/var/tmp").expect("a file on disk").keep().expect("kept");
        let open = || File::options().read(true).write(true).open(&path).expect("it opens");
        let (file, witness, other) = (open(), File::open(&path).expect("it opens"), open());
        let other_inode = other.metadata().expect("looked").ino();
        assert!(try_lock(&file, SERVER_BYTE, Strength::Exclusive).expect("locks work here"));
        let files = OpenFiles::parked(file, Some(witness));
        let parked = files.parked.as_ref().expect("it is parked");
        drop(other);
        assert!(files.file.descriptor().is_none() && !has_descriptor(other_inode));
        assert_eq!(files.file.name().metadata().expect("looked").ino(), other_inode);
        for number in 0..3 {
            files.file.with(|file| file.write_all_at(&[number; 512], 0)).expect("written");
            let witness = files.witness.as_ref().expect("it is there");
            let mut found = [9; 512];
            witness.with(|file| file.read_exact_at(&mut found, 0)).expect("read");
            assert_eq!(found, [number; 512]);
            witness.with(|file| file.write_all_at(&[1], 0)).expect_err("it is for reading only");
            assert!(!has_descriptor(other_inode), "it was left open");
        }
        let other = open();
        assert!(is_locked_by_others(&other, SERVER_BYTE).expect("locks work here"));
        parked.let_go();
        assert!(!is_locked_by_others(&other, SERVER_BYTE).expect("locks work here"));
        files.file.with(|_| Ok(())).expect_err("it is gone");
        // As a file server without room would have it.
        *parked.close_failure.lock() = Some(io::ErrorKind::StorageFull.into());
        files.file.take_close_failure().expect_err("somebody hears of it");
        files.file.take_close_failure().expect("once");
        std::fs::remove_file(&path).expect("removed");
    }
}
