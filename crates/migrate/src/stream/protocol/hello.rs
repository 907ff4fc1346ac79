//! The first message of each side: which versions and features there are, and which are used.
//!
//! ```text
//! hello   0        8          16         24      26      28        32
//!         +--------+----------+----------+-------+-------+---------+---------------------+
//!         | magic  | required | optional | count | 0     | check   | versions            |
//!         | 8 byte | u64      | u64      | u16   | u16   | u32     | 16 x u16, 0 beyond  |
//!         +--------+----------+----------+-------+-------+---------+---------------------+
//! choice  0        8         10      12        16         24
//!         +--------+---------+-------+---------+----------+----------------------------+
//!         | magic  | version | words | check   | features | words (UTF-8), 0 beyond    |
//!         | 8 byte | u16     | u16   | u32     | u64      | 232 bytes                  |
//!         +--------+---------+-------+---------+----------+----------------------------+
//! ```
//!
//! These two never change, whatever version comes: they are how versions are told apart. Both have a fixed length, and
//! `check` is the lower half of the xxh3 of the whole message with the check itself as zeroes.

use crate::checksum::checksum_of;

use super::{MAGIC, Malformed, VERSION, clip};

/// The length of a hello.
pub const HELLO_BYTES: usize = 64;
/// The length of a choice.
pub const CHOICE_BYTES: usize = 256;

const VERSIONS_MAX: usize = 16;
const WORDS_BYTES: usize = CHOICE_BYTES - 24;

/// What a side can do beyond a version's frames, one bit each.
pub mod feature {
    /// Payloads of writes may be LZ4 blocks.
    pub const LZ4: u64 = 1;
    /// Payloads of writes may be zstd frames.
    pub const ZSTD: u64 = 2;
    /// The receiver answers what it holds by digests: [`Ask::Digests`](crate::stream::Ask::Digests).
    pub const DIGESTS: u64 = 8;
    /// The receiver answers what its network interfaces have carried, and what of that was of migrations:
    /// [`Ask::Usage`](crate::stream::Ask::Usage). 4 was that without the migrations, and is not used again.
    pub const USAGE: u64 = 16;
    /// The receiver takes volumes with layers: [`SessionLayers`](crate::stream::protocol::SessionLayers) may follow an opening.
    pub const LAYERS: u64 = 32;
    /// An opening says, whether there are layers or not, whether the volume's bytes stay where they are:
    /// [`SessionRequest::stays`](crate::stream::SessionRequest).
    pub const STAYS: u64 = 64;
    /// All that this implementation knows.
    pub const KNOWN: u64 = LZ4 | ZSTD | DIGESTS | USAGE | LAYERS | STAYS;
}

/// What the sender offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The versions that it speaks, the best first; 1 to 16 of them.
    pub versions: Vec<u16>,
    /// Features without which it does not work.
    pub required: u64,
    /// Features that it would use.
    pub optional: u64,
}

impl Default for Hello {
    fn default() -> Self {
        Self { versions: vec![VERSION], required: 0, optional: feature::KNOWN }
    }
}

impl Hello {
    /// Its bytes. More than 16 versions are not said.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..16].copy_from_slice(&self.required.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.optional.to_le_bytes());
        let count = self.versions.len().min(VERSIONS_MAX);
        bytes[24..26].copy_from_slice(&(count as u16).to_le_bytes());
        for (place, version) in bytes[32..].chunks_exact_mut(2).zip(&self.versions) {
            place.copy_from_slice(&version.to_le_bytes());
        }
        seal(&mut bytes, 28);
        bytes
    }

    /// What `bytes` say.
    ///
    /// # Errors
    /// They are no hello.
    pub fn parse(bytes: &[u8; HELLO_BYTES]) -> Result<Self, Malformed> {
        check(bytes, 28)?;
        let count = usize::from(u16_at(bytes, 24));
        let is_padded = count <= VERSIONS_MAX && bytes[32 + 2 * count..].iter().all(|byte| *byte == 0);
        if count == 0 || !is_padded || u16_at(bytes, 26) != 0 {
            return Err(Malformed("a hello offers no versions, or too many"));
        }
        let versions = bytes[32..32 + 2 * count].chunks_exact(2).map(|pair| u16_at(pair, 0)).collect();
        Ok(Self { versions, required: u64_at(bytes, 8), optional: u64_at(bytes, 16) })
    }
}

/// What the receiver has chosen of a [`Hello`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The version of all that follows; 0 refuses.
    pub version: u16,
    /// The features that are used.
    pub features: u64,
    /// Why it refuses; empty otherwise.
    pub words: String,
}

impl Choice {
    /// Its bytes. Words are cut to 232 bytes.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; CHOICE_BYTES] {
        let mut bytes = [0; CHOICE_BYTES];
        let words = clip(&self.words, WORDS_BYTES).as_bytes();
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&self.version.to_le_bytes());
        bytes[10..12].copy_from_slice(&(words.len() as u16).to_le_bytes());
        bytes[16..24].copy_from_slice(&self.features.to_le_bytes());
        bytes[24..24 + words.len()].copy_from_slice(words);
        seal(&mut bytes, 12);
        bytes
    }

    /// What `bytes` say.
    ///
    /// # Errors
    /// They are no choice.
    pub fn parse(bytes: &[u8; CHOICE_BYTES]) -> Result<Self, Malformed> {
        check(bytes, 12)?;
        let length = usize::from(u16_at(bytes, 10));
        if length > WORDS_BYTES || bytes[24 + length..].iter().any(|byte| *byte != 0) {
            return Err(Malformed("a choice has too many words"));
        }
        let words = std::str::from_utf8(&bytes[24..24 + length]).map_err(|_| Malformed("words are UTF-8"))?;
        Ok(Self { version: u16_at(bytes, 8), features: u64_at(bytes, 16), words: words.to_owned() })
    }
}

/// What this side makes of an offer, given the versions it speaks and the features it has.
#[must_use]
pub fn choose(hello: &Hello, versions: &[u16], features: u64) -> Choice {
    let refuse = |words: String| Choice { version: 0, features: 0, words };
    let unknown = hello.required & !features;
    if unknown != 0 {
        return refuse(format!("the sender needs features that are not known here: bits {unknown:#x}"));
    }
    match hello.versions.iter().find(|version| versions.contains(version)) {
        Some(version) => {
            Choice { version: *version, features: (hello.required | hello.optional) & features, words: String::new() }
        }
        None => {
            refuse(format!("the sender speaks versions {:?} of the wire and this side {versions:?}", hello.versions))
        }
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(number)
}

/// Writes the checksum of the rest at `at`, where zeroes are.
fn seal(bytes: &mut [u8], at: usize) {
    let sum = checksum_of(bytes) as u32;
    bytes[at..at + 4].copy_from_slice(&sum.to_le_bytes());
}

fn check(bytes: &[u8], at: usize) -> Result<(), Malformed> {
    if bytes[..8] != MAGIC {
        return Err(Malformed("the other side does not speak this protocol"));
    }
    let mut own = [0; CHOICE_BYTES];
    let own = &mut own[..bytes.len()];
    own.copy_from_slice(bytes);
    own[at..at + 4].fill(0);
    match (checksum_of(own) as u32).to_le_bytes() == bytes[at..at + 4] {
        true => Ok(()),
        false => Err(Malformed("the checksum of the first message does not fit")),
    }
}
