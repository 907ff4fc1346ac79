//! What caches do.

use std::sync::Arc;

use api::v1::CacheUse;

use super::{family, labels, line};
use crate::daemon::Daemon;
use crate::volume::Volume;

/// A figure of a volume's cache: its name, whether it only grows, what it is, and where it stands.
type Figure = (&'static str, &'static str, &'static str, fn(&CacheUse) -> f64);

const FIGURES: [Figure; 16] = [
    ("transhume_cache_up", "gauge", "Whether the cache is in the guest's path and has not failed.", |cache| {
        f64::from(u8::from(cache.open && !cache.failed))
    }),
    ("transhume_cache_size_bytes", "gauge", "How much the volume uses of its part.", |cache| cache.size_bytes as f64),
    ("transhume_cache_dirty_bytes", "gauge", "How much only the flash has.", |cache| cache.dirty_bytes as f64),
    ("transhume_cache_places", "gauge", "For how many blocks there is room.", |cache| cache.places as f64),
    ("transhume_cache_places_free", "gauge", "How many of them are free.", |cache| cache.places_free as f64),
    ("transhume_cache_memory_bytes", "gauge", "What the tables take in memory.", |cache| cache.memory_bytes as f64),
    ("transhume_cache_hits_total", "counter", "Blocks read from the flash alone.", |cache| cache.hits as f64),
    ("transhume_cache_hits_partial_total", "counter", "Blocks read from flash and backend.", |cache| {
        cache.hits_partial as f64
    }),
    ("transhume_cache_misses_total", "counter", "Blocks read from the backend.", |cache| cache.misses as f64),
    ("transhume_cache_admitted_total", "counter", "Blocks that were cached after a read.", |cache| {
        cache.admitted as f64
    }),
    ("transhume_cache_bypassed_total", "counter", "Reads that were not cached.", |cache| cache.bypassed as f64),
    ("transhume_cache_evicted_total", "counter", "Blocks that had to go for others.", |cache| cache.evicted as f64),
    ("transhume_cache_guest_written_bytes_total", "counter", "What the guest has written.", |cache| {
        cache.guest_written_bytes as f64
    }),
    ("transhume_cache_flash_written_bytes_total", "counter", "What was written to the flash.", |cache| {
        cache.flash_written_bytes as f64
    }),
    ("transhume_cache_cleaned_bytes_total", "counter", "What was written from the flash to the backend.", |cache| {
        cache.cleaned_bytes as f64
    }),
    ("transhume_cache_write_back", "gauge", "1 while the guest's writes go to the flash first.", |cache| {
        f64::from(u8::from(cache.mode == api::v1::CacheMode::WriteBack))
    }),
];

/// What the caches of volumes do, and how much of each cache of the host is free.
pub(super) fn render(out: &mut String, daemon: &Daemon, volumes: &[Arc<Volume>]) {
    let caches = daemon.caches.list();
    family(out, "transhume_cache_pool_bytes", "gauge", "How much of a cache is for volumes.");
    for pool in &caches {
        let shown = pool.show();
        line(out, "transhume_cache_pool_bytes", &format!("{{cache=\"{}\"}}", shown.name), shown.bytes as f64);
    }
    family(out, "transhume_cache_pool_free_bytes", "gauge", "How much of that no volume has.");
    for pool in &caches {
        let shown = pool.show();
        line(out, "transhume_cache_pool_free_bytes", &format!("{{cache=\"{}\"}}", shown.name), shown.free_bytes as f64);
    }
    let used: Vec<_> = volumes
        .iter()
        .flat_map(|volume| volume.show_layers().into_iter().filter_map(move |layer| Some((volume, layer.cached?))))
        .collect();
    for (name, kind, help, figure) in FIGURES {
        family(out, name, kind, help);
        for (volume, cached) in &used {
            line(out, name, &labels(volume, &[("cache", &cached.cache)]), figure(cached));
        }
    }
}
