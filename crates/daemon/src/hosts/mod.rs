//! Other hosts: who they are, how they come to be trusted, and connections to and from them.
//!
//! ```text
//!   transhume trust ──▶ pairing ──▶ store ◀── dialer ──▶ TLS 1.3 ──▶ another host's listener
//!                          ▲          ▲                                     │
//!                     invitation   listener ◀── TLS 1.3 ◀── another host's dialer
//!                                     │
//!                                     ▼ who is trusted
//!                                  Reception (the wire's receiver)
//! ```
//!
//! A host is whoever has the private key of a certificate whose fingerprint is known here: no authority, no names to be
//! looked up. One port serves the wire (`transhume/1`) and pairing (`transhume-trust/1`), told apart by ALPN. Keys, nonces
//! and the exchange of passwords take their randomness from the operating system through the libraries that do them: none
//! of this runs in the simulator, which joins its hosts with links of its own.
//!
//! `docs/hosts.md` is the page for those who run it.

mod address;
mod certificate;
mod connect;
mod dialer;
mod identity;
mod invitation;
mod listener;
mod message;
mod name;
mod network;
mod pairing;
mod replay;
mod sealed;
mod store;
#[cfg(test)]
mod tests;
mod tls;
mod transport;

pub(crate) use address::check_all as check_addresses;
pub use name::HostName;
pub(crate) use network::{HostNetwork, RealHosts};
pub(crate) use transport::no_hosts;
pub use transport::{NoHosts, Reception};
