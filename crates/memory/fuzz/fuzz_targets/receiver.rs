//! A whole receiver against a sender that says any bytes. The first byte says whether an honest greeting comes before them, and
//! whether the checksums of what follows are made to fit.
#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use transhume_memory::wire::{HEADER_BYTES, Hello, checksum_of};
use transhume_memory::{EmulatedMemory, PAGE_BYTES, Receiver, Region};

/// The frames of `bytes`, each with checksums that fit.
fn sealed(bytes: &[u8]) -> Vec<u8> {
    let mut said = Vec::new();
    let mut rest = bytes;
    while let Some((header, behind)) = rest.split_first_chunk::<HEADER_BYTES>() {
        let length = u32::from_le_bytes([header[28], header[29], header[30], header[31]]) as usize;
        let (payload, behind) = behind.split_at(length.min(behind.len()));
        let mut header = *header;
        header[48..56].copy_from_slice(&checksum_of(payload).to_le_bytes());
        let sum = checksum_of(&header[..56]).to_le_bytes();
        header[56..].copy_from_slice(&sum);
        said.extend(header);
        said.extend(payload);
        rest = behind;
    }
    said
}

fuzz_target!(|bytes: &[u8]| {
    let Some((first, rest)) = bytes.split_first() else { return };
    let region = Region { name: "ram".to_owned(), bytes: 64 * PAGE_BYTES, page_bytes: PAGE_BYTES };
    let mut said = Vec::new();
    if first & 1 == 1 {
        let hello = Hello { session: [1; 16], generation: 1, stream: 0, streams: 1, regions: vec![region.clone()] };
        said.extend(hello.to_bytes().expect("it is short"));
    }
    match first & 2 {
        0 => said.extend(rest),
        _ => said.extend(sealed(rest)),
    }
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        let receiver = Receiver::new(Arc::new(EmulatedMemory::new(vec![region])), [1; 16]);
        let stream = tokio::io::join(std::io::Cursor::new(said), tokio::io::sink());
        let _ = receiver.serve(Box::new(stream)).await;
    });
});
