//! The connections to the monitors of QEMUs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use env::EnvRef;
use vm::{Qmp, WeakQmp};

/// The connections to monitors. A monitor serves one client at a time, so all that is done of one QEMU shares one connection.
/// It ends when nobody uses it.
#[derive(Default)]
pub struct Monitors(parking_lot::Mutex<BTreeMap<PathBuf, Arc<tokio::sync::Mutex<Option<WeakQmp>>>>>);

impl Monitors {
    /// A handle to the connection to the monitor at `path`, which is made if there is none.
    pub(crate) async fn connect(&self, path: &Path, env: &EnvRef) -> vm::Result<Qmp> {
        let place = {
            let mut places = self.0.lock();
            // Of those that are gone nobody keeps a place.
            places.retain(|_, place| Arc::strong_count(place) > 1 || place.try_lock().is_ok_and(|kept| is_used(&kept)));
            Arc::clone(places.entry(path.to_owned()).or_default())
        };
        let mut kept = place.lock().await;
        if let Some(qmp) = kept.as_ref().and_then(WeakQmp::upgrade) {
            return Ok(qmp);
        }
        let qmp = Qmp::connect(path, Arc::clone(env)).await?;
        *kept = Some(qmp.downgrade());
        Ok(qmp)
    }
}

fn is_used(kept: &Option<WeakQmp>) -> bool {
    kept.as_ref().is_some_and(|kept| kept.upgrade().is_some())
}
