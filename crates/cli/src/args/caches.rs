//! The commands about caches.

use api::v1::{CacheMode, CachePolicy};
use clap::{Args, Subcommand, ValueEnum};

use crate::rate::Size;

#[derive(Debug, Subcommand)]
pub(crate) enum CacheCommand {
    /// Make a cache on a store of the host's flash
    #[command(after_help = "Examples:\n  transhume cache create ssd --store file:/nvme0/c.img,size=40GiB\n  \
        transhume cache create ssd --store file:/dev/nvme1n1 --policy lru\n\n\
        Then: transhume volume layer add web1 cache --cache ssd --size 10GiB")]
    Create(CacheCreateArgs),
    /// List caches
    #[command(after_help = "Example: transhume cache ls")]
    Ls,
    /// Show a cache, and what volumes have of it
    #[command(after_help = "Example: transhume cache show ssd")]
    Show(CacheNameArgs),
    /// Change how much of its store a cache uses
    #[command(after_help = "Examples:\n  transhume cache resize ssd                 (the block device has grown)\n  \
        transhume cache resize ssd --size 60GiB    (a file that was made for it gets larger)\n\n\
        How much one volume caches is changed by: transhume volume layer set VOLUME cache --size SIZE")]
    Resize(CacheResizeArgs),
    /// Bring all that only a cache has to the backends of its volumes; they go on using it
    #[command(after_help = "Example: transhume cache drain ssd")]
    Drain(CacheNameArgs),
    /// Remove a cache that no volume has a part of
    #[command(after_help = "Example: transhume cache rm ssd")]
    Rm(CacheNameArgs),
}

#[derive(Debug, Args)]
pub(crate) struct CacheCreateArgs {
    /// What to call it
    pub(crate) name: String,
    /// Where it is: file:PATH[,size=SIZE][,cache=auto|direct|page]. With a size the file is made, without one it is there, or is a
    /// block device, and its contents are overwritten
    #[arg(long, value_name = "STORE")]
    pub(crate) store: String,
    /// Which block goes when a place is needed, unless a volume says otherwise [default: s3-fifo]
    #[arg(long, value_enum)]
    pub(crate) policy: Option<CachePolicyArg>,
}

#[derive(Debug, Args)]
pub(crate) struct CacheResizeArgs {
    /// The cache
    pub(crate) name: String,
    /// How much of the store is for volumes [default: all that it has by now]
    #[arg(long, value_name = "SIZE")]
    pub(crate) size: Option<Size>,
}

#[derive(Debug, Args)]
pub(crate) struct CacheNameArgs {
    /// The cache
    pub(crate) name: String,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum CacheModeArg {
    /// Writes go to the volume's backend, and what is cached of them is dropped
    ReadOnly,
    /// Writes go to the volume's backend, and then what is cached of them is updated
    WriteThrough,
    /// Writes go to the flash, and later to the volume's backend
    WriteBack,
}

impl From<CacheModeArg> for CacheMode {
    fn from(mode: CacheModeArg) -> Self {
        match mode {
            CacheModeArg::ReadOnly => Self::ReadOnly,
            CacheModeArg::WriteThrough => Self::WriteThrough,
            CacheModeArg::WriteBack => Self::WriteBack,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum CachePolicyArg {
    /// The block that was used least recently
    Lru,
    /// The block that has been there longest
    Fifo,
    /// Any block
    Random,
    /// S3-FIFO: only what is asked for again gets from a small queue into the main one
    #[value(name = "s3-fifo")]
    S3Fifo,
}

impl From<CachePolicyArg> for CachePolicy {
    fn from(policy: CachePolicyArg) -> Self {
        match policy {
            CachePolicyArg::Lru => Self::Lru,
            CachePolicyArg::Fifo => Self::Fifo,
            CachePolicyArg::Random => Self::Random,
            CachePolicyArg::S3Fifo => Self::S3Fifo,
        }
    }
}
