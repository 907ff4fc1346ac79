//! A whole receiver against a sender that says any bytes. The first byte says whether an honest opening comes before them,
//! and whether the checksums of what follows are made to fit.
#![no_main]

use std::sync::Arc;
use std::time::Duration;

use block::{Bytes, Device, MemDevice, Result};
use env::testing::PausedEnv;
use futures::future::BoxFuture;
use libfuzzer_sys::fuzz_target;
use transhume_migrate::stream::protocol::{Header, Hello, Kind, Opening, feature};
use transhume_migrate::stream::{
    Answer, Ask, Opened, PeerName, Receiver, ReceiverLimits, Role, SessionHandler, SessionRequest,
};
use uuid::Uuid;
use xxhash_rust::xxh3::xxh3_64;

struct OneVolume(Device);

impl SessionHandler for OneVolume {
    fn check(&self, _: &PeerName, _: &SessionRequest) -> Result<()> {
        Ok(())
    }
    fn open(&self, _: &PeerName, _: &SessionRequest) -> BoxFuture<'_, Result<Opened>> {
        Box::pin(async { Ok(Opened { device: self.0.clone(), instance: [1; 16], boot: [1; 16], earlier: None }) })
    }
    fn ask(&self, _: &PeerName, _: &SessionRequest, _: Ask) -> BoxFuture<'_, Result<Answer>> {
        Box::pin(async { Ok(Answer::Done) })
    }
}

/// The frames of `bytes`, each with the checksum of its header made right.
fn sealed(bytes: &[u8]) -> Vec<u8> {
    let mut said = Vec::new();
    let mut rest = bytes;
    while let Some((header, behind)) = rest.split_first_chunk::<40>() {
        said.extend(header);
        said.extend(xxh3_64(header).to_le_bytes());
        let length = u32::from_le_bytes([header[4], header[5], header[6], header[7]]) as usize;
        let (payload, behind) = behind.split_at(length.min(behind.len()));
        said.extend(payload);
        rest = behind;
    }
    said
}

fuzz_target!(|bytes: &[u8]| {
    let Some((first, rest)) = bytes.split_first() else { return };
    let mut said = Vec::new();
    if first & 1 == 1 {
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
        let opening = Opening { sender: [2; 16], session: 1, stream: 0, generation: 1, joins: false, request };
        let message = opening.to_bytes(feature::KNOWN).expect("it is short");
        said.extend(Hello::default().to_bytes());
        said.extend(Header::request(Kind::Open, 0).with_payload(&message).to_bytes());
        said.extend(message);
    }
    match first & 2 {
        0 => said.extend(rest),
        _ => said.extend(sealed(rest)),
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.expect("a runtime").block_on(async {
        let device = Device::new("memory", MemDevice::new(Bytes::mib(1)));
        let limits = ReceiverLimits { pool: Bytes::mib(4), share: Bytes::mib(2), ..ReceiverLimits::default() };
        let env = PausedEnv::shared(1);
        let receiver = Receiver::new(Arc::clone(&env), Arc::new(OneVolume(device)), limits);
        let stream = tokio::io::join(std::io::Cursor::new(said), tokio::io::sink());
        let _ = receiver.serve(Box::new(stream), PeerName("fuzz".to_owned())).await;
        env.sleep(Duration::from_secs(100)).await;
        assert_eq!(receiver.pool_in_use(), Bytes::ZERO, "a buffer is lost");
        assert_eq!(receiver.sessions(), 0, "a session is kept");
    });
});
