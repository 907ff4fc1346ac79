//! This host among others: who it is, and whom it trusts.

use serde::{Deserialize, Serialize};

use super::Error;

/// This host as others know it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// What it calls itself.
    pub name: String,
    /// The SHA-256 of its certificate, as `openssl x509 -fingerprint -sha256` writes it.
    pub fingerprint: String,
    /// Where others reach it, as far as it knows.
    pub addresses: Vec<String>,
    /// Where it listens.
    pub listen: Vec<String>,
    /// Until when its certificate is good, in seconds since 1970.
    pub certificate_until_unix_seconds: u64,
    /// The same as a date (UTC).
    pub certificate_until: String,
    /// Whether it takes and makes connections without encryption.
    pub plaintext: bool,
    /// Why it cannot speak to others at the moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<Error>,
}

/// Asks for a code that lets another host join.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InviteRequest {
    /// What that host is to be called here; what it calls itself if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// A code that lets another host join, once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Invitation {
    /// The code.
    pub code: String,
    /// For how long it is good.
    pub seconds: u64,
    /// How often it may be tried.
    pub tries: u32,
    /// What the inviting host calls itself.
    pub name: String,
    /// Where it is reached, as far as it knows.
    pub addresses: Vec<String>,
    /// The port on which it listens.
    pub port: u16,
}

/// Joins the host that has given out a code.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PairRequest {
    /// Where that is: `HOST:PORT`.
    pub address: String,
    /// The code.
    pub code: String,
    /// What it is to be called here; what it calls itself if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// A host that is trusted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrustedHost {
    /// What it is called here.
    pub name: String,
    /// The SHA-256 of its certificate.
    pub fingerprint: String,
    /// Where it is reached, in the order in which streams take them.
    pub addresses: Vec<String>,
    /// Since when it is trusted, in milliseconds since 1970.
    pub trusted_unix_ms: u64,
    /// When it was paired: by how many seconds its clock is ahead of this host's, if that is much.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock_ahead_seconds: Option<i64>,
}

/// Other addresses of a host that is trusted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostAddresses {
    /// Where it is reached: `HOST:PORT`, at least one.
    pub addresses: Vec<String>,
}
