//! The rig that other tests stand on: the guest, its network and its load. One program: what it links is linked once.

mod boot;
mod follow;
mod nbd_load;
mod network;
