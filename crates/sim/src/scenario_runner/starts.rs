//! Starts of the daemon at which something is away, or is not what it was.

use std::time::Duration;

use futures::future::join_all;

use super::{JOB_LIMIT, ScenarioRunner};
use crate::disk::Absence;
use crate::fault_event::{Exchange, Part};
use crate::seat::Seat;

/// What is asked for is answered within this, if the daemon is to be stopped with nothing under way.
const STOP_LIMIT: Duration = Duration::from_secs(20);
/// How long a daemon may take then that is told to end. Its process is killed when that is over.
const REST_LIMIT: Duration = Duration::from_secs(60);
/// How long something is away, at most one of these.
const AWAY_MS: [u64; 4] = [2, 50, 1000, 8000];
/// How long a store is looked at that is not what it was.
const LOOK_SPAN: Duration = Duration::from_millis(40);
/// How long a guest works on after a stop of the daemon.
const WORK_SPAN: Duration = Duration::from_millis(10);

/// How a process has ended.
#[derive(Clone, Copy)]
enum Ending {
    /// It was told to, and has left everything as its next start is to find it.
    Told,
    /// It was killed.
    Killed,
}

impl Ending {
    /// After this long what somebody else changes can be told from what the process has changed: the times of files are coarse, and after
    /// a crash the daemon takes what is hardly newer than what it has seen for its own.
    const fn unseen_for(self) -> Duration {
        match self {
            Self::Told => Duration::from_millis(5),
            Self::Killed => Duration::from_millis(2100),
        }
    }
}

impl ScenarioRunner<'_> {
    /// How `part` is away.
    fn absence_of(&self, part: Part, is_needed: bool) -> Absence {
        match part {
            Part::Layer | Part::Cache if !is_needed => Absence::Missing,
            Part::Source | Part::Target => self.rng.pick(&[Absence::Unreachable, Absence::Missing, Absence::Hanging]),
            Part::Layer | Part::Cache => self.rng.pick(&[Absence::Missing, Absence::Missing, Absence::Hanging]),
            Part::Store(_) => self.rng.pick(&[Absence::Missing, Absence::Unreachable]),
        }
    }

    fn away_span(&self) -> Duration {
        self.rng.up_to(Duration::from_millis(self.rng.pick(&AWAY_MS)))
    }

    /// Ends the process, politely or not. None if it must not end now.
    async fn end_process(&self) -> Option<Ending> {
        if !self.first().host.may_die().await {
            return None;
        }
        if self.rng.chance(0.5) && self.stop_politely().await {
            return Some(Ending::Told);
        }
        self.first().host.crash().await;
        Some(Ending::Killed)
    }

    /// Has the daemon end when it has answered everything, and keeps a copy of what the disks then hold. False if it has not ended so.
    async fn stop_politely(&self) -> bool {
        let stopped = join_all(self.seats.iter().map(|seat| seat.port.stop()));
        let is_answered = self.limited(STOP_LIMIT, stopped).await.is_some();
        let has_rested = self.limited(REST_LIMIT, self.first().host.come_to_rest()).await;
        let is_clean = is_answered && has_rested == Some(true);
        self.first().host.crash().await;
        for seat in &self.seats {
            for disk in seat.host.parts().into_iter().filter(|_| is_clean) {
                disk.let_go().await;
                disk.keep_copy();
            }
            seat.port.go_on();
        }
        is_clean
    }

    pub(super) async fn start_without(&self, seat: &Seat, part: Part) -> bool {
        let host = &self.first().host;
        let outage = host.outage().await;
        let Some(disk) = seat.host.part(part) else { return false };
        if part == Part::Target {
            seat.host.expect_to_go_on();
        }
        let is_needed = seat.host.needs(part);
        if self.end_process().await.is_none() {
            return false;
        }
        disk.go_away(self.absence_of(part, is_needed), is_needed);
        self.world.sleep(self.rng.up_to(self.scenario.downtime)).await;
        host.boot();
        drop(outage);
        self.world.sleep(self.away_span()).await;
        for _ in 0..self.rng.below(3) {
            let _outage = host.outage().await;
            self.crash().await;
            self.world.sleep(self.away_span()).await;
        }
        if !is_needed {
            let what =
                format!("the guest is not served while {} is away, which its volume can do without", disk.name());
            self.within(JOB_LIMIT, &what, seat, seat.guest.read_all()).await;
        }
        disk.come_back();
        true
    }

    /// For a while, under a daemon that runs.
    pub(super) fn take_away(&self, seat: &Seat, part: Part) -> bool {
        let Some(disk) = seat.host.part(part) else { return false };
        disk.go_away(self.rng.pick(&[Absence::Unreachable, Absence::Hanging]), seat.host.needs(part));
        let (world, span) = (self.world.clone(), self.away_span());
        self.world.spawn(async move {
            world.sleep(span).await;
            disk.come_back();
        });
        true
    }

    pub(super) fn lose_flush(&self, seat: &Seat, part: Part) -> bool {
        let Some(disk) = seat.host.part(part) else { return false };
        disk.lose_next_flush();
        true
    }

    /// The daemon ends, and starts with another disk in the place of `part`.
    pub(super) async fn start_exchanged(&self, seat: &Seat, part: Part, exchange: Exchange) -> bool {
        let host = &self.first().host;
        if exchange == Exchange::RolledBack && seat.host.part(part).is_some_and(|disk| !disk.has_copy()) {
            let _outage = host.outage().await;
            if !host.may_die().await {
                return false;
            }
            self.stop_politely().await;
            host.boot();
            self.world.sleep(self.rng.up_to(WORK_SPAN)).await;
        }
        let outage = host.outage().await;
        let Some(disk) = seat.host.part(part).filter(|disk| exchange == Exchange::Blank || disk.has_copy()) else {
            return false;
        };
        if self.end_process().await.is_none() {
            return false;
        }
        disk.let_go().await;
        if exchange == Exchange::RolledBack && !disk.differs_from_copy() {
            // Nobody has come to write to it since: its copy is as good as it is.
            host.boot();
            return false;
        }
        disk.exchange(exchange == Exchange::Blank, seat.host.needs(part));
        host.boot();
        drop(outage);
        match part {
            Part::Store(number) => self.look_at_other_store(seat, number).await,
            _ => self.world.sleep(self.away_span()).await,
        }
        let _outage = host.outage().await;
        match part {
            // It stays: what the daemon has made of it, and what the other store has, is all there is.
            Part::Store(_) => disk.accept_exchange(),
            _ => {
                host.crash().await;
                disk.let_go().await;
                // If the backend had everything, the record allows a new cache on whatever is there, and nobody misses the other disk. If it
                // had not, what the guest has lost by that shows.
                if part == Part::Cache && disk.begins_otherwise_since_exchange() {
                    disk.accept_exchange()
                } else {
                    disk.put_right()
                }
                host.boot();
            }
        }
        true
    }

    /// One store of two is not what it was: either it is on record as lost, or it can stand in for the other one.
    async fn look_at_other_store(&self, seat: &Seat, number: u32) {
        let is_up = async {
            while !seat.host.is_up() {
                self.world.sleep(Duration::from_millis(1)).await;
            }
        };
        self.within(JOB_LIMIT, "a volume is down because of one store of two", seat, is_up).await;
        self.world.sleep(self.rng.up_to(LOOK_SPAN)).await;
        if !seat.host.is_store_lost(number) {
            seat.host.fail_reads_of_store(1 - number, true);
            self.world.sleep(LOOK_SPAN).await;
            seat.host.fail_reads_of_store(1 - number, false);
        }
    }

    /// The daemon ends, and somebody writes to the volume's disk before it starts again.
    pub(super) async fn change_behind(&self, seat: &Seat) -> bool {
        let host = &self.first().host;
        let _outage = host.outage().await;
        let Some(ending) = self.end_process().await else { return false };
        let disk = &seat.sides[seat.host.holder()];
        disk.let_go().await;
        self.world.sleep(ending.unseen_for()).await;
        seat.guest.change_behind(disk);
        self.world.sleep(self.rng.up_to(self.scenario.downtime)).await;
        host.boot();
        true
    }

    /// What has lost a flush says so until it is opened again: an operator restarts the daemon.
    pub(super) async fn reopen_what_has_lost(&self) {
        if !self.scenario.loses_flushes() {
            return;
        }
        let _outage = self.first().host.outage().await;
        self.stop_politely().await;
        self.first().host.boot();
    }
}
