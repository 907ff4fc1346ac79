//! The guests' disk: Debian's programs with what they need, and a database that is filled already.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};
use transhume_guest::programs::target_folder;

/// Where `cargo xtask setup` unpacks Debian's packages, below the folder of what is built.
const PROGRAMS: &str = "guest-programs";
/// How large the disk is, in MiB: the programs, the database, and what dbench writes.
const DISK_MIB: u32 = 768;
/// Accounts of the database, in units of 100,000.
const SCALE: u32 = 5;
/// The number of the user and the group that the database belongs to.
const POSTGRES_ID: u32 = 5432;
const USERS: &str = "root:x:0:0::/:/bin/sh\n\
                     postgres:x:5432:5432::/data/postgres:/bin/sh\n\
                     memcache:x:5433:5433::/:/bin/sh\n";
const GROUPS: &str = "root:x:0:\npostgres:x:5432:\nmemcache:x:5433:\n";
/// What the database is told besides what is usual: nobody comes over a network, and it fits beside others on the disk.
const CONFIGURATION: &str = "listen_addresses = ''\\nunix_socket_directories = '/run'\\nshared_buffers = 64MB\\n\
                             min_wal_size = 32MB\\nmax_wal_size = 96MB\\njit = off\\n";

/// A file system that every guest begins with a copy of.
pub(super) struct System {
    image: PathBuf,
}

impl System {
    /// Makes it in `folder`, as root.
    pub(super) fn create(folder: &Path) -> anyhow::Result<Self> {
        let programs = target_folder()?.join(PROGRAMS);
        ensure!(programs.exists(), "{} is missing: run `cargo xtask setup --guest-programs`", programs.display());
        let root = folder.join("system");
        run(Command::new("cp").arg("--archive").arg(&programs).arg(&root))?;
        furnish(&root)?;
        fill_database(&root)?;
        let image = folder.join("system.raw");
        let size = format!("{DISK_MIB}M");
        run(Command::new("mkfs.ext4").args(["-q", "-F", "-d"]).arg(&root).arg(&image).arg(size))?;
        std::fs::remove_dir_all(&root).context("removing what the file system was made of")?;
        Ok(Self { image })
    }

    /// Makes a copy of it. What it does not use takes no memory.
    pub(super) fn copy_to(&self, path: &Path) -> anyhow::Result<()> {
        run(Command::new("cp").arg("--sparse=always").arg(&self.image).arg(path))
    }
}

/// Whether the file system on a disk that nobody uses is whole.
pub(super) fn check(disk: &Path) -> anyhow::Result<()> {
    let output = Command::new("e2fsck").args(["-f", "-n"]).arg(disk).output().context("starting e2fsck")?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "the moved guest's file system is not whole: {said}");
    Ok(())
}

/// Adds what no package holds: users, a shell, and the places for what is written.
fn furnish(root: &Path) -> anyhow::Result<()> {
    for folder in ["dev", "proc", "sys", "tmp", "run", "data/dbench", "data/postgres"] {
        std::fs::create_dir_all(root.join(folder)).with_context(|| format!("making /{folder}"))?;
    }
    let shell = ["/bin/busybox", "/usr/bin/busybox"].into_iter().find(|path| Path::new(path).exists());
    std::fs::copy(shell.context("busybox is missing: run `make setup`")?, root.join("bin/busybox"))?;
    for name in ["sh", "cat", "killall"] {
        let path = root.join("bin").join(name);
        if !path.exists() {
            symlink("busybox", &path).with_context(|| format!("making {}", path.display()))?;
        }
    }
    std::fs::write(root.join("etc/passwd"), USERS).context("writing users")?;
    std::fs::write(root.join("etc/group"), GROUPS).context("writing groups")?;
    for own in ["run", "data/postgres"] {
        std::os::unix::fs::chown(root.join(own), Some(POSTGRES_ID), Some(POSTGRES_ID)).context("giving a folder")?;
    }
    std::fs::set_permissions(root.join("tmp"), PermissionsExt::from_mode(0o1777)).context("opening /tmp")
}

/// Has PostgreSQL make its files and pgbench fill them, here: an emulated guest would take minutes.
fn fill_database(root: &Path) -> anyhow::Result<()> {
    let script = format!(
        "set -e\n\
         export PATH=/usr/lib/postgresql/15/bin:/usr/bin:/bin LC_ALL=C\n\
         initdb -D /data/postgres/files --auth trust --no-locale -E UTF8 -U postgres --no-sync\n\
         printf \"{CONFIGURATION}\" >>/data/postgres/files/postgresql.conf\n\
         pg_ctl -D /data/postgres/files -w -l /data/postgres/log start\n\
         pgbench -h /run -U postgres -i -s {SCALE} -q postgres\n\
         pg_ctl -D /data/postgres/files -w -m fast stop\n\
         /bin/busybox rm /data/postgres/log\n"
    );
    // The programs find devices and shared memory at their usual places, and nothing of that is left.
    let within = "mount --bind /dev \"$0/dev\" && \
                  exec chroot --userspec=5432:5432 \"$0\" /bin/sh -c \"$1\"";
    run(Command::new("unshare").args(["--mount", "--net", "sh", "-c", within]).arg(root).arg(script))
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    let name = command.get_program().display().to_string();
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("starting {name}"))?;
    ensure!(output.status.success(), "{name} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}
