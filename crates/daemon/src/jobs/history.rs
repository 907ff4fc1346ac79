//! Moves that are over: one file each, the newest so many of them.

use std::path::PathBuf;

use api::v1::Job;
use parking_lot::Mutex;

use crate::problem::Result;
use crate::state_dir::Layout;

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
        let next = ids.last().map_or(1, |last| last + 1);
        Self { layout, limit, ids: Mutex::new((ids, next)) }
    }

    /// A number that no job has.
    pub(crate) fn next_id(&self) -> u64 {
        let mut ids = self.ids.lock();
        ids.1 += 1;
        ids.1 - 1
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

    fn path(&self, id: u64) -> PathBuf {
        self.layout.jobs().join(format!("{id}.json"))
    }
}
