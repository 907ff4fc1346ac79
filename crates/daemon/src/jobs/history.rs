//! Moves that are over: one file each, the newest so many of them.

use std::path::PathBuf;

use api::v1::Job;
use parking_lot::Mutex;

use crate::problem::Result;
use crate::state_dir::{drop_file, write_atomically};

/// The moves that are over.
pub(crate) struct History {
    directory: PathBuf,
    /// How many are kept.
    limit: usize,
    /// Their numbers in order, and the next number to be given.
    ids: Mutex<(Vec<u64>, u64)>,
}

impl History {
    /// Looks at what is in `directory`.
    pub(crate) fn open(directory: PathBuf, limit: usize) -> Self {
        let mut ids: Vec<u64> = std::fs::read_dir(&directory)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.strip_suffix(".json")?.parse().ok())
            .collect();
        ids.sort_unstable();
        let next = ids.last().map_or(1, |last| last + 1);
        Self { directory, limit, ids: Mutex::new((ids, next)) }
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
        write_atomically(&self.path(job.id), &text)?;
        let mut ids = self.ids.lock();
        if !ids.0.contains(&job.id) {
            ids.0.push(job.id);
            ids.0.sort_unstable();
        }
        while ids.0.len() > self.limit {
            let oldest = ids.0.remove(0);
            drop_file(&self.path(oldest));
        }
        Ok(())
    }

    /// Job `id`, if it is over and remembered.
    pub(crate) fn find(&self, id: u64) -> Option<Job> {
        let text = std::fs::read_to_string(self.path(id)).ok()?;
        serde_json::from_str(&text).ok()
    }

    /// All of them, newest first.
    pub(crate) fn list(&self) -> Vec<Job> {
        let ids = self.ids.lock().0.clone();
        ids.into_iter().rev().filter_map(|id| self.find(id)).collect()
    }

    fn path(&self, id: u64) -> PathBuf {
        self.directory.join(format!("{id}.json"))
    }
}
