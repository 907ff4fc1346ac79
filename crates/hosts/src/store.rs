//! Who is trusted: names, fingerprints and addresses in one small file, replaced whole.

use std::path::{Path, PathBuf};

use api::v1::{self, Error, ErrorCode, Result};
use env::FilesRef;
use parking_lot::{Mutex, RwLock};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::address::Address;
use crate::certificate::Fingerprint;
use crate::name::HostName;

/// The version of the file.
const VERSION: u32 = 1;

/// A host that is trusted.
#[derive(Clone, Debug)]
pub struct Trusted {
    /// What it is called here.
    pub name: HostName,
    /// What it is known by.
    pub fingerprint: Fingerprint,
    /// Where it is reached, in the order of trying.
    pub addresses: Vec<Address>,
    /// Since when, in milliseconds since 1970.
    pub since_unix_ms: u64,
}

impl Trusted {
    /// How the API shows it.
    pub fn show(&self) -> v1::TrustedHost {
        v1::TrustedHost {
            name: self.name.to_string(),
            fingerprint: self.fingerprint.to_string(),
            addresses: self.addresses.iter().map(ToString::to_string).collect(),
            trusted_unix_ms: self.since_unix_ms,
            clock_ahead_seconds: None,
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Document {
    version: u32,
    hosts: Vec<Line>,
}

#[derive(Serialize, Deserialize)]
struct Line {
    name: String,
    fingerprint: String,
    addresses: Vec<String>,
    since_unix_ms: u64,
}

/// The hosts that are trusted.
pub struct TrustStore {
    files: FilesRef,
    path: PathBuf,
    hosts: RwLock<Vec<Trusted>>,
    /// Held from reading the list to its being durable.
    change: Mutex<()>,
    changed: watch::Sender<u64>,
}

impl TrustStore {
    /// Reads the file, if there is one.
    ///
    /// # Errors
    /// It cannot be read, or is not what this program has written.
    pub fn open(files: FilesRef, path: PathBuf) -> Result<Self> {
        let hosts = read(&files, &path)?;
        Ok(Self { files, path, hosts: RwLock::new(hosts), change: Mutex::new(()), changed: watch::Sender::new(0) })
    }

    /// Reads the file again: somebody may have brought it back from a backup. Gives those that are trusted no more as
    /// they were.
    ///
    /// # Errors
    /// It cannot be read, or is not what this program has written. Then the same hosts are trusted as before.
    pub fn reload(&self) -> Result<Vec<Trusted>> {
        let _change = self.change.lock();
        let hosts = read(&self.files, &self.path)?;
        let before = std::mem::replace(&mut *self.hosts.write(), hosts);
        self.changed.send_modify(|number| *number += 1);
        let is_gone = |host: &Trusted| self.with(host.fingerprint).is_none_or(|now| now.name != host.name);
        Ok(before.into_iter().filter(is_gone).collect())
    }

    /// All of them, by name.
    pub fn list(&self) -> Vec<Trusted> {
        self.hosts.read().clone()
    }

    /// The one called `name`.
    pub fn named(&self, name: &str) -> Result<Trusted> {
        let found = self.hosts.read().iter().find(|host| host.name.as_str() == name).cloned();
        found.ok_or_else(|| {
            Error::new(ErrorCode::HostUnknown, format!("this host trusts no host called {name}"))
                .with_hint("`transhume trust --list` shows those that it does; `transhume trust --invite` on one and `transhume trust HOST:PORT CODE` on the other pairs two")
        })
    }

    /// Refuses a host that is trusted no more under the name and with the certificate that it had.
    pub fn check_still(&self, host: &Trusted) -> Result<()> {
        match self.named(host.name.as_str())? {
            known if known.fingerprint == host.fingerprint => Ok(()),
            _ => Err(Error::new(ErrorCode::HostIdentity, format!("{} was paired anew meanwhile", host.name))
                .with_hint("what needs it is tried again by itself")),
        }
    }

    /// The one with this certificate.
    pub fn with(&self, fingerprint: Fingerprint) -> Option<Trusted> {
        self.hosts.read().iter().find(|host| host.fingerprint == fingerprint).cloned()
    }

    /// Whether `host` may be added: it is new, or the same as before.
    pub fn check(&self, name: &HostName, fingerprint: Fingerprint) -> Result<(), Conflict> {
        for host in self.hosts.read().iter() {
            match (host.name == *name, host.fingerprint == fingerprint) {
                (true, false) => return Err(Conflict::OtherFingerprint),
                (false, true) => return Err(Conflict::OtherName(host.name.clone())),
                _ => {}
            }
        }
        Ok(())
    }

    /// Trusts `host` from now on, also after a crash. One that is there already gets the new addresses.
    pub fn add(&self, host: Trusted) -> Result<()> {
        let _change = self.change.lock();
        self.check(&host.name, host.fingerprint).map_err(|conflict| conflict.here(&host.name))?;
        let mut hosts = self.list();
        hosts.retain(|other| other.name != host.name);
        hosts.push(host);
        hosts.sort_by(|one, other| one.name.cmp(&other.name));
        self.keep(hosts)
    }

    /// Trusts the host called `name` no more.
    pub fn remove(&self, name: &str) -> Result<Trusted> {
        let _change = self.change.lock();
        let removed = self.named(name)?;
        self.keep(self.list().into_iter().filter(|host| host.name != removed.name).collect())?;
        Ok(removed)
    }

    /// Gives the host called `name` other addresses.
    pub fn move_to(&self, name: &str, addresses: Vec<Address>) -> Result<Trusted> {
        let _change = self.change.lock();
        let mut changed = self.named(name)?;
        changed.addresses = addresses;
        let others = self.list().into_iter();
        self.keep(others.map(|host| if host.name == changed.name { changed.clone() } else { host }).collect())?;
        Ok(changed)
    }

    /// Returns when this certificate is trusted no more.
    pub async fn distrusted(&self, fingerprint: Fingerprint) {
        let mut changes = self.changed.subscribe();
        while self.with(fingerprint).is_some() {
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    fn keep(&self, hosts: Vec<Trusted>) -> Result<()> {
        let line = |host: &Trusted| Line {
            name: host.name.to_string(),
            fingerprint: host.fingerprint.to_string(),
            addresses: host.addresses.iter().map(ToString::to_string).collect(),
            since_unix_ms: host.since_unix_ms,
        };
        let document = Document { version: VERSION, hosts: hosts.iter().map(line).collect() };
        let text = serde_json::to_string_pretty(&document).expect("plain data serialises");
        env::replace_file(&*self.files, &self.path, (text + "\n").as_bytes())
            .map_err(|error| Error::of_file(error, format!("writing {}", self.path.display())))?;
        *self.hosts.write() = hosts;
        self.changed.send_modify(|number| *number += 1);
        Ok(())
    }
}

/// Why a host cannot be trusted beside those that are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Conflict {
    /// Its name has another certificate.
    OtherFingerprint,
    /// Its certificate has another name.
    OtherName(HostName),
}

impl Conflict {
    /// The error where that was found; `name` is what the new host is called.
    pub fn here(&self, name: &HostName) -> Error {
        match self {
            Self::OtherFingerprint => Error::new(
                ErrorCode::HostIdentity,
                format!("this host trusts {name} already, with another fingerprint"),
            )
            .with_hint(format!(
                "if {name} has a new identity, `transhume trust --remove {name}` here and pair them anew; if this is \
                 another host, call it something else with --name"
            )),
            Self::OtherName(known) => {
                Error::new(ErrorCode::HostIdentity, format!("this host trusts that host already, and calls it {known}"))
                    .with_hint(format!("use that name, or `transhume trust --remove {known}` first"))
            }
        }
    }
}

fn read(files: &FilesRef, path: &Path) -> Result<Vec<Trusted>> {
    match files.read(path) {
        Ok(text) => parse(&text).ok_or_else(|| {
            Error::new(ErrorCode::Io, format!("{} does not say whom this host trusts", path.display()))
                .with_hint("bring it back from a backup, or remove it and pair this host with the others anew")
        }),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(Error::of_file(error, format!("reading {}", path.display()))),
    }
}

fn parse(text: &[u8]) -> Option<Vec<Trusted>> {
    let document: Document = serde_json::from_slice(text).ok()?;
    if document.version != VERSION {
        return None;
    }
    let host = |line: Line| {
        Some(Trusted {
            name: HostName::new(&line.name).ok()?,
            fingerprint: Fingerprint::parse(&line.fingerprint)?,
            addresses: Address::parse_all(&line.addresses).ok()?,
            since_unix_ms: line.since_unix_ms,
        })
    };
    document.hosts.into_iter().map(host).collect()
}

#[cfg(test)]
mod unit {
    use super::*;

    fn host(name: &str, certificate: &[u8]) -> Trusted {
        Trusted {
            name: HostName::new(name).expect("a name"),
            fingerprint: Fingerprint::of(certificate),
            addresses: vec![Address::parse("192.0.2.7").expect("an address")],
            since_unix_ms: 7,
        }
    }

    #[test]
    fn what_is_trusted_is_kept_and_a_name_never_changes_hands_by_itself() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("trusted.json");
        let open = || TrustStore::open(env::RealFiles::shared(), path.clone());
        let store = open().expect("none yet");
        store.add(host("b", b"1")).expect("new");
        store.add(host("b", b"1")).expect("the same again");
        let error = store.add(host("b", b"2")).expect_err("another certificate under the same name was taken");
        assert_eq!(error.code, ErrorCode::HostIdentity);
        assert!(error.message.contains("already, with another fingerprint"), "{error}");
        let error = store.add(host("c", b"1")).expect_err("the same certificate under another name was taken");
        assert!(error.message.contains("calls it b"), "{error}");
        store.add(host("a", b"3")).expect("new");
        store.move_to("b", Address::parse_all(&["b.example:9".to_owned()]).expect("good")).expect("known");

        let again = open().expect("readable");
        let shown: Vec<String> =
            again.list().iter().map(|host| format!("{} {}", host.name, host.addresses[0])).collect();
        assert_eq!(shown, ["a 192.0.2.7:10810", "b b.example:9"]);
        assert_eq!(again.remove("b").expect("known").fingerprint, Fingerprint::of(b"1"));
        assert_eq!(again.named("b").expect_err("it is gone").code, ErrorCode::HostUnknown);
        again.add(host("b", b"2")).expect("after the removal another certificate is fine");

        std::fs::write(&path, "{\"version\": 2, \"hosts\": []}").expect("written");
        assert!(open().is_err(), "a later version was read");
    }
}
