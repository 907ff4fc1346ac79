//! The memory engine, alone and on the memory of a process. One program: what it links is linked once.

mod engine;
mod process;
