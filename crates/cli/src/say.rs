//! What is said on the standard output and beside it. Whoever closes it (`| head`) has read enough: that ends the program, and is no
//! defect of it.

use std::io::{ErrorKind, Write};

use api::v1::{Error, ErrorCode, Result};
use serde::Serialize;

/// What a shell says of a program that a closed pipe has ended.
const PIPE_CLOSED: i32 = 141;
/// The standard output cannot be written to.
const NO_OUTPUT: i32 = 74;

/// One line, or several, on the standard output.
pub(crate) fn line(text: &str) {
    let mut out = std::io::stdout().lock();
    let said = writeln!(out, "{text}").and_then(|()| out.flush());
    match said {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::BrokenPipe => std::process::exit(PIPE_CLOSED),
        Err(error) => {
            aside(&format!("transhume: the standard output cannot be written to: {error}"));
            std::process::exit(NO_OUTPUT);
        }
    }
}

/// One line on the standard error, if anybody is there.
pub(crate) fn aside(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Prints a value as JSON, or in words.
pub(crate) fn print(json: bool, value: &impl Serialize, words: impl FnOnce() -> String) -> Result<()> {
    let text = match json {
        true => serde_json::to_string_pretty(value)
            .map_err(|error| Error::new(ErrorCode::Internal, format!("the answer is no JSON: {error}")))?,
        false => words(),
    };
    line(text.trim_end());
    Ok(())
}
