//! The wire between two hosts over connections in memory: what a device over it does, how sessions and streams begin and
//! end, what is refused, and that no bytes from either side do any harm.

mod basics;
mod garbage;
mod harness;
mod limits;
mod rates;
mod recorded;
mod survival;
mod versions;
