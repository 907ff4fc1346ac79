//! Which module names which, and circles among them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The imports between modules, each with the place of the first.
#[derive(Clone, Debug, Default)]
pub(super) struct Graph {
    imports: BTreeMap<String, BTreeMap<String, String>>,
}

impl Graph {
    /// Notes that `from` names `to`.
    pub(super) fn add(&mut self, from: &str, to: &str, place: impl FnOnce() -> String) {
        self.imports.entry(from.to_owned()).or_default().entry(to.to_owned()).or_insert_with(place);
    }

    pub(super) fn has(&self, from: &str, to: &str) -> bool {
        self.imports.get(from).is_some_and(|imports| imports.contains_key(to))
    }

    /// What `module` imports.
    pub(super) fn of(&self, module: &str) -> impl Iterator<Item = &String> {
        self.imports.get(module).into_iter().flat_map(BTreeMap::keys)
    }

    pub(super) fn edges(&self) -> impl Iterator<Item = (&String, &String)> {
        self.imports.iter().flat_map(|(from, imports)| imports.keys().map(move |to| (from, to)))
    }

    /// The same without some imports.
    pub(super) fn without(&self, edges: &[(&str, &str)]) -> Self {
        let mut graph = self.clone();
        for (from, to) in edges {
            if let Some(imports) = graph.imports.get_mut(*from) {
                imports.remove(*to);
            }
        }
        graph
    }

    /// Whether a way of imports leads from one module to another.
    pub(super) fn reaches(&self, from: &str, to: &str) -> bool {
        self.way(from, to).is_some()
    }

    /// The shortest such way, both ends included; from a module to itself it is a circle.
    fn way(&self, from: &str, to: &str) -> Option<Vec<String>> {
        let mut came_from: BTreeMap<&String, &str> = BTreeMap::new();
        let mut left: VecDeque<&str> = [from].into();
        while let Some(module) = left.pop_front() {
            for next in self.of(module) {
                if came_from.contains_key(next) {
                    continue;
                }
                came_from.insert(next, module);
                if next == to {
                    let mut way = vec![next.clone()];
                    let mut at = module;
                    while at != from {
                        way.push(at.to_owned());
                        at =
                            came_from.iter().find(|(known, _)| known.as_str() == at).map_or(from, |(_, before)| before);
                    }
                    way.push(from.to_owned());
                    way.reverse();
                    return Some(way);
                }
                left.push_back(next);
            }
        }
        None
    }

    /// Circles, the shortest through each module that is on one and on none that was told before.
    pub(super) fn circles(&self) -> Vec<Vec<String>> {
        let (mut circles, mut told) = (Vec::new(), BTreeSet::new());
        for module in self.imports.keys() {
            if !told.contains(module)
                && let Some(circle) = self.way(module, module)
            {
                told.extend(circle.iter().cloned());
                circles.push(circle);
            }
        }
        circles
    }

    /// A way with the place of each import.
    pub(super) fn tell(&self, way: &[String]) -> String {
        let mut told = way.first().cloned().unwrap_or_default();
        for pair in way.windows(2) {
            let place = self.imports.get(&pair[0]).and_then(|imports| imports.get(&pair[1]));
            told += &format!(" -> {} ({})", pair[1], place.map_or("nowhere", String::as_str));
        }
        told
    }

    /// `modules`, each behind those that it imports as far as there is no circle.
    pub(super) fn upwards<'a>(&self, modules: &'a BTreeSet<String>) -> Vec<&'a String> {
        let mut order: Vec<&String> = Vec::new();
        while order.len() < modules.len() {
            let left: Vec<&String> = modules.iter().filter(|module| !order.contains(module)).collect();
            let is_ready =
                |module: &&&String| self.of(module).all(|import| !left.contains(&import) || import == **module);
            let ready: Vec<&String> = left.iter().filter(is_ready).copied().collect();
            // In a circle nobody is: the one that imports the least of what is left goes first.
            let count = |module: &&String| self.of(module).filter(|import| left.contains(import)).count();
            order.extend(if ready.is_empty() {
                left.iter().copied().min_by_key(count).into_iter().collect()
            } else {
                ready
            });
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(edges: &[(&str, &str)]) -> Graph {
        let mut graph = Graph::default();
        edges.iter().for_each(|(from, to)| graph.add(from, to, || format!("{from}.rs:1")));
        graph
    }

    #[test]
    fn circles_are_found_and_told_with_their_places() {
        let graph = graph(&[("a", "b"), ("b", "c"), ("c", "a"), ("d", "a"), ("e", "f"), ("f", "e")]);
        let told: Vec<String> = graph.circles().iter().map(|circle| graph.tell(circle)).collect();
        assert_eq!(told, ["a -> b (a.rs:1) -> c (b.rs:1) -> a (c.rs:1)", "e -> f (e.rs:1) -> e (f.rs:1)"]);
        assert!(graph.without(&[("c", "a"), ("f", "e")]).circles().is_empty());
        assert!(graph.reaches("d", "c") && !graph.reaches("a", "d"));
    }

    #[test]
    fn what_is_imported_comes_first() {
        let modules = ["a", "b", "c"].map(str::to_owned).into();
        assert_eq!(graph(&[("a", "b"), ("b", "c")]).upwards(&modules), ["c", "b", "a"]);
        assert_eq!(graph(&[("a", "b"), ("b", "a")]).upwards(&modules).len(), 3);
    }
}
