//! Who else holds a unix socket: what to say when the monitor does not answer because another client owns it.
//!
//! The kernel tells which sockets are connected to which by `sock_diag` only; `/proc/net/unix` lists them in pairs
//! without saying so. The peer of a connected socket of QEMU's has, as a rule, the inode next to QEMU's own. So the
//! answer is sought in two steps: the processes, other than QEMU and us, that hold a unix socket whose inode is that of
//! a neighbour of a connection to this path.

use std::collections::HashSet;
use std::fmt;
use std::fs;
use std::path::Path;

/// A process that holds the other end of a monitor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Its program's name.
    pub program: String,
    /// Its process id.
    pub pid: u32,
}

impl fmt::Display for Owner {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} pid {}", self.program, self.pid)
    }
}

/// One line of `/proc/net/unix`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct UnixSocket {
    inode: u64,
    is_connected: bool,
    path: String,
}

fn parse_table(text: &str) -> Vec<UnixSocket> {
    text.lines().skip(1).filter_map(parse_line).collect()
}

/// `Num RefCount Protocol Flags Type St Inode Path`; state 3 is connected.
fn parse_line(line: &str) -> Option<UnixSocket> {
    let mut fields = line.split_ascii_whitespace();
    let state = fields.nth(5)?;
    let inode = fields.next()?.parse().ok()?;
    Some(UnixSocket { inode, is_connected: state == "03", path: fields.next().unwrap_or_default().to_owned() })
}

/// The inodes that clients of `path` may have: unnamed connected sockets beside QEMU's named connected ones.
fn candidates(table: &[UnixSocket], path: &str) -> HashSet<u64> {
    let unnamed: HashSet<u64> = table
        .iter()
        .filter(|socket| socket.is_connected && socket.path.is_empty())
        .map(|socket| socket.inode)
        .collect();
    let served = table.iter().filter(|socket| socket.is_connected && socket.path == path);
    // The client's socket is made first, the server's end when the connection is made: within a few numbers.
    served
        .filter_map(|socket| (1..=64).map(|step| socket.inode.wrapping_sub(step)).find(|it| unnamed.contains(it)))
        .collect()
}

/// The process that most likely owns the monitor at `path`, if `/proc` tells; `qemu` and this process are not meant.
#[must_use]
pub fn owner_of_socket(path: &Path, qemu: Option<u32>) -> Option<Owner> {
    let table = parse_table(&fs::read_to_string("/proc/net/unix").ok()?);
    let inodes = candidates(&table, path.to_str()?);
    let processes = fs::read_dir("/proc").ok()?.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let pids: Vec<u32> = processes.collect();
    let holder = |pid: &&u32| **pid != std::process::id() && Some(**pid) != qemu && holds_one_of(**pid, &inodes);
    let pid = *pids.iter().find(holder)?;
    let program = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?.trim().to_owned();
    Some(Owner { program, pid })
}

fn holds_one_of(pid: u32, inodes: &HashSet<u64>) -> bool {
    let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    descriptors.flatten().filter_map(|entry| fs::read_link(entry.path()).ok()).any(|target| {
        let inode = target.to_str().and_then(|text| text.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok());
        inode.is_some_and(|inode: u64| inodes.contains(&inode))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0001 01 1000 /run/vm/qmp
0000000000000000: 00000003 00000000 00000000 0001 03 1204 /run/vm/qmp
0000000000000000: 00000003 00000000 00000000 0001 03 1203
0000000000000000: 00000003 00000000 00000000 0001 03 1300
0000000000000000: 00000003 00000000 00000000 0001 03 1301
";

    #[test]
    fn the_client_is_the_unnamed_socket_before_the_served_one() {
        let table = parse_table(TABLE);
        assert_eq!(table.len(), 5);
        assert_eq!(candidates(&table, "/run/vm/qmp"), HashSet::from([1203]));
        assert!(candidates(&table, "/run/vm/other").is_empty());
    }

    #[test]
    fn a_damaged_table_is_no_panic() {
        assert!(parse_table("").is_empty());
        assert!(parse_table("head\nx\n1 2 3 4 5 6 7x 8\n").is_empty());
    }
}
