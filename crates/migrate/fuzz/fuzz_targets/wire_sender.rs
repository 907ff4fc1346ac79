//! A whole sender against a receiver that says any bytes, after an honest welcome. The first byte says whether the
//! checksums of what follows are made to fit.
#![no_main]

use std::sync::Arc;

use block::{Buffer, Bytes, Data, Device, Extent, Mutation, Result};
use env::testing::PausedEnv;
use futures::future::BoxFuture;
use libfuzzer_sys::fuzz_target;
use transhume_migrate::stream::protocol::{Choice, Header, Kind, VERSION, Welcome, encode, feature};
use transhume_migrate::stream::{BoxTransport, Dialer, Remote, Role, SessionRequest, StreamOptions};
use uuid::Uuid;
use xxhash_rust::xxh3::xxh3_64;

struct Monologue(Vec<u8>);

impl Dialer for Monologue {
    fn dial(&self, _: u16) -> BoxFuture<'_, Result<BoxTransport>> {
        let stream = tokio::io::join(std::io::Cursor::new(self.0.clone()), tokio::io::sink());
        Box::pin(async move { Ok(Box::new(stream) as BoxTransport) })
    }
}

fn welcome() -> Vec<u8> {
    let mut bytes = Choice { version: VERSION, features: feature::KNOWN, words: String::new() }.to_bytes().to_vec();
    let welcome = Welcome {
        instance: [1; 16],
        boot: [1; 16],
        size: 1 << 20,
        request_alignment: 1,
        preferred_bytes: 4096,
        transfer_bytes_max: 1 << 20,
        read_only: false,
        earlier: None,
    };
    let message = encode(&welcome).expect("it is short");
    bytes.extend(Header::request(Kind::Open, 0).reply().with_payload(&message).to_bytes());
    bytes.extend(message);
    bytes
}

fuzz_target!(|bytes: &[u8]| {
    let Some((first, mut rest)) = bytes.split_first() else { return };
    let mut said = welcome();
    if first & 1 == 0 {
        said.extend(rest);
    } else {
        while let Some((header, behind)) = rest.split_first_chunk::<40>() {
            said.extend(header);
            said.extend(xxh3_64(header).to_le_bytes());
            let length = u32::from_le_bytes([header[4], header[5], header[6], header[7]]) as usize;
            let (payload, behind) = behind.split_at(length.min(behind.len()));
            said.extend(payload);
            rest = behind;
        }
    }
    let request = SessionRequest {
        volume: "disk".to_owned(),
        job: Uuid::from_u128(1),
        role: Role::Copy,
        epoch: 1,
        size: Bytes::mib(1),
        request_alignment: 512,
        origin: "disk".to_owned(),
        layers: None,
        stays: false,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.expect("a runtime").block_on(async {
        let dialer = Arc::new(Monologue(said));
        let connected = Remote::connect(PausedEnv::shared(1), dialer, request, StreamOptions::default()).await;
        let Ok(remote) = connected else { return };
        let device = Device::from_arc("remote", remote);
        let _ = futures::join!(
            device.read(Bytes(0), Buffer::unpooled(4096)),
            device.extents(Extent::whole(Bytes::mib(1))),
            device.write(Mutation::data(Bytes(0), Data::copy_of(&[1; 4096]))),
            device.flush(),
        );
    });
});
