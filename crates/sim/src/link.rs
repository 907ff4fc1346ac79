//! A network link: bandwidth, latency, queues, connections that share it fairly, and what can go wrong with it.
//!
//! ```text
//!   write ─▶ send queue of the connection ─▶ ╮ one segment of each connection in turn ╭─▶ latency ─▶ receive queue ─▶ read
//!   write ─▶ send queue of the connection ─▶ ╯ (up to 64 KiB, at the link's rate)      ╰─▶ latency ─▶ receive queue ─▶ read
//! ```
//!
//! Each way of a link is like this by itself (full duplex). A connection has at most [`LinkFigures::window`] bytes
//! between its writer and its reader. So it never gets more than a window a round trip, and a writer whose reader does
//! not read waits. Losses, retransmission and slow start are not modelled. A connection is what TCP makes of a link,
//! and what TCP cannot hide is here.
//!
//! | fault | what it does |
//! |---|---|
//! | [`Link::cut`] | every connection ends with a reset on both sides; what was on its way is lost |
//! | [`Link::set_up`] | while it is down nothing moves; afterwards all of it goes on (a flap, as TCP sees it) |
//! | [`Link::silence`] | what one side of every present connection sends vanishes, its end and resets included: half open |
//! | [`Link::silence_one`] | the same of one connection |
//! | [`Link::with_late_resets`] | what a dead connection has on its way arrives when the link is up again, and is read |
//! | [`LinkFaults::reorder`] | segments of different connections overtake each other; within one they never do |
//! | [`LinkFaults::corrupt`] | a bit of a segment changes, as behind a checksum of 16 bits |
//! | [`Link::set_rate`] | it becomes slower or faster |
//! | [`Link::set_reading`] | one side does not read: what is sent to it fills the window, and then its sender waits |
//!
//! Figures for real links: 1 Gbit/s Ethernet carries 117 MB/s of TCP payload and 10 Gbit/s 1,170 (1500-byte frames, 94
//! %). One way takes 50 us within a rack, 1 ms within a city, 30 ms across a continent (all assumed).

mod state;
mod stream;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::rng::Rng;
use crate::world::World;
use state::State;
pub use stream::SimStream;

/// What a link is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkFigures {
    /// Bytes a second, each way.
    pub rate: u64,
    /// One way.
    pub latency: Duration,
    /// How many bytes of a connection may be between writer and reader.
    pub window: usize,
}

impl LinkFigures {
    /// 1 Gbit/s within a rack.
    pub const GIGABIT: Self = Self { rate: 117_000_000, latency: Duration::from_micros(50), window: 4 << 20 };
    /// 10 Gbit/s within a rack.
    pub const TEN_GIGABIT: Self = Self { rate: 1_170_000_000, ..Self::GIGABIT };
}

/// What may go wrong with every segment. The default is nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LinkFaults {
    /// How often a bit of a segment changes.
    pub corrupt: f64,
    /// Up to this is added to a segment's way.
    pub reorder: Duration,
}

/// One side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Who connected.
    Client,
    /// Who accepted.
    Server,
}

/// A link. Clones are the same link.
#[derive(Clone)]
pub struct Link {
    shared: Arc<Shared>,
}

struct Shared {
    name: &'static str,
    world: World,
    rng: Rng,
    state: Mutex<State>,
    kick: Notify,
}

impl Link {
    /// A link without connections.
    #[must_use]
    pub fn new(world: &World, name: &'static str, figures: LinkFigures) -> Self {
        let shared = Shared {
            name,
            world: world.clone(),
            rng: world.rng(name),
            state: Mutex::new(State::new(figures)),
            kick: Notify::new(),
        };
        let link = Self { shared: Arc::new(shared) };
        let driven = link.clone();
        world.spawn(async move { driven.drive().await });
        link
    }

    /// A connection: the client's end and the server's. It exists at once: establishing it takes no time.
    #[must_use]
    pub fn connect(&self) -> (SimStream, SimStream) {
        let flows = self.shared.state.lock().connect();
        (SimStream::new(self, flows[0], flows[1]), SimStream::new(self, flows[1], flows[0]))
    }

    /// What may go wrong from now on.
    pub fn set_faults(&self, faults: LinkFaults) {
        self.shared.state.lock().faults = faults;
    }

    /// Has a side that is gone be known to the other only while the link is up. What was sent before may then arrive after the
    /// sender has given the connection up and said the same on another one, as over TCP.
    #[must_use]
    pub fn with_late_resets(self) -> Self {
        self.shared.state.lock().has_late_resets = true;
        self
    }

    /// Takes it down or up again.
    pub fn set_up(&self, is_up: bool) {
        if !is_up {
            self.shared.world.fault("link-down", format_args!("{}", self.shared.name));
        }
        self.shared.state.lock().is_up = is_up;
        self.shared.kick.notify_one();
    }

    /// Changes its rate, in bytes a second each way.
    pub fn set_rate(&self, rate: u64) {
        self.shared.state.lock().figures.rate = rate.max(1);
    }

    /// Ends all connections with a reset on both sides.
    pub fn cut(&self) {
        self.shared.world.fault("link-cut", format_args!("{}", self.shared.name));
        self.shared.state.lock().cut();
    }

    /// What `side` of every present connection sends from now on, or has on its way, vanishes.
    pub fn silence(&self, side: Side) {
        self.shared.world.fault("half-open", format_args!("{}: the {side:?} is not heard", self.shared.name));
        self.shared.state.lock().silence(side);
    }

    /// The same of one connection that is alive, if there is one.
    pub fn silence_one(&self, side: Side) {
        let name = self.shared.name;
        self.shared.world.fault("half-open", format_args!("{name}: the {side:?} of a connection is not heard"));
        self.shared.state.lock().silence_one(side, &self.shared.rng);
    }

    /// Whether `side` of all connections reads what has arrived.
    pub fn set_reading(&self, side: Side, reads: bool) {
        if !reads {
            self.shared.world.fault("slow-reader", format_args!("{}: the {side:?}", self.shared.name));
        }
        self.shared.state.lock().set_reading(side, reads);
    }

    /// How many bytes have arrived from clients and from servers.
    #[must_use]
    pub fn arrived(&self) -> [u64; 2] {
        self.shared.state.lock().arrived
    }

    async fn drive(&self) {
        let Shared { world, rng, kick, state, .. } = &*self.shared;
        loop {
            let kicked = kick.notified();
            let (next, corrupted) = {
                let mut state = state.lock();
                let corrupted = state.advance(world.now(), rng);
                (state.next(), corrupted)
            };
            for _ in 0..corrupted {
                world.fault("corrupt-segment", format_args!("{}", self.shared.name));
            }
            match next {
                Some(at) => {
                    tokio::select! {
                        biased;
                        () = kicked => {}
                        () = world.sleep_until(at) => {}
                    }
                }
                None => kicked.await,
            }
        }
    }
}
