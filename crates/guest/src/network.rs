//! A guest's network card.

/// A network card of a guest and what the guest serves there: it answers pings, echoes UDP on port 7 and TCP on port 8,
/// and serves a page on port 80 with the guest's clock and a counter of the pages that were served.
#[derive(Clone, Debug)]
pub struct Network {
    /// The tap device on the host, which exists before the guest boots.
    pub tap: String,
    /// The card's MAC.
    pub mac: String,
    /// The guest's address and how many bits of it are the network's, as `10.88.0.10/24`.
    pub address: String,
    /// More options of the device (`mq=on,vectors=6`), or nothing.
    pub device_options: String,
}

impl Default for Network {
    /// What [`GuestNetwork`](crate::GuestNetwork) expects of its only guest.
    fn default() -> Self {
        Self {
            tap: "guest0".into(),
            mac: "52:54:00:88:00:0a".into(),
            address: "10.88.0.10/24".into(),
            device_options: String::new(),
        }
    }
}

impl Network {
    /// The guest's address alone.
    #[must_use]
    pub fn host(&self) -> &str {
        self.address.split('/').next().unwrap_or_default()
    }

    /// The words of QEMU's command line that attach it.
    pub(crate) fn words(&self) -> Vec<String> {
        let Self { tap, mac, device_options, .. } = self;
        let more = if device_options.is_empty() { String::new() } else { format!(",{device_options}") };
        vec![
            "-netdev".into(),
            format!("tap,id=net0,ifname={tap},script=no,downscript=no"),
            "-device".into(),
            format!("virtio-net-pci,id=net0-device,netdev=net0,mac={mac}{more}"),
        ]
    }

    /// The lines of the guest's init that bring it up and start what is served.
    pub(crate) fn init_lines(&self) -> String {
        format!(
            "busybox ip link set lo up\n\
             busybox ip addr add {} dev eth0\n\
             busybox ip link set eth0 up\n\
             guest-load serve </dev/null >/dev/console 2>&1 &\n",
            self.address
        )
    }
}
