//! A user's own traces, played as they are: from files that are read line by line, however long they are.
//!
//! `NAME.csv` and `NAME.csv.zst` are plain (`time_us,op,offset_bytes,length_bytes`), `.spc` and `.msr` are the archives' formats,
//! each compressed or not. No trace is part of this project.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::time::Duration;

use block::{Error, Result};
use sim::model::Verb;
use sim::rng::Rng;
use sim::trace::{self, Format, Record};
use sim::workload::{Step, Workload};

/// A trace in a file, surveyed once.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Recording {
    /// The file's name without its endings.
    pub(crate) name: String,
    path: PathBuf,
    is_spc: bool,
    is_msr: bool,
    /// How many requests it has.
    pub(crate) requests: u64,
    /// The byte after the last one that it touches.
    pub(crate) end: u64,
    /// From its first to its last request, in microseconds.
    pub(crate) span_us: u64,
}

impl Recording {
    /// All traces in `directory`, in the order of their names. Each is read once from end to end.
    ///
    /// # Errors
    /// The directory or a trace in it cannot be read, or a line is no request.
    pub(crate) fn all_in(directory: &Path) -> Result<Vec<Self>> {
        let context = || format!("reading {}", directory.display());
        let entries = std::fs::read_dir(directory).map_err(|error| Error::from_os(error, context()))?;
        let mut found = Vec::new();
        for entry in entries {
            let path = entry.map_err(|error| Error::from_os(error, context()))?.path();
            if let Some(recording) = Self::at(path)? {
                found.push(recording);
            }
        }
        found.sort();
        Ok(found)
    }

    fn at(path: PathBuf) -> Result<Option<Self>> {
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let name = file.strip_suffix(".zst").unwrap_or(&file);
        let known = [".csv", ".spc", ".msr"].into_iter().find_map(|ending| Some((name.strip_suffix(ending)?, ending)));
        let Some((name, ending)) = known else { return Ok(None) };
        let mut recording = Self {
            name: name.to_owned(),
            path,
            is_spc: ending == ".spc",
            is_msr: ending == ".msr",
            requests: 0,
            end: 0,
            span_us: 0,
        };
        let mut first = None;
        for record in recording.records()? {
            let record = record?;
            let since = record.at.saturating_sub(*first.get_or_insert(record.at));
            recording.requests += 1;
            recording.end = recording.end.max(record.request.end());
            recording.span_us = recording.span_us.max(since.as_micros() as u64);
        }
        Ok((recording.requests > 0).then_some(recording))
    }

    /// Its requests, one after another.
    ///
    /// # Errors
    /// It cannot be opened.
    pub(crate) fn records(&self) -> Result<impl Iterator<Item = Result<Record>> + Send + use<>> {
        let context = || format!("opening {}", self.path.display());
        let file = File::open(&self.path).map_err(|error| Error::from_os(error, context()))?;
        let text: Box<dyn BufRead + Send> = match self.path.extension().is_some_and(|ending| ending == "zst") {
            true => {
                let decoder = zstd::Decoder::new(file).map_err(|error| Error::from_os(error, context()))?;
                Box::new(BufReader::new(decoder))
            }
            false => Box::new(BufReader::new(file)),
        };
        let format = match (self.is_spc, self.is_msr) {
            (true, _) => Format::Spc,
            (_, true) => Format::Msr,
            _ => Format::Plain,
        };
        Ok(trace::records(format, text))
    }

    /// The same as a load, at its own times and once.
    ///
    /// # Errors
    /// It cannot be opened.
    pub(crate) fn play(&self) -> Result<impl Workload + 'static> {
        Ok(Played { records: Box::new(self.records()?), first: None })
    }
}

/// A trace that is played.
struct Played {
    records: Box<dyn Iterator<Item = Result<Record>> + Send>,
    first: Option<Duration>,
}

impl Workload for Played {
    fn next(&mut self, _: &Rng) -> Option<Step> {
        loop {
            // It was read to its end before: what cannot be read now was changed meanwhile, and ends the load.
            let record = self.records.next()?.ok()?;
            if record.request.verb == Verb::Flush || record.request.length > 0 {
                let first = *self.first.get_or_insert(record.at);
                return Some(Step { at: record.at.saturating_sub(first), request: record.request });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_surveyed_and_played_line_by_line_once_compressed_or_not() {
        let directory = std::env::temp_dir().join(format!("transhume-recording-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a directory can be made");
        let text = "time_us,op,offset_bytes,length_bytes\n5,R,4096,512\n25,W,8192,1024\n";
        std::fs::write(directory.join("plain.csv"), text).expect("it is written");
        let packed = zstd::encode_all(text.as_bytes(), 1).expect("it is packed");
        std::fs::write(directory.join("packed.csv.zst"), packed).expect("it is written");
        std::fs::write(directory.join("README.md"), "no trace").expect("it is written");
        let found = Recording::all_in(&directory).expect("both are well formed");
        std::fs::remove_dir_all(&directory).expect("it was made");
        let facts = found.iter().map(|one| (one.name.as_str(), one.requests, one.end, one.span_us));
        assert_eq!(facts.collect::<Vec<_>>(), [("packed", 2, 9216, 20), ("plain", 2, 9216, 20)]);
        assert!(found[0].play().is_err(), "the file is gone");
    }
}
