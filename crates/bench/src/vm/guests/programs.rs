//! What the guests run, and whether it went on rightly.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use transhume_guest::Event;

use super::counter::Counter;
use super::memcached;
use crate::vm::place::{PATIENCE, Place};

/// What one guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Program {
    /// Nothing.
    Idle,
    /// A cache that a client outside fills, reads and writes.
    Memcached,
    /// A database and its benchmark.
    Pgbench,
    /// What a file server does.
    Dbench,
}

/// What every guest does first. Its programs are on its disk.
const BEGIN: &str = "mkdir /disk\n\
                     mount -t ext4 -o noatime /dev/vda /disk\n\
                     mount -t devtmpfs dev /disk/dev\n\
                     mkdir -p /disk/dev/shm\n\
                     mount -t tmpfs shm /disk/dev/shm\n\
                     mount -t proc proc /disk/proc\n\
                     export LC_ALL=C\n\
                     as_postgres() { chroot /disk /bin/busybox su postgres -c \
                     \"export PATH=/usr/lib/postgresql/15/bin:/usr/bin:/bin; $1\"; }\n\
                     wait_for_end() { while read -r line; do [ \"$line\" = end ] && return; done; }\n";
/// What it does last: the disk is as a guest leaves it that is turned off.
const END: &str = "for place in proc dev/shm dev; do umount /disk/$place; done\n\
                   umount /disk\n\
                   echo \"@left $?\"\n";
const IDLE: &str = "echo '@load start'\n\
                    wait_for_end\n";
const PGBENCH: &str = "as_postgres 'pg_ctl -D /data/postgres/files -w -t 120 -l /data/postgres/log start' >/dev/null\n\
                       echo '@load start'\n\
                       as_postgres 'exec pgbench -h /run -n -c 4 -j 1 -T 3600 -P 1 postgres' 2>&1 &\n\
                       pgbench=$!\n\
                       wait_for_end\n\
                       killall pgbench\n\
                       wait $pgbench\n\
                       sums=$(as_postgres \"psql -h /run -A -t -c 'select (select sum(abalance) from pgbench_accounts), \
                       (select sum(tbalance) from pgbench_tellers), (select sum(bbalance) from pgbench_branches), \
                       (select sum(delta) from pgbench_history), (select count(*) from pgbench_history)' postgres\")\n\
                       echo \"@sums $sums\"\n\
                       as_postgres 'pg_ctl -D /data/postgres/files -w -m fast stop' >/dev/null\n\
                       grep -E 'PANIC|FATAL|ERROR' /disk/data/postgres/log | \
                       grep -v -E 'terminating connection|is starting up' | sed 's/^/@complaint /'\n";
/// The bytes that its processes write are told twice a second: what dbench itself tells is a mean since its start.
/// Without a semaphore its clients do not begin at the same moment, which is no error.
const DBENCH: &str = "chroot /disk /usr/bin/dbench -c /usr/share/dbench/client.txt -D /data/dbench -t 60 2 \
                      >/tmp/dbench.log 2>&1 &\n\
                      dbench=$!\n\
                      sleep 2\n\
                      children=$(cat /proc/$dbench/task/$dbench/children)\n\
                      echo '@load start'\n\
                      while kill -0 $dbench 2>/dev/null; do\n\
                        bytes=0\n\
                        for child in $children; do\n\
                          while read -r name value; do\n\
                            [ \"$name\" = wchar: ] && bytes=$((bytes + value))\n\
                          done </proc/$child/io\n\
                        done 2>/dev/null\n\
                        echo \"@count $bytes\"\n\
                        usleep 500000\n\
                      done\n\
                      wait $dbench\n\
                      status=$?\n\
                      grep -i -E 'failed|error' /tmp/dbench.log | grep -v 'barrier semaphore' | sed 's/^/@complaint /'\n\
                      grep Throughput /tmp/dbench.log\n\
                      echo \"@ended $status\"\n\
                      wait_for_end\n";

impl Program {
    pub(super) const ALL: [Self; 4] = [Self::Memcached, Self::Pgbench, Self::Dbench, Self::Idle];

    /// What the rows call a guest that runs it.
    pub(super) const fn words(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Memcached => "memcached, 200 MB of values, 4 connections, 10 % sets",
            Self::Pgbench => "PostgreSQL, 500,000 accounts, pgbench with 4 clients",
            Self::Dbench => "dbench with 2 clients, its disk moves with it",
        }
    }

    /// In what its throughput is told; nothing if it does nothing.
    pub(super) const fn unit(self) -> Option<&'static str> {
        match self {
            Self::Idle => None,
            Self::Memcached => Some("requests/s"),
            Self::Pgbench => Some("transactions/s"),
            Self::Dbench => Some("bytes written/s"),
        }
    }

    /// Whether its disk is moved; otherwise both hosts reach it. As in the paper the file server takes it along.
    pub(super) const fn moves_disk(self) -> bool {
        matches!(self, Self::Dbench)
    }

    /// What the guest's init runs.
    pub(super) fn script(self) -> String {
        let middle = match self {
            Self::Idle => IDLE.to_owned(),
            Self::Memcached => format!(
                "chroot /disk /usr/bin/memcached -u memcache -m 300 -t 1 -p {} -U 0 -l 0.0.0.0 2>&1 &\n\
                 memcached=$!\n{IDLE}\
                 killall memcached\nwait $memcached\n",
                memcached::PORT
            ),
            Self::Pgbench => PGBENCH.to_owned(),
            Self::Dbench => DBENCH.to_owned(),
        };
        format!("{BEGIN}{middle}{END}")
    }

    /// Has the guest end what it does and turn itself off, and looks at what it has said.
    ///
    /// # Errors
    /// Something went wrong in the guest, at any time.
    pub(super) fn end(self, place: &mut Place) -> anyhow::Result<Counter> {
        if self == Self::Dbench {
            // It ends by itself.
            wait_for_status(place, "@ended ")?;
        }
        place.guest.send("end")?;
        wait_for_status(place, "@left ")?;
        place.guest.wait_for_exit(PATIENCE)?;
        let mut lines = Vec::new();
        while let Some((at, event)) = place.guest.next_event(Duration::ZERO) {
            if let Event::Line(line) = event {
                lines.push((at, line));
            }
        }
        self.judge(&lines)
    }

    /// What was done, if all was right.
    fn judge(self, lines: &[(Instant, String)]) -> anyhow::Result<Counter> {
        let mut counter = Counter::default();
        let bad = lines.iter().find(|(_, line)| is_bad(line));
        ensure!(bad.is_none(), "the guest's program says: {bad:?}");
        match self {
            Self::Idle | Self::Memcached => {}
            Self::Pgbench => {
                let mut before = 0.0;
                for (at, line) in lines {
                    let Some(Second { end, rate, failed }) = Second::read(line) else { continue };
                    ensure!(failed == 0, "transactions have failed: {line}");
                    // A line may be lost where the guest changed hosts: the next one stands for both.
                    counter.add(*at, rate * (end - before));
                    before = end;
                }
                let sums = lines.iter().find_map(|(_, line)| line.strip_prefix("@sums "));
                judge_sums(sums.context("the database tells no sums")?)?;
            }
            Self::Dbench => {
                let counted = |line: &str| line.strip_prefix("@count ")?.parse::<f64>().ok();
                lines.iter().filter_map(|(at, line)| Some((*at, counted(line)?))).for_each(|(at, bytes)| {
                    counter.reached(at, bytes);
                });
                let is_told = lines.iter().any(|(_, line)| line.starts_with("Throughput "));
                ensure!(is_told, "dbench tells no result: {:?}", lines.last());
            }
        }
        Ok(counter)
    }
}

/// Waits until the guest says how something has ended, which must be well.
fn wait_for_status(place: &mut Place, what: &str) -> anyhow::Result<()> {
    let told = |event: &Event| matches!(event, Event::Line(line) if line.starts_with(what));
    let event = place.guest.wait_until(PATIENCE, told)?;
    let is_good = matches!(&event, Event::Line(line) if line.strip_prefix(what) == Some("0"));
    ensure!(is_good, "the guest says {event:?}");
    Ok(())
}

/// Whether a program has complained. That pgbench was ended is no complaint.
fn is_bad(line: &str) -> bool {
    ["@complaint ", "pgbench: error", "psql: error"].iter().any(|start| line.starts_with(start))
}

/// What pgbench tells of one second: `progress: 3.0 s, 61.0 tps, lat 65.2 ms stddev 12.1, 0 failed`.
#[derive(Debug, PartialEq)]
struct Second {
    end: f64,
    rate: f64,
    failed: u64,
}

impl Second {
    fn read(line: &str) -> Option<Self> {
        let parts: Vec<&str> = line.strip_prefix("progress: ")?.split(", ").collect();
        let number = |part: &str, unit: &str| part.strip_suffix(unit)?.parse::<f64>().ok();
        let failed = parts.last()?.strip_suffix(" failed")?.parse().ok()?;
        Some(Self { end: number(parts.first()?, " s")?, rate: number(parts.get(1)?, " tps")?, failed })
    }
}

/// Every transaction adds one amount to an account, a teller and a branch, and notes it in the history.
fn judge_sums(sums: &str) -> anyhow::Result<()> {
    let sums: Vec<i64> = sums.split('|').map(str::parse).collect::<Result<_, _>>().context("sums are numbers")?;
    let [accounts, tellers, branches, history, transactions] = sums[..] else {
        anyhow::bail!("the database has told {sums:?}")
    };
    let is_right = accounts == tellers && accounts == branches && accounts == history && transactions > 0;
    ensure!(is_right, "the database is not consistent: {sums:?}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_pgbench_tells_is_read() {
        let second = Second::read("progress: 3.0 s, 61.5 tps, lat 65.217 ms stddev 12.100, 0 failed");
        assert_eq!(second, Some(Second { end: 3.0, rate: 61.5, failed: 0 }));
        let failing = Second::read("progress: 4.0 s, 0.0 tps, lat 0.000 ms stddev 0.000, 2 failed");
        assert_eq!(failing.map(|second| second.failed), Some(2));
        assert_eq!(Second::read("progress: 4.0 s, 0."), None, "it was cut off");
    }

    #[test]
    fn a_database_whose_sums_differ_is_not_consistent() {
        judge_sums("-42|-42|-42|-42|7").unwrap();
        for wrong in ["-42|-42|-42|-41|7", "-42|-41|-42|-42|7", "0|0|0|0|0", "1|1|1"] {
            assert!(judge_sums(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_program_that_complains_fails_the_run() {
        let said = |line: &str| [(Instant::now(), line.to_owned())];
        let error =
            "@complaint 2026-01-01 00:00:00.000 UTC [9] ERROR:  invalid page in block 7 of relation base/5/16384";
        assert!(Program::Pgbench.judge(&said(error)).is_err());
        assert!(Program::Dbench.judge(&said("@complaint (83) ERROR: handle 9935 was not found")).is_err());
        assert!(Program::Dbench.judge(&said("@count 5")).is_err(), "it told no result");
    }
}
