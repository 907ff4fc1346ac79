//! Records of TLS 1.3 (RFC 8446, section 5.2) under the key of one direction. No byte is copied without need. Records
//! are sealed from where their bytes lie into what is sent. They are opened from what has come into where they are
//! wanted.
//!
//! ```text
//! offset  0      1        3        5                 5 + n      5 + n + 1    ... + padding
//!         +------+--------+--------+-----------------+---------+------------+--------+
//!         | 0x17 | 0x0303 | length | n bytes         | content | zeroes     | tag    |
//!         | u8   | u16    | u16    | sealed          | sealed  | sealed     | 16     |
//!         +------+--------+--------+-----------------+---------+------------+--------+
//! ```
//! The first five bytes are authenticated, too. The nonce is the direction's, XOR the number of the record.

use std::io;
use std::ops::Range;

use aws_lc_rs::aead::{AES_128_GCM, AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};
use rustls::ConnectionTrafficSecrets as Secrets;

/// The most bytes of content in a record.
pub(super) const CONTENT_BYTES_MAX: usize = 1 << 14;
pub(super) const HEADER_BYTES: usize = 5;
const TAG_BYTES: usize = 16;
/// What follows the content that we send: its kind and the tag.
const TAIL_BYTES: usize = 1 + TAG_BYTES;
/// What a record adds to its content.
pub(super) const RECORD_EXTRA_BYTES: usize = HEADER_BYTES + TAIL_BYTES;
/// The longest record that anybody may send, padding and all.
pub(super) const RECORD_BYTES_MAX: usize = HEADER_BYTES + CONTENT_BYTES_MAX + 256;
const NONCE_BYTES: usize = 12;

/// Outside all records look the same, and like those of TLS 1.2.
const SEALED: u8 = 23;
const VERSION: [u8; 2] = [3, 3];

/// What is in a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Content {
    Alert = 21,
    Handshake = 22,
    Data = 23,
}

impl Content {
    fn from_code(code: u8) -> Option<Self> {
        [Self::Alert, Self::Handshake, Self::Data].into_iter().find(|content| *content as u8 == code)
    }
}

/// What the other side has sent is no TLS, or was changed on its way.
pub(super) fn broken(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the encrypted connection is broken: {what}"))
}

/// The key of one direction, and the number of the next record.
pub(super) struct Key {
    key: LessSafeKey,
    nonce: [u8; NONCE_BYTES],
    sequence: u64,
}

impl Key {
    /// The key that was agreed on, for the record with number `sequence` and those after it.
    pub(super) fn new((sequence, secrets): &(u64, Secrets)) -> io::Result<Self> {
        let (algorithm, key, nonce) = match secrets {
            Secrets::Aes128Gcm { key, iv } => (&AES_128_GCM, key, iv),
            Secrets::Aes256Gcm { key, iv } => (&AES_256_GCM, key, iv),
            Secrets::Chacha20Poly1305 { key, iv } => (&CHACHA20_POLY1305, key, iv),
            _ => return Err(broken("a cipher was agreed on that is not known here")),
        };
        let key = UnboundKey::new(algorithm, key.as_ref()).map_err(|_| broken("its key is none"))?;
        let nonce = nonce.as_ref().try_into().map_err(|_| broken("its nonce is none"))?;
        Ok(Self { key: LessSafeKey::new(key), nonce, sequence: *sequence })
    }

    /// How many records there were under this key.
    pub(super) const fn sequence(&self) -> u64 {
        self.sequence
    }

    fn next_nonce(&mut self) -> Nonce {
        let mut nonce = self.nonce;
        for (byte, own) in nonce[NONCE_BYTES - 8..].iter_mut().zip(self.sequence.to_be_bytes()) {
            *byte ^= own;
        }
        self.sequence += 1;
        Nonce::assume_unique_for_key(nonce)
    }

    /// Makes a record of `bytes`, which are no more than fit into one, at the beginning of `place`. Gives its length.
    pub(super) fn seal(&mut self, content: Content, bytes: &[u8], place: &mut [u8]) -> io::Result<usize> {
        let (header, sealed, tail) = lay_out(bytes.len(), place);
        let nonce = self.next_nonce();
        self.key
            .seal_out_of_place_scatter(nonce, Aad::from(header), bytes, sealed, &[content as u8], tail)
            .map_err(|_| broken("nothing can be encrypted"))?;
        Ok(bytes.len() + RECORD_EXTRA_BYTES)
    }

    /// The same of `length` bytes that lie behind the header's place already.
    pub(super) fn seal_in_place(&mut self, content: Content, length: usize, place: &mut [u8]) -> io::Result<usize> {
        let (header, sealed, tail) = lay_out(length, place);
        let nonce = self.next_nonce();
        self.key
            .seal_in_place_scatter(nonce, Aad::from(header), sealed, &[content as u8], tail)
            .map_err(|_| broken("nothing can be encrypted"))?;
        Ok(length + RECORD_EXTRA_BYTES)
    }

    /// A record in which everything is as an adversary wants it: content, kind and zeroes, or none of them.
    #[cfg(test)]
    pub(super) fn seal_anything(&mut self, plain: &[u8]) -> Vec<u8> {
        let [high, low] = ((plain.len() + TAG_BYTES) as u16).to_be_bytes();
        let header = [SEALED, VERSION[0], VERSION[1], high, low];
        let mut sealed = plain.to_vec();
        let nonce = self.next_nonce();
        self.key.seal_in_place_append_tag(nonce, Aad::from(header), &mut sealed).expect("sealed");
        [&header[..], &sealed].concat()
    }

    /// Opens a whole record into `target`, which has [as much room](opened_bytes) as it needs. Gives what it was and how many
    /// bytes of content lie there.
    pub(super) fn open_into(&mut self, record: &[u8], target: &mut [u8]) -> io::Result<(Content, usize)> {
        let (header, body) = record.split_first_chunk::<HEADER_BYTES>().ok_or_else(too_short)?;
        let (sealed, tag) = body.split_last_chunk::<TAG_BYTES>().ok_or_else(too_short)?;
        let nonce = self.next_nonce();
        self.key.open_separate_gather(nonce, Aad::from(*header), sealed, tag, target).map_err(|_| tampered())?;
        content_of(target)
    }

    /// The same where it lies: gives where in `record` its content is then.
    pub(super) fn open_in_place(&mut self, record: &mut [u8]) -> io::Result<(Content, Range<usize>)> {
        let (header, body) = record.split_first_chunk_mut::<HEADER_BYTES>().ok_or_else(too_short)?;
        let nonce = self.next_nonce();
        let opened = self.key.open_in_place(nonce, Aad::from(*header), body).map_err(|_| tampered())?;
        let (content, length) = content_of(opened)?;
        Ok((content, HEADER_BYTES..HEADER_BYTES + length))
    }
}

/// Writes a record's header and gives the places of what it is made of.
fn lay_out(length: usize, place: &mut [u8]) -> ([u8; HEADER_BYTES], &mut [u8], &mut [u8]) {
    debug_assert!(length <= CONTENT_BYTES_MAX, "{length} bytes do not fit into a record");
    let [high, low] = ((length + TAIL_BYTES) as u16).to_be_bytes();
    let header = [SEALED, VERSION[0], VERSION[1], high, low];
    place[..HEADER_BYTES].copy_from_slice(&header);
    let (sealed, tail) = place[HEADER_BYTES..length + RECORD_EXTRA_BYTES].split_at_mut(length);
    (header, sealed, tail)
}

/// How long the record is that begins with `bytes`, its header included; `None` if the header is not there yet.
pub(super) fn record_bytes(bytes: &[u8]) -> io::Result<Option<usize>> {
    let Some([content, major, minor, high, low]) = bytes.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
    if *content != SEALED || [*major, *minor] != VERSION {
        return Err(broken("what comes is no record"));
    }
    let length = HEADER_BYTES + usize::from(u16::from_be_bytes([*high, *low]));
    match length {
        length if length < RECORD_EXTRA_BYTES => Err(too_short()),
        length if length > RECORD_BYTES_MAX => Err(broken("a record is too long")),
        length => Ok(Some(length)),
    }
}

/// How much room a record of `length` bytes needs to be opened.
pub(super) const fn opened_bytes(length: usize) -> usize {
    length - HEADER_BYTES - TAG_BYTES
}

/// What an opened record is, and how many of its bytes are content: behind them stand the kind of it and zeroes.
fn content_of(opened: &[u8]) -> io::Result<(Content, usize)> {
    let length = opened.iter().rposition(|byte| *byte != 0).ok_or_else(|| broken("a record is of no kind"))?;
    let content = Content::from_code(opened[length]).ok_or_else(|| broken("a record is of an unknown kind"))?;
    match length > CONTENT_BYTES_MAX {
        true => Err(broken("a record is too long")),
        false => Ok((content, length)),
    }
}

fn too_short() -> io::Error {
    broken("a record is too short")
}

fn tampered() -> io::Error {
    broken("a record is not what was sent")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rustls::crypto::cipher::{AeadKey, Iv};

    fn key(number: u8) -> Key {
        let (key, iv) = (AeadKey::from([number; 32]), Iv::from([number; NONCE_BYTES]));
        Key::new(&(7, Secrets::Aes256Gcm { key, iv })).expect("a key")
    }

    fn sealed(key: &mut Key, content: Content, bytes: &[u8]) -> Vec<u8> {
        let mut place = vec![0; bytes.len() + RECORD_EXTRA_BYTES];
        let length = key.seal(content, bytes, &mut place).expect("sealed");
        assert_eq!(length, place.len());
        place
    }

    #[test]
    fn what_is_no_record_is_told_by_its_first_bytes() {
        assert_eq!(record_bytes(&[23, 3, 3, 0]).expect("it may become one"), None);
        assert_eq!(record_bytes(&[23, 3, 3, 0, 17]).expect("it is one"), Some(22));
        for wrong in [[22, 3, 3, 0, 17], [23, 3, 1, 0, 17], [23, 3, 3, 0, 16], [23, 3, 3, 0x41, 1]] {
            assert!(record_bytes(&wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_record_is_opened_once_in_its_turn_and_by_its_own_key() {
        let (mut ours, mut theirs) = (key(1), key(1));
        let (first, second) = (sealed(&mut ours, Content::Data, b"one"), sealed(&mut ours, Content::Alert, b"two"));
        let mut target = vec![0; opened_bytes(first.len())];
        assert!(key(2).open_into(&first, &mut target).is_err(), "another key opens it");
        assert!(key(1).open_into(&second, &mut target).is_err(), "it is opened before its turn");
        assert_eq!(theirs.open_into(&first, &mut target).expect("opened"), (Content::Data, 3));
        assert_eq!(&target[..3], b"one");
        assert!(theirs.open_into(&first, &mut target).is_err(), "it is opened twice");
    }

    proptest! {
        #[test]
        fn what_is_sealed_is_opened_and_nothing_that_was_changed(
            bytes in prop::collection::vec(any::<u8>(), 0..500), at in any::<prop::sample::Index>(), bit in 0_u8..8,
        ) {
            let mut record = sealed(&mut key(3), Content::Data, &bytes);
            let mut gathered = vec![0; bytes.len() + RECORD_EXTRA_BYTES];
            gathered[HEADER_BYTES..HEADER_BYTES + bytes.len()].copy_from_slice(&bytes);
            key(3).seal_in_place(Content::Data, bytes.len(), &mut gathered).expect("sealed");
            prop_assert_eq!(&record, &gathered);

            let mut target = vec![0; opened_bytes(record.len())];
            let opened = key(3).open_into(&record, &mut target).expect("opened");
            prop_assert_eq!(opened, (Content::Data, bytes.len()));
            prop_assert_eq!(&target[..bytes.len()], &bytes[..]);
            let (content, place) = key(3).open_in_place(&mut gathered).expect("opened");
            prop_assert_eq!((content, &gathered[place]), (Content::Data, &bytes[..]));

            record[at.index(bytes.len() + RECORD_EXTRA_BYTES)] ^= 1 << bit;
            prop_assert!(key(3).open_into(&record, &mut target).is_err());
            prop_assert!(key(3).open_in_place(&mut record).is_err());
        }
    }
}
