//! What the cache of the volume `x` has done.

use std::time::{Duration, Instant};

use serde_json::Value;

use super::{HANG, World};

/// What the volume's cache has done; null if it has none.
pub(crate) fn cached(world: &World) -> Value {
    layer(world)["cached"].clone()
}

/// The volume's cache as a layer; null if it has none.
pub(crate) fn layer(world: &World) -> Value {
    let layers = world.json(&["volume", "layer", "ls", "x"]);
    let layers = layers.as_array().expect("a list").clone();
    layers.into_iter().find(|layer| layer["kind"] == "cache").unwrap_or_default()
}

/// The counter `name`.
pub(crate) fn number(of: &Value, name: &str) -> u64 {
    of[name].as_u64().unwrap_or_else(|| panic!("{name} is no number in {of}"))
}

/// Waits until what the cache has done is so.
pub(crate) fn wait_until(world: &World, what: &str, is_so: impl Fn(&Value) -> bool) {
    let start = Instant::now();
    loop {
        let cached = cached(world);
        if is_so(&cached) {
            return;
        }
        assert!(start.elapsed() < HANG, "{what}: {cached}\n{}", world.log());
        std::thread::sleep(Duration::from_millis(20));
    }
}
