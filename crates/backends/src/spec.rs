//! What a user writes to name a backend: `file:PATH[,format=raw][,cache=auto|direct|page]`.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How a file's bytes are reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheMode {
    /// Past the page cache where the file system can do that, otherwise through it.
    #[default]
    Auto,
    /// Past the page cache, or not at all.
    Direct,
    /// Through the page cache.
    Page,
}

impl CacheMode {
    /// The word for it in a specification.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Direct => "direct",
            Self::Page => "page",
        }
    }
}

/// What the bytes mean. It is named, never guessed from bytes that a guest may have written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ImageFormat {
    /// The file's bytes are the disk's bytes.
    #[default]
    Raw,
}

/// A backend in words. It is written and read as one string, in the journal as on the command line.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BackendSpec {
    /// The file or block device.
    pub path: PathBuf,
    /// What its bytes mean.
    pub format: ImageFormat,
    /// How they are reached.
    pub cache: CacheMode,
}

impl BackendSpec {
    /// The raw file or block device at `path`, reached in the best way.
    #[must_use]
    pub fn file(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), format: ImageFormat::Raw, cache: CacheMode::Auto }
    }

    /// The same, reached in the way of `cache`.
    #[must_use]
    pub fn with_cache(mut self, cache: CacheMode) -> Self {
        self.cache = cache;
        self
    }

    /// The file or block device.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Why some words name no backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecError {
    line: String,
}

impl SpecError {
    fn new(line: String) -> Self {
        Self { line }
    }
}

impl fmt::Display for SpecError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.line)
    }
}

impl std::error::Error for SpecError {}

/// The parts of `text` between single commas; two commas in a row stand for one that belongs to the part.
fn split_at_commas(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        let last = parts.last_mut().expect("there is always a part");
        if character != ',' {
            last.push(character);
        } else if characters.next_if_eq(&',').is_some() {
            last.push(',');
        } else {
            parts.push(String::new());
        }
    }
    parts
}

impl BackendSpec {
    /// What `text` names, reached in the way of `cache` unless it names another.
    ///
    /// # Errors
    /// What is wrong with the words, in one line.
    pub fn parse_with_cache(text: &str, cache: CacheMode) -> Result<Self, SpecError> {
        let Some(rest) = text.strip_prefix("file:") else {
            return Err(SpecError::new(format!("\"{text}\" names no backend: write file:PATH")));
        };
        let mut parts = split_at_commas(rest).into_iter();
        let path = parts.next().filter(|path| !path.is_empty());
        let Some(path) = path else {
            return Err(SpecError::new(format!("\"{text}\" names no file: write file:PATH")));
        };
        let mut spec = Self::file(path).with_cache(cache);
        let mut seen: Vec<String> = Vec::new();
        for part in parts {
            let Some((key, value)) = part.split_once('=') else {
                return Err(SpecError::new(format!(
                    "\"{part}\" in \"{text}\" is no KEY=VALUE (a comma within the path is written twice)"
                )));
            };
            if seen.iter().any(|earlier| earlier == key) {
                return Err(SpecError::new(format!("\"{text}\" says {key} twice")));
            }
            seen.push(key.to_owned());
            match (key, value) {
                ("format", "raw") => spec.format = ImageFormat::Raw,
                ("cache", "auto") => spec.cache = CacheMode::Auto,
                ("cache", "direct") => spec.cache = CacheMode::Direct,
                ("cache", "page") => spec.cache = CacheMode::Page,
                ("format", _) => {
                    return Err(SpecError::new(format!("\"{text}\": format is raw, not \"{value}\"")));
                }
                ("cache", _) => {
                    return Err(SpecError::new(format!("\"{text}\": cache is auto, direct or page, not \"{value}\"")));
                }
                _ => {
                    return Err(SpecError::new(format!(
                        "\"{text}\" has the unknown key \"{key}\": a file takes format and cache"
                    )));
                }
            }
        }
        Ok(spec)
    }
}

impl FromStr for BackendSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        Self::parse_with_cache(text, CacheMode::Auto)
    }
}

impl fmt::Display for BackendSpec {
    /// The shortest words that are read back as this backend.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "file:{}", self.path.display().to_string().replace(',', ",,"))?;
        if self.cache != CacheMode::Auto {
            write!(out, ",cache={}", self.cache.name())?;
        }
        Ok(())
    }
}

impl Serialize for BackendSpec {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for BackendSpec {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_specification_is_read_back_as_it_was_written() {
        for text in ["file:/vm/disk.raw", "file:disk,cache=direct", "file:/vm/a,,b=c.raw,cache=page"] {
            let spec: BackendSpec = text.parse().expect("a good specification");
            assert_eq!(spec.to_string(), text);
            let json = serde_json::to_string(&spec).expect("a string");
            assert_eq!(serde_json::from_str::<BackendSpec>(&json).expect("the same"), spec);
        }
        let spec: BackendSpec = "file:/vm/a,,b.raw,format=raw,cache=auto".parse().expect("a good specification");
        assert_eq!(spec, BackendSpec::file("/vm/a,b.raw"));
        let with_page = |text| BackendSpec::parse_with_cache(text, CacheMode::Page).expect("a good specification");
        assert_eq!(with_page("file:/a").cache, CacheMode::Page);
        assert_eq!(with_page("file:/a,cache=auto").cache, CacheMode::Auto, "what was said did not count");
    }

    #[test]
    fn words_that_make_no_sense_are_refused_in_one_line_that_says_why() {
        for (text, part) in [
            ("/vm/disk.raw", "write file:PATH"),
            ("file:", "names no file"),
            ("file:,cache=page", "names no file"),
            ("file:a,cach=page", "unknown key \"cach\": a file takes format and cache"),
            ("file:a,format=qcow2", "format is raw"),
            ("file:a,cache=none", "auto, direct or page"),
            ("file:a,b.raw", "a comma within the path is written twice"),
            ("file:a,cache=page,cache=page", "says cache twice"),
        ] {
            let error = text.parse::<BackendSpec>().expect_err(text).to_string();
            assert!(error.contains(part) && !error.contains('\n'), "{text}: {error}");
        }
    }
}
