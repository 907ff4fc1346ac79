//! Moves that are over: one file each, the newest so many of them; and the last number that was given to a move.

use std::ops::Range;
use std::path::PathBuf;

use api::v1::Job;
use parking_lot::Mutex;

use crate::document::JobDocument;
use crate::problem::Result;
use crate::state_dir::Layout;

/// The file that holds the last number given. A move whose volume's journal cannot be read is seen nowhere else.
const LAST: &str = "last";

/// The moves that are over.
pub(crate) struct History {
    layout: Layout,
    /// How many are kept.
    limit: usize,
    /// Their numbers in order, and the next number to be given.
    ids: Mutex<(Vec<u64>, u64)>,
}

impl History {
    /// Looks at what is there.
    pub(crate) fn open(layout: Layout, limit: usize) -> Self {
        let mut ids: Vec<u64> = layout
            .files()
            .list(&layout.jobs())
            .unwrap_or_default()
            .into_iter()
            .filter_map(|path| path.file_name()?.to_str()?.strip_suffix(".json")?.parse().ok())
            .collect();
        ids.sort_unstable();
        let given = layout.files().read(&layout.jobs().join(LAST)).ok();
        let given = given.and_then(|text| String::from_utf8(text).ok()?.trim().parse::<u64>().ok());
        let next = ids.last().copied().max(given).map_or(1, |last| last + 1);
        Self { layout, limit, ids: Mutex::new((ids, next)) }
    }

    /// So many numbers that no job has had, on record as given.
    ///
    /// # Errors
    /// That could not be recorded.
    pub(crate) fn next_ids(&self, count: u64) -> Result<Range<u64>> {
        let mut ids = self.ids.lock();
        let next = ids.1 + count;
        self.layout.write_atomically(&self.layout.jobs().join(LAST), &format!("{}\n", next - 1))?;
        Ok(std::mem::replace(&mut ids.1, next)..next)
    }

    /// Job `id` exists: the next number is larger.
    pub(crate) fn note(&self, id: u64) {
        let mut ids = self.ids.lock();
        ids.1 = ids.1.max(id + 1);
    }

    /// Keeps a job that is over, and forgets the oldest if there are too many.
    pub(crate) fn keep(&self, job: &Job) -> Result<()> {
        let text = serde_json::to_string_pretty(job).expect("plain data serialises");
        self.layout.write_atomically(&self.path(job.id), &text)?;
        let mut ids = self.ids.lock();
        if !ids.0.contains(&job.id) {
            ids.0.push(job.id);
            ids.0.sort_unstable();
        }
        while ids.0.len() > self.limit {
            let oldest = ids.0.remove(0);
            self.layout.drop_file(&self.path(oldest));
        }
        Ok(())
    }

    /// Job `id`, if it is over and remembered.
    pub(crate) fn find(&self, id: u64) -> Option<Job> {
        serde_json::from_slice(&self.layout.files().read(&self.path(id)).ok()?).ok()
    }

    /// All of them, newest first.
    pub(crate) fn list(&self) -> Vec<Job> {
        self.newest(usize::MAX)
    }

    /// The last `count` of them, newest first.
    pub(crate) fn newest(&self, count: usize) -> Vec<Job> {
        let ids: Vec<u64> = self.ids.lock().0.iter().rev().take(count).copied().collect();
        ids.into_iter().filter_map(|id| self.find(id)).collect()
    }

    /// Job `id` of `volume`, if it is over and remembered. Programs of before have given a number twice when a journal could
    /// not be read: the one that began at another time is another job.
    pub(crate) fn find_of(&self, volume: &str, job: &JobDocument) -> Option<Job> {
        let is_it = |over: &Job| over.volume == volume && over.started_unix_ms == job.record.started_unix_ms;
        self.find(job.id).filter(is_it)
    }

    fn path(&self, id: u64) -> PathBuf {
        self.layout.jobs().join(format!("{id}.json"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_was_given_is_never_given_again() {
        let directory = tempfile::tempdir().expect("a directory");
        let layout = Layout::new(directory.path(), env::RealFiles::shared());
        std::fs::create_dir_all(layout.jobs()).expect("made");
        let open = || History::open(layout.clone(), 10);
        assert_eq!(open().next_ids(1).expect("recorded"), 1..2);
        // Its journal cannot be read, so nobody notes it.
        let history = open();
        assert_eq!(history.next_ids(2).expect("recorded"), 2..4);
        history.note(9);
        assert_eq!(history.next_ids(1).expect("recorded"), 10..11);
        assert_eq!(open().next_ids(1).expect("recorded"), 11..12);
    }
}
