//! The virtual clock: tokio's paused one, a thousand times slower.

use std::future::Future;
use std::time::Duration;

use env::Moment;
use tokio::time::Instant;

/// How many units of the paused clock make one of simulated time.
const SCALE: u32 = 1000;

/// The moment at which a world began.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Start(Instant);

impl Start {
    pub(crate) fn now() -> Self {
        Self(Instant::now())
    }

    pub(crate) fn elapsed(self) -> Moment {
        Moment(self.0.elapsed() / SCALE)
    }
}

/// Waits for `span` of simulated time.
pub(crate) async fn sleep(span: Duration) {
    tokio::time::sleep(span * SCALE).await;
}

/// Runs `main` and all that it spawns on this thread until `main` is done. Its clock jumps to the next timer whenever
/// nothing else can run. All IO must be simulated: the clock runs past real file descriptors.
///
/// # Panics
/// If the operating system gives no runtime.
pub fn run<T>(main: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without IO needs only memory");
    runtime.block_on(main)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simulated_microseconds_are_exact_and_an_hour_is_short() {
        let began = std::time::SystemTime::now();
        run(async {
            let start = Start::now();
            for _ in 0..100 {
                sleep(Duration::from_micros(85)).await;
            }
            assert_eq!(start.elapsed(), Moment(Duration::from_micros(8500)));
            sleep(Duration::from_secs(3600)).await;
            assert_eq!(start.elapsed(), Moment(Duration::from_micros(3_600_008_500)));
        });
        assert!(began.elapsed().is_ok_and(|real| real < Duration::from_secs(60)), "the clock is not virtual");
    }
}
