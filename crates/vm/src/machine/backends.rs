//! What a machine's memory is made of, and which huge pages a host has for it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use rustix::fs::statfs;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::Result;
use crate::qmp::Qmp;

/// How the kernel marks a file system of huge pages (`HUGETLBFS_MAGIC` in linux/magic.h).
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;
/// What a `memfd` of huge pages has if nothing is said.
const HUGE_PAGE_BYTES: u64 = 2 << 20;
/// Where the kernel tells of them.
const HUGE_PAGES: &str = "/sys/kernel/mm/hugepages";

/// A part of a machine's memory, as its QEMU was given it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MemoryBackend {
    /// What QEMU calls it.
    pub id: String,
    /// How large it is.
    pub bytes: u64,
    /// The file or the folder that it is in, if it has a name.
    pub path: Option<PathBuf>,
    /// Whether what is written there is seen by others who map it.
    pub is_shared: bool,
    /// How large its pages are, if they are huge ones.
    pub huge_page_bytes: Option<u64>,
}

impl MemoryBackend {
    /// All of a machine whose QEMU runs on this host.
    ///
    /// # Errors
    /// What QMP says.
    pub(super) async fn read_all(qmp: &Qmp) -> Result<Vec<Self>> {
        let said = qmp.execute("query-memdev", json!({})).await?;
        let mut found = Vec::new();
        for one in said.as_array().into_iter().flatten() {
            let id = one["id"].as_str().unwrap_or_default().to_owned();
            // A kind of memory lacks what it has no use for.
            let ask = async |property: &str| {
                let asked = json!({ "path": format!("/objects/{id}"), "property": property });
                qmp.execute("qom-get", asked).await.unwrap_or_default()
            };
            let path = ask("mem-path").await.as_str().map(PathBuf::from);
            let huge_page_bytes = match &path {
                Some(path) => huge_page_bytes(path),
                None if ask("hugetlb").await == true => {
                    Some(ask("hugetlbsize").await.as_u64().filter(|bytes| *bytes > 0).unwrap_or(HUGE_PAGE_BYTES))
                }
                None => None,
            };
            let is_shared = ask("share").await == Value::Bool(true);
            let bytes = one["size"].as_u64().unwrap_or_default();
            found.push(Self { id, bytes, path, is_shared, huge_page_bytes });
        }
        Ok(found)
    }
}

/// How many huge pages of each size are needed for `backends`.
pub(super) fn huge_pages_needed(backends: &[MemoryBackend]) -> BTreeMap<u64, u64> {
    let mut needed = BTreeMap::new();
    for backend in backends {
        if let Some(page) = backend.huge_page_bytes.filter(|page| *page > 0) {
            *needed.entry(page).or_default() += backend.bytes.div_ceil(page);
        }
    }
    needed
}

/// How many huge pages of each size are free on this host.
pub(super) fn huge_pages_free() -> BTreeMap<u64, u64> {
    read_huge_pages(Path::new(HUGE_PAGES))
}

fn read_huge_pages(folder: &Path) -> BTreeMap<u64, u64> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let free = entries.filter_map(|entry| {
        let name = entry.file_name();
        let kib: u64 = name.to_str()?.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
        let free = fs::read_to_string(entry.path().join("free_hugepages")).ok()?.trim().parse().ok()?;
        Some((kib << 10, free))
    });
    free.collect()
}

/// The size of the pages of the file system that has `path`, if they are huge ones.
fn huge_page_bytes(path: &Path) -> Option<u64> {
    let found = statfs(path).ok()?;
    let is_huge = found.f_type == HUGETLBFS_MAGIC;
    is_huge.then(|| u64::try_from(found.f_bsize).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_are_counted_by_their_size_and_other_memory_needs_none() {
        let huge = |bytes, page| MemoryBackend { bytes, huge_page_bytes: Some(page), ..MemoryBackend::default() };
        let plain = MemoryBackend { bytes: 1 << 30, ..MemoryBackend::default() };
        let needed = huge_pages_needed(&[huge(6 << 20, 2 << 20), huge((1 << 20) + 1, 2 << 20), plain]);
        assert_eq!(needed, BTreeMap::from([(2 << 20, 4)]));
    }

    #[test]
    fn what_the_kernel_tells_of_huge_pages_is_understood() {
        let folder = tempfile::tempdir().expect("a folder");
        let pages = folder.path().join("hugepages-2048kB");
        fs::create_dir(&pages).expect("made");
        fs::write(pages.join("free_hugepages"), "12\n").expect("written");
        fs::create_dir(folder.path().join("other")).expect("made");
        assert_eq!(read_huge_pages(folder.path()), BTreeMap::from([(2 << 20, 12)]));
        assert_eq!(huge_page_bytes(folder.path()), None);
    }
}
