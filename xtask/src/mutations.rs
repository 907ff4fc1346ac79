//! `cargo xtask mutations`: proves that the simulator's checkers can fail, with mistakes in the engine itself.
//!
//! Every patch in `crates/sim/mutations` makes one mistake. It is applied to a copy of the sources outside the checkout,
//! the simulator is built there, and must see the mistake: by a checker that the patch's head names, within the number of
//! seeds that it states. A patch that does not apply, that does not compile, or that is noticed in any other way fails.
//! What the simulator cannot play (the daemon's files, the wire) names a test instead, which must build and then fail.

pub(crate) mod refresh;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

/// Where the patches are.
const PATCHES: &str = "crates/sim/mutations";
/// Where those are that no run sees. They follow the code like all others.
const UNSEEN: &str = "crates/sim/mutations/unseen";
/// What of the checkout is copied.
const COPIED: &[&str] = &["Cargo.toml", "Cargo.lock", ".cargo", "crates", "xtask"];
/// A run takes no longer than this, whatever a mistake does to it.
const RUN_LIMIT: Duration = Duration::from_secs(300);
/// So many seeds of its scenario must hold without a mistake.
const SOUND_SEEDS: u64 = 20;

/// Which mistakes to make; see `cargo xtask mutations --help`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Only these, by the names of their patches.
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    only: Vec<String>,
    /// Say which there are, and make none.
    #[arg(long)]
    list: bool,
    /// Say of each scenario which mistakes it proves, or why it proves none, and make none.
    #[arg(long)]
    scenarios: bool,
    /// Write the patches anew whose context is not what the code says, and make no mistake. Look at the difference afterwards.
    #[arg(long)]
    refresh: bool,
}

/// A mistake, as its patch's head has it.
struct Mutation {
    name: String,
    patch: PathBuf,
    breaks: String,
    invariants: Vec<String>,
    proof: Proof,
}

/// What must notice a mistake.
enum Proof {
    /// A scenario of the simulator within so many seeds.
    Seeds { scenario: String, seeds: u64 },
    /// A test, by package, test binary and name.
    Test { package: String, binary: String, name: String },
}

/// What a run of the simulator came to.
enum Seen {
    Nothing,
    Broken { invariant: String, seed: String },
}

/// Makes the mistakes one after another and fails if one of them is not seen as it should be.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let root = &crate::runs::root();
    let mut mutations = all(root)?;
    if arguments.list {
        mutations.iter().for_each(|mutation| println!("{:<24} {}", mutation.name, mutation.breaks));
        return Ok(());
    }
    if arguments.scenarios {
        return print_scenarios(&mutations);
    }
    if arguments.refresh {
        return refresh_all(root, &mutations);
    }
    for name in &arguments.only {
        ensure!(mutations.iter().any(|mutation| mutation.name == *name), "no mutation `{name}`: see --list");
    }
    mutations.retain(|mutation| arguments.only.is_empty() || arguments.only.contains(&mutation.name));
    let copy = Copy::new(root)?;
    copy.check_sound(&mutations)?;
    let mut missed = Vec::new();
    for mutation in &mutations {
        let began = Instant::now();
        let outcome = copy.prove(mutation);
        let took = began.elapsed().as_secs();
        match outcome {
            Ok(how) => println!("seen    {:<24} {how} ({took} s)", mutation.name),
            Err(error) => {
                println!("MISSED  {:<24} {error:#} ({took} s)", mutation.name);
                missed.push(mutation.name.as_str());
            }
        }
    }
    copy.restore()?;
    ensure!(missed.is_empty(), "{} of {} mistakes were not seen: {}", missed.len(), mutations.len(), missed.join(", "));
    println!("all {} mistakes were seen", mutations.len());
    Ok(())
}

/// Has each patch fit the code around its mistake.
fn refresh_all(root: &Path, mutations: &[Mutation]) -> anyhow::Result<()> {
    let scratch = std::env::temp_dir().join(format!("transhume-refresh-{}", std::process::id()));
    let mut failed = Vec::new();
    let unseen = read_folder(root, UNSEEN)?;
    for mutation in mutations.iter().chain(&unseen) {
        match refresh::refresh(root, &mutation.patch, &scratch.join(&mutation.name)) {
            Ok(true) => println!("refreshed  {}", mutation.name),
            Ok(false) => {}
            Err(error) => {
                println!("FAILED     {}: {error:#}", mutation.name);
                failed.push(mutation.name.as_str());
            }
        }
    }
    // Nothing may have needed it.
    let _ = fs::remove_dir_all(&scratch);
    ensure!(failed.is_empty(), "make these by hand: {}", failed.join(", "));
    Ok(())
}

/// Prints each scenario with its mistakes, or with why it has none; fails if one has neither.
fn print_scenarios(mutations: &[Mutation]) -> anyhow::Result<()> {
    let mut proved: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for mutation in mutations {
        if let Proof::Seeds { scenario, .. } = &mutation.proof {
            proved.entry(scenario).or_default().push(&mutation.name);
        }
    }
    let listed = crate::programs::output(crate::programs::SIMULATOR, &["--unproved"])?;
    let mut silent = Vec::new();
    for line in listed.lines() {
        let (name, why) = line.split_once('\t').context("a scenario, a tab, and why")?;
        match (proved.get(name), why) {
            (Some(names), _) => println!("{name:<24} {}", names.join(", ")),
            (None, "") => silent.push(name.to_owned()),
            (None, why) => println!("{name:<24} none: {why}"),
        }
    }
    ensure!(silent.is_empty(), "no mistake names {}, and they do not say why", silent.join(", "));
    Ok(())
}

fn all(root: &Path) -> anyhow::Result<Vec<Mutation>> {
    read_folder(root, PATCHES)
}

fn read_folder(root: &Path, folder: &str) -> anyhow::Result<Vec<Mutation>> {
    let mut mutations = Vec::new();
    for entry in fs::read_dir(root.join(folder)).with_context(|| format!("reading {folder}"))? {
        let patch = entry?.path();
        if patch.extension().is_some_and(|extension| extension == "patch") {
            mutations.push(Mutation::read(&patch).with_context(|| format!("the head of {}", patch.display()))?);
        }
    }
    mutations.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(mutations)
}

impl Mutation {
    fn read(patch: &Path) -> anyhow::Result<Self> {
        let text = fs::read_to_string(patch)?;
        let head: Vec<(&str, &str)> = text
            .lines()
            .take_while(|line| !line.starts_with("diff "))
            .filter_map(|line| line.split_once(": "))
            .collect();
        let value = |key: &str| head.iter().find(|(known, _)| *known == key).map(|(_, value)| *value);
        let needed = |key: &str| value(key).with_context(|| format!("there is no `{key}:`"));
        let proof = match value("test") {
            Some(test) => {
                let mut words = test.split_whitespace().map(str::to_owned);
                let (Some(package), Some(binary), Some(name)) = (words.next(), words.next(), words.next()) else {
                    bail!("`test:` takes package, test binary (`lib` for unit tests) and name");
                };
                Proof::Test { package, binary, name }
            }
            None => Proof::Seeds { scenario: needed("scenario")?.to_owned(), seeds: needed("seeds")?.parse()? },
        };
        Ok(Self {
            name: patch.file_stem().context("a patch has a name")?.to_string_lossy().into_owned(),
            patch: patch.to_owned(),
            breaks: needed("breaks")?.to_owned(),
            invariants: needed("invariants")?.split_whitespace().map(str::to_owned).collect(),
            proof,
        })
    }
}

/// A copy of the sources, and what is built from it.
struct Copy {
    root: PathBuf,
    tree: PathBuf,
    target: PathBuf,
    /// Locked as long as it is used: another run's mistakes would be taken for this one's.
    _lock: fs::File,
}

impl Copy {
    fn new(root: &Path) -> anyhow::Result<Self> {
        let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        let cache =
            cache.or_else(|| std::env::home_dir().map(|home| home.join(".cache"))).context("no home directory")?;
        let base =
            std::env::var_os("TRANSHUME_MUTATIONS").map_or_else(|| cache.join("transhume/mutations"), PathBuf::from);
        ensure!(!base.starts_with(root), "{} lies in the checkout", base.display());
        fs::create_dir_all(&base)?;
        let lock = fs::File::create(base.join("lock"))?;
        lock.try_lock().with_context(|| {
            let base = base.display();
            format!(
                "another run makes its mistakes in {base}: wait for it, or name another place in TRANSHUME_MUTATIONS"
            )
        })?;
        let copy = Self { root: root.to_owned(), tree: base.join("tree"), target: base.join("target"), _lock: lock };
        copy.restore()?;
        Ok(copy)
    }

    /// Makes the copy what the checkout is. Files that are so already keep their times, so that they are not built again.
    fn restore(&self) -> anyhow::Result<()> {
        fs::create_dir_all(&self.tree)?;
        for name in COPIED {
            mirror(&self.root.join(name), &self.tree.join(name)).with_context(|| format!("copying {name}"))?;
        }
        Ok(())
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .current_dir(&self.tree)
            .env("CARGO_TARGET_DIR", &self.target)
            .env("CARGO_INCREMENTAL", "1")
            // The copy is no repository, and none above it is meant.
            .env("GIT_CEILING_DIRECTORIES", self.tree.parent().unwrap_or(&self.tree))
            .env_remove("GIT_DIR")
            .stdin(Stdio::null());
        command
    }

    /// The engine as it is must hold where mistakes are looked for: otherwise what is seen proves nothing.
    fn check_sound(&self, mutations: &[Mutation]) -> anyhow::Result<()> {
        let scenarios: BTreeSet<&str> = mutations
            .iter()
            .filter_map(|mutation| match &mutation.proof {
                Proof::Seeds { scenario, .. } => Some(scenario.as_str()),
                Proof::Test { .. } => None,
            })
            .collect();
        if scenarios.is_empty() {
            return Ok(());
        }
        self.build()?;
        for scenario in scenarios {
            if let Seen::Broken { invariant, seed } = self.simulate(scenario, SOUND_SEEDS, &[])? {
                bail!("without any mistake seed {seed} of {scenario} breaks {invariant}");
            }
        }
        Ok(())
    }

    fn prove(&self, mutation: &Mutation) -> anyhow::Result<String> {
        self.restore()?;
        let applied = self.command("git").args(["apply", "--recount"]).arg(&mutation.patch).output()?;
        ensure!(applied.status.success(), "does not apply: {}", String::from_utf8_lossy(&applied.stderr).trim());
        match &mutation.proof {
            Proof::Seeds { scenario, seeds } => {
                self.build()?;
                match self.simulate(scenario, *seeds, &mutation.invariants)? {
                    Seen::Nothing => bail!("nothing was seen in {seeds} seeds of {scenario}"),
                    Seen::Broken { invariant, seed } if mutation.invariants.contains(&invariant) => {
                        Ok(format!("{invariant}, seed {seed} of {scenario}"))
                    }
                    Seen::Broken { invariant, seed } => {
                        bail!("seed {seed} of {scenario} breaks {invariant}, not {}", mutation.invariants.join(" or "))
                    }
                }
            }
            Proof::Test { package, binary, name } => self.fails(package, binary, name),
        }
    }

    fn build(&self) -> anyhow::Result<()> {
        let arguments = ["build", "--locked", "--quiet", "--package", "transhume-sim", "--bin", "transhume-sim"];
        self.cargo(&arguments)
    }

    fn cargo(&self, arguments: &[&str]) -> anyhow::Result<()> {
        let built = self.command("cargo").args(arguments).output().context("running cargo")?;
        let errors = String::from_utf8_lossy(&built.stderr);
        let first = errors.lines().find(|line| line.starts_with("error")).unwrap_or("no reason given");
        ensure!(built.status.success(), "does not compile: {first}");
        Ok(())
    }

    /// Plays seeds until one breaks something. Two threads may each break something: what is `expected` comes first then.
    fn simulate(&self, scenario: &str, seeds: u64, expected: &[String]) -> anyhow::Result<Seen> {
        let program = self.target.join("debug/transhume-sim");
        let seeds = format!("0..{seeds}");
        let mut command = self.command(&program.to_string_lossy());
        command.args(["--scenario", scenario, "--seeds", &seeds, "--shrink", "0"]);
        let (success, output) = limited(&mut command)?;
        let failed = output.lines().filter_map(|line| line.strip_prefix("FAILED ")?.split_once(" in "));
        let mut failed: Vec<(&str, &str)> = failed.collect();
        failed.sort_by_key(|(invariant, _)| !expected.iter().any(|name| name == invariant));
        let Some((invariant, rest)) = failed.first() else {
            ensure!(success, "the simulator ended without a verdict: {}", output.lines().last().unwrap_or_default());
            return Ok(Seen::Nothing);
        };
        let seed = rest.split_once('[').map_or(*rest, |(_, seeds)| seeds.trim_end_matches(']'));
        Ok(Seen::Broken { invariant: (*invariant).to_owned(), seed: seed.to_owned() })
    }

    fn fails(&self, package: &str, binary: &str, name: &str) -> anyhow::Result<String> {
        let own = if binary == "lib" { vec!["--lib"] } else { vec!["--test", binary] };
        let test = [&["test", "--locked", "--quiet", "--package", package], &own[..]].concat();
        self.cargo(&[&test[..], &["--no-run"]].concat())?;
        let mut command = self.command("cargo");
        command.args(&test).args(["--", "--exact", name]);
        let (success, output) = limited(&mut command)?;
        ensure!(!success, "`{name}` of {package} does not notice");
        let is_the_test = output.contains(&format!("---- {name} stdout ----"));
        ensure!(is_the_test, "`{name}` of {package} did not run: {}", output.lines().last().unwrap_or_default());
        Ok(format!("test `{name}` of {package}"))
    }
}

/// Runs `command` to its end, or to the limit; gives what it printed.
fn limited(command: &mut Command) -> anyhow::Result<(bool, String)> {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().context("starting it")?;
    let mut stdout = child.stdout.take().context("it was asked for")?;
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        std::io::Read::read_to_string(&mut stdout, &mut text).map(|_| text)
    });
    let began = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if began.elapsed() > RUN_LIMIT {
            child.kill()?;
            child.wait()?;
            bail!("it did not end in {RUN_LIMIT:?}");
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    let text = reader.join().map_err(|_| anyhow::anyhow!("reading what it prints"))??;
    Ok((status.success(), text))
}

/// Makes `to` what `from` is: a file or a directory with all in it.
fn mirror(from: &Path, to: &Path) -> anyhow::Result<()> {
    if !from.is_dir() {
        let wanted = fs::read(from)?;
        if fs::read(to).ok().as_ref() != Some(&wanted) {
            fs::write(to, wanted)?;
        }
        return Ok(());
    }
    fs::create_dir_all(to)?;
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(from)? {
        let name = entry?.file_name();
        mirror(&from.join(&name), &to.join(&name))?;
        names.insert(name);
    }
    for entry in fs::read_dir(to)? {
        let entry = entry?;
        if !names.contains(&entry.file_name()) {
            let gone = entry.path();
            if gone.is_dir() { fs::remove_dir_all(gone)? } else { fs::remove_file(gone)? }
        }
    }
    Ok(())
}
