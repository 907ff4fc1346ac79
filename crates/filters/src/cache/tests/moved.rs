//! What a move of the cache needs.

use block::{Bytes, Data, Extent, Mutation};

use super::super::{Admission, CacheMode, Invalidations};
use super::{BLOCK, SECTOR, SIZE, Stand, byte_at, options, write, zero};

fn page(byte: u8) -> Data {
    Data::copy_of(&[byte; BLOCK as usize])
}

#[tokio::test(start_paused = true)]
async fn a_cache_is_copied_into_another_hottest_first() {
    let from = Stand::new(options(CacheMode::WriteBack), 8).await;
    write(&from.base, 0, &[5; 8 * BLOCK as usize]).await;
    from.read_blocks([3, 1, 7, 3]).await;
    write(&from.guest, 4 * BLOCK, &[6; BLOCK as usize]).await;
    write(&from.guest, 6 * BLOCK, &[6; SECTOR as usize]).await;
    let counts = from.counts();
    assert_eq!(from.cache.hottest(9), [6, 4, 3, 7, 1]);
    assert_eq!(from.cache.hottest(2), [6, 4]);
    assert!(from.cache.peek_then(6, |read| read).await.expect("it answers").is_none(), "it has one sector of it");
    assert!(
        from.cache.peek_then(0, |read| read).await.expect("it answers").is_none()
            && from.cache.peek_then(1 << 40, |read| read).await.expect("none").is_none()
    );
    let to = Stand::new(options(CacheMode::WriteThrough), 8).await;
    for block in [4, 3] {
        let token = to.cache.token(block);
        let bytes = from.cache.peek_then(block, |read| read).await.expect("it answers").expect("it is there");
        assert_eq!(to.cache.admit(block, bytes.freeze(), token).await.expect("it takes it"), Admission::Admitted);
    }
    assert_eq!((byte_at(&to.guest, 4 * BLOCK, BLOCK).await, byte_at(&to.guest, 3 * BLOCK, BLOCK).await), (6, 5));
    assert_eq!((to.counts(), from.counts()), ([2, 0, 0, 2], counts));
}

#[tokio::test(start_paused = true)]
async fn a_block_that_was_written_since_its_token_is_not_admitted() {
    for mode in super::MODES {
        let stand = Stand::new(options(mode), 8).await;
        let token = stand.cache.token(0);
        write(&stand.guest, 100, &[7; 10]).await;
        let outdated = stand.cache.admit(0, page(9), token).await.expect("nothing is asked");
        assert_eq!(outdated, Admission::Outdated, "{mode}");
        assert_eq!(byte_at(&stand.guest, 100, 1).await, 7);
        let other = stand.cache.token(1);
        zero(&stand.guest, BLOCK, SECTOR).await;
        assert_eq!(
            stand.cache.admit(1, page(9), other).await.expect("nothing is asked"),
            Admission::Outdated,
            "{mode}"
        );
    }
    let stand = Stand::new(options(CacheMode::WriteBack), 2).await;
    let admit = async |block, bytes| stand.cache.admit(block, bytes, stand.cache.token(block)).await;
    assert_eq!(admit(0, page(1)).await.expect("it takes it"), Admission::Admitted);
    assert_eq!(admit(0, page(1)).await.expect("nothing is asked"), Admission::Present);
    write(&stand.guest, 0, &[2; BLOCK as usize]).await;
    assert_eq!(admit(0, page(1)).await.expect("nothing is asked"), Admission::Present, "what is dirty stays");
    assert_eq!(byte_at(&stand.guest, 0, BLOCK).await, 2);
    assert!(admit(0, Data::copy_of(&[1; 512])).await.is_err() && admit(1 << 40, page(1)).await.is_err());
    stand.cache.close().await;
    assert_eq!(admit(1, page(1)).await.expect("nothing is asked"), Admission::Full);
}

#[tokio::test(start_paused = true)]
async fn the_changes_of_the_guest_are_heard_and_too_many_are_told_as_such() {
    let stand = Stand::new(options(CacheMode::WriteBack), 8).await;
    write(&stand.guest, 0, &[1; BLOCK as usize]).await;
    assert_eq!(stand.cache.invalidations(), Invalidations::default(), "nobody listens");
    stand.cache.watch_invalidations(4);
    write(&stand.guest, 0, &[2; SECTOR as usize]).await;
    write(&stand.guest, 3 * BLOCK - 1, &[2; 2]).await;
    let heard = Invalidations { blocks: vec![0, 2, 3], overflowed: false };
    assert_eq!((stand.cache.invalidations(), stand.cache.invalidations()), (heard, Invalidations::default()));
    let discard = Mutation::discard(Extent::between(Bytes(BLOCK), SIZE));
    stand.guest.write(discard).await.expect("it takes it");
    assert_eq!(stand.cache.invalidations(), Invalidations { blocks: Vec::new(), overflowed: true });
    write(&stand.guest, 0, &[2; SECTOR as usize]).await;
    assert_eq!(stand.cache.invalidations().blocks, [0]);
}
