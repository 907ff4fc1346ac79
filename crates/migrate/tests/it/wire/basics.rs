//! A device over the wire is a device.

use std::sync::Arc;

use block::testing::conformance;
use block::{Bytes, Device, ErrorKind, Extent, MemDevice, Mutation};
use transhume_migrate::stream::{Answer, Ask, Compression, Role, StreamOptions, VolumeStatus};

use crate::wire::harness::{Pair, noise, read, write};

fn memory(mebibytes: u64) -> Device {
    Device::new("memory", MemDevice::new(Bytes::mib(mebibytes)))
}

#[tokio::test(start_paused = true)]
async fn a_remote_volume_conforms_over_one_stream_and_over_several_with_every_coding() {
    let kinds = [(1, Compression::Auto), (3, Compression::Lz4), (4, Compression::Zstd), (2, Compression::Off)];
    for (seed, (streams, compression)) in kinds.into_iter().enumerate() {
        let make = async |size| {
            let pair = Pair::new(seed as u64, Device::new("memory", MemDevice::new(size)));
            // Small frames: requests are cut, as large ones are.
            let options = StreamOptions { streams, compression, frame_bytes: 16 << 10, ..StreamOptions::default() };
            Device::from_arc("remote", pair.connect(Role::Copy, options).await.expect("it is let in"))
        };
        conformance(seed as u64, make).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_remote_volume_with_large_sectors_conforms() {
    let make = async |size: Bytes| {
        let device = MemDevice::new(size.align_down(4096)).with_request_alignment(4096);
        let pair = Pair::new(5, Device::new("memory", device));
        Device::from_arc("remote", pair.connect(Role::Forward, StreamOptions::default()).await.expect("it is let in"))
    };
    conformance(5, make).await;
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_keeps_bytes_back_is_flushed_until_all_are_gone() {
    let make = async |size| {
        let pair = Pair::new(6, Device::new("memory", MemDevice::new(size)));
        *pair.lines.keeps_back.lock() = true;
        let options = StreamOptions { streams: 2, ..StreamOptions::default() };
        Device::from_arc("remote", pair.connect(Role::Copy, options).await.expect("it is let in"))
    };
    conformance(6, make).await;
}

#[tokio::test(start_paused = true)]
async fn every_stream_carries_its_part_and_zeroes_are_not_sent() {
    let pair = Pair::new(1, memory(64));
    let (remote, device) = pair.device(Role::Copy, 4).await;
    let data = noise(1, 16 << 20);
    let writes = (0..16_u64).map(|number| {
        let part = data.slice((number as usize) << 20..(number as usize + 1) << 20);
        device.write(Mutation::data(Bytes::mib(number), part))
    });
    futures::future::try_join_all(writes).await.expect("nothing goes wrong");
    let zeroes = block::Data::copy_of(&vec![0; 1 << 20]);
    device.write(write(40 << 20, &zeroes)).await.expect("nothing goes wrong");
    assert_eq!(read(&pair.handler.device, 0, 16 << 20).await, data[..]);
    let statistics = remote.statistics();
    assert_eq!((statistics.bytes_raw, statistics.bytes_zero), (17 << 20, 1 << 20));
    assert_eq!((statistics.bytes_payload, statistics.bytes_compressed), (16 << 20, 0), "noise was compressed");
    for (number, stream) in statistics.streams.iter().enumerate() {
        assert!(stream.bytes_sent > 1 << 20, "stream {number} carried {} bytes", stream.bytes_sent);
    }
}

#[tokio::test(start_paused = true)]
async fn data_that_can_be_shorter_goes_shorter_when_that_is_wished() {
    for compression in [Compression::Lz4, Compression::Zstd] {
        let pair = Pair::new(1, memory(8));
        let options = StreamOptions { compression, ..StreamOptions::default() };
        let remote = pair.connect(Role::Copy, options).await.expect("it is let in");
        let device = Device::from_arc("remote", Arc::clone(&remote) as Arc<_>);
        let text = block::Data::copy_of(&b"the guest keeps working ".repeat(40_000)[..900_000]);
        device.write(write(4096, &text)).await.expect("nothing goes wrong");
        device.write(write(2 << 20, &noise(3, 1 << 20))).await.expect("nothing goes wrong");
        assert_eq!(read(&pair.handler.device, 4096, 900_000).await, text[..]);
        assert_eq!(read(&device, 2 << 20, 1 << 20).await, noise(3, 1 << 20)[..]);
        let statistics = remote.statistics();
        assert_eq!(statistics.bytes_compressed, 900_000, "{compression:?}");
        assert!(statistics.bytes_payload < (1 << 20) + 100_000, "{compression:?}: {}", statistics.bytes_payload);
    }
}

#[tokio::test(start_paused = true)]
async fn what_the_other_host_is_asked_it_answers_and_its_errors_keep_their_kind() {
    let pair = Pair::new(1, memory(1));
    let (remote, device) = pair.device(Role::Copy, 2).await;
    assert_eq!(remote.call(Ask::Prepare { epoch: 4 }).await.expect("it is asked"), Answer::Done);
    let volume_status = remote.call(Ask::Status).await.expect("it is asked");
    assert_eq!(volume_status, Answer::Status(VolumeStatus::Prepared { epoch: 4 }));
    let error = remote.call(Ask::Take { epoch: 99 }).await.expect_err("it was refused");
    assert!(error.kind() == ErrorKind::Fenced && error.chain().contains("99 was never prepared"), "{}", error.chain());
    assert_eq!(pair.handler.asked.lock().len(), 3);
    assert_eq!(remote.session().geometry.size, device.size());
    assert_eq!(remote.session().instance, [7; 16]);
    let misaligned = Pair::new(2, Device::new("memory", MemDevice::new(Bytes::mib(1)).with_read_only()));
    let (_remote, device) = misaligned.device(Role::Copy, 1).await;
    let error = device.write(Mutation::zeroes(Extent::new(Bytes(0), Bytes(512)), true)).await;
    assert_eq!(error.expect_err("it is read-only").kind(), ErrorKind::ReadOnly);
}

#[tokio::test(start_paused = true)]
async fn a_volume_that_may_not_be_opened_is_refused_in_the_words_of_who_holds_it() {
    let pair = Pair::new(1, memory(1));
    *pair.handler.refusal.lock() = Some(ErrorKind::PermissionDenied);
    let refused = pair.connect(Role::Copy, StreamOptions::default()).await;
    let error = refused.err().expect("it was let in");
    assert_eq!(error.kind(), ErrorKind::PermissionDenied);
    assert!(error.chain().contains("disk is not for you"), "{}", error.chain());
    pair.settle().await;
    assert_eq!(pair.receiver().sessions(), 0, "a session that never was is kept");
}

#[tokio::test(start_paused = true)]
async fn who_takes_leave_is_told_when_the_volume_is_given_up() {
    let pair = Pair::new(1, memory(1));
    let (remote, device) = pair.device(Role::Copy, 3).await;
    device.write(write(0, &noise(1, 4096))).await.expect("it works");
    remote.close().await.expect("the other end hears it");
    pair.settle().await;
    assert_eq!(pair.receiver().sessions(), 0);
    assert!(pair.lines.ends.lock().iter().all(Result::is_ok) && pair.lines.ends.lock().len() == 3);
    let error = device.flush().await.expect_err("a closed device works");
    assert_eq!(error.kind(), ErrorKind::Disconnected);
}

#[tokio::test(start_paused = true)]
async fn the_other_end_says_by_digests_what_it_holds() {
    let pair = Pair::new(1, Device::new("memory", MemDevice::new(Bytes::mib(8))));
    let (remote, device) = pair.device(Role::Copy, 2).await;
    let data = noise(5, 3 << 20);
    device.write(write(1 << 20, &data)).await.expect("nothing goes wrong");
    let extents = [Extent::new(Bytes::mib(1), Bytes::mib(3)), Extent::new(Bytes(4096), Bytes(512))];
    let digests = remote.digests(&extents).await.expect("it is answered").expect("it can");
    assert_eq!(digests, [*blake3::hash(&data).as_bytes(), *blake3::hash(&[0; 512]).as_bytes()]);
    let long = Extent::new(Bytes::ZERO, Bytes::mib(5));
    assert_eq!(remote.digests(&[long]).await.expect_err("it was answered").kind(), ErrorKind::TooLarge);
    let outside = Extent::new(Bytes::mib(7), Bytes::mib(2));
    assert_eq!(remote.digests(&[outside]).await.expect_err("it was answered").kind(), ErrorKind::OutOfRange);
}
