//! That the link behaves as it says.

use super::*;
use crate::clock;
use crate::log::Keep;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const FIGURES: LinkFigures = LinkFigures { rate: 100_000_000, latency: Duration::from_millis(1), window: 4 << 20 };

fn on_link<F: Future<Output = ()>>(seed: u64, play: impl FnOnce(World, Link) -> F) {
    clock::run(async {
        let world = World::new(seed, Keep::Tail);
        let link = Link::new(&world, "link", FIGURES);
        play(world, link).await;
    });
}

/// Writes `count` bytes and gives the moment at which the other side has read them.
async fn carry(world: &World, link: &Link, count: usize) -> Duration {
    let (mut client, mut server) = link.connect();
    let writing = world.spawn(async move {
        client.write_all(&vec![7; count]).await.expect("the link holds");
        client
    });
    let mut bytes = vec![0; count];
    server.read_exact(&mut bytes).await.expect("the link holds");
    let at = world.now().0;
    assert!(bytes.iter().all(|byte| *byte == 7));
    drop(writing.await);
    at
}

#[test]
fn bytes_take_the_latency_and_the_time_that_the_rate_gives_them() {
    on_link(1, |world, link| async move {
        assert_eq!(carry(&world, &link, 1).await.as_micros(), 1001);
        let took = carry(&world, &link, 10_000_000).await.as_micros() - 1001;
        assert!((101_000..101_100).contains(&took), "{took} us");
    });
}

#[test]
fn a_window_a_round_trip_is_all_that_a_connection_gets() {
    clock::run(async {
        let world = World::new(1, Keep::Tail);
        let link =
            Link::new(&world, "far", LinkFigures { latency: Duration::from_millis(50), window: 1 << 20, ..FIGURES });
        let took = carry(&world, &link, 10 << 20).await.as_secs_f64();
        assert!((0.95..1.1).contains(&took), "{took} s");
    });
}

#[test]
fn connections_share_a_link_alike_however_much_each_has_to_send() {
    on_link(1, |world, link| async move {
        let sizes = [4_000_000, 4_000_000, 1_000_000];
        let carried = sizes.map(|count| {
            let (world, link) = (world.clone(), link.clone());
            world.clone().spawn(async move { carry(&world, &link, count).await.as_secs_f64() })
        });
        let [one, two, small] = carried;
        let (one, two, small) =
            (one.await.expect("no panic"), two.await.expect("no panic"), small.await.expect("no panic"));
        // Three share until the small one is done at 3 MB, two share the rest.
        assert!((0.030..0.034).contains(&small), "{small} s");
        assert!((one - two).abs() < 0.003 && (0.089..0.093).contains(&one.max(two)), "{one} and {two} s");
    });
}

#[test]
fn a_cut_resets_both_sides_and_loses_what_was_on_its_way() {
    on_link(1, |world, link| async move {
        let (mut client, mut server) = link.connect();
        client.write_all(b"late").await.expect("it is up");
        link.cut();
        world.sleep(Duration::from_secs(1)).await;
        let error = server.read_u8().await.expect_err("something came over a cut connection");
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
        assert!(client.write_all(b"x").await.is_err() && client.read_u8().await.is_err());
        carry(&world, &link, 100).await;
        assert_eq!(world.faults()["link-cut"], 1);
    });
}

#[test]
fn a_link_that_was_down_goes_on_where_it_was() {
    on_link(1, |world, link| async move {
        let (mut client, mut server) = link.connect();
        client.write_all(b"patience").await.expect("it is up");
        link.set_up(false);
        let waiting = world.clone();
        let reading = world.spawn(async move {
            let mut bytes = [0; 8];
            server.read_exact(&mut bytes).await.expect("it comes back");
            (bytes, waiting.now().0)
        });
        world.sleep(Duration::from_secs(5)).await;
        link.set_up(true);
        let (bytes, at) = reading.await.expect("no panic");
        assert_eq!(&bytes, b"patience");
        assert!(at >= Duration::from_secs(5) && at < Duration::from_millis(5002), "{at:?}");
    });
}

#[test]
fn on_a_half_open_connection_one_side_is_heard_and_the_other_not_and_nobody_is_told() {
    on_link(1, |world, link| async move {
        let (mut client, mut server) = link.connect();
        link.silence(Side::Client);
        client.write_all(b"unheard").await.expect("it does not know");
        server.write_all(b"heard").await.expect("it does not know");
        let mut bytes = [0; 5];
        client.read_exact(&mut bytes).await.expect("this way works");
        drop(client);
        let heard = tokio::select! {
            biased;
            read = server.read_u8() => Some(read.is_ok()),
            () = world.sleep(Duration::from_secs(3600)) => None,
        };
        assert_eq!(heard, None, "the end of a silent side was noticed");
    });
}

#[test]
fn segments_of_different_connections_overtake_each_other_and_those_of_one_never_do() {
    let overtaken = std::cell::Cell::new(0);
    let overtaken = &overtaken;
    for seed in 0..20 {
        on_link(seed, |world, link| async move {
            link.set_faults(LinkFaults { reorder: Duration::from_millis(2), ..LinkFaults::default() });
            let (mut first, mut first_end) = link.connect();
            let (mut second, mut second_end) = link.connect();
            for byte in 0..50_u8 {
                first.write_all(&[byte]).await.expect("it is up");
                world.sleep(Duration::from_micros(100)).await;
            }
            first.write_all(&[50]).await.expect("it is up");
            second.write_all(&[0]).await.expect("it is up");
            second_end.read_u8().await.expect("it is up");
            let early = world.now();
            for byte in 0..=50_u8 {
                assert_eq!(first_end.read_u8().await.expect("it is up"), byte);
            }
            overtaken.set(overtaken.get() + u32::from(world.now() > early));
        });
    }
    assert!((3..20).contains(&overtaken.get()), "the second came first in {} of 20", overtaken.get());
}

#[test]
fn a_corrupt_segment_has_one_wrong_bit() {
    on_link(3, |world, link| async move {
        link.set_faults(LinkFaults { corrupt: 1.0, ..LinkFaults::default() });
        let (mut client, mut server) = link.connect();
        client.write_all(&[0; 1000]).await.expect("it is up");
        let mut bytes = [0; 1000];
        server.read_exact(&mut bytes).await.expect("it is up");
        assert_eq!(bytes.iter().map(|byte| byte.count_ones()).sum::<u32>(), 1);
        assert_eq!(world.faults()["corrupt-segment"], 1);
    });
}

#[test]
fn the_end_comes_after_the_last_byte_and_writing_to_a_closed_end_is_an_error() {
    on_link(1, |world, link| async move {
        let (mut client, mut server) = link.connect();
        client.write_all(&[1; 300_000]).await.expect("it is up");
        drop(client);
        let mut bytes = Vec::new();
        server.read_to_end(&mut bytes).await.expect("an end is no error");
        assert_eq!(bytes.len(), 300_000);
        world.sleep(Duration::from_millis(5)).await;
        assert!(server.write_all(b"x").await.is_err());
    });
}
