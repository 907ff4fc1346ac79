//! Regions against what their parts hold.

use std::sync::Arc;

use block::testing::{Random, conformance};
use block::{Data, MemDevice, MutationKind};
use parking_lot::Mutex;

use super::*;

fn memory(size: u64, unit: u32) -> Device {
    Device::new("memory", MemDevice::new(Bytes(size)).with_request_alignment(unit))
}

fn between(start: u64, end: u64) -> Extent {
    Extent::between(Bytes(start), Bytes(end))
}

fn regions(parts: &[Device], alignment: u64) -> Device {
    Device::new("regions", Regions::new(parts.to_vec(), Bytes(alignment)).expect("they fit"))
}

async fn read(device: &Device, offset: u64, length: usize) -> Vec<u8> {
    device.read(Bytes(offset), Buffer::unpooled(length)).await.expect("memory answers").to_vec()
}

#[test]
fn every_part_begins_at_a_multiple_of_the_alignment() {
    let sizes = [Bytes(1), Bytes(4096), Bytes(5000), Bytes(0), Bytes(7)];
    let places: Vec<(u64, u64)> =
        layout(&sizes, Bytes(4096)).iter().map(|place| (place.offset.0, place.length.0)).collect();
    assert_eq!(places, [(0, 1), (4096, 4096), (8192, 5000), (16_384, 0), (16_384, 7)]);
    assert!(layout(&[], Bytes(1)).is_empty());
}

/// A part of several devices without a gap.
#[tokio::test]
async fn a_region_over_several_devices_conforms() {
    for unit in [1, 512, 4096] {
        conformance(unit, async |size| {
            let third = size.0 / 3 / 4096 * 4096;
            let (first, last) = (memory(third + 4096, unit as u32), memory(size.0 - 2 * third + 4096, unit as u32));
            let all = regions(&[first, memory(third, 1), last], 4096);
            Device::new("region", Region::new(all, Extent::new(Bytes(4096), size)).expect("it is within"))
        })
        .await;
    }
}

/// Each of several devices between gaps, seen through both.
#[tokio::test]
async fn a_region_over_one_of_several_devices_conforms() {
    for unit in [1, 512, 4096] {
        for index in 0..3 {
            conformance(unit, async |size| {
                let parts = [513, 700, 4097].map(|more| memory(size.0 + more, unit as u32));
                let sizes = parts.each_ref().map(Device::size);
                let place = layout(&sizes, Bytes(1 << 16))[index];
                Device::new("region", Region::new(regions(&parts, 1 << 16), place).expect("it is one of them"))
            })
            .await;
        }
    }
}

#[tokio::test]
async fn a_request_over_several_parts_and_gaps_is_split_and_gaps_keep_nothing() {
    let parts = [memory(1000, 1), memory(3000, 1), memory(10, 1)];
    let all = regions(&parts, 2048);
    assert_eq!(all.size(), Bytes(6144 + 10));
    let bytes = Random::new(1).bytes(6154);
    all.write(Mutation::data(Bytes::ZERO, Data::copy_of(&bytes))).await.expect("memory takes it");
    assert_eq!(read(&parts[0], 0, 1000).await, bytes[..1000]);
    assert_eq!(read(&parts[1], 0, 3000).await, bytes[2048..5048]);
    assert_eq!(read(&parts[2], 0, 10).await, bytes[6144..]);
    let mut expected = bytes.clone();
    expected[1000..2048].fill(0);
    expected[5048..6144].fill(0);
    assert_eq!(read(&all, 0, 6154).await, expected);
    assert_eq!(read(&all, 900, 1200).await, expected[900..2100]);
    assert_eq!(read(&all, 1500, 100).await, [0; 100]);
    all.write(Mutation::zeroes(between(999, 2050), true)).await.expect("memory takes it");
    expected[999..2050].fill(0);
    assert_eq!(read(&all, 0, 6154).await, expected);
}

#[tokio::test]
async fn gaps_are_holes_and_pieces_are_told_in_whole_units() {
    let parts = [memory(5000, 512), memory(65_536, 1), memory(100, 1)];
    for part in &parts[..2] {
        let all = Data::copy_of(&vec![1; part.size().as_usize()]);
        part.write(Mutation::data(Bytes::ZERO, all)).await.expect("memory takes it");
    }
    let all = regions(&parts, 8192);
    let told = async |extent: Extent| {
        let pieces = all.extents(extent).await.expect("memory answers");
        pieces.iter().map(|piece| (piece.extent.offset.0, piece.extent.end().0, piece.state)).collect::<Vec<_>>()
    };
    let (data, hole) = (ExtentState::Data, ExtentState::Hole);
    // The first part ends within a unit of 512, and the last has nothing.
    let whole = [(0, 5120, data), (5120, 8192, hole), (8192, 73_728, data), (73_728, 73_828, hole)];
    assert_eq!(told(Extent::whole(all.size())).await, whole);
    assert_eq!(told(between(5120, 8192)).await, [(5120, 8192, hole)]);
    assert_eq!(told(between(4608, 5120)).await, [(4608, 5120, data)]);
}

/// Notes what arrives.
struct Noting {
    memory: MemDevice,
    seen: Arc<Mutex<Vec<String>>>,
    number: usize,
    fails: bool,
}

impl BlockDevice for Noting {
    fn geometry(&self) -> Geometry {
        self.memory.geometry()
    }
    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        self.seen.lock().push(format!("{} reads into {:p}", self.number, buffer.as_ptr()));
        self.memory.read(offset, buffer)
    }
    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        let MutationKind::Data(data) = mutation.kind() else { panic!("only data is written here") };
        self.seen.lock().push(format!("{} writes from {:p} {}", self.number, data.as_ptr(), mutation.fua));
        self.memory.write(mutation)
    }
    fn flush(&self) -> IoFuture<'_, ()> {
        self.seen.lock().push(format!("{} flushes", self.number));
        match self.fails {
            true => ready(Err(Error::new(ErrorKind::Io, "it fails"))),
            false => self.memory.flush(),
        }
    }
    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        self.memory.extents(extent)
    }
}

#[tokio::test]
async fn forced_writes_go_to_the_parts_they_touch_flushes_to_all_and_bytes_are_not_copied() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let parts = [0, 1, 2].map(|number| {
        let noting =
            Noting { memory: MemDevice::new(Bytes(4096)), seen: Arc::clone(&seen), number, fails: number == 0 };
        Device::new("noting", noting)
    });
    let all = regions(&parts, 4096);
    let region = Device::new("region", Region::new(all.clone(), between(0, 12_288)).expect("it is within"));
    let data = Data::copy_of(&[1; 4096]);
    region.write(Mutation::data(Bytes(4096), data.clone()).with_fua(true)).await.expect("memory takes it");
    assert_eq!(*seen.lock(), [format!("1 writes from {:p} true", data.as_ptr())]);
    seen.lock().clear();
    let buffer = Buffer::unpooled(512);
    let place = buffer.as_ptr();
    region.read(Bytes(8192), buffer).await.expect("memory answers");
    assert_eq!(*seen.lock(), [format!("2 reads into {place:p}")]);
    seen.lock().clear();
    region.write(Mutation::data(Bytes(6144), data.clone()).with_fua(true)).await.expect("memory takes it");
    let second = data.slice(2048..4096);
    let split =
        [format!("1 writes from {:p} true", data.as_ptr()), format!("2 writes from {:p} true", second.as_ptr())];
    assert_eq!(*seen.lock(), split);
    seen.lock().clear();
    region.flush().await.expect_err("one of them fails");
    assert_eq!(*seen.lock(), ["0 flushes", "1 flushes", "2 flushes"]);
}

#[tokio::test]
async fn a_region_that_ends_within_a_unit_leaves_what_is_behind_it() {
    let lower = memory(3 * 512, 512);
    lower.write(Mutation::data(Bytes::ZERO, Data::copy_of(&[9; 3 * 512]))).await.expect("memory takes it");
    let region = Device::new("region", Region::new(lower.clone(), between(512, 1100)).expect("it is within"));
    assert_eq!(region.size(), Bytes(588));
    region.write(Mutation::data(Bytes::ZERO, Data::copy_of(&[1; 588]))).await.expect("memory takes it");
    let mut expected = vec![9; 3 * 512];
    expected[512..1100].fill(1);
    assert_eq!(read(&lower, 0, 3 * 512).await, expected);
    region.write(Mutation::zeroes(between(512, 588), true)).await.expect("memory takes it");
    expected[1024..1100].fill(0);
    assert_eq!(read(&lower, 0, 3 * 512).await, expected);
    assert_eq!(read(&region, 0, 588).await, expected[512..1100]);
    region.write(Mutation::discard(between(512, 588))).await.expect("memory takes it");
    assert_eq!(read(&lower, 1100 / 512 * 512, 512).await[76..], [9; 436]);
}

#[test]
fn what_makes_no_device_is_refused() {
    let refused = |made: Result<Regions>| made.expect_err("it makes no device").kind();
    assert_eq!(refused(Regions::new(Vec::new(), Bytes(512))), ErrorKind::Invalid);
    assert_eq!(refused(Regions::new(vec![memory(512, 512)], Bytes(0))), ErrorKind::Invalid);
    assert_eq!(refused(Regions::new(vec![memory(512, 1), memory(512, 512)], Bytes(513))), ErrorKind::Invalid);
    for extent in [between(0, 0), between(0, 4097), between(1, 512), between(4096, 4608)] {
        let error = Region::new(memory(4096, 512), extent).expect_err("it makes no device");
        assert_eq!(error.kind(), ErrorKind::Invalid, "{extent}");
    }
    let read_only = Device::new("memory", MemDevice::new(Bytes(512)).with_read_only());
    let limits = Regions::new(vec![memory(512, 1), read_only, memory(512, 4096)], Bytes(4096)).expect("they fit");
    let (geometry, places) = (limits.geometry(), limits.extents_of_parts().map(|place| place.offset.0));
    assert_eq!((geometry.request_alignment, geometry.read_only, geometry.size), (4096, true, Bytes(8704)));
    assert_eq!(places.collect::<Vec<_>>(), [0, 4096, 8192]);
}
