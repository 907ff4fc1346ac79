//! Looks once a second what there is for a move, and gives its streams and threads what they may have.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use api::v1::Rates;
use migrate::stream::{LinkCounters, Remote, USAGE_INTERVAL};
use migrate::{Control, Phase, Progress, UnderWay, Verify};

use super::agreement::{Agreed, Agreement, RateSample, StreamSample};
use super::deadline::{Deadline, DeadlineStatus};
use super::{addresses, found};
use crate::daemon::Daemon;
use crate::jobs::JobHandle;
use crate::platform::Interfaces;
use crate::remote::RemoteVolumeDevice;
use crate::workers::Worker;

/// How long the other host may take to say what its interfaces have carried.
const ANSWER_MAX: Duration = Duration::from_secs(1);

/// What a move is kept by.
pub(crate) struct ControllerContext<'a> {
    pub(crate) daemon: &'a Daemon,
    pub(crate) job: &'a JobHandle,
    pub(crate) control: &'a Control,
    pub(crate) remote_device: Option<&'a Arc<RemoteVolumeDevice>>,
    /// Where it copies.
    pub(crate) worker: &'a Worker,
    pub(crate) under_way: UnderWay,
    pub(crate) verify: Verify,
}

/// Keeps a move's rates until it is over.
pub(crate) async fn keep(keeping: ControllerContext<'_>) -> Infallible {
    let ControllerContext { daemon, job, remote_device, .. } = keeping;
    let interfaces = remote_device.and_then(|_| daemon.hosts.interfaces());
    if interfaces.is_none() {
        // There is nothing else to look at.
        job.pressed().await;
    }
    let mut keeper = RateController {
        agreement: Agreement::default(),
        deadline: None,
        rates: Rates::default(),
        notes: Vec::new(),
        hurries: false,
        keeping,
    };
    loop {
        keeper.look(interfaces.as_deref()).await;
        daemon.env.sleep(USAGE_INTERVAL).await;
    }
}

struct RateController<'a> {
    keeping: ControllerContext<'a>,
    agreement: Agreement,
    deadline: Option<Deadline>,
    rates: Rates,
    notes: Vec<(About, String)>,
    hurries: bool,
}

impl RateController<'_> {
    async fn look(&mut self, interfaces: Option<&dyn Interfaces>) {
        let ControllerContext { daemon, job, control, remote_device, under_way, .. } = self.keeping;
        let progress = control.snapshot();
        let age = under_way.age(daemon.env.now());
        self.take_deadline();
        let status = self.deadline.as_mut().map(|deadline| deadline.look(age, &progress));
        let reserve = job.request().reserve.unwrap_or(0);
        let wanted = reserve.max(status.map_or(0, |status| status.needed));
        self.rates.reserve = reserve;
        match (remote_device.and_then(|remote_device| remote_device.copying()), interfaces) {
            (Some(remote), Some(interfaces)) => {
                let look = self.take_look(&remote, interfaces, &progress).await;
                let agreed = self.agreement.step(look, wanted);
                for (stream, rate) in agreed.streams.iter().enumerate() {
                    remote.set_rate(stream as u16, *rate);
                }
                self.take_agreed(agreed);
            }
            _ => self.agreement.pause(),
        }
        match status {
            Some(status) => self.see_to_deadline(status, &progress).await,
            None if self.hurries => self.hurry(false).await,
            None => {}
        }
        self.rates.notes = self.notes.iter().map(|(_, note)| note.clone()).collect();
        job.agreed(self.rates.clone());
    }

    /// The deadline that it was given last. What was said of another one is no more.
    fn take_deadline(&mut self) {
        let ControllerContext { job, verify, .. } = self.keeping;
        let deadline_ms = job.request().deadline_ms;
        if deadline_ms == self.rates.deadline_ms {
            return;
        }
        self.rates.deadline_ms = deadline_ms;
        (self.rates.needed, self.rates.at_risk, self.rates.hurries) = (None, false, false);
        self.notes.retain(|(about, _)| !about.is_deadline());
        let limit = deadline_ms.map(Duration::from_millis);
        self.deadline = limit.map(|limit| Deadline::new(limit, verify));
        if let (Some(limit), Some(move_forecast)) = (limit, job.show().prediction)
            && move_forecast.seconds_min > limit.as_secs_f64()
        {
            self.note(
                About::MoveForecast,
                format!(
                    "it was expected to take {:.0} s at least, which is longer than its deadline of {:.0} s",
                    move_forecast.seconds_min,
                    limit.as_secs_f64()
                ),
            );
        }
    }

    async fn take_look(&mut self, remote: &Remote, interfaces: &dyn Interfaces, progress: &Progress) -> RateSample {
        let [_, there] = addresses(&remote.paths());
        let answered = self.ask(remote, &there).await;
        let at = self.keeping.daemon.env.now();
        let (paths, sent) = (remote.paths(), remote.statistics());
        let [here, _] = addresses(&paths);
        let streams = paths.iter().zip(&sent.streams).map(|(path, counts)| {
            let (sent, received) = (counts.bytes_sent, counts.bytes_received);
            path.map(|path| StreamSample { path, sent, received })
        });
        RateSample {
            at,
            here: found(&here, interfaces.look(&here)),
            there: found(&there, answered),
            streams: streams.collect(),
            mirrored: progress.bytes_mirrored,
        }
    }

    /// What the other host's interfaces have carried; nothing if it does not say.
    async fn ask(&mut self, remote: &Remote, addresses: &[IpAddr]) -> Vec<Option<LinkCounters>> {
        let env = &self.keeping.daemon.env;
        match env::timeout(&**env, ANSWER_MAX, remote.usage(addresses)).await {
            Some(Ok(Some(answered))) => answered,
            Some(Ok(None)) => {
                let host =
                    self.keeping.remote_device.map_or("the other host", |remote_device| &remote_device.place().host);
                self.note(
                    About::Network,
                    format!("{host} does not say what its network carries: only this host's is looked at"),
                );
                Vec::new()
            }
            // The session is lost, or slow: there is another look in a second.
            Some(Err(_)) | None => Vec::new(),
        }
    }

    fn take_agreed(&mut self, agreed: Agreed) {
        if agreed.paths.is_empty() {
            return;
        }
        for interface in agreed.unknown {
            self.note(About::Network, format!(
                "the speed of {interface} is not known: nothing is left to others there; say it in the configuration \
                 (`interface-speeds-mbit` in [hosts]), or use --bandwidth"
            ));
        }
        (self.rates.limit, self.rates.paths) = (agreed.limit, agreed.paths);
    }

    async fn see_to_deadline(&mut self, status: DeadlineStatus, progress: &Progress) {
        self.rates.needed = Some(status.needed);
        self.rates.at_risk = status.at_risk;
        if status.has_passed {
            self.note(About::Passed, "its deadline has passed; it goes on".to_owned());
        } else {
            self.say_what_is_in_the_way(status.least, progress);
        }
        if self.hurries != status.at_risk {
            self.hurry(status.at_risk).await;
        }
        self.rates.hurries = self.hurries && !self.has_said(About::Processor);
    }

    /// Why it cannot be in time, as far as that is known.
    fn say_what_is_in_the_way(&mut self, least: u64, progress: &Progress) {
        if !matches!(progress.phase, Phase::Copying | Phase::Verifying) {
            return;
        }
        if let Some(bandwidth) = self.keeping.job.request().bandwidth.filter(|bandwidth| *bandwidth < least) {
            let [needed, bandwidth] = [least, bandwidth].map(block::Bytes);
            self.note_once(
                About::Bandwidth,
                format!(
                    "the deadline cannot be kept with this bandwidth: {needed}/s are needed, and it may take {bandwidth}/s; \
                     `transhume set --bandwidth` changes that"
                ),
            );
        }
        let capacities: Option<u64> = self.rates.paths.iter().map(|path| path.capacity).sum();
        if let Some(capacity) = capacities.filter(|capacity| (1..least).contains(capacity)) {
            let [needed, capacity] = [least, capacity].map(block::Bytes);
            self.note_once(
                About::Capacity,
                format!(
                    "the deadline cannot be kept over this network: {needed}/s are needed, and it carries {capacity}/s"
                ),
            );
        }
    }

    /// Lets its threads compete with others as equals, or give way again.
    async fn hurry(&mut self, hurries: bool) {
        let ControllerContext { daemon, job, worker, .. } = self.keeping;
        let is_allowed = worker.give_way(!hurries).await.unwrap_or(true);
        if !is_allowed {
            let note = "the daemon may not take more of the processor: CAP_SYS_NICE is missing";
            self.note(About::Processor, note.to_owned());
        }
        tracing::info!(job = job.id, hurries, is_allowed, "the deadline decides how much processor the move gets");
        self.hurries = hurries;
        daemon.hurry(hurries);
    }

    fn note(&mut self, about: About, note: String) {
        if self.notes.iter().all(|(_, said)| *said != note) {
            tracing::warn!(job = self.keeping.job.id, "{note}");
            self.notes.push((about, note));
        }
    }

    /// The same, once whatever its figures are.
    fn note_once(&mut self, about: About, note: String) {
        if !self.has_said(about) {
            self.note(about, note);
        }
    }

    fn has_said(&self, about: About) -> bool {
        self.notes.iter().any(|(said, _)| *said == about)
    }
}

/// What a note is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum About {
    /// What is not known of the network.
    Network,
    /// The kernel refuses more of the processor.
    Processor,
    /// It was expected to be late.
    MoveForecast,
    /// It may not take what it needs,
    Bandwidth,
    /// or cannot.
    Capacity,
    /// It is late.
    Passed,
}

impl About {
    /// Whether another deadline makes it untrue.
    const fn is_deadline(self) -> bool {
        matches!(self, Self::MoveForecast | Self::Bandwidth | Self::Capacity | Self::Passed)
    }
}

impl Drop for RateController<'_> {
    fn drop(&mut self) {
        if self.hurries {
            self.keeping.daemon.hurry(false);
        }
    }
}
