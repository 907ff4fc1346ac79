//! What the load is told to do.

use crate::pattern::BLOCK_BYTES;

/// The words of its command line, read.
pub(crate) struct Options {
    /// `None` if it has no disk.
    pub(crate) device: Option<String>,
    pub(crate) workers: u64,
    pub(crate) io_bytes: usize,
    pub(crate) read_percent: u64,
    pub(crate) rate: u64,
    pub(crate) seconds: u64,
    pub(crate) interval_ms: u64,
    pub(crate) region_bytes: u64,
    pub(crate) flush_every: u64,
    pub(crate) is_prefilled: bool,
    pub(crate) seed: u64,
    /// 0 is no memory.
    pub(crate) memory_mib: u64,
    pub(crate) rewrite_mib_per_second: u64,
    pub(crate) hot_percent: u64,
}

/// Reads words `NAME=VALUE`.
pub(crate) fn parse(words: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut options = Options {
        device: Some("/dev/vda".into()),
        workers: 8,
        io_bytes: 8192,
        read_percent: 70,
        rate: 0,
        seconds: 0,
        interval_ms: 1000,
        region_bytes: 0,
        flush_every: 0,
        is_prefilled: false,
        seed: 1,
        memory_mib: 0,
        rewrite_mib_per_second: 0,
        hot_percent: 100,
    };
    for word in words {
        let (name, value) = word.split_once('=').ok_or(format!("{word}: not NAME=VALUE"))?;
        let number = value.parse::<u64>();
        let number = || number.clone().map_err(|error| format!("{word}: {error}"));
        match name {
            "device" => options.device = (value != "none").then(|| value.into()),
            "workers" => options.workers = number()?,
            "io_bytes" => options.io_bytes = number()? as usize,
            "read_percent" => options.read_percent = number()?,
            "rate" => options.rate = number()?,
            "seconds" => options.seconds = number()?,
            "interval_ms" => options.interval_ms = number()?,
            "region_bytes" => options.region_bytes = number()?,
            "flush_every" => options.flush_every = number()?,
            "prefilled" => options.is_prefilled = number()? == 1,
            "seed" => options.seed = number()?,
            "memory_mib" => options.memory_mib = number()?,
            "rewrite_mib_per_second" => options.rewrite_mib_per_second = number()?,
            "hot_percent" => options.hot_percent = number()?.clamp(1, 100),
            _ => return Err(format!("{name}: no such option")),
        }
    }
    if options.io_bytes == 0 || !options.io_bytes.is_multiple_of(BLOCK_BYTES) {
        return Err("io_bytes is a multiple of 4096".into());
    }
    Ok(options)
}
