//! Garbage on the API's socket: requests that somebody has cut, bent and glued together. Whoever sends them is told in one
//! line what is wrong, or hung up on, and the daemon goes on.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use crate::support::{HANG, World};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha12Rng;

/// So many requests are bent. They differ by the seed, which is fixed: a failure is the same the next time.
const REQUESTS: u32 = 3000;

/// What is good to send, before anything is done to it.
fn templates(world: &World) -> Vec<Vec<u8>> {
    let image = world.text("disk.img");
    let bodies = [
        ("GET", "/v1/version", String::new()),
        ("GET", "/v1/status", String::new()),
        ("GET", "/v1/volumes", String::new()),
        ("GET", "/v1/volumes/x", String::new()),
        ("GET", "/v1/jobs?all=true", String::new()),
        ("GET", "/v1/jobs/1", String::new()),
        ("GET", "/metrics", String::new()),
        (
            "POST",
            "/v1/volumes",
            format!(r#"{{"name":"y","backend":"file:{image}","export":"nbd+unix:///y?socket={image}.s"}}"#),
        ),
        ("POST", "/v1/volumes/x/move", format!(r#"{{"to":"file:{image}.new","verify":"full","bandwidth":1000000}}"#)),
        ("POST", "/v1/volumes/x/plan", format!(r#"{{"to":"file:{image}.new"}}"#)),
        ("PATCH", "/v1/volumes/x/job", r#"{"bandwidth":1000000}"#.to_owned()),
        ("POST", "/v1/volumes/x/job/cancel", String::new()),
        ("POST", "/v1/adoptions/check", format!(r#"{{"qmp":"{image}.qmp","node":"disk","name":"z"}}"#)),
        ("POST", "/v1/adoptions", format!(r#"{{"qmp":"{image}.qmp","node":"disk","name":"z"}}"#)),
        ("DELETE", "/v1/volumes/y", String::new()),
    ];
    let whole = |(method, path, body): (&str, &str, String)| {
        let kind = "Host: localhost\r\nContent-Type: application/json\r\nConnection: close";
        format!("{method} {path} HTTP/1.1\r\n{kind}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
    };
    bodies.into_iter().map(whole).collect()
}

/// Does one thing to `request`.
fn bend(request: &mut Vec<u8>, all: &[Vec<u8>], dice: &mut ChaCha12Rng) {
    let length = request.len().max(1);
    let at = dice.random_range(0..length).min(request.len());
    let to = (at + dice.random_range(1..=16)).min(request.len());
    match dice.random_range(0..9) {
        0 => request.truncate(at),
        1 => drop(request.drain(at..to)),
        2 => request[at..to].iter_mut().for_each(|byte| *byte = dice.random()),
        3 => {
            let more: Vec<u8> = (0..dice.random_range(1..40)).map(|_| dice.random()).collect();
            request.splice(at..at, more);
        }
        4 => request[at..to].iter_mut().for_each(|byte| *byte ^= 1 << dice.random_range(0..8)),
        5 => {
            let other = &all[dice.random_range(0..all.len())];
            let from = dice.random_range(0..other.len());
            request.splice(at..to, other[from..].iter().copied());
        }
        6 => drop(request.splice(at..to, *b"\r\n\r\n")),
        7 => {
            let word =
                [&b"99999999999999999999"[..], b"-1", b"null", b"{}", b"[[[[[[[[", b"\"\\u0000\"", b"%ff%00/../"];
            let word = word[dice.random_range(0..word.len())];
            request.splice(at..to, word.iter().copied());
        }
        _ => {
            let count = dice.random_range(1..200_000);
            let byte = [b'A', b'{', b'0', b' '][dice.random_range(0..4)];
            request.splice(at..at, std::iter::repeat_n(byte, count));
        }
    }
}

/// Sends it, and gives what came back until the end. A daemon that hangs up early is within its rights.
fn answer_to(world: &World, request: &[u8]) -> Vec<u8> {
    let mut stream = UnixStream::connect(world.path("api")).expect("the daemon listens");
    stream.set_read_timeout(Some(HANG)).expect("a limit");
    stream.set_write_timeout(Some(HANG)).expect("a limit");
    let _ = stream.write_all(request);
    let _ = stream.shutdown(Shutdown::Write);
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
            panic!("neither answered nor hung up on: {:?}", String::from_utf8_lossy(request))
        }
        _ => answer,
    }
}

/// Every refusal in `answer` is one line that says something.
fn check(answer: &[u8], request: &[u8]) {
    let text = String::from_utf8_lossy(answer);
    let context = || format!("{text:?} to {:?}", String::from_utf8_lossy(&request[..request.len().min(600)]));
    assert!(text.is_empty() || text.starts_with("HTTP/1."), "no HTTP: {}", context());
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return };
    let status: u16 = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status");
    if status < 400 {
        return;
    }
    // What is glued to a request may be answered as another one.
    let length =
        head.to_ascii_lowercase().split("content-length: ").nth(1).and_then(|rest| rest.lines().next()?.parse().ok());
    let body = length.and_then(|length: usize| body.get(..length)).unwrap_or(body);
    assert!(body.trim_end().lines().count() <= 1, "more than one line: {}", context());
    assert!(!body.contains("a defect of the daemon"), "{}", context());
    let is_ours = head.to_ascii_lowercase().contains("application/json");
    // What is no HTTP has no body: the library that reads it answers before anything of ours does.
    assert!(is_ours || body.is_empty(), "not in our form: {}", context());
    if is_ours {
        let error: serde_json::Value = serde_json::from_str(body).unwrap_or_else(|_| panic!("{}", context()));
        let message = error["message"].as_str().unwrap_or_default();
        assert!(!message.is_empty() && !message.contains('\n') && error["code"] != "internal", "{}", context());
    }
}

#[test]
fn garbage_on_the_apis_socket_is_answered_in_one_line_and_the_daemon_goes_on() {
    let world = World::new();
    let image = world.image("disk.img", 4 << 20, 1 << 20);
    world.attach("x", &image);
    let pid = world.pid();
    let templates = templates(&world);
    let mut dice = ChaCha12Rng::seed_from_u64(1);
    for number in 0..REQUESTS {
        let mut request = templates[dice.random_range(0..templates.len())].clone();
        for _ in 0..dice.random_range(1..=3) {
            bend(&mut request, &templates, &mut dice);
        }
        check(&answer_to(&world, &request), &request);
        if number % 500 == 0 {
            assert_eq!(world.json(&["version"])["daemon"]["pid"], pid, "{}", world.log());
        }
    }
    assert!(!world.log().contains("panicked"), "{}", world.log());
    // The volume is where the last of it has left it, and another one is attached and moved as ever.
    world.json(&["volume", "ls"]);
    let image = world.image("other.img", 4 << 20, 1 << 20);
    world.attach("other", &image);
    let to = format!("file:{}", world.text("moved.img"));
    assert_eq!(world.json(&["move", "other", "--to", &to, "--verify", "full"])["equal"], true);
    assert_eq!(world.pid(), pid);
}
