//! Makes a cache full that the daemon has made empty, without the bytes of its blocks: `fill_cache STORE OFFSET LENGTH`. The daemon must not
//! run, and the volume must be sparse, as the store is. Its blocks are scattered all over the volume.

use std::fs::File;
use std::os::unix::fs::FileExt;

use block::{
    BlockDevice, Buffer, Bytes, Device, Error, Extent, ExtentState, ExtentStatus, Geometry, IoFuture, Mutation,
    MutationKind, Result,
};
use transhume_filters::Cache;

/// A part of a file.
struct Part {
    file: File,
    offset: u64,
    length: u64,
}

impl Part {
    fn done<T>(&self, outcome: std::io::Result<T>) -> Result<T> {
        outcome.map_err(|error| Error::from_os(error, format!("the store, from byte {} on", self.offset)))
    }
}

impl BlockDevice for Part {
    fn geometry(&self) -> Geometry {
        Geometry::of_size(Bytes(self.length))
    }

    fn read(&self, offset: Bytes, mut buffer: Buffer) -> IoFuture<'_, Buffer> {
        let read = self.file.read_exact_at(&mut buffer, self.offset + offset.get());
        block::ready(self.done(read).map(|()| buffer))
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        let at = self.offset + mutation.extent().offset.get();
        block::ready(match mutation.kind() {
            MutationKind::Data(data) => self.done(self.file.write_all_at(data, at)),
            _ => unreachable!("only a map is written"),
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        block::ready(self.done(self.file.sync_data()))
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        block::ready(Ok(vec![ExtentStatus { extent, state: ExtentState::Data }]))
    }
}

/// Another number below `2^bits` for each one, without any order.
fn scattered(number: u64, bits: u32) -> u64 {
    let mask = (1_u64 << bits) - 1;
    let mut mixed = number;
    for odd in [0x9e37_79b9_7f4a_7c15_u64, 0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb] {
        mixed = (mixed ^ mixed >> (bits / 2)).wrapping_mul(odd) & mask;
    }
    mixed
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [store, offset, length] = &words[..] else { return Err("usage: fill_cache STORE OFFSET LENGTH".into()) };
    let file = File::options().read(true).write(true).open(store)?;
    let partition = Device::new("partition", Part { file, offset: offset.parse()?, length: length.parse()? });
    let filled = async {
        let header = Cache::inspect(&partition).await?;
        // The largest power of two among its blocks; they are at least as many as the places.
        let bits = header.block.count(header.volume).ilog2();
        assert!(header.places <= 1 << bits, "the volume is smaller than its cache");
        Cache::fill(&partition, |place| scattered(place, bits)).await?;
        println!("{}", header.places);
        Ok::<(), Error>(())
    };
    futures::executor::block_on(filled).map_err(|error| error.chain().into())
}
