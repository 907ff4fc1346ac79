//! A stream takes no more than what its network card has left.

use std::sync::Arc;
use std::time::Duration;

use block::{Bytes, Device, ErrorKind, MemDevice, Mutation};
use transhume_migrate::stream::protocol::feature;
use transhume_migrate::stream::{Answer, Ask, Role, StreamOptions};

use crate::wire::harness::{Pair, noise, usage, write};

const MEBIBYTE: u64 = 1 << 20;

#[tokio::test(start_paused = true)]
async fn a_limited_stream_carries_what_it_may_and_the_others_carry_the_rest() {
    let pair = Pair::new(1, Device::new("memory", MemDevice::new(Bytes::mib(64))));
    let (remote, device) = pair.device(Role::Copy, 2).await;
    let rate = 4 * MEBIBYTE;
    remote.set_rate(0, Some(rate));
    remote.set_rate(1, Some(3 * rate));
    let began = pair.env.now();
    let data = noise(1, MEBIBYTE as usize);
    let writes = (0..48).map(|number| device.write(write(number * MEBIBYTE, &data)));
    futures::future::try_join_all(writes).await.expect("nothing goes wrong");
    let seconds = pair.env.now().since(began).as_secs_f64();
    assert!((2.6..3.4).contains(&seconds), "48 MiB at 16 MiB/s took {seconds} s");
    let sent = remote.statistics().streams.iter().map(|stream| stream.bytes_sent).collect::<Vec<_>>();
    let ratio = sent[1] as f64 / sent[0] as f64;
    assert!((2.5..3.5).contains(&ratio), "{sent:?}");
}

#[tokio::test(start_paused = true)]
async fn short_requests_do_not_wait_for_a_limit_and_a_lifted_one_is_gone() {
    let pair = Pair::new(2, Device::new("memory", MemDevice::new(Bytes::mib(64))));
    let (remote, device) = pair.device(Role::Copy, 1).await;
    remote.set_rate(0, Some(MEBIBYTE));
    let copies = {
        let (device, data) = (device.clone(), noise(2, 8 * MEBIBYTE as usize));
        tokio::spawn(async move { device.write(Mutation::data(Bytes::mib(8), data)).await })
    };
    pair.settle().await;
    let began = pair.env.now();
    device.write(write(0, &noise(3, 4096))).await.expect("nothing goes wrong");
    let took = pair.env.now().since(began).as_secs_f64();
    assert!(took < 0.5, "a guest's write waited {took} s for a copy");
    assert!(!copies.is_finished(), "8 MiB went at once");
    remote.set_rate(0, None);
    let began = pair.env.now();
    device.write(Mutation::data(Bytes::mib(32), noise(4, MEBIBYTE as usize))).await.expect("nothing goes wrong");
    copies.await.expect("no panic").expect("nothing goes wrong");
    let took = pair.env.now().since(began).as_secs_f64();
    assert!(took < 1.5, "after the limit was lifted it took {took} s");
    drop(Arc::clone(&remote));
}

#[tokio::test(start_paused = true)]
async fn what_a_stream_owes_is_paid_at_the_rate_of_now() {
    let pair = Pair::new(2, Device::new("memory", MemDevice::new(Bytes::mib(64))));
    for rate in [None, Some(16 * MEBIBYTE)] {
        let (remote, device) = pair.device(Role::Copy, 1).await;
        remote.set_rate(0, Some(MEBIBYTE / 16));
        let guest = noise(3, 32 << 10);
        // Eight minutes' worth of what does not wait.
        for number in 0..960 {
            device.write(write(number * (32 << 10), &guest)).await.expect("nothing goes wrong");
        }
        let copy = {
            let (device, data) = (device.clone(), noise(4, MEBIBYTE as usize));
            tokio::spawn(async move { device.write(Mutation::data(Bytes::mib(32), data)).await })
        };
        pair.env.sleep(Duration::from_secs(5)).await;
        assert!(!copy.is_finished(), "a copy did not wait for what is owed");
        remote.set_rate(0, rate);
        let began = pair.env.now();
        copy.await.expect("no panic").expect("nothing goes wrong");
        let took = pair.env.now().since(began).as_secs_f64();
        let expected = if rate.is_none() { 0.0..0.6 } else { 1.0..2.6 };
        assert!(expected.contains(&took), "with {rate:?} it took {took} s");
        remote.close().await.expect("it takes leave");
    }
}

#[tokio::test(start_paused = true)]
async fn the_other_end_says_what_the_interfaces_have_carried_through_which_it_is_reached() {
    let pair = Pair::new(3, Device::new("memory", MemDevice::new(Bytes::mib(1))));
    let (remote, _device) = pair.device(Role::Copy, 1).await;
    assert_ne!(remote.session().features & feature::USAGE, 0);
    let addresses = ["127.0.0.1", "10.0.0.1", "::1"].map(|text| text.parse().expect("an address"));
    let answer = remote.call(Ask::Usage { addresses: addresses.to_vec() }).await.expect("it is answered");
    assert_eq!(remote.usage(&addresses[..1]).await.expect("it is answered"), Some(vec![Some(usage(&addresses[0]))]));
    assert_eq!(answer, Answer::Usage(vec![Some(usage(&addresses[0])), None, Some(usage(&addresses[2]))]));
    assert_eq!(remote.paths(), [None], "a pipe has no addresses");
}

#[tokio::test(start_paused = true)]
async fn both_ends_are_told_what_a_connection_is_for_once_it_is_a_stream() {
    let pair = Pair::new(4, Device::new("memory", MemDevice::new(Bytes::mib(1))));
    *pair.handler.refusal.lock() = Some(ErrorKind::Busy);
    pair.connect(Role::Copy, StreamOptions::default()).await.err().expect("it is refused");
    assert_eq!(*pair.lines.told.lock(), [], "who was refused carries nothing");
    *pair.handler.refusal.lock() = None;
    let (copy, _) = pair.device(Role::Copy, 2).await;
    pair.settle().await;
    let mut told = std::mem::take(&mut *pair.lines.told.lock());
    told.sort_by_key(|(side, stream, _)| (*side, *stream));
    let of = |side, role| [(side, 0, role), (side, 1, role)];
    assert_eq!(told, [of("receiver", Role::Copy), of("sender", Role::Copy)].concat());
    drop(copy);
    let (_forward, _) = pair.device(Role::Forward, 1).await;
    assert!(pair.lines.told.lock().contains(&("receiver", 0, Role::Forward)));
}
