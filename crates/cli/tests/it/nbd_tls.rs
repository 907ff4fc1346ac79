//! NBD through TLS as a user meets it: moves and copies to servers that are not ours, exports of ours, and what is said when
//! it does not come about.

use std::path::Path;
use std::process::Command;

use crate::support::load::Load;
use crate::support::server::{Server, empty, text};
use crate::support::{World, check_refusal, same, target, tool};
use transhume_guest::{Authority, GOOD_YEARS};

const MIB: u64 = 1 << 20;

/// Certificates of both sides for this machine, in the folder `name` of the world.
fn certificates(world: &World, name: &str) -> (Authority, std::path::PathBuf) {
    let (authority, folder) = (Authority::new(name).expect("made"), world.path(name));
    authority.write(&folder).expect("written");
    authority.write_server(&folder, &["localhost", "127.0.0.1"], GOOD_YEARS, 7).expect("written");
    authority.write_client(&folder, GOOD_YEARS).expect("written");
    (authority, folder)
}

/// nbdkit with an empty file of so many bytes, and its address for clients that look for certificates in `folder`.
fn nbdkit(world: &World, folder: &Path, far: &Path, more: &[&str]) -> (Server, String) {
    let folder = text(folder);
    let certificates = format!("--tls-certificates={folder}");
    let server = Server::nbdkit(world, &[&[certificates.as_str()], more, &["file", text(far)]].concat());
    let uri = format!("nbds+unix:///?socket={}&tls-certificates={folder}", server.socket.display());
    (server, uri)
}

#[test]
fn a_volume_moves_to_an_encrypted_export_under_load_lives_there_and_comes_back() {
    let mut world = World::new();
    let (_, folder) = certificates(&world, "pki");
    let image = world.image("disk.img", 16 * MIB, 65536);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, 41);
    let far = empty(&world, "far.img", 16 * MIB);
    let require = ["--tls=require", "--tls-verify-peer"];
    let (server, to) = nbdkit(&world, &folder, &far, &require);
    let report = world.json(&["move", "x", "--to", &to, "--verify", "full"]);
    assert_eq!((&report["state"], &report["equal"]), (&"done".into(), &true.into()), "{report}");
    load.goes_on();
    // Both at once: the daemon has the address on record, and with it where the certificates are.
    world.kill();
    drop(server);
    world.start();
    let (_server, again) = nbdkit(&world, &folder, &far, &require);
    assert_eq!(world.json(&["volume", "show", "x"])["backend"], *again);
    load.goes_on();
    world.refused(
        &["move", "x", "--to", &again.replace("&tls-certificates", "&tls-hostname=localhost&tls-certificates")],
        12,
        "is on",
    );
    let back = world.path("back.img");
    let report = world.json(&["move", "x", "--to", &target(&back), "--verify", "full"]);
    assert_eq!((&report["state"], &report["equal"]), (&"done".into(), &true.into()), "{report}");
    load.goes_on();
    same(&back, &load.finish());
}

#[test]
fn a_cold_disk_is_copied_out_of_one_encrypted_server_and_into_another() {
    let world = World::without_daemon();
    let (_, folder) = certificates(&world, "pki");
    let image = world.image("disk.img", 8 * MIB, MIB as usize);
    let far = empty(&world, "far.img", 8 * MIB);
    let (_kit, to) = nbdkit(&world, &folder, &far, &["--tls=require"]);
    world.json(&["copy", &target(&image), "--to", &to, "--verify", "full"]);
    let (socket, copy) = (world.path("qemu.sock"), empty(&world, "copy.img", 8 * MIB));
    let object = format!("tls-creds-x509,id=t,endpoint=server,dir={}", text(&folder));
    let arguments = ["--persistent", "--shared=8", "--format=raw", "--object", &object, "--tls-creds", "t", "--socket"];
    let qemu = Server::start("qemu-nbd", socket.clone(), &[&arguments[..], &[text(&socket), text(&copy)]].concat());
    let onward = format!("nbds+unix:///?socket={}&tls-certificates={}", socket.display(), text(&folder));
    let report = world.json(&["copy", &to, "--to", &onward, "--verify", "full"]);
    assert_eq!(report["verified"], true, "{report}");
    drop(qemu);
    same(&copy, &std::fs::read(&image).expect("read"));
}

#[test]
fn what_keeps_a_connection_from_being_encrypted_is_said_with_what_to_do_and_nothing_is_changed() {
    let world = World::new();
    let image = world.image("disk.img", 4 * MIB, 65536);
    world.attach("x", &image);
    let (authority, folder) = certificates(&world, "pki");
    let far = empty(&world, "far.img", 4 * MIB);
    let (server, to) = nbdkit(&world, &folder, &far, &["--tls=require", "--tls-verify-peer"]);
    let refused = |to: &str, code, part: &str| {
        world.refused(&["move", "x", "--to", to], code, part);
        world.refused(&["copy", to, "--to", &target(&world.path("new.img"))], code, part);
        assert!(!world.path("new.img").exists(), "a target was left behind");
    };
    let plain = to.replace("nbds", "nbd").split('&').next().expect("a part").to_owned();
    refused(&plain, 52, "takes encrypted connections only: write nbds instead of nbd");
    let (_, others) = certificates(&world, "others");
    refused(&to.replace("/pki", "/others"), 53, "is not signed by an authority of");
    refused(&format!("{to}&tls-hostname=far.example"), 53, "and not for far.example");
    refused(&to.replace("/pki", "/nowhere"), 54, "nowhere/ca-cert.pem: No such file");
    for part in ["tls-verify-peer=0", "tls-psk-file=/k"] {
        world.refused(&["move", "x", "--to", &format!("{to}&{part}")], 2, "with certificates that are looked at");
    }
    for own in ["client-cert.pem", "client-key.pem"] {
        std::fs::copy(others.join(own), folder.join(own)).expect("copied");
    }
    refused(&to, 52, "this client's certificate");
    for own in ["client-cert.pem", "client-key.pem"] {
        std::fs::remove_file(folder.join(own)).expect("removed");
    }
    refused(&to, 52, "no certificate");
    drop(server);

    let (server, to) = nbdkit(&world, &folder, &far, &["--tls=off"]);
    refused(&to, 52, "speaks no TLS, and nothing is sent to it unencrypted");
    drop(server);
    authority.write_server(&folder, &["localhost"], 2001..2002, 8).expect("written");
    let (server, to) = nbdkit(&world, &folder, &far, &["--tls=require"]);
    refused(&to, 54, "has expired on 2002-01-01");
    drop(server);
    assert!(std::fs::read(&far).expect("read").iter().all(|byte| *byte == 0), "a target that was refused was written");
}

#[test]
fn an_encrypted_export_of_ours_is_for_clients_with_certificates() {
    let mut world = World::new();
    let (_, folder) = certificates(&world, "pki");
    let image = world.image("disk.img", 4 * MIB, 65536);
    let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr()).expect("a port").port();
    let (place, backend) = (format!("127.0.0.1:{port}"), target(&image));
    let attach =
        |name: &str, export: &str| world.run(&["volume", "attach", name, "--backend", &backend, "--export", export]);
    let no = |export: &str, code, part| check_refusal(export, &attach("x", export), code, part);
    no(&format!("nbds://{place}/x"), 2, "names the directory of its certificates");
    no(&format!("nbds://{place}/x?tls-certificates=/nonexistent"), 54, "/nonexistent/ca-cert.pem");
    no(&format!("nbds://{place}/x?tls-hostname=a&tls-certificates=/c"), 2, "tls-hostname is for clients");
    let uri = format!("nbds://{place}/x?tls-certificates={}", text(&folder));
    assert!(attach("x", &uri).status.success(), "{}", world.log());
    let second = world.image("second.img", MIB, 65536);
    let arguments = ["volume", "attach", "y", "--backend", &target(&second), "--export", &format!("nbd://{place}/y")];
    world.refused(&arguments, 20, "is encrypted, with the certificates in");

    let (out, expected) = (world.path("out.img"), std::fs::read(&image).expect("read"));
    tool("nbdcopy", &[&uri, text(&out)]);
    same(&out, &expected);
    // The address is all that a restart has.
    world.kill();
    world.start();
    let options = format!("driver=nbd,host=127.0.0.1,port={port},export=x,tls-creds=t");
    let object = format!("tls-creds-x509,id=t,endpoint=client,dir={}", text(&folder));
    tool("qemu-io", &["--object", &object, "--image-opts", &options, "-c", "write -P 7 0 1M"]);
    assert!(std::fs::read(&image).expect("read")[..1 << 20].iter().all(|byte| *byte == 7));
    for own in ["client-cert.pem", "client-key.pem"] {
        std::fs::remove_file(folder.join(own)).expect("removed");
    }
    for address in [uri.clone(), format!("nbd://{place}/x")] {
        let output = Command::new("nbdinfo").arg(&address).output().expect("nbdinfo is missing: run `make setup`");
        assert!(!output.status.success(), "{address} let somebody in without a certificate");
    }
    world.wait_for_log("a client of an encrypted export was not let in");
}
