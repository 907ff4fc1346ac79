//! Server and client, against each other, raw bytes and other programs. One program: what it links is linked once.

mod backend;
mod client;
mod common;
mod connection_fence;
mod handshake;
mod isolation;
mod mutations;
mod tls;
mod tools;
mod transmission;
