//! A libvirt domain on its way to another host: what libvirt there is given as its definition.

use std::path::PathBuf;

use quick_xml::events::{BytesStart, Event};
use quick_xml::{Reader, Writer};
use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};
use crate::options::attributes;
use crate::plan::{ExportAddress, RECONNECT_SECONDS};

/// A domain, as libvirt describes it where it runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DomainDefinition {
    /// Its name.
    pub name: String,
    /// Its UUID.
    pub uuid: String,
    /// Its XML as it runs, for another libvirt.
    pub live: String,
    /// Its XML for the next start; none of a transient domain.
    pub persistent: Option<String>,
    /// Where the sockets of its migration are, on both hosts: libvirt knows one path for both.
    pub folder: PathBuf,
}

/// What the target's libvirt is given.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetDomain {
    /// Its XML as it is to run there.
    pub live: String,
    /// Its XML for the next start there; none of a transient domain.
    pub persistent: Option<String>,
    /// Which libvirt of the target: `system` or `session`.
    pub instance: String,
    /// Where its QEMU takes the memory.
    pub socket: PathBuf,
}

/// Attributes of `<driver>` that only an image has.
const OF_THE_IMAGE: [&str; 2] = ["io", "discard_no_unref"];

/// Puts every disk of `disks` (by its name in the guest, as `vda`) on its export, and leaves everything else as it was. Gives the XML
/// and how many disks were put so.
///
/// # Errors
/// `Invalid` if it is not XML.
pub fn retarget_domain(xml: &str, disks: &[(String, ExportAddress)]) -> Result<(String, usize)> {
    let broken = |error: &dyn std::fmt::Display| Error::new(ErrorKind::Invalid, format!("domain XML: {error}"));
    let mut reader = Reader::from_str(xml);
    let mut writer = Writer::new(Vec::new());
    let mut path: Vec<String> = Vec::new();
    // Which disk it is stands behind what must be changed: a disk is written once it is whole.
    let mut disk: Option<Vec<Event<'_>>> = None;
    let mut placed = 0;
    loop {
        let event = reader.read_event().map_err(|error| broken(&error))?;
        if matches!(event, Event::Eof) {
            break;
        }
        if let Event::Start(element) = &event {
            path.push(String::from_utf8_lossy(element.name().as_ref()).into_owned());
            if path == ["domain", "devices", "disk"] {
                disk = Some(Vec::new());
            }
        }
        let is_whole = matches!(event, Event::End(_)) && path == ["domain", "devices", "disk"];
        if matches!(event, Event::End(_)) {
            path.pop();
        }
        match &mut disk {
            Some(events) => events.push(event),
            None => writer.write_event(event).map_err(|error| broken(&error))?,
        }
        if is_whole && let Some(events) = disk.take() {
            let target = target_of(&events);
            let export = disks.iter().find(|(name, _)| *name == target).map(|(_, export)| export);
            placed += usize::from(export.is_some());
            let events = match export {
                Some(export) => on_export(events, export),
                None => events,
            };
            for event in events {
                writer.write_event(event).map_err(|error| broken(&error))?;
            }
        }
    }
    let xml = String::from_utf8(writer.into_inner()).map_err(|error| broken(&error))?;
    Ok((xml, placed))
}

/// What is known below a disk's `<source>` and `<driver>`: it is put anew, or says nothing that the guest sees.
const BELOW_SOURCE: [&str; 5] = ["seclabel", "host", "reconnect", "privateData", "encryption"];
const BELOW_DRIVER: [&str; 1] = ["metadata_cache"];

/// What another host would not get of the disks of `disks` (by their names in the guest): elements below `<source>` or `<driver>` that
/// are not known here, such as a slice of a file. Each with its disk, as `vda: <source><slices>`.
///
/// # Errors
/// `Invalid` if it is not XML.
pub fn untold_of_disks(xml: &str, disks: &[String]) -> Result<Vec<String>> {
    let broken = |error: &dyn std::fmt::Display| Error::new(ErrorKind::Invalid, format!("domain XML: {error}"));
    let mut reader = Reader::from_str(xml);
    let mut path: Vec<String> = Vec::new();
    let (mut target, mut unknown, mut found) = (String::new(), Vec::new(), Vec::new());
    loop {
        let event = reader.read_event().map_err(|error| broken(&error))?;
        let is_empty = matches!(event, Event::Empty(_));
        match &event {
            Event::Eof => return Ok(found),
            Event::Start(element) | Event::Empty(element) => {
                path.push(String::from_utf8_lossy(element.name().as_ref()).into_owned());
                let words: Vec<&str> = path.iter().map(String::as_str).collect();
                match words.as_slice() {
                    ["domain", "devices", "disk"] => (target, unknown) = (String::new(), Vec::new()),
                    ["domain", "devices", "disk", "target"] => {
                        let name = attributes(element).into_iter().find(|(name, _)| name == "dev");
                        target = name.map(|(_, name)| name).unwrap_or_default();
                    }
                    ["domain", "devices", "disk", "source", below] if !BELOW_SOURCE.contains(below) => {
                        unknown.push(format!("<source><{below}>"));
                    }
                    ["domain", "devices", "disk", "driver", below] if !BELOW_DRIVER.contains(below) => {
                        unknown.push(format!("<driver><{below}>"));
                    }
                    _ => {}
                }
            }
            _ => {}
        }
        if is_empty || matches!(event, Event::End(_)) {
            if path == ["domain", "devices", "disk"] && disks.contains(&target) {
                found.extend(unknown.drain(..).map(|what| format!("{target}: {what}")));
            }
            path.pop();
        }
    }
}

/// The elements of a disk's events, with how deep each is in the disk.
fn with_depth<'a, 'b>(events: &'b [Event<'a>]) -> impl Iterator<Item = (usize, &'b Event<'a>)> {
    let mut depth = 0_usize;
    events.iter().map(move |event| {
        if matches!(event, Event::End(_)) {
            depth = depth.saturating_sub(1);
        }
        let own = depth;
        if matches!(event, Event::Start(_)) {
            depth += 1;
        }
        (own, event)
    })
}

/// The name in the guest of the disk that these events are.
fn target_of(events: &[Event<'_>]) -> String {
    let target = with_depth(events).find_map(|(depth, event)| match event {
        Event::Start(element) | Event::Empty(element) if depth == 1 && element.name().as_ref() == b"target" => {
            attributes(element).into_iter().find(|(name, _)| name == "dev").map(|(_, value)| value)
        }
        _ => None,
    });
    target.unwrap_or_default()
}

/// The disk with an export of ours in the place of its image.
fn on_export<'a>(events: Vec<Event<'a>>, export: &ExportAddress) -> Vec<Event<'a>> {
    let mut changed = Vec::new();
    let mut depth = 0_usize;
    let mut is_left_out = false;
    for event in events {
        if matches!(event, Event::End(_)) {
            depth = depth.saturating_sub(1);
        }
        let own = depth;
        if matches!(event, Event::Start(_)) {
            depth += 1;
        }
        let element = match &event {
            Event::Start(element) | Event::Empty(element) => Some(element.to_owned()),
            _ => None,
        };
        let name = element.as_ref().map(|element| String::from_utf8_lossy(element.name().as_ref()).into_owned());
        match (own, element, name.as_deref()) {
            (0, Some(element), Some("disk")) => changed.push(Event::Start(with(&element, ("type", "network"), &[]))),
            // What describes the image: its source, what is below it, caches of its metadata.
            (1, Some(element), Some(name @ ("driver" | "source" | "backingStore" | "mirror" | "encryption"))) => {
                is_left_out = matches!(event, Event::Start(_));
                if name == "driver" {
                    changed.push(Event::Empty(with(&element, ("type", "raw"), &OF_THE_IMAGE)));
                } else if name == "source" {
                    changed.extend(source_of(export));
                }
            }
            (1, None, _) if is_left_out && matches!(event, Event::End(_)) => is_left_out = false,
            _ if is_left_out && own > 0 => {}
            _ => changed.push(event),
        }
    }
    changed
}

/// An export as a disk's source. A libvirt that does not know of waiting for one passes over `reconnect`.
fn source_of(export: &ExportAddress) -> [Event<'static>; 4] {
    let socket = export.socket.display().to_string();
    let source = BytesStart::new("source").with_attributes([("protocol", "nbd"), ("name", export.name.as_str())]);
    let host = BytesStart::new("host").with_attributes([("transport", "unix"), ("socket", socket.as_str())]);
    let delay = RECONNECT_SECONDS.to_string();
    let reconnect = BytesStart::new("reconnect").with_attributes([("delay", delay.as_str())]);
    let end = source.to_end().into_owned();
    let [host, reconnect] = [host, reconnect].map(|element| Event::Empty(element.into_owned()));
    [Event::Start(source.into_owned()), host, reconnect, Event::End(end)]
}

/// `element` with one attribute set, and without those called `dropped`.
fn with(element: &BytesStart<'_>, (name, value): (&str, &str), dropped: &[&str]) -> BytesStart<'static> {
    let mut changed = BytesStart::new(String::from_utf8_lossy(element.name().as_ref()).into_owned());
    for (key, kept) in attributes(element) {
        if key != name && !dropped.contains(&key.as_str()) {
            changed.push_attribute((key.as_str(), kept.as_str()));
        }
    }
    changed.push_attribute((name, value));
    changed
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const XML: &str = "<domain type='kvm'><name>web1</name><devices>
      <disk type='file' device='disk'>
        <driver name='qemu' type='qcow2' cache='none' io='native' discard='unmap'>
          <metadata_cache><max_size unit='KiB'>1024</max_size></metadata_cache>
        </driver>
        <source file='/images/a.qcow2'><seclabel model='dac' relabel='no'/></source>
        <backingStore type='file'><format type='raw'/><source file='/not/this'/></backingStore>
        <target dev='vda' bus='virtio'/><address type='pci' slot='0x05'/>
      </disk>
      <disk type='file' device='cdrom'><source file='/images/b.iso'/><target dev='sda'/><readonly/></disk>
    </devices></domain>";

    fn exports() -> Vec<(String, ExportAddress)> {
        vec![("vda".into(), ExportAddress { socket: "/run/th/web1-vda.sock".into(), name: "web1-vda".into() })]
    }

    #[test]
    fn a_disk_is_put_on_its_export_and_everything_else_stays_as_it_was() {
        let (xml, placed) = retarget_domain(XML, &exports()).expect("well formed");
        assert_eq!(placed, 1);
        for kept in ["<name>web1</name>", "<address type='pci' slot='0x05'/>", "<source file='/images/b.iso'/>"] {
            assert!(xml.contains(kept), "{xml}");
        }
        for expected in [
            "<disk device=\"disk\" type=\"network\">",
            "<driver name=\"qemu\" cache=\"none\" discard=\"unmap\" type=\"raw\"/>",
            "<source protocol=\"nbd\" name=\"web1-vda\"><host transport=\"unix\" socket=\"/run/th/web1-vda.sock\"/>\
             <reconnect delay=\"900\"/></source>",
        ] {
            assert!(xml.contains(expected), "{expected} in {xml}");
        }
        for gone in ["a.qcow2", "backingStore", "/not/this", "metadata_cache", "seclabel", "native"] {
            assert!(!xml.contains(gone), "{gone} in {xml}");
        }
        // At the next host it is put on another one.
        let (again, placed) = retarget_domain(&xml, &exports()).expect("well formed");
        assert_eq!((again.matches("<source").count(), placed), (2, 1), "{again}");
        assert_eq!(retarget_domain(XML, &[]).expect("well formed"), (XML.to_owned(), 0));
    }

    #[test]
    fn what_another_host_would_not_get_of_a_disk_is_named() {
        let disks = ["vda".to_owned()];
        assert_eq!(untold_of_disks(XML, &disks).expect("well formed"), Vec::<String>::new());
        let sliced = XML.replace(
            "<source file='/images/a.qcow2'>",
            "<source file='/images/a.qcow2'><slices><slice type='storage' offset='1' size='2'/></slices>\
             <reservations managed='yes'/>",
        );
        let found = untold_of_disks(&sliced, &disks).expect("well formed");
        assert_eq!(found, ["vda: <source><slices>", "vda: <source><reservations>"]);
        assert_eq!(untold_of_disks(&sliced, &["sda".to_owned()]).expect("well formed"), Vec::<String>::new());
        let threads = XML.replace("<metadata_cache>", "<iothreads><iothread id='1'/></iothreads><metadata_cache>");
        assert_eq!(untold_of_disks(&threads, &disks).expect("well formed"), ["vda: <driver><iothreads>"]);
    }

    proptest! {
        #[test]
        fn damaged_xml_is_never_a_panic(position in 0_usize..900, byte in 32_u8..127) {
            let mut xml = XML.as_bytes().to_vec();
            let position = position % xml.len();
            xml[position] = byte;
            let _ = retarget_domain(&String::from_utf8_lossy(&xml), &exports());
            let _ = untold_of_disks(&String::from_utf8_lossy(&xml), &["vda".to_owned()]);
        }
    }
}
