//! This host's identity: a private key and its own certificate, made once and kept in one file of mode 0600.

use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use api::v1::{Error, ErrorCode, Result};
use env::{Env, civil, unix_seconds};
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, date_time_ymd};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::certificate::{Fingerprint, Validity};
use crate::name::HostName;

/// How long a certificate is good for. Whoever holds the key for longer than that has renewed it.
const YEARS: u64 = 10;
const DAY_SECONDS: u64 = 86_400;

/// A key, its certificate, and what is read from that.
pub struct Identity {
    /// Its certificate, which it has signed itself.
    pub certificate: CertificateDer<'static>,
    /// The private key; whoever has it is this host.
    pub key: PrivateKeyDer<'static>,
    /// What others know it by.
    pub fingerprint: Fingerprint,
    /// When it is good.
    pub validity: Validity,
}

impl Identity {
    /// The identity that `path` holds; if there is none, it is made.
    pub fn load_or_make(path: &Path, name: &HostName, env: &dyn Env) -> Result<Self> {
        match std::fs::metadata(path) {
            Ok(found) if found.mode() & 0o077 != 0 => {
                let message =
                    format!("others may read this host's key {} (mode {:o})", path.display(), found.mode() & 0o777);
                Err(Error::new(ErrorCode::PermissionDenied, message).with_hint(
                    "if nobody can have read it, `chmod 600` it; otherwise remove it and pair this host with the others anew",
                ))
            }
            Ok(_) => Self::load(path),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Self::make(path, name, env),
            Err(error) => Err(Error::of_file(error, format!("looking at {}", path.display()))),
        }
    }

    fn load(path: &Path) -> Result<Self> {
        let text = std::fs::read(path).map_err(|error| Error::of_file(error, format!("reading {}", path.display())))?;
        Self::parse(&text).ok_or_else(|| {
            Error::new(ErrorCode::Io, format!("{} does not hold this host's key and certificate", path.display()))
                .with_hint("bring it back from a backup, or remove it and pair this host with the others anew")
        })
    }

    fn parse(text: &[u8]) -> Option<Self> {
        let certificate = CertificateDer::from_pem_slice(text).ok()?;
        let key = PrivateKeyDer::from_pem_slice(text).ok()?;
        let validity = Validity::of(&certificate)?;
        Some(Self { fingerprint: Fingerprint::of(&certificate), certificate, key, validity })
    }

    /// Makes a new one in the place of any that is there. The file is replaced whole or not at all, and nobody else may
    /// read it at any moment.
    pub fn make(path: &Path, name: &HostName, env: &dyn Env) -> Result<Self> {
        let text = generate(name, unix_seconds(env.wall_clock()))?;
        let attempt = |error: std::io::Error| Error::of_file(error, format!("writing {}", path.display()));
        let new = path.with_extension("new");
        env::unless_missing(std::fs::remove_file(&new)).map_err(attempt)?;
        let mut file = std::fs::File::options().write(true).create_new(true).mode(0o600).open(&new).map_err(attempt)?;
        file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(attempt)?;
        std::fs::rename(&new, path).map_err(attempt)?;
        let folder = path.parent().expect("a file of the state directory has a parent");
        std::fs::File::open(folder).and_then(|folder| folder.sync_all()).map_err(attempt)?;
        Self::load(path)
    }
}

/// A key and a certificate in PEM.
fn generate(name: &HostName, now: u64) -> Result<String> {
    let failed = |error: rcgen::Error| {
        Error::new(ErrorCode::Internal, format!("this host's key cannot be made: {error}"))
            .with_hint("please report it with the daemon's log")
    };
    let key = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).map_err(failed)?;
    let mut subject = DistinguishedName::new();
    subject.push(DnType::CommonName, format!("transhume {name}"));
    let mut parameters = CertificateParams::default();
    parameters.distinguished_name = subject;
    // Clocks a day apart are borne.
    let midnight = |seconds: u64| {
        let (year, month, day) = civil(seconds);
        date_time_ymd(i32::try_from(year).unwrap_or(9999), month, day)
    };
    parameters.not_before = midnight(now.saturating_sub(DAY_SECONDS));
    parameters.not_after = midnight(now + YEARS * 365 * DAY_SECONDS);
    let certificate = parameters.self_signed(&key).map_err(failed)?;
    Ok(format!("{}{}", key.serialize_pem(), certificate.pem()))
}

#[cfg(test)]
mod unit {
    use super::*;

    #[test]
    fn an_identity_is_made_once_and_kept_where_nobody_else_may_read_it() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("identity.pem");
        let env = env::RealEnv::new();
        let name = HostName::new("a").expect("a name");
        let made = Identity::load_or_make(&path, &name, &env).expect("made");
        assert_eq!(std::fs::metadata(&path).expect("there").mode() & 0o777, 0o600);
        let kept = Identity::load_or_make(&path, &name, &env).expect("kept");
        assert_eq!(made.fingerprint, kept.fingerprint);
        let now = unix_seconds(env.wall_clock());
        assert!(kept.validity.from < now && kept.validity.until > now + 9 * 365 * DAY_SECONDS);

        let other = Identity::make(&path, &name, &env).expect("renewed");
        assert_ne!(made.fingerprint, other.fingerprint);

        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o640)).expect("opened up");
        let error = Identity::load_or_make(&path, &name, &env).err().expect("a key that others may read was taken");
        assert_eq!(error.code, ErrorCode::PermissionDenied);
        std::fs::write(&path, "nonsense").expect("written");
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).expect("closed again");
        let error = Identity::load_or_make(&path, &name, &env).err().expect("nonsense was taken for a key");
        assert!(error.message.contains("does not hold"), "{error}");
    }
}
