//! The memory of a VM that moves takes its part of a link that others use, and leaves them theirs.

/// It measures a link that others use, and needs the processors to itself. The limit of the memory's rate is decided on main by the unit
/// tests of the daemon's `rates`.
mod long {
    use std::path::Path;
    use std::time::{Duration, Instant};

    use serde_json::Value;
    use transhume_guest::{
        Disk, Guest, GuestNetwork, GuestSpec, Load, MemoryLoad, Network, OtherTraffic, Side, TwoHosts, TwoHostsSpec,
        create_filled,
    };

    const DISK_BYTES: u64 = 8 << 20;
    const HANG: Duration = Duration::from_secs(120);
    const LINK_BITS: u64 = 160_000_000;

    /// What the daemon at `a` says of the move.
    fn moving(hosts: &TwoHosts) -> Value {
        hosts.daemon(Side::A).json(&["vm", "show", "web1"]).expect("shown")["last_move"].clone()
    }

    #[test]
    fn the_memory_of_a_vm_leaves_others_their_share_of_a_link_and_is_in_time_all_the_same() {
        let folder = tempfile::Builder::new().prefix("vmb").tempdir().expect("a temporary directory");
        let programs = Path::new(env!("CARGO_BIN_EXE_transhumed")).parent().expect("in a directory");
        let spec =
            TwoHostsSpec { more: "run-vms = true\n", link_bits_per_second: Some(LINK_BITS), ..TwoHostsSpec::default() };
        let mut hosts = TwoHosts::new(programs, folder.path(), spec).expect("two networks; run `make setup`, as root");
        hosts.start().expect("both daemons start");
        hosts.pair().expect("paired");
        let _network = GuestNetwork::new(&hosts, ["guest0"]).expect("a network");
        let load = Load { is_prefilled: true, rate: 50, workers: 2, read_percent: 50, ..Load::default() };
        // Three hundred megabytes at the eight a second that others leave would take forty seconds.
        let memory = MemoryLoad { mib: 300, rewrite_mib_per_second: 0, ..MemoryLoad::default() };
        let spec = GuestSpec::new().network(Network::default()).workload_socket().memory_mib(512).load(load);
        let file = folder.path().join("disk0.raw");
        create_filled(&file, DISK_BYTES).expect("filled");
        let spec = spec.memory_load(memory).disk(Disk::raw(&file, "disk0")).launcher(hosts.launcher(Side::A));
        let mut guest = Guest::boot(spec).expect("QEMU starts; run `make setup`");
        guest.wait_for_load(HANG).expect("the load begins");
        let qmp = guest.qmp_socket().display().to_string();
        hosts.daemon(Side::A).json(&["vm", "add", "web1", "--qmp", &qmp]).expect("added");

        let others = OtherTraffic::start(&hosts, 12_000_000);
        let alone = others.rate(Duration::from_secs(2));
        assert!(alone > 8e6, "the link carries {alone} bytes a second of one connection");
        let words = ["vm", "move", "web1", "--to", "b", "--deadline", "100s", "--detach"];
        hosts.daemon(Side::A).json(&words).expect("it begins");
        let began = Instant::now();
        while !moving(&hosts)["memory_rates"]["limit"].is_u64() {
            let moved = moving(&hosts);
            assert!(moved["state"] == "running" && began.elapsed() < HANG, "it never gives way: {moved}");
            std::thread::sleep(Duration::from_millis(100));
        }
        std::thread::sleep(Duration::from_secs(2));
        let sent = || moving(&hosts)["memory"]["bytes_sent"].as_u64().unwrap_or(0);
        let before = sent();
        let beside = others.rate(Duration::from_secs(5));
        let during = moving(&hosts);
        assert_eq!(during["phase"], "memory", "{during}");
        // One connection each: without limits they would get half of the link.
        assert!(beside > 0.8 * alone, "others got {beside} of {alone}: {during}");
        assert!(sent() > before + (5 << 20), "its own part is used: {during}");
        let path = &during["memory_rates"]["paths"][0];
        assert_eq!((&path["interface"], &path["other_interface"]), (&"wire0".into(), &"wire0".into()), "{path}");
        assert!(path["others"].as_u64().is_some_and(|others| others > 6_000_000), "its own part is no other's: {path}");
        assert!(during["memory_rates"]["needed"].is_u64(), "{during}");
        others.stop();

        let folder_there = hosts.daemon(Side::B).api().parent().expect("in a folder").join("vm/web1");
        guest.follow(&folder_there).expect("followed");
        let moved = hosts.daemon(Side::A).json(&["vm", "watch", "web1"]).expect("it is over");
        assert_eq!(moved["state"], "done", "{moved}");
        println!("others had {beside} of {alone} bytes a second; {moved}");
        let there = hosts.daemon(Side::B).json(&["vm", "show", "web1"]).expect("shown");
        if let Some(pid) = there["pid"].as_u64() {
            // A QEMU that a daemon has started outlives it.
            let _ = std::process::Command::new("kill").args(["-9", &pid.to_string()]).status();
        }
    }
}
