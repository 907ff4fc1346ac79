//! The commands about layers of volumes.

use clap::{Args, Subcommand, ValueEnum};

use super::{CacheModeArg, CachePolicyArg, NameArgs};
use crate::rate::{Rate, Size};

#[derive(Debug, Subcommand)]
pub(crate) enum LayerCommand {
    /// Add a layer; a throttle that is there is changed
    #[command(after_help = "Examples:\n  transhume volume layer add web1 throttle --iops 500 --bandwidth 50MiB/s\n  \
        transhume volume layer add web1 cache --cache ssd --size 10GiB --mode write-back\n  \
        transhume volume layer add web1 surrogate --surrogate fast --popular-threshold 2")]
    Add(LayerAddArgs),
    /// Change a volume's cache while the guest works
    #[command(after_help = "Examples:\n  transhume volume layer set web1 cache --mode write-through\n  \
        transhume volume layer set web1 cache --size 5GiB\n\n\
        From write-back it returns once all that only the cache had is durable in the volume's backend.")]
    Set(LayerSetArgs),
    /// List the layers of a volume, the lowest first
    #[command(after_help = "Example: transhume volume layer ls web1")]
    Ls(NameArgs),
    /// Take a layer out; what only a cache or a surrogate has goes to the volume's backend first
    #[command(
        after_help = "Examples:\n  transhume volume layer rm web1 throttle\n  transhume volume layer rm web1 cache"
    )]
    Rm(LayerRemoveArgs),
}

#[derive(Debug, Args)]
pub(crate) struct LayerAddArgs {
    /// The volume
    pub(crate) name: String,
    /// What it shall do
    #[arg(value_enum)]
    pub(crate) kind: LayerKindArg,
    /// Of a throttle: so many reads and writes a second at most
    #[arg(long, value_name = "NUMBER")]
    pub(crate) iops: Option<u64>,
    /// Of a throttle: so much read and written a second at most: 50MiB/s
    #[arg(long, value_name = "RATE")]
    pub(crate) bandwidth: Option<Rate>,
    /// Of a cache: on which cache of the host
    #[arg(long, value_name = "NAME")]
    pub(crate) cache: Option<String>,
    /// Of a cache: how much of it
    #[arg(long, value_name = "SIZE")]
    pub(crate) size: Option<Size>,
    /// Of a cache: what it does with writes [default: write-through]
    #[arg(long, value_enum)]
    pub(crate) mode: Option<CacheModeArg>,
    /// Of a cache: which block goes when a place is needed [default: what the cache of the host says]
    #[arg(long, value_enum)]
    pub(crate) policy: Option<CachePolicyArg>,
    /// Of a cache: the unit of caching, 4KiB to 64KiB [default: 4KiB]
    #[arg(long, value_name = "SIZE")]
    pub(crate) block: Option<Size>,
    /// Of a cache: do not cache reads that follow each other for more than this; `none` caches all [default: 4MiB]
    #[arg(long, value_name = "SIZE", value_parser = size_or_none)]
    pub(crate) sequential: Option<u64>,
    /// Of a surrogate: which one of the host
    #[arg(long, value_name = "NAME")]
    pub(crate) surrogate: Option<String>,
    /// Of a surrogate: a chunk is popular from so many requests on [default: 1]
    #[arg(long, value_name = "N", requires = "surrogate")]
    pub(crate) popular_threshold: Option<u16>,
    /// Of a surrogate: also for a disk without a head, such as flash, where there is little to gain
    #[arg(long, requires = "surrogate")]
    pub(crate) surrogate_on_flash: bool,
    /// Of a surrogate of one store: that may hold the only copy of what the guest writes
    #[arg(long, requires = "surrogate")]
    pub(crate) sole_copy: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LayerKindArg {
    /// Limits what clients may ask for
    Throttle,
    /// Keeps blocks on the host's flash
    Cache,
    /// Serves what is popular, and takes what the guest writes, before the volume is moved
    Surrogate,
}

#[derive(Debug, Args)]
pub(crate) struct LayerSetArgs {
    /// The volume
    pub(crate) name: String,
    /// The layer: `cache`, or its identity as `layer ls --json` says it
    pub(crate) layer: String,
    /// What it does with writes; `write-back` also calls off a removal that is under way
    #[arg(long, value_enum, required_unless_present = "size")]
    pub(crate) mode: Option<CacheModeArg>,
    /// How much it caches: no more than when it was added
    #[arg(long, value_name = "SIZE")]
    pub(crate) size: Option<Size>,
}

#[derive(Debug, Args)]
pub(crate) struct LayerRemoveArgs {
    /// The volume
    pub(crate) name: String,
    /// The layer: its kind, or its identity as `layer ls --json` says it
    pub(crate) layer: String,
    /// Do not wait for the end
    #[arg(long)]
    pub(crate) detach: bool,
    /// Of a cache or a surrogate whose stores are lost: give up what only it has. The guest must be stopped: its disk is older afterwards, in parts
    #[arg(long)]
    pub(crate) discard_dirty: bool,
}

/// A size, or none as zero.
fn size_or_none(text: &str) -> Result<u64, String> {
    match text {
        "none" => Ok(0),
        size => size.parse().map(|size: Size| size.0),
    }
}
