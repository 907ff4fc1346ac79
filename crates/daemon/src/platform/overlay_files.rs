//! Overlays as files of the machine, `.NAME.overlay-N` beside the image NAME.

use std::fs::{self, File};
use std::io::{ErrorKind, Result};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use backends::{BackendSpec, CacheMode, FileBackend, Helpers, ImageIdentity, OpenOptions, in_place, reserve};
use block::{Bytes, Device};

use super::OverlayOpening;

/// Room in a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreeSpace {
    /// Which file system it is in, by number.
    pub file_system: u64,
    /// What anybody may still take there.
    pub free: Bytes,
}

/// What the names of all overlays of an image begin with.
pub(super) fn prefix_of(image: &Path) -> String {
    format!(".{}.overlay-", image.file_name().unwrap_or_default().to_string_lossy())
}

/// Where an overlay of an image is.
pub(crate) fn path_of(image: &Path, number: u32) -> PathBuf {
    image.with_file_name(format!("{}{number}", prefix_of(image)))
}

fn folder_of(image: &Path) -> &Path {
    image.parent().unwrap_or_else(|| Path::new("/"))
}

pub(super) async fn make(
    image: &Path,
    number: u32,
    length: Bytes,
    opening: OverlayOpening<'_>,
    helpers: Option<&Arc<Helpers>>,
) -> block::Result<Device> {
    let path = path_of(image, number);
    let made = {
        let path = path.clone();
        // To reserve a large overlay takes a while.
        let reserve = opening.reserve;
        tokio::task::spawn_blocking(move || make_file(&path, length, reserve)).await
    };
    let made = made.unwrap_or_else(|ended| Err(std::io::Error::other(ended)));
    made.map_err(|error| block::Error::from_os(error, format!("making the overlay {}", path.display())))?;
    // It is a new one.
    open(image, number, OverlayOpening { known: None, ..opening }, helpers).await
}

fn make_file(path: &Path, length: Bytes, reserves: bool) -> Result<()> {
    remove_file(path)?;
    let file = File::options().write(true).create_new(true).mode(0o600).open(path)?;
    file.set_len(length.get())?;
    if reserves && let Err(error) = reserve(&file, length) {
        // A file that nobody has made stays away.
        remove_file(path)?;
        return Err(error);
    }
    file.sync_all()?;
    File::open(folder_of(path))?.sync_all()
}

pub(super) async fn open(
    image: &Path,
    number: u32,
    opening: OverlayOpening<'_>,
    helpers: Option<&Arc<Helpers>>,
) -> block::Result<Device> {
    let path = path_of(image, number);
    if let Some(known) = opening.known.filter(|_| path.exists()) {
        // Another file is not opened for writing.
        in_place(|| known.check_name(&path))?;
    }
    // Through the page cache: byte by byte where the volume is served so, and small writes of the map cost little.
    let spec = BackendSpec::file(&path).with_cache(CacheMode::Page);
    // What is reserved stays reserved.
    let trim = !fs::metadata(&path).is_ok_and(|found| found.blocks() * 512 >= found.len());
    let helpers = helpers.map(Arc::clone);
    let options = OpenOptions { lock_wait: Some(opening.lock_wait), trim, helpers, ..OpenOptions::default() };
    let backend = FileBackend::open(&spec, &options, opening.env).await?;
    if let Some(known) = opening.known {
        // The name may have changed between the look and the opening.
        let now = backend.image();
        let now = now.map_err(|error| block::Error::from_os(error, format!("looking at {}", path.display())))?;
        known.check(&now).map_err(|error| error.about(&path))?;
    }
    Ok(Device::new(&path.display().to_string(), backend))
}

/// Which file it is that has the name.
pub(super) fn identity(image: &Path, number: u32) -> Option<ImageIdentity> {
    ImageIdentity::of(&File::open(path_of(image, number)).ok()?).ok()
}

pub(super) fn remove(image: &Path, number: u32) -> Result<()> {
    remove_file(&path_of(image, number))
}

/// The same of an overlay that nobody has locked.
pub(super) fn remove_unless_used(image: &Path, number: u32) -> Result<()> {
    backends::remove_unless_used(&path_of(image, number)).map_err(|error| match error.kind() {
        block::ErrorKind::Busy => std::io::Error::new(ErrorKind::ResourceBusy, error),
        _ => std::io::Error::other(error),
    })
}

fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

pub(super) fn list(image: &Path) -> Result<Vec<u32>> {
    let prefix = prefix_of(image);
    let mut numbers = Vec::new();
    for entry in fs::read_dir(folder_of(image))? {
        let name = entry?.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix(&prefix));
        numbers.extend(number.and_then(|number| number.parse::<u32>().ok()));
    }
    Ok(numbers)
}

pub(super) fn free_space(image: &Path) -> Result<Option<FreeSpace>> {
    if image.exists() && !image.is_file() {
        return Ok(None);
    }
    let folder = folder_of(image);
    let found = rustix::fs::statvfs(folder)?;
    let free = Bytes(found.f_bavail.saturating_mul(found.f_frsize));
    Ok(Some(FreeSpace { file_system: fs::metadata(folder)?.dev(), free }))
}
