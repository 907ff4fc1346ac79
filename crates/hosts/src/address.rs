//! Where a host is reached: `HOST:PORT`.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use api::v1::{Error, Result};

/// The port of the wire and of pairing, unless another is said.
pub const DEFAULT_PORT: u16 = 10810;

/// The most addresses that a host has.
pub const ADDRESSES_MAX: usize = 32;

/// A name or number of a machine, and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// The name or number.
    pub host: String,
    /// The port, never 0.
    pub port: u16,
}

impl Address {
    /// Reads `HOST`, `HOST:PORT` or `[IPV6]:PORT`.
    pub fn parse(text: &str) -> Result<Self> {
        if let Ok(address) = text.parse::<SocketAddr>() {
            return Ok(address.into());
        }
        if let Ok(address) = text.parse::<IpAddr>() {
            return Ok(SocketAddr::new(address, DEFAULT_PORT).into());
        }
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) => (host, port.parse().ok().filter(|port| *port != 0)),
            None => (text, Some(DEFAULT_PORT)),
        };
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'.' || byte == b'-' || byte == b'_';
        match port {
            Some(port) if !host.is_empty() && host.len() <= 253 && host.bytes().all(is_name) => {
                Ok(Self { host: host.to_owned(), port })
            }
            _ => Err(Error::invalid(
                format!("\"{}\" is no address of a host", text.escape_default()),
                format!("write HOST:PORT, as in 192.0.2.7:{DEFAULT_PORT} or [2001:db8::7]:{DEFAULT_PORT}"),
            )),
        }
    }

    /// Reads several; at most [`ADDRESSES_MAX`].
    pub fn parse_all(texts: &[String]) -> Result<Vec<Self>> {
        if texts.len() > ADDRESSES_MAX {
            return Err(Error::invalid(
                format!("{} addresses of one host", texts.len()),
                format!("give it at most {ADDRESSES_MAX}"),
            ));
        }
        texts.iter().map(|text| Self::parse(text)).collect()
    }

    /// Its number, if it is one.
    pub fn number(&self) -> Option<IpAddr> {
        self.host.parse().ok()
    }
}

/// Whether all of these are addresses.
pub fn check_all(texts: &[String]) -> Result<()> {
    Address::parse_all(texts).map(|_| ())
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Self {
        Self { host: address.ip().to_string(), port: address.port() }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(out, "[{}]:{}", self.host, self.port),
            false => write!(out, "{}:{}", self.host, self.port),
        }
    }
}

#[cfg(test)]
mod unit {
    use super::*;

    #[test]
    fn addresses_are_names_or_numbers_with_a_port_that_may_be_left_out() {
        for (text, shown) in [
            ("192.0.2.7", "192.0.2.7:10810"),
            ("192.0.2.7:99", "192.0.2.7:99"),
            ("2001:db8::7", "[2001:db8::7]:10810"),
            ("[2001:db8::7]:99", "[2001:db8::7]:99"),
            ("b.example:7", "b.example:7"),
            ("b", "b:10810"),
        ] {
            assert_eq!(Address::parse(text).expect(text).to_string(), shown);
        }
        for text in ["", ":7", "b:", "b:0", "b:65536", "a b:7", "b:7:7", "[::1", "ä:7"] {
            assert!(Address::parse(text).is_err(), "{text} was taken for an address");
        }
    }
}
