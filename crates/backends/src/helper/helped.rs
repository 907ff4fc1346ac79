//! A file that the helper of its device has, too, and what becomes of its syncs when a helper dies.
//!
//! What is only not asked, or asked in vain, is asked again, of a new helper. See the head of the parent module for why
//! that is not enough for syncs, and what [`Reports`] is about.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::Duration;

use block::{Buffer, Data, Extent};
use parking_lot::Mutex;

use super::kept::KeptFile;
use super::memory::{LARGE_BYTES, Slot};
use super::message::{UnknownFile, Verb};
use super::{CLOSE_LIMIT, HOLES_BYTES, Helper, Helpers, device_of};
use crate::holes::Found;
use crate::open_file::{OpenFile, OpenFiles};

/// How many helpers are asked in turn.
const TRIES: u32 = 3;
/// A sync that has no answer after so long waits for a device that hangs.
const HANGS_AFTER: Duration = Duration::from_secs(10);

/// Nobody was asked, or whoever was asked has ended. Nothing is lost by that.
#[derive(Debug)]
struct Unasked;

impl std::fmt::Display for Unasked {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "the process that works on this device could not be asked, or has ended, {TRIES} times in a row")
    }
}

impl std::error::Error for Unasked {}

pub(crate) fn unasked() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, Unasked)
}

/// Whether a request has failed because there was nobody to carry it out: a sync that failed so has lost nothing.
pub(crate) fn is_unasked(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|cause| cause.is::<Unasked>())
}

fn unheard() -> io::Error {
    io::Error::other(
        "the process that carried it out was killed, and nobody has heard whether the device had lost something",
    )
}

/// Whom the kernel tells of lost writes: which of the two open descriptions of a file reports all of them.
///
/// The kernel reports a lost write once to each. A helper that dies in the middle of a sync may have taken the report
/// for the one that it synced. The other one has it still, and reports it to whoever syncs through that. If it has
/// nothing to report, there was nothing, and so the first one has missed nothing.
#[derive(Debug, Default, PartialEq, Eq)]
struct Reports {
    /// Syncs go through the witness, and not through the file that is served.
    by_witness: bool,
    /// The one that syncs do not go through may have reported something that nobody has heard.
    other_in_doubt: bool,
    /// Neither could tell whether something is lost.
    unheard: bool,
}

impl Reports {
    /// A helper has ended in the middle of a sync.
    fn lose(&mut self, may_switch: bool) {
        if may_switch && !self.other_in_doubt {
            self.by_witness = !self.by_witness;
            self.other_in_doubt = true;
        } else {
            // Whoever hears of it promises nothing any more. What is promised after that begins anew.
            self.unheard = true;
            self.other_in_doubt = false;
        }
    }

    /// A sync that began after all that were lost has found nothing to report.
    const fn prove(&mut self) {
        self.other_in_doubt = false;
    }

    /// Whether a sync through the file that is served, by whomever, reports all there is to report.
    const fn are_with_the_file(&self) -> bool {
        !(self.unheard || self.by_witness && self.other_in_doubt)
    }
}

/// The helper that has the file, and what is under way there.
struct Given {
    helper: Arc<Helper>,
    /// What it calls the file.
    number: u64,
    /// How many syncs it has not answered, those included that nobody waits for any more.
    unanswered: u32,
    /// How many of those have been with it for so long that the device must hang.
    hanging: u32,
}

#[derive(Default)]
struct State {
    given: Option<Given>,
    reports: Reports,
}

impl State {
    /// What the file's helper has under way, if that is still `helper`.
    fn given_to(&mut self, helper: &Arc<Helper>) -> Option<&mut Given> {
        self.given.as_mut().filter(|given| Arc::ptr_eq(&given.helper, helper))
    }
}

struct Shared {
    helpers: Arc<Helpers>,
    /// The file, and the same file, opened before it is written to.
    files: OpenFiles,
    /// Whether the file, other than its witness, is read and written past the page cache.
    is_direct: bool,
    device: u64,
    state: Mutex<State>,
}

/// A file that the helper of its device has, too.
pub(crate) struct HelpedFile(Arc<Shared>);

/// The same, for somebody who asks for something.
pub(crate) struct Known(Arc<Shared>);

impl HelpedFile {
    /// `tail` is the same file, if it is open a second time already. May wait for the file system.
    pub(crate) fn new(helpers: &Arc<Helpers>, file: File, tail: Option<File>, is_direct: bool) -> io::Result<Self> {
        let (device, parks) = (device_of(&file)?, helpers.alone_keep(&file)?);
        let witness = tail.or_else(|| open_again(&file));
        let files = if parks { OpenFiles::parked(file, witness) } else { OpenFiles::here(file, witness) };
        let this =
            Self(Arc::new(Shared { helpers: Arc::clone(helpers), files, is_direct, device, state: Mutex::default() }));
        helpers.enter(device);
        if this.0.files.parked.is_some()
            && let Err(error) = this.0.place()
        {
            tracing::warn!(%error, "a device has no helper yet");
        }
        Ok(this)
    }

    /// The file, and the one that is open a second time, if there is one.
    pub(crate) fn files(&self) -> &OpenFiles {
        &self.0.files
    }

    /// The helpers, of which it has its own.
    pub(crate) fn helpers(&self) -> &Arc<Helpers> {
        &self.0.helpers
    }

    /// Has the helper alone keep `file`, which is another one of its device, if that is what is done with this one.
    ///
    /// # Errors
    /// Gives `file` back.
    pub(crate) fn keep(&self, file: File) -> Result<KeptFile, File> {
        let placed = self.0.files.parked.as_ref().and_then(|_| self.0.place().ok());
        match placed {
            Some((helper, _)) => KeptFile::new(helper, file),
            None => Err(file),
        }
    }

    /// Whether requests for `file`, which is one of the two, go past the page cache.
    pub(crate) fn goes_past_the_cache(&self, file: &OpenFile) -> bool {
        self.0.is_direct && !self.0.is_witness(file)
    }

    /// The helper that has the file; none if there can be none: then the caller does its work itself.
    pub(crate) fn helper(&self) -> Option<Known> {
        if let Err(error) = self.0.place() {
            tracing::warn!(%error, "a device has no helper");
            if self.0.state.lock().reports.are_with_the_file() {
                return None;
            }
        }
        Some(Known(Arc::clone(&self.0)))
    }
}

/// The same file once more, wherever its name leads: another description, to which the kernel reports apart.
fn open_again(file: &File) -> Option<File> {
    // Only for reading: closing a block device that was open for writing has the whole system look at it anew.
    let opened = File::open(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let opened = opened.inspect_err(|error| {
        tracing::warn!(%error, "a file has no witness: once its helper is killed, nothing durable is promised");
    });
    opened.ok()
}

impl Drop for HelpedFile {
    /// Whoever opens the file next must find its lock free.
    fn drop(&mut self) {
        // First here: whoever lets go of a file last may wait for its server.
        self.0.files.parked.iter().for_each(|parked| parked.let_go());
        let given = self.0.state.lock().given.take();
        if let Some(Given { helper, number, .. }) = given {
            let _ = helper.ask(Verb::Close, number, CLOSE_LIMIT);
        }
        self.0.helpers.leave(self.0.device);
    }
}

impl Known {
    /// Makes durable what was written.
    pub(crate) async fn sync(&self) -> io::Result<()> {
        for _ in 0..TRIES {
            if let Some(outcome) = self.0.sync_once().await {
                return outcome;
            }
        }
        Err(unasked())
    }

    /// Whether a sync that no helper could be asked for reports all there is to report if it is done by this process.
    pub(crate) fn may_be_synced_here(&self) -> bool {
        let mut state = self.0.state.lock();
        self.0.forget_ended(&mut state);
        let is_under_way = state.given.as_ref().is_some_and(|given| given.unanswered > 0);
        !is_under_way && state.reports.are_with_the_file()
    }

    /// Changes the allocation of `extent`, in the manner of fallocate's flags. Doing it twice is doing it once.
    pub(crate) async fn allocate(&self, mode: u32, extent: Extent) -> io::Result<()> {
        let verb = Verb::Allocate { mode, offset: extent.offset.0, length: extent.length.0 };
        for _ in 0..TRIES {
            if let Some(outcome) = self.0.allocate_once(verb).await {
                return outcome;
            }
        }
        Err(unasked())
    }

    /// Fills `buffer` from byte `start` of it on; its first byte is at `offset` of `file`. Returns how much is filled
    /// then: less than all only at the end of the file.
    pub(crate) async fn read(
        &self,
        file: &OpenFile,
        offset: u64,
        buffer: &mut Buffer,
        mut start: usize,
    ) -> io::Result<usize> {
        let by_witness = self.0.is_witness(file);
        let begin = start;
        while start < buffer.len() {
            let length = (buffer.len() - start).min(LARGE_BYTES);
            let at = offset + start as u64;
            let verb = |slot| Verb::Read { by_witness, offset: at, length: length as u64, slot };
            match self.carry_out(length, &[], verb).await {
                Ok((_, 0)) => break,
                Ok((slot, count)) => {
                    let count = count as usize;
                    slot.copy_to(&mut buffer[start..start + count]);
                    start += count;
                }
                // Past the page cache only the end of the file is in the middle of a sector.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput && start > begin => break,
                Err(error) => return Err(error),
            }
        }
        Ok(start)
    }

    /// Writes all of `data` from byte `start` of it on; its first byte goes to `offset` of `file`.
    pub(crate) async fn write(&self, file: &OpenFile, offset: u64, data: &Data, mut start: usize) -> io::Result<()> {
        let by_witness = self.0.is_witness(file);
        while start < data.len() {
            let length = (data.len() - start).min(LARGE_BYTES);
            let at = offset + start as u64;
            let verb = |slot| Verb::Write { by_witness, offset: at, length: length as u64, slot };
            match self.carry_out(length, &data[start..start + length], verb).await?.1 {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                count => start += count as usize,
            }
        }
        Ok(())
    }

    /// How long the file is.
    pub(crate) async fn length(&self) -> io::Result<u64> {
        Ok(self.carry_out(0, &[], |_| Verb::Length).await?.1)
    }

    /// Where `extent` has data, in pieces of whole units.
    pub(crate) async fn holes(&self, extent: Extent, unit: u32, may_be_short: bool) -> io::Result<Found> {
        let (offset, length) = (extent.offset.0, extent.length.0);
        let verb = |slot| Verb::Holes { offset, length, slot, unit, may_be_short };
        let (slot, count) = self.carry_out(HOLES_BYTES, &[], verb).await?;
        let mut bytes = vec![0; HOLES_BYTES];
        slot.copy_to(&mut bytes);
        Ok(Found::take(&bytes, count))
    }

    /// Has something done that is the same when it is done twice, with `bytes` in its slot.
    async fn carry_out(&self, length: usize, bytes: &[u8], verb: impl Fn(u64) -> Verb) -> io::Result<(Slot, u64)> {
        for _ in 0..TRIES {
            if let Some((slot, outcome)) = self.0.carry_out_once(length, bytes, &verb).await {
                return Ok((slot, outcome?));
            }
        }
        Err(unasked())
    }
}

impl Shared {
    /// Whether it is the second of the two descriptions, and not the first.
    fn is_witness(&self, file: &OpenFile) -> bool {
        self.files.witness.as_ref().is_some_and(|witness| witness.is(file))
    }

    /// None if nobody has carried it out, or nobody can say so: then nothing of it is under way any more.
    async fn carry_out_once(
        &self,
        length: usize,
        bytes: &[u8],
        verb: impl Fn(u64) -> Verb,
    ) -> Option<(Slot, io::Result<u64>)> {
        let (helper, number) = self.place().ok()?;
        let mut slot = helper.slot(length).await.ok()?;
        slot.fill(bytes);
        let verb = verb(slot.at());
        let Some((slot, outcome)) = helper.perform(number, verb, slot).await.ok()? else {
            helper.expect_end().await;
            return None;
        };
        Some((slot, self.unless_unknown(&helper, outcome)?))
    }

    /// The helper that has the file, and what it calls it; it is given it first, if need be.
    fn place(&self) -> io::Result<(Arc<Helper>, u64)> {
        let mut state = self.state.lock();
        self.forget_ended(&mut state);
        if let Some(given) = &state.given {
            return Ok((Arc::clone(&given.helper), given.number));
        }
        let helper = self.helpers.helper(self.device)?;
        let number = self.give_to(&helper)?;
        state.given = Some(Given { helper: Arc::clone(&helper), number, unanswered: 0, hanging: 0 });
        Ok((helper, number))
    }

    /// Gives `helper` the files; what it calls them.
    fn give_to(&self, helper: &Helper) -> io::Result<u64> {
        let OpenFiles { file, witness, parked } = &self.files;
        if let Some(parked) = parked {
            return helper.open_parked(parked);
        }
        let files = std::iter::once(file).chain(witness).filter_map(OpenFile::descriptor);
        helper.open(&files.map(AsFd::as_fd).collect::<Vec<_>>(), 0)
    }

    /// Notes what has become of the syncs of a helper that has ended.
    fn forget_ended(&self, state: &mut State) {
        if let Some(ended) = state.given.take_if(|given| given.helper.has_ended())
            && ended.unanswered > 0
        {
            // What the kernel keeps a report of is read through the other description. What a device says when it
            // gives up after it has hung is kept nowhere.
            state.reports.lose(self.files.witness.is_some() && ended.hanging == 0);
        }
    }

    /// None if nobody has carried it out, or nobody can say so.
    async fn sync_once(&self) -> Option<io::Result<()>> {
        let place = self.place();
        if std::mem::take(&mut self.state.lock().reports.unheard) {
            return Some(Err(unheard()));
        }
        let (helper, number) = place.ok()?;
        let _permit = helper.permit().await;
        let by_witness = self.begin_sync(&helper)?;
        let Ok(mut answer) = helper.request(Verb::Sync { by_witness }, number) else {
            self.end_sync(&helper, false, false);
            return None;
        };
        let (answered, is_late) = match tokio::time::timeout(HANGS_AFTER, &mut answer).await {
            Ok(answered) => (answered, false),
            Err(_) => {
                self.note_hanging(&helper);
                (answer.await, true)
            }
        };
        // Without an answer it stays under way: whoever looks for the helper next sees that it has ended so.
        let outcome = answered.ok()?;
        self.end_sync(&helper, outcome.is_ok(), is_late);
        self.unless_unknown(&helper, outcome)
    }

    async fn allocate_once(&self, verb: Verb) -> Option<io::Result<()>> {
        let (helper, number) = self.place().ok()?;
        let _permit = helper.permit().await;
        let outcome = helper.request(verb, number).ok()?.await.ok()?;
        self.unless_unknown(&helper, outcome)
    }

    /// Whether a sync that is given to `helper` now goes through the witness; none if the file is with another one.
    fn begin_sync(&self, helper: &Arc<Helper>) -> Option<bool> {
        let mut state = self.state.lock();
        state.given_to(helper)?.unanswered += 1;
        Some(state.reports.by_witness)
    }

    fn note_hanging(&self, helper: &Arc<Helper>) {
        if let Some(given) = self.state.lock().given_to(helper) {
            given.hanging += 1;
        }
    }

    /// A sync is answered, or was not asked for.
    fn end_sync(&self, helper: &Arc<Helper>, is_well: bool, is_late: bool) {
        let mut state = self.state.lock();
        let Some(given) = state.given_to(helper) else { return };
        given.unanswered -= 1;
        given.hanging -= u32::from(is_late);
        if is_well {
            // A helper is only asked after all before it have ended.
            state.reports.prove();
        }
    }

    /// None if `helper` does not have the file: it may have had no room for it when that came.
    fn unless_unknown<T>(&self, helper: &Arc<Helper>, outcome: io::Result<T>) -> Option<io::Result<T>> {
        let is_unknown = |error: &io::Error| error.get_ref().is_some_and(|cause| cause.is::<UnknownFile>());
        if outcome.as_ref().is_err_and(is_unknown) {
            let mut state = self.state.lock();
            let given = state.given.take_if(|given| Arc::ptr_eq(&given.helper, helper) && given.unanswered == 0);
            drop(state);
            if let Some(Given { helper, number, .. }) = given {
                // It may come all the same, with its lock.
                let _ = helper.ask(Verb::Close, number, Duration::ZERO);
            }
            return None;
        }
        Some(outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What may happen to a file.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Step {
        /// The kernel cannot write something out.
        Loss,
        /// A sync that is answered.
        Sync,
        /// A sync whose helper is killed when the kernel is done with it.
        Killed,
    }

    /// What the kernel does: how many losses there were, and how many of them each description has reported.
    #[derive(Default)]
    struct Kernel {
        losses: u32,
        reported: [u32; 2],
    }

    impl Kernel {
        fn sync(&mut self, reports: &Reports) -> bool {
            let reported = &mut self.reported[usize::from(reports.by_witness)];
            std::mem::replace(reported, self.losses) == self.losses
        }
    }

    /// Goes through `steps` until something is known to be lost; whether it came to that.
    fn go_through(steps: &[Step]) -> bool {
        let (mut kernel, mut reports) = (Kernel::default(), Reports::default());
        for step in steps {
            match step {
                Step::Loss => kernel.losses += 1,
                Step::Sync if !kernel.sync(&reports) => return true,
                Step::Sync => {
                    assert_eq!(kernel.losses, 0, "{steps:?}: it is promised that nothing is lost");
                    reports.prove();
                }
                Step::Killed => {
                    kernel.sync(&reports);
                    reports.lose(true);
                    if reports.unheard {
                        return true;
                    }
                    assert!(!reports.are_with_the_file() || kernel.reported[0] == 0, "{steps:?}: it is hidden");
                }
            }
        }
        false
    }

    #[test]
    fn no_loss_is_hidden_by_helpers_that_die_and_none_is_made_up() {
        const STEPS: [Step; 3] = [Step::Loss, Step::Sync, Step::Killed];
        for number in 0..3_usize.pow(9) {
            let steps: Vec<Step> = (0..9).map(|place| STEPS[number / 3_usize.pow(place) % 3]).collect();
            let is_lost = go_through(&steps);
            let may_be_lost = steps.contains(&Step::Loss) || steps.windows(2).any(|pair| pair == [Step::Killed; 2]);
            assert!(may_be_lost || !is_lost, "{steps:?}: nothing is lost");
        }
    }

    #[test]
    fn what_a_device_says_after_it_has_hung_is_heard_by_nobody_else() {
        let mut reports = Reports::default();
        reports.lose(false);
        assert!(reports.unheard && !reports.are_with_the_file());
    }

    #[test]
    fn nobody_who_could_be_asked_is_told_from_an_error_of_the_device() {
        assert!(is_unasked(&unasked()));
        for error in [unheard(), io::Error::from_raw_os_error(libc::ETIMEDOUT), io::ErrorKind::TimedOut.into()] {
            assert!(!is_unasked(&error), "{error}");
        }
    }
}
