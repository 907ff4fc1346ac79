//! The block nodes that a command line makes, and how they hang together.

use serde_json::{Map, Value};

use super::words::{Item, Pieces, json_object};
use crate::options::{flag, nest, split};

/// Drivers of files and devices of the host.
const LOCAL: [&str; 3] = ["file", "host_device", "host_cdrom"];

/// A `-blockdev`, or a node that is given within one.
#[derive(Clone, Debug)]
pub(super) struct Node {
    /// Which word it is in.
    pub(super) item: usize,
    /// The keys that lead to it from there.
    pub(super) path: Vec<String>,
    pub(super) options: Map<String, Value>,
    /// The nodes above, by their place in the list, and the key by which they have it.
    parents: Vec<(usize, String)>,
}

impl Node {
    fn text(&self, key: &str) -> &str {
        self.options.get(key).and_then(Value::as_str).unwrap_or_default()
    }

    pub(super) fn name(&self) -> &str {
        self.text("node-name")
    }

    pub(super) fn image(&self) -> &str {
        self.text("filename")
    }

    /// Whether it opens something that only this host has: a file, or an export over a unix socket.
    pub(super) fn is_local(&self) -> bool {
        let is_unix = self.options.contains_key("path")
            || self.options.get("server").is_some_and(|server| server["type"] == "unix");
        LOCAL.contains(&self.text("driver")) || self.is_nbd() && is_unix
    }

    pub(super) fn is_nbd(&self) -> bool {
        self.text("driver") == "nbd"
    }

    /// What to call it.
    pub(super) fn show(&self) -> String {
        let image = if self.image().is_empty() { "an NBD export of this host" } else { self.image() };
        match self.name() {
            "" => image.to_owned(),
            name => format!("{name} ({image})"),
        }
    }
}

/// All of them.
pub(super) struct Nodes(pub(super) Vec<Node>);

impl Nodes {
    pub(super) fn of(items: &[Item]) -> Self {
        let mut found = Self(Vec::new());
        for (index, item) in items.iter().enumerate().filter(|(_, item)| item.name() == "blockdev") {
            let options = blockdev(item.value());
            found.add(index, Vec::new(), options, None);
        }
        let by_name: Vec<(usize, usize, String)> = found
            .0
            .iter()
            .enumerate()
            .flat_map(|(parent, node)| node.options.iter().map(move |(key, value)| (parent, key, value)))
            .filter(|(_, key, _)| !["node-name", "driver", "filename"].contains(&key.as_str()))
            .filter_map(|(parent, key, value)| {
                let name = value.as_str().filter(|name| !name.is_empty())?;
                let child = found.0.iter().position(|node| node.name() == name)?;
                Some((parent, child, key.clone()))
            })
            .collect();
        for (parent, child, key) in by_name {
            found.0[child].parents.push((parent, key));
        }
        found
    }

    fn add(&mut self, item: usize, path: Vec<String>, options: Map<String, Value>, parent: Option<(usize, String)>) {
        let place = self.0.len();
        let node = Node { item, path: path.clone(), options: options.clone(), parents: parent.into_iter().collect() };
        self.0.push(node);
        for (key, value) in options {
            if let Value::Object(inner) = value
                && inner.contains_key("driver")
            {
                let path = path.iter().cloned().chain([key.clone()]).collect();
                self.add(item, path, inner, Some((place, key)));
            }
        }
    }

    /// Whether the guest's writes come to a node by one that is called `name`, or it is that one itself.
    pub(super) fn is_below(&self, node: usize, name: &str) -> bool {
        self.reaches(node, name, self.0.len())
    }

    fn reaches(&self, node: usize, name: &str, depth: usize) -> bool {
        let above = || self.0[node].parents.iter().filter(|(_, key)| key != "backing");
        self.0[node].name() == name || depth > 0 && above().any(|(parent, _)| self.reaches(*parent, name, depth - 1))
    }

    /// Whether nobody writes to a node: it says so, or everything above it does.
    pub(super) fn is_read_only(&self, node: usize) -> bool {
        self.never_written(node, self.0.len())
    }

    fn never_written(&self, node: usize, depth: usize) -> bool {
        let this = &self.0[node];
        let says_so = this.options.get("read-only").and_then(flag) == Some(true.into());
        let only_read = |(parent, key): &(usize, String)| key == "backing" || self.never_written(*parent, depth - 1);
        says_so
            || this.text("driver") == "host_cdrom"
            || depth > 0 && !this.parents.is_empty() && this.parents.iter().all(only_read)
    }
}

/// A `-blockdev`, nested.
pub(super) fn blockdev(value: &str) -> Map<String, Value> {
    json_object(value).unwrap_or_else(|| nest(&split(value, "driver")))
}

/// A `-drive`, or one of the short options for it.
pub(super) struct Drive {
    pub(super) item: usize,
    pub(super) id: String,
    /// What its format node is called; empty if nobody has named it.
    pub(super) node: String,
    /// What it opens; empty for a drive without a medium.
    pub(super) image: String,
    is_remote: bool,
    is_read_only: bool,
    pub(super) is_snapshot: bool,
}

/// The short options: what else they are as a `-drive`.
const SHORT: [(&str, &str); 9] = [
    ("hda", "index=0,media=disk"),
    ("hdb", "index=1,media=disk"),
    ("hdc", "index=2,media=disk"),
    ("hdd", "index=3,media=disk"),
    ("fda", "if=floppy,index=0"),
    ("fdb", "if=floppy,index=1"),
    ("sd", "if=sd"),
    ("mtdblock", "if=mtd"),
    ("pflash", "if=pflash"),
];

impl Drive {
    pub(super) fn all(items: &[Item]) -> Vec<Self> {
        let numbered = items.iter().enumerate();
        numbered.filter_map(|(item, what)| Some(Self::of(item, &drive_pieces(what)?))).collect()
    }

    fn of(item: usize, pieces: &Pieces) -> Self {
        let file = pieces.get("file").or_else(|| pieces.first()).unwrap_or_default();
        let image = if file.is_empty() { pieces.get("file.filename").unwrap_or_default() } else { file };
        let driver = pieces.get("file.driver").unwrap_or("file");
        let is_unix =
            driver == "nbd" && pieces.get("file.server.type").or_else(|| pieces.get("server.type")) == Some("unix");
        // `PROTOCOL:...`, unless the colon is a file's own.
        let has_protocol = file.split('/').next().is_some_and(|start| start.contains(':'));
        let is_unix = is_unix || file.starts_with("nbd:unix:") || file.starts_with("nbd+unix:");
        let is_file =
            LOCAL.contains(&driver) && !has_protocol || file.starts_with("file:") || file.starts_with("json:");
        let reads = ["readonly", "read-only", "file.read-only"].iter().any(|key| pieces.is_on(key));
        Self {
            item,
            id: pieces.get("id").unwrap_or_default().to_owned(),
            node: pieces.get("node-name").unwrap_or_default().to_owned(),
            image: if image.is_empty() && is_unix { "an NBD export of this host" } else { image }.to_owned(),
            is_remote: !is_file && !is_unix,
            is_read_only: (reads || pieces.get("media") == Some("cdrom")) && !is_unix,
            is_snapshot: pieces.is_on("snapshot"),
        }
    }

    /// Whether the guest writes to a file of this host with it.
    pub(super) fn writes_here(&self) -> bool {
        !self.image.is_empty() && !self.is_remote && !self.is_read_only
    }
}

/// A word as a `-drive` would have it; none if it is another option.
pub(super) fn drive_pieces(item: &Item) -> Option<Pieces> {
    if item.name() == "drive" {
        return Some(Pieces::parse(item.value()));
    }
    let (_, more) = SHORT.iter().find(|(name, _)| *name == item.name())?;
    let mut pieces = Pieces::parse(more);
    // A short option takes its value as it is, commas included.
    pieces.set("file", item.value());
    Some(pieces)
}
