//! What hosts are called.

use std::fmt;

use api::v1::{Error, Result};

/// The name of a host, as it is known here: up to 64 letters, digits, `.`, `_` and `-`, a letter or digit first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostName(String);

impl HostName {
    /// A host of this name.
    ///
    /// # Errors
    /// If that cannot be a name.
    pub fn new(name: &str) -> Result<Self, Error> {
        let good = name.chars().all(|character| character.is_ascii_alphanumeric() || "._-".contains(character));
        let starts_well = name.chars().next().is_some_and(|first| first.is_ascii_alphanumeric());
        if good && starts_well && name.len() <= 64 {
            return Ok(Self(name.to_owned()));
        }
        Err(Error::invalid(
            format!("\"{}\" cannot be the name of a host", name.escape_default()),
            "use up to 64 letters, digits, `.`, `_` and `-`, a letter or digit first",
        ))
    }

    /// What this machine is called by its kernel, without the domain.
    pub fn of_this_machine() -> Result<Self> {
        let system = rustix::system::uname();
        let name = system.nodename().to_string_lossy().into_owned();
        let name = name.split('.').next().unwrap_or_default();
        Self::new(name).map_err(|error| error.with_hint("give this host a name: `name` in the section [hosts]"))
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}
