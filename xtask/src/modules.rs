//! The imports between the top-level modules of each crate: drawn, and refused where they run in a circle. Modules in a
//! circle are one module that was cut at random: none of them can be read, tested or replaced without the others.
//!
//! The daemon's modules lie in layers besides (`rules`), and none names one above it.

mod graph;
mod rules;
mod source;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::Context;

use graph::Graph;
use rules::{KNOWN, LAYERED, LAYERS};
use source::Source;

/// The modules below one root of a crate, and where each first names another.
struct Drawing {
    /// The folder of the sources.
    folder: PathBuf,
    modules: BTreeSet<String>,
    graph: Graph,
}

/// Adds what is wrong with the imports of all crates to `breaches`; prints them too, if asked for.
pub(crate) fn check(is_drawn: bool, breaches: &mut Vec<String>) -> anyhow::Result<()> {
    let mut folders: Vec<PathBuf> =
        std::fs::read_dir("crates")?.flatten().map(|entry| entry.path().join("src")).collect();
    folders.push("xtask/src".into());
    folders.retain(|folder| folder.is_dir());
    folders.sort();
    for folder in folders {
        let roots = ["lib.rs", "main.rs"].map(|name| folder.join(name));
        let drawings = roots.iter().filter(|root| root.exists()).map(|root| Drawing::of(&folder, root));
        let drawings = drawings.collect::<anyhow::Result<Vec<_>>>()?;
        if is_drawn {
            drawings.iter().filter(|drawing| !drawing.modules.is_empty()).for_each(Drawing::print);
            KNOWN.iter().filter(|known| known.krate == name_of(&folder)).for_each(|known| {
                println!("  but {} -> {}: {}", known.from, known.to, known.reason);
            });
        }
        check_crate(&name_of(&folder), &drawings, breaches);
    }
    Ok(())
}

/// The name of the folder of the crate whose sources are in `folder`.
fn name_of(folder: &Path) -> String {
    folder.parent().and_then(Path::file_name).map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

fn check_crate(name: &str, drawings: &[Drawing], breaches: &mut Vec<String>) {
    let known: Vec<(&str, &str)> =
        KNOWN.iter().filter(|known| known.krate == name).map(|known| (known.from, known.to)).collect();
    let mut needed: BTreeSet<(&str, &str)> = BTreeSet::new();
    for drawing in drawings {
        let kept = drawing.graph.without(&known);
        for circle in kept.circles() {
            breaches.push(format!("{}: imports in a circle: {}", drawing.folder.display(), kept.tell(&circle)));
        }
        needed.extend(known.iter().filter(|(from, to)| drawing.graph.has(from, to) && kept.reaches(to, from)));
        if name == LAYERED {
            let upwards = check_layers(drawing, breaches);
            for (from, to) in upwards {
                match known.iter().find(|edge| **edge == (from.as_str(), to.as_str())) {
                    Some(edge) => drop(needed.insert(*edge)),
                    None => breaches.push(format!(
                        "{}: {} names a layer above it: see LAYERS in xtask/src/modules/rules.rs",
                        drawing.folder.display(),
                        drawing.graph.tell(&[from, to])
                    )),
                }
            }
        }
    }
    for (from, to) in known.iter().filter(|edge| !needed.contains(*edge)) {
        breaches.push(format!(
            "xtask/src/modules/rules.rs: {name}: {from} -> {to} is gone, or does no harm any more: take it off the list"
        ));
    }
}

/// The imports from a lower layer to a higher one; whatever has no layer, or is none any more, is a breach.
fn check_layers(drawing: &Drawing, breaches: &mut Vec<String>) -> Vec<(String, String)> {
    let layer_of: BTreeMap<&str, usize> = LAYERS
        .iter()
        .enumerate()
        .flat_map(|(number, (_, modules))| modules.iter().map(move |module| (*module, number)))
        .collect();
    for module in drawing.modules.iter().filter(|module| !layer_of.contains_key(module.as_str())) {
        breaches.push(format!("xtask/src/modules/rules.rs: the module {module} of {LAYERED} has no layer"));
    }
    for module in layer_of.keys().filter(|module| !drawing.modules.contains(**module)) {
        breaches.push(format!("xtask/src/modules/rules.rs: {LAYERED} has no module {module} any more"));
    }
    let layer = |module: &String| layer_of.get(module.as_str()).copied();
    let is_upwards = |(from, to): &(&String, &String)| layer(from) < layer(to) && layer(from).is_some();
    drawing.graph.edges().filter(is_upwards).map(|(from, to)| (from.clone(), to.clone())).collect()
}

impl Drawing {
    fn of(folder: &Path, root: &Path) -> anyhow::Result<Self> {
        let read = |path: &Path| {
            let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
            anyhow::Ok(Source::read(&text))
        };
        let declared = read(root)?;
        let modules = declared.modules();
        let passed_on = declared.passed_on(&modules);
        let mut drawing = Self { folder: folder.to_owned(), modules, graph: Graph::default() };
        // Paths of modules that are still to be read.
        let mut left: Vec<Vec<String>> = drawing.modules.iter().map(|module| vec![module.clone()]).collect();
        while let Some(path) = left.pop() {
            let place = folder.join(path.join("/"));
            let file = place.with_extension("rs");
            let file = if file.exists() { file } else { place.join("mod.rs") };
            let source = read(&file)?;
            for (name, line) in source.paths(path.len()) {
                let to = if drawing.modules.contains(&name) { Some(&name) } else { passed_on.get(&name) };
                if let Some(to) = to.filter(|to| **to != path[0]) {
                    let shown = file.strip_prefix(folder).unwrap_or(&file).display();
                    drawing.graph.add(&path[0], to, || format!("{shown}:{line}"));
                }
            }
            left.extend(source.modules().into_iter().map(|module| [&path[..], &[module]].concat()));
        }
        Ok(drawing)
    }

    /// Prints every module with what it imports, those below first.
    fn print(&self) {
        println!("\n{}", self.folder.display());
        for module in self.graph.upwards(&self.modules) {
            let imports: Vec<&str> = self.graph.of(module).map(String::as_str).collect();
            println!("  {module:<20} {}", if imports.is_empty() { "–".to_owned() } else { imports.join(" ") });
        }
    }
}
