//! The command line: every command and flag, once, with its help and an example.

#![allow(rustdoc::broken_intra_doc_links, reason = "doc comments here are help texts")]

mod caches;
mod layers;
mod surrogates;
mod vm;

use std::path::PathBuf;

use api::v1::{OnNoConverge, Schedule, Strategy, Verify};
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::rate::{Rate, Size};
use crate::span::{Span, span_or_none};

pub(crate) use caches::{CacheCommand, CacheModeArg, CachePolicyArg};
pub(crate) use layers::{LayerAddArgs, LayerCommand, LayerKindArg};
pub(crate) use surrogates::SurrogateCommand;
pub(crate) use vm::{HowArgs, VmCommand};

/// Moves the disks of running virtual machines while they work.
#[derive(Debug, Parser)]
#[command(
    name = "transhume",
    version,
    max_term_width = 100,
    after_help = "Example: move the disk of a running VM in three commands\n  \
        transhume adopt --qmp /run/qemu/web1.qmp --node disk0 --name web1\n  \
        transhume move web1 --to file:/mnt/new/web1.img --verify full --no-persist\n  \
        transhume release web1"
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What every command takes.
#[derive(Clone, Debug, Args)]
pub(crate) struct Common {
    /// The daemon's socket
    #[arg(long, global = true, value_name = "PATH", env = "TRANSHUME_API", default_value = api::DEFAULT_SOCKET)]
    pub(crate) api: String,
    /// Print JSON instead of words
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve files and block devices as volumes
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Move whole VMs to other hosts: memory, device state and disks
    #[command(subcommand)]
    Vm(VmCommand),
    /// Take over the disk of a running VM, or look which disks can be taken over
    #[command(after_help = "Examples:\n  transhume adopt --check --qmp /run/qemu/web1.qmp\n  \
        transhume adopt --qmp /run/qemu/web1.qmp --node disk0 --name web1\n  \
        transhume adopt --libvirt web1 --node vda --name web1")]
    Adopt(AdoptArgs),
    /// Give an adopted disk back to its VM
    #[command(after_help = "Example: transhume release web1")]
    Release(NameArgs),
    /// Move a volume to another place while it is used
    #[command(after_help = "Examples:\n  transhume move web1 --to file:/mnt/new/web1.img --verify full\n  \
        transhume move web1 --to file:/dev/vg0/web1 --overwrite --bandwidth 200MiB/s --detach\n  \
        transhume move web1 --to host2\n  \
        transhume move web1 --all-disks --to 'file:/mnt/new/{name}.img' --no-persist")]
    Move(MoveArgs),
    /// Show the daemon, its volumes, and what is under way
    #[command(after_help = "Example: transhume status")]
    Status,
    /// Watch moves: progress, time left, what the guests do and feel
    #[command(after_help = "Example: transhume watch web1")]
    Watch(WatchArgs),
    /// Stop copying; the guest's writes still go to both sides
    #[command(after_help = "Example: transhume pause web1")]
    Pause(NameArgs),
    /// Go on after a pause, or after the target was lost
    #[command(after_help = "Example: transhume resume web1")]
    Resume(NameArgs),
    /// Undo a move: the guest stays on the source, the target is removed
    #[command(after_help = "Example: transhume cancel web1")]
    Cancel(NameArgs),
    /// Change a move under way
    #[command(after_help = "Examples: transhume set web1 --bandwidth 50MiB/s; transhume set web1 --deadline 2h")]
    Set(SetArgs),
    /// Say what a move would cost, and whether it would be refused
    #[command(after_help = "Example: transhume plan web1 --to file:/mnt/new/web1.img --verify full")]
    Plan(PlanArgs),
    /// Say who holds a volume that was on its way between two hosts, and decide where nobody else can
    #[command(after_help = "Examples:\n  transhume resolve web1\n  transhume resolve web1 --give-back\n\n\
        Without a decision nothing is changed. A decision is needed only if one of the hosts is gone for good.")]
    Resolve(ResolveArgs),
    /// List moves
    #[command(after_help = "Example: transhume jobs --all")]
    Jobs(JobsArgs),
    /// Show this host as others know it: name, addresses, fingerprint
    #[command(after_help = "Example: transhume host")]
    Host(HostArgs),
    /// Make and remove surrogates: stores that serve a guest's popular data while its volume is copied
    #[command(subcommand)]
    Surrogate(SurrogateCommand),
    /// Make and remove caches: stores on flash that keep blocks of volumes
    #[command(subcommand)]
    Cache(CacheCommand),
    /// Pair this host with another one, or show and change whom it trusts
    #[command(after_help = "Example: pair two hosts\n  \
        a# transhume trust --invite\n  \
        b# transhume trust a.example:10810 K7QM-3XWD\n\
        Then: transhume trust --list; transhume trust --remove b")]
    Trust(TrustArgs),
    /// Copy a disk that nobody uses, between files, block devices and NBD servers, without the daemon
    #[command(after_help = "Examples: transhume copy nbd://10.0.0.7:10809/web1 --to file:/vm/web1.img\n          \
        transhume copy file:/vm/web1.img --to 'nbd+unix:///web1?socket=/run/nbdkit.sock' --verify full\n          \
        transhume copy 'nbds://far.example/web1?tls-certificates=/etc/pki/libnbd' --to file:/vm/web1.img\n\n\
        What is interrupted is begun again: a target that was created for the copy is removed, another needs --overwrite.")]
    Copy(CopyArgs),
    /// Bring a volume's export back from its journal alone, when the daemon cannot start
    #[command(after_help = "Example: transhume rescue web1 --state-dir /var/lib/transhume\n\n\
        Serves until it is stopped with Ctrl-C or SIGTERM. The daemon must not be running.")]
    Rescue(RescueArgs),
    /// Show the versions of this program and of the daemon
    #[command(after_help = "Example: transhume version --json")]
    Version,
}

#[derive(Debug, Subcommand)]
pub(crate) enum VolumeCommand {
    /// Serve a file or block device over NBD
    #[command(after_help = "Example: transhume volume attach web1 --backend file:/vm/web1.img \\\n  \
        --export 'nbd+unix:///web1?socket=/run/transhume/web1.sock'")]
    Attach(AttachArgs),
    /// List volumes
    #[command(after_help = "Example: transhume volume ls")]
    Ls,
    /// Show one volume
    #[command(after_help = "Example: transhume volume show web1")]
    Show(NameArgs),
    /// Stop serving a volume; its bytes stay where they are
    #[command(after_help = "Example: transhume volume detach web1")]
    Detach(NameArgs),
    /// Say that what has the name of a volume's image now is the volume's own, after the daemon has refused it
    #[command(after_help = "Example: transhume volume accept web1\n\n\
        For a volume that is down because its image is taken for another file, as after a file system without birth times came back \
        under another number, or because its guest has written a tombstone itself. What has the name must be what the guest has used last: \
        nobody can check that.")]
    Accept(NameArgs),
    /// Take, list, remove and revert to snapshots of a volume, while it is used
    #[command(subcommand)]
    Snapshot(SnapshotCommand),
    /// Cache a volume, limit what its clients may ask for, and list its layers
    #[command(subcommand)]
    Layer(LayerCommand),
}

#[derive(Debug, Subcommand)]
pub(crate) enum SnapshotCommand {
    /// Take a snapshot: what is written from here on goes to a file of its own
    #[command(after_help = "Examples:\n  transhume volume snapshot add web1 before-upgrade\n  \
        transhume volume snapshot add web1 before-upgrade --at /mnt/fast\n\n\
        What the guest has not flushed yet is not in it, as after a power loss. For a snapshot of files that are whole,\n\
        have the guest freeze its file systems first.")]
    Add(SnapshotAddArgs),
    /// List snapshots, the oldest first
    #[command(after_help = "Example: transhume volume snapshot ls web1")]
    Ls(NameArgs),
    /// Remove a snapshot: what was written since stays, in what lies below
    #[command(after_help = "Example: transhume volume snapshot rm web1 before-upgrade")]
    Rm(SnapshotRemoveArgs),
    /// Throw away what was written since a snapshot, while no client is connected; the snapshot stays
    #[command(after_help = "Example: transhume volume snapshot revert web1 before-upgrade")]
    Revert(SnapshotRevertArgs),
}

#[derive(Debug, Args)]
pub(crate) struct SnapshotAddArgs {
    /// The volume
    pub(crate) name: String,
    /// What to call the snapshot [default: after the time]
    pub(crate) snapshot: Option<String>,
    /// The directory of its file [default: beside the image]
    #[arg(long, value_name = "DIR")]
    pub(crate) at: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct SnapshotRemoveArgs {
    /// The volume
    pub(crate) name: String,
    /// The snapshot
    pub(crate) snapshot: String,
    /// Do not wait for the end
    #[arg(long)]
    pub(crate) detach: bool,
}

#[derive(Debug, Args)]
pub(crate) struct SnapshotRevertArgs {
    /// The volume
    pub(crate) name: String,
    /// The snapshot [default: the newest]
    pub(crate) snapshot: Option<String>,
    /// Throw newer snapshots away, too
    #[arg(long)]
    pub(crate) discard_newer: bool,
}

#[derive(Debug, Args)]
pub(crate) struct NameArgs {
    /// The volume
    pub(crate) name: String,
}

#[derive(Debug, Args)]
pub(crate) struct AttachArgs {
    /// What to call the volume
    pub(crate) name: String,
    /// What holds it: file:PATH[,format=raw][,cache=auto|direct|page]
    #[arg(long, value_name = "BACKEND")]
    pub(crate) backend: String,
    /// Where to serve it: nbd+unix:///NAME?socket=PATH or nbd://HOST:PORT/NAME; encrypted, for clients that show a certificate,
    /// nbds://HOST:PORT/NAME?tls-certificates=DIR
    #[arg(long, value_name = "URI")]
    pub(crate) export: String,
    /// Refuse writes
    #[arg(long)]
    pub(crate) read_only: bool,
    /// Serve a block device although it begins with a tombstone: the guest has written that itself
    #[arg(long)]
    pub(crate) accept_tombstone: bool,
}

#[derive(Debug, Args)]
pub(crate) struct AdoptArgs {
    /// The unix socket of a QMP monitor that nobody else uses; with --check several times
    #[arg(long, value_name = "SOCKET", required_unless_present = "libvirt", conflicts_with = "libvirt")]
    pub(crate) qmp: Vec<PathBuf>,
    /// A libvirt domain; with --check several times
    #[arg(long, value_name = "DOMAIN")]
    pub(crate) libvirt: Vec<String>,
    /// The block node of the disk, as --check shows it, or its name in the libvirt domain
    #[arg(long, required_unless_present = "check")]
    pub(crate) node: Option<String>,
    /// What to call the volume
    #[arg(long, required_unless_present = "check")]
    pub(crate) name: Option<String>,
    /// Only look: every disk of every VM given, whether it can be adopted, and if not, why (then it exits with 23)
    #[arg(long, conflicts_with_all = ["node", "name", "accept_option_loss"])]
    pub(crate) check: bool,
    /// Go on although options of the disk are unknown and fall back to QEMU's defaults
    #[arg(long)]
    pub(crate) accept_option_loss: bool,
    /// Adopt a disk although it begins with a tombstone: the guest has written that itself
    #[arg(long)]
    pub(crate) accept_tombstone: bool,
    /// The disk's format, of one whose -drive has no format=: add it there, too, before the VM is started again
    #[arg(long, value_name = "FORMAT", conflicts_with = "check")]
    pub(crate) format: Option<ImageFormatArg>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum ImageFormatArg {
    /// The bytes of the disk, and nothing else
    Raw,
    /// A container of QEMU's
    Qcow2,
}

impl ImageFormatArg {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum VerifyArg {
    /// Compare nothing
    Off,
    /// Compare a random sample, and all that something happened to
    Sample,
    /// Compare every chunk, and print the source's BLAKE3
    Full,
}

impl From<VerifyArg> for Verify {
    fn from(verify: VerifyArg) -> Self {
        match verify {
            VerifyArg::Off => Self::Off,
            VerifyArg::Sample => Self::Sample,
            VerifyArg::Full => Self::Full,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum StrategyArg {
    /// The guest's writes go to both sides: converges under any load
    Mirror,
    /// What the guest writes is copied again, pass after pass, and the rest while it is held
    Dbt,
    /// The same, but what it writes ahead of the copy is copied once
    IncrementalDbt,
    /// The guest's writes go to overlays, which are folded one after the other, the last one with the guest held
    Snapshot,
    /// The source answers the guest's writes, and a bounded buffer follows to the target in order: for far and slow ones
    MirrorAsync,
    /// Mirrored or copied again, chunk by chunk, whichever is expected to cost less; everything is mirrored in the end
    Auto,
    /// As mirror, with no more than the ESX paper has of it: one window, in which the guest's writes wait: to compare with
    MirrorPaper,
}

impl From<StrategyArg> for Strategy {
    fn from(strategy: StrategyArg) -> Self {
        match strategy {
            StrategyArg::Mirror => Self::Mirror,
            StrategyArg::Dbt => Self::Dbt,
            StrategyArg::IncrementalDbt => Self::IncrementalDbt,
            StrategyArg::Snapshot => Self::Snapshot,
            StrategyArg::MirrorAsync => Self::MirrorAsync,
            StrategyArg::Auto => Self::Auto,
            StrategyArg::MirrorPaper => Self::MirrorPaper,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum OnNoConvergeArg {
    /// End the move; the guest stays on the source
    Abort,
    /// Hold the guest until the rest is copied, if half a minute is enough; otherwise end the move
    Force,
    /// Go on as a mirror, which converges
    Mirror,
}

impl From<OnNoConvergeArg> for OnNoConverge {
    fn from(choice: OnNoConvergeArg) -> Self {
        match choice {
            OnNoConvergeArg::Abort => Self::Abort,
            OnNoConvergeArg::Force => Self::Force,
            OnNoConvergeArg::Mirror => Self::Mirror,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum ScheduleArg {
    /// In the order of the volume
    Sequential,
    /// Where the head of the source's disk is, after the guest's requests; in order if the disk is known to have none
    Follow,
    /// What the guest touches least comes first
    ColdFirst,
}

impl From<ScheduleArg> for Schedule {
    fn from(schedule: ScheduleArg) -> Self {
        match schedule {
            ScheduleArg::Sequential => Self::Sequential,
            ScheduleArg::Follow => Self::Follow,
            ScheduleArg::ColdFirst => Self::ColdFirst,
        }
    }
}

/// How copy and guest writes come together.
#[derive(Debug, Args)]
pub(crate) struct StrategyArgs {
    /// How the copy and what the guest writes meanwhile come together
    #[arg(long, value_enum, default_value = "mirror")]
    pub(crate) strategy: StrategyArg,
    #[command(flatten)]
    pub(crate) head: HeadArgs,
    /// Of strategies that iterate: put off copies of what the guest writes again and again
    #[arg(long)]
    pub(crate) hot_blocks: bool,
    /// Look for chunks of zeroes in all that is copied, and do not write them to a target that reads zeroes there. What
    /// file systems could share is read for that
    #[arg(long)]
    pub(crate) skip_zero: bool,
    /// Of strategies that iterate: hold the guest for the rest if that is expected to take no longer [default: 200ms]
    #[arg(long, value_name = "TIME")]
    pub(crate) downtime_limit: Option<Span>,
    /// Be done so long after the start: network and processors are taken as that needs. Strategies that iterate and
    /// would not be done then do what --on-no-converge says
    #[arg(long, value_name = "TIME")]
    pub(crate) deadline: Option<Span>,
    /// Of strategies that iterate: what to do when what is left gets no smaller [default: mirror]
    #[arg(long, value_enum)]
    pub(crate) on_no_converge: Option<OnNoConvergeArg>,
    /// Of mirror-async: how far the target may be behind, 1MiB to 1GiB; then the guest's writes wait [default: 64MiB]
    #[arg(long, value_name = "SIZE")]
    pub(crate) buffer: Option<Size>,
}

/// What spares the head of a source's disk.
#[derive(Debug, Args)]
pub(crate) struct HeadArgs {
    /// In which order a volume is copied. Not with mirror-paper or snapshot, which copy in order
    #[arg(long, value_enum, default_value = "sequential")]
    pub(crate) schedule: ScheduleArg,
    /// Of the schedule follow: serve so many of the guest's requests before one run is copied, 1 to 4 [default: 2]
    #[arg(long, value_name = "K")]
    pub(crate) follow_ratio: Option<u8>,
    /// Keep chunks of a source in so much memory, so that its disk is read once for guest and copy, 1MiB to 64GiB. Not
    /// with snapshot or mirror-paper
    #[arg(long, value_name = "SIZE")]
    pub(crate) read_cache: Option<Size>,
    /// Serve the guest's popular data from this surrogate while its disk is copied, and have it take what the guest writes
    #[arg(long, value_name = "NAME")]
    pub(crate) surrogate: Option<String>,
    /// With --surrogate: a chunk is popular from so many requests on [default: 1]
    #[arg(long, value_name = "N", requires = "surrogate")]
    pub(crate) popular_threshold: Option<u16>,
    /// Use the surrogate also for a disk without a head, such as flash, where there is little to gain
    #[arg(long, requires = "surrogate")]
    pub(crate) surrogate_on_flash: bool,
    /// With a surrogate of one store: that may hold the only copy of what the guest writes
    #[arg(long, requires = "surrogate")]
    pub(crate) sole_copy: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// The volume
    pub(crate) name: String,
    /// Where to: file:PATH[,format=raw][,cache=auto|direct|page], HOST[:VOLUME] for another host's daemon, or the
    /// export of any NBD server. An export is nbd://HOST:PORT/NAME or nbd+unix:///NAME?socket=PATH, with nbds instead
    /// of nbd for TLS. With --all-disks {name} in it is each volume's name, and a path that ends with a slash is a
    /// directory
    #[arg(long, value_name = "PLACE")]
    pub(crate) to: String,
    /// All adopted disks of the VM that this volume is a disk of. If one fails or is cancelled, so are the others that
    /// are not on their targets yet
    #[arg(long)]
    pub(crate) all_disks: bool,
    /// Copy at most so much: 200MiB/s, 1Gbit/s; what the guest writes does not count
    #[arg(long, value_name = "RATE")]
    pub(crate) bandwidth: Option<Rate>,
    /// A bandwidth below 64KiB/s is meant as it is
    #[arg(long, requires = "bandwidth")]
    pub(crate) slow: bool,
    /// To another host: take so much of the network whatever others want there, and beyond that what they leave: 50MiB/s
    #[arg(long, value_name = "RATE")]
    pub(crate) reserve: Option<Rate>,
    /// How much to compare before the switchover
    #[arg(long, value_enum, default_value = "sample")]
    pub(crate) verify: VerifyArg,
    #[command(flatten)]
    pub(crate) how: StrategyArgs,
    /// Replace what the target holds
    #[arg(long)]
    pub(crate) overwrite: bool,
    /// Of an adopted VM: do not tell its configuration of the new place
    #[arg(long)]
    pub(crate) no_persist: bool,
    /// Of an adopted VM: the program that tells its configuration
    #[arg(long, value_name = "PROGRAM", conflicts_with = "no_persist")]
    pub(crate) persist_hook: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct MoveArgs {
    #[command(flatten)]
    pub(crate) plan: PlanArgs,
    /// Delete the source after the switchover instead of renaming it *.moved-EPOCH
    #[arg(long)]
    pub(crate) delete_source: bool,
    /// Do not wait for the end
    #[arg(long)]
    pub(crate) detach: bool,
}

#[derive(Debug, Args)]
pub(crate) struct WatchArgs {
    /// The volume; all moves under way if none is named
    pub(crate) name: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct SetArgs {
    /// The volume
    pub(crate) name: String,
    /// Copy at most so much: 200MiB/s, 1Gbit/s; 0 for no limit
    #[arg(long, value_name = "RATE", required_unless_present_any = ["reserve", "deadline"])]
    pub(crate) bandwidth: Option<Rate>,
    /// A bandwidth below 64KiB/s is meant as it is
    #[arg(long, requires = "bandwidth")]
    pub(crate) slow: bool,
    /// To another host: take so much of the network whatever others want there; 0 for what they leave
    #[arg(long, value_name = "RATE")]
    pub(crate) reserve: Option<Rate>,
    /// Be over so long after the move's start: 10min, 2h; 0 for whenever it is
    #[arg(long, value_name = "TIME", value_parser = span_or_none)]
    pub(crate) deadline: Option<Span>,
}

#[derive(Debug, Args)]
pub(crate) struct ResolveArgs {
    /// The volume
    pub(crate) name: String,
    /// The host that it was moved to is to hold it; there, it is opened to clients, and the guest at the old host is kept out
    #[arg(long, conflicts_with = "give_back")]
    pub(crate) take: bool,
    /// The host that it was moved from is to hold it; of one that was opened with --take, its guest there is let in again
    #[arg(long)]
    pub(crate) give_back: bool,
    /// Give it back although the other host does not answer: if that has taken it, there are two of it
    #[arg(long, requires = "give_back")]
    pub(crate) risk: bool,
}

#[derive(Debug, Args)]
pub(crate) struct JobsArgs {
    /// Those that are over, too
    #[arg(long)]
    pub(crate) all: bool,
}

#[derive(Debug, Args)]
pub(crate) struct HostArgs {
    /// Make a new key and certificate; no other host trusts this one then until they are paired anew
    #[arg(long)]
    pub(crate) renew: bool,
}

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("what").required(true).args(["host", "invite", "list", "remove", "change"]))]
pub(crate) struct TrustArgs {
    /// The host that has given out a code: HOST or HOST:PORT
    #[arg(value_name = "HOST:PORT", requires = "code")]
    pub(crate) host: Option<String>,
    /// The code that it has given out
    #[arg(requires = "host")]
    pub(crate) code: Option<String>,
    /// Give out a code that lets another host join: once, within 10 minutes and 3 tries
    #[arg(long)]
    pub(crate) invite: bool,
    /// What to call the other host [default: what it calls itself]
    #[arg(long, conflicts_with_all = ["list", "remove", "change"])]
    pub(crate) name: Option<String>,
    /// List the hosts that this one trusts
    #[arg(long)]
    pub(crate) list: bool,
    /// Trust a host no more, and cut its streams
    #[arg(long, value_name = "NAME")]
    pub(crate) remove: Option<String>,
    /// Change the addresses of a host that is trusted
    #[arg(long, value_name = "NAME", requires = "address")]
    pub(crate) change: Option<String>,
    /// With --change: where it is reached; may be given again, for several network cards
    #[arg(long, value_name = "HOST:PORT", requires = "change")]
    pub(crate) address: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct CopyArgs {
    /// From where: file:PATH[,format=raw][,cache=auto|direct|page], nbd://HOST:PORT/NAME or nbd+unix:///NAME?socket=PATH, with
    /// nbds instead of nbd for TLS
    #[arg(value_name = "SOURCE")]
    pub(crate) source: String,
    /// Where to, written alike; a file that is not there is created sparse
    #[arg(long, value_name = "TARGET")]
    pub(crate) to: String,
    /// Replace what the target holds
    #[arg(long)]
    pub(crate) overwrite: bool,
    /// Copy at most so much: 200MiB/s, 1Gbit/s
    #[arg(long, value_name = "RATE")]
    pub(crate) bandwidth: Option<Rate>,
    /// Whether to read both again and compare them
    #[arg(long, value_enum, default_value = "off")]
    pub(crate) verify: CopyVerifyArg,
}

/// How much of a copy is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum CopyVerifyArg {
    /// All of it.
    Full,
    /// Nothing.
    Off,
}

#[derive(Debug, Args)]
pub(crate) struct RescueArgs {
    /// The volume
    pub(crate) name: String,
    /// The daemon's state directory
    #[arg(long, value_name = "DIR", env = "TRANSHUME_STATE_DIR", default_value = "/var/lib/transhume")]
    pub(crate) state_dir: PathBuf,
}
