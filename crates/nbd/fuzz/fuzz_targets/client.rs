//! The whole client against a server that says any bytes. The first byte says whether an honest handshake comes before
//! them.
#![no_main]

use std::io::Cursor;

use block::{Buffer, Bytes, Data, Device, Extent, Mutation};
use env::RealEnv;
use libfuzzer_sys::fuzz_target;
use transhume_nbd::NbdDevice;
use transhume_nbd::protocol::{
    BlockSizes, CONTEXT_ALLOCATION, ExportInfo, Greeting, OptionReplyWriter, export_flag, option,
};

/// What an honest server says until the client asks for bytes.
fn handshake() -> Vec<u8> {
    let mut context = OptionReplyWriter::new(option::SET_META_CONTEXT);
    context.meta_context(1, CONTEXT_ALLOCATION);
    let mut export = OptionReplyWriter::new(option::GO);
    let flags =
        export_flag::HAS_FLAGS | export_flag::SEND_FLUSH | export_flag::SEND_FUA | export_flag::SEND_WRITE_ZEROES;
    export.export(ExportInfo { size: Bytes::mib(1), flags });
    export.block_sizes(BlockSizes { minimum: 1, preferred: 4096, maximum: 4 << 20 });
    let structured = OptionReplyWriter::new(option::STRUCTURED_REPLY).acknowledge();
    [&Greeting { flags: 3 }.to_bytes()[..], &structured, &context.acknowledge(), &export.acknowledge()].concat()
}

fuzz_target!(|bytes: &[u8]| {
    let Some((first, rest)) = bytes.split_first() else { return };
    let said = if first & 1 == 1 { [&handshake(), rest].concat() } else { rest.to_vec() };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
    runtime.expect("a runtime").block_on(async {
        let stream = tokio::io::join(Cursor::new(said), tokio::io::sink());
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
