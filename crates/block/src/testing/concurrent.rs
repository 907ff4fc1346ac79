//! Many requests at once.

use futures::future::join_all;

use super::Run;
use crate::{Buffer, Bytes, Data, Extent, Mutation};

/// How many requests are in flight at once.
const DEPTH: usize = 32;

impl Run {
    /// Cuts the volume into lanes and mutates, reads and flushes all of them at once.
    pub(super) async fn disjoint_requests_do_not_disturb_each_other(&mut self) {
        let size = self.model.size();
        let unit = u64::from(self.geometry().request_alignment).max(512);
        let lane = Bytes(size.0 / DEPTH as u64).align_down(unit);
        assert!(!lane.is_zero(), "{}: too small to be tested", self.what);
        for _ in 0..10 {
            let mut mutations = Vec::new();
            for number in 0..DEPTH as u64 {
                let start = Bytes(lane.0 * number);
                let end = if number + 1 == DEPTH as u64 { size } else { start + lane };
                // Neighbours touch without a gap half of the time: within one block of the medium, too.
                let end = if self.random.one_in(2) { end } else { (start + Bytes(unit)).min(end) };
                let mutation = self.random_mutation(Extent::between(start, end));
                self.model.apply(&mutation);
                mutations.push(mutation);
            }
            let device = &self.device;
            let writes = join_all(mutations.iter().map(|mutation| device.write(mutation.clone())));
            let reads = join_all(mutations.iter().map(|mutation| {
                let extent = mutation.extent();
                device.read(extent.offset, Buffer::unpooled(extent.length.as_usize()))
            }));
            let (written, read, flushed) = futures::join!(writes, reads, device.flush());
            for (outcome, mutation) in written.into_iter().zip(&mutations) {
                if let Err(error) = outcome {
                    panic!("{}: {mutation:?} beside others failed: {}", self.what, error.chain());
                }
            }
            // What such a read gives is open: before, after or between. That it succeeds is not.
            for outcome in read {
                assert!(outcome.is_ok(), "{}: a read beside writes failed", self.what);
            }
            assert!(flushed.is_ok(), "{}: a flush beside writes failed", self.what);
            self.check_all().await;
        }
    }

    /// Two writes of the same bytes at once leave each sector as one of them wrote it, and for good.
    pub(super) async fn overlapping_writes_land_in_some_order(&mut self) {
        let unit = u64::from(self.geometry().request_alignment).max(512);
        for _ in 0..10 {
            let extent = self.random_extent(65536);
            let length = extent.length.as_usize();
            let (one, other) = (Data::copy_of(&vec![1; length]), Data::copy_of(&vec![2; length]));
            let (first, second) = futures::join!(
                self.device.write(Mutation::data(extent.offset, one.clone())),
                self.device.write(Mutation::data(extent.offset, other.clone())),
            );
            assert!(first.is_ok() && second.is_ok(), "{}: overlapping writes failed", self.what);
            let read = match self.device.read(extent.offset, Buffer::unpooled(length)).await {
                Ok(read) => read,
                Err(error) => panic!("{}: reading {extent} failed: {}", self.what, error.chain()),
            };
            for sector in extent.split_at_multiples(unit) {
                let start = (sector.offset - extent.offset).as_usize();
                let bytes = &read[start..start + sector.length.as_usize()];
                let is_one_of_them = bytes.iter().all(|&byte| byte == 1) || bytes.iter().all(|&byte| byte == 2);
                assert!(is_one_of_them, "{}: {sector} mix two writes", self.what);
            }
            self.model.apply(&Mutation::data(extent.offset, Data::copy_of(&read)));
            self.check_all().await;
        }
    }
}
