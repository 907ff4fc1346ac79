//! Other hosts: who they are, how they come to be trusted, and the TLS between them.
//!
//! ```text
//!   pairing ◀── invitation                     identity, certificate ──▶ tls ──▶ sealed (a connection)
//!      │ messages                                                         ▲
//!      ▼                                                                  │ who is trusted
//!    store ─────────────────────────────────────────────────────────────────┘
//! ```
//!
//! A host is whoever has the private key of a certificate whose fingerprint is known: no authority, no names to be
//! looked up. Keys, nonces and the exchange of passwords take their randomness from the operating system, through the
//! libraries that implement them. So none of this runs in the simulator, which joins its hosts with links of its own.
//!
//! Listeners, dialers and what they carry are the daemon's. `docs/hosts.md` is the page for those who run it.

pub mod address;
pub mod certificate;
pub mod connect;
pub mod identity;
pub mod invitation;
pub mod message;
mod name;
pub mod pairing;
pub mod replay;
pub mod sealed;
pub mod store;
pub mod tls;

pub use name::HostName;
