//! Certificates and keys in files.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::RootCertStore;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};

use super::TlsError;

/// Where clients look if nobody says where: libnbd's place.
const CLIENT_FOLDER: &str = "/etc/pki/libnbd";

/// Where distributions keep the authorities that they trust.
const BUNDLES: [&str; 3] =
    ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem"];

/// Everything that one side has.
pub(super) struct Files {
    /// Who may have signed the other side's certificate.
    pub(super) roots: Arc<RootCertStore>,
    /// Where these come from.
    pub(super) authorities: PathBuf,
    /// Lists of certificates that are good no more.
    pub(super) revoked: Vec<CertificateRevocationListDer<'static>>,
    /// This side's certificate, with those that lead from it to an authority, and its key.
    pub(super) own: Option<Own>,
}

/// A certificate with those that lead from it to an authority, and its key.
type Own = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

impl Files {
    /// A client's, in `folder`; if none is named, in libnbd's, and if there are none there, the authorities of the
    /// system.
    pub(super) fn of_client(folder: Option<&Path>) -> Result<Self, TlsError> {
        let usual = Path::new(CLIENT_FOLDER);
        match folder.or_else(|| usual.join("ca-cert.pem").exists().then_some(usual)) {
            Some(folder) => Self::load(folder, "client"),
            None => Self::of_system(&BUNDLES.map(Path::new)),
        }
    }

    /// A server's, in `folder`.
    pub(super) fn of_server(folder: &Path) -> Result<Self, TlsError> {
        Self::load(folder, "server")
    }

    fn load(folder: &Path, side: &str) -> Result<Self, TlsError> {
        let authorities = folder.join("ca-cert.pem");
        let mut roots = RootCertStore::empty();
        for certificate in several::<CertificateDer<'static>>(&authorities)? {
            roots.add(certificate).map_err(|error| unusable(&authorities, &error))?;
        }
        let lists = folder.join("ca-crl.pem");
        let revoked = if lists.exists() { several(&lists)? } else { Vec::new() };
        let [certificate, key] = ["cert", "key"].map(|what| folder.join(format!("{side}-{what}.pem")));
        let own = match certificate.exists() || key.exists() || side == "server" {
            true => Some((several(&certificate)?, one_key(&key)?)),
            false => None,
        };
        Ok(Self { roots: Arc::new(roots), authorities, revoked, own })
    }

    fn of_system(bundles: &[&Path]) -> Result<Self, TlsError> {
        let Some(bundle) = bundles.iter().find(|bundle| bundle.exists()) else {
            let why = "there is no such file, nor does this system have authorities of its own: name a directory with tls-certificates";
            return Err(TlsError::File(Path::new(CLIENT_FOLDER).join("ca-cert.pem"), why.to_owned()));
        };
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(several(bundle)?);
        Ok(Self { roots: Arc::new(roots), authorities: bundle.to_path_buf(), revoked: Vec::new(), own: None })
    }
}

/// All of a kind that `path` holds; at least one.
fn several<T: PemObject>(path: &Path) -> Result<Vec<T>, TlsError> {
    let text = read(path)?;
    let found: Vec<T> = T::pem_slice_iter(&text).collect::<Result<_, _>>().map_err(|error| unreadable(path, &error))?;
    match found.is_empty() {
        true => Err(unreadable(path, &pem::Error::NoItemsFound)),
        false => Ok(found),
    }
}

fn one_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_slice(&read(path)?).map_err(|error| unreadable(path, &error))
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|error| unusable(path, &error))
}

fn unreadable(path: &Path, error: &pem::Error) -> TlsError {
    let why = match error {
        pem::Error::NoItemsFound => "what belongs there is not in it".to_owned(),
        other => format!("it is no PEM: {other}"),
    };
    TlsError::File(path.to_owned(), why)
}

fn unusable(path: &Path, error: &dyn std::error::Error) -> TlsError {
    TlsError::File(path.to_owned(), error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn why(outcome: Result<Files, TlsError>) -> String {
        outcome.err().expect("it was taken").to_string()
    }

    #[test]
    fn a_file_that_is_missing_or_nonsense_is_named() {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let missing = why(Files::of_client(Some(folder.path())));
        assert!(missing.contains("ca-cert.pem: No such file"), "{missing}");
        std::fs::write(folder.path().join("ca-cert.pem"), "nonsense").expect("written");
        let nonsense = why(Files::of_client(Some(folder.path())));
        assert!(nonsense.contains("ca-cert.pem: what belongs there is not in it"), "{nonsense}");
    }

    #[test]
    fn without_a_directory_of_its_own_a_client_trusts_whom_the_system_trusts() {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let bundle = folder.path().join("bundle.pem");
        let nobody = why(Files::of_system(&[&bundle]));
        assert!(nobody.contains("name a directory with tls-certificates"), "{nobody}");
        let (key, parameters) = (rcgen::KeyPair::generate().expect("a key"), rcgen::CertificateParams::default());
        std::fs::write(&bundle, parameters.self_signed(&key).expect("signed").pem()).expect("written");
        let found = Files::of_system(&[Path::new("/nonexistent"), &bundle]).expect("there is one");
        assert_eq!((found.roots.len(), &found.authorities), (1, &bundle));
    }
}
