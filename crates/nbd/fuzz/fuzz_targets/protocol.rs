//! Every parser of the protocol on any bytes: nothing panics, and what was understood is what is written again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use transhume_nbd::NbdUri;
use transhume_nbd::protocol::{
    GoRequest, Greeting, MetaContextRequest, OptionHeader, OptionReplyHeader, ReplyHead, Request, block_status_payload,
    parse_block_status, parse_error, parse_info, parse_meta_context, parse_server,
};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(request) = GoRequest::parse(bytes) {
        assert_eq!(request.to_bytes(), bytes);
    }
    if let Ok(request) = MetaContextRequest::parse(bytes) {
        assert_eq!(request.to_bytes(), bytes);
    }
    if let Ok((context, descriptors)) = parse_block_status(bytes) {
        assert_eq!(block_status_payload(context, &descriptors), bytes);
    }
    if let Some(message) = bytes.first_chunk()
        && let Ok(request) = Request::parse(message)
    {
        assert_eq!(request.to_bytes(), *message);
    }
    if let Some(message) = bytes.first_chunk()
        && let Ok(greeting) = Greeting::parse(message)
    {
        assert_eq!(greeting.to_bytes(), *message);
    }
    let _ = bytes.first_chunk().map(OptionHeader::parse);
    let _ = bytes.first_chunk().map(OptionReplyHeader::parse);
    let _ = bytes.first_chunk().map(|first| ReplyHead::length(*first));
    let _ = (ReplyHead::parse(bytes), parse_error(bytes), parse_info(bytes));
    let _ = (parse_meta_context(bytes), parse_server(bytes));
    if let Ok(text) = std::str::from_utf8(bytes)
        && let Ok(uri) = text.parse::<NbdUri>()
    {
        assert_eq!(uri.to_string().parse(), Ok(uri));
    }
});
