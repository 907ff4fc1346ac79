//! That loads are what they say.

use super::*;
use crate::model::Verb;

fn take(workload: &mut impl Workload, count: usize) -> Vec<Step> {
    let rng = Rng::new(1, "load");
    std::iter::from_fn(|| workload.next(&rng)).take(count).collect()
}

fn share(steps: &[Step], is: impl Fn(&Request) -> bool) -> f64 {
    steps.iter().filter(|step| is(&step.request)).count() as f64 / steps.len() as f64
}

fn near(value: f64, wanted: f64, part: f64) -> bool {
    (value - wanted).abs() <= wanted * part
}

#[test]
fn oltp_reads_seventy_of_a_hundred_everywhere() {
    let steps = take(&mut Oltp::iometer(1 << 30), 20_000);
    assert!(near(share(&steps, |request| request.verb == Verb::Read), 0.7, 0.02));
    assert!(near(share(&steps, |request| request.offset < 1 << 29), 0.5, 0.03));
    assert!(steps.iter().all(|step| step.request.length == 8192 && step.request.end() <= 1 << 30));
}

#[test]
fn firepan_zones_have_the_shares_that_fio_was_told() {
    let file = 5 << 30;
    let steps = take(&mut Zoned::firepan(file), 40_000);
    let within = |from: u64, to: u64| {
        share(&steps, |request| (file / 100 * from..file / 100 * to).contains(&(request.offset % file)))
    };
    assert!(near(within(0, 5), 0.5, 0.03) && near(within(5, 20), 0.3, 0.03) && near(within(20, 100), 0.2, 0.04));
    assert!(near(share(&steps, |request| request.verb == Verb::Read), 0.8, 0.02));
    assert!(near(share(&steps, |request| request.offset / file == 3), 0.25, 0.04));
}

#[test]
fn zipf_makes_the_hottest_tenth_as_hot_as_its_law_says() {
    let rng = Rng::new(3, "places");
    let steps = take(&mut Zipf::new(1000 << 20, 1 << 20, 4096, 0.5, 1.0, &rng), 50_000);
    let mut counts = vec![0_u64; 1000];
    steps.iter().for_each(|step| counts[(step.request.offset >> 20) as usize] += 1);
    counts.sort_unstable_by(|one, other| other.cmp(one));
    let hottest = counts[..100].iter().sum::<u64>() as f64 / steps.len() as f64;
    // The sums of 1/r up to 100 and up to 1000 are 5.187 and 7.485.
    assert!(near(hottest, 5.187 / 7.485, 0.03), "{hottest}");
}

#[test]
fn a_stream_at_a_rate_asks_in_even_steps_and_ends_if_told() {
    let steps = take(&mut Sequential::new(0, 10 << 20, 1 << 20, 1.0).at_rate(20 << 20).once(), 100);
    assert_eq!(steps.len(), 10);
    assert_eq!(steps[9].at, Duration::from_millis(450));
    assert!(steps.windows(2).all(|pair| pair[0].request.end() == pair[1].request.offset));
}

#[test]
fn a_database_flushes_its_log_all_the_time_and_its_pages_at_checkpoints() {
    let second = Duration::from_secs(1);
    let steps = take(&mut FlushBursts::new(1 << 30, second / 100, second * 10, 500), 8000);
    let at_ten: Vec<_> = steps.iter().filter(|step| step.at == second * 10).collect();
    assert_eq!(at_ten.iter().filter(|step| step.request.length == 16 << 10).count(), 500);
    assert!(steps.iter().filter(|step| step.at < second * 10).all(|step| step.request.length <= 4096));
    assert!(near(share(&steps, |request| request.verb == Verb::Flush), 0.4, 0.15));
}

#[test]
fn machines_of_a_boot_storm_begin_together_and_stay_in_their_places() {
    let (image, rng) = (1 << 30, Rng::new(1, "storm"));
    let second = Duration::from_secs(1);
    let mut storm = BootStorm::new(image, 20, second * 5, 1000, second * 30, &rng);
    let steps = take(&mut storm, usize::MAX);
    assert_eq!(steps.len(), 20_000);
    assert!(steps.windows(2).all(|pair| pair[0].at <= pair[1].at), "requests are not in the order of their times");
    assert!(steps.iter().all(|step| step.request.end() <= BootStorm::size(image, 20)));
    assert!(steps.iter().all(|step| (step.request.verb == Verb::Write) == (step.request.offset >= image)));
    let last = steps.last().expect("there are steps").at;
    assert!(last > second * 25 && last < second * 45, "{last:?}");
}

#[test]
fn synthetic_loads_have_the_published_characteristics_and_say_that_they_are_synthetic() {
    let published =
        [(0.328, 69.0, 6.2), (0.824, 125.0, 2.2), (1.0, 113.0, 15.1), (1.0, 100.3, 14.9), (1.0, 63.5, 15.2)];
    for (like, (reads, iops, mean_kib)) in Characteristics::ALL.into_iter().zip(published) {
        assert!(like.name.starts_with("synthetic-"));
        let steps = take(&mut Synthetic::new(like, &Rng::new(2, "zones")), 60_000);
        assert!(near(share(&steps, |request| request.verb == Verb::Read), reads, 0.03), "{}", like.name);
        let seconds = steps.last().expect("there are steps").at.as_secs_f64();
        assert!(near(steps.len() as f64 / seconds, iops, 0.05), "{}: {}", like.name, steps.len() as f64 / seconds);
        let bytes: u64 = steps.iter().map(|step| step.request.length).sum();
        let mean = bytes as f64 / steps.len() as f64 / 1024.0;
        assert!(near(mean, mean_kib, 0.03), "{}: {mean} KiB", like.name);
        assert!(steps.iter().all(|step| step.request.end() <= like.size()));
    }
}

#[test]
fn synthetic_skew_is_that_of_the_trace_that_it_was_fitted_to() {
    let like = Characteristics::FINANCIAL1;
    let steps = take(&mut Synthetic::new(like, &Rng::new(2, "zones")), 58_000);
    let mut counts = std::collections::BTreeMap::<u64, u64>::new();
    steps.iter().for_each(|step| *counts.entry(step.request.offset >> 20).or_default() += 1);
    let mut counts: Vec<u64> = counts.into_values().collect();
    counts.sort_unstable_by(|one, other| other.cmp(one));
    let hottest = counts[..counts.len() / 10].iter().sum::<u64>() as f64 / steps.len() as f64;
    assert!(near(hottest, 0.51, 0.12), "the hottest tenth has {hottest}");
}

#[test]
fn a_replay_keeps_the_times_of_its_trace_or_none() {
    let text = "time_us,op,offset_bytes,length_bytes\n100,R,0,512\n300,W,512,512\n";
    let records = || crate::trace::read(crate::trace::Format::Plain, text.as_bytes()).expect("it is well formed");
    let times = |mut replay: Replay| take(&mut replay, 9).iter().map(|step| step.at.as_micros()).collect::<Vec<_>>();
    assert_eq!(times(Replay::open_loop(records())), [0, 200]);
    assert_eq!(times(Replay::open_loop(records()).faster(2.0)), [0, 100]);
    assert_eq!(times(Replay::closed_loop(records())), [0, 0]);
}
