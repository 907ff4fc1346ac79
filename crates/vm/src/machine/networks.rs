//! What a command line says of networks. They are not moved: whoever makes them at the target needs to know of them.

use serde::{Deserialize, Serialize};

use super::description::MachineDescription;
use super::words::{Item, parse};

/// Where a network card of a machine leads.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkBackend {
    /// The backend's name in QEMU; empty if it has none.
    pub id: String,
    /// `tap`, `bridge`, `user`, ...
    pub kind: String,
    /// The interface of the host, of a tap device whose name is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
    /// The bridge that QEMU attaches it to by its helper, if one is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bridge: Option<String>,
    /// How many queues it has; a tap device needs `multi_queue` for more than one.
    pub queues: u32,
    /// The card's address, if the command line says it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// The card's model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
}

impl MachineDescription {
    /// The machine's networks, in the order of the command line.
    #[must_use]
    pub fn networks(&self) -> Vec<NetworkBackend> {
        let items = parse(&self.words);
        let is_backend = |item: &&Item| match item.name() {
            "netdev" => true,
            "nic" | "net" => !["nic", "none"].contains(&value(item, "type").as_str()),
            _ => false,
        };
        items.iter().filter(is_backend).map(|item| backend(item, &items)).collect()
    }
}

fn backend(item: &Item, items: &[Item]) -> NetworkBackend {
    let id = value(item, "id");
    // `-nic` is card and backend in one; a `-netdev` has its card among the devices.
    let is_card = |other: &&Item| other.name() == "device" && !id.is_empty() && value(other, "netdev") == id;
    let card = if item.name() == "nic" { Some(item) } else { items.iter().find(is_card) };
    let of_card = |keys: [&str; 2]| {
        let mut values = keys.iter().map(|key| card.map_or_else(String::new, |card| value(card, key)));
        values.find(|text| !text.is_empty())
    };
    let named = |key: &str| Some(value(item, key)).filter(|text| !text.is_empty());
    NetworkBackend {
        kind: value(item, "type"),
        interface: named("ifname"),
        bridge: named("br"),
        queues: value(item, "queues").parse().unwrap_or(1),
        mac: of_card(["mac", "macaddr"]),
        model: of_card(["driver", "model"]),
        id,
    }
}

/// A key's value; empty if it is not there. A device's first word is its model.
fn value(item: &Item, key: &str) -> String {
    let key = if item.name() == "device" && key == "driver" && !item.value().starts_with('{') { "type" } else { key };
    item.pairs().into_iter().find(|(name, _)| name == key).map(|(_, value)| value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn networks(words: &[&str]) -> Vec<NetworkBackend> {
        let words = words.iter().map(|word| (*word).to_owned()).collect();
        MachineDescription { program: "qemu".to_owned(), words }.networks()
    }

    #[test]
    fn taps_are_found_with_their_cards_in_every_form() {
        let found = networks(&[
            "-netdev",
            "tap,id=net0,ifname=guest0,script=no,queues=4",
            "-device",
            "virtio-net-pci,netdev=net0,mac=52:54:00:88:00:0a",
            "-netdev",
            r#"{"type":"tap","id":"net1","ifname":"guest1"}"#,
            "-device",
            r#"{"driver":"e1000","netdev":"net1","mac":"52:54:00:88:00:0b"}"#,
            "-nic",
            "bridge,br=br7,model=rtl8139,mac=52:54:00:88:00:0c",
            "-net",
            "nic",
        ]);
        let shown: Vec<_> = found.iter().map(|one| (one.kind.as_str(), one.interface.as_deref(), one.queues)).collect();
        assert_eq!(shown, [("tap", Some("guest0"), 4), ("tap", Some("guest1"), 1), ("bridge", None, 1)]);
        let cards: Vec<_> = found.iter().map(|one| (one.model.as_deref(), one.mac.as_deref())).collect();
        let expected = [
            (Some("virtio-net-pci"), Some("52:54:00:88:00:0a")),
            (Some("e1000"), Some("52:54:00:88:00:0b")),
            (Some("rtl8139"), Some("52:54:00:88:00:0c")),
        ];
        assert_eq!(cards, expected);
        assert_eq!(found[2].bridge.as_deref(), Some("br7"));
    }

    #[test]
    fn a_machine_without_a_network_has_none() {
        assert_eq!(networks(&["-nic", "none"]).len(), 0);
        assert_eq!(networks(&["-net", "none", "-m", "512"]), []);
    }
}
