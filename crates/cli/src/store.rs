//! Stores of surrogates and caches, as people write them.

use api::v1::{Error, ErrorCode, Result, StoreRequest};

use crate::path::absolute_backend;
use crate::rate::Size;

/// `file:PATH[,size=SIZE][,cache=...]`, `HOST:VOLUME`, or the address of an export, in which commas are letters as others.
pub(crate) fn store_request(text: &str) -> Result<StoreRequest> {
    let is_host = !text.starts_with("file:") && text.contains(':') && !text.contains('/');
    if text.starts_with("nbd") || is_host {
        return Ok(StoreRequest { place: text.to_owned(), size_bytes: None });
    }
    let (mut place, mut size_bytes) = (String::new(), None);
    for part in split_at_commas(text) {
        match part.strip_prefix("size=") {
            Some(size) => {
                let read = size.parse::<Size>().map_err(|why| {
                    Error::new(ErrorCode::Invalid, why).with_hint("write file:/fast/s.img,size=40GiB")
                })?;
                size_bytes = Some(read.0);
            }
            None if place.is_empty() => place.push_str(part),
            None => {
                place.push(',');
                place.push_str(part);
            }
        }
    }
    Ok(StoreRequest { place: absolute_backend(&place)?, size_bytes })
}

/// The parts between single commas: two of them are one in a path.
fn split_at_commas(text: &str) -> Vec<&str> {
    let (mut parts, mut start, mut at) = (Vec::new(), 0, 0);
    let bytes = text.as_bytes();
    while at < bytes.len() {
        match (bytes[at], bytes.get(at + 1)) {
            (b',', Some(b',')) => at += 2,
            (b',', _) => {
                parts.push(&text[start..at]);
                at += 1;
                start = at;
            }
            _ => at += 1,
        }
    }
    parts.push(&text[start..]);
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_has_its_size_beside_what_every_place_has() {
        let read = |text: &str| store_request(text).expect("a good store");
        let of = |place: &str, size_bytes| StoreRequest { place: place.to_owned(), size_bytes };
        assert_eq!(read("file:/fast/s.img,size=40GiB"), of("file:/fast/s.img", Some(40 << 30)));
        assert_eq!(read("file:/dev/sdb"), of("file:/dev/sdb", None));
        assert_eq!(read("file:/a,,b,cache=page,size=1GiB"), of("file:/a,,b,cache=page", Some(1 << 30)));
        assert!(store_request("file:/a,size=much").is_err());
        let export = "nbd+unix:///a,size=1?socket=/b,c";
        assert_eq!(read(export), of(export, None));
        assert_eq!(read("host2:fast"), of("host2:fast", None));
    }
}
