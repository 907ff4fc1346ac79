//! The commands about whole VMs.

use api::v1::{CacheTransfer, DiskHandling, MemoryEngine, VmDiskChoice};
use clap::{Args, Subcommand, ValueEnum};

use super::{HeadArgs, StrategyArg, VerifyArg};
use crate::rate::Rate;
use crate::span::Span;

#[derive(Debug, Subcommand)]
pub(crate) enum VmCommand {
    /// Make a running VM known
    #[command(after_help = "Examples:\n  transhume vm add web1 --qmp /run/qemu/web1.qmp\n  \
        transhume vm add web1 --libvirt web1")]
    Add(VmAddArgs),
    /// Forget a VM; it goes on running
    #[command(after_help = "Example: transhume vm rm web1")]
    Rm(VmArgs),
    /// List VMs
    #[command(after_help = "Examples:\n  transhume vm ls\n  transhume vm ls --found")]
    Ls(VmLsArgs),
    /// Show one VM: what QEMU says of it, its disks, its last move
    #[command(after_help = "Example: transhume vm show web1")]
    Show(VmArgs),
    /// Say what a move to another host would be, and what stands against it
    #[command(after_help = "Examples:\n  transhume vm plan web1 --to host2\n  \
        transhume vm plan web1 --to host2 --show-command")]
    Plan(VmPlanArgs),
    /// Print what to change so that the parallel engine can copy a VM's memory (`vm move --memory parallel`)
    #[command(after_help = "Example: transhume vm prepare web1\n\n\
        The VM must be started anew with what this prints. Nothing is changed by it.")]
    Prepare(VmArgs),
    /// Move a running VM to another host: memory, device state and disks
    #[command(after_help = "Example: transhume vm move web1 --to host2\n\n\
        The other host must be paired with this one (`transhume trust`) and let VMs come \
        (`run-vms` in its section [hosts], or `libvirt-vms` for domains of libvirt).")]
    Move(VmMoveArgs),
    /// Wait for the end of a VM's move, and show how far it is
    #[command(after_help = "Example: transhume vm watch web1")]
    Watch(VmArgs),
    /// Undo a VM's move: it goes on here
    #[command(after_help = "Example: transhume vm cancel web1")]
    Cancel(VmArgs),
    /// Try the other host again at once, if a VM's move has lost it
    #[command(after_help = "Example: transhume vm resume web1")]
    Resume(VmArgs),
    /// Give all disks of a VM back to its QEMU, which opens their files itself from then on
    #[command(after_help = "Example: transhume vm release web1\n\n\
        The disks of a VM that has come from another host are released by themselves after the move, \
        unless they have snapshots or the move was asked for with --keep-volumes.")]
    Release(VmArgs),
    /// Say who holds the disks of a VM that was on its way, and decide where nobody else can
    #[command(after_help = "Examples:\n  transhume vm resolve web1\n  transhume vm resolve web1 --give-back\n\n\
        Without a decision nothing is changed. A decision is needed only if one of the hosts is gone for good.")]
    Resolve(VmResolveArgs),
}

#[derive(Debug, Args)]
pub(crate) struct VmArgs {
    /// The VM
    pub(crate) name: String,
}

#[derive(Debug, Args)]
pub(crate) struct VmLsArgs {
    /// Those that run on this host and are not known here, with the command that adds each
    #[arg(long)]
    pub(crate) found: bool,
}

#[derive(Debug, Args)]
pub(crate) struct VmAddArgs {
    /// What to call it
    pub(crate) name: String,
    /// The unix socket of a QMP monitor of it that nobody else uses
    #[arg(long, value_name = "PATH", required_unless_present = "libvirt")]
    pub(crate) qmp: Option<std::path::PathBuf>,
    /// The libvirt domain that it is: libvirt migrates it, and it is libvirt's at the other host, too
    #[arg(long, value_name = "DOMAIN", conflicts_with = "qmp")]
    pub(crate) libvirt: Option<String>,
}

/// What copies the memory.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum MemoryArg {
    /// The parallel engine where it can, QEMU otherwise
    Auto,
    /// QEMU
    Qemu,
    /// The parallel engine, or nothing
    Parallel,
}

impl From<MemoryArg> for MemoryEngine {
    fn from(arg: MemoryArg) -> Self {
        match arg {
            MemoryArg::Auto => Self::Auto,
            MemoryArg::Qemu => Self::Qemu,
            MemoryArg::Parallel => Self::Parallel,
        }
    }
}

/// How a cache goes along.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum CacheTransferArg {
    /// It stays behind
    None,
    /// HOST warms its cache from the shared storage, by the list of this one
    Cachemior,
    /// The guest waits until every block is copied
    Firepan,
    /// The guest goes past the cache until every block is copied
    FirepanIf,
    /// What the guest misses is read of this host's cache
    RemoteRead,
    /// Hottest first from both, usable block by block; the memory waits until the most asked for are there
    Hybrid,
}

impl From<CacheTransferArg> for CacheTransfer {
    fn from(arg: CacheTransferArg) -> Self {
        match arg {
            CacheTransferArg::None => Self::None,
            CacheTransferArg::Cachemior => Self::Cachemior,
            CacheTransferArg::Firepan => Self::Firepan,
            CacheTransferArg::FirepanIf => Self::FirepanIf,
            CacheTransferArg::RemoteRead => Self::RemoteRead,
            CacheTransferArg::Hybrid => Self::Hybrid,
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct HowArgs {
    /// The VM
    pub(crate) name: String,
    /// The host, as `transhume trust --list` calls it
    #[arg(long, value_name = "HOST")]
    pub(crate) to: String,
    /// How a disk goes, by its node: `copied`, or `shared` if it stays on storage that both hosts reach; may be given again
    /// [default: shared if the other host reaches it where it is, copied otherwise]
    #[arg(long = "disk", value_name = "NODE=shared|copied", value_parser = disk_choice)]
    pub(crate) disks: Vec<VmDiskChoice>,
    /// Nothing starts the VM at this host again; needed where a block device that both hosts reach keeps its name, and no `vm-hook` sees to it
    #[arg(long)]
    pub(crate) no_persist: bool,
    /// All disks together, and then the memory, may take so much: 200MiB/s, 1Gbit/s
    #[arg(long, value_name = "RATE")]
    pub(crate) bandwidth: Option<Rate>,
    /// How much of the disks to compare before the switchover
    #[arg(long, value_enum, default_value = "sample")]
    pub(crate) verify: VerifyArg,
    /// How the copy of a disk and what the guest writes meanwhile come together
    #[arg(long, value_enum, default_value = "mirror")]
    pub(crate) strategy: StrategyArg,
    #[command(flatten)]
    pub(crate) head: HeadArgs,
    /// How many connections carry the memory [default: 1 before QEMU 8.1, then one a processor, 4 at most]
    #[arg(long, value_name = "N")]
    pub(crate) channels: Option<u8>,
    /// The copies of disks yield to guest requests that take longer than this [default: 40ms]
    #[arg(long, value_name = "TIME")]
    pub(crate) guest_latency: Option<Span>,
    /// For how long the guest may be stopped for the rest of its memory [default: 300ms]
    #[arg(long, value_name = "TIME")]
    pub(crate) downtime_limit: Option<Span>,
    /// Slow the guest's processors down as long as its memory does not converge
    #[arg(long)]
    pub(crate) auto_converge: bool,
    /// What copies the memory: `parallel` is the daemon's own engine, for VMs that were started for it (`transhume vm prepare`);
    /// `auto` takes it where it can
    #[arg(long, value_enum, default_value = "auto", value_name = "ENGINE")]
    pub(crate) memory: MemoryArg,
    /// The streams of the `parallel` engine may use a processor for so much of the time, in percent [default: 100]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=100))]
    pub(crate) memory_cpu: Option<u8>,
    /// Run the guest at HOST before all of its memory is there, if one pass over the memory leaves more than fits into the downtime limit.
    /// A host or link that is lost after that stops the guest until it is back; a lost source QEMU loses the guest's memory
    #[arg(long)]
    pub(crate) postcopy: bool,
    /// How the cache of a disk that stays where it is goes along [default: hybrid]
    #[arg(long, value_enum, value_name = "WAY")]
    pub(crate) cache_transfer: Option<CacheTransferArg>,
    /// The cache of HOST that it goes to [default: the one of the same name]
    #[arg(long, value_name = "CACHE")]
    pub(crate) cache_at: Option<String>,
    /// How long the memory may wait until the guest would hit at HOST as often as here, with `hybrid` [default: 2.5s a GB that is cached]
    #[arg(long, value_name = "TIME")]
    pub(crate) cache_wait: Option<Span>,
    /// Begin to warm beside the memory, with `cachemior`: only of volumes on NBD exports
    #[arg(long)]
    pub(crate) cache_warm_with_memory: bool,
    /// So many requests for blocks are in flight at most [default: 128]
    #[arg(long, value_name = "N")]
    pub(crate) cache_in_flight: Option<u32>,
    /// The transfer is over at the latest so long after the switchover; what has not come is read of the storage [default: 10min]
    #[arg(long, value_name = "TIME")]
    pub(crate) cache_time: Option<Span>,
    /// Undo the move if it is not over so long after its start. Until then it takes as much of the network as it needs
    /// for that, whatever others want
    #[arg(long, value_name = "TIME")]
    pub(crate) deadline: Option<Span>,
}

#[derive(Debug, Args)]
pub(crate) struct VmPlanArgs {
    #[command(flatten)]
    pub(crate) how: HowArgs,
    /// Show what QEMU is started with at the target, and what of it differs
    #[arg(long)]
    pub(crate) show_command: bool,
}

#[derive(Debug, Args)]
pub(crate) struct VmMoveArgs {
    #[command(flatten)]
    pub(crate) how: HowArgs,
    /// Delete the disks here after the switchover instead of renaming them *.moved-EPOCH
    #[arg(long)]
    pub(crate) delete_source: bool,
    /// Leave the disks volumes of HOST's daemon. They are given back to the VM's QEMU there otherwise
    #[arg(long)]
    pub(crate) keep_volumes: bool,
    /// Do not wait for the end
    #[arg(long)]
    pub(crate) detach: bool,
}

#[derive(Debug, Args)]
pub(crate) struct VmResolveArgs {
    /// The VM
    pub(crate) name: String,
    /// The host that it was moved to is to hold its disks
    #[arg(long, conflicts_with = "give_back")]
    pub(crate) take: bool,
    /// The host that it was moved from is to hold them
    #[arg(long)]
    pub(crate) give_back: bool,
    /// Give it back although the other host does not answer: if that has taken it, there are two of it
    #[arg(long, requires = "give_back")]
    pub(crate) risk: bool,
    /// The rest of the memory of one that follows its guest never comes: its QEMU here is ended
    #[arg(long, conflicts_with_all = ["take", "give_back"])]
    pub(crate) lost: bool,
}

/// How a disk goes, as a user writes it.
fn disk_choice(text: &str) -> Result<VmDiskChoice, String> {
    let parsed = text.rsplit_once('=').and_then(|(node, handling)| {
        let handling = match handling {
            "shared" => DiskHandling::Shared,
            "copied" => DiskHandling::Copied,
            _ => return None,
        };
        Some(VmDiskChoice { node: node.to_owned(), handling })
    });
    parsed.filter(|choice| !choice.node.is_empty()).ok_or_else(|| "write NODE=shared or NODE=copied".to_owned())
}
