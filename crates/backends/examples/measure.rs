//! How fast a backend is by itself: `measure SPEC read|write BLOCK_BYTES DEPTH SECONDS [WORKERS]`.
//!
//! Random requests of one size through the checked handle, from one event loop per worker.

use std::sync::Arc;
use std::time::{Duration, Instant};

use block::testing::Random;
use block::{Buffer, Bytes, Data, Device, Mutation};
use env::RealEnv;
use futures::stream::{FuturesUnordered, StreamExt};
use transhume_backends::{FileBackend, OpenOptions};

async fn load(device: Device, is_write: bool, length: u64, depth: usize, span: Duration, seed: u64) -> u64 {
    let blocks = device.size().0 / length;
    let end = Instant::now() + span;
    let mut lanes: FuturesUnordered<_> = (0..depth as u64)
        .map(|lane| {
            let device = device.clone();
            async move {
                let mut random = Random::new(seed * 1000 + lane);
                let mut buffer = Buffer::unpooled(length as usize);
                let data = Data::copy_of(&random.bytes(length as usize));
                let mut done = 0;
                loop {
                    for _ in 0..16 {
                        let offset = Bytes(random.below(blocks) * length);
                        if is_write {
                            device.write(Mutation::data(offset, data.clone())).await.expect("written");
                        } else {
                            buffer = device.read(offset, buffer).await.expect("read");
                        }
                        done += 1;
                    }
                    if Instant::now() >= end {
                        return done;
                    }
                }
            }
        })
        .collect();
    let mut total = 0;
    while let Some(done) = lanes.next().await {
        total += done;
    }
    total
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [spec, verb, length, depth, seconds, rest @ ..] = &words[..] else {
        panic!("measure SPEC read|write BLOCK_BYTES DEPTH SECONDS [WORKERS]")
    };
    let number = |word: &str| word.parse::<u64>().expect("a number");
    let workers = rest.first().map_or(1, |word| number(word));
    let (length, depth) = (number(length), number(depth) as usize);
    let span = Duration::from_secs(number(seconds));
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("an event loop");
    let spec = spec.parse().expect("a backend");
    let backend = runtime().block_on(FileBackend::open(&spec, &OpenOptions::default(), &RealEnv::new()));
    let backend = Arc::new(backend.unwrap_or_else(|error| panic!("{}", error.chain())));
    let engine = backend.engine();
    let device = Device::from_arc("file", backend);
    let begin = Instant::now();
    let threads: Vec<_> = (0..workers)
        .map(|seed| {
            let (device, is_write) = (device.clone(), verb == "write");
            std::thread::spawn(move || runtime().block_on(load(device, is_write, length, depth, span, seed)))
        })
        .collect();
    let total: u64 = threads.into_iter().map(|thread| thread.join().expect("no panic")).sum();
    let took = begin.elapsed();
    println!(
        "{engine:?} {verb} {length} bytes, depth {depth}, {workers} workers: {:.0} a second, {:.0} ns each",
        total as f64 / took.as_secs_f64(),
        took.as_nanos() as f64 / total as f64
    );
}
