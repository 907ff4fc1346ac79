//! Boots a guest on a network and tells what a client of it feels. Needs root.
//!
//! `cargo run --example network -- udp=1000 http=100 tcp=100 seconds=10 rewrite=8`

use std::time::Duration;

use anyhow::Context;
use transhume_guest::{
    ClientSpec, Guest, GuestNetwork, GuestSpec, MemoryLoad, Network, NetworkClient, Side, TwoHosts, TwoHostsSpec,
    process::cpu_of,
};

const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> anyhow::Result<()> {
    let (mut clients, mut seconds, mut rewrite) = (ClientSpec::default(), 10, 8);
    for word in std::env::args().skip(1) {
        let (name, value) = word.split_once('=').context("words are NAME=VALUE")?;
        let value: u32 = value.parse().with_context(|| format!("{word}: not a number"))?;
        match name {
            "udp" => clients.udp_per_second = value,
            "http" => clients.http_per_second = value,
            "tcp" => clients.tcp_per_second = value,
            "seconds" => seconds = value,
            "rewrite" => rewrite = value,
            _ => anyhow::bail!("{name}: no such option"),
        }
    }
    let folder = tempfile::tempdir()?;
    // No daemon is started, so there need not be any programs.
    let hosts = TwoHosts::new("".as_ref(), folder.path(), TwoHostsSpec::default())?;
    let network = GuestNetwork::new(&hosts, ["guest0"])?;
    let memory = MemoryLoad { mib: 32, rewrite_mib_per_second: rewrite, ..MemoryLoad::default() };
    let card = Network::default();
    let spec = GuestSpec::new().network(card.clone()).memory_load(memory).workload_socket();
    let mut guest = Guest::boot(spec.launcher(hosts.launcher(Side::A)))?;
    guest.wait_for_load(PATIENCE)?;
    let client = NetworkClient::start(network.namespace(), card.host(), clients, PATIENCE)?;
    let before = cpu_of(guest.pid())?;
    std::thread::sleep(Duration::from_secs(seconds.into()));
    let share = (cpu_of(guest.pid())? - before).as_secs_f64() / f64::from(seconds.max(1));
    let report = client.finish();
    println!("QEMU took {:.0} % of a core", share * 100.0);
    println!("{report}");
    let found = guest.finish(PATIENCE)?;
    let mib = found.memory.rewritten as f64 / 256.0;
    println!(
        "memory: {mib:.0} MiB rewritten since the start, {} pages wrong of {}",
        found.memory.wrong, found.memory.pages
    );
    Ok(())
}
