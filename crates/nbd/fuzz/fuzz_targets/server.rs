//! A whole server session against a client that says any bytes. The first byte says whether an honest handshake comes
//! before them.
#![no_main]

use std::sync::Arc;

use block::{BufferPool, Bytes, Device, MemDevice};
use env::RealEnv;
use libfuzzer_sys::fuzz_target;
use transhume_nbd::protocol::{GoRequest, MetaContextRequest, option, write_option};
use transhume_nbd::{Export, Exports, Limits, serve_connection};

fuzz_target!(|bytes: &[u8]| {
    let Some((first, rest)) = bytes.split_first() else { return };
    let mut said = Vec::new();
    if first & 1 == 1 {
        said.extend(3_u32.to_be_bytes());
        said.extend(write_option(option::STRUCTURED_REPLY, &[]));
        let context = MetaContextRequest { name: "disk", queries: vec!["base:allocation"] };
        said.extend(write_option(option::SET_META_CONTEXT, &context.to_bytes()));
        said.extend(write_option(option::GO, &GoRequest { name: "disk", items: vec![] }.to_bytes()));
    }
    said.extend(rest);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
    runtime.expect("a runtime").block_on(async {
        let pool = BufferPool::new(Bytes::mib(8));
        let device = Device::new("memory", MemDevice::new(Bytes::mib(1)));
        let export = Arc::new(Export::new("disk", pool.clone(), move || device.clone()));
        let exports: Arc<dyn Exports> = Arc::new(vec![Arc::clone(&export)]);
        let stream = tokio::io::join(&said[..], tokio::io::sink());
        serve_connection(stream, exports, Arc::new(RealEnv::new()), Limits::default()).await;
        assert_eq!(pool.in_use(), Bytes::ZERO, "a buffer is lost");
        assert_eq!(export.connections(), 0, "a connection stays in the gate");
    });
});
