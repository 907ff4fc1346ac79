//! What is recorded of a grain.

use std::fmt::Debug;
use std::ops::Range;

/// How many bytes of states a map sector has.
pub(crate) const BODY_BYTES: usize = 496;

/// The states of the grains of one map sector.
pub(crate) type Body = [u8; BODY_BYTES];

/// What is recorded of one grain, in a number of bits that is the same for all.
pub(crate) trait Entry: Copy + Eq + Debug + Send + Sync + 'static {
    /// How many bits of a sector's body a grain has: a divisor or a multiple of eight.
    const BITS: u32;
    /// How many grains a map sector speaks of.
    const SECTOR_GRAINS: u64 = BODY_BYTES as u64 * 8 / Self::BITS as u64;
    /// What a sector says of its grains that was never written: a body of zeroes.
    const NOTHING: Self;
    /// How many classes of states are counted.
    const CLASSES: usize;

    /// Whether what has left the store was changed in the base, always. Then that alone is as the volume is.
    const LEAVES_CHANGED: bool = false;

    /// As which of the classes it counts.
    fn class(self) -> usize;

    /// Whether the store has what is read here. The base shows through everything else.
    fn hides_base(self) -> bool;

    /// The state of the grain with this number in a sector; none if the bits mean nothing.
    fn decode(body: &Body, grain: u64) -> Option<Self>;

    /// Sets the grains of `run`, counted from the sector's first, to `self`.
    fn fill(self, body: &mut Body, run: Range<u64>);

    /// What is recorded of a grain of which the durable map says this, and `now` is true, after the base may have lost what it got of it.
    /// None if the store has no more of it than `now` says, or the base is known to have it.
    fn taken_back(self, now: Self) -> Option<Self> {
        (self.hides_base() && !now.hides_base()).then_some(self)
    }

    /// What the durable map says of it, and a power loss leaves. The default is all of it.
    fn lasting(self) -> Self {
        self
    }

    /// The same of the grains of a whole map sector.
    fn lasting_body(body: &Body) -> Body {
        *body
    }

    /// The state of a grain in a body that was checked when it was read.
    fn of(body: &Body, grain: u64) -> Self {
        Self::decode(body, grain).expect("bodies are checked when they are read")
    }

    /// The numbers of the map sectors that speak of `run`.
    fn sectors_of(run: &Range<u64>) -> Range<u64> {
        run.start / Self::SECTOR_GRAINS..run.end.div_ceil(Self::SECTOR_GRAINS)
    }
}
