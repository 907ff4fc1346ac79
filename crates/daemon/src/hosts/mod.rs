//! Connections to and from other hosts, which the crate `hosts` knows and trusts.
//!
//! ```text
//!   transhume trust ──▶ network ──▶ hosts (pairing, store)
//!                          │            ▲ who is trusted
//!                          ├─▶ dialer ──┤──▶ TLS 1.3 ──▶ another host's listener
//!                          └─▶ listener ┘◀── TLS 1.3 ◀── another host's dialer
//!                                 │
//!                                 ▼
//!                              Reception (the wire's receiver)
//! ```
//!
//! One port serves the wire (`transhume/1`) and pairing (`transhume-trust/1`), told apart by ALPN. None of this runs in the
//! simulator, which joins its hosts with links of its own.
//!
//! `docs/hosts.md` is the page for those who run it.

mod dialer;
mod listener;
mod network;
#[cfg(test)]
mod tests;
mod transport;

pub use hosts::HostName;
pub(crate) use network::{HostNetwork, RealHosts};
pub(crate) use transport::no_hosts;
pub use transport::{NoHosts, OnMemory, Reception};
