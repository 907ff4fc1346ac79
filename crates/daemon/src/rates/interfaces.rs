//! Network interfaces as the kernel tells of them: which one has an address, how fast it is, what it has carried.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use env::EnvRef;
use migrate::stream::LinkCounters;

use super::MigrationTraffic;
use crate::platform::Interfaces;

/// The kernel's interfaces, and what the configuration says of their speed.
pub(crate) struct KernelInterfaces {
    env: EnvRef,
    carried: Arc<MigrationTraffic>,
    folder: PathBuf,
    /// In bytes a second; counts more than what the kernel says.
    speeds: BTreeMap<String, u64>,
}

impl KernelInterfaces {
    /// The interfaces of this process's network namespace.
    pub(crate) fn new(env: EnvRef, carried: Arc<MigrationTraffic>, speeds: BTreeMap<String, u64>) -> Self {
        Self { env, carried, folder: PathBuf::from("/sys/class/net"), speeds }
    }

    fn read(&self, interface: &str, addresses: &[IpAddr]) -> Option<LinkCounters> {
        let at_ns = self.env.now().0.as_nanos() as u64;
        let received = self.number(interface, "statistics/rx_bytes")?;
        let sent = self.number(interface, "statistics/tx_bytes")?;
        // In one moment with the kernel's, and behind them: what comes between is nobody else's.
        let migrations = self.carried.over(addresses);
        let capacity = self.speed(interface);
        Some(LinkCounters { interface: interface.to_owned(), at_ns, received, sent, capacity, migrations })
    }

    /// In bytes a second; 0 if nobody knows.
    fn speed(&self, interface: &str) -> u64 {
        // Absent, an error or -1 for what is no card, or has no cable.
        let megabits = || self.number(interface, "speed").unwrap_or(0);
        self.speeds.get(interface).copied().unwrap_or_else(|| megabits() * 125_000)
    }

    fn number(&self, interface: &str, name: &str) -> Option<u64> {
        std::fs::read_to_string(self.folder.join(interface).join(name)).ok()?.trim().parse().ok()
    }
}

impl Interfaces for KernelInterfaces {
    fn look(&self, addresses: &[IpAddr]) -> Vec<Option<LinkCounters>> {
        let names = names();
        let mut own: BTreeMap<&str, Vec<IpAddr>> = BTreeMap::new();
        for (address, interface) in &names {
            own.entry(interface).or_default().push(*address);
        }
        let counters = |address: &IpAddr| {
            let interface = names.get(&address.to_canonical())?;
            self.read(interface, &own[&**interface])
        };
        addresses.iter().map(counters).collect()
    }
}

/// Every address of this machine with the interface that has it; none if the kernel does not say.
fn names() -> BTreeMap<IpAddr, String> {
    let interfaces = nix::ifaddrs::getifaddrs().into_iter().flatten();
    let named = interfaces.filter_map(|interface| {
        let address = interface.address?;
        let number = match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
            (Some(address), _) => IpAddr::from(address.ip()),
            (None, Some(address)) => IpAddr::from(address.ip()),
            (None, None) => return None,
        };
        Some((number, interface.interface_name))
    });
    named.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interfaces(speeds: BTreeMap<String, u64>) -> KernelInterfaces {
        let env: EnvRef = Arc::new(env::RealEnv::new());
        KernelInterfaces::new(Arc::clone(&env), MigrationTraffic::new(&env), speeds)
    }

    #[test]
    fn the_machine_s_own_loop_is_found_by_its_address_and_counts() {
        let interfaces = interfaces(BTreeMap::new());
        let addresses = ["127.0.0.1", "::ffff:127.0.0.1", "192.0.2.77"].map(|text| text.parse().expect("an address"));
        let found = interfaces.look(&addresses);
        let [Some(first), Some(mapped), None] = &*found else { panic!("{found:?}") };
        assert_eq!((&*first.interface, &*mapped.interface), ("lo", "lo"));
        assert_eq!(first.capacity, 0, "a loop has no speed");
        assert!(mapped.received >= first.received && mapped.at_ns >= first.at_ns);
    }

    #[test]
    fn a_speed_is_the_configuration_s_before_the_kernel_s() {
        let folder = tempfile::tempdir().expect("a temporary directory");
        for (name, speed) in [("eth0", "1000\n"), ("eth1", "1000\n"), ("veth0", "-1\n")] {
            let statistics = folder.path().join(name).join("statistics");
            std::fs::create_dir_all(&statistics).expect("made");
            std::fs::write(folder.path().join(name).join("speed"), speed).expect("written");
            std::fs::write(statistics.join("rx_bytes"), "17\n").expect("written");
            std::fs::write(statistics.join("tx_bytes"), "4\n").expect("written");
        }
        let speeds = BTreeMap::from([("eth1".to_owned(), 7)]);
        let interfaces = KernelInterfaces { folder: folder.path().to_owned(), ..interfaces(speeds) };
        let read = |name| interfaces.read(name, &[]).map(|link| (link.received, link.sent, link.capacity));
        assert_eq!(read("eth0"), Some((17, 4, 125_000_000)));
        assert_eq!(read("eth1"), Some((17, 4, 7)));
        assert_eq!(read("veth0"), Some((17, 4, 0)));
        assert_eq!(read("eth2"), None);
    }
}
