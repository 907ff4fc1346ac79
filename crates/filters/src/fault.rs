//! Makes a device fail, hang or slow down as its rules say.

use std::sync::Arc;
use std::time::Duration;

use block::{Buffer, Bytes, Device, Error, ErrorKind, Extent, ExtentStatus, Filter, IoFuture, Mutation, Result};
use env::EnvRef;
use parking_lot::Mutex;

/// A kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultVerb {
    /// Any request.
    Any,
    /// Reads.
    Read,
    /// Mutations of every kind.
    Write,
    /// Flushes.
    Flush,
    /// Questions for extents.
    Extents,
}

/// Which of the requests that a rule is about it strikes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FaultWhen {
    /// All of them.
    Always,
    /// The one with this number, counted from zero.
    Nth(u64),
    /// This many, from the one with this number on.
    Run {
        /// The first one struck, counted from zero.
        first: u64,
        /// How many are struck.
        count: u64,
    },
    /// Each with this probability (0 to 1), drawn from `env`.
    Probability(f64),
}

/// What happens to a request that is struck.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultAction {
    /// It fails and has no effect.
    Fail(ErrorKind),
    /// It is carried out, and then reported as failed.
    FailAfterwards(ErrorKind),
    /// It is carried out after this long.
    Delay(Duration),
    /// It is never answered.
    Hang,
    /// A mutation is answered without being carried out; anything else is carried out.
    Lose,
}

/// One rule: requests of a kind, of an extent, some of them, and what happens to those.
#[derive(Clone, Debug)]
pub struct FaultRule {
    /// The kind of request.
    pub verb: FaultVerb,
    /// Only requests that touch this extent; `None` for all. Flushes touch every extent.
    pub extent: Option<Extent>,
    /// Which of them.
    pub when: FaultWhen,
    /// What happens.
    pub action: FaultAction,
}

/// A device with faults. Its rules may be changed while it is used; the first one that strikes decides.
#[derive(Clone)]
pub struct Fault {
    lower: Device,
    env: EnvRef,
    rules: Arc<Mutex<Vec<(FaultRule, u64)>>>,
}

impl Fault {
    /// `lower` without a fault so far. Clones share their rules.
    #[must_use]
    pub fn new(lower: Device, env: EnvRef) -> Self {
        Self { lower, env, rules: Arc::default() }
    }

    /// Adds a rule; its count begins at zero.
    pub fn add(&self, rule: FaultRule) {
        self.rules.lock().push((rule, 0));
    }

    /// Forgets every rule: the device is well again. Requests that hang go on hanging.
    pub fn clear(&self) {
        self.rules.lock().clear();
    }

    fn strike(&self, verb: FaultVerb, extent: Option<Extent>) -> Option<FaultAction> {
        let mut rules = self.rules.lock();
        rules.iter_mut().find_map(|(rule, seen)| {
            let is_meant = rule.verb == FaultVerb::Any || rule.verb == verb;
            let touches = rule.extent.is_none_or(|bad| extent.is_none_or(|extent| extent.overlaps(bad)));
            if !is_meant || !touches {
                return None;
            }
            let number = *seen;
            *seen += 1;
            let is_struck = match rule.when {
                FaultWhen::Always => true,
                FaultWhen::Nth(nth) => number == nth,
                FaultWhen::Run { first, count } => (first..first.saturating_add(count)).contains(&number),
                FaultWhen::Probability(share) => (self.env.random() >> 11) as f64 / (1_u64 << 53) as f64 <= share,
            };
            is_struck.then_some(rule.action)
        })
    }

    /// Carries out `request` as `action` says.
    async fn act<T>(&self, action: Option<FaultAction>, request: impl Future<Output = Result<T>>) -> Result<T> {
        let failure = |kind| Error::new(kind, format!("an injected fault of {}", self.lower.name()));
        match action {
            None | Some(FaultAction::Lose) => request.await,
            Some(FaultAction::Fail(kind)) => Err(failure(kind)),
            Some(FaultAction::FailAfterwards(kind)) => {
                request.await?;
                Err(failure(kind))
            }
            Some(FaultAction::Delay(span)) => {
                self.env.sleep(span).await;
                request.await
            }
            Some(FaultAction::Hang) => std::future::pending().await,
        }
    }
}

impl Filter for Fault {
    fn lower(&self) -> &Device {
        &self.lower
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        let action = self.strike(FaultVerb::Read, Some(Extent::new(offset, buffer.len().into())));
        Box::pin(self.act(action, self.lower.read(offset, buffer)))
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        let action = self.strike(FaultVerb::Write, Some(mutation.extent()));
        if action == Some(FaultAction::Lose) {
            return block::ready(Ok(()));
        }
        Box::pin(self.act(action, self.lower.write(mutation)))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.act(self.strike(FaultVerb::Flush, None), self.lower.flush()))
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        Box::pin(self.act(self.strike(FaultVerb::Extents, Some(extent)), self.lower.extents(extent)))
    }
}
