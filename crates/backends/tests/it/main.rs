//! The backends against real files, devices and locks. One program: what it links is linked once.

mod devices;
mod file;
mod locks;
mod retire;
mod support;
mod target;
