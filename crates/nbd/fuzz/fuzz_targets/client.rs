//! The whole client against a server that says any bytes.
#![no_main]

use std::io::Cursor;

use block::{Buffer, Bytes, Data, Device, Extent, Mutation};
use env::RealEnv;
use libfuzzer_sys::fuzz_target;
use transhume_nbd::NbdDevice;

fuzz_target!(|bytes: &[u8]| {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
    runtime.expect("a runtime").block_on(async {
        let stream = tokio::io::join(Cursor::new(bytes.to_vec()), tokio::io::sink());
        let Ok(client) = NbdDevice::over(stream, "disk", &RealEnv::new()).await else { return };
        let device = Device::new("client", client);
        let geometry = device.geometry();
        let length = (8 * u64::from(geometry.request_alignment)).min(geometry.size.get()) as usize;
        if length == 0 {
            return;
        }
        let _ = futures::join!(
            device.read(Bytes(0), Buffer::unpooled(length)),
            device.extents(Extent::whole(geometry.size)),
            device.write(Mutation::data(Bytes(0), Data::copy_of(&vec![1; length]))),
            device.flush(),
        );
    });
});
