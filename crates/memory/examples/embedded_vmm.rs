//! How a VMM of its own embeds the engine: it implements [`GuestMemory`] over its mappings and its dirty log.
//!
//! A rust-vmm based VMM has both in `vm-memory`: regions are its `GuestRegionMmap`s, and `take_dirty` asks KVM for the dirty log of each slot
//! (`KVM_GET_DIRTY_LOG`) and adds the bitmap of what its own devices have written. There is no KVM in this example: the dirty log is
//! emulated, and a thread plays the guest.
//!
//! `cargo run -p transhume-memory --example embedded_vmm`

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use env::{EnvRef, RealEnv};
use tokio::net::UnixStream;
use transhume_memory::{
    DirtyMap, EmulatedMemory, Error, ErrorKind, GuestMemory, Lane, PAGE_BYTES, PageRun, Precopy, PrecopyOptions,
    Receiver, Region, Unpaced,
};

const PAGES: usize = 8192;

/// The VMM's view of its guest's memory.
struct VmmMemory {
    regions: [Region; 1],
    /// What the guest's vCPUs write to. A VMM has a mapping here.
    bytes: Vec<AtomicU8>,
    /// What KVM would keep for it: one bit a page.
    dirty_log: Vec<AtomicU64>,
}

impl VmmMemory {
    fn new() -> Self {
        let bytes = PAGES * PAGE_BYTES as usize;
        Self {
            regions: [Region { name: "ram0".to_owned(), bytes: bytes as u64, page_bytes: PAGE_BYTES }],
            bytes: (0..bytes).map(|_| AtomicU8::new(0)).collect(),
            dirty_log: (0..PAGES / 64).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// A store of a vCPU: the bytes first, then the bit. The bit is taken before the bytes are read, so no store is lost.
    fn store(&self, at: usize, value: u8) {
        self.bytes[at].store(value, Ordering::Relaxed);
        let page = at / PAGE_BYTES as usize;
        self.dirty_log[page / 64].fetch_or(1 << (page % 64), Ordering::Release);
    }
}

impl GuestMemory for VmmMemory {
    fn regions(&self) -> &[Region] {
        &self.regions
    }

    fn take_dirty(&self, into: &mut DirtyMap) -> Result<(), Error> {
        for (word, bits) in self.dirty_log.iter().enumerate() {
            let mut bits = bits.swap(0, Ordering::Acquire);
            while bits != 0 {
                let page = word as u64 * 64 + u64::from(bits.trailing_zeros());
                into.insert(PageRun { region: 0, page, count: 1 });
                bits &= bits - 1;
            }
        }
        Ok(())
    }

    fn read(&self, _: usize, page: u64, into: &mut [u8]) -> Result<(), Error> {
        let from = (page * PAGE_BYTES) as usize;
        let bytes = self.bytes.get(from..from + into.len());
        let bytes = bytes.ok_or_else(|| Error::new(ErrorKind::Invalid, "behind the memory's end"))?;
        into.iter_mut().zip(bytes).for_each(|(to, from)| *to = from.load(Ordering::Relaxed));
        Ok(())
    }

    fn next_data(&self, _: usize, page: u64) -> Result<Option<Range<u64>>, Error> {
        Ok((page < PAGES as u64).then_some(page..PAGES as u64))
    }
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let env: EnvRef = Arc::new(RealEnv::new());
    let source = Arc::new(VmmMemory::new());
    let target = Arc::new(EmulatedMemory::new(source.regions().to_vec()));

    // The guest writes while it is copied.
    let runs = Arc::new(AtomicBool::new(true));
    let guest = {
        let (memory, runs) = (Arc::clone(&source), Arc::clone(&runs));
        std::thread::spawn(move || {
            let mut state = 1_u64;
            while runs.load(Ordering::Relaxed) {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                memory.store((state >> 33) as usize % (256 * PAGE_BYTES as usize), state as u8);
            }
        })
    };

    // Two streams; between hosts these are encrypted connections.
    let session = Precopy::session_id(&env);
    let receiver = Arc::new(Receiver::new(target.clone(), session));
    let mut lanes = Vec::new();
    for _ in 0..2 {
        let (near, far) = UnixStream::pair()?;
        let receiver = Arc::clone(&receiver);
        tokio::spawn(async move { receiver.serve(Box::new(far)).await });
        lanes.push(Lane { transport: Box::new(near), env: env.clone() });
    }

    let options = PrecopyOptions::default();
    let mut precopy = Precopy::new(env, source.clone(), options, (session, Arc::new(Unpaced)))?;
    precopy.connect(lanes).await?;
    let reason = precopy.converge().await?;

    // The VMM pauses its vCPUs and devices, sends what is left, saves the devices, and looks once more.
    runs.store(false, Ordering::Relaxed);
    guest.join().map_err(|_| "the guest has failed")?;
    precopy.finish().await?;
    precopy.verify_clean()?;

    let (mut ours, mut theirs) = (vec![0; PAGE_BYTES as usize], vec![0; PAGE_BYTES as usize]);
    for page in 0..PAGES as u64 {
        source.read(0, page, &mut ours)?;
        target.load(0, page * PAGE_BYTES, &mut theirs);
        assert_eq!(ours, theirs, "page {page}");
    }
    println!("{reason:?}; every byte is the same; {:?}", precopy.watch()());
    assert!(receiver.is_complete());
    Ok(())
}
