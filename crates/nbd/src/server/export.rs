//! What is offered to clients.

use std::sync::Arc;

use block::{BufferPool, Bytes, Device};

use super::Limits;
use super::advertised::Advertised;
use super::connection_fence::{ConnectionFence, LifeQuestion};
use super::execute::{Context, FailedFlushSent, PAYLOAD_BYTES_MAX};
use super::quota::Quota;
use crate::protocol::{BlockSizes, ExportInfo, STRING_BYTES_MAX, export_flag};

/// A volume under a name.
pub struct Export {
    name: String,
    description: String,
    open: Box<dyn Fn() -> Device + Send + Sync>,
    quota: Arc<Quota>,
    is_read_only: bool,
    size_advertised: Option<Bytes>,
    failed_flush_sent: Option<FailedFlushSent>,
    pub(super) fence: ConnectionFence,
}

impl Export {
    /// An export of what `open` gives, once for each connection; payloads live in `pool`, which exports may share.
    ///
    /// All its connections together hold at most a quarter of the pool, or 32 MiB if that is more. Replies that a
    /// client does not fetch count. Give it room for several times [`Limits::bytes_in_flight_max`]. Beside that each
    /// export has a reserve of its own, an eighth of the pool's size and at most 8 MiB. So others cannot leave it
    /// without any.
    ///
    /// # Panics
    /// If the name is longer than the protocol's 4096 bytes.
    pub fn new(name: impl Into<String>, pool: BufferPool, open: impl Fn() -> Device + Send + Sync + 'static) -> Self {
        let name = name.into();
        assert!(name.len() <= STRING_BYTES_MAX, "an export's name has at most {STRING_BYTES_MAX} bytes");
        Self {
            name,
            description: String::new(),
            open: Box::new(open),
            quota: Arc::new(Quota::of(&pool)),
            is_read_only: false,
            size_advertised: None,
            failed_flush_sent: None,
            fence: ConnectionFence::default(),
        }
    }

    /// The same, with a description for people.
    #[must_use]
    pub fn with_description(mut self, description: impl Into<String>) -> Self {
        self.description = description.into();
        self
    }

    /// The same, refusing mutations.
    #[must_use]
    pub fn with_read_only(mut self, is_read_only: bool) -> Self {
        self.is_read_only = is_read_only;
        self
    }

    /// The same, shown with at least `size` bytes. What lies past the device's end reads as zeroes. Only writes of data
    /// there reach the device, which grows or refuses.
    #[must_use]
    pub fn with_size_advertised(mut self, size: Option<Bytes>) -> Self {
        self.size_advertised = size;
        self
    }

    /// The same; `sent` is called each time that a client was sent that its flush failed: the reply has left this process.
    #[must_use]
    pub fn with_failed_flushes(mut self, sent: impl Fn() + Send + Sync + 'static) -> Self {
        self.failed_flush_sent = Some(Arc::new(sent));
        self
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it is, for people.
    #[must_use]
    pub fn description(&self) -> &str {
        &self.description
    }

    /// How many connections are in its transmission, or drain what they had begun.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.fence.members()
    }

    /// Asks its connections whether their clients are there.
    #[must_use]
    pub fn ask_life(&self) -> LifeQuestion {
        self.fence.ask()
    }

    /// The same export, with what `wrap` makes over the device of each connection.
    #[must_use]
    pub fn wrapped(self: Arc<Self>, wrap: impl Fn(Device) -> Device + Send + Sync + 'static) -> Self {
        Self {
            name: self.name.clone(),
            description: self.description.clone(),
            quota: Arc::clone(&self.quota),
            is_read_only: self.is_read_only,
            size_advertised: self.size_advertised,
            failed_flush_sent: self.failed_flush_sent.clone(),
            fence: self.fence.clone(),
            open: Box::new(move || wrap((self.open)())),
        }
    }

    /// The device of one more connection, for whoever serves it in a way of his own.
    #[must_use]
    pub fn open(&self) -> Device {
        let device = (self.open)();
        match self.size_advertised {
            Some(size) => Device::new(&self.name, Advertised { lower: device, size }),
            None => device,
        }
    }

    /// What a connection of this export works with, and what the client is told of it.
    pub(super) fn context(&self, is_structured: bool, has_allocation: bool, limits: &Limits) -> (Context, ExportInfo) {
        let device = self.open();
        let geometry = device.geometry();
        // A buffer takes the next power of two from the pool.
        let payload_max = self.quota.buffer_bytes_max().min(PAYLOAD_BYTES_MAX.into()) as u32;
        let maximum = limits.request_bytes_max.min(geometry.transfer_bytes_max).min(payload_max);
        let minimum = geometry.request_alignment;
        let maximum = (maximum - maximum % minimum).max(minimum);
        let preferred = geometry.preferred_bytes.max(minimum).max(512).min(1 << maximum.max(512).ilog2());
        let is_read_only = self.is_read_only || geometry.read_only;

        let mut flags = export_flag::HAS_FLAGS
            | export_flag::SEND_FLUSH
            | export_flag::SEND_FUA
            | export_flag::SEND_CACHE
            | export_flag::CAN_MULTI_CONN;
        flags |=
            if is_read_only { export_flag::READ_ONLY } else { export_flag::SEND_TRIM | export_flag::SEND_WRITE_ZEROES };
        if is_structured {
            flags |= export_flag::SEND_DF;
        }
        let context = Context {
            device,
            quota: Arc::clone(&self.quota),
            sizes: BlockSizes { minimum, preferred, maximum },
            payload_max,
            is_read_only,
            is_structured,
            has_allocation,
            failed_flush_sent: self.failed_flush_sent.clone(),
        };
        (context, ExportInfo { size: geometry.size, flags })
    }
}

impl std::fmt::Debug for Export {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Export({})", self.name)
    }
}

/// The exports that clients of one socket may see.
pub trait Exports: Send + Sync {
    /// The export that a client calls `name`; the empty name asks for the default one, if there is any.
    fn find(&self, name: &str) -> Option<Arc<Export>>;

    /// All of them.
    fn list(&self) -> Vec<Arc<Export>>;
}

/// A fixed list. The empty name means the only export, if there is only one.
impl Exports for Vec<Arc<Export>> {
    fn find(&self, name: &str) -> Option<Arc<Export>> {
        let named = self.iter().find(|export| export.name == name);
        let only = self.first().filter(|_| name.is_empty() && self.len() == 1);
        named.or(only).cloned()
    }

    fn list(&self) -> Vec<Arc<Export>> {
        self.clone()
    }
}
