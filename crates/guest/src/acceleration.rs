//! Whether KVM works here: not whether it opens, but whether a kernel boots with it.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use crate::initramfs;

/// How a guest is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acceleration {
    /// Emulated: works everywhere, slowly.
    Tcg,
    /// By the processor.
    Kvm,
}

/// Long enough for a kernel's first line under KVM (tenths of a second), short enough not to wait for a hanging KVM. In
/// some nested machines KVM opens and then hangs.
const TRIAL: Duration = Duration::from_secs(1);

impl Acceleration {
    /// KVM if a trial boot says its first line within a second, otherwise emulation.
    #[must_use]
    pub fn probe() -> Self {
        if boots_with_kvm() { Self::Kvm } else { Self::Tcg }
    }

    /// QEMU's name of it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcg => "tcg",
            Self::Kvm => "kvm",
        }
    }
}

fn boots_with_kvm() -> bool {
    if std::fs::File::options().read(true).write(true).open("/dev/kvm").is_err() {
        return false;
    }
    let Ok((kernel, _)) = initramfs::kernel() else { return false };
    let trial = Command::new("qemu-system-x86_64")
        .args(["-accel", "kvm", "-nodefaults", "-no-user-config", "-display", "none", "-m", "128", "-no-reboot"])
        .args(["-append", "console=ttyS0 earlyprintk=ttyS0", "-serial", "stdio", "-kernel"])
        .arg(kernel)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let Ok(mut qemu) = trial else { return false };
    let output = qemu.stdout.take().expect("the output was asked for");
    let (sender, receiver) = mpsc::channel();
    let reader = std::thread::spawn(move || {
        let mut lines = BufReader::new(output).lines().map_while(Result::ok);
        if lines.any(|line| line.contains("Linux version")) {
            // The trial may be over: then nobody wants to know any more.
            let _ = sender.send(());
        }
    });
    let boots = receiver.recv_timeout(TRIAL).is_ok();
    // It may have ended by itself; what remains is to reap it.
    let _ = qemu.kill();
    let _ = qemu.wait();
    let _ = reader.join();
    boots
}
