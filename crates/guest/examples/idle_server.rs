//! Serves memory or a file over NBD as the daemon does while nothing migrates, or without its stack, to measure the
//! stack's share. `idle_server SOCKET (mem:MEBIBYTES | file:PATH[,OPTIONS]) (bare | stack | surrogate:PATH)`: with a surrogate all
//! chunks are in it before the first client comes, and the file at PATH, which is there, is its store.

use std::sync::Arc;

use anyhow::Context;
use backends::{BackendSpec, FileBackend, OpenOptions};
use block::{BlockDevice, Buffer, BufferPool, Bytes, ChunkIndex, ChunkSize, Device, MemDevice, Slot};
use env::{EnvRef, RealEnv};
use filters::{AccessCounts, MeterState, Redirect, RedirectHeader};
use nbd::{Export, Exports, Limits, serve_connection};

fn main() -> anyhow::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [socket, what, how] = &words[..] else {
        anyhow::bail!("idle_server SOCKET (mem:MIB | file:PATH) (bare | stack | surrogate:PATH)")
    };
    let env: EnvRef = Arc::new(RealEnv::new());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let backend = match what.strip_prefix("mem:") {
            Some(size) => Device::new("memory", MemDevice::new(Bytes::mib(size.parse()?))),
            None => {
                let spec: BackendSpec = what.parse()?;
                Device::new("file", FileBackend::open(&spec, &OpenOptions::default(), &*env).await?)
            }
        };
        let pool = BufferPool::new(Bytes::mib(256));
        let backend = match how.strip_prefix("surrogate:") {
            Some(path) => redirected(&env, backend, path).await?,
            None => backend,
        };
        let export = if how != "stack" {
            Export::new("", pool, move || backend.clone())
        } else {
            let (slot, meters) = (Slot::new(backend), MeterState::new(Arc::clone(&env)));
            Export::new("", pool, move || Device::new("volume", meters.metered(slot.lane())))
        };
        let exports: Arc<dyn Exports> = Arc::new(vec![Arc::new(export)]);
        let listener = tokio::net::UnixListener::bind(socket)?;
        loop {
            let (stream, _) = listener.accept().await?;
            tokio::spawn(serve_connection(stream, Arc::clone(&exports), Arc::clone(&env), Limits::default()));
        }
    })
}

/// `base` with a surrogate in the file at `path`, which has all of its chunks.
async fn redirected(env: &EnvRef, base: Device, path: &str) -> anyhow::Result<Device> {
    let spec: BackendSpec = format!("file:{path}").parse()?;
    let partition = Device::new("surrogate", FileBackend::open(&spec, &OpenOptions::default(), &**env).await?);
    let (size, chunk) = (base.size(), ChunkSize::new(1 << 20).context("a power of two")?);
    let header = RedirectHeader::new(size, chunk, partition.size(), [1; 16]).context("the surrogate is too small")?;
    Redirect::create(&partition, &header).await?;
    let popularity = Box::new(AccessCounts::new(chunk.count(size), 1));
    let redirect = Redirect::open(Arc::clone(env), base, partition, [1; 16], popularity).await?;
    for index in 0..chunk.count(size) {
        let extent = chunk.extent_of(ChunkIndex(index), size);
        redirect.read(extent.offset, Buffer::unpooled(4096)).await?;
        while redirect.status().places_cached <= index {
            env.sleep(std::time::Duration::from_millis(1)).await;
        }
    }
    Ok(Device::new("redirect", redirect))
}
