//! The workload's socket can be left and followed again, and the memory of the load is checked.

/// The rig's own tests. Every test that has a guest uses the rig, and would fail with it.
mod long {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::path::Path;
    use std::time::Duration;

    use transhume_guest::{Disk, Event, Guest, GuestSpec, Load, MemoryLoad, create_filled};

    const PATIENCE: Duration = Duration::from_secs(120);
    const SIZE: u64 = 16 << 20;

    #[test]
    fn a_guest_that_nobody_listens_to_goes_on_and_is_followed_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.raw");
        create_filled(&path, SIZE).unwrap();
        let load = Load { is_prefilled: true, interval_ms: 20, ..Load::default() };
        let spec = GuestSpec::new().disk(Disk::raw(&path, "data")).load(load).workload_socket();
        let mut guest = Guest::boot(spec).unwrap();
        let place = guest.folder().to_owned();
        guest.wait_for_load(PATIENCE).unwrap();
        for _ in 0..5 {
            guest.wait_until(PATIENCE, |event| matches!(event, Event::Interval(_))).unwrap();
            guest.leave();
            let before = guest.intervals().last().unwrap().1;
            assert!(guest.send("stop").is_err(), "nobody is connected");
            std::thread::sleep(Duration::from_millis(333));
            guest.follow(&place).unwrap();
            while guest.next_event(Duration::ZERO).is_some() {}
            let Event::Interval(after) =
                guest.wait_until(PATIENCE, |event| matches!(event, Event::Interval(_))).unwrap()
            else {
                panic!("waited for an interval")
            };
            let passed = after.at - before.at;
            assert!(passed >= Duration::from_millis(300), "the guest stood still: {passed:?}");
        }
        let load_result = guest.finish(PATIENCE).unwrap();
        assert!(load_result.is_right(), "{load_result:?}");
        assert_eq!(load_result.blocks, SIZE / 4096);
        assert!(load_result.slots_rewritten > 0);
    }

    #[test]
    fn a_guest_that_writes_to_nobody_is_not_held_up() {
        // Far more than the buffers of a terminal and of a serial line hold.
        let line = "x".repeat(200);
        let script = format!("i=0; while true; do i=$((i+1)); echo \"number $i {line}\"; done");
        let mut guest = Guest::boot(GuestSpec::new().script(&script).workload_socket()).unwrap();
        let place = guest.folder().to_owned();
        let before = next_number(&mut guest);
        guest.leave();
        while guest.next_event(Duration::ZERO).is_some() {}
        std::thread::sleep(Duration::from_secs(1));
        guest.follow(&place).unwrap();
        let after = next_number(&mut guest);
        assert!(after > before + 100, "the guest went from {before} to {after}");
    }

    fn next_number(guest: &mut Guest) -> u64 {
        let is_number = |event: &Event| matches!(event, Event::Line(line) if line.starts_with("number "));
        let Event::Line(line) = guest.wait_until(PATIENCE, is_number).unwrap() else { unreachable!("it is a line") };
        line.split(' ').nth(1).unwrap().parse().unwrap()
    }

    #[test]
    fn a_page_that_changes_behind_the_guests_back_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let ram = folder.path().join("ram");
        let backend = format!("memory-backend-file,id=ram,size=256M,share=on,mem-path={}", ram.display());
        let memory = MemoryLoad { mib: 16, rewrite_mib_per_second: 1, hot_percent: 50 };
        let spec =
            GuestSpec::new().memory_load(memory).arguments(["-object", &backend, "-machine", "memory-backend=ram"]);
        let mut guest = Guest::boot(spec).unwrap();
        guest.wait_for_load(PATIENCE).unwrap();
        // Beyond the half that is rewritten.
        let page = 3000;
        overwrite(&ram, page);
        let load_result = guest.finish(PATIENCE).unwrap();
        assert!(!load_result.is_right());
        assert_eq!(load_result.memory.wrong, 1, "{load_result:?}");
        let complaint = format!("page={page} expected=1 Torn");
        assert!(load_result.complaints.iter().any(|found| found.starts_with(&complaint)), "{load_result:?}");
    }

    /// Changes the end of the load's page of this number in a guest's memory.
    fn overwrite(ram: &Path, page: u64) {
        const PAGE_BYTES: usize = transhume_guest::pattern::BLOCK_BYTES;
        let mut sample = vec![0; PAGE_BYTES];
        transhume_guest::pattern::fill(&mut sample, page, 1);
        let bytes = std::fs::read(ram).unwrap();
        let places: Vec<usize> =
            (0..bytes.len() / PAGE_BYTES).filter(|place| bytes[place * PAGE_BYTES..][..PAGE_BYTES] == sample).collect();
        assert_eq!(places.len(), 1, "the page is in the guest's memory once");
        let file = File::options().write(true).open(ram).unwrap();
        file.write_all_at(&[0; 8], ((places[0] + 1) * PAGE_BYTES - 8) as u64).unwrap();
    }

    #[test]
    fn the_last_line_carries_every_total() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.raw");
        create_filled(&path, SIZE).unwrap();
        let load = Load { is_prefilled: true, ..Load::default() };
        let memory = MemoryLoad { mib: 16, rewrite_mib_per_second: 4, hot_percent: 50 };
        let spec = GuestSpec::new().disk(Disk::raw(&path, "data")).load(load).memory_load(memory).workload_socket();
        let mut guest = Guest::boot(spec).unwrap();
        guest.wait_for_load(PATIENCE).unwrap();
        guest.wait_until(PATIENCE, |event| matches!(event, Event::Memory(memory) if memory.rewritten > 0)).unwrap();
        guest.send("stop").unwrap();
        let done = guest.wait_until(PATIENCE, |event| matches!(event, Event::Done { .. })).unwrap();
        let Event::Done { is_right: true, totals: Some(totals) } = done else { panic!("{done:?}") };
        assert_eq!((totals.blocks, totals.wrong, totals.errors, totals.faults), (SIZE / 4096, 0, 0, 0));
        assert_eq!((totals.memory.pages, totals.memory.wrong), (4096, 0));
        assert!(totals.slots_rewritten > 0 && totals.memory.rewritten > 0, "{totals:?}");
        guest.wait_for_exit(PATIENCE).unwrap();
        assert!(guest.load_result().is_right());
    }

    #[test]
    fn memory_is_rewritten_at_the_stated_rate() {
        let memory = MemoryLoad { mib: 128, rewrite_mib_per_second: 16, hot_percent: 100 };
        let mut guest = Guest::boot(GuestSpec::new().memory_mib(256).memory_load(memory).workload_socket()).unwrap();
        guest.wait_for_load(PATIENCE).unwrap();
        std::thread::sleep(Duration::from_secs(3));
        let load_result = guest.finish(PATIENCE).unwrap();
        assert!(load_result.is_right(), "{load_result:?}");
        let seconds = guest.intervals().last().unwrap().1.at - guest.intervals()[0].1.at;
        let mib = load_result.memory.rewritten / 256;
        println!("{mib} MiB rewritten in about {seconds:?}");
        assert_eq!(load_result.memory.pages, 128 * 256);
        // A machine that is busy may have kept the guest from it, but nothing makes it faster.
        assert!(mib >= 8 && mib as f64 <= 16.0 * (seconds.as_secs_f64() + 1.5), "{mib} MiB in {seconds:?}");
    }
}
