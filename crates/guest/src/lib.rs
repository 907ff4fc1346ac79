//! A real Linux guest under QEMU: Debian's cloud kernel, busybox and a load that checks every byte it reads. Tests, the
//! demo and the benchmarks boot it; nothing of it is installed.
//!
//! ```no_run
//! use std::time::Duration;
//! use transhume_guest::{Disk, Guest, GuestSpec, Load};
//!
//! # fn main() -> anyhow::Result<()> {
//! transhume_guest::create_filled("disk.raw".as_ref(), 256 << 20)?;
//! let load = Load { is_prefilled: true, ..Load::default() };
//! let mut guest = Guest::boot(GuestSpec::new().disk(Disk::raw("disk.raw", "data")).load(load))?;
//! guest.wait_for_load(Duration::from_secs(60))?;
//! println!("QEMU listens on {}", guest.qmp_socket().display());
//! let load_result = guest.finish(Duration::from_secs(60))?;
//! assert!(load_result.is_right());
//! # Ok(())
//! # }
//! ```
//!
//! A booted guest never outlives its handle, nor the process that booted it. [`Daemon`] is the other half of such a
//! test: our own daemon in a folder of its own, started, killed and started again. [`TwoHosts`] are two of them, each
//! in a network of its own, with links in between that can be slowed down and cut. [`SwitchedHosts`] are more than two
//! around a switch. [`GuestNetwork`] joins a guest of two hosts with a client, and [`NetworkClient`] measures what the
//! client feels while the guest moves.

mod acceleration;
mod authority;
mod command_line;
mod cpio;
mod daemon;
mod etcd;
mod event;
mod guest_network;
mod huge_pages;
mod initramfs;
mod load_result;
mod network;
mod network_client;
mod other_traffic;
pub mod pattern;
mod probe_series;
pub mod process;
pub mod programs;
mod qemu;
mod qmp;
mod spec;
mod switched;
mod two_hosts;
mod verified;
mod workload;
mod workload_line;

pub use acceleration::Acceleration;
pub use authority::{Authority, GOOD_YEARS, write_identity};
pub use daemon::Daemon;
pub use etcd::{Etcd, free_port};
pub use event::{Event, Interval, MemoryTotals, Totals};
pub use guest_network::GuestNetwork;
pub use huge_pages::HugePages;
pub use initramfs::kernel;
pub use load_result::LoadResult;
pub use network::Network;
pub use network_client::{ClientSpec, NetworkClient, NetworkReport};
pub use other_traffic::OtherTraffic;
pub use probe_series::{Gap, Probe, ProbeSeries, TimelineSlot};
pub use qemu::{BootFiles, Guest};
pub use qmp::Qmp;
pub use spec::{Attachment, Bus, Disk, GuestSpec};
pub use switched::SwitchedHosts;
pub use two_hosts::{Side, TwoHosts, TwoHostsSpec};
pub use verified::{check_filled, create_filled};
pub use workload::{Load, MemoryLoad, Workload};
