//! Disks that the load can check from its first read on, filled and checked on the host.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::Path;

use anyhow::Context;

use crate::pattern::{self, BLOCK_BYTES, Fault};

/// Writes a file of `size` bytes whose every block is of generation 1, as a load that is told `is_prefilled` expects.
/// The last may be a part of one.
///
/// # Errors
/// What the file system says.
pub fn create_filled(path: &Path, size: u64) -> anyhow::Result<()> {
    let file = File::create(path).with_context(|| format!("creating {}", path.display()))?;
    let mut out = BufWriter::with_capacity(1 << 20, file);
    let mut bytes = vec![0; BLOCK_BYTES];
    for block in 0..size.div_ceil(BLOCK_BYTES as u64) {
        let length = (size - block * BLOCK_BYTES as u64).min(BLOCK_BYTES as u64) as usize;
        pattern::fill(&mut bytes, block, 1);
        out.write_all(&bytes[..length]).with_context(|| format!("writing {}", path.display()))?;
    }
    out.into_inner().context("writing the last blocks")?.sync_data().context("making the file durable")
}

/// Reads a file whose blocks should all be of one generation; returns how many were checked and the first faults.
///
/// # Errors
/// What the file system says.
pub fn check_filled(path: &Path, generation: u64) -> anyhow::Result<(u64, Vec<(u64, Fault)>)> {
    let file = File::open(path).with_context(|| format!("opening {}", path.display()))?;
    let size = file.metadata().context("asking for its size")?.len();
    let mut input = BufReader::with_capacity(1 << 20, file);
    let mut bytes = vec![0; BLOCK_BYTES];
    let mut faults = Vec::new();
    let blocks = size / BLOCK_BYTES as u64;
    for block in 0..blocks {
        input.read_exact(&mut bytes).with_context(|| format!("reading {}", path.display()))?;
        if let (Err(fault), true) = (pattern::check(&bytes, block, generation), faults.len() < 20) {
            faults.push((block, fault));
        }
    }
    Ok((blocks, faults))
}
