//! Making payloads shorter, and whole again.

use block::{Error, ErrorKind, Result};

use super::protocol::Coding;

/// A payload that does not become shorter than this part of itself is not worth the other side's time.
const WORTH: f64 = 0.95;

/// How much of a frame is tried before all of it.
const SAMPLE_BYTES: usize = 4096;

/// How many buffers are kept to be used again.
const SPARES_MAX: usize = 4;

/// Compresses for one stream.
#[derive(Default)]
pub(super) struct Compressor {
    zstd: Option<zstd::bulk::Compressor<'static>>,
    spares: Vec<Vec<u8>>,
    sample: Vec<u8>,
}

impl Compressor {
    /// Which part of itself a sample of `data` becomes with LZ4. More than 1 is possible.
    pub(super) fn probe(&mut self, data: &[u8]) -> f64 {
        let start = data.len().saturating_sub(SAMPLE_BYTES) / 2;
        let sample = &data[start..data.len().min(start + SAMPLE_BYTES)];
        if sample.is_empty() {
            return 1.0;
        }
        let room = lz4_flex::block::get_maximum_output_size(sample.len());
        if self.sample.len() < room {
            self.sample.resize(room, 0);
        }
        let length = lz4_flex::block::compress_into(sample, &mut self.sample).unwrap_or(sample.len());
        length as f64 / sample.len() as f64
    }

    /// The payload that stands for `data`, in the first so many bytes; `None` if it would not be much shorter. Give the
    /// buffer back by [`recycle`](Self::recycle).
    pub(super) fn compress(&mut self, coding: Coding, data: &[u8]) -> Option<(Vec<u8>, usize)> {
        let room = match coding {
            Coding::Lz4 => lz4_flex::block::get_maximum_output_size(data.len()),
            Coding::Zstd => zstd::zstd_safe::compress_bound(data.len()),
            Coding::Raw | Coding::Zero => return None,
        };
        let mut output = self.spares.pop().unwrap_or_default();
        if output.len() < room {
            output.resize(room, 0);
        }
        let length = match coding {
            Coding::Lz4 => lz4_flex::block::compress_into(data, &mut output).ok(),
            _ => self.zstd().and_then(|zstd| zstd.compress_to_buffer(data, &mut output[..]).ok()),
        };
        match length {
            Some(length) if (length as f64) < data.len() as f64 * WORTH => Some((output, length)),
            _ => {
                self.recycle(output);
                None
            }
        }
    }

    /// A buffer that is not needed any more.
    pub(super) fn recycle(&mut self, buffer: Vec<u8>) {
        if self.spares.len() < SPARES_MAX {
            self.spares.push(buffer);
        }
    }

    fn zstd(&mut self) -> Option<&mut zstd::bulk::Compressor<'static>> {
        if self.zstd.is_none() {
            self.zstd = zstd::bulk::Compressor::new(1).ok();
        }
        self.zstd.as_mut()
    }
}

/// Makes payloads whole again.
#[derive(Default)]
pub(super) struct Expander {
    zstd: Option<zstd::bulk::Decompressor<'static>>,
}

impl Expander {
    /// Fills all of `target` with what `payload` stands for.
    ///
    /// # Errors
    /// `Corrupt`: it does not stand for so many bytes.
    pub(super) fn expand(&mut self, coding: Coding, payload: &[u8], target: &mut [u8]) -> Result<()> {
        let bad = |what: &'static str| Error::new(ErrorKind::Corrupt, what);
        let length = match coding {
            Coding::Lz4 => lz4_flex::block::decompress_into(payload, target)
                .map_err(|error| bad("a payload is no LZ4 block").with_source(error))?,
            Coding::Zstd => {
                if self.zstd.is_none() {
                    let made = zstd::bulk::Decompressor::new();
                    self.zstd = Some(made.map_err(|error| Error::from_os(error, "preparing zstd"))?);
                }
                let zstd = self.zstd.as_mut().expect("it was just made");
                zstd.decompress_to_buffer(payload, target)
                    .map_err(|error| bad("a payload is no zstd frame").with_source(error))?
            }
            Coding::Raw | Coding::Zero => return Err(bad("a payload that was not compressed came to be expanded")),
        };
        match length == target.len() {
            true => Ok(()),
            false => Err(bad("a payload stands for fewer bytes than its frame says")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_does_not_become_shorter_stays_as_it_is() {
        let mut compressor = Compressor::default();
        let noise: Vec<u8> =
            (0..512_u64).flat_map(|number| xxhash_rust::xxh3::xxh3_64(&number.to_le_bytes()).to_le_bytes()).collect();
        for coding in [Coding::Lz4, Coding::Zstd] {
            assert!(compressor.compress(coding, &noise).is_none());
            let (payload, length) = compressor.compress(coding, &[7; 65536]).expect("it becomes much shorter");
            assert!(length < 1000);
            let mut target = vec![0; 65536];
            Expander::default().expand(coding, &payload[..length], &mut target).expect("it is whole");
            assert_eq!(target, [7; 65536]);
        }
        assert!(compressor.probe(&[7; 65536]) < 0.1 && compressor.probe(&[]) >= 1.0);
    }

    proptest! {
        #[test]
        fn any_payload_is_expanded_or_refused(payload in prop::collection::vec(any::<u8>(), 0..500), length in 1_usize..3000) {
            let mut target = vec![0; length];
            for coding in [Coding::Lz4, Coding::Zstd, Coding::Raw, Coding::Zero] {
                let _ = Expander::default().expand(coding, &payload, &mut target);
            }
        }

        #[test]
        fn what_was_compressed_is_the_same_afterwards(
            seed in any::<u64>(), period in 1_usize..400, length in 1_usize..100_000,
        ) {
            let data: Vec<u8> = (0..length).map(|at| ((seed as usize).wrapping_add(at % period)) as u8).collect();
            let (mut compressor, mut expander) = (Compressor::default(), Expander::default());
            for coding in [Coding::Lz4, Coding::Zstd] {
                if let Some((payload, short)) = compressor.compress(coding, &data) {
                    prop_assert!(short < length);
                    let mut target = vec![0; length];
                    prop_assert!(expander.expand(coding, &payload[..short], &mut target).is_ok());
                    prop_assert_eq!(&target, &data);
                    compressor.recycle(payload);
                }
            }
        }
    }
}
