//! The transmission: what is right, and every way to be wrong.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::common::{Answer, Raw, Recorder, connect, device_of, enter, export_of, memory, only, serve};
use block::{Bytes, Device, ErrorKind, MemDevice};
use tokio::io::AsyncWriteExt;
use transhume_nbd::protocol::{Command, Errno, Request, command_flag, option_reply, parse_block_status};
use transhume_nbd::server::End;
use transhume_nbd::{Exports, Limits};

const SIZE: u64 = 8 << 20;

fn exports() -> Arc<dyn Exports> {
    only(export_of(memory(Bytes(SIZE))))
}

#[tokio::test]
async fn what_is_written_is_read_with_structured_and_with_simple_replies() {
    let exports = exports();
    let (mut raw, server) = enter(&exports).await;
    assert_eq!(raw.write(4096, &[7; 512]).await, None);
    assert_eq!(raw.read(4095, 514).await, [&[0][..], &[7; 512], &[0]].concat());
    raw.leave().await;
    let summary = server.await.expect("no panic");
    assert!(matches!(summary.end, End::Disconnected));
    assert_eq!((summary.requests, summary.bytes_received, summary.bytes_read), (2, 512, 514));

    let (mut raw, _server) = connect(&exports).await;
    raw.greet(3).await;
    assert_eq!(raw.go("disk").await, option_reply::ACK);
    raw.send(Command::Read, 0, 4096, 512).await;
    assert_eq!(raw.answer(512).await, Answer { cookie: 77, error: None, payload: vec![7; 512] });
    // Neither is understood without structured replies.
    assert_eq!(raw.ask(Command::Read, command_flag::DF, 0, 512).await, Some(Errno::Invalid));
    assert_eq!(raw.ask(Command::BlockStatus, 0, 0, 512).await, Some(Errno::Invalid));
}

#[tokio::test]
async fn that_a_flush_failed_is_told_of_once_its_reply_has_left() {
    let recorder = Arc::new(Recorder::over(memory(Bytes(SIZE))));
    let told = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&told);
    let export = export_of(device_of(&recorder)).with_failed_flushes(move || _ = count.fetch_add(1, Ordering::Relaxed));
    let (mut raw, _server) = enter(&only(export)).await;
    let told = || told.load(Ordering::Relaxed);
    assert_eq!((raw.ask(Command::Flush, 0, 0, 0).await, told()), (None, 0));
    *recorder.failure.lock() = Some(ErrorKind::Io);
    assert_eq!((raw.ask(Command::Trim, 0, 0, 4096).await, told()), (Some(Errno::Io), 0));
    assert_eq!((raw.ask(Command::Flush, 0, 0, 0).await, told()), (Some(Errno::Io), 1));
    // A client that fetches nothing was told nothing.
    for _ in 0..2048 {
        raw.send(Command::Flush, 0, 0, 0).await;
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(told() < 2048, "{} failures have left", told());
}

#[tokio::test]
async fn each_kind_of_mutation_reaches_the_device_as_what_it_is() {
    let recorder = Arc::new(Recorder::over(memory(Bytes(SIZE))));
    let (mut raw, _server) = enter(&only(export_of(device_of(&recorder)))).await;
    raw.send(Command::Write, command_flag::FUA, 0, 2).await;
    raw.say(&[9, 9]).await;
    assert_eq!(raw.answer(0).await.error, None);
    for (command, flags) in [
        (Command::WriteZeroes, 0),
        (Command::WriteZeroes, command_flag::NO_HOLE | command_flag::FUA),
        (Command::Trim, 0),
        (Command::Flush, 0),
        (Command::Cache, 0),
    ] {
        assert_eq!(raw.ask(command, flags, 0, 4096).await, None, "{command:?}");
    }
    let log = recorder.take_log();
    assert_eq!(
        log,
        [
            "0+2 data 9 fua",
            "0+4096 Zeroes { may_unmap: true }",
            "0+4096 Zeroes { may_unmap: false } fua",
            "0+4096 Discard",
            "flush"
        ]
    );
}

#[tokio::test]
async fn requests_of_up_to_32_mib_are_carried_out_in_pieces_that_are_all_forced_if_the_request_is() {
    const LARGE: u32 = 32 << 20;
    let recorder = Arc::new(Recorder::over(memory(Bytes::mib(48))));
    let (mut raw, server) = enter(&only(export_of(device_of(&recorder)))).await;
    let payload: Vec<u8> = (0..LARGE).map(|index| (index >> 12) as u8 ^ index as u8).collect();
    raw.send(Command::Write, command_flag::FUA, 512, LARGE).await;
    raw.say(&payload).await;
    assert_eq!(raw.answer(0).await.error, None);
    let log = recorder.take_log();
    assert_eq!(log.len(), 9, "pieces at multiples of 4 MiB: {log:?}");
    assert!(log.iter().all(|write| write.ends_with(" fua")), "{log:?}");
    assert!(raw.read(512, LARGE).await == payload, "other bytes are read than were written");
    assert!(raw.read(513, 5 << 20).await == payload[1..=5 << 20], "other bytes are read than were written");
    // Past the end, or more than the protocol has servers take: nothing of it is carried out.
    raw.send(Command::Write, 0, 24 << 20, LARGE).await;
    raw.say(&payload).await;
    assert_eq!(raw.answer(0).await.error, Some(Errno::NoSpace));
    assert_eq!(raw.ask(Command::Read, 0, 24 << 20, LARGE).await, Some(Errno::Invalid));
    assert_eq!(raw.ask(Command::Read, 0, 0, LARGE + 512).await, Some(Errno::Invalid));
    assert_eq!(recorder.take_log(), [] as [String; 0]);
    *recorder.failure.lock() = Some(ErrorKind::Io);
    assert_eq!(raw.ask(Command::Read, 0, 0, LARGE).await, Some(Errno::Io));
    raw.leave().await;
    assert_eq!(server.await.expect("no panic").requests, 7);
}

#[tokio::test]
async fn large_requests_without_structured_replies_are_answered_too() {
    let exports = only(export_of(memory(Bytes::mib(16))));
    let (mut raw, _server) = connect(&exports).await;
    raw.greet(3).await;
    assert_eq!(raw.go("disk").await, option_reply::ACK);
    assert_eq!(raw.write(0, &vec![5; 9 << 20]).await, None);
    raw.send(Command::Read, 0, 0, 9 << 20).await;
    assert!(raw.answer(9 << 20).await.payload == vec![5; 9 << 20], "other bytes are read than were written");
}

#[tokio::test]
async fn zeroes_and_discards_may_be_larger_than_any_transfer() {
    let (mut raw, _server) = enter(&only(export_of(memory(Bytes::gib(8))))).await;
    assert_eq!(raw.write(5, &[1]).await, None);
    assert_eq!(raw.ask(Command::WriteZeroes, 0, 0, u32::MAX).await, None);
    assert_eq!(raw.ask(Command::Trim, 0, 1 << 32, u32::MAX).await, None);
    assert_eq!(raw.read(5, 1).await, [0]);
}

#[tokio::test]
async fn every_bad_request_has_its_answer_and_the_connection_goes_on() {
    let device = Device::new("memory", MemDevice::new(Bytes(SIZE)).with_request_alignment(512));
    let (mut raw, _server) = enter(&only(export_of(device))).await;
    let none = 0;
    let cases = [
        (Command::Unknown(77), none, 0, 512, Errno::Invalid),
        (Command::Read, 1 << 9, 0, 512, Errno::Invalid),
        (Command::Read, command_flag::NO_HOLE, 0, 512, Errno::Invalid),
        (Command::Flush, command_flag::REQ_ONE, 0, 0, Errno::Invalid),
        // "Fast zero" was not offered.
        (Command::WriteZeroes, 1 << 4, 0, 512, Errno::Invalid),
        (Command::Read, none, SIZE, 512, Errno::Invalid),
        (Command::Read, none, SIZE - 512, 1024, Errno::Invalid),
        (Command::Read, none, u64::MAX - 511, 1024, Errno::Invalid),
        (Command::Read, none, 0, (32 << 20) + 512, Errno::Invalid),
        (Command::Read, none, SIZE - (4 << 20), (4 << 20) + 512, Errno::Invalid),
        (Command::Read, none, 100, (4 << 20) + 512, Errno::Invalid),
        (Command::Read, none, 0, 0, Errno::Invalid),
        (Command::Read, none, 100, 512, Errno::Invalid),
        (Command::Read, none, 0, 100, Errno::Invalid),
        (Command::Trim, none, SIZE, 512, Errno::Invalid),
        (Command::Trim, none, 0, 0, Errno::Invalid),
        (Command::Cache, none, SIZE, 512, Errno::Invalid),
        // Its end is the last number that there is.
        (Command::Cache, none, u64::MAX - 1023, 1023, Errno::Invalid),
        (Command::Cache, none, u64::MAX - 511, 511, Errno::Invalid),
        (Command::WriteZeroes, none, SIZE - 512, 1024, Errno::NoSpace),
        (Command::WriteZeroes, none, u64::MAX, u32::MAX, Errno::NoSpace),
        (Command::BlockStatus, none, SIZE, 512, Errno::Invalid),
        (Command::BlockStatus, none, 0, 0, Errno::Invalid),
    ];
    for (command, flags, offset, length, errno) in cases {
        let answered = raw.ask(command, flags, offset, length).await;
        assert_eq!(answered, Some(errno), "{command:?} {flags:#x} {offset}+{length}");
    }
    // The payloads of bad writes are skipped, or nothing after them would be understood.
    for (offset, length, errno) in [
        (SIZE, 512, Errno::NoSpace),
        (100, 512, Errno::Invalid),
        (0, 100, Errno::Invalid),
        (0, 0, Errno::Invalid),
        (SIZE - (4 << 20), (4 << 20) + 512, Errno::NoSpace),
        (100, (4 << 20) + 512, Errno::Invalid),
        (0, 32 << 20, Errno::NoSpace),
    ] {
        assert_eq!(raw.write(offset, &vec![0xee; length]).await, Some(errno), "{offset}+{length}");
    }
    assert_eq!(raw.read(0, 512).await, [0; 512]);
    assert_eq!(raw.write(0, &[1; 4 << 20]).await, None, "the maximum itself is allowed");
    assert_eq!(raw.read(0, 4 << 20).await, [1; 4 << 20]);
    // FUA has no meaning with a read and is allowed all the same.
    assert_eq!(raw.ask(Command::Cache, command_flag::FUA, 0, 512).await, None);
    raw.leave().await;
}

#[tokio::test]
async fn a_read_only_export_refuses_mutations_and_skips_their_payloads() {
    let (mut raw, _server) = enter(&only(export_of(memory(Bytes(SIZE))).with_read_only(true))).await;
    assert_eq!(raw.write(0, &[1; 100_000]).await, Some(Errno::NotPermitted));
    assert_eq!(raw.ask(Command::Trim, 0, 0, 512).await, Some(Errno::NotPermitted));
    assert_eq!(raw.ask(Command::WriteZeroes, 0, 0, 512).await, Some(Errno::NotPermitted));
    assert_eq!(raw.ask(Command::Flush, 0, 0, 0).await, None);
    assert_eq!(raw.read(0, 512).await, [0; 512]);
}

#[tokio::test]
async fn what_cannot_be_understood_any_more_ends_the_connection() {
    let huge = Request { flags: 0, command: Command::Write, cookie: 0, offset: Bytes(0), length: (32 << 20) + 1 };
    for bytes in [&[0; 28][..], &[0xff; 28], &huge.to_bytes()] {
        let (mut raw, server) = enter(&exports()).await;
        raw.say(bytes).await;
        raw.assert_closed().await;
        assert!(matches!(server.await.expect("no panic").end, End::Protocol(_)));
    }
}

#[tokio::test]
async fn requests_before_garbage_are_answered() {
    let (mut raw, _server) = enter(&exports()).await;
    let good = Request { flags: 0, command: Command::Flush, cookie: 5, offset: Bytes(0), length: 0 }.to_bytes();
    raw.say(&[&good[..], &[0xaa; 28]].concat()).await;
    assert_eq!(raw.answer(0).await, Answer { cookie: 5, error: None, payload: vec![] });
    raw.assert_closed().await;
}

#[tokio::test]
async fn a_write_that_is_cut_short_changes_nothing() {
    for length in [4096, 1 << 20] {
        let recorder = Arc::new(Recorder::over(memory(Bytes(SIZE))));
        let (mut raw, server) = enter(&only(export_of(device_of(&recorder)))).await;
        raw.send(Command::Write, 0, 0, length).await;
        raw.say(&vec![1; length as usize - 1]).await;
        drop(raw);
        assert!(matches!(server.await.expect("no panic").end, End::HungUp));
        assert_eq!(recorder.take_log(), [""; 0]);
    }
}

#[tokio::test]
async fn errors_of_the_device_become_the_protocols() {
    let recorder = Arc::new(Recorder::over(memory(Bytes(SIZE))));
    let (mut raw, _server) = enter(&only(export_of(device_of(&recorder)))).await;
    for (kind, errno) in [
        (ErrorKind::NoSpace, Errno::NoSpace),
        (ErrorKind::Io, Errno::Io),
        (ErrorKind::Corrupt, Errno::Io),
        (ErrorKind::Unsupported, Errno::NotSupported),
        (ErrorKind::Fenced, Errno::Shutdown),
        (ErrorKind::PermissionDenied, Errno::NotPermitted),
        (ErrorKind::Invalid, Errno::Invalid),
    ] {
        *recorder.failure.lock() = Some(kind);
        assert_eq!(raw.ask(Command::Trim, 0, 0, 512).await, Some(errno), "{kind}");
        assert_eq!(raw.ask(Command::Read, 0, 0, 512).await, Some(errno), "{kind}");
        assert_eq!(raw.ask(Command::BlockStatus, 0, 0, 512).await, Some(errno), "{kind}");
        assert_eq!(raw.ask(Command::Flush, 0, 0, 0).await, Some(errno), "{kind}");
    }
    *recorder.failure.lock() = None;
    assert_eq!(raw.read(0, 512).await, [0; 512]);
}

#[tokio::test]
async fn block_status_tells_data_from_holes_and_one_means_one() {
    let (mut raw, _server) = enter(&exports()).await;
    assert_eq!(raw.write(65536, &[1; 65536]).await, None);
    let mut status = async |flags, offset, length| {
        raw.send(Command::BlockStatus, flags, offset, length).await;
        let answer = raw.answer(0).await;
        parse_block_status(&answer.payload).expect("it is one")
    };
    assert_eq!(status(0, 0, 196_608).await, (1, vec![(65536, 3), (65536, 0), (65536, 3)]));
    assert_eq!(status(command_flag::REQ_ONE, 0, 196_608).await, (1, vec![(65536, 3)]));
    assert_eq!(status(command_flag::REQ_ONE, 65537, 100).await, (1, vec![(100, 0)]));
}

#[tokio::test]
async fn block_status_needs_a_context_of_the_export_that_was_chosen() {
    let (mut raw, _server) = connect(&exports()).await;
    raw.greet(3).await;
    raw.structured().await;
    raw.set_allocation("").await;
    assert_eq!(raw.go("disk").await, option_reply::ACK);
    assert_eq!(raw.ask(Command::BlockStatus, 0, 0, 512).await, Some(Errno::Invalid));
}

#[tokio::test]
async fn an_export_may_show_more_than_its_device_has() {
    let recorder = Arc::new(Recorder::over(memory(Bytes(1000))));
    let export = export_of(device_of(&recorder)).with_size_advertised(Some(Bytes(1 << 20)));
    let (mut raw, _server) = enter(&only(export)).await;
    assert_eq!(raw.write(990, &[5; 10]).await, None);
    assert_eq!(raw.read(990, 20).await, [[5; 10], [0; 10]].concat());
    assert_eq!(raw.read(5000, 3).await, [0; 3]);
    assert_eq!(raw.ask(Command::Trim, 0, 999, 5000).await, None);
    assert_eq!(raw.ask(Command::WriteZeroes, 0, 2000, 5000).await, None);
    assert_eq!(recorder.take_log(), ["990+10 data 5", "999+1 Discard"]);
    // The device says whether it grows; this one does not.
    assert_eq!(raw.write(1000, &[1]).await, Some(Errno::NoSpace));
    raw.send(Command::BlockStatus, 0, 500, 1000).await;
    let answer = raw.answer(0).await;
    assert_eq!(parse_block_status(&answer.payload), Ok((1, vec![(500, 0)])));
    raw.send(Command::BlockStatus, 0, 1000, 1000).await;
    let answer = raw.answer(0).await;
    assert_eq!(parse_block_status(&answer.payload), Ok((1, vec![(1000, 3)])));
    assert_eq!(raw.ask(Command::Read, 0, 1 << 20, 1).await, Some(Errno::Invalid));
}

#[tokio::test]
async fn many_requests_in_one_piece_are_all_answered() {
    let (raw, _server) = enter(&exports()).await;
    let mut bytes = Vec::new();
    for cookie in 0..500_u64 {
        let command = if cookie % 2 == 0 { Command::Write } else { Command::Read };
        bytes.extend(Request { flags: 0, command, cookie, offset: Bytes(cookie / 2 * 512), length: 512 }.to_bytes());
        if command == Command::Write {
            bytes.extend([cookie as u8; 512]);
        }
    }
    let (mut reader, mut writer) = tokio::io::split(raw.stream);
    let saying = tokio::spawn(async move {
        // Pieces of an odd size cut requests anywhere.
        for piece in bytes.chunks(1009) {
            writer.write_all(piece).await.expect("the server listens");
        }
        writer
    });
    let mut seen = vec![false; 500];
    let mut listener = Raw { stream: tokio::io::join(&mut reader, tokio::io::sink()) };
    for _ in 0..500 {
        let answer = listener.answer(0).await;
        assert_eq!(answer.error, None);
        assert!(!std::mem::replace(&mut seen[answer.cookie as usize], true), "answered twice");
    }
    saying.await.expect("no panic");
}

#[tokio::test]
async fn large_writes_arrive_whole_however_they_are_cut() {
    let (mut raw, _server) = enter(&exports()).await;
    let mut offset = 1;
    for length in [65535, 65536, 65537, 300_000, 262_144 - 28, 1 << 20] {
        let data: Vec<u8> = (0..length).map(|index: u32| (index % 251) as u8).collect();
        let follower = Request { flags: 0, command: Command::Flush, cookie: 1, offset: Bytes(0), length: 0 };
        let header = Request { flags: 0, command: Command::Write, cookie: 0, offset: Bytes(offset), length };
        let all = [&header.to_bytes()[..], &data, &follower.to_bytes()].concat();
        for piece in all.chunks(50_000) {
            raw.say(piece).await;
        }
        assert_eq!((raw.answer(0).await.error, raw.answer(0).await.error), (None, None));
        assert_eq!(raw.read(offset, length).await, data);
        offset += u64::from(length);
    }
}

#[tokio::test]
async fn a_client_that_does_not_listen_is_not_read_from_for_ever() {
    let recorder = Arc::new(Recorder::over(memory(Bytes(SIZE))).held());
    let limits = Limits { requests_in_flight_max: 4, ..Limits::default() };
    let (stream, _server) = serve(only(export_of(device_of(&recorder))), limits);
    let mut raw = Raw { stream };
    raw.greet(3).await;
    assert_eq!(raw.go("disk").await, option_reply::ACK);
    for _ in 0..100 {
        raw.send(Command::Trim, 0, 0, 512).await;
    }
    for _ in 0..100 {
        recorder.release(1);
        assert_eq!(raw.answer(0).await.error, None);
    }
    assert_eq!(recorder.in_flight_max.load(Ordering::SeqCst), 4);
}

#[tokio::test]
async fn bytes_in_flight_are_bounded_but_one_request_always_gets_in() {
    let recorder = Arc::new(Recorder::over(memory(Bytes(SIZE))).held());
    let limits = Limits { bytes_in_flight_max: Bytes::kib(8), ..Limits::default() };
    let (stream, _server) = serve(only(export_of(device_of(&recorder))), limits);
    let (reader, mut writer) = tokio::io::split(stream);
    let mut raw = Raw { stream: tokio::io::join(reader, tokio::io::sink()) };
    let mut out = Raw { stream: tokio::io::join(tokio::io::empty(), &mut writer) };
    raw.hear(18).await;
    out.say(&3_u32.to_be_bytes()).await;
    let go = transhume_nbd::protocol::GoRequest { name: "disk", items: vec![] };
    out.say(&transhume_nbd::protocol::write_option(7, &go.to_bytes())).await;
    raw.replies(7).await;
    let hearing = async {
        for _ in 0..20 {
            recorder.release(1);
            assert_eq!(raw.answer(0).await.error, None);
        }
    };
    let saying = async {
        for length in [4096_u32, 65536].into_iter().cycle().take(20) {
            out.send(Command::Write, 0, 0, length).await;
            out.say(&vec![1; length as usize]).await;
        }
    };
    tokio::join!(hearing, saying);
    assert!(recorder.in_flight_max.load(Ordering::SeqCst) <= 2, "8 KiB let more than two of 4 KiB in");
}

#[tokio::test]
async fn an_exhausted_pool_delays_and_does_not_break() {
    let device = memory(Bytes(SIZE));
    let pool = block::BufferPool::new(Bytes::kib(64));
    let export = transhume_nbd::Export::new("disk", pool.clone(), move || device.clone());
    let (mut raw, _server) = enter(&only(export)).await;
    let taken = pool.acquire(65536).await;
    raw.send(Command::Write, 0, 0, 65536).await;
    raw.say(&[3; 65536]).await;
    raw.send(Command::Flush, 0, 0, 0).await;
    tokio::task::yield_now().await;
    drop(taken);
    assert_eq!(raw.answer(0).await.error, None);
    assert_eq!(raw.answer(0).await.error, None);
    assert_eq!(raw.read(0, 65536).await, [3; 65536]);
}

#[tokio::test]
async fn requests_before_a_disconnect_are_carried_out_and_answered() {
    let recorder = Arc::new(Recorder::over(memory(Bytes(SIZE))).held());
    let (mut raw, server) = enter(&only(export_of(device_of(&recorder)))).await;
    raw.send(Command::Trim, 0, 0, 512).await;
    raw.send(Command::Disconnect, 0, 0, 0).await;
    raw.send(Command::Trim, 0, 512, 512).await;
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    assert!(!server.is_finished(), "a request in flight was dropped");
    recorder.release(10);
    assert_eq!(raw.answer(0).await.error, None);
    raw.assert_closed().await;
    assert!(matches!(server.await.expect("no panic").end, End::Disconnected));
    assert_eq!(recorder.take_log(), ["0+512 Discard"]);
}
