//! The commands about surrogates.

use clap::{Args, Subcommand};

use crate::rate::Size;

#[derive(Debug, Subcommand)]
pub(crate) enum SurrogateCommand {
    /// Make a surrogate of one store, or of two on different devices, which then hold the same
    #[command(after_help = "Examples:\n  \
        transhume surrogate create fast --store file:/nvme0/s.img,size=40GiB --store file:/nvme1/s.img,size=40GiB\n  \
        transhume surrogate create fast --store file:/dev/nvme1n1 --partition 20GiB\n  \
        transhume surrogate create far --store nbd://10.0.0.7:10809/s\n\n\
        Then: transhume move web1 --to HOST --surrogate fast")]
    Create(SurrogateCreateArgs),
    /// List surrogates
    #[command(after_help = "Example: transhume surrogate ls")]
    Ls,
    /// Show a surrogate, and what volumes have of it
    #[command(after_help = "Example: transhume surrogate show fast")]
    Show(SurrogateNameArgs),
    /// Give no further volume a part; those that have one keep it until their moves are over
    #[command(after_help = "Example: transhume surrogate drain fast")]
    Drain(SurrogateNameArgs),
    /// Copy what a lost store of two had from the other one, while the guests work
    #[command(after_help = "Examples:\n  \
        transhume surrogate repair fast --store file:/nvme2/s.img,size=40GiB\n  \
        transhume surrogate repair fast\n\n\
        Without --store the same store is used again. `surrogate show` says which one is lost.")]
    Repair(SurrogateRepairArgs),
    /// Remove a surrogate that no volume has a part of
    #[command(after_help = "Example: transhume surrogate rm fast")]
    Rm(SurrogateNameArgs),
}

#[derive(Debug, Args)]
pub(crate) struct SurrogateCreateArgs {
    /// What to call it
    pub(crate) name: String,
    /// Where it is: file:PATH[,size=SIZE][,cache=auto|direct|page]. With a size the file is made, without one it is there, or is a
    /// block device. Not on a rotating disk that a volume's source is on. Or a volume of another host, HOST:VOLUME, or the
    /// export of an NBD server, as `move --to` takes it
    #[arg(long, value_name = "STORE", required = true)]
    pub(crate) store: Vec<String>,
    /// How much of it a volume gets [default: an eighth]
    #[arg(long, value_name = "SIZE")]
    pub(crate) partition: Option<Size>,
    /// The unit of what is popular: a power of two from 64KiB to 1MiB [default: 1MiB]
    #[arg(long, value_name = "SIZE")]
    pub(crate) chunk: Option<Size>,
}

#[derive(Debug, Args)]
pub(crate) struct SurrogateRepairArgs {
    /// The surrogate
    pub(crate) name: String,
    /// Another store in the place of the lost one, written as for `surrogate create`
    #[arg(long, value_name = "STORE")]
    pub(crate) store: Option<String>,
    /// Do not wait for the end
    #[arg(long)]
    pub(crate) detach: bool,
}

#[derive(Debug, Args)]
pub(crate) struct SurrogateNameArgs {
    /// The surrogate
    pub(crate) name: String,
}
