//! The server's side: every client shows a certificate, as QEMU's server has it. NBD has no passwords.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use env::EnvRef;
use parking_lot::Mutex;
use rustls::ServerConfig;
use rustls::server::WebPkiClientVerifier;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::files::Files;
use super::{Clock, TlsError, provider};

/// What a server needs to take encrypted connections.
pub struct TlsServer {
    folder: PathBuf,
    env: EnvRef,
    /// What was read last and could be used.
    config: Mutex<Arc<ServerConfig>>,
}

impl TlsServer {
    /// With the certificates in `folder`: `ca-cert.pem`, `server-cert.pem`, `server-key.pem`, and `ca-crl.pem` if it is
    /// there.
    ///
    /// # Errors
    /// One of them is missing or nonsense.
    pub fn new(folder: &Path, env: EnvRef) -> Result<Self, TlsError> {
        let config = Mutex::new(configure(folder, &env)?);
        Ok(Self { folder: folder.to_owned(), env, config })
    }

    /// Where its certificates are.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Reads the files again, so that those who come from now on meet a certificate that was renewed.
    ///
    /// # Errors
    /// As of [`TlsServer::new`]; then it goes on with what it had.
    pub fn renew(&self) -> Result<(), TlsError> {
        *self.config.lock() = configure(&self.folder, &self.env)?;
        Ok(())
    }

    pub(crate) async fn accept<S>(&self, stream: S) -> std::io::Result<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let config = Arc::clone(&self.config.lock());
        TlsAcceptor::from(config).accept(stream).await
    }
}

fn configure(folder: &Path, env: &EnvRef) -> Result<Arc<ServerConfig>, TlsError> {
    let provider = provider();
    let files = Files::of_server(folder)?;
    let verifier = WebPkiClientVerifier::builder_with_provider(files.roots, Arc::clone(&provider))
        .with_crls(files.revoked)
        .only_check_end_entity_revocation()
        .allow_unknown_revocation_status()
        .build()
        .map_err(|error| TlsError::File(files.authorities, error.to_string()))?;
    let (chain, key) = files.own.expect("a server's files have its own certificate");
    let config = ServerConfig::builder_with_details(provider, Arc::new(Clock(Arc::clone(env))))
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Failed)?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)
        .map_err(|error| TlsError::File(folder.join("server-key.pem"), error.to_string()))?;
    Ok(Arc::new(config))
}
