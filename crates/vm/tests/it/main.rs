//! Adoption, machines and the monitor on a real QEMU. One program: what it links is linked once.

mod access;
mod adoption;
mod attachments;
mod common;
mod machine;
mod monitor;
mod persisting;
mod recovery;
mod refusals;
