//! Serves memory or a file over NBD as the daemon does while nothing migrates, or without its stack, to measure the
//! stack's share. `idle_server SOCKET (mem:MEBIBYTES | file:PATH[,OPTIONS]) (bare | stack)`.

use std::sync::Arc;

use backends::{BackendSpec, FileBackend, OpenOptions};
use block::{BufferPool, Bytes, Device, MemDevice, Slot};
use env::{EnvRef, RealEnv};
use filters::MeterState;
use nbd::{Export, Exports, Limits, serve_connection};

fn main() -> anyhow::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [socket, what, how] = &words[..] else {
        anyhow::bail!("idle_server SOCKET (mem:MIB | file:PATH) (bare | stack)")
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
        let export = if how == "bare" {
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
