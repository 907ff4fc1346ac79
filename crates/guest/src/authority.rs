//! Certificates for tests, signed by an authority of their own, in the files that libnbd, nbdkit and QEMU look for.

use std::io::Write;
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use anyhow::Context;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, DnType,
    ExtendedKeyUsagePurpose, IsCa, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber,
    date_time_ymd,
};

/// Years in which a certificate is good on any clock that these tests meet.
pub const GOOD_YEARS: Range<i32> = 2000..2200;

/// Somebody who signs certificates.
#[derive(Debug)]
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    /// One called `name`.
    ///
    /// # Errors
    /// The certificate cannot be made.
    pub fn new(name: &str) -> anyhow::Result<Self> {
        let mut parameters = parameters(name, &[], GOOD_YEARS)?;
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        Ok(Self { issuer: CertifiedIssuer::self_signed(parameters, KeyPair::generate()?)? })
    }

    /// Writes its own certificate into `folder`, which is made if it is not there.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&self, folder: &Path) -> anyhow::Result<()> {
        std::fs::create_dir_all(folder)?;
        write(folder, "ca-cert.pem", &self.issuer.as_ref().pem())
    }

    /// Writes a server's certificate and key into `folder`, for `names` (of hosts, or addresses), good in `years`, with
    /// the number `serial`.
    ///
    /// # Errors
    /// They cannot be made or written.
    pub fn write_server(&self, folder: &Path, names: &[&str], years: Range<i32>, serial: u64) -> anyhow::Result<()> {
        let mut parameters = parameters("a server", names, years)?;
        parameters.serial_number = Some(SerialNumber::from(serial));
        parameters.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.sign(folder, "server", parameters)
    }

    /// Writes a client's certificate and key into `folder`, good in `years`.
    ///
    /// # Errors
    /// They cannot be made or written.
    pub fn write_client(&self, folder: &Path, years: Range<i32>) -> anyhow::Result<()> {
        let mut parameters = parameters("a client", &[], years)?;
        parameters.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(folder, "client", parameters)
    }

    /// Writes a list into `folder` by which the certificate with the number `serial` is good no more.
    ///
    /// # Errors
    /// It cannot be made or written.
    pub fn write_revoked(&self, folder: &Path, serial: u64) -> anyhow::Result<()> {
        let revoked = RevokedCertParams {
            serial_number: SerialNumber::from(serial),
            revocation_time: date_time_ymd(2020, 1, 1),
            reason_code: None,
            invalidity_date: None,
        };
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2020, 1, 1),
            next_update: date_time_ymd(GOOD_YEARS.end, 1, 1),
            crl_number: SerialNumber::from(1_u64),
            issuing_distribution_point: None,
            revoked_certs: vec![revoked],
            key_identifier_method: KeyIdMethod::Sha256,
        };
        write(folder, "ca-crl.pem", &list.signed_by(&self.issuer)?.pem()?)
    }

    fn sign(&self, folder: &Path, side: &str, mut parameters: CertificateParams) -> anyhow::Result<()> {
        // QEMU wants both.
        parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        let key = KeyPair::generate()?;
        let certificate = parameters.signed_by(&key, &self.issuer)?;
        write(folder, &format!("{side}-cert.pem"), &certificate.pem())?;
        write(folder, &format!("{side}-key.pem"), &key.serialize_pem())
    }
}

/// Writes an identity of a daemon that is good in `years` where that looks for its own: in the state directory `state`.
///
/// # Errors
/// It cannot be made or written.
pub fn write_identity(state: &Path, name: &str, years: Range<i32>) -> anyhow::Result<()> {
    let folder = state.join("hosts");
    for folder in [state, &folder] {
        std::fs::DirBuilder::new().mode(0o700).recursive(true).create(folder)?;
    }
    let key = KeyPair::generate()?;
    let certificate = parameters(&format!("transhume {name}"), &[], years)?.self_signed(&key)?;
    let mut file =
        std::fs::File::options().write(true).create_new(true).mode(0o600).open(folder.join("identity.pem"))?;
    file.write_all(format!("{}{}", key.serialize_pem(), certificate.pem()).as_bytes())?;
    Ok(())
}

fn parameters(name: &str, names: &[&str], years: Range<i32>) -> anyhow::Result<CertificateParams> {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let mut parameters = CertificateParams::new(names)?;
    parameters.distinguished_name.push(DnType::CommonName, name);
    parameters.not_before = date_time_ymd(years.start, 1, 1);
    parameters.not_after = date_time_ymd(years.end, 1, 1);
    parameters.use_authority_key_identifier_extension = true;
    Ok(parameters)
}

fn write(folder: &Path, name: &str, text: &str) -> anyhow::Result<()> {
    let path = folder.join(name);
    std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
}
