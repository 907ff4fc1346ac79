//! What a program of tests says about itself. That it ends with 0 is not enough: a test that ends the process does so, too, with all
//! others still to come.

/// How a test says that it did nothing here, at the beginning of a line.
const NOT_RUN: [&str; 2] = ["not run: ", "left out: "];

/// What a program of tests has said at its end.
pub(super) struct Verdict {
    /// How many tests it was to run.
    wanted: usize,
    /// How many it says to have run or ignored.
    counted: usize,
    /// What it said in short.
    pub(super) summary: Option<String>,
    /// How many tests were not run.
    pub(super) not_run: usize,
}

impl Verdict {
    /// Reads what a program has printed that was to run so many tests.
    pub(super) fn read(said: &str, wanted: usize) -> Self {
        // A test may have started a program of tests itself: the last word is the outer one's.
        let result = said.lines().rev().find_map(|line| line.split_once("test result: ").map(|(_, result)| result));
        let count = |of: &str| {
            let mut parts = result.unwrap_or_default().split(['.', ';']).map(str::trim);
            parts.find_map(|part| part.strip_suffix(of)?.trim().parse::<usize>().ok()).unwrap_or(0)
        };
        let (passed, ignored) = (count("passed"), count("ignored"));
        let left_out = said.lines().filter(|line| NOT_RUN.iter().any(|begins| line.starts_with(begins)));
        let why = left_out.clone().next();
        let summary = result.and_then(|result| result.split(';').next()).map(|result| match (why, ignored) {
            (Some(why), _) => format!("{result}, {why}"),
            (None, 0) => result.to_owned(),
            (None, ignored) => format!("{result}, {ignored} ignored"),
        });
        Self { wanted, counted: passed + ignored, summary, not_run: ignored + left_out.count() }
    }

    /// Whether every test has passed or is one that is ignored.
    pub(super) fn is_complete(&self) -> bool {
        self.counted == self.wanted
    }

    /// What is missing of a program that has ended well.
    pub(super) fn lacks(&self) -> Option<String> {
        let (counted, wanted) = (self.counted, self.wanted);
        (!self.is_complete())
            .then(|| format!("it ended well with {counted} of its {wanted} tests run: one ended the process"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_counts_what_was_run_and_what_was_not() {
        let said = "running 2 tests\ntest result: ok. 7 passed; 0 failed; 0 ignored\nnot run: no QEMU\n\n\
                    test result: ok. 1 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.1s\n";
        let verdict = Verdict::read(said, 2);
        assert!(verdict.is_complete());
        assert_eq!((verdict.not_run, verdict.summary.as_deref()), (2, Some("ok. 1 passed, not run: no QEMU")));
        assert!(!Verdict::read(said, 3).is_complete());
        let cut = Verdict::read("running 1 test\n", 1);
        assert!(!cut.is_complete() && cut.summary.is_none() && cut.lacks().is_some());
    }
}
