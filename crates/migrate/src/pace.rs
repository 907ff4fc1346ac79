//! How much the copy may have in flight: as much as the devices take without queueing, and less when the guest feels it.

mod congestion_window;
mod cpu_yield;
mod duty_cycle;
mod latency_controller;
mod pause_limit;

pub(crate) use congestion_window::CongestionWindow;
pub(crate) use cpu_yield::CpuYield;
pub(crate) use duty_cycle::DutyCycle;
pub(crate) use latency_controller::LatencyController;
pub(crate) use pause_limit::PauseLimit;

/// Lets everything else on this worker run once.
pub(crate) async fn yield_now() {
    let mut yielded = false;
    std::future::poll_fn(|context| {
        if std::mem::replace(&mut yielded, true) {
            return std::task::Poll::Ready(());
        }
        context.waker().wake_by_ref();
        std::task::Poll::Pending
    })
    .await;
}

/// What `work` gives, and whether it never waited but to let others run once.
pub(crate) async fn at_once<T>(work: impl Future<Output = T>) -> (T, bool) {
    let mut work = std::pin::pin!(work);
    let mut waits = 0_u32;
    std::future::poll_fn(|context| {
        let polled = work.as_mut().poll(context).map(|value| (value, waits <= 1));
        waits += 1;
        polled
    })
    .await
}
