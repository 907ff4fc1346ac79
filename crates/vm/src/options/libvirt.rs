//! A libvirt domain's disks, from its XML.

use quick_xml::Reader;
use quick_xml::events::{BytesStart, Event};
use serde_json::{Map, Value, json};

use crate::error::{Error, ErrorKind, Result};

/// A `<disk>` of a domain.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LibvirtDisk {
    /// The image: `<source file=...>` or `dev=`.
    pub source: String,
    /// The name in the guest: `<target dev=...>`.
    pub target: String,
    /// The id of its device in QEMU, while the domain runs: `<alias name=...>`.
    pub alias: String,
    /// The attributes of `<driver>`.
    pub driver: Vec<(String, String)>,
    /// `<metadata_cache><max_size>`, in bytes.
    pub metadata_cache_bytes: Option<u64>,
    /// Whether it is encrypted.
    pub is_encrypted: bool,
}

/// A libvirt domain.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LibvirtDomain {
    /// Its name.
    pub name: String,
    /// Its UUID.
    pub uuid: String,
    /// Whether it runs: only then the definition has an id.
    pub is_running: bool,
    /// The user that its QEMU runs as, if libvirt says so (`<seclabel model='dac'>`).
    pub user: Option<u32>,
    /// Its disks.
    pub disks: Vec<LibvirtDisk>,
}

/// Attributes of `<driver>` that the guest's device keeps, or that are no option of a block node.
const OF_THE_DEVICE: [&str; 17] = [
    "name",
    "type",
    "cache",
    "error_policy",
    "rerror_policy",
    "ioeventfd",
    "event_idx",
    "queues",
    "queue_size",
    "iothread",
    "iommu",
    "ats",
    "packed",
    "page_per_vq",
    "copy_on_read",
    "statistics",
    "latency_histogram",
];

impl LibvirtDomain {
    /// Reads a domain's XML.
    ///
    /// # Errors
    /// `Invalid` if it is not XML.
    pub fn parse(xml: &str) -> Result<Self> {
        let broken = |error: &dyn std::fmt::Display| Error::new(ErrorKind::Invalid, format!("domain XML: {error}"));
        let mut reader = Reader::from_str(xml);
        let mut domain = Self::default();
        let mut path: Vec<String> = Vec::new();
        let mut unit_factor = 1_u64;
        loop {
            let event = reader.read_event().map_err(|error| broken(&error))?;
            let is_empty = matches!(event, Event::Empty(_));
            match &event {
                Event::Start(element) | Event::Empty(element) => {
                    let name = String::from_utf8_lossy(element.name().as_ref()).into_owned();
                    path.push(name);
                    if path_is(&path, &["domain"]) {
                        domain.is_running = attributes(element).iter().any(|(name, _)| name == "id");
                    } else if path_is(&path, &["domain", "devices", "disk"]) {
                        domain.disks.push(LibvirtDisk::default());
                    } else if path.len() > 3 && path_is(&path[..3], &["domain", "devices", "disk"]) {
                        let below: Vec<&str> = path[3..].iter().map(String::as_str).collect();
                        let disk = domain.disks.last_mut().expect("a disk element was entered");
                        take(disk, &below, element, &mut unit_factor);
                    }
                    if is_empty {
                        path.pop();
                    }
                }
                Event::End(_) => drop(path.pop()),
                Event::Text(text) => {
                    let text = text.decode().map_err(|error| broken(&error))?;
                    if path_is(&path, &["domain", "name"]) {
                        domain.name.push_str(text.trim());
                    } else if path_is(&path, &["domain", "uuid"]) {
                        domain.uuid.push_str(text.trim());
                    } else if path_is(&path, &["domain", "seclabel", "label"]) {
                        // `+64055:+107`; a label of another model is no pair of numbers.
                        let user = text.trim().strip_prefix('+').and_then(|rest| rest.split_once(":+"));
                        domain.user = user.and_then(|(user, _)| user.parse().ok()).or(domain.user);
                    } else if path.last().is_some_and(|last| last == "max_size")
                        && let (Some(disk), Ok(size)) = (domain.disks.last_mut(), text.trim().parse::<u64>())
                    {
                        disk.metadata_cache_bytes = size.checked_mul(unit_factor);
                    }
                }
                Event::Eof => break,
                _ => {}
            }
        }
        Ok(domain)
    }

    /// The disk with this image.
    #[must_use]
    pub fn disk(&self, image: &str) -> Option<&LibvirtDisk> {
        self.disks.iter().find(|disk| disk.source == image && !image.is_empty())
    }

    /// The id that QEMU knows the disk by whose name in the guest is `target` (`vda`, as `virsh domblklist` says it).
    #[must_use]
    pub fn alias_of(&self, target: &str) -> Option<&str> {
        let disk = self.disks.iter().find(|disk| disk.target == target && !target.is_empty())?;
        (!disk.alias.is_empty()).then_some(disk.alias.as_str())
    }

    /// The name in the guest of the disk whose device QEMU calls `device`: by its id, or by a path that has it.
    #[must_use]
    pub fn target_of(&self, device: &str) -> Option<&str> {
        let is_meant = |disk: &&LibvirtDisk| !disk.alias.is_empty() && device.split('/').any(|part| part == disk.alias);
        let disk = self.disks.iter().find(is_meant)?;
        (!disk.target.is_empty()).then_some(disk.target.as_str())
    }
}

fn path_is(path: &[String], expected: &[&str]) -> bool {
    path.iter().map(String::as_str).eq(expected.iter().copied())
}

fn take(disk: &mut LibvirtDisk, below: &[&str], element: &BytesStart<'_>, unit_factor: &mut u64) {
    match below {
        ["driver"] => disk.driver = attributes(element),
        ["source"] => {
            let attributes = attributes(element);
            let source = attributes.into_iter().find(|(name, _)| name == "file" || name == "dev");
            disk.source = source.map(|(_, value)| value).unwrap_or_default();
        }
        ["target"] => {
            let attributes = attributes(element);
            let target = attributes.into_iter().find(|(name, _)| name == "dev");
            disk.target = target.map(|(_, value)| value).unwrap_or_default();
        }
        ["alias"] => {
            let alias = attributes(element).into_iter().find(|(name, _)| name == "name");
            disk.alias = alias.map(|(_, value)| value).unwrap_or_default();
        }
        ["encryption"] | ["source", "encryption"] => disk.is_encrypted = true,
        ["driver", "metadata_cache", "max_size"] => {
            let unit = attributes(element).into_iter().find(|(name, _)| name == "unit").map(|(_, value)| value);
            *unit_factor = match unit.as_deref() {
                Some("k" | "KiB") => 1 << 10,
                Some("M" | "MiB") => 1 << 20,
                Some("G" | "GiB") => 1 << 30,
                _ => 1,
            };
        }
        _ => {}
    }
}

/// An element's attributes that can be read.
pub(crate) fn attributes(element: &BytesStart<'_>) -> Vec<(String, String)> {
    let decode = |attribute: quick_xml::events::attributes::Attribute<'_>| {
        let name = String::from_utf8_lossy(attribute.key.as_ref()).into_owned();
        let value = attribute.decode_and_unescape_value(element.decoder()).ok()?;
        Some((name, value.into_owned()))
    };
    element.attributes().flatten().filter_map(decode).collect()
}

impl LibvirtDisk {
    /// The options that libvirt gives the format and the file node, and what is not understood.
    pub(super) fn options(&self) -> (Map<String, Value>, Map<String, Value>, Vec<String>) {
        let (mut format, mut file) = (Map::new(), Map::from_iter([("auto-read-only".to_owned(), json!(true))]));
        let mut unknown = Vec::new();
        for (name, value) in &self.driver {
            match name.as_str() {
                "io" => drop(file.insert("aio".to_owned(), value.clone().into())),
                "discard" => {
                    format.insert("discard".to_owned(), value.clone().into());
                    file.insert("discard".to_owned(), value.clone().into());
                }
                "detect_zeroes" => drop(format.insert("detect-zeroes".to_owned(), value.clone().into())),
                "discard_no_unref" => drop(format.insert("discard-no-unref".to_owned(), json!(value == "on"))),
                name if OF_THE_DEVICE.contains(&name) => {}
                name => unknown.push(format!("<driver {name}>")),
            }
        }
        if let Some(bytes) = self.metadata_cache_bytes {
            format.insert("cache-size".to_owned(), bytes.into());
        }
        if self.is_encrypted {
            unknown.push("<encryption>".to_owned());
        }
        (format, file, unknown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const XML: &str = "<domain type='kvm' id='7'><name>web&amp;1</name>
      <uuid>59f4ab81-ee60-4b97-b937-ba75986546c2</uuid><devices>
      <disk type='file' device='disk'>
        <driver name='qemu' type='qcow2' cache='none' io='native' discard='unmap' detect_zeroes='unmap' strange='1'>
          <metadata_cache><max_size unit='KiB'>1024</max_size></metadata_cache>
        </driver>
        <source file='/images/a &amp; b.qcow2' index='1'/>
        <backingStore type='file'><source file='/not/this'/></backingStore>
        <target dev='vda' bus='virtio'/><alias name='virtio-disk0'/>
      </disk>
      <disk type='block'><source dev='/dev/vg/lv'/><target dev='vdb'/></disk>
    </devices>
    <seclabel type='dynamic' model='apparmor'><label>libvirt-59f4ab81</label></seclabel>
    <seclabel type='dynamic' model='dac'><label>+64055:+107</label><imagelabel>+1:+2</imagelabel></seclabel></domain>";

    #[test]
    fn disks_are_read_with_their_options() {
        let domain = LibvirtDomain::parse(XML).expect("the XML is well formed");
        let disk = domain.disk("/images/a & b.qcow2").expect("the first disk is there");
        assert_eq!(disk.target, "vda");
        assert_eq!(domain.alias_of("vda"), Some("virtio-disk0"));
        assert_eq!((domain.alias_of("vdb"), domain.alias_of("")), (None, None));
        assert_eq!((domain.uuid.as_str(), domain.is_running), ("59f4ab81-ee60-4b97-b937-ba75986546c2", true));
        assert_eq!(domain.user, Some(64055));
        assert_eq!(domain.target_of("virtio-disk0"), Some("vda"));
        assert_eq!(domain.target_of("/machine/peripheral/virtio-disk0/virtio-backend"), Some("vda"));
        assert_eq!((domain.target_of("virtio-disk01"), domain.target_of("")), (None, None));
        let (format, file, unknown) = disk.options();
        let expected = json!({"discard": "unmap", "detect-zeroes": "unmap", "cache-size": 1 << 20});
        assert_eq!(Value::Object(format), expected);
        assert_eq!(Value::Object(file), json!({"aio": "native", "discard": "unmap", "auto-read-only": true}));
        assert_eq!(unknown, ["<driver strange>"]);
        assert_eq!(domain.disk("/dev/vg/lv").expect("the second disk is there").target, "vdb");
        assert!(domain.disk("/not/this").is_none());
    }

    proptest! {
        #[test]
        fn damaged_xml_is_never_a_panic(position in 0_usize..800, byte in 32_u8..127) {
            let mut xml = XML.as_bytes().to_vec();
            let position = position % xml.len();
            xml[position] = byte;
            let _ = LibvirtDomain::parse(&String::from_utf8_lossy(&xml));
        }
    }
}
