//! A network of guests beside two hosts: a bridge and a tap device on each host, and a client behind a switch that
//! joins both. The switch learns where a MAC is, so traffic follows a guest that moves as soon as it announces itself.
//!
//! ```text
//!   namespace FOLDER-a            namespace FOLDER-client              namespace FOLDER-b
//!   guest0 (tap) ── br0 ── veth ── port-a ── br0 ── port-b ── veth ── br0 ── guest0 (tap)
//!                                        10.88.0.1
//! ```

use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Context;

use crate::network_client::{connect, within};
use crate::two_hosts::ip;
use crate::{Side, TwoHosts};

/// The address of the client.
const CLIENT: &str = "10.88.0.1/24";
/// A bridge that neither waits before it forwards nor keeps multicast from anybody.
const BRIDGE: &str = "type bridge stp_state 0 forward_delay 0 mcast_snooping 0";

/// The network. Dropping it removes the client; the hosts' bridges and tap devices go with the hosts.
#[derive(Debug)]
pub struct GuestNetwork {
    client: String,
}

impl GuestNetwork {
    /// Joins both hosts and a client. Both hosts get tap devices of these names; a guest that is `10.88.0.x/24` on one
    /// of them and the client reach each other.
    ///
    /// # Errors
    /// The networks cannot be made.
    pub fn new<'a>(hosts: &TwoHosts, taps: impl IntoIterator<Item = &'a str>) -> anyhow::Result<Self> {
        let pair = hosts.namespace(Side::A).trim_end_matches("-a");
        let network = Self { client: format!("{pair}-client") };
        let client = &network.client;
        ip(&format!("netns add {client}"))?;
        ip(&format!("-n {client} link set lo up"))?;
        ip(&format!("-n {client} link add br0 {BRIDGE}"))?;
        ip(&format!("-n {client} addr add {CLIENT} dev br0"))?;
        ip(&format!("-n {client} link set br0 up"))?;
        for side in Side::BOTH {
            let (host, port) = (hosts.namespace(side), port(side));
            ip(&format!("-n {host} link add br0 {BRIDGE}"))?;
            ip(&format!("-n {host} link set br0 up"))?;
            ip(&format!("-n {host} link add guests type veth peer name {port} netns {client}"))?;
            ip(&format!("-n {host} link set guests master br0 up"))?;
            ip(&format!("-n {client} link set {port} master br0 up"))?;
        }
        for tap in taps {
            Side::BOTH.into_iter().try_for_each(|side| Self::add_tap(hosts, side, tap))?;
        }
        Ok(network)
    }

    /// Makes a tap device on one host that is part of the network.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn add_tap(hosts: &TwoHosts, side: Side, tap: &str) -> anyhow::Result<()> {
        let host = hosts.namespace(side);
        ip(&format!("-n {host} tuntap add dev {tap} mode tap vnet_hdr"))?;
        ip(&format!("-n {host} link set {tap} master br0 up"))
    }

    /// The client's network namespace.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.client
    }

    /// A program of the client, not yet run; it dies with the thread that runs it.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "ip", "netns", "exec", &self.client, program]).stdin(Stdio::null());
        command
    }

    /// Connects the client to a guest's port, and waits until somebody listens there.
    ///
    /// # Errors
    /// Nobody does within `limit`, or the client's network cannot be entered.
    pub fn connect(&self, guest: SocketAddr, limit: Duration) -> anyhow::Result<TcpStream> {
        within(&self.client, move || connect(guest, limit))
    }

    /// Behind which host the switch believes a MAC to be; `None` before it has heard of it.
    ///
    /// # Errors
    /// The switch cannot be asked.
    pub fn side_of(&self, mac: &str) -> anyhow::Result<Option<Side>> {
        let output = Command::new("bridge").args(["-n", &self.client, "fdb", "show", "br", "br0"]).output();
        let output = output.context("starting bridge: run `make setup`")?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let mac = mac.to_lowercase();
        let entry = text.lines().find(|line| line.starts_with(&mac)).unwrap_or_default();
        Ok(Side::BOTH.into_iter().find(|side| entry.split(' ').any(|word| word == port(*side))))
    }
}

impl Drop for GuestNetwork {
    fn drop(&mut self) {
        // The cables go with it. One that was never made cannot be removed.
        let _ = ip(&format!("netns del {}", self.client));
    }
}

/// What the switch calls the port of a host.
fn port(side: Side) -> &'static str {
    match side {
        Side::A => "port-a",
        Side::B => "port-b",
    }
}
