//! Who asked for what: one line of JSON a request that changes something, appended and never rewritten.

use std::time::{SystemTime, UNIX_EPOCH};

use api::v1::Error;
use serde::Serialize;

use crate::problem::{Result, of_state};
use crate::state_dir::Layout;

/// Who is at the other end of the API's socket, as the kernel says.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Peer {
    /// The user, or nothing if the kernel did not say.
    pub(crate) uid: Option<u32>,
    /// The process.
    pub(crate) pid: Option<i32>,
    /// The user that used `sudo`, as far as the process's environment tells.
    pub(crate) login_uid: Option<u32>,
}

impl Peer {
    /// The peer of a connection.
    pub(crate) fn of(stream: &tokio::net::UnixStream) -> Self {
        let Ok(credentials) = stream.peer_cred() else { return Self::default() };
        let login_uid = credentials.pid().and_then(|pid| {
            let text = std::fs::read_to_string(format!("/proc/{pid}/loginuid")).ok()?;
            text.trim().parse().ok().filter(|uid| *uid != u32::MAX)
        });
        Self { uid: Some(credentials.uid()), pid: credentials.pid(), login_uid }
    }

    /// The daemon itself.
    pub(crate) fn daemon() -> Self {
        Self { uid: Some(rustix::process::geteuid().as_raw()), pid: Some(std::process::id() as i32), login_uid: None }
    }
}

impl std::fmt::Display for Peer {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.uid, self.pid) {
            (Some(uid), Some(pid)) => write!(out, "uid {uid}, process {pid}"),
            _ => out.write_str("unknown"),
        }
    }
}

/// One line.
#[derive(Serialize)]
struct Line<'a> {
    at_unix_ms: u64,
    #[serde(flatten)]
    peer: &'a Peer,
    action: &'a str,
    subject: &'a str,
    request: serde_json::Value,
    outcome: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<&'a str>,
}

/// The audit log.
pub(crate) struct Audit {
    layout: Layout,
}

impl Audit {
    /// Opens the log for appending.
    pub(crate) fn open(layout: Layout) -> Result<Self> {
        let path = layout.audit();
        let opened = layout.files().append(&path, &[]);
        opened.map_err(|error| of_state(error, format!("opening the audit log {}", path.display())))?;
        Ok(Self { layout })
    }

    /// Notes that `peer` asked for `action` on `subject`, and what came of it.
    pub(crate) fn record(
        &self,
        now: SystemTime,
        peer: &Peer,
        (action, subject): (&str, &str),
        request: serde_json::Value,
        outcome: Option<&Error>,
    ) {
        let line = Line {
            at_unix_ms: unix_ms(now),
            peer,
            action,
            subject,
            request,
            outcome: outcome.map_or("ok", |error| error.code.name()),
            message: outcome.map(|error| &*error.message),
        };
        let mut text = serde_json::to_string(&line).expect("plain data serialises");
        text.push('\n');
        if let Err(error) = self.layout.files().append(&self.layout.audit(), text.as_bytes()) {
            tracing::error!(%error, line = text.trim(), "the audit log could not be written");
        }
    }
}

/// Milliseconds since 1970.
pub(crate) fn unix_ms(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}
