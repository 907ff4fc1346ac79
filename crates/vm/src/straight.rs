//! Whether what a guest writes to a disk comes to our export, and to nothing before it.
//!
//! ```text
//!   device ──▶ known filters ──▶ format node ──▶ export       straight
//!   device ──▶ snapshot ──(backing)──▶ format node ──▶ export  covered: what the guest writes stays in the snapshot
//! ```
//!
//! A graph is looked at when a disk is adopted. Everybody with a monitor may change it afterwards: QEMU tells nobody of an external
//! snapshot, a node that was inserted, or a format node that was opened over another file.

use std::path::Path;

use crate::graph::{Graph, Node};

/// Filters that pass on all that the guest writes.
const FILTERS: [&str; 2] = ["throttle", "copy-on-read"];
/// What understands the bytes of an export.
const FORMATS: [&str; 2] = ["raw", "qcow2"];

/// The way of a guest's writes to an export.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GuestPath<'a> {
    /// Nothing is in it but known filters and the format node.
    Straight,
    /// This node is, and may keep what the guest writes.
    Covered(&'a Node),
    /// No device of the guest comes to the export.
    Elsewhere,
}

impl Graph {
    /// The way of the guest's writes to the export at the unix socket `socket`, which no other export shares.
    #[must_use]
    pub fn path_to(&self, socket: &Path) -> GuestPath<'_> {
        let socket = socket.display().to_string();
        let exports: Vec<&Node> =
            self.nodes.iter().filter(|node| node.driver == "nbd" && names(&node.filename, &socket)).collect();
        let mut found = GuestPath::Elsewhere;
        for root in self.frontends.iter().filter(|it| !it.qom_path.is_empty()).filter_map(|it| it.root.as_deref()) {
            for export in &exports {
                if !self.reaches(root, &export.name) {
                    continue;
                }
                match self.first_between(root, &export.name) {
                    Some(cover) => return GuestPath::Covered(cover),
                    None => found = GuestPath::Straight,
                }
            }
        }
        found
    }

    /// The uppermost node from `root` down to `export` that belongs to no straight way.
    fn first_between(&self, root: &str, export: &str) -> Option<&Node> {
        let mut chain = self.chain(root).into_iter().skip_while(|node| FILTERS.contains(&node.driver.as_str()));
        let top = chain.next()?;
        let below = chain.next();
        let is_format = FORMATS.contains(&top.driver.as_str());
        let is_straight = top.name == export || is_format && below.is_some_and(|node| node.name == export);
        (!is_straight).then_some(top)
    }
}

/// Whether QEMU's name of an export, a URI or JSON, has that socket.
fn names(filename: &str, socket: &str) -> bool {
    let mut from = 0;
    while let Some(at) = filename[from..].find(socket).map(|at| from + at) {
        let before = filename[..at].chars().next_back();
        let after = filename[at + socket.len()..].chars().next();
        if matches!(before, Some('=' | '"')) && matches!(after, None | Some('"' | '&')) {
            return true;
        }
        from = at + 1;
        while !filename.is_char_boundary(from) {
            from += 1;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Edge, Frontend};
    use proptest::prelude::*;

    const SOCKET: &str = "/run/t/web.sock";

    /// A device over these nodes, the first on top: (driver, how it holds the next one).
    fn graph(stack: &[(&str, &str)], filename: &str) -> Graph {
        let name = |index: usize| format!("n{index}");
        let mut graph = Graph::default();
        for (index, (driver, holds)) in stack.iter().enumerate() {
            let filename = if *driver == "nbd" { filename } else { "" };
            graph.nodes.push(Node {
                name: name(index),
                driver: (*driver).to_owned(),
                filename: filename.to_owned(),
                ..Node::default()
            });
            if index + 1 < stack.len() {
                let parent_type = "block-driver".to_owned();
                let (parent, child) = (name(index), name(index + 1));
                graph.edges.push(Edge { parent, parent_type, name: (*holds).to_owned(), child });
                if *holds == "backing" {
                    // An overlay has a file of its own.
                    let own = format!("{}-file", name(index));
                    graph.nodes.push(Node { name: own.clone(), driver: "file".to_owned(), ..Node::default() });
                    let (parent, parent_type) = (name(index), "block-driver".to_owned());
                    graph.edges.push(Edge { parent, parent_type, name: "file".to_owned(), child: own });
                }
            }
        }
        let qom_path = "/machine/peripheral/vda/virtio-backend".to_owned();
        graph.frontends.push(Frontend { qom_path, root: Some(name(0)), ..Frontend::default() });
        graph
    }

    fn uri(socket: &str) -> String {
        format!("nbd+unix:///web?socket={socket}")
    }

    #[test]
    fn what_others_put_over_a_disk_is_named() {
        let over = |stack: &[(&str, &str)]| {
            let graph = graph(stack, &uri(SOCKET));
            match graph.path_to(Path::new(SOCKET)) {
                GuestPath::Straight => "straight".to_owned(),
                GuestPath::Covered(node) => node.name.clone(),
                GuestPath::Elsewhere => "elsewhere".to_owned(),
            }
        };
        let (raw, nbd) = (("raw", "file"), ("nbd", ""));
        assert_eq!(over(&[raw, nbd]), "straight");
        assert_eq!(over(&[nbd]), "straight");
        assert_eq!(over(&[("throttle", "file"), ("copy-on-read", "file"), ("qcow2", "file"), nbd]), "straight");
        assert_eq!(over(&[("qcow2", "backing"), raw, nbd]), "n0");
        assert_eq!(over(&[("throttle", "file"), ("qcow2", "backing"), ("qcow2", "backing"), raw, nbd]), "n1");
        assert_eq!(over(&[("mirror_top", "backing"), raw, nbd]), "n0");
        assert_eq!(over(&[("copy-before-write", "file"), raw, nbd]), "n0");
        // A container within a raw disk would be another disk than the one that was adopted.
        assert_eq!(over(&[("qcow2", "file"), raw, nbd]), "n0");
        assert_eq!(over(&[raw, ("file", "")]), "elsewhere");
    }

    #[test]
    fn an_export_is_known_by_its_whole_socket() {
        let of = |filename: &str| {
            graph(&[("raw", "file"), ("nbd", "")], filename).path_to(Path::new(SOCKET)) == GuestPath::Straight
        };
        assert!(of(&uri(SOCKET)));
        assert!(of(r#"json:{"driver":"nbd","server":{"type":"unix","path":"/run/t/web.sock"},"export":"web"}"#));
        assert!(!of(&uri("/run/t/web.sock2")) && !of(&uri("/other/run/t/web.sock")));
    }

    #[test]
    fn a_snapshot_that_no_device_goes_through_is_none() {
        let mut graph = graph(&[("qcow2", "backing"), ("raw", "file"), ("nbd", "")], &uri(SOCKET));
        // It was committed back: the device is on the format node again.
        graph.frontends[0].root = Some("n1".to_owned());
        assert_eq!(graph.path_to(Path::new(SOCKET)), GuestPath::Straight);
        graph.frontends.clear();
        assert_eq!(graph.path_to(Path::new(SOCKET)), GuestPath::Elsewhere);
    }

    proptest! {
        #[test]
        fn one_node_of_another_kind_anywhere_is_enough(
            filters in proptest::collection::vec(0_usize..2, 0..4),
            has_format in any::<bool>(),
            foreign in proptest::option::of((0_usize..6, 0_usize..4)),
        ) {
            const FOREIGN: [(&str, &str); 4] =
                [("qcow2", "backing"), ("mirror_top", "backing"), ("blkdebug", "file"), ("quorum", "children.0")];
            let mut stack: Vec<(&str, &str)> = filters.iter().map(|filter| (FILTERS[*filter], "file")).collect();
            if has_format {
                stack.push(("raw", "file"));
            }
            let place = foreign.map(|(place, kind)| {
                let place = place.min(filters.len());
                stack.insert(place, FOREIGN[kind]);
                place
            });
            stack.push(("nbd", ""));
            let graph = graph(&stack, &uri(SOCKET));
            let found = graph.path_to(Path::new(SOCKET));
            match place {
                None => prop_assert_eq!(found, GuestPath::Straight),
                Some(place) => {
                    let name = format!("n{place}");
                    let is_it = matches!(found, GuestPath::Covered(node) if node.name == name);
                    prop_assert!(is_it);
                }
            }
        }
    }
}
