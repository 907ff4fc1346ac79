//! `NAME=VALUE` words.

pub(crate) struct Options {
    pub(crate) socket: String,
    pub(crate) export: String,
    pub(crate) connections: usize,
    /// Requests in flight when no rate is offered.
    pub(crate) depth: usize,
    pub(crate) io_bytes: u32,
    pub(crate) read_percent: u32,
    pub(crate) rate: u32,
    pub(crate) seconds: u64,
    pub(crate) interval_ms: u64,
    pub(crate) region_bytes: u64,
    pub(crate) flush_every: u64,
    /// Half of the requests go to the first so many slots; 0 for all to all.
    pub(crate) hot_slots: u64,
    /// Requests go to so many zones of 1 MiB only, which lie at random; 0 for all to all.
    pub(crate) zones: usize,
    /// Zipf's exponent over these zones, in hundredths.
    pub(crate) zipf_percent: u32,
    /// How many of a hundred writes write zeroes, half of them as holes.
    pub(crate) zero_percent: u32,
    /// How many of a hundred writes are discards.
    pub(crate) discard_percent: u32,
    /// How many of a hundred writes of any kind must be durable before they are answered.
    pub(crate) forced_percent: u32,
    /// How long to try to make a lost connection again; 0 for not at all.
    pub(crate) reconnect_seconds: u64,
    /// Whether every block was filled with generation 1 before, and is checked and written by the pattern.
    pub(crate) is_verifying: bool,
    pub(crate) seed: u64,
}

pub(crate) fn parse(words: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut options = Options {
        socket: String::new(),
        export: String::new(),
        connections: 1,
        depth: 16,
        io_bytes: 8192,
        read_percent: 70,
        rate: 0,
        seconds: 0,
        interval_ms: 0,
        region_bytes: 0,
        flush_every: 0,
        hot_slots: 0,
        zones: 0,
        zipf_percent: 0,
        zero_percent: 0,
        discard_percent: 0,
        forced_percent: 0,
        reconnect_seconds: 0,
        is_verifying: false,
        seed: 1,
    };
    for word in words {
        let (name, value) = word.split_once('=').ok_or(format!("{word}: not NAME=VALUE"))?;
        let number = || value.parse::<u64>().map_err(|error| format!("{word}: {error}"));
        let small = || value.parse::<u32>().map_err(|error| format!("{word}: {error}"));
        match name {
            "socket" => options.socket = value.into(),
            "export" => options.export = value.into(),
            "connections" => options.connections = small()?.max(1) as usize,
            "depth" => options.depth = small()?.max(1) as usize,
            "io_bytes" => options.io_bytes = small()?,
            "read_percent" => options.read_percent = small()?,
            "rate" => options.rate = small()?,
            "seconds" => options.seconds = number()?,
            "interval_ms" => options.interval_ms = number()?,
            "region_bytes" => options.region_bytes = number()?,
            "flush_every" => options.flush_every = number()?,
            "hot_slots" => options.hot_slots = number()?,
            "zones" => options.zones = small()? as usize,
            "zipf_percent" => options.zipf_percent = small()?,
            "zero_percent" => options.zero_percent = small()?,
            "discard_percent" => options.discard_percent = small()?,
            "forced_percent" => options.forced_percent = small()?,
            "reconnect_seconds" => options.reconnect_seconds = number()?,
            "verify" => options.is_verifying = number()? == 1,
            "seed" => options.seed = number()?,
            _ => return Err(format!("{name}: no such option")),
        }
    }
    if options.io_bytes == 0 || !(options.io_bytes as usize).is_multiple_of(crate::pattern::BLOCK_BYTES) {
        return Err("io_bytes is a multiple of 4096".into());
    }
    if options.zones > 0 && !crate::zones::ZONE_BYTES.is_multiple_of(u64::from(options.io_bytes)) {
        return Err("a zone of 1 MiB is not a multiple of io_bytes".into());
    }
    Ok(options)
}
