//! Backends: what holds bytes.
//!
//! A [`BackendSpec`] names one in words (`file:/vm/disk.raw,cache=direct`), a [`FileBackend`] serves it as a
//! `block::BlockDevice`. Files on tmpfs and files that should use the page cache are read and written in place.
//! Everything else goes past the page cache through io_uring.

mod calls;
mod executor;
mod file;
mod file_system;
mod helper;
mod holes;
mod image;
mod in_place;
mod lock;
mod mark;
mod obstacle;
mod offload;
mod open_file;
mod page_cache;
mod qemu_locks;
mod rename;
mod reserve;
mod retire;
mod ring;
mod spec;
mod target;
mod tombstone;

pub use file::{Access, Engine, FileBackend, OpenOptions};
pub use helper::{Helpers, run_as_helper};
pub use image::{ImageError, ImageIdentity, ImageState, ImageTimes, mark_layers_of};
pub use in_place::in_place;
pub use obstacle::Obstacle;
pub use offload::FileOffload;
pub use page_cache::drop_page_cache;
pub use qemu_locks::QemuLocks;
pub use reserve::reserve;
pub use retire::{Retired, Retiring, SourceIdentity, bring_back, is_deleted, retire_source};
pub use spec::{BackendSpec, CacheMode, ImageFormat, SpecError};
pub use target::{
    Alias, MarkedFile, PreparedTarget, TargetError, TargetOrigin, TargetRequest, check_target, files_behind,
    prepare_target, remove_unless_used, share_bytes,
};
pub use tombstone::Tombstone;
