//! The engine on the simulator's disks and links, and the simulator itself. One program: what it links is linked once.

mod awaits;
mod cache_overwrite;
mod conformance;
mod faulty_devices;
mod mirror_conformance;
mod mutations;
mod nbd_over_link;
mod nbd_server_lost;
mod overlay;
mod remote_guest;
mod scenario_dsl;
mod wire_over_link;
mod world;
