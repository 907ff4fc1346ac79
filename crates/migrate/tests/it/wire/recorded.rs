//! What a source of an earlier version sent over its connections is understood by this receiver, which answers it as that
//! version's target did.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use block::{Bytes, Device, MemDevice};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use transhume_migrate::stream::PeerName;
use transhume_migrate::stream::protocol::{
    CHOICE_BYTES, Choice, HEADER_BYTES, HELLO_BYTES, Header, Hello, Kind, Status,
};

use crate::wire::harness::{Pair, read};

/// A frame's header, and all of its bytes.
struct Frame {
    header: Header,
    bytes: Vec<u8>,
}

fn header_of(bytes: &[u8]) -> Header {
    Header::parse(bytes[..HEADER_BYTES].try_into().expect("a header's length")).expect("the header is well formed")
}

/// The frames of a recorded connection; the last one may have been cut.
fn frames(mut bytes: &[u8]) -> Vec<Frame> {
    let mut frames = Vec::new();
    while bytes.len() >= HEADER_BYTES {
        let header = header_of(bytes);
        let length = HEADER_BYTES + header.payload_bytes as usize;
        if bytes.len() < length {
            break;
        }
        frames.push(Frame { header, bytes: bytes[..length].to_vec() });
        bytes = &bytes[length..];
    }
    frames
}

async fn answer(near: &mut DuplexStream) -> Frame {
    loop {
        let mut bytes = vec![0; HEADER_BYTES];
        near.read_exact(&mut bytes).await.expect("it is answered");
        let header = header_of(&bytes);
        bytes.resize(HEADER_BYTES + header.payload_bytes as usize, 0);
        near.read_exact(&mut bytes[HEADER_BYTES..]).await.expect("the answer is whole");
        if header.kind != Kind::Beat {
            return Frame { header, bytes };
        }
    }
}

/// Sends what a source has sent over one connection, each request when the one before it is answered.
async fn replay(pair: &Pair, sent: &[u8], answered: &[u8]) -> u64 {
    let statuses: BTreeMap<(Kind, u64), Status> = frames(&answered[CHOICE_BYTES..])
        .iter()
        .filter(|frame| frame.header.kind != Kind::Beat)
        .map(|frame| ((frame.header.kind, frame.header.id), frame.header.status))
        .collect();
    let (mut near, far) = tokio::io::duplex(1 << 22);
    let receiver = pair.receiver();
    let serving = tokio::spawn(async move { receiver.serve(Box::new(far), PeerName("south".to_owned())).await });
    let hello: &[u8; HELLO_BYTES] = sent[..HELLO_BYTES].try_into().expect("a hello's length");
    Hello::parse(hello).expect("the hello is well formed");
    near.write_all(hello).await.expect("it is read");
    let mut choice = [0; CHOICE_BYTES];
    near.read_exact(&mut choice).await.expect("a hello is answered");
    let recorded = Choice::parse(answered[..CHOICE_BYTES].try_into().expect("a choice's length")).expect("well formed");
    assert_eq!(Choice::parse(&choice).expect("well formed"), recorded, "another choice");
    let mut count = 0;
    for frame in frames(&sent[HELLO_BYTES..]) {
        near.write_all(&frame.bytes).await.expect("it is read");
        if frame.header.kind == Kind::Beat {
            continue;
        }
        // The recording may end before an answer.
        let Some(status) = statuses.get(&(frame.header.kind, frame.header.id)) else { continue };
        let answer = answer(&mut near).await;
        let what = (answer.header.kind, answer.header.id, answer.header.status);
        assert_eq!(what, (frame.header.kind, frame.header.id, *status), "{:?}", String::from_utf8_lossy(&answer.bytes));
        count += 1;
    }
    drop(near);
    // A connection that is gone may be an error to who serves it.
    let _ = serving.await.expect("no panic");
    count
}

/// The recordings of every version, unpacked.
fn recordings() -> Vec<tempfile::TempDir> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
    let versions = std::fs::read_dir(folder).expect("fixtures are part of the checkout").flatten();
    let archives = versions.map(|version| version.path().join("wire.tar.gz")).filter(|archive| archive.exists());
    archives
        .map(|archive: PathBuf| {
            let folder = tempfile::tempdir().expect("a folder");
            let status = Command::new("tar").arg("-C").arg(folder.path()).arg("-xzf").arg(&archive).status();
            assert!(status.expect("tar is there").success(), "{} cannot be unpacked", archive.display());
            folder
        })
        .collect()
}

#[tokio::test(start_paused = true)]
async fn a_source_of_an_earlier_version_is_understood() {
    let recordings = recordings();
    assert!(!recordings.is_empty(), "there are no recordings");
    for folder in recordings {
        let file = |name: String| std::fs::read(folder.path().join(name));
        let expected = file("expected.img".to_owned()).expect("read");
        let device = Device::new("memory", MemDevice::new(Bytes(expected.len() as u64)));
        let pair = Pair::new(1, device.clone());
        let mut requests = 0;
        let mut number = 1;
        while let (Ok(sent), Ok(answered)) = (file(format!("{number}.sent")), file(format!("{number}.answered"))) {
            requests += replay(&pair, &sent, &answered).await;
            number += 1;
        }
        assert!(number > 2 && requests > 20, "{requests} requests over {} connections", number - 1);
        assert!(read(&device, 0, expected.len()).await == expected, "the volume is not what was sent");
    }
}
