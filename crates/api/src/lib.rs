//! What `transhume` and `transhumed` say to each other: versioned types over HTTP on a unix socket, and the client.
//!
//! A version of the API is a module ([`v1`]); its paths begin with the module's name. Within a version, fields are
//! added and never removed or given another meaning: a reader ignores fields that it does not know. `GET /v1/version`
//! says which versions a daemon speaks, and [`Client::check_version`] says in one line what to do if that does not fit.

mod client;
pub mod v1;

pub use client::Client;

/// The version of the API that this crate speaks.
pub const API_VERSION: &str = "v1";

/// Where the daemon listens and where the command line looks for it, unless told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/transhume/api.sock";
