//! What `SIGHUP` does: the configuration, this host's certificate and whom it trusts are read again while the daemon
//! serves. What cannot be read leaves everything as it was. No signal of a terminal ends a daemon.

use std::path::PathBuf;
use std::sync::Arc;

use tokio::signal::unix::Signal;

use crate::config::Config;
use crate::daemon::Daemon;
use crate::log::Log;

/// What is read again.
pub(crate) struct Reload {
    /// The configuration file, if there is one.
    pub(crate) config: Option<PathBuf>,
    /// The log, whose level the configuration says.
    pub(crate) log: Log,
}

impl Reload {
    /// Reads all of it again at every signal of `hangup`.
    pub(crate) async fn serve(self, mut hangup: Signal, daemon: Arc<Daemon>) {
        while hangup.recv().await.is_some() {
            self.carry_out(&daemon);
        }
    }

    fn carry_out(&self, daemon: &Daemon) {
        tracing::info!("reading the configuration, certificates and trust again");
        match Config::load(self.config.as_deref()) {
            Ok(config) => self.apply(config, daemon),
            Err(error) => tracing::error!(%error, "the configuration is as before"),
        }
        // The certificates of encrypted exports are read anew for each connection.
        if let Some(network) = &daemon.host_network
            && let Err(error) = network.reload()
        {
            tracing::error!(%error, "this host's certificate and whom it trusts are as before");
        }
    }

    fn apply(&self, mut config: Config, daemon: &Daemon) {
        if let Err(error) = self.log.set_filter(&config.log) {
            tracing::error!(%error, "the log is as before");
            config.log.clone_from(&daemon.config.log);
        }
        for key in config.keep_fixed(&daemon.config) {
            tracing::warn!(key, "a change of this key counts after a restart only");
        }
        daemon.set_running_jobs_max(config.running_jobs_max);
        daemon.config.replace(config);
    }
}

impl Daemon {
    /// So many moves run at once from now on. Those that run already go on.
    fn set_running_jobs_max(&self, count: usize) {
        let before = self.config.running_jobs_max;
        if count >= before {
            self.running_jobs.add_permits(count - before);
            return;
        }
        let lacking = before - count - self.running_jobs.forget_permits(before - count);
        let Ok(lacking) = u32::try_from(lacking) else { return };
        let running_jobs = Arc::clone(&self.running_jobs);
        self.env.spawn(Box::pin(async move {
            // Taken back as soon as as many moves have ended.
            if let Ok(permits) = running_jobs.acquire_many_owned(lacking).await {
                permits.forget();
            }
        }));
    }
}
