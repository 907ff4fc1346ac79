//! A third party that both hosts of a move ask who holds the volume. It settles a commit in doubt without an operator.
//!
//! Without an arbiter the source's record alone is the commit point. A target that has prepared and cannot reach the
//! source then waits for an operator (`transhume resolve`). With an arbiter the commit point is a single
//! compare-and-swap there. It keeps one [`Ruling`] for each move, and only a caller that knows the ruling can change
//! it.
//!
//! ```text
//!  nothing is kept
//!    ╰──▶ open ──────────────────────▶ committed     by the source, while its guest is held
//!          │ ╲ the source takes a doubt back, once more
//!          │  ╰──────▶ withdrawn 1 ──▶ withdrawn 2 ──▶ ...
//!          │               ╰────────────┴──▶ committed, as above
//!          ╰────────────── or ─────────────▶ abandoned     by the target, which takes the volume no more
//! ```
//!
//! The source writes *open* before its guest is held. So a move that was asked about and of which nothing is kept was
//! forgotten: the arbiter was restored from an older state. That is no ruling, and nobody goes on by it.
//!
//! A commit names the ruling that it follows. So a commit that was asked for long ago, and whose answer nobody has,
//! cannot arrive after it was taken back. A host that cannot reach the arbiter does not know the ruling, and does
//! nothing that another ruling would forbid. The source's guest is answered by both sides or by none. A target that has
//! prepared serves nobody.

pub(crate) mod etcd;

use std::sync::Arc;

use api::v1::{Error, ErrorCode};
use futures::future::BoxFuture;
use uuid::Uuid;

use crate::problem::Result;

/// How often a ruling may change while somebody abandons a move. Only the source changes it, once a switchover.
const ABANDON_TRIES: u32 = 10;

/// What has been decided of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ruling {
    /// Nothing is kept: the source has not announced the move yet, or what was decided is forgotten.
    Unknown,
    /// The source holds the volume and may commit.
    Open,
    /// The same, after it has taken so many commits in doubt back.
    Withdrawn(u32),
    /// The target holds the volume. Nothing follows.
    Committed,
    /// The source holds it, and this move never changes that. Nothing follows.
    Abandoned,
}

impl Ruling {
    /// What the source has left behind after so many commits that it took back.
    #[must_use]
    pub const fn after(withdrawals: u32) -> Self {
        match withdrawals {
            0 => Self::Open,
            withdrawals => Self::Withdrawn(withdrawals),
        }
    }

    /// How many commits the source has taken back.
    pub(crate) const fn withdrawals(self) -> u32 {
        match self {
            Self::Withdrawn(withdrawals) => withdrawals,
            Self::Unknown | Self::Open | Self::Committed | Self::Abandoned => 0,
        }
    }

    /// The words that are kept; none for what is not. An older version reads *open* as the 0th withdrawal, which is the same.
    #[must_use]
    pub fn to_text(self) -> Option<String> {
        match self {
            Self::Unknown => None,
            Self::Open => Some("withdrawn 0".to_owned()),
            Self::Withdrawn(number) => Some(format!("withdrawn {number}")),
            Self::Committed => Some("committed".to_owned()),
            Self::Abandoned => Some("abandoned".to_owned()),
        }
    }

    /// The ruling in these words.
    #[must_use]
    pub fn from_text(text: &str) -> Option<Self> {
        match text {
            "committed" => Some(Self::Committed),
            "abandoned" => Some(Self::Abandoned),
            text => Some(Self::after(text.strip_prefix("withdrawn ")?.parse().ok()?)),
        }
    }

    /// What it means, for people.
    pub(crate) const fn meaning(self) -> &'static str {
        match self {
            Self::Unknown => "it knows nothing of the move",
            Self::Open | Self::Withdrawn(_) => "the volume has not been given up",
            Self::Committed => "the volume has been given up to the target",
            Self::Abandoned => "the target takes it no more",
        }
    }
}

/// Keeps one ruling for each move.
pub trait Arbiter: Send + Sync {
    /// Makes `wanted` the ruling on the move `job` if that is `expected` now, in one step. Gives the ruling after that.
    /// To ask again is harmless.
    ///
    /// # Errors
    /// It cannot be asked: whether that was done nobody knows.
    fn decide(&self, job: Uuid, expected: Ruling, wanted: Ruling) -> BoxFuture<'_, Result<Ruling>>;

    /// The ruling on the move `job`.
    ///
    /// # Errors
    /// It cannot be asked.
    fn ruling(&self, job: Uuid) -> BoxFuture<'_, Result<Ruling>>;

    /// Forgets the ruling on the move `job`. Both hosts have on record what has become of it, and nobody asks any more.
    ///
    /// # Errors
    /// It cannot be asked; then the ruling stays, and harms nobody.
    fn forget(&self, job: Uuid) -> BoxFuture<'_, Result<()>>;
}

/// Makes sure that the move `job` is never committed any more. Gives the ruling: abandoned, or committed if that came
/// first.
pub(crate) async fn abandon(arbiter: &dyn Arbiter, job: Uuid) -> Result<Ruling> {
    let mut ruling = arbiter.ruling(job).await?;
    for _ in 0..ABANDON_TRIES {
        if matches!(ruling, Ruling::Committed | Ruling::Abandoned) {
            return Ok(ruling);
        }
        ruling = arbiter.decide(job, ruling, Ruling::Abandoned).await?;
    }
    Err(unreachable("its ruling changes each time that it is asked"))
}

/// The arbiter that the configuration names, if any.
///
/// # Errors
/// What is configured makes no sense.
pub(crate) fn of_config(env: &env::EnvRef, members: &[String]) -> Result<Option<Arc<dyn Arbiter>>> {
    match members {
        [] => Ok(None),
        members => Ok(Some(Arc::new(etcd::Etcd::new(Arc::clone(env), members)?))),
    }
}

/// # Errors
/// What is configured makes no sense.
pub(crate) fn check(members: &[String]) -> Result<()> {
    etcd::parse_members(members).map(drop)
}

/// The arbiter cannot be asked, for this reason.
pub(crate) fn unreachable(why: &str) -> Error {
    Error::new(ErrorCode::ArbiterUnreachable, format!("the arbiter cannot be asked: {why}")).with_hint(
        "see to the etcd cluster that `arbiter` in the section [hosts] names; until it answers nobody decides",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_are_read_as_they_are_written() {
        for ruling in [Ruling::Open, Ruling::Withdrawn(1), Ruling::Withdrawn(77), Ruling::Committed, Ruling::Abandoned]
        {
            assert_eq!(Ruling::from_text(&ruling.to_text().expect("words")), Some(ruling));
        }
        assert_eq!(Ruling::Unknown.to_text(), None);
        for text in ["", "withdrawn", "withdrawn -1", "commit"] {
            assert_eq!(Ruling::from_text(text), None, "{text}");
        }
    }
}
