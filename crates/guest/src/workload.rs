//! What a guest does once booted.

/// What the guest does once booted.
#[derive(Clone, Debug)]
pub enum Workload {
    /// Nothing, until it is killed.
    Idle,
    /// The verifying load.
    Load(Load),
    /// A shell script.
    Script(String),
}

/// The verifying load: random reads and writes, each read checked against the last acknowledged write, and the whole
/// disk again at the end.
#[derive(Clone, Debug)]
pub struct Load {
    /// The disk in the guest.
    pub device: String,
    /// Requests in flight.
    pub workers: u32,
    /// Bytes of a request, a multiple of 4096.
    pub io_bytes: u32,
    /// How many of a hundred requests read.
    pub read_percent: u32,
    /// Requests offered per second; 0 is as many as `workers` get done.
    pub rate: u32,
    /// How long to run; 0 is until told to stop.
    pub seconds: u32,
    /// How often it reports.
    pub interval_ms: u32,
    /// How much of the disk it uses; 0 is all.
    pub region_bytes: u64,
    /// A flush after so many writes of a worker; 0 is never.
    pub flush_every: u32,
    /// Whether [`create_filled`](crate::create_filled) filled the disk; otherwise the load fills it first.
    pub is_prefilled: bool,
    /// What its random numbers follow from.
    pub seed: u64,
}

impl Default for Load {
    /// Eight requests of 8 KiB in flight, 70 % reads, a flush now and then, a report every 200 ms.
    fn default() -> Self {
        Self {
            device: "/dev/vda".into(),
            workers: 8,
            io_bytes: 8192,
            read_percent: 70,
            rate: 0,
            seconds: 0,
            interval_ms: 200,
            region_bytes: 0,
            flush_every: 64,
            is_prefilled: false,
            seed: 1,
        }
    }
}

impl Load {
    /// The words that tell the program in the guest; without a load of a disk there is only memory.
    pub(crate) fn words(load: Option<&Self>, memory: Option<&MemoryLoad>) -> String {
        let none = Self { device: "none".into(), workers: 0, is_prefilled: true, ..Self::default() };
        let load = load.unwrap_or(&none);
        let Self { device, workers, io_bytes, read_percent, rate, seconds, interval_ms, region_bytes, .. } = load;
        let mut words = format!(
            "device={device} workers={workers} io_bytes={io_bytes} read_percent={read_percent} rate={rate} \
             seconds={seconds} interval_ms={interval_ms} region_bytes={region_bytes} flush_every={} prefilled={} \
             seed={}",
            load.flush_every,
            u8::from(load.is_prefilled),
            load.seed
        );
        if let Some(MemoryLoad { mib, rewrite_mib_per_second, hot_percent }) = memory {
            words +=
                &format!(" memory_mib={mib} rewrite_mib_per_second={rewrite_mib_per_second} hot_percent={hot_percent}");
        }
        words
    }
}

/// Memory of the guest that the load fills with bytes that no compression shortens, rewrites at a rate, and checks:
/// each page before it is rewritten, and all of them at the end.
#[derive(Clone, Copy, Debug)]
pub struct MemoryLoad {
    /// How much; the guest must have about 60 MiB more, see [`GuestSpec::memory_mib`](crate::GuestSpec::memory_mib).
    pub mib: u32,
    /// How much of it is rewritten in a second, in whole random pages. A guest that was too slow does not make up for
    /// it.
    pub rewrite_mib_per_second: u32,
    /// How many of a hundred pages are ever rewritten.
    pub hot_percent: u32,
}

impl Default for MemoryLoad {
    /// 64 MiB, of which a quarter is rewritten at 8 MiB a second.
    fn default() -> Self {
        Self { mib: 64, rewrite_mib_per_second: 8, hot_percent: 25 }
    }
}
