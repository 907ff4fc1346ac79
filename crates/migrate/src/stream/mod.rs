//! Host to host: a volume whose bytes are at the other end of several connections.
//!
//! ```text
//!   copies, guest writes                                                            the volume
//!        │                                                                              ▲
//!        ▼                                                                              │
//!   Remote (a BlockDevice) ──▶ one queue ──▶ stream 0 ═════════▶ Receiver::serve ──▶ one session ──▶ Device
//!                                  │   ├────▶ stream 1 ═════════▶ Receiver::serve ──▶    ▲
//!                                  │   └────▶ stream 2 ═════════▶ Receiver::serve ──▶    │
//!                            whichever has room takes the next                 range lock, buffer pool
//! ```
//!
//! [`Remote`] is the sender's end: a device like any other, so that every strategy works with a target on another host.
//! [`Receiver`] is the other end; it asks a [`SessionHandler`] which volumes there are and who may use them. Neither opens a socket:
//! a [`Dialer`] gives the connections, and whoever accepts some gives them to [`Receiver::serve`]. The daemon's are TCP and
//! TLS, the simulator's are links.
//!
//! Data parallelism (PMigrate, section 3.1) comes from streams: whichever has room takes the next frame of the one queue.
//! Pipeline parallelism comes from what is in flight: while one frame is compressed, others are on the wire, expanded and
//! written. Memory has a bound on both sides that blocks when it is reached: bytes in flight a stream here, a
//! [`BufferPool`](block::BufferPool) there.
//!
//! `docs/wire.md` draws every byte, both state machines, and says what is guaranteed.

mod codec;
mod compression_choice;
mod inbox;
mod options;
mod outbox;
pub mod protocol;
mod receiver;
mod remote;
mod spare_bandwidth;
mod statistics;
mod transport;

pub(crate) use options::FRAME_BYTES;
pub use options::{Compression, ReceiverLimits, StreamOptions};
pub use protocol::{
    Answer, Ask, LinkCounters, MapSummary, MigrationCounters, Role, SessionRequest, USAGE_ADDRESSES_MAX, VolumeStatus,
};
pub use receiver::{Opened, PeerName, Receiver, SessionHandler};
pub use remote::{Pace, Remote, SessionInfo};
pub use spare_bandwidth::{
    EndUsage, INTERVAL as USAGE_INTERVAL, OVERHEAD as WIRE_OVERHEAD, SpareBandwidth, needed_rate, raise_to_reserve,
};
pub use statistics::{StreamCounts, StreamStatistics};
pub use transport::{BoxTransport, Dialer, OnOpened, StreamPath, Transport};
