//! transhume: placeholder.
fn main() {}
