//! Serves a file, or memory, to measure the server by itself:
//! `serve SOCKET FILE` or `serve SOCKET mem:MEBIBYTES`.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use block::{
    BlockDevice, Buffer, BufferPool, Bytes, Device, Error, Extent, ExtentState, ExtentStatus, Geometry, IoFuture,
    MemDevice, Mutation, MutationKind, ready,
};
use env::{EnvRef, RealEnv};
use transhume_nbd::{Export, Exports, Limits, serve_connection};

/// A file through the page cache, answered inline.
struct Inline {
    file: File,
    size: Bytes,
}

impl BlockDevice for Inline {
    fn geometry(&self) -> Geometry {
        Geometry::of_size(self.size)
    }
    fn read(&self, offset: Bytes, mut buffer: Buffer) -> IoFuture<'_, Buffer> {
        let outcome = self.file.read_exact_at(&mut buffer, offset.get());
        ready(outcome.map(|()| buffer).map_err(|error| Error::from_os(error, "reading the file")))
    }
    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        let outcome = match mutation.kind() {
            MutationKind::Data(data) => self.file.write_all_at(data, mutation.extent().offset.get()),
            _ => self.file.write_all_at(&vec![0; mutation.extent().length.as_usize()], mutation.extent().offset.get()),
        };
        ready(outcome.map_err(|error| Error::from_os(error, "writing the file")))
    }
    fn flush(&self) -> IoFuture<'_, ()> {
        ready(self.file.sync_data().map_err(|error| Error::from_os(error, "syncing the file")))
    }
    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        ready(Ok(vec![ExtentStatus { extent, state: ExtentState::Data }]))
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket, what] = &arguments[..] else { return Err("usage: serve SOCKET (FILE | mem:MEBIBYTES)".into()) };
    let device = match what.strip_prefix("mem:") {
        Some(size) => Device::new("memory", MemDevice::new(Bytes::mib(size.parse()?))),
        None => {
            let file = File::options().read(true).write(true).open(what)?;
            let size = Bytes(file.metadata()?.len());
            Device::new("file", Inline { file, size })
        }
    };
    let pool = BufferPool::new(Bytes::mib(256));
    let export = Export::new("", pool, move || device.clone()).with_description("an example");
    let exports: Arc<dyn Exports> = Arc::new(vec![Arc::new(export)]);
    let env: EnvRef = Arc::new(RealEnv::new());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let _ = std::fs::remove_file(socket);
        let listener = tokio::net::UnixListener::bind(socket)?;
        loop {
            let (stream, _) = listener.accept().await?;
            let (exports, env) = (Arc::clone(&exports), Arc::clone(&env));
            tokio::spawn(async move {
                let summary = serve_connection(stream, exports, env, Limits::default()).await;
                eprintln!("{summary:?}");
            });
        }
    })
}
