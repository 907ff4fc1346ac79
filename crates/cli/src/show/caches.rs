//! Caches in words and tables.

use api::v1::{Cache, CacheUse, Layer, LayerState};

use super::{bytes, table};

/// Caches as a table.
pub(crate) fn caches(caches: &[Cache]) -> String {
    if caches.is_empty() {
        return "no caches; `transhume cache create` makes one".to_owned();
    }
    let mut table = table(&["CACHE", "SIZE", "FREE", "POLICY", "VOLUMES", "DIRTY"]);
    for cache in caches {
        let used = cache.partitions.iter().filter_map(|partition| partition.cached.as_ref());
        table.add_row([
            cache.name.clone(),
            bytes(cache.bytes),
            bytes(cache.free_bytes),
            cache.policy.name().to_owned(),
            cache.partitions.len().to_string(),
            bytes(used.map(|used| used.dirty_bytes).sum()),
        ]);
    }
    table.to_string()
}

/// One cache.
pub(crate) fn cache(cache: &Cache) -> String {
    let mut lines: Vec<(&str, String)> = vec![("name", cache.name.clone())];
    for store in &cache.stores {
        lines.push(("store", format!("{}{}", store.place, if store.made { " (made by the daemon)" } else { "" })));
    }
    lines.push(("size", format!("{}, of which {} are free", bytes(cache.bytes), bytes(cache.free_bytes))));
    lines.push(("policy", cache.policy.name().to_owned()));
    for partition in &cache.partitions {
        let used = partition.cached.as_ref().map_or("not open".to_owned(), used);
        lines.push(("volume", format!("{}: {} of it; {used}", partition.volume, bytes(partition.bytes))));
    }
    lines.into_iter().map(|(key, value)| format!("{key:<8} {value}\n")).collect()
}

/// What a volume's cache does, in one line.
pub(super) fn layer(layer: &Layer) -> String {
    let drains = if layer.state == LayerState::Draining { ", which is being emptied" } else { "" };
    let used = layer.cached.as_ref().map_or("not known".to_owned(), used);
    format!("{}{drains}: {used}", layer.name)
}

/// How a cache is set and what it has done, in one line.
fn used(used: &CacheUse) -> String {
    let mut parts = vec![format!("{}, {}, {}", used.mode.name(), used.policy.name(), bytes(used.size_bytes))];
    if used.open {
        let hits = used.hit_ratio.map_or("no reads yet".to_owned(), |ratio| format!("hit rate {:.1} %", ratio * 100.0));
        parts.push(hits);
        parts.push(format!("{} dirty", bytes(used.dirty_bytes)));
        parts.extend(used.write_amplification.map(|ratio| format!("write amplification {ratio:.2}")));
    }
    let line = parts.join(", ");
    match &used.problem {
        Some(problem) if used.failed => format!("{line}; FAILED: {problem}"),
        Some(problem) => format!("{line}; not in use: {problem}"),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use api::v1::{CacheMode, CachePolicy};

    #[test]
    fn a_cache_says_what_it_does_and_what_is_wrong() {
        let good = CacheUse {
            mode: CacheMode::WriteBack,
            policy: CachePolicy::S3Fifo,
            size_bytes: 1 << 30,
            open: true,
            hit_ratio: Some(0.931),
            write_amplification: Some(1.1),
            dirty_bytes: 3 << 20,
            ..CacheUse::default()
        };
        let shown = "write-back, s3-fifo, 1 GiB, hit rate 93.1 %, 3 MiB dirty, write amplification 1.10";
        assert_eq!(used(&good), shown);
        let failed = CacheUse { failed: true, problem: Some("gone".to_owned()), ..good.clone() };
        assert_eq!(used(&failed), format!("{shown}; FAILED: gone"));
        let out = CacheUse { open: false, problem: Some("no store".to_owned()), ..good };
        assert_eq!(used(&out), "write-back, s3-fifo, 1 GiB; not in use: no store");
    }
}
