//! What a machine does with its memory, as it can be seen before a move: how much of it exists, and how fast it changes.

use std::fs;
use std::time::Duration;

use serde_json::{Value, json};

use super::facts::MachineFacts;
use crate::error::Result;
use crate::qmp::Qmp;

/// For so long QEMU watches the guest; it counts in whole seconds.
const WATCH: Duration = Duration::from_secs(1);
/// How much longer it may take to say what it has seen, and how often it is asked.
const PATIENCE: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(50);
/// Smaller mappings are no memory of a guest.
const MAPPING_BYTES_MIN: u64 = 16 << 20;

/// What a machine does with its memory. What cannot be told is nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// How much of it the host holds. The rest was never written, and is sent as zeroes.
    pub resident_bytes: Option<u64>,
    /// How much the guest changes in a second.
    pub dirty_bytes_per_second: Option<u64>,
}

/// How much of the memory of `facts` exists, and if `watches`, how fast it changes. That takes a second.
pub async fn memory_use(qmp: &Qmp, facts: &MachineFacts, watches: bool) -> MemoryUse {
    let smaps = qmp.process_id().and_then(|pid| fs::read_to_string(format!("/proc/{pid}/smaps")).ok());
    let resident_bytes = smaps.and_then(|smaps| resident(&smaps, facts.memory_bytes));
    let runs = facts.run_state == "running";
    let dirty_bytes_per_second = match (watches, runs) {
        // QEMU before 5.2 cannot tell.
        (true, true) => dirty_rate(qmp).await.ok().flatten(),
        (_, false) => Some(0),
        (false, true) => None,
    };
    MemoryUse { resident_bytes, dirty_bytes_per_second }
}

/// Has QEMU sample pages for a second, and gives how many bytes a second have changed.
async fn dirty_rate(qmp: &Qmp) -> Result<Option<u64>> {
    qmp.execute("calc-dirty-rate", json!({ "calc-time": WATCH.as_secs() })).await?;
    let began = qmp.env().now();
    qmp.env().sleep(WATCH).await;
    loop {
        let said = qmp.execute("query-dirty-rate", json!({})).await?;
        if let Some(rate) = parse_rate(&said) {
            return Ok(Some(rate));
        }
        if qmp.env().now().since(began) > WATCH + PATIENCE {
            return Ok(None);
        }
        qmp.env().sleep(LOOK).await;
    }
}

/// QEMU counts in MiB a second.
fn parse_rate(said: &Value) -> Option<u64> {
    let rate = said["dirty-rate"].as_u64().filter(|_| said["status"] == "measured")?;
    Some(rate.saturating_mul(1 << 20))
}

/// How much of a guest's memory is there, by `/proc/PID/smaps`. The guest's memory are the large mappings that are written and
/// not executed, as many as it takes to have all of it.
fn resident(smaps: &str, memory_bytes: u64) -> Option<u64> {
    let mut mappings: Vec<(u64, u64)> = Vec::new();
    let mut is_large = false;
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let (Some(first), second) = (words.next(), words.next()) else { continue };
        if let Some((from, to)) = first.split_once('-').filter(|_| !first.ends_with(':')) {
            let address = |text| u64::from_str_radix(text, 16).ok();
            let size = address(to).zip(address(from)).map_or(0, |(to, from)| to.saturating_sub(from));
            let rights = second.unwrap_or_default();
            is_large = size >= MAPPING_BYTES_MIN && rights.starts_with("rw-");
            if is_large {
                mappings.push((size, 0));
            }
        } else if is_large && ["Rss:", "Private_Hugetlb:", "Shared_Hugetlb:"].contains(&first) {
            let kib: u64 = second.and_then(|text| text.parse().ok()).unwrap_or_default();
            mappings.last_mut().expect("a large one was found").1 += kib << 10;
        }
    }
    // The one that has all of it, or the largest that have it together.
    mappings.sort_unstable_by_key(|(size, _)| (*size != memory_bytes, std::cmp::Reverse(*size)));
    let mut covered = 0;
    let mut there = 0;
    for (size, resident) in mappings {
        if covered >= memory_bytes {
            break;
        }
        (covered, there) = (covered + size, there + resident);
    }
    (covered >= memory_bytes).then_some(there.min(memory_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guests_memory_is_told_from_qemus_own() {
        let smaps = "\
7f0000000000-7f0010000000 rw-p 00000000 00:00 0 \nSize: 262144 kB\nRss:  1024 kB\nPss:  1024 kB\n\
7f1000000000-7f1040000000 rwxp 00000000 00:00 0 \nRss:  900000 kB\n\
7f2000000000-7f2020000000 rw-p 00000000 00:00 0 \nRss:  2048 kB\n\
560000000000-560000100000 rw-p 00000000 00:00 0 [heap]\nRss:  512 kB\n";
        assert_eq!(resident(smaps, 256 << 20), Some(1 << 20));
        // Two nodes of a guest.
        assert_eq!(resident(smaps, 768 << 20), Some(3 << 20));
        assert_eq!(resident(smaps, 4 << 30), None);
        let huge = "7f0000000000-7f0010000000 rw-s 00000000 00:0f 9 /hugepages/a\nRss: 0 kB\nShared_Hugetlb: 4096 kB\n";
        assert_eq!(resident(huge, 256 << 20), Some(4 << 20));
    }

    #[test]
    fn a_rate_counts_only_once_it_was_measured() {
        assert_eq!(parse_rate(&json!({ "status": "measuring", "dirty-rate": 0 })), None);
        assert_eq!(parse_rate(&json!({ "status": "measured", "dirty-rate": 3 })), Some(3 << 20));
        assert_eq!(parse_rate(&json!({ "status": "unstarted" })), None);
    }
}
