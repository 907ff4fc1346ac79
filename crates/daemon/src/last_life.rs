//! When the daemon that was here before lived last, and whether somebody has used the target of its move since.
//!
//! ```text
//!   while anything moves ──▶ the time is noted twice a second, in STATE/alive, with how each target is
//!   a start finds a move ──▶ its target is as it was noted, or was changed by nobody after that ──▶ it goes on
//!                            it was ──▶ the move waits for a word, and touches nothing
//! ```
//!
//! The target of a move is the daemon's own file, as long as the daemon lives. Whoever finds it dead may go on by hand: copies again to the
//! same name, and starts a VM there. So a target that was changed since is neither written nor deleted before somebody says so. Of block
//! devices and exports nobody knows when they were changed.
//!
//! A file tells by the clock of its file system when it was changed. That clock is a server's if a server keeps the file, and may be wrong
//! by any time. So a daemon looks at its targets as often as it notes the time. A change between two looks was stamped between them: that
//! tells how far the two clocks are apart. A clock for which they may be the same counts as this host's own.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use backends::ImageTimes;
use env::EnvRef;
use uuid::Uuid;

use crate::audit::unix_ms;
use crate::document::{JobDocument, TargetSeen};
use crate::platform::Backends;
use crate::state_dir::Layout;

/// How often the time is noted.
const INTERVAL: Duration = Duration::from_millis(500);
/// How long a note waits for the look at a target. One that comes later does not count.
const LOOK_LIMIT: Duration = Duration::from_millis(250);
/// Two looks that are further apart say nothing of the clocks.
const LOOKS_APART_MAX: Duration = Duration::from_secs(2);
/// So much later than the last note a change is still taken for that daemon's own: it may have been busy.
const SLACK: Duration = Duration::from_secs(5);
/// The same of a target that another program was seen to use.
const SLACK_IN_USE: Duration = Duration::from_secs(1);
/// The file begins anew when it is so long.
const NOTES_BYTES_MAX: usize = 256 << 10;

/// What a daemon has noted of its life.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct LastLife {
    /// When it lived last; none if nobody knows.
    pub(crate) alive: Option<SystemTime>,
    /// How it saw the targets of moves that it had open, by the moves.
    targets: BTreeMap<Uuid, TargetSeen>,
}

impl LastLife {
    /// What the daemon that was here before has noted. A power loss takes the newest notes and leaves what was written to the target, so
    /// notes of another boot than `boot` say nothing.
    pub(crate) fn read(layout: &Layout, boot: [u8; 16]) -> Self {
        let notes = layout.files().read(&layout.alive()).unwrap_or_default();
        Self::last_in(&notes, boot).unwrap_or_default()
    }

    /// The last complete one of `notes`, if it is of `boot`.
    fn last_in(notes: &[u8], boot: [u8; 16]) -> Option<Self> {
        let complete = &notes[..notes.iter().rposition(|byte| *byte == b'\n')?];
        let last = complete.rsplit(|byte| *byte == b'\n').next()?;
        let mut words = std::str::from_utf8(last).ok()?.split(' ');
        let milliseconds = words.next()?.parse().ok()?;
        if words.next()?.parse() != Ok(Uuid::from_bytes(boot)) {
            return None;
        }
        let alive = UNIX_EPOCH.checked_add(Duration::from_millis(milliseconds));
        Some(Self { alive, targets: words.filter_map(target_in).collect() })
    }

    /// How it saw the target of the move `job`, if it had that open.
    pub(crate) fn target_of(&self, job: Uuid) -> Option<TargetSeen> {
        self.targets.get(&job).copied()
    }

    /// As it is noted, in a line.
    fn encode(&self, boot: [u8; 16]) -> String {
        let alive = unix_ms(self.alive.unwrap_or(UNIX_EPOCH));
        let mut line = format!("{alive} {}", Uuid::from_bytes(boot));
        for (job, TargetSeen { times, clock_ahead_ns }) in &self.targets {
            let (modified, changed) = (times.modified_ns(), times.changed_ns());
            // Memory takes it.
            let _ = write!(line, " {job}:{modified}:{changed}:{clock_ahead_ns}");
        }
        line + "\n"
    }
}

/// What a word of a note says of the target of a move.
fn target_in(word: &str) -> Option<(Uuid, TargetSeen)> {
    let mut parts = word.split(':');
    let job = parts.next()?.parse().ok()?;
    let mut number = || parts.next()?.parse::<i64>().ok();
    let times = ImageTimes::new(number()?, number()?);
    Some((job, TargetSeen { times, clock_ahead_ns: number()? }))
}

/// A move, as far as it is noted.
pub(crate) struct Moving {
    /// What its record calls it.
    pub(crate) job: Uuid,
    /// The file that it copies to, while this daemon has that open.
    pub(crate) target: Option<PathBuf>,
}

/// A target that is looked at.
#[derive(Clone, Copy)]
struct Looked {
    seen: TargetSeen,
    /// When the last look at it was begun. None if that was another daemon's.
    begun: Option<SystemTime>,
}

impl Looked {
    /// The same after one more look, which was `begun` and `ended` then and has found `times`.
    fn again(before: Option<&Self>, times: ImageTimes, (begun, ended): (SystemTime, SystemTime)) -> Self {
        let known = before.map_or(0, |before| before.seen.clock_ahead_ns);
        let measured = before.and_then(|before| {
            // Only the time of the last change cannot be set by whoever likes to.
            let is_changed = before.seen.times.changed_ns() != times.changed_ns();
            clock_ahead(times.changed_ns(), (before.begun?, ended)).filter(|_| is_changed)
        });
        Self { seen: TargetSeen { times, clock_ahead_ns: measured.unwrap_or(known) }, begun: Some(begun) }
    }
}

/// How far a clock is ahead that has stamped `changed_ns` on something between the two times: no further than it must be.
fn clock_ahead(changed_ns: i64, (earliest, latest): (SystemTime, SystemTime)) -> Option<i64> {
    // Otherwise this host was busy, or its clock was set.
    latest.duration_since(earliest).ok().filter(|apart| *apart <= LOOKS_APART_MAX)?;
    let least = changed_ns.checked_sub(unix_ns(latest)?)?;
    let most = changed_ns.checked_sub(unix_ns(earliest)?)?;
    Some(0_i64.clamp(least, most))
}

fn unix_ns(time: SystemTime) -> Option<i64> {
    time.duration_since(UNIX_EPOCH).ok().and_then(|since| i64::try_from(since.as_nanos()).ok())
}

/// Notes that this daemon lives.
pub(crate) struct LifeNotes {
    layout: Layout,
    boot: [u8; 16],
    backends: Arc<dyn Backends>,
    looked: BTreeMap<Uuid, Looked>,
    /// How long the file is; none before it is this daemon's.
    bytes: Option<usize>,
}

impl LifeNotes {
    /// For a daemon that comes after `last_life`.
    pub(crate) fn new(layout: Layout, boot: [u8; 16], backends: Arc<dyn Backends>, last_life: &LastLife) -> Self {
        let looked = last_life.targets.iter().map(|(job, seen)| (*job, Looked { seen: *seen, begun: None }));
        Self { layout, boot, backends, looked: looked.collect(), bytes: None }
    }

    /// Notes it for as long as `moving` tells what moves: none ends it.
    pub(crate) async fn keep(mut self, env: EnvRef, moving: impl Fn() -> Option<Vec<Moving>>) {
        while let Some(moving) = moving() {
            if !moving.is_empty() {
                self.look(&env, &moving).await;
                self.note(env.wall_clock(), &moving);
            }
            env.sleep(INTERVAL).await;
        }
    }

    /// Looks at the targets that are open. Of one that does not answer counts what was seen before.
    async fn look(&mut self, env: &EnvRef, moving: &[Moving]) {
        self.looked.retain(|job, _| moving.iter().any(|one| one.job == *job));
        let (backends, begun) = (&self.backends, env.wall_clock());
        let looks = moving.iter().filter_map(|one| {
            let path = one.target.as_deref()?;
            Some(async move {
                let state = env::timeout(&**env, LOOK_LIMIT, backends.image_state(path)).await;
                Some((one.job, state?.ok()??.times))
            })
        });
        let found = futures::future::join_all(looks).await;
        let ended = env.wall_clock();
        for (job, times) in found.into_iter().flatten() {
            let looked = Looked::again(self.looked.get(&job), times, (begun, ended));
            self.looked.insert(job, looked);
        }
    }

    /// A target that is not open is anybody's: how it is says nothing of what this daemon has left.
    fn note(&mut self, now: SystemTime, moving: &[Moving]) {
        let open = moving.iter().filter(|one| one.target.is_some());
        let targets = open.filter_map(|one| Some((one.job, self.looked.get(&one.job)?.seen))).collect();
        let note = LastLife { alive: Some(now), targets }.encode(self.boot);
        let (path, length) = (self.layout.alive(), note.len());
        let noted = match self.bytes.filter(|bytes| bytes + length <= NOTES_BYTES_MAX) {
            Some(bytes) => self.layout.files().append(&path, note.as_bytes()).map(|()| bytes + length),
            None => self.layout.files().write(&path, note.as_bytes()).map(|()| length),
        };
        match noted {
            Ok(bytes) => self.bytes = Some(bytes),
            Err(error) => tracing::debug!(%error, "that the daemon lives could not be noted"),
        }
    }
}

/// Whether somebody has changed the target of `job` since the daemon that was here before has ended, whose notes are `last_life`. `times`
/// are those of the target as it is now.
pub(crate) fn is_target_disturbed(last_life: &LastLife, job: &JobDocument, times: Option<ImageTimes>) -> bool {
    if job.disturbed {
        return true;
    }
    let Some(times) = times else { return job.target_was_in_use };
    if let Some(rested) = job.rested {
        return rested.target != times;
    }
    let left = job.left_unix_ms.map(|left| UNIX_EPOCH + Duration::from_millis(left));
    let seen = if left.is_some() { job.left_target } else { last_life.target_of(job.uuid) };
    if let Some(seen) = seen {
        if seen.times == times {
            return false;
        }
        // Only a clock that was set back has stamped it so, and what it says of later changes is worth nothing.
        if times.changed_ns() < seen.times.changed_ns() {
            return true;
        }
    }
    let Some(alive) = [last_life.alive, left].into_iter().flatten().min() else { return false };
    let begun = job.begun_unix_ms.unwrap_or(0).max(job.record.started_unix_ms);
    let alive = alive.max(UNIX_EPOCH + Duration::from_millis(begun));
    let newest = alive + if job.target_was_in_use { SLACK_IN_USE } else { SLACK };
    let newest = newest.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let newest = i128::try_from(newest).unwrap_or(i128::MAX);
    let newest = newest.saturating_add(seen.map_or(0, |seen| seen.clock_ahead_ns).into());
    // A copy may bring an old time along.
    i128::from(times.modified_ns().max(times.changed_ns())) > newest
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOOT: [u8; 16] = [7; 16];
    const SECOND_NS: i64 = 1_000_000_000;

    /// So many milliseconds after a time of this host.
    fn at(milliseconds: i64) -> SystemTime {
        UNIX_EPOCH + Duration::from_millis((1_000_000 + milliseconds).cast_unsigned())
    }

    /// The same on a file, by a clock that is `ahead` seconds ahead.
    fn stamp(milliseconds: i64, ahead: i64) -> ImageTimes {
        let ns = (1_000_000 + milliseconds) * 1_000_000 + ahead * SECOND_NS;
        ImageTimes::new(ns, ns)
    }

    fn job() -> JobDocument {
        let options = serde_json::to_value(migrate::MoveOptions::default()).expect("plain data");
        let text = serde_json::json!({
            "id": 3, "uuid": Uuid::nil(), "request": {"to": "file:/new.img"}, "requester": "root",
            "record": {"phase": "copying", "options": options, "sessions": 1, "started_unix_ms": 1},
            "target": {"spec": "file:/new.img", "origin": "created", "reads_zero": true,
                "identity": {"device": 1, "inode": 2, "born_ns": null}}});
        serde_json::from_value(text).expect("a document of today is read")
    }

    /// A daemon lives for two seconds, twice a second looks at a target that it writes to all the time, and is killed.
    fn life(ahead: i64) -> LastLife {
        let mut looked = None;
        for look in 0..4 {
            let (begun, ended) = (at(500 * look), at(500 * look + 1));
            looked = Some(Looked::again(looked.as_ref(), stamp(500 * look - 20, ahead), (begun, ended)));
        }
        let looked = looked.expect("it was looked at");
        LastLife { alive: Some(at(1501)), targets: BTreeMap::from([(Uuid::nil(), looked.seen)]) }
    }

    #[test]
    fn a_note_comes_back_in_its_boot_only_and_those_of_earlier_versions_do_too() {
        let life = life(-40);
        let mut notes = LastLife::default().encode(BOOT) + &life.encode(BOOT);
        assert_eq!(LastLife::last_in(notes.as_bytes(), BOOT).as_ref(), Some(&life));
        assert_eq!(LastLife::last_in(notes.as_bytes(), [8; 16]), None);
        notes.push_str("1501 half of a no");
        assert_eq!(LastLife::last_in(notes.as_bytes(), BOOT), Some(life));
        let old = format!("5000 {}\n", Uuid::from_bytes(BOOT));
        let alive = Some(UNIX_EPOCH + Duration::from_secs(5));
        assert_eq!(LastLife::last_in(old.as_bytes(), BOOT), Some(LastLife { alive, targets: BTreeMap::new() }));
    }

    #[test]
    fn a_servers_clock_makes_no_move_wait_and_hides_nobodys_use() {
        for ahead in [-3600, -40, -6, 0, 6, 40, 3600] {
            let life = life(ahead);
            let is_disturbed = |milliseconds, target_was_in_use| {
                let job = JobDocument { target_was_in_use, ..job() };
                is_target_disturbed(&life, &job, Some(stamp(milliseconds, ahead)))
            };
            // What was under way as the daemon ended, and a file that nobody has touched since.
            assert!(!is_disturbed(1900, false), "{ahead}: its own write");
            assert!(!is_disturbed(1480, true), "{ahead}: it is as it was");
            // The two clocks are known to half a second.
            assert!(is_disturbed(1500 + 7_000, false), "{ahead}: another program's write");
            assert!(is_disturbed(1500 + 2_000, true), "{ahead}: the write of one that was seen");
        }
    }

    #[test]
    fn this_hosts_own_clock_counts_as_it_is() {
        for changed in [stamp(1000, 0), stamp(1490, 0)] {
            // Its stamps are of the last tick.
            let seen = Looked { seen: TargetSeen { times: stamp(990, 0), clock_ahead_ns: 0 }, begun: Some(at(1000)) };
            let ahead = Looked::again(Some(&seen), changed, (at(1500), at(1510))).seen.clock_ahead_ns;
            assert_eq!(ahead, 0);
        }
        assert_eq!(clock_ahead(stamp(0, 0).changed_ns(), (at(9000), at(8000))), None, "it was set back");
        assert_eq!(clock_ahead(stamp(0, 0).changed_ns(), (at(0), at(3000))), None, "nobody looked for long");
    }

    #[test]
    fn a_target_that_rests_says_nothing_of_clocks_and_one_of_another_daemon_is_not_compared_with() {
        let known = TargetSeen { times: stamp(0, 40), clock_ahead_ns: 40 * SECOND_NS };
        let rests = Looked::again(
            Some(&Looked { seen: known, begun: Some(at(60_000)) }),
            known.times,
            (at(60_500), at(60_501)),
        );
        assert_eq!(rests.seen, known);
        let inherited =
            Looked::again(Some(&Looked { seen: known, begun: None }), stamp(60_000, 40), (at(60_500), at(60_501)));
        assert_eq!(inherited.seen.clock_ahead_ns, known.clock_ahead_ns);
    }

    #[test]
    fn what_the_daemon_saw_that_had_the_target_open_counts_whoever_waited_for_it_since() {
        let (life, seen) = (life(40), stamp(1480, 40));
        let left = JobDocument { left_unix_ms: Some(1_001_501), left_target: life.target_of(Uuid::nil()), ..job() };
        // One that has only waited: it had nothing open.
        let waited = LastLife { alive: Some(at(600_000)), targets: BTreeMap::new() };
        assert!(!is_target_disturbed(&waited, &left, Some(seen)));
        assert!(is_target_disturbed(&waited, &left, Some(stamp(30_000, 40))));
    }
}
