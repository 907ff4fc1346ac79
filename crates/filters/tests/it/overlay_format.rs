//! The bytes of an overlay stay what they are: what one version of the program wrote, every later one reads.

use block::{Buffer, Bytes, ChunkSize, Data, Device, Extent, MemDevice, Mutation};
use transhume_filters::{Overlay, OverlayHeader};

#[tokio::test]
async fn the_bytes_that_a_fixed_sequence_of_requests_leaves_do_not_change() {
    let size = Bytes(3000 * 4096 + 700);
    let header = OverlayHeader::new(size, [7; 16], [9; 16]).with_grain(ChunkSize::new(4096).expect("a chunk size"));
    let base = Device::new("base", MemDevice::new(size));
    let delta = Device::new("delta", MemDevice::new(header.delta_bytes()));
    base.write(Mutation::data(Bytes(5000), Data::copy_of(&[3; 9000]))).await.expect("memory takes it");
    Overlay::create(&delta, &header).await.expect("memory takes it");
    let volume = Device::new("overlay", Overlay::open(base, delta.clone(), [1; 16]).await.expect("it opens"));
    volume.write(Mutation::data(Bytes(6000), Data::copy_of(&[1; 10_000]))).await.expect("memory takes it");
    volume.write(Mutation::data(size - Bytes(1), Data::copy_of(&[2]))).await.expect("memory takes it");
    volume.write(Mutation::zeroes(Extent::new(Bytes::mib(2), Bytes::mib(7)), true)).await.expect("memory takes it");
    volume.flush().await.expect("memory flushes");
    // These are in the running map only.
    volume.write(Mutation::discard(Extent::new(Bytes::ZERO, Bytes(9000)))).await.expect("memory takes it");
    volume.write(Mutation::data(Bytes::mib(3), Data::copy_of(&[4; 4096]))).await.expect("memory takes it");
    let all = delta.read(Bytes::ZERO, Buffer::unpooled(delta.size().as_usize())).await.expect("memory answers");
    let sums: Vec<u32> = all[..16_384].chunks(2048).map(crc32fast::hash).collect();
    // Of pieces of 2048 bytes: the header, nothing, the boot record, nothing, the durable map, nothing, the running map, nothing.
    let none = 4_058_561_182;
    let recorded = [2_532_532_853, none, 350_425_512, none, 1_040_358_227, none, 3_080_733_264, none];
    assert_eq!((&sums[..], crc32fast::hash(&all)), (&recorded[..], 4_236_845_657));
}
