//! NBD: how guests reach a volume, and how a volume is reached elsewhere.
//!
//! [`protocol`] is the wire format as values, without IO. [`server`] serves exports to any NBD client over any stream;
//! [`client`] has a [`block::BlockDevice`] over one connection to somebody's export, and one that connects again.
//! [`NbdUri`] names an export.
//!
//! Both sides speak TLS under it (`NBD_OPT_STARTTLS`) where a URI with `nbds` or a [`TlsServer`] says so.
//!
//! The server owns no listener and no task: whoever accepts a connection runs [`server::serve_connection`] on it.

pub mod client;
pub mod protocol;
pub mod server;
mod tcp;
mod tls;
mod uri;

pub use client::{BackendOptions, Dial, DialUri, NbdBackend, NbdDevice};
pub use server::{Export, Exports, Limits, serve_connection, serve_encrypted};
pub use tcp::{DEAD_PEER_LIMIT, prepare_tcp};
pub use tls::{TlsError, TlsServer};
pub use uri::{NbdUri, Transport, UriError, UriTls};
