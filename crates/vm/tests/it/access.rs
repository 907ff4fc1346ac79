//! A QEMU that runs as another user than we: what it may not open is passed to it open, and the rest is reported.

use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;

use crate::common::{Daemon, Given, Kind, Server, Vm, node_names, options_shown};
use serde_json::{Value, json};
use transhume_vm::{ErrorKind, Plan, Sources, adopt, release};

const NOBODY: u32 = 65534;

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("chmod");
}

fn text_of(shown: &[Value]) -> String {
    Value::from(shown).to_string()
}

/// A VM under load whose QEMU runs as nobody, who owns the image.
async fn of_nobody(kind: Kind) -> Vm {
    let vm = Vm::start_with(kind, &as_nobody());
    vm.load_goes_on().await;
    set_mode(vm.directory.path(), 0o755);
    chown(&vm.image, Some(NOBODY), Some(NOBODY)).expect("chown, as root");
    vm
}

/// How this QEMU is told to change its user: version 10 knows no `-runas` any more.
fn as_nobody() -> [&'static str; 2] {
    let help = std::process::Command::new("qemu-system-x86_64").arg("--help").output();
    let help = help.expect("qemu-system-x86_64 runs: run `make setup`").stdout;
    match String::from_utf8_lossy(&help).contains("-runas") {
        true => ["-runas", "nobody"],
        false => ["-run-with", "user=nobody"],
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_that_qemu_may_not_open_is_handed_over_open_and_adopted_again_later() {
    for (given, format, iothread) in
        [(Given::Blockdev, "raw", true), (Given::Blockdev, "qcow2", false), (Given::Drive, "raw", false)]
    {
        let kind = Kind { given, format, iothread };
        let vm = of_nobody(kind).await;
        let qmp = vm.qmp().await;
        let before = options_shown(&qmp).await;
        let server = Server::start(&vm).await;
        chown(&server.address.socket, Some(NOBODY), None).expect("chown, as root");
        let plan = Plan::adopt(&qmp, &vm.sources(), &vm.request(&server)).await.expect("a plan");
        let mut daemon = Daemon::new(&vm.image);
        adopt(&qmp, &plan, &mut daemon).await.unwrap_or_else(|error| panic!("{kind:?}: {error}: {}", vm.log()));
        vm.load_goes_on().await;
        // A directory that only root may enter, and a file that only root may open.
        let vault = vm.directory.path().join("vault");
        std::fs::create_dir(&vault).expect("created");
        set_mode(&vault, 0o700);
        let image = vault.join("image");
        std::fs::hard_link(&vm.image, &image).expect("linked");
        chown(&image, Some(0), Some(0)).expect("chown");
        set_mode(&image, 0o600);
        let back = Plan::release(&plan.disk, &image, None, true);
        release(&qmp, &back, &mut daemon).await.unwrap_or_else(|error| panic!("{kind:?}: {error}: {}", vm.log()));
        // All is as before, but for the name.
        let old = vm.image.display().to_string();
        assert_eq!(text_of(&options_shown(&qmp).await).replace("/dev/fdset/0", &old), text_of(&before), "{kind:?}");
        vm.load_goes_on().await;
        // QEMU opens it again by its name, for reading only and back.
        let sets = qmp.execute("query-fdsets", json!({})).await.expect("QEMU answers");
        assert_eq!(sets[0]["fds"].as_array().map(Vec::len), Some(2), "{kind:?}: {sets}");
        qmp.execute("system_reset", json!({})).await.expect("reset");
        vm.load_goes_on().await;

        drop(server);
        let server = Server::start_at(&image, &vm.directory.path().join("nbd"), format == "qcow2").await;
        chown(&server.address.socket, Some(NOBODY), None).expect("chown");
        let sources = Sources { remembered: vec![back.remembered()], ..vm.sources() };
        let request = transhume_vm::AdoptionRequest { node: "vda".to_owned(), ..vm.request(&server) };
        let again = Plan::adopt(&qmp, &sources, &request).await.unwrap_or_else(|error| panic!("{kind:?}: {error}"));
        assert_eq!(again.disk.image, image, "{kind:?}");
        adopt(&qmp, &again, &mut daemon).await.unwrap_or_else(|error| panic!("{kind:?}: {error}: {}", vm.log()));
        let sets = qmp.execute("query-fdsets", json!({})).await.expect("QEMU answers");
        assert_eq!(sets, json!([]), "{kind:?}: the image is still open, and locked");
        vm.load_goes_on().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_was_refused_what_and_what_mends_it_is_said_in_one_line() {
    let kind = Kind { given: Given::Blockdev, format: "raw", iothread: false };
    let vm = of_nobody(kind).await;
    let qmp = vm.qmp().await;
    let names = node_names(&qmp).await;
    let vault = vm.directory.path().join("vault");
    std::fs::create_dir(&vault).expect("created");
    set_mode(&vault, 0o700);
    let server = Server::start_at(&vm.image, &vault.join("nbd"), false).await;
    let plan = Plan::adopt(&qmp, &vm.sources(), &vm.request(&server)).await.expect("a plan");
    let mut daemon = Daemon::new(&vm.image);
    let told = |error: transhume_vm::Error, parts: &[&str]| {
        let said = error.to_string();
        assert_eq!(error.kind(), ErrorKind::Denied, "{said}");
        assert!(!said.contains('\n') && parts.iter().all(|part| said.contains(part)), "{said}");
    };
    let error = adopt(&qmp, &plan, &mut daemon).await.expect_err("nobody entered root's directory");
    let mend = format!("`setfacl -m u:nobody:x {}`", vault.display());
    told(error, &["user nobody", "our socket", "mode 0700, owner root", &mend]);
    assert_eq!(node_names(&qmp).await, names);

    set_mode(&vault, 0o711);
    set_mode(&server.address.socket, 0o600);
    let error = adopt(&qmp, &plan, &mut daemon).await.expect_err("nobody connected to root's socket");
    told(error, &["our socket", "mode 0600, owner root", "`chown nobody "]);

    chown(&server.address.socket, Some(NOBODY), None).expect("chown");
    adopt(&qmp, &plan, &mut daemon).await.unwrap_or_else(|error| panic!("{error}: {}", vm.log()));
    let names = node_names(&qmp).await;
    let back = Plan::release(&plan.disk, &vault.join("nosuch"), None, true);
    let error = release(&qmp, &back, &mut daemon).await.expect_err("there is no such image");
    told(error, &["the image", "the daemon cannot open"]);
    assert_eq!(node_names(&qmp).await, names);
    vm.load_goes_on().await;
}
