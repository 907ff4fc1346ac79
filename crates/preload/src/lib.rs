//! A library for `LD_PRELOAD` that has the kernel track which pages of a process's shared memory are written.
//!
//! ```text
//!   process with the library                         whoever moves its memory
//!     constructor: a thread, one unix socket   ◀──────  register PATH (and, where needed, /dev/userfaultfd)
//!     userfaultfd, asynchronous write protection
//!       over the mappings of PATH              ───────▶  where they are
//!                                                        PAGEMAP_SCAN on /proc/PID/pagemap: written since the last scan
//!                                              ◀──────  end of the connection: tracking ends
//! ```
//!
//! Only a process itself can register its memory with a userfaultfd, so something must run inside it. This does nothing else: it
//! intercepts no function, reads no memory, and handles no fault. In the asynchronous mode (Linux 6.7) the kernel
//! resolves every fault by itself, so a stuck or dead mover never stops the process.
//!
//! The socket's path is in [`SOCKET_VARIABLE`]. Without that variable the library does nothing. The first process with the library
//! notes its number in the environment. A wrapper that becomes the program by `exec` keeps its number, and the program begins anew with
//! the same socket. A child has another number: there the library only takes itself out of the environment. A process that forks and
//! goes on in the child (`-daemonize`, a wrapper without `exec`) has no tracking there.

mod constructor;
mod maps;
pub mod protocol;
mod server;
mod userfaultfd;

/// The environment variable with the path of the socket.
pub const SOCKET_VARIABLE: &str = "TRANSHUME_PRELOAD_SOCKET";
/// How the library's file is called.
pub const LIBRARY: &str = "libtranshume_preload.so";
