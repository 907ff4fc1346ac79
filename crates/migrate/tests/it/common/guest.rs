//! A guest that writes, and knows what it must read.

use super::*;

/// A connection of the guest.
pub struct Guest {
    pub device: Device,
    pub(super) env: EnvRef,
    pub(super) stop: Arc<AtomicBool>,
}

impl Guest {
    fn draw(&self, below: u64) -> u64 {
        self.env.random() % below.max(1)
    }

    fn mutation(&self, start: u64, length: u64) -> (Mutation, Option<u8>) {
        let offset = start + self.draw(length);
        let size = (1 + self.draw(20_000)).min(start + length - offset);
        let extent = Extent::new(Bytes(offset), Bytes(size));
        let (mutation, byte) = match self.draw(10) {
            0 => (Mutation::zeroes(extent, self.draw(2) == 0), Some(0)),
            1 => (Mutation::discard(extent), None),
            _ => {
                let byte = self.draw(256) as u8;
                (Mutation::data(Bytes(offset), Data::copy_of(&vec![byte; size as usize])), Some(byte))
            }
        };
        (mutation.with_fua(self.draw(5) == 0), byte)
    }

    pub(super) async fn work_alone(self, start: u64, length: u64) -> u64 {
        let first = self.device.read(Bytes(start), Buffer::unpooled(length as usize)).await;
        let mut model = first.expect("the guest reads").to_vec();
        let mut rounds = 0;
        while !self.stop.load(Ordering::Relaxed) {
            rounds += 1;
            let (mutation, byte) = self.mutation(start, length);
            let extent = mutation.extent();
            let range = (extent.offset.0 - start) as usize..(extent.end().0 - start) as usize;
            self.device.write(mutation).await.expect("the guest's write succeeds");
            match byte {
                Some(byte) => model[range].fill(byte),
                None => {
                    // After a discard anything may stand there, but always the same.
                    let buffer = Buffer::unpooled(range.len());
                    let found = self.device.read(extent.offset, buffer).await.expect("the guest reads");
                    model[range].copy_from_slice(&found);
                }
            }
            if self.draw(4) == 0 {
                self.device.flush().await.expect("the guest's flush succeeds");
            }
            let offset = self.draw(length);
            let size = (1 + self.draw(30_000)).min(length - offset);
            let buffer = Buffer::unpooled(size as usize);
            let found = self.device.read(Bytes(start + offset), buffer).await.expect("the guest reads");
            let expected = &model[offset as usize..(offset + size) as usize];
            assert!(found[..] == *expected, "the guest reads something else than it wrote at {offset}+{size}");
            if self.draw(2) == 0 {
                self.env.sleep(Duration::from_millis(self.draw(5))).await;
            }
        }
        let last = self.device.read(Bytes(start), Buffer::unpooled(length as usize)).await.expect("the guest reads");
        assert!(last[..] == model[..], "the guest's data is not what it wrote");
        rounds
    }

    pub(super) async fn work_wildly(self, start: u64, length: u64) -> u64 {
        let mut rounds = 0;
        while !self.stop.load(Ordering::Relaxed) {
            let writes: Vec<_> =
                (0..4).map(|_| self.device.write(self.mutation(start, length.min(200_000)).0)).collect();
            for written in futures::future::join_all(writes).await {
                written.expect("the guest's write succeeds");
                rounds += 1;
            }
            self.env.sleep(Duration::from_millis(self.draw(3))).await;
        }
        rounds
    }
}
