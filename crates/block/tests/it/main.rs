//! The slot and the range lock, by model and by threads. One program: what it links is linked once.

mod models;
mod slot_under_threads;
