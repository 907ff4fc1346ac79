//! The limit of a file's length, which ends whoever is not prepared for it.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use block::{BlockDevice, Bytes, Data, Mutation};
use env::{EnvRef, RealEnv};
use nbd::NbdDevice;
use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};

use crate::support::{HANG, World, signal, target, wait};

const LIMIT: u64 = 1 << 20;

/// A write at `offset` of the volume at `uri`, as soon as that is served.
fn write(uri: &str, offset: u64) -> block::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("an event loop");
    let start = Instant::now();
    runtime.block_on(async {
        let env: EnvRef = Arc::new(RealEnv::new());
        let uri = uri.parse().expect("an address");
        let device = loop {
            match NbdDevice::connect(&uri, &env).await {
                Ok(device) => break device,
                Err(error) => assert!(start.elapsed() < HANG, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        device.write(Mutation::data(Bytes(offset), Data::copy_of(&[7; 4096]))).await
    })
}

fn fails_only_behind_the_limit(uri: &str) {
    for _ in 0..2 {
        write(uri, 2 * LIMIT).expect_err("it is behind the limit");
        write(uri, 0).expect("the volume is served all the same");
    }
}

/// The command line under the limit.
fn limited(world: &World, arguments: &[&str]) -> Command {
    let program = world.command(arguments);
    let mut limited = Command::new("prlimit");
    limited.arg(format!("--fsize={LIMIT}")).arg(program.get_program()).args(program.get_args());
    limited
}

#[test]
fn a_write_behind_the_limit_of_a_files_length_fails_and_ends_nothing() {
    let mut world = World::new();
    let limit = Rlimit { current: Some(LIMIT), maximum: None };
    let daemon = Pid::from_raw(i32::try_from(world.pid()).expect("small"));
    prlimit(daemon, Resource::Fsize, limit).expect("limited");
    let image = world.image("x.img", 4 * LIMIT, 65536);
    let cached = world.image("y.img", 4 * LIMIT, 65536);
    let x = world.attach("x", &image);
    let y = world.attach("y", format!("{},cache=page", cached.display()).as_ref());
    for uri in [&x, &y] {
        fails_only_behind_the_limit(uri);
    }
    world.json(&["volume", "detach", "y"]);

    let copied = world.path("copy.img");
    let output =
        limited(&world, &["copy", &target(&cached), "--to", &target(&copied)]).output().expect("prlimit is there");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code().is_some_and(|code| code > 0), "{:?} {said}", output.status);
    assert!(said.contains("File too large") && !copied.exists(), "{said}");

    world.kill();
    let state = world.text("state");
    let mut rescue = limited(&world, &["rescue", "x", "--state-dir", &state]);
    let mut rescue = rescue.stdout(Stdio::null()).spawn().expect("prlimit is there");
    fails_only_behind_the_limit(&x);
    signal(&rescue, Signal::TERM);
    assert!(wait(&mut rescue).success());
}
