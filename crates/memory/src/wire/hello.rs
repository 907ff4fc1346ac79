//! How a stream begins.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{checksum_of, u16_at, u32_at, u64_at};
use crate::error::{Error, ErrorKind, Result};
use crate::region::{PAGE_BYTES, Region};

/// The version of the wire.
pub const VERSION: u16 = 1;
/// What comes first: magic, version, two bytes of zero, length, checksum of what follows.
pub const PREFIX_BYTES: usize = 24;
/// What follows is no longer.
pub const HELLO_BYTES_MAX: u32 = 64 << 10;
/// A memory has no more regions.
pub const REGIONS_MAX: usize = 256;
/// A session has no more streams.
pub const STREAMS_MAX: u16 = 64;

const MAGIC: &[u8; 8] = b"TRANSMEM";
/// An entry counts pages with 32 bits, also the one behind its last.
const REGION_BYTES_MAX: u64 = PAGE_BYTES << 31;
const NAME_BYTES_MAX: usize = 255;

/// What the sender says first on each stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Which copy this is.
    pub session: [u8; 16],
    /// How often its streams were made again. An older one may write no more.
    pub generation: u64,
    /// The number of this stream, and of how many.
    pub stream: u16,
    /// How many streams there are.
    pub streams: u16,
    /// The memory, region by region.
    pub regions: Vec<Region>,
}

/// Why a stream is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    /// This receiver waits for another copy.
    OtherSession,
    /// A newer generation has begun.
    Superseded,
    /// The target's memory has other regions.
    OtherRegions,
}

/// What the receiver answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// Why not, if not.
    pub refusal: Option<Refusal>,
}

impl Hello {
    /// Its bytes, with what comes first.
    ///
    /// # Errors
    /// `Invalid` for more than the wire can say.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        self.check().map_err(|error| Error::new(ErrorKind::Invalid, error.to_string()))?;
        encode(self)
    }

    /// Understands what follows the prefix.
    ///
    /// # Errors
    /// `Protocol`.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let hello: Self = decode(bytes)?;
        hello.check()?;
        Ok(hello)
    }

    fn check(&self) -> Result<()> {
        if self.streams == 0 || self.streams > STREAMS_MAX || self.stream >= self.streams {
            return Err(Error::protocol(format!("stream {} of {} is none", self.stream, self.streams)));
        }
        if self.regions.is_empty() || self.regions.len() > REGIONS_MAX {
            return Err(Error::protocol(format!("{} regions are no memory", self.regions.len())));
        }
        let is_right = |region: &Region| {
            let unit = region.page_bytes;
            unit >= PAGE_BYTES
                && unit.is_power_of_two()
                && region.bytes > 0
                && region.bytes.is_multiple_of(unit)
                && region.bytes <= REGION_BYTES_MAX
                && region.name.len() <= NAME_BYTES_MAX
        };
        match self.regions.iter().find(|region| !is_right(region)) {
            Some(region) => {
                Err(Error::protocol(format!("the region {:.40} of {} bytes is wrong", region.name, region.bytes)))
            }
            None => Ok(()),
        }
    }
}

impl Welcome {
    /// Its bytes, with what comes first.
    ///
    /// # Errors
    /// None that can happen.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        encode(self)
    }

    /// Understands what follows the prefix.
    ///
    /// # Errors
    /// `Protocol`.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        decode(bytes)
    }
}

/// How long what follows is, and its checksum.
///
/// # Errors
/// `Protocol` for something else than memory, `Mismatch` for another version.
pub fn parse_prefix(bytes: &[u8; PREFIX_BYTES]) -> Result<(u32, u64)> {
    if !bytes.starts_with(MAGIC) || u16_at(bytes, 10) != 0 {
        return Err(Error::protocol("the other side does not speak of memory"));
    }
    let version = u16_at(bytes, 8);
    if version != VERSION {
        let context = format!("the other side speaks version {version} of the memory's wire, and this one {VERSION}");
        return Err(Error::new(ErrorKind::Mismatch, context));
    }
    let length = u32_at(bytes, 12);
    if length > HELLO_BYTES_MAX {
        return Err(Error::protocol(format!("a greeting of {length} bytes is too long")));
    }
    Ok((length, u64_at(bytes, 16)))
}

fn encode(message: &impl Serialize) -> Result<Vec<u8>> {
    let text = postcard::to_stdvec(message).map_err(|error| Error::protocol("not said").with_source(error))?;
    let length = u32::try_from(text.len()).ok().filter(|length| *length <= HELLO_BYTES_MAX);
    let length = length.ok_or_else(|| Error::new(ErrorKind::Invalid, "the names of the regions are too long"))?;
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&[0; 2]);
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(&checksum_of(&text).to_le_bytes());
    bytes.extend_from_slice(&text);
    Ok(bytes)
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    let damaged = || Error::protocol("a greeting is not understood");
    let (message, rest) = postcard::take_from_bytes(bytes).map_err(|error| damaged().with_source(error))?;
    if rest.is_empty() { Ok(message) } else { Err(damaged()) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hello() -> Hello {
        let region = Region { name: "ram".to_owned(), bytes: 1 << 30, page_bytes: PAGE_BYTES };
        Hello { session: [7; 16], generation: 3, stream: 1, streams: 4, regions: vec![region] }
    }

    #[test]
    fn it_is_understood_as_it_was_said() {
        let bytes = hello().to_bytes().expect("said");
        let (prefix, text) = bytes.split_first_chunk().expect("long enough");
        assert_eq!(parse_prefix(prefix).expect("right"), (text.len() as u32, checksum_of(text)));
        assert_eq!(Hello::parse(text).expect("right"), hello());
        let welcome = Welcome { refusal: Some(Refusal::Superseded) };
        assert_eq!(Welcome::parse(&welcome.to_bytes().expect("said")[PREFIX_BYTES..]).expect("right"), welcome);
    }

    #[test]
    fn another_version_is_told_from_nonsense() {
        let mut prefix: [u8; PREFIX_BYTES] = *hello().to_bytes().expect("said").first_chunk().expect("long enough");
        prefix[8] = 9;
        assert_eq!(parse_prefix(&prefix).expect_err("another version").kind(), ErrorKind::Mismatch);
        prefix[8] = 1;
        prefix[12..16].copy_from_slice(&(HELLO_BYTES_MAX + 1).to_le_bytes());
        assert_eq!(parse_prefix(&prefix).expect_err("too long").kind(), ErrorKind::Protocol);
        prefix[0] = b'x';
        assert_eq!(parse_prefix(&prefix).expect_err("nonsense").kind(), ErrorKind::Protocol);
    }

    #[test]
    fn what_is_no_memory_is_refused() {
        let region = |bytes, page_bytes| Region { name: "ram".to_owned(), bytes, page_bytes };
        let regions =
            [region(0, 4096), region(4096, 2 << 20), region(4097, 4096), region(6000, 1000), region(1 << 62, 4096)];
        for region in regions {
            assert!(Hello { regions: vec![region.clone()], ..hello() }.to_bytes().is_err(), "{region:?}");
        }
        assert!(Hello { regions: vec![], ..hello() }.to_bytes().is_err());
        assert!(Hello { stream: 4, ..hello() }.to_bytes().is_err());
        assert!(Hello { streams: STREAMS_MAX + 1, ..hello() }.to_bytes().is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_right(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(hello) = Hello::parse(&bytes) {
                let again = hello.to_bytes().expect("it was right");
                prop_assert_eq!(Hello::parse(&again[PREFIX_BYTES..]).expect("right"), hello);
            }
        }
    }
}
