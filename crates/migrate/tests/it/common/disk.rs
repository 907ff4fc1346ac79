//! A disk in memory that takes time and fails on demand.

use super::*;

/// How a disk behaves.
#[derive(Default)]
pub struct Manners {
    /// Every operation takes up to so many milliseconds.
    pub delay_ms: u64,
    /// So many mutations succeed, then every one fails.
    pub writes_left: Option<u64>,
    /// Every mutation with this number is reported as failed after half of it has landed.
    pub every_nth_write_fails: Option<u64>,
    /// So many flushes succeed, then every one fails.
    pub flushes_detached: Option<u64>,
    /// So many reads succeed, then every one fails.
    pub reads_left: Option<u64>,
    /// With what it fails.
    pub kind: Option<ErrorKind>,
    /// Mutations never end while this is set.
    pub hung: bool,
    /// Nothing ends while this is set, reads and flushes no more than mutations.
    pub stopped: bool,
    /// Mutations of generations before this one never end.
    pub forsaken: Option<u64>,
    /// Of the mutations that begin.
    pub generation: u64,
    /// It writes zeroes out, and takes so long for each MiB of them.
    pub zero_ms_per_mib: u64,
    /// It is stopped when it is flushed next.
    pub stops_at_flush: bool,
    /// It cannot tell holes from data.
    pub blind: bool,
    /// Its holes are holes for good.
    pub keeps_holes: bool,
}

/// A disk in memory.
#[derive(Clone)]
pub struct Disk {
    pub memory: Arc<MemDevice>,
    pub manners: Arc<Mutex<Manners>>,
    pub flushes: Arc<AtomicU64>,
    writes: Arc<AtomicU64>,
    pub data_written: Arc<AtomicU64>,
    /// Extents of mutations under way, to see whether two that overlap ever are.
    busy: Arc<Mutex<Vec<Extent>>>,
    pub overlaps: Arc<AtomicU64>,
    env: EnvRef,
}

impl Disk {
    /// What hangs now hangs on; what comes later does not.
    pub fn forsake(&self) {
        let mut manners = self.manners.lock();
        manners.hung = false;
        manners.generation += 1;
        manners.forsaken = Some(manners.generation);
    }

    /// Nothing fails or hangs any more.
    pub fn mend(&self) {
        let mut manners = self.manners.lock();
        let Manners { delay_ms, kind, blind, generation, .. } = *manners;
        *manners = Manners { delay_ms, kind, blind, generation, ..Manners::default() };
    }

    pub fn new(env: &EnvRef, size: Bytes) -> Self {
        Self {
            memory: Arc::new(MemDevice::new(size)),
            manners: Arc::default(),
            flushes: Arc::default(),
            writes: Arc::default(),
            data_written: Arc::default(),
            busy: Arc::default(),
            overlaps: Arc::default(),
            env: Arc::clone(env),
        }
    }

    pub fn device(&self, name: &str) -> Device {
        Device::new(name, self.clone())
    }

    pub async fn contents(&self) -> Vec<u8> {
        let size = self.memory.geometry().size;
        let buffer = self.memory.read(Bytes::ZERO, Buffer::unpooled(size.as_usize())).await;
        buffer.expect("memory answers").to_vec()
    }

    pub async fn put(&self, offset: u64, bytes: &[u8]) {
        self.memory.write(Mutation::data(Bytes(offset), Data::copy_of(bytes))).await.expect("memory takes it");
    }

    /// Forgets what was under way when the process died.
    pub fn reboot(&self) {
        self.busy.lock().clear();
        self.overlaps.store(0, Ordering::Relaxed);
    }

    async fn pause(&self) {
        let delay = self.manners.lock().delay_ms;
        if delay > 0 {
            self.env.sleep(Duration::from_millis(self.env.random() % (delay + 1))).await;
        }
        while self.manners.lock().stopped {
            self.env.sleep(Duration::from_millis(10)).await;
        }
    }

    fn count(left: &mut Option<u64>, kind: Option<ErrorKind>, what: &str) -> Result<()> {
        match left {
            Some(0) => Err(Error::new(kind.unwrap_or(ErrorKind::Io), format!("the disk fails a {what}"))),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }
}

impl BlockDevice for Disk {
    fn geometry(&self) -> Geometry {
        self.memory.geometry()
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            self.pause().await;
            {
                let mut manners = self.manners.lock();
                let kind = manners.kind;
                Self::count(&mut manners.reads_left, kind, "read")?;
            }
            let buffer = self.memory.read(offset, buffer).await;
            self.pause().await;
            buffer
        })
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let extent = mutation.extent();
            {
                let mut busy = self.busy.lock();
                let overlaps = busy.iter().any(|other| other.overlaps(extent));
                self.overlaps.fetch_add(u64::from(overlaps), Ordering::Relaxed);
                busy.push(extent);
            }
            let done = async {
                self.pause().await;
                let generation = self.manners.lock().generation;
                loop {
                    {
                        let manners = self.manners.lock();
                        let is_forsaken = manners.forsaken.is_some_and(|before| generation < before);
                        if !(manners.hung || is_forsaken) {
                            break;
                        }
                    }
                    self.env.sleep(Duration::from_millis(10)).await;
                }
                {
                    let mut manners = self.manners.lock();
                    let kind = manners.kind;
                    Self::count(&mut manners.writes_left, kind, "write")?;
                }
                if matches!(mutation.kind(), MutationKind::Data(_)) {
                    self.data_written.fetch_add(extent.length.0, Ordering::Relaxed);
                }
                if !matches!(mutation.kind(), MutationKind::Data(_)) {
                    let cost = self.manners.lock().zero_ms_per_mib * extent.length.0 / (1 << 20);
                    self.env.sleep(Duration::from_millis(cost)).await;
                }
                let number = self.writes.fetch_add(1, Ordering::Relaxed) + 1;
                let is_struck = self.manners.lock().every_nth_write_fails.is_some_and(|nth| number.is_multiple_of(nth));
                if is_struck {
                    let half = Extent::new(extent.offset, Bytes(extent.length.0.div_ceil(2)));
                    self.memory.write(mutation.slice(half)).await?;
                    return Err(Error::new(ErrorKind::Io, "the disk fails a write now and then"));
                }
                self.memory.write(mutation).await?;
                self.pause().await;
                Ok(())
            };
            let done = done.await;
            let mut busy = self.busy.lock();
            let at = busy.iter().position(|other| *other == extent).expect("it was entered");
            busy.swap_remove(at);
            done
        })
    }

    fn keeps_holes(&self) -> bool {
        self.manners.lock().keeps_holes
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(async move {
            {
                let mut manners = self.manners.lock();
                manners.stopped |= std::mem::take(&mut manners.stops_at_flush);
            }
            self.pause().await;
            let mut manners = self.manners.lock();
            let kind = manners.kind;
            Self::count(&mut manners.flushes_detached, kind, "flush")?;
            self.flushes.fetch_add(1, Ordering::Relaxed);
            Ok(())
        })
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        if self.manners.lock().blind {
            let all = ExtentStatus { extent, state: block::ExtentState::Data };
            return block::ready(Ok(vec![all]));
        }
        Box::pin(async move {
            while self.manners.lock().stopped {
                self.env.sleep(Duration::from_millis(10)).await;
            }
            self.memory.extents(extent).await
        })
    }
}
