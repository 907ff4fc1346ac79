//! QMP through libvirt: `virsh qemu-monitor-command`, a process a command, and `virsh qemu-monitor-event` for events.
//!
//! libvirt keeps a domain's monitor for itself, but passes commands on. It marks the domain as tainted
//! (`custom-monitor`) for that. What is asked at the same time goes into one process: a start of virsh takes some 15
//! ms.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use env::EnvRef;
use futures::future::{Either, select};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;
use tokio::sync::{broadcast, mpsc, oneshot};

use super::wire::{self, Event, Message};
use super::{COMMAND_LIMIT, Request};
use crate::error::{Error, ErrorKind, Result};
use crate::options::LibvirtDomain;

/// How often it is looked whether QEMU still lives.
const LIFE_INTERVAL: Duration = Duration::from_secs(1);

/// How soon a first listener is noticed.
const WAKE_INTERVAL: Duration = Duration::from_millis(250);

/// How long virsh may take until it hears events, and how long a broken one is left alone.
const SETTLING: Duration = Duration::from_secs(2);

/// The name of an event that QEMU does not have: some may have been missed.
pub(crate) const LOOK_AGAIN: &str = "TRANSHUME_LOOK_AGAIN";

/// How virsh is called. The default is what a user's own `virsh` does.
#[derive(Clone, Debug)]
pub struct Virsh {
    /// The program.
    pub program: PathBuf,
    /// `--connect`: which libvirt; where nothing is said, `LIBVIRT_DEFAULT_URI` or virsh's own choice.
    pub uri: Option<String>,
}

impl Default for Virsh {
    fn default() -> Self {
        Self { program: PathBuf::from("virsh"), uri: None }
    }
}

/// A running domain of a libvirt.
#[derive(Clone, Debug)]
pub(super) struct Domain {
    pub(super) virsh: Virsh,
    pub(super) uuid: String,
    pub(super) process_id: u32,
}

impl Virsh {
    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        // Its words are matched on.
        command.env("LC_ALL", "C");
        if let Some(uri) = &self.uri {
            command.args(["--connect", uri]);
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        command
    }

    /// Runs one command of virsh's and gives what it prints.
    ///
    /// # Errors
    /// `NoMonitor` if there is no virsh, or libvirt says that the domain does not run; `LibvirtUnreachable` if libvirt
    /// does not answer.
    pub async fn run(&self, arguments: &[&str]) -> Result<String> {
        let output = self.command().args(arguments).output().await.map_err(|error| self.missing(error))?;
        if output.status.success() {
            return Ok(text(&output.stdout));
        }
        let (kind, words) = refusal(&output);
        Err(Error::new(kind, words))
    }

    fn missing(&self, error: io::Error) -> Error {
        let context = format!("{} could not be run (package libvirt-clients)", self.program.display());
        Error::new(ErrorKind::NoMonitor, context).with_source(error)
    }
}

/// QEMU's process of a running domain: the one that has the domain's UUID on its command line and runs as the user that
/// libvirt says. Anybody can start a process with such a command line, so several are no answer.
///
/// # Errors
/// `NoMonitor` if there is none on this host, or more than one.
pub fn qemu_of(domain: &LibvirtDomain) -> Result<u32> {
    let is_its = |pid: &u32| {
        let user = fs::metadata(format!("/proc/{pid}")).map(|process| process.uid());
        has_uuid(*pid, &domain.uuid) && user.is_ok_and(|user| domain.user.is_none_or(|expected| expected == user))
    };
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let found: Vec<u32> = processes.filter(is_its).collect();
    let unclear = |what: String| {
        let context = format!("the libvirt domain {}: {what} its UUID {}", domain.name, domain.uuid);
        Err(Error::new(ErrorKind::NoMonitor, context))
    };
    match found.as_slice() {
        [] => unclear("no QEMU of this host has".to_owned()),
        [pid] => Ok(*pid),
        several => unclear(format!("the processes {several:?} all have")),
    }
}

fn has_uuid(pid: u32, uuid: &str) -> bool {
    let Ok(line) = fs::read(format!("/proc/{pid}/cmdline")) else { return false };
    let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
    words.windows(2).any(|pair| pair[0] == b"-uuid" && pair[1].eq_ignore_ascii_case(uuid.as_bytes()))
}

/// Carries requests out until every handle is gone or QEMU is; what is pending then fails by being dropped.
pub(super) async fn serve(
    domain: Domain,
    mut requests: mpsc::Receiver<Request>,
    events: broadcast::Sender<Arc<Event>>,
    env: EnvRef,
) {
    let mut listening = None;
    let mut looked = env.now();
    loop {
        if listening.is_none() && events.receiver_count() > 0 {
            // The listener ends when this task drops what it waits for.
            let (alive, over) = oneshot::channel::<()>();
            let (domain, events, its_env) = (domain.clone(), events.clone(), Arc::clone(&env));
            env.spawn(Box::pin(async move {
                let listener = listen(&domain, &events, &its_env);
                select(std::pin::pin!(listener), over).await;
            }));
            listening = Some(alive);
        }
        if env.now().since(looked) >= LIFE_INTERVAL {
            if !has_uuid(domain.process_id, &domain.uuid) {
                return;
            }
            looked = env.now();
        }
        let first = match select(std::pin::pin!(requests.recv()), env.sleep(WAKE_INTERVAL)).await {
            Either::Left((Some(first), _)) => first,
            Either::Left((None, _)) => return,
            Either::Right(_) => continue,
        };
        // Several commands asked at once are sent together.
        tokio::task::yield_now().await;
        let mut batch = vec![first];
        while batch.iter().all(|request| request.file.is_none())
            && let Ok(next) = requests.try_recv()
        {
            batch.push(next);
        }
        pass_on(&domain, batch, &env).await;
    }
}

/// Runs one virsh for `batch`. It prints the answers in order, and stops where libvirt refuses.
async fn pass_on(domain: &Domain, mut batch: Vec<Request>, env: &EnvRef) {
    let line: Vec<String> = batch.iter().map(|request| pass_line(&domain.uuid, request)).collect();
    let virsh = &domain.virsh;
    let mut command = virsh.command();
    command.arg(line.join("; "));
    // virsh hands its standard input on, see `pass_line`.
    if let Some(file) = batch.iter_mut().find_map(|request| request.file.take()) {
        command.stdin(file);
    }
    let output = env::timeout(&**env, COMMAND_LIMIT, command.output()).await;
    let (printed, failure) = match output {
        None => (String::new(), (ErrorKind::TimedOut, "virsh did not answer in time".to_owned())),
        Some(Err(error)) => (String::new(), (ErrorKind::LibvirtUnreachable, virsh.missing(error).to_string())),
        Some(Ok(output)) => (text(&output.stdout), refusal(&output)),
    };
    let mut answers = printed.lines().filter(|line| !line.trim().is_empty());
    for request in batch {
        let answer = match answers.next().map(|line| wire::parse(line.as_bytes())) {
            Some(Ok(Message::Answer { result, .. })) => result.map_err(|error| Error::of_qemu(&request.command, error)),
            Some(other) => {
                Err(Error::new(ErrorKind::Protocol, format!("virsh printed no answer of QEMU's but {other:?}")))
            }
            None => Err(refused_midway(&request.command, &failure)),
        };
        // Whoever asked may have given up.
        let _ = request.answer.send(answer);
    }
}

/// One command of virsh's own language. Within its single quotes everything stands for itself, and JSON has single
/// quotes only within texts, where they can be written otherwise.
fn pass_line(uuid: &str, request: &Request) -> String {
    let json = wire::request(None, &request.command, &request.arguments).replace('\'', "\\u0027");
    let with_file = if request.file.is_some() { "--pass-fds 0 " } else { "" };
    format!("qemu-monitor-command {uuid} {with_file}'{json}'")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What virsh's failure means, and its words.
fn refusal(output: &Output) -> (ErrorKind, String) {
    let said = text(&output.stderr);
    let words: Vec<&str> = said.lines().map(|line| line.trim_start_matches("error:").trim()).collect();
    let words = words.into_iter().filter(|line| !line.is_empty()).collect::<Vec<_>>().join(": ");
    let has = |part: &str| said.contains(part);
    let kind = if has("failed to connect to the hypervisor") || has("cannot acquire state change lock") {
        ErrorKind::LibvirtUnreachable
    } else if has("failed to get domain") || has("domain is not running") {
        ErrorKind::NoMonitor
    } else {
        ErrorKind::Disconnected
    };
    (kind, if words.is_empty() { "virsh failed without a word".to_owned() } else { words })
}

/// The same for a running connection: a domain that has run and does not run now is gone.
fn refused_midway(command: &str, (kind, words): &(ErrorKind, String)) -> Error {
    let kind = if *kind == ErrorKind::NoMonitor { ErrorKind::Disconnected } else { *kind };
    Error::new(kind, format!("libvirt did not pass {command} on: {words}"))
}

/// Reports what `virsh qemu-monitor-event` prints, for ever. What happens while it does not run is reported as
/// [`LOOK_AGAIN`].
async fn listen(domain: &Domain, events: &broadcast::Sender<Arc<Event>>, env: &EnvRef) {
    loop {
        let mut command = domain.virsh.command();
        command.args(["qemu-monitor-event", "--loop", "--domain", &domain.uuid]).stderr(Stdio::null());
        match command.spawn() {
            Ok(mut child) => {
                let lines = child.stdout.take().map(|pipe| BufReader::new(pipe).lines());
                let mut lines = lines.expect("its standard output is a pipe");
                let mut settling = Some(env.sleep(SETTLING));
                loop {
                    let line = std::pin::pin!(lines.next_line());
                    let line = match settling.take() {
                        None => line.await,
                        Some(wait) => match select(line, wait).await {
                            Either::Left((line, wait)) => {
                                settling = Some(wait);
                                line
                            }
                            Either::Right(_) => {
                                tell(events, Event { name: LOOK_AGAIN.to_owned(), data: Value::Null });
                                continue;
                            }
                        },
                    };
                    let Ok(Some(line)) = line else { break };
                    if let Some(event) = understand(&line) {
                        tell(events, event);
                    }
                }
            }
            Err(error) => tracing::warn!(%error, "virsh could not be run for events"),
        }
        env.sleep(SETTLING).await;
    }
}

fn tell(events: &broadcast::Sender<Arc<Event>>, event: Event) {
    tracing::debug!(event = event.name, data = %event.data, "qmp");
    // Without listeners nobody misses it.
    let _ = events.send(Arc::new(event));
}

/// `event STOP at 1795266131.108795 for domain 'web1': <null>`
fn understand(line: &str) -> Option<Event> {
    let (name, rest) = line.strip_prefix("event ")?.split_once(" at ")?;
    // A domain's name may have anything in it.
    let data = rest.match_indices("': ").find_map(|(at, mark)| match &rest[at + mark.len()..] {
        "<null>" => Some(Value::Null),
        data => serde_json::from_str(data).ok(),
    })?;
    Some(Event { name: name.to_owned(), data })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_event_is_understood_whatever_the_domain_is_called() {
        let event = understand("event STOP at 1795266131.108795 for domain 'web1': <null>").expect("an event");
        assert_eq!((event.name.as_str(), event.data), ("STOP", Value::Null));
        let event = understand("event RESET at 1.2 for domain 'a': {}: ': x': {\"guest\":true}").expect("an event");
        assert_eq!((event.name.as_str(), event.data), ("RESET", json!({ "guest": true })));
        for line in ["", "event", "event X at 1", "event X at 1 for domain 'a': {", "events received: 2"] {
            assert_eq!(understand(line), None, "{line}");
        }
    }

    #[test]
    fn no_text_of_a_command_ends_its_quotes() {
        let (answer, _) = oneshot::channel();
        let arguments = json!({ "a": "'; destroy web1; '\\ \" $HOME `id` \n" });
        let request = Request { command: "qom-get".to_owned(), arguments: arguments.clone(), file: None, answer };
        let line = pass_line("59f4ab81-ee60-4b97-b937-ba75986546c2", &request);
        let (_, quoted) = line.split_once(" '").expect("a quote");
        let json = quoted.strip_suffix('\'').expect("a quote at the end");
        assert!(!json.contains('\''), "{line}");
        let value: Value = serde_json::from_str(json).expect("JSON");
        assert_eq!(value["arguments"], arguments);
    }

    #[test]
    fn what_virsh_says_is_told_apart() {
        let kind = |said: &str| {
            let status = std::os::unix::process::ExitStatusExt::from_raw(256);
            refusal(&Output { status, stdout: Vec::new(), stderr: said.as_bytes().to_vec() })
        };
        let gone =
            "error: failed to connect to the hypervisor\nerror: Failed to connect socket to '/x': No such file\n";
        let (found, words) = kind(gone);
        assert_eq!(found, ErrorKind::LibvirtUnreachable);
        assert_eq!(words, "failed to connect to the hypervisor: Failed to connect socket to '/x': No such file");
        let busy = "error: Timed out during operation: cannot acquire state change lock (held by monitor=x)\n";
        assert_eq!(kind(busy).0, ErrorKind::LibvirtUnreachable);
        assert_eq!(kind("error: failed to get domain 'nosuch'\n").0, ErrorKind::NoMonitor);
        assert_eq!(kind("error: Requested operation is not valid: domain is not running\n").0, ErrorKind::NoMonitor);
        assert_eq!(kind("").0, ErrorKind::Disconnected);
    }
}
