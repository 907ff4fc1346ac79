//! What `transhumed` is started with.

#![allow(rustdoc::broken_intra_doc_links, reason = "doc comments here are help texts")]

use std::path::PathBuf;

use clap::Parser;

/// Serves volumes to virtual machines and moves them while they are used.
///
/// Example: transhumed --state-dir /var/lib/transhume --listen unix:/run/transhume/api.sock
#[derive(Clone, Debug, Parser)]
#[command(name = "transhumed", version, max_term_width = 100)]
pub struct Args {
    /// Where volumes, jobs and the audit log are kept; one daemon a directory
    #[arg(long, value_name = "DIR", env = "TRANSHUME_STATE_DIR", default_value = "/var/lib/transhume")]
    pub state_dir: PathBuf,

    /// Where the API listens: unix:PATH
    #[arg(long, value_name = "unix:PATH", env = "TRANSHUME_LISTEN", default_value = "unix:/run/transhume/api.sock")]
    pub listen: String,

    /// The configuration file (TOML); an unknown key in it is an error
    #[arg(long, value_name = "FILE", env = "TRANSHUME_CONFIG")]
    pub config: Option<PathBuf>,
}
