//! Disks of running VMs.

use std::path::Path;
use std::sync::Arc;

use api::v1::{self, AdoptRequest, CheckRequest, CheckedDisk, Error, ErrorCode};

use crate::daemon::Daemon;
use crate::problem::Result;
use crate::volume::Volume;

fn not_yet() -> Error {
    Error::new(ErrorCode::NotAdoptable, "this daemon cannot adopt disks of running VMs yet")
}

impl Daemon {
    pub(crate) async fn check_adoption(&self, _request: CheckRequest) -> Result<Vec<CheckedDisk>> {
        Err(not_yet())
    }

    pub(crate) async fn adopt(self: &Arc<Self>, _request: AdoptRequest) -> Result<v1::Volume> {
        Err(not_yet())
    }

    pub(crate) async fn release(self: &Arc<Self>, _name: &str) -> Result<v1::Volume> {
        Err(not_yet())
    }
}

pub(crate) async fn recover(_daemon: &Arc<Daemon>, _volume: &Arc<Volume>) -> Result<()> {
    Ok(())
}

pub(crate) async fn persist_libvirt(_domain: &str, _from: &Path, _to: &Path) -> Result<Option<String>, String> {
    Err("libvirt is not supported yet".to_owned())
}
