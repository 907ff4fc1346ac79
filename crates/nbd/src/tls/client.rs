//! The client's side.

use std::path::PathBuf;
use std::sync::Arc;

use block::{Error, Result};
use env::EnvRef;
use rustls::ClientConfig;
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::files::Files;
use super::{Clock, TlsError, provider};
use crate::uri::UriTls;

/// Who answers on a unix socket, unless somebody says otherwise.
const LOCAL: &str = "localhost";

/// What a client needs for one encrypted connection. It is read anew for each, so that certificates can be renewed.
pub(crate) struct TlsClient {
    config: Arc<ClientConfig>,
    server: ServerName<'static>,
    authorities: PathBuf,
    shows_own: bool,
}

impl TlsClient {
    /// For a connection to `host`, or over a unix socket.
    pub(crate) fn new(tls: &UriTls, host: Option<&str>, env: &EnvRef) -> Result<Self, TlsError> {
        let files = Files::of_client(tls.certificates.as_deref())?;
        let wanted = tls.hostname.as_deref().or(host).unwrap_or(LOCAL);
        let server = ServerName::try_from(wanted.to_owned())
            .map_err(|_| TlsError::Failed(rustls::Error::General(format!("no certificate can be for \"{wanted}\""))))?;
        let shows_own = files.own.is_some();
        let authorities = files.authorities.clone();
        Ok(Self { config: configure(files, env)?, server, authorities, shows_own })
    }

    /// Encrypts `stream`, whose server has agreed to it.
    pub(crate) async fn connect<S>(&self, stream: S) -> Result<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let connecting = TlsConnector::from(Arc::clone(&self.config)).connect(self.server.clone(), stream);
        connecting.await.map_err(|error| match error.get_ref().and_then(|inner| inner.downcast_ref()) {
            Some(inner) => TlsError::of_library(inner, &self.authorities, self.shows_own).while_doing("encrypting"),
            None => Error::from_os(error, "the NBD server left during the TLS handshake"),
        })
    }

    /// What it means when the first bytes read after the handshake are the end, or an alert. With TLS 1.3 a server
    /// checks the client's certificate when the client is done already.
    pub(crate) fn explain(&self, error: Error) -> Error {
        let os = std::error::Error::source(&error).and_then(|source| source.downcast_ref::<std::io::Error>());
        let Some(os) = os else { return error };
        let alert = match os.get_ref().and_then(|inner| inner.downcast_ref()) {
            Some(rustls::Error::AlertReceived(alert)) => Some(*alert),
            _ if error.kind() == block::ErrorKind::Disconnected => None,
            _ => return error,
        };
        TlsError::Refused(self.shows_own, alert).while_doing("encrypting")
    }
}

fn configure(files: Files, env: &EnvRef) -> Result<Arc<ClientConfig>, TlsError> {
    let provider = provider();
    let verifier = WebPkiServerVerifier::builder_with_provider(files.roots, Arc::clone(&provider))
        .with_crls(files.revoked)
        .only_check_end_entity_revocation()
        .allow_unknown_revocation_status()
        .build()
        .map_err(|error| TlsError::File(files.authorities, error.to_string()))?;
    let builder = ClientConfig::builder_with_details(provider, Arc::new(Clock(Arc::clone(env))))
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Failed)?
        .with_webpki_verifier(verifier);
    let mut config = match files.own {
        Some((chain, key)) => builder.with_client_auth_cert(chain, key).map_err(TlsError::Failed)?,
        None => builder.with_no_client_auth(),
    };
    // Nothing is kept from one connection to the next.
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}
