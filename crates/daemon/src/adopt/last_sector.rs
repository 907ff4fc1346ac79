//! The last sector of a raw image whose size is no multiple of one.
//!
//! QEMU shows the guest whole sectors of 512 bytes: the last one is rounded up. The guest may write it, and QEMU's own driver makes the file
//! longer then. An export ends where the file ends, so the same write would fail there, and by QEMU's default stop the VM. So the file is
//! made as long as its guest's disk is before it is adopted: by zeroes, which the guest reads there anyway.

use std::fs::File;

use api::v1::{Error, ErrorCode};
use backends::in_place;
use rustix::fs::FallocateFlags;
use vm::AdoptedDisk;

use crate::open_backend::CLIENT_SECTOR;
use crate::problem::{Result, of_vm};

/// Makes the image end with a whole sector, if it is a raw file that QEMU has open.
///
/// # Errors
/// The file is another one than QEMU's, or cannot be made longer.
pub(super) fn fill_up(disk: &AdoptedDisk) -> Result<()> {
    let image = disk.image.display();
    let failed = |error: std::io::Error| {
        let message = format!("the last sector of {image} cannot be made whole: {error}");
        Error::new(ErrorCode::BackendUnusable, message).with_hint(format!(
            "end the VM, `truncate -s %{CLIENT_SECTOR} {image}`, and start it again: its guest sees that size already"
        ))
    };
    let Some(found) = std::fs::metadata(&disk.image).ok().filter(|found| disk.format == "raw" && found.is_file())
    else {
        return Ok(());
    };
    let rest = found.len() % u64::from(CLIENT_SECTOR);
    if rest == 0 {
        return Ok(());
    }
    in_place(|| {
        let file = File::options().write(true).open(&disk.image).map_err(failed)?;
        let opened = file.metadata().map_err(failed)?;
        if let Some(pid) = disk.process_id {
            vm::require_writer(pid, &opened, &disk.image).map_err(|error| of_vm(&error))?;
        }
        // Never shorter, whatever QEMU makes of it meanwhile, and no byte is written that the guest may be writing.
        let missing = u64::from(CLIENT_SECTOR) - rest;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), found.len(), missing)
            .map_err(|error| failed(error.into()))
    })
}
