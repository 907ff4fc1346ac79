//! How much the copy may have in flight: as much as the devices take without queueing, and less when the guest feels it.

mod duty;
mod governor;
mod window;

pub(crate) use duty::Duty;
pub(crate) use governor::Governor;
pub(crate) use window::Window;

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
