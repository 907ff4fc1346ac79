//! TLS 1.3 and nothing older, both sides with their certificates, AES-GCM first. There is no authority: a peer proves that it
//! has the key of its certificate, and whose that is, its fingerprint says.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use api::v1::{Error, ErrorCode, Result};
use env::EnvRef;
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::aws_lc_rs::{cipher_suite, default_provider};
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::time_provider::TimeProvider;
use rustls::{ClientConfig, DigitallySignedStruct, DistinguishedName, OtherError, ServerConfig, SignatureScheme};

use crate::certificate::{self, Fingerprint, Validity};
use crate::identity::Identity;

/// The wire.
pub const ALPN_WIRE: &[u8] = b"transhume/1";
/// What two hosts say of machines, and the memory of those.
pub const ALPN_MACHINE: &[u8] = b"transhume-machine/1";
/// Pairing.
pub const ALPN_TRUST: &[u8] = b"transhume-trust/1";

/// The name that clients ask for: it says nothing, but TLS wants one.
pub const SERVER_NAME: &str = "transhume";

fn provider() -> Arc<CryptoProvider> {
    Arc::new(CryptoProvider {
        cipher_suites: vec![
            cipher_suite::TLS13_AES_128_GCM_SHA256,
            cipher_suite::TLS13_AES_256_GCM_SHA384,
            cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
        ],
        ..default_provider()
    })
}

/// How this host takes connections.
pub fn server(identity: &Identity, env: &EnvRef) -> Result<Arc<ServerConfig>> {
    let provider = provider();
    let verifier = Arc::new(AnyHost(Signatures(Arc::clone(&provider))));
    let mut config = ServerConfig::builder_with_details(provider, Arc::new(Clock(Arc::clone(env))))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(of_library)?
        .with_client_cert_verifier(verifier)
        .with_single_cert(vec![identity.certificate.clone()], identity.key.clone_key())
        .map_err(of_library)?;
    config.alpn_protocols = vec![ALPN_WIRE.to_vec(), ALPN_MACHINE.to_vec(), ALPN_TRUST.to_vec()];
    // Every connection is looked at anew: a host that is trusted no more comes in by no ticket.
    config.send_tls13_tickets = 0;
    // Who carries a stream makes its records, see `sealed`.
    config.enable_secret_extraction = true;
    Ok(Arc::new(config))
}

/// Who is to answer.
#[derive(Clone, Debug)]
pub enum Expected {
    /// Whoever has a certificate: a code will tell.
    Anybody,
    /// The host called so, with this certificate.
    Host(String, Fingerprint),
}

/// How this host makes connections to `expected`, for `protocol`.
pub fn client(identity: &Identity, env: &EnvRef, expected: Expected, protocol: &[u8]) -> Result<Arc<ClientConfig>> {
    let provider = provider();
    let verifier = Arc::new(Pinned { expected, signatures: Signatures(Arc::clone(&provider)) });
    let mut config = ClientConfig::builder_with_details(provider, Arc::new(Clock(Arc::clone(env))))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(of_library)?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_client_auth_cert(vec![identity.certificate.clone()], identity.key.clone_key())
        .map_err(of_library)?;
    config.alpn_protocols = vec![protocol.to_vec()];
    config.resumption = Resumption::disabled();
    config.enable_secret_extraction = true;
    Ok(Arc::new(config))
}

/// The reason for which `Pinned` has refused, if that is what `error` is about.
pub fn rejection(error: &std::io::Error) -> Option<&Error> {
    let error = error.get_ref()?.downcast_ref::<rustls::Error>()?;
    let rustls::Error::Other(OtherError(inner)) = error else { return None };
    inner.downcast_ref::<Error>()
}

fn of_library(error: rustls::Error) -> Error {
    Error::new(ErrorCode::Internal, format!("TLS cannot be set up: {error}"))
        .with_hint("please report it with the daemon's log")
}

/// The clock of `env` for the library.
struct Clock(EnvRef);

impl fmt::Debug for Clock {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Clock")
    }
}

impl TimeProvider for Clock {
    fn current_time(&self) -> Option<UnixTime> {
        let since = self.0.wall_clock().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        Some(UnixTime::since_unix_epoch(since))
    }
}

/// Checks signatures: that a peer has the key of the certificate that it shows.
#[derive(Debug)]
struct Signatures(Arc<CryptoProvider>);

impl Signatures {
    fn verify(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }

    fn too_old() -> rustls::Error {
        rustls::Error::General("TLS 1.2 is not spoken here".to_owned())
    }
}

/// Of those who answer: only the one that is expected.
#[derive(Debug)]
struct Pinned {
    expected: Expected,
    signatures: Signatures,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let Expected::Host(name, fingerprint) = &self.expected else { return Ok(ServerCertVerified::assertion()) };
        let reject = |error: Error| rustls::Error::Other(OtherError(Arc::new(error)));
        let shown = Fingerprint::of(end_entity);
        if shown != *fingerprint {
            let message = format!("who answers as {name} has the fingerprint {shown}, and not the one that is trusted");
            return Err(reject(Error::new(ErrorCode::HostIdentity, message).with_hint(format!(
                "if {name} has a new identity, `transhume trust --remove {name}` and pair them anew; if its address has \
                 changed, `transhume trust --change {name} --address HOST:PORT`; otherwise somebody is in between"
            ))));
        }
        let validity = Validity::of(end_entity).ok_or(rustls::CertificateError::BadEncoding)?;
        certificate::check(validity, now.as_secs(), name, false).map_err(reject)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(Signatures::too_old())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.signatures.verify(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.signatures.schemes()
    }
}

/// Of those who come: whoever has the key of a certificate. Whether that is trusted is asked right after the handshake, where
/// the answer can say what to do (`listener`).
#[derive(Debug)]
struct AnyHost(Signatures);

impl ClientCertVerifier for AnyHost {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(Signatures::too_old())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.schemes()
    }
}
