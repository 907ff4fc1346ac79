//! Builds the guest's load program as one static file, which the library embeds. So crates that use the guest in their
//! tests need no second build step.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=load");
    println!("cargo::rerun-if-changed=src/pattern.rs");
    let rustc = std::env::var("RUSTC").expect("cargo tells build scripts which rustc it uses");
    let folder = std::env::var("OUT_DIR").expect("cargo tells build scripts where to write");
    let program = Path::new(&folder).join("guest-load");
    let status = Command::new(rustc)
        .args(["--edition", "2024", "--crate-name", "guest_load", "-C", "opt-level=3", "-C", "panic=abort"])
        .args(["-C", "strip=symbols", "-C", "target-feature=+crt-static", "-o"])
        .arg(&program)
        .arg("load/main.rs")
        .status()
        .expect("rustc starts");
    assert!(status.success(), "building the guest's load program: {status}");
}
