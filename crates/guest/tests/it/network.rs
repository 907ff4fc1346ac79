//! A guest on the network of two hosts, its client, and a move by QEMU alone that both survive.

/// The rig's own tests. Every test that has a guest uses the rig, and would fail with it.
mod long {
    use std::path::Path;
    use std::time::{Duration, Instant};

    use serde_json::json;
    use transhume_guest::process::{Process, cpu_of};
    use transhume_guest::{
        ClientSpec, Event, Guest, GuestNetwork, GuestSpec, Interval, MemoryLoad, Network, NetworkClient, Qmp, Side,
        TwoHosts, TwoHostsSpec,
    };

    const PATIENCE: Duration = Duration::from_secs(120);

    struct Place {
        network: GuestNetwork,
        hosts: TwoHosts,
        folder: tempfile::TempDir,
    }

    /// Two hosts without daemons, and a client.
    fn place() -> Place {
        let folder = tempfile::tempdir().unwrap();
        let hosts = TwoHosts::new("".as_ref(), folder.path(), TwoHostsSpec::default()).unwrap();
        let network = GuestNetwork::new(&hosts, ["guest0"]).unwrap();
        Place { network, hosts, folder }
    }

    fn boot(place: &Place) -> Guest {
        let memory = MemoryLoad { mib: 32, rewrite_mib_per_second: 2, hot_percent: 25 };
        let spec = GuestSpec::new().network(Network::default()).memory_load(memory).workload_socket();
        let mut guest = Guest::boot(spec.launcher(place.hosts.launcher(Side::A))).unwrap();
        guest.wait_for_load(PATIENCE).unwrap();
        guest
    }

    fn client(place: &Place) -> NetworkClient {
        let network = Network::default();
        NetworkClient::start(place.network.namespace(), network.host(), ClientSpec::default(), PATIENCE).unwrap()
    }

    #[test]
    fn a_client_reaches_a_guest_by_ping_udp_http_and_tcp() {
        let place = place();
        let mut guest = boot(&place);
        let client = client(&place);
        let ping =
            place.network.command("busybox").args(["ping", "-c", "1", "-W", "5", Network::default().host()]).status();
        assert!(ping.unwrap().success(), "it does not answer pings");
        let before = cpu_of(guest.pid()).unwrap();
        let begun = Instant::now();
        std::thread::sleep(Duration::from_secs(5));
        let busy = (cpu_of(guest.pid()).unwrap() - before).as_secs_f64() / begun.elapsed().as_secs_f64();
        let report = client.finish();
        println!("{report}\nQEMU took {:.0} % of a core", busy * 100.0);
        assert_eq!(place.network.side_of(&Network::default().mac).unwrap(), Some(Side::A));
        // An emulated guest on a busy machine may drop datagrams; most of them come back all the same.
        assert!(report.udp.made() > 2000, "{report}");
        assert!(report.udp.lost() * 4 <= report.udp.made(), "{report}");
        assert!(report.http.made() > 200 && report.http.lost() == 0, "{report}");
        assert!(report.tcp.made() > 200 && report.tcp.lost() == 0, "{report}");
        assert_eq!((report.http_backwards, &report.tcp_broken), (0, &None));
        assert!(report.udp.timeline(Duration::from_millis(100)).len() >= 50);
        let load_result = guest.finish(PATIENCE).unwrap();
        assert!(load_result.is_right(), "{load_result:?}");
    }

    #[test]
    fn clients_and_events_follow_a_guest_that_qemu_moves_to_the_other_host() {
        let place = place();
        let mut guest = boot(&place);
        let other = place.folder.path().join("qemu-b");
        std::fs::create_dir(&other).unwrap();
        let target = target(&place, &guest, &other);
        let client = client(&place);
        std::thread::sleep(Duration::from_secs(2));
        guest.follow(&other).unwrap();
        let mut source = Qmp::connect(&guest.qmp_socket(), PATIENCE).unwrap();
        source.execute("migrate", json!({ "uri": format!("unix:{}", other.join("incoming").display()) })).unwrap();
        let mut there = Qmp::connect(&other.join("qmp.sock"), PATIENCE).unwrap();
        there.wait_for_event("RESUME", PATIENCE).unwrap();
        let moved = client.report().started.elapsed();
        guest.kill();
        guest.wait_until(PATIENCE, |event| matches!(event, Event::Memory(_))).unwrap();
        std::thread::sleep(Duration::from_secs(2));
        let report = client.finish();
        println!("moved at {moved:?}\n{report}");
        assert_eq!(place.network.side_of(&Network::default().mac).unwrap(), Some(Side::B));
        assert_eq!((report.http_backwards, &report.tcp_broken), (0, &None), "{report}");
        assert_eq!((report.http.lost(), report.tcp.lost()), (0, 0), "{report}");
        let last = report.udp.probes().iter().rev().find(|probe| probe.latency.is_some()).unwrap();
        assert!(last.at > moved, "no answer from the other host: {report}");
        let load_result = guest.finish(PATIENCE).unwrap();
        assert!(load_result.is_right(), "{load_result:?}");
        assert_eq!(load_result.memory.pages, 32 * 256);
        // An interval begins where the one before it ended, and only the one whose line was cut is missing.
        let intervals = guest.intervals();
        let is_joined =
            |a: &Interval, b: &Interval| b.at.saturating_sub(b.length).abs_diff(a.at) < Duration::from_millis(5);
        let missing = intervals.windows(2).filter(|pair| !is_joined(&pair[0].1, &pair[1].1)).count();
        assert!(intervals.len() > 15 && missing <= 1, "{missing} lines are missing of {}", intervals.len());
        drop(target);
    }

    #[test]
    fn a_client_notes_when_and_for_how_long_a_guest_stands_still() {
        const STILL: Duration = Duration::from_millis(1500);
        let place = place();
        let mut guest = boot(&place);
        let client = client(&place);
        let mut qmp = Qmp::connect(&guest.qmp_socket(), PATIENCE).unwrap();
        std::thread::sleep(Duration::from_secs(1));
        qmp.execute("stop", json!({})).unwrap();
        let stopped = client.report().started.elapsed();
        std::thread::sleep(STILL);
        qmp.execute("cont", json!({})).unwrap();
        std::thread::sleep(Duration::from_secs(2));
        let report = client.finish();
        println!("stopped at {stopped:?}\n{report}");
        for series in [&report.udp, &report.http, &report.tcp] {
            let gap = series.longest_gap();
            assert!(gap.length >= STILL && gap.from <= stopped + STILL / 2, "{report}");
        }
        assert_eq!((report.http.lost(), report.tcp.lost(), &report.tcp_broken), (0, 0, &None), "{report}");
        assert!(report.tcp.longest() >= STILL - Duration::from_millis(100), "{report}");
        let slots = report.udp.timeline(Duration::from_millis(100));
        let still = slots.iter().filter(|slot| slot.made > 0 && slot.longest > STILL / 4 || slot.answered == 0).count();
        assert!(still >= 9, "{still} slots of 100 ms feel it: {report}");
        assert!(guest.finish(PATIENCE).unwrap().is_right());
    }

    /// A QEMU at the other host that waits for the guest.
    fn target(place: &Place, guest: &Guest, folder: &Path) -> Process {
        let mut words = place.hosts.launcher(Side::B);
        words.push("qemu-system-x86_64".into());
        words.extend(guest.arguments_in(folder));
        words.extend(["-incoming".into(), format!("unix:{}", folder.join("incoming").display())]);
        let program = words.remove(0);
        let log = folder.join("qemu.log");
        let mut target = Process::start(program.as_ref(), &words, &log).unwrap();
        target.wait_for(&folder.join("qmp.sock"), &log).unwrap();
        target
    }
}
