//! Who takes part: a volume, its client, and where the volume is.

use std::path::PathBuf;

use crate::client::Client;
use crate::plan::Place;

/// Where the volume is, and what earlier moves have left on purpose.
#[derive(Clone, Debug)]
pub(crate) struct Whereabouts {
    /// The place that holds it.
    pub(crate) place: Place,
    /// Its file or block device.
    pub(crate) path: PathBuf,
    /// The source of the last move, if it is a file that was kept.
    pub(crate) kept: Option<(Place, PathBuf)>,
}

/// A volume and who uses it.
pub(crate) struct Party {
    /// The volume's name.
    pub(crate) name: &'static str,
    /// Its size.
    pub(crate) bytes: u64,
    /// Who uses it.
    pub(crate) client: Client,
    /// Where it is.
    pub(crate) here: Whereabouts,
}
