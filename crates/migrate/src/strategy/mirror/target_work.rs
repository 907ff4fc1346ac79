//! What is asked of a target: work of its own, for it may take longer than the guest's request that began it.

use std::future::Future;
use std::pin::Pin;

use block::{Device, Extent, Mutation, MutationKind, Result};

/// A target operation that can outlive the guest's request that began it.
pub(super) type TargetWork<T = ()> = Pin<Box<dyn Future<Output = Result<T>> + Send>>;

/// A flush of the target.
pub(super) fn flush_of(target: Device) -> TargetWork {
    Box::pin(async move { target.flush().await })
}

/// Writes the parts of `mutation` to the target, all at once.
pub(super) fn write_parts(target: Device, parts: &[Extent], mutation: &Mutation) -> TargetWork {
    let limit = match mutation.kind() {
        MutationKind::Data(_) => u64::from(target.geometry().transfer_bytes_max),
        _ => u64::MAX,
    };
    match parts {
        [part] if part.length.0 <= limit => {
            let write = if *part == mutation.extent() { mutation.clone() } else { mutation.slice(*part) };
            Box::pin(async move { target.write(write).await })
        }
        parts => {
            // Aligned cuts: the limit of every device is at least a chunk, and a power of two times its alignment.
            let unit = if limit == u64::MAX { limit } else { 1 << limit.max(1).ilog2() };
            let writes: Vec<Mutation> = parts
                .iter()
                .flat_map(|part| match unit {
                    u64::MAX => vec![*part],
                    unit => part.split_at_multiples(unit).collect(),
                })
                .map(|part| mutation.slice(part))
                .collect();
            Box::pin(async move {
                let all = writes.into_iter().map(|write| target.write(write));
                futures::future::join_all(all).await.into_iter().collect()
            })
        }
    }
}
