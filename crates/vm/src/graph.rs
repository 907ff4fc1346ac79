//! QEMU's block graph, read tolerantly: what is not understood is left out, never an error.
//!
//! The graph is the truth. Everything that decides what to do next (idempotent steps, recovery, release) reads it
//! first. Reading never drains, so it is safe while our export is disconnected.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::error::{Error, ErrorKind, Result};
use crate::qmp::Qmp;

/// One block node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Node {
    /// Its name; `#block123` if nobody gave it one.
    pub name: String,
    /// Its driver: `raw`, `qcow2`, `file`, `host_device`, `nbd`, ...
    pub driver: String,
    /// What it opened, as QEMU shows it: a path, an NBD URI, or `json:{...}`.
    pub filename: String,
    /// Whether it is read-only.
    pub read_only: bool,
    /// `off`, `on` or `unmap`.
    pub detect_zeroes: String,
    /// Whether it bypasses the host's page cache.
    pub cache_direct: bool,
    /// Whether it drops flushes.
    pub cache_no_flush: bool,
    /// Whether it is encrypted.
    pub is_encrypted: bool,
    /// How many backing files are below it.
    pub backing_depth: u64,
    /// What its own header names as below it, if it names anything.
    pub backing_name: Option<String>,
    /// Its size as a disk.
    pub virtual_bytes: Option<u64>,
    /// What its format tells of itself.
    pub format_specific: Value,
    /// The names of its dirty bitmaps.
    pub bitmaps: Vec<String>,
}

impl Node {
    /// Whether QEMU made its name up; such a node cannot be reopened.
    #[must_use]
    pub fn is_implicit(&self) -> bool {
        self.name.starts_with('#')
    }

    fn parse(value: &Value) -> Option<Self> {
        let text = |name: &str| value[name].as_str().unwrap_or_default().to_owned();
        let image = &value["image"];
        let bitmaps = value["dirty-bitmaps"].as_array().into_iter().flatten();
        let mut bitmaps: Vec<String> =
            bitmaps.map(|bitmap| bitmap["name"].as_str().unwrap_or("unnamed").to_owned()).collect();
        let stored = image["format-specific"]["data"]["bitmaps"].as_array().into_iter().flatten();
        bitmaps.extend(stored.map(|bitmap| bitmap["name"].as_str().unwrap_or("unnamed").to_owned()));
        Some(Self {
            name: value["node-name"].as_str()?.to_owned(),
            driver: text("drv"),
            filename: text("file"),
            read_only: value["ro"].as_bool().unwrap_or_default(),
            detect_zeroes: value["detect_zeroes"].as_str().unwrap_or("off").to_owned(),
            cache_direct: value["cache"]["direct"].as_bool().unwrap_or_default(),
            cache_no_flush: value["cache"]["no-flush"].as_bool().unwrap_or_default(),
            is_encrypted: value["encrypted"].as_bool().unwrap_or_default(),
            backing_depth: value["backing_file_depth"].as_u64().unwrap_or_default(),
            backing_name: value["backing_file"].as_str().map(str::to_owned),
            virtual_bytes: image["virtual-size"].as_u64(),
            format_specific: image["format-specific"]["data"].clone(),
            bitmaps,
        })
    }
}

/// What a guest device hangs on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Frontend {
    /// The name of its block backend: `-drive`'s id, or empty.
    pub backend: String,
    /// The device's QOM path; empty while no device uses the backend.
    pub qom_path: String,
    /// The node at its root; `None` for an empty drive.
    pub root: Option<String>,
    /// Whether its medium can be taken out.
    pub is_removable: bool,
    /// The throttle group of the backend itself (`-drive throttling.*`), if it has one.
    pub throttle_group: Option<String>,
    /// `ok`, `nospace` or `failed`, where the device says.
    pub io_status: Option<String>,
}

impl Frontend {
    /// The id that somebody gave the device.
    #[must_use]
    pub fn device_id(&self) -> Option<&str> {
        self.qom_path.strip_prefix("/machine/peripheral/")?.split('/').next()
    }

    fn parse(value: &Value) -> Option<Self> {
        let inserted = &value["inserted"];
        let qdev = value["qdev"].as_str().unwrap_or_default();
        // QEMU shows the id where the device itself has one and the path where it is part of another device.
        let qom_path = match qdev {
            "" => String::new(),
            path if path.starts_with('/') => path.to_owned(),
            id => format!("/machine/peripheral/{id}"),
        };
        Some(Self {
            backend: value["device"].as_str()?.to_owned(),
            qom_path,
            root: inserted["node-name"].as_str().map(str::to_owned),
            is_removable: value["removable"].as_bool().unwrap_or_default(),
            throttle_group: inserted["group"].as_str().map(str::to_owned),
            io_status: value["io-status"].as_str().map(str::to_owned),
        })
    }
}

/// A parent's hold of a child. Parents are nodes, block backends (by name or by their device's path) and jobs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Edge {
    /// The parent's name.
    pub parent: String,
    /// `block-driver`, `block-backend` or `block-job`.
    pub parent_type: String,
    /// What the child is to the parent: `file`, `backing`, `root`, ...
    pub name: String,
    /// The child node's name.
    pub child: String,
}

/// A running block job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Job {
    /// Its id.
    pub id: String,
    /// `mirror`, `backup`, `commit`, `stream`, ...
    pub kind: String,
}

/// The block graph of one VM at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Graph {
    /// Every node.
    pub nodes: Vec<Node>,
    /// Every guest device's backend.
    pub frontends: Vec<Frontend>,
    /// Every hold.
    pub edges: Vec<Edge>,
    /// The jobs that have not ended.
    pub jobs: Vec<Job>,
    /// Whether the guest runs.
    pub is_running: bool,
    /// QEMU's word for the guest's state: `running`, `paused`, `prelaunch`, `shutdown`, `io-error`, ...
    pub run_state: String,
    /// QEMU's word for how far a migration of its own has come, if there was one: `setup`, `active`, `completed`, ...
    pub migration: Option<String>,
}

impl Graph {
    /// Reads the graph.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn read(qmp: &Qmp) -> Result<Self> {
        // Asked together and answered in order: one wait instead of five, while a guest may be stopped.
        let (nodes, frontends, edges, jobs, status, migration) = futures::join!(
            qmp.execute("query-named-block-nodes", json!({ "flat": true })),
            qmp.execute("query-block", json!({})),
            qmp.execute("x-debug-query-block-graph", json!({})),
            qmp.execute("query-block-jobs", json!({})),
            qmp.execute("query-status", json!({})),
            qmp.execute("query-migrate", json!({})),
        );
        let edges = match edges {
            Ok(value) => value,
            // A later QEMU may have dropped it; then nodes tell their children themselves.
            Err(error) if error.kind() == ErrorKind::Qemu => Value::Null,
            Err(error) => return Err(error),
        };
        let (nodes, frontends, jobs, status) = (nodes?, frontends?, jobs?, status?);
        let migration = match migration {
            Ok(told) => told["status"].as_str().map(str::to_owned),
            Err(error) if error.kind() == ErrorKind::Qemu => None,
            Err(error) => return Err(error),
        };
        Ok(Self { migration, ..Self::parse(&nodes, &frontends, &edges, &jobs, &status) })
    }

    /// Understands QEMU's answers.
    #[must_use]
    pub fn parse(nodes: &Value, frontends: &Value, edges: &Value, jobs: &Value, status: &Value) -> Self {
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let mut held = parse_edges(edges);
        if held.is_empty() {
            held = list(nodes).iter().flat_map(children_of).collect();
        }
        let job = |value: &Value| Job {
            id: value["device"].as_str().unwrap_or_default().to_owned(),
            kind: value["type"].as_str().unwrap_or("unknown").to_owned(),
        };
        Self {
            nodes: list(nodes).iter().filter_map(Node::parse).collect(),
            frontends: list(frontends).iter().filter_map(Frontend::parse).collect(),
            edges: held,
            jobs: list(jobs).iter().map(job).collect(),
            is_running: status["running"].as_bool().unwrap_or_default(),
            run_state: status["status"].as_str().unwrap_or_default().to_owned(),
            migration: None,
        }
    }

    /// How far a migration of QEMU itself has come that is under way, or that has taken the VM elsewhere. A VM that
    /// came here by one tells of that as `completed`, too, and runs.
    #[must_use]
    pub fn migration_under_way(&self) -> Option<&str> {
        const OVER: [&str; 4] = ["none", "completed", "cancelled", "failed"];
        let has_left = ["postmigrate", "finish-migrate"].contains(&self.run_state.as_str());
        let status = self.migration.as_deref().filter(|status| !OVER.contains(status));
        status.or_else(|| has_left.then_some(self.run_state.as_str()))
    }

    /// The node called `name`.
    #[must_use]
    pub fn node(&self, name: &str) -> Option<&Node> {
        self.nodes.iter().find(|node| node.name == name)
    }

    /// The child that `parent` holds as `name`.
    #[must_use]
    pub fn child(&self, parent: &str, name: &str) -> Option<&Node> {
        let edge = self.edges.iter().find(|edge| edge.parent == parent && edge.name == name)?;
        self.node(&edge.child)
    }

    /// Everyone who holds `node`.
    pub fn holders<'a>(&'a self, node: &'a str) -> impl Iterator<Item = &'a Edge> {
        self.edges.iter().filter(move |edge| edge.child == node)
    }

    /// The device at `qom_path`.
    #[must_use]
    pub fn frontend(&self, qom_path: &str) -> Option<&Frontend> {
        self.frontends.iter().find(|frontend| frontend.qom_path == qom_path && !qom_path.is_empty())
    }

    /// The nodes from `top` down along `file`, `top` first.
    #[must_use]
    pub fn chain(&self, top: &str) -> Vec<&Node> {
        let mut chain: Vec<&Node> = Vec::new();
        let mut next = self.node(top);
        while let Some(node) = next {
            // A graph has no cycles; a false one must not hang us.
            if chain.len() > 64 {
                break;
            }
            chain.push(node);
            next = self.child(&node.name, "file");
        }
        chain
    }

    /// Whether a walk downwards from `top` comes to `node`, by whatever holds.
    #[must_use]
    pub fn reaches(&self, top: &str, node: &str) -> bool {
        self.below(vec![top]).contains(node)
    }

    /// The lowest node between `root` and `node` that keeps what is written to itself, as an external snapshot does: `node` is below it as
    /// its backing file. A node of a block job or a filter that passes writes on is none, and neither is one that `root` does not reach: a
    /// snapshot that was committed back, or what a backup reads through.
    #[must_use]
    pub fn cover_of(&self, root: &str, node: &str) -> Option<&Node> {
        let used = self.below(vec![root]);
        // Each passes on what it is given as a whole, though the graph calls what is below them backing.
        const PASSING: [&str; 2] = ["mirror_top", "commit_top"];
        let (mut open, mut seen) = (vec![node], BTreeSet::new());
        while let Some(child) = open.pop() {
            if !seen.insert(child) {
                continue;
            }
            let parents = self.holders(child).filter(|edge| edge.parent_type == "block-driver");
            for edge in parents.filter(|edge| used.contains(edge.parent.as_str())) {
                let Some(parent) = self.node(&edge.parent) else { continue };
                if edge.name == "backing" && !PASSING.contains(&parent.driver.as_str()) {
                    return Some(parent);
                }
                open.push(&parent.name);
            }
        }
        None
    }

    /// The jobs that touch `nodes`, by graph where it tells, by name otherwise. A backup reads through a filter that it
    /// has put above the node: whatever a job reaches downwards it touches.
    #[must_use]
    pub fn jobs_on(&self, nodes: &[&str], backend: &str) -> Vec<&Job> {
        let touches = |job: &&Job| {
            let reached = self.reached_by_job(&job.id);
            nodes.iter().any(|node| reached.contains(node) || *node == job.id)
                || (!backend.is_empty() && job.id == backend)
        };
        self.jobs.iter().filter(touches).collect()
    }

    /// The nodes below a job.
    fn reached_by_job(&self, id: &str) -> BTreeSet<&str> {
        let of_job = |edge: &&Edge| edge.parent_type == "block-job" && edge.parent == id;
        self.below(self.edges.iter().filter(of_job).map(|edge| edge.child.as_str()).collect())
    }

    /// These nodes and all below them.
    fn below<'a>(&'a self, mut open: Vec<&'a str>) -> BTreeSet<&'a str> {
        let mut reached = BTreeSet::new();
        while let Some(node) = open.pop() {
            if reached.insert(node) {
                let below = self.edges.iter().filter(|edge| edge.parent_type == "block-driver" && edge.parent == node);
                open.extend(below.map(|edge| edge.child.as_str()));
            }
        }
        reached
    }
}

fn parse_edges(graph: &Value) -> Vec<Edge> {
    let name_of = |id: &Value| {
        let found = graph["nodes"].as_array()?.iter().find(|node| node["id"] == *id)?;
        Some((found["name"].as_str()?.to_owned(), found["type"].as_str().unwrap_or_default().to_owned()))
    };
    let parse = |edge: &Value| {
        let (parent, parent_type) = name_of(&edge["parent"])?;
        let (child, _) = name_of(&edge["child"])?;
        Some(Edge { parent, parent_type, name: edge["name"].as_str()?.to_owned(), child })
    };
    graph["edges"].as_array().into_iter().flatten().filter_map(parse).collect()
}

/// What later versions tell with each node: `"children": [{"child": "file", "node-name": "..."}]`.
fn children_of(node: &Value) -> Vec<Edge> {
    let Some(parent) = node["node-name"].as_str() else { return Vec::new() };
    let parse = |child: &Value| {
        let text = |name: &str| Some(child[name].as_str()?.to_owned());
        let (name, child) = (text("child")?, text("node-name")?);
        Some(Edge { parent: parent.to_owned(), parent_type: "block-driver".to_owned(), name, child })
    };
    node["children"].as_array().into_iter().flatten().filter_map(parse).collect()
}

/// The iothread of the device at `qom_path`, or of the controller that its bus belongs to.
///
/// # Errors
/// As [`Qmp::execute`], but for answers of QEMU's that there is no such property.
pub(crate) async fn iothread_of(qmp: &Qmp, qom_path: &str) -> Result<Option<String>> {
    if let Some(iothread) = link(qmp, qom_path, "iothread").await? {
        return Ok(object_id(&iothread));
    }
    let Some(bus) = link(qmp, qom_path, "parent_bus").await? else { return Ok(None) };
    let Some((controller, _)) = bus.rsplit_once('/') else { return Ok(None) };
    let iothread = link(qmp, controller, "iothread").await?;
    Ok(iothread.as_deref().and_then(object_id))
}

async fn link(qmp: &Qmp, path: &str, property: &str) -> Result<Option<String>> {
    match qmp.execute("qom-get", json!({ "path": path, "property": property })).await {
        Ok(Value::String(value)) if !value.is_empty() => Ok(Some(value)),
        Ok(_) => Ok(None),
        Err(error) if error.kind() == ErrorKind::Qemu => Ok(None),
        Err(error) => Err(error),
    }
}

fn object_id(path: &str) -> Option<String> {
    Some(path.strip_prefix("/objects/")?.to_owned())
}

/// Whether the device at `qom_path` spreads its queues over several iothreads (`iothread-vq-mapping`, QEMU 9).
pub(crate) async fn has_queue_mapping(qmp: &Qmp, qom_path: &str) -> Result<bool> {
    match qmp.execute("qom-get", json!({ "path": qom_path, "property": "iothread-vq-mapping" })).await {
        Ok(Value::Array(mapping)) => Ok(!mapping.is_empty()),
        Ok(_) => Ok(false),
        Err(error) if error.kind() == ErrorKind::Qemu => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether the device at `qom_path` lets others write to its disk (`share-rw`).
pub(crate) async fn shares_writes(qmp: &Qmp, qom_path: &str) -> Result<bool> {
    match qmp.execute("qom-get", json!({ "path": qom_path, "property": "share-rw" })).await {
        Ok(shares) => Ok(shares.as_bool().unwrap_or_default()),
        Err(error) if error.kind() == ErrorKind::Qemu => Ok(false),
        Err(error) => Err(error),
    }
}

/// The device's type, such as `virtio-blk-device` or `scsi-hd`.
pub(crate) async fn device_type(qmp: &Qmp, qom_path: &str) -> Result<String> {
    Ok(link(qmp, qom_path, "type").await?.unwrap_or_default())
}

/// An error for a node that is not there.
pub(crate) fn no_such_disk(wanted: &str, graph: &Graph) -> Error {
    let known: Vec<&str> = graph.frontends.iter().filter_map(|frontend| frontend.root.as_deref()).collect();
    let context = format!("no disk goes by {wanted}; this VM's are: {}", known.join(", "));
    Error::new(ErrorKind::NotFound, context)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NODES: &str = r##"[{"node-name":"d0","drv":"raw","file":"/a","ro":false,"detect_zeroes":"unmap",
        "cache":{"direct":true,"no-flush":false,"writeback":true},"image":{"virtual-size":65536},
        "children":[{"child":"file","node-name":"#block7"}],"new":{}},
        {"node-name":"#block7","drv":"file","file":"/a","image":{"virtual-size":65536}},{"drv":"nameless"}]"##;
    const FRONTENDS: &str = r#"[{"device":"","qdev":"vda","inserted":{"node-name":"d0"},"removable":false},
        {"device":"cd0","removable":true},{"qdev":"nothing else"}]"#;
    const EDGES: &str = r##"{"nodes":[{"id":1,"type":"block-backend","name":"vda"},
        {"id":2,"type":"block-driver","name":"d0"},{"id":3,"type":"block-driver","name":"#block7"}],
        "edges":[{"name":"root","parent":1,"child":2},{"name":"file","parent":2,"child":3},{"name":"lost","parent":9,"child":3}]}"##;

    fn parse(nodes: &str, frontends: &str, edges: &str) -> Graph {
        let json = |text: &str| serde_json::from_str(text).unwrap_or_default();
        let status = json!({ "running": true, "status": "running" });
        Graph::parse(&json(nodes), &json(frontends), &json(edges), &Value::Null, &status)
    }

    #[test]
    fn what_is_not_understood_is_left_out_and_the_rest_stays() {
        let graph = parse(NODES, FRONTENDS, EDGES);
        assert_eq!(graph.nodes.len(), 2);
        assert_eq!(graph.frontends.len(), 2);
        assert_eq!(graph.edges.len(), 2);
        assert_eq!(graph.frontends[0].qom_path, "/machine/peripheral/vda");
        let chain: Vec<&str> = graph.chain("d0").iter().map(|node| node.name.as_str()).collect();
        assert_eq!(chain, ["d0", "#block7"]);
        let node = graph.node("d0").expect("it is there");
        assert!(node.cache_direct && !node.cache_no_flush && !node.is_implicit());
        assert_eq!(node.virtual_bytes, Some(65536));
    }

    #[test]
    fn a_snapshot_covers_a_disk_as_long_as_its_device_goes_through_it() {
        let nodes = r#"[{"node-name":"d0","drv":"raw"},{"node-name":"over","drv":"qcow2"},{"node-name":"cor","drv":"copy-on-read"}]"#;
        let edges = r#"{"nodes":[{"id":1,"type":"block-driver","name":"d0"},{"id":2,"type":"block-driver","name":"over"},
            {"id":3,"type":"block-driver","name":"cor"}],
            "edges":[{"name":"backing","parent":2,"child":3},{"name":"file","parent":3,"child":1}]}"#;
        let graph = parse(nodes, FRONTENDS, edges);
        assert_eq!(graph.cover_of("over", "d0").map(|node| node.name.as_str()), Some("over"));
        assert!(graph.cover_of("cor", "d0").is_none() && graph.cover_of("d0", "d0").is_none());
        assert!(graph.reaches("over", "d0") && !graph.reaches("d0", "over"));
    }

    #[test]
    fn without_the_debugging_command_the_nodes_tell_their_children() {
        let graph = parse(NODES, FRONTENDS, "null");
        assert_eq!(graph.child("d0", "file").expect("it is there").name, "#block7");
    }

    #[test]
    fn a_graph_that_claims_a_cycle_does_not_hang() {
        let edges = r#"{"nodes":[{"id":2,"type":"block-driver","name":"d0"}],
            "edges":[{"name":"file","parent":2,"child":2}]}"#;
        assert!(parse(NODES, FRONTENDS, edges).chain("d0").len() < 100);
    }

    proptest! {
        #[test]
        fn damaged_answers_are_never_a_panic(which in 0_usize..3, position in 0_usize..600, byte in 32_u8..127) {
            let mut texts = [NODES.to_owned(), FRONTENDS.to_owned(), EDGES.to_owned()];
            let mut bytes = std::mem::take(&mut texts[which]).into_bytes();
            let position = position % bytes.len();
            bytes[position] = byte;
            texts[which] = String::from_utf8_lossy(&bytes).into_owned();
            let graph = parse(&texts[0], &texts[1], &texts[2]);
            for node in &graph.nodes {
                let _ = graph.chain(&node.name);
            }
        }
    }
}
