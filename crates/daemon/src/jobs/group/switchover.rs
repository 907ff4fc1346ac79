//! The one switchover of moves that belong together.
//!
//! ```text
//!   away ──turn──▶ ready ──all are──▶ passed ──before_commit──▶ held ──all are──▶ commit ──▶ asked ──all have──▶ one store
//!    ▲              │                   │                        │                             │                  │    │
//!    └──────────────┴──── put off ──────┴────────────────────────┘          one is not held    ▼   the store      │    │ durable
//!                                                                           any more ──────▶ in doubt ◀─ failed ──┘    ▼
//!                                                                                              │ commit again        committed,
//!                                                                                              ▼                     then each
//!                                                                                            asked                   member's own
//! ```
//!
//! Each member's migration is driven by itself, and knows of the others only by its journal: [`GroupMember`] stands in
//! front of that. It holds the guests of all volumes at about the same time, and has the one record stored that says that all
//! targets hold their volumes. Before that store nothing of any member counts, after it everything does.
//!
//! Who is *in doubt* has asked for the commit, and its guest works on both sides until a store has settled it. It may have
//! come there although nothing was stored, because another member could not be committed: that is settled as any doubt is.

use std::collections::BTreeMap;
use std::sync::Arc;

use block::{Error, ErrorKind, IoFuture};
use futures::future::BoxFuture;
use migrate::{JobJournal, Phase};
use parking_lot::Mutex;
use tokio::sync::Notify;
use uuid::Uuid;

use super::record::{GroupJournal, GroupState, is_machine, machine_of};
use crate::jobs::JobHandle;
use crate::journal::VolumeJournal;
use crate::remote::GroupRuling;

/// How far a member is on its way to the commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Its copy is not complete, or it was put off.
    Away,
    /// It could hold its guest, and waits for the others.
    Ready,
    /// The others are as far: its guest is about to be held.
    Passed,
    /// Its guest is held and its target durable.
    Held,
    /// It has asked for the commit.
    Asked,
    /// It has asked for the commit, and was told that this may count.
    InDoubt,
    /// Its move is over.
    Over,
}

/// Moves that switch over together.
pub(crate) struct Group {
    id: Uuid,
    /// What the arbiter says, if it decides.
    ruling: Option<GroupRuling>,
    /// Locked over a whole change, so that nobody decides on a state that is being stored.
    journal: tokio::sync::Mutex<GroupJournal>,
    state: Mutex<State>,
    /// Something of the state has changed.
    changed: Notify,
}

struct State {
    members: BTreeMap<String, Stage>,
    is_committed: bool,
    /// A store has failed, and none after it has ended well.
    is_in_doubt: bool,
    /// The doubt is the arbiter's to end, and none is configured any more.
    misses_ruling: bool,
    is_storing: bool,
    /// Why those in doubt are.
    why: Option<(ErrorKind, String)>,
}

impl State {
    fn all(&self, stages: &[Stage]) -> bool {
        self.members.values().all(|stage| stages.contains(stage))
    }

    fn stage(&mut self, member: &str) -> &mut Stage {
        self.members.get_mut(member).expect("a group knows its members")
    }

    fn doubt(&mut self, member: &str, why: (ErrorKind, String)) {
        *self.stage(member) = Stage::InDoubt;
        self.why = Some(why);
    }

    fn error(&self) -> Error {
        let (kind, why) = self.why.clone().unwrap_or((ErrorKind::Io, "the commit of the group is in doubt".to_owned()));
        Error::new(kind, why)
    }
}

/// What a member that has asked for the commit has to do next.
enum Asked {
    Committed,
    Store,
    Failed(Error),
}

impl Group {
    /// Over its record. Of the `members` of the record those that are not `under_way` are over.
    pub(super) fn new(journal: GroupJournal, ruling: Option<GroupRuling>, under_way: impl Fn(&str) -> bool) -> Self {
        let record = journal.record();
        let stage = |name: &String| if under_way(name) { Stage::Away } else { Stage::Over };
        let state = State {
            members: record.members.iter().map(|name| (name.clone(), stage(name))).collect(),
            is_committed: record.state == GroupState::Committed,
            is_in_doubt: false,
            misses_ruling: false,
            is_storing: false,
            why: None,
        };
        Self { id: record.id, ruling, journal: journal.into(), state: Mutex::new(state), changed: Notify::new() }
    }

    /// After a start, of one with a machine: what the journals of its volumes know beside its own record. One of them `was_committed`
    /// by the arbiter's ruling, or the arbiter `was_asked`.
    pub(super) fn found_with_machine(self, was_committed: bool, was_asked: bool) -> Self {
        {
            let mut state = self.state.lock();
            state.is_committed |= was_committed;
            state.is_in_doubt = was_asked && !state.is_committed;
            state.misses_ruling = state.is_in_doubt && self.ruling.is_none();
        }
        self
    }

    /// Whether a machine is among its members.
    pub(super) fn has_machine(&self) -> bool {
        self.state.lock().members.keys().any(|member| is_machine(member))
    }

    /// Its machines whose moves are not over.
    pub(super) fn machines(&self) -> Vec<String> {
        let state = self.state.lock();
        let under_way = state.members.iter().filter(|(_, stage)| **stage != Stage::Over);
        under_way.filter_map(|(member, _)| machine_of(member)).map(str::to_owned).collect()
    }

    /// Whether `member` is one of its members, and its move is not over.
    pub(super) fn awaits(&self, member: &str) -> bool {
        self.state.lock().members.get(member).is_some_and(|stage| *stage != Stage::Over)
    }

    /// Waits until every member but `member` could hold its guest.
    pub(super) async fn others_ready(&self, member: &str) {
        let is_ready = |stage: &Stage| matches!(stage, Stage::Ready | Stage::InDoubt);
        self.until(|state| {
            let mut others = state.members.iter().filter(|(name, _)| *name != member);
            others.all(|(_, stage)| is_ready(stage)).then_some(())
        })
        .await;
    }

    /// `member` could hold its guest: waits until all could.
    pub(super) async fn turn(&self, member: &str) {
        self.arrive(member);
        self.until(|state| (*state.stage(member) != Stage::Ready).then_some(())).await;
    }

    /// Whether the targets hold the volumes.
    pub(super) fn is_committed(&self) -> bool {
        self.state.lock().is_committed
    }

    /// The move of `member` is over and off its journal. Gives whether all are.
    pub(super) fn note_over(&self, member: &str) -> bool {
        self.change(|state| {
            *state.stage(member) = Stage::Over;
            state.all(&[Stage::Over])
        })
    }

    /// The other host's part is over, too: nobody asks the arbiter any more.
    pub(super) async fn forget_ruling(&self) {
        if let Some(ruling) = &self.ruling {
            ruling.forget().await;
        }
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let changed = change(&mut self.state.lock());
        self.changed.notify_waiters();
        changed
    }

    /// Waits until `look` finds something.
    async fn until<T>(&self, mut look: impl FnMut(&mut State) -> Option<T>) -> T {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            // Before the look: what changes after it is not missed.
            changed.as_mut().enable();
            if let Some(found) = look(&mut self.state.lock()) {
                return found;
            }
            changed.await;
        }
    }

    /// `member` could hold its guest. When all could, all go on.
    fn arrive(&self, member: &str) {
        self.change(|state| {
            *state.stage(member) = Stage::Ready;
            if state.all(&[Stage::Ready, Stage::InDoubt]) {
                let ready = state.members.values_mut().filter(|stage| **stage == Stage::Ready);
                ready.for_each(|stage| *stage = Stage::Passed);
            }
        });
    }

    /// `member` has left the way to the commit, unless it has asked for that.
    pub(super) fn leave(&self, member: &str) {
        self.change(|state| {
            let stage = state.stage(member);
            if !matches!(stage, Stage::Asked | Stage::InDoubt | Stage::Over) {
                *stage = Stage::Away;
            }
        });
    }

    /// Waits until every guest is held. One that is in doubt is not held, and need not be: its writes go to both sides.
    pub(super) async fn all_held(&self, member: &str) -> block::Result<()> {
        let is_in_doubt = self.change(|state| {
            let stage = state.stage(member);
            let is_in_doubt = *stage == Stage::InDoubt;
            if !is_in_doubt {
                *stage = Stage::Held;
            }
            is_in_doubt
        });
        let arrived = [Stage::Held, Stage::Asked, Stage::InDoubt];
        self.until(|state| {
            if state.all(&arrived) {
                return Some(Ok(()));
            }
            let one_has_left = !state.members.values().all(|stage| arrived.contains(stage) || *stage == Stage::Passed);
            let put_off = || Error::new(ErrorKind::Busy, "another disk of the machine is not held");
            (one_has_left && !is_in_doubt).then(|| Err(put_off()))
        })
        .await
    }

    /// `member` asks for the commit: it counts once all have and the record is durable.
    pub(super) async fn commit(&self, member: &str) -> block::Result<()> {
        self.change(|state| {
            if !state.is_committed {
                *state.stage(member) = Stage::Asked;
            }
        });
        loop {
            let next = self.until(|state| {
                if state.is_committed {
                    return Some(Asked::Committed);
                }
                if *state.stage(member) == Stage::InDoubt {
                    return Some(Asked::Failed(state.error()));
                }
                if state.is_storing {
                    return None;
                }
                if state.all(&[Stage::Asked]) {
                    state.is_storing = true;
                    return Some(Asked::Store);
                }
                if !state.all(&[Stage::Held, Stage::Asked, Stage::InDoubt]) {
                    let why = "another disk of the machine has left the switchover".to_owned();
                    state.doubt(member, (ErrorKind::TimedOut, why));
                    return Some(Asked::Failed(state.error()));
                }
                None
            });
            match next.await {
                Asked::Committed => return Ok(()),
                Asked::Failed(error) => return Err(error),
                Asked::Store => self.store_commit().await,
            }
        }
    }

    /// Stores the commit of all. No caller drops this half-way: a migration awaits a store that takes long to its end.
    async fn store_commit(&self) {
        let stored = async {
            let mut journal = self.journal.lock().await;
            if let Some(ruling) = &self.ruling {
                ruling.commit().await?;
            }
            journal.store(GroupState::Committed).await
        };
        let stored = stored.await;
        self.change(|state| {
            state.is_storing = false;
            match &stored {
                Ok(()) => state.is_committed = true,
                Err(error) => {
                    state.is_in_doubt = true;
                    let why = (error.kind(), format!("storing the commit of all disks: {}", error.chain()));
                    state.members.values_mut().for_each(|stage| *stage = Stage::InDoubt);
                    state.why = Some(why);
                }
            }
        });
        match stored {
            Ok(()) => tracing::info!(group = %self.id, "all disks of the machine are committed"),
            Err(error) => tracing::warn!(group = %self.id, error = error.chain(), "the commit of a group is in doubt"),
        }
    }

    /// Has the journals of the members have it on record, by `note`, that the commit is taken back. Nobody asks for that commit or
    /// settles it meanwhile, and afterwards only the target's word counts.
    ///
    /// # Errors
    /// It counts, or `note` has failed.
    pub(crate) async fn begin_abandoning(&self, note: impl Future<Output = block::Result<()>>) -> block::Result<()> {
        let _journal = self.journal.lock().await;
        if self.is_committed() {
            return Err(Error::new(ErrorKind::Fenced, "the disks are committed"));
        }
        note.await?;
        self.ruling.iter().for_each(GroupRuling::note_abandoning);
        Ok(())
    }

    /// Ends a doubt against the commit, whatever the arbiter may say of it: no target holds a volume, and none ever will by this
    /// commit.
    ///
    /// # Errors
    /// It counts, or that cannot be stored.
    pub(crate) async fn end_doubt(&self) -> block::Result<()> {
        let mut journal = self.journal.lock().await;
        if self.is_committed() {
            return Err(Error::new(ErrorKind::Fenced, "the disks are committed"));
        }
        journal.store(GroupState::Open).await?;
        self.change(|state| state.is_in_doubt = false);
        Ok(())
    }

    /// Takes the commit of all back for the sake of `member`, if it does not count. Gives whether it does.
    pub(super) async fn take_back(&self, member: &str) -> block::Result<bool> {
        let mut journal = self.journal.lock().await;
        let (is_committed, is_in_doubt, misses_ruling) = {
            let state = self.state.lock();
            (state.is_committed, state.is_in_doubt, state.misses_ruling)
        };
        if is_committed {
            return Ok(true);
        }
        let mut counts = false;
        if is_in_doubt {
            if misses_ruling {
                let context =
                    "the arbiter was asked, and this host knows of none: put `arbiter` back into the configuration";
                return Err(block::Error::new(block::ErrorKind::TimedOut, context));
            }
            if let Some(ruling) = &self.ruling {
                counts = ruling.settle().await?;
            }
            journal.store(if counts { GroupState::Committed } else { GroupState::Open }).await?;
        }
        self.change(|state| {
            (state.is_in_doubt, state.is_committed) = (false, counts);
            if !counts {
                *state.stage(member) = Stage::Away;
            }
        });
        Ok(counts)
    }
}

/// The journal of a member's job.
pub(super) struct GroupMember {
    pub(super) group: Arc<Group>,
    pub(super) name: String,
    /// The volume's own.
    pub(super) journal: Arc<VolumeJournal>,
    /// What would be its job's journal if it were alone.
    pub(super) own: Arc<dyn JobJournal>,
    pub(super) job: Option<Arc<JobHandle>>,
}

impl GroupMember {
    /// The group has committed: so does the volume's own journal.
    async fn commit_own(&self) -> block::Result<()> {
        if self.journal.document().job.as_ref().is_some_and(|job| job.committed.is_some()) {
            // An earlier store of it was waited for by nobody any more.
            return Ok(());
        }
        self.own.commit().await
    }
}

impl JobJournal for GroupMember {
    fn record(&self, phase: Phase) -> IoFuture<'_, ()> {
        assert!(!self.group.is_committed(), "what is committed goes to no phase of its source");
        self.group.leave(&self.name);
        self.own.record(phase)
    }

    fn failed(&self, error: &Error, is_unequal: bool) {
        self.own.failed(error, is_unequal);
    }

    fn may_commit(&self) -> IoFuture<'_, ()> {
        Box::pin(async {
            self.own.may_commit().await?;
            match &self.group.ruling {
                Some(ruling) => ruling.announce(&self.journal, self.job.as_deref()).await,
                None => Ok(()),
            }
        })
    }

    fn is_of_group(&self) -> bool {
        true
    }

    fn turn(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            let turn = self.group.turn(&self.name);
            // Its copy is complete: others that wait for a place, perhaps disks of the same machine, may have its.
            if let Some(job) = &self.job {
                job.give_place_back();
            }
            turn.await;
        })
    }

    fn put_off(&self) {
        self.group.leave(&self.name);
    }

    fn before_commit(&self) -> IoFuture<'_, ()> {
        Box::pin(async {
            self.own.before_commit().await?;
            self.group.all_held(&self.name).await
        })
    }

    fn commit(&self) -> IoFuture<'_, ()> {
        Box::pin(async {
            self.group.commit(&self.name).await?;
            self.commit_own().await
        })
    }

    fn revert(&self) -> IoFuture<'_, bool> {
        Box::pin(async {
            if self.group.take_back(&self.name).await? {
                self.commit_own().await?;
                return Ok(false);
            }
            self.own.revert().await
        })
    }

    fn committed(&self) {
        self.own.committed();
    }
}
