//! Paths as the daemon understands them.

use std::path::Path;

use api::v1::{Error, ErrorCode, Result};

/// The path as the daemon, which runs in another directory, understands it.
pub(crate) fn absolute(path: impl AsRef<Path>) -> Result<String> {
    let shown = path.as_ref().display();
    let absolute = std::path::absolute(path.as_ref())
        .map_err(|error| Error::new(ErrorCode::Invalid, format!("{shown} is no path: {error}")))?;
    absolute
        .into_os_string()
        .into_string()
        .map_err(|_| Error::new(ErrorCode::Invalid, format!("{shown} is no text")).with_hint("use a path in UTF-8"))
}

/// A backend with its path made absolute. The daemon says what is wrong with the rest.
pub(crate) fn absolute_backend(text: &str) -> Result<String> {
    match text.strip_prefix("file:") {
        Some(rest) if !rest.is_empty() && !rest.starts_with(['/', ',']) => Ok(format!("file:{}", absolute(rest)?)),
        _ => Ok(text.to_owned()),
    }
}
