//! What runs before the program's `main`.
#![allow(
    unsafe_code,
    reason = "the loader's table of constructors, the signal mask and the environment have no safe interface"
)]

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use crate::{LIBRARY, SOCKET_VARIABLE, server};

const PRELOAD_VARIABLE: &str = "LD_PRELOAD";
/// Which process is meant, by its number, once the library has run in it.
const PROCESS_VARIABLE: &str = "TRANSHUME_PRELOAD_PROCESS";
/// The thread keeps little on its stack.
const STACK_BYTES: usize = 256 << 10;

// SAFETY: the loader calls each entry of this section once, before `main`, with the C ABI; `begin` has that ABI, and does not unwind.
#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = begin;

extern "C" fn begin() {
    let Some(socket) = std::env::var_os(SOCKET_VARIABLE) else { return };
    let own = std::process::id().to_string();
    if std::env::var_os(PROCESS_VARIABLE).is_some_and(|process| process != own.as_str()) {
        leave();
        return;
    }
    // A wrapper becomes the program by `exec`, which keeps the number of the process and ends what was begun here.
    // SAFETY: the program has not begun: this is its only thread but for those of other constructors, and none of the C library's
    // constructors leaves a thread behind that reads the environment.
    unsafe {
        std::env::set_var(PROCESS_VARIABLE, own);
    }
    // The program goes on whatever comes of this: whoever wants to move it hears that nobody listens.
    if let Err(error) = start(Path::new(&socket)) {
        eprintln!("transhume: memory is not tracked: {}: {error}", Path::new(&socket).display());
    }
}

/// In a child of the process that is meant: its own children need not load the library.
fn leave() {
    let preload = std::env::var_os(PRELOAD_VARIABLE).map(|list| without_us(&list));
    // SAFETY: as in `begin`.
    unsafe {
        std::env::remove_var(SOCKET_VARIABLE);
        std::env::remove_var(PROCESS_VARIABLE);
        match preload {
            Some(list) if !list.is_empty() => std::env::set_var(PRELOAD_VARIABLE, list),
            _ => std::env::remove_var(PRELOAD_VARIABLE),
        }
    }
}

fn start(socket: &Path) -> std::io::Result<()> {
    // One that an earlier process has left.
    let _ = std::fs::remove_file(socket);
    let listener = UnixListener::bind(socket)?;
    std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o600))?;
    let before = block_signals();
    let thread = std::thread::Builder::new().name("transhume-mem".to_owned()).stack_size(STACK_BYTES);
    let spawned = thread.spawn(move || server::serve(&listener));
    restore_signals(&before);
    spawned.map(drop)
}

/// Blocks all signals for the calling thread, and for those that it starts: the program's handlers run on its own threads.
fn block_signals() -> libc::sigset_t {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::zeroed();
    let mut before = std::mem::MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: both point to sets of this function, which any bytes make; the calls do not keep them.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        before.assume_init()
    }
}

fn restore_signals(before: &libc::sigset_t) {
    // SAFETY: the set was filled by the kernel, and the call does not keep it.
    unsafe {
        libc::pthread_sigmask(libc::SIG_SETMASK, before, std::ptr::null_mut());
    }
}

/// The list of preloaded libraries without this one.
fn without_us(list: &std::ffi::OsStr) -> OsString {
    let is_separator = |byte: &u8| *byte == b':' || *byte == b' ';
    let names = list.as_bytes().split(is_separator).filter(|name| !name.is_empty());
    let others: Vec<&[u8]> = names.filter(|name| !name.ends_with(LIBRARY.as_bytes())).collect();
    OsString::from_vec(others.join(&b':'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_name_leaves_the_list() {
        let of = |list: &str| without_us(list.as_ref()).into_string().expect("text");
        assert_eq!(of("/usr/lib/libtranshume_preload.so"), "");
        assert_eq!(of("/a/liba.so:/b/libtranshume_preload.so /c/libc.so"), "/a/liba.so:/c/libc.so");
        assert_eq!(of(""), "");
    }
}
