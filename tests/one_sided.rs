//! Writes, reads, atomics and notifications: exact bytes, refusals, order, dropped futures.

mod common;

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use common::{filled, pattern};
use gpusock::{Access, Error, GpuBuf, GpuSlice, RemoteBuf};

async fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    poll_fn(|cx| Poll::Ready(Pin::new(&mut *future).poll(cx))).await
}

/// What the peer makes of a descriptor.
fn over(remote: &RemoteBuf) -> RemoteBuf {
    RemoteBuf::from_bytes(&remote.to_bytes()).unwrap()
}

fn is_out<T>(result: &Result<T, Error>) -> bool {
    matches!(result, Err(Error::OutOfBounds { .. }))
}

fn is_denied<T>(result: &Result<T, Error>) -> bool {
    matches!(result, Err(Error::AccessDenied { .. }))
}

on_every_transport! {
    /// Cases 14 and 21: every length and alignment, exact bytes, neighbours unchanged, nothing past the end.
    async fn ranges_are_exact(pair: Pair) {
        let size = (2 << 20) + 4096;
        let source = filled(&pair.ctx_a, size, 1);
        let bytes = pattern(size, 1);
        let target = pair.ctx_b.alloc("host", size as u64).unwrap();
        let lease = pair.b.expose(&target, Access::READ | Access::WRITE).unwrap();
        let remote = over(&lease);
        let mut back = pair.ctx_a.alloc("host", size as u64).unwrap();
        for (at, len) in [(0, 0), (0, 8), (4096, 4096), (100, 70_001), (size - 1, 1), (size, 0), (1, size - 1), (0, size), (12_345, 1 << 20)] {
            target.copy_from_slice(0, &vec![0x55; size]).unwrap();
            let range = at as u64..(at + len) as u64;
            let receipt = pair.a.write_remote(source.slice(range.clone()), &remote.slice(range.clone()).unwrap()).await.unwrap();
            assert_eq!((receipt.bytes, receipt.path), (len as u64, pair.transport.kind()));
            let mut expected = vec![0x55; size];
            expected[at..at + len].copy_from_slice(&bytes[at..at + len]);
            assert!(target.to_vec().unwrap() == expected, "write of {len} at {at}");
            pair.a.read_remote(back.slice_mut(range.clone()), &remote.slice(range).unwrap()).await.unwrap();
            assert!(back.to_vec().unwrap()[at..at + len] == bytes[at..at + len], "read of {len} at {at}");
        }
        assert!(is_out(&remote.slice(size as u64..size as u64 + 1)) && is_out(&remote.slice(5..size as u64 + 1)));
        assert!(matches!(pair.a.write_remote(source.slice(..7), &remote.slice(..8).unwrap()).await, Err(Error::InvalidArgument { .. })));
    }

    async fn access_is_what_was_granted(pair: Pair) {
        let source = filled(&pair.ctx_a, 64, 2);
        let mut dest = pair.ctx_a.alloc("host", 64).unwrap();
        let target = filled(&pair.ctx_b, 64, 3);
        let read = pair.b.expose(&target, Access::READ).unwrap();
        let write = pair.b.expose(&target, Access::WRITE).unwrap();
        assert!(is_denied(&pair.a.write_remote(&source, &over(&read)).await));
        assert!(is_denied(&pair.a.read_remote(&mut dest, &over(&write)).await));
        assert!(is_denied(&pair.a.fetch_add(&over(&write).at(0).unwrap(), 1).await));
        assert!(is_denied(&pair.b.write_remote(&source, &write).await), "its own memory");
        assert_eq!(target.to_vec().unwrap(), pattern(64, 3), "nothing moved");
        assert!(matches!(pair.b.expose(target.slice(60..70), Access::READ), Err(Error::OutOfBounds { .. })));
        let fixed = pair.ctx_b.register(&b"read-only"[..]).unwrap();
        assert!(matches!(pair.b.expose(&fixed, Access::WRITE), Err(Error::InvalidArgument { .. })));
        assert!(pair.b.expose(&fixed, Access::READ).is_ok());
    }

    /// Rights, ranges and tokens are checked at the target, not only where the descriptor is read.
    async fn tampered_and_foreign_descriptors_are_refused(pair: Pair) {
        let source = filled(&pair.ctx_a, 64, 2);
        let target = pair.ctx_b.alloc("host", 64).unwrap();
        let lease = pair.b.expose(&target, Access::WRITE).unwrap();
        let bytes = lease.to_bytes();
        for bit in 0..bytes.len() * 8 {
            let mut wrong = bytes.to_vec();
            wrong[bit / 8] ^= 1 << (bit % 8);
            assert!(matches!(RemoteBuf::from_bytes(&wrong), Err(Error::InvalidArgument { .. })), "bit {bit}");
        }
        assert!(RemoteBuf::from_bytes(&bytes[1..]).is_err());
        // A well-formed descriptor with another token, as an attacker would make it.
        let forge = |at: usize, value: u64| {
            let mut forged = bytes.to_vec();
            forged[at..at + 8].copy_from_slice(&value.to_le_bytes());
            let sum = forged[..56].iter().fold(0xcbf2_9ce4_8422_2325u64, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
            forged[56..].copy_from_slice(&sum.to_le_bytes());
            RemoteBuf::from_bytes(&forged).unwrap()
        };
        assert!(is_denied(&pair.a.write_remote(&source, &forge(32, 12345)).await), "token");
        assert!(is_denied(&pair.a.write_remote(&source, &forge(24, 77)).await), "exposure");
        let longer = forge(48, 1 << 40).slice(32..96).unwrap();
        assert!(is_out(&pair.a.write_remote(&source, &longer).await), "range");
        let other = common::pair(pair.transport).await;
        assert!(is_denied(&other.a.write_remote(&source, &over(&lease)).await), "another endpoint");
        assert_eq!(target.to_vec().unwrap(), [0; 64]);
        pair.a.write_remote(&source, &over(&lease)).await.unwrap();
        assert_eq!(target.to_vec().unwrap(), pattern(64, 2), "the endpoint works on");
    }

    async fn a_dropped_lease_revokes(pair: Pair) {
        let source = filled(&pair.ctx_a, 64, 2);
        let mut target = pair.ctx_b.alloc("host", 64).unwrap();
        let lease = pair.b.expose(&target, Access::WRITE).unwrap();
        let remote = over(&lease);
        let part = lease.slice(0..8).unwrap();
        drop(lease);
        pair.a.write_remote(&source, &remote).await.unwrap();
        assert!(matches!(target.map(), Err(Error::Busy { .. })), "a slice of the lease keeps it exposed");
        let old = over(&part);
        drop(part);
        assert!(is_denied(&pair.a.write_remote(&source, &remote).await));
        target.map_mut().unwrap().fill(0);
        // The number is used again, for other memory; the old name does not open it.
        let next = pair.b.expose(&target, Access::WRITE).unwrap();
        assert!(is_denied(&pair.a.write_remote(source.slice(..8), &old).await));
        assert_eq!(target.to_vec().unwrap(), [0; 64]);
        next.revoke();
        assert!(is_denied(&pair.a.write_remote(&source, &over(&next)).await));
    }

    async fn atomics_are_atomic(pair: Pair) {
        let target = pair.ctx_b.alloc("host", 32).unwrap();
        let lease = pair.b.expose(&target, Access::ATOMIC | Access::READ).unwrap();
        let remote = over(&lease);
        let word = remote.at(8).unwrap();
        let other = common::pair(pair.transport).await;
        drop(other);
        let adds: Vec<_> = (0..200).map(|_| pair.a.fetch_add(&word, 3)).collect();
        let mut olds: Vec<_> = futures::future::join_all(adds).await.into_iter().map(Result::unwrap).collect();
        olds.sort_unstable();
        assert_eq!(olds, (0..200).map(|i| 3 * i).collect::<Vec<_>>());
        assert_eq!(pair.a.compare_swap(&word, 600, 7).await.unwrap(), 600);
        assert_eq!(pair.a.compare_swap(&word, 600, 8).await.unwrap(), 7, "not exchanged");
        assert_eq!(pair.a.fetch_add(&word, u64::MAX).await.unwrap(), 7, "wraps");
        assert_eq!(target.to_vec().unwrap()[8..16], 6u64.to_le_bytes());
        assert!(matches!(remote.at(4), Err(Error::InvalidArgument { .. })), "misaligned");
        assert!(is_out(&remote.at(25)) && is_out(&remote.at(u64::MAX - 3)));
        // Aligned in the exposure, not in memory.
        let odd = pair.b.expose(target.slice(4..20), Access::ATOMIC).unwrap();
        assert!(matches!(pair.a.fetch_add(&over(&odd).at(0).unwrap(), 1).await, Err(Error::InvalidArgument { .. })));
    }

    /// Case 20: 4,096 scattered blocks in one call, with one notification.
    async fn a_vectored_write_is_one_operation(pair: Pair) {
        const BLOCK: u64 = 16 << 10;
        const BLOCKS: u64 = 4096;
        let source = filled(&pair.ctx_a, (BLOCK * BLOCKS) as usize, 5);
        let target = pair.ctx_b.alloc("host", BLOCK * BLOCKS).unwrap();
        let lease = pair.b.expose(&target, Access::WRITE).unwrap();
        let remote = over(&lease);
        let at = |i: u64| (i * BLOCK..(i + 1) * BLOCK, (i * 1811 % BLOCKS) * BLOCK);
        let pieces = (0..BLOCKS).map(|i| {
            let (from, to) = at(i);
            (source.slice(from), remote.slice(to..to + BLOCK).unwrap())
        });
        let before = pair.a.stats().writes;
        let (receipt, noted) = tokio::join!(pair.a.write_remote_vectored(pieces).notify(17), pair.b.notified(17, 1));
        noted.unwrap();
        assert_eq!(receipt.unwrap().bytes, BLOCK * BLOCKS);
        assert_eq!(pair.a.stats().writes - before, 1);
        let (source, target) = (source.to_vec().unwrap(), target.to_vec().unwrap());
        for i in 0..BLOCKS {
            let (from, to) = at(i);
            assert!(source[from.start as usize..from.end as usize] == target[to as usize..(to + BLOCK) as usize], "block {i}");
        }
        assert!(tokio::time::timeout(Duration::from_millis(5), pair.b.notified(17, 1)).await.is_err(), "one notification");
        let none: Vec<(GpuSlice, RemoteBuf)> = Vec::new();
        assert!(matches!(pair.a.write_remote_vectored(none).await, Err(Error::InvalidArgument { .. })));
    }

    /// Case 25: never before the last byte of any lane. The bytes are looked at as soon as the notification is there.
    async fn a_notification_follows_the_last_byte(pair: Pair) {
        let size = 6 << 20;
        let target = pair.ctx_b.alloc("host", size as u64).unwrap();
        let lease = pair.b.expose(&target, Access::WRITE).unwrap();
        let remote = over(&lease);
        for round in 0..20 {
            let source = filled(&pair.ctx_a, size, round);
            let mut write = pair.a.write_remote(&source, &remote).notify(round);
            let mut message = pair.a.send_bytes("after the write");
            assert!(poll_once(&mut write).await.is_pending());
            let (write, message, seen) = tokio::join!(write, async { poll_once(&mut message).await }, async {
                if round % 2 == 0 {
                    pair.b.notified(round, 1).await.unwrap();
                } else {
                    // A message that was sent later sees the bytes as well.
                    pair.b.recv_bytes().await.unwrap();
                }
                target.to_vec().unwrap() == pattern(size, round)
            });
            write.unwrap();
            if message.is_pending() { pair.a.flush().await.unwrap() }
            assert!(seen, "round {round}");
            if round % 2 == 0 { drop(pair.b.recv_bytes().await.unwrap()) } else { pair.b.notified(round, 1).await.unwrap() }
        }
    }

    async fn notifications_are_counted_by_tag_and_never_lost(pair: Pair) {
        let target = pair.ctx_b.alloc("host", 8).unwrap();
        let lease = pair.b.expose(&target, Access::WRITE).unwrap();
        let remote = over(&lease);
        let none = pair.ctx_a.alloc("host", 0).unwrap();
        let empty = remote.slice(..0).unwrap();
        let mut early = pair.b.notified(2, 1);
        assert!(poll_once(&mut early).await.is_pending());
        for tag in [1, 1, 2, 1, 3] {
            pair.a.write_remote(&none, &empty).notify(tag).await.unwrap();
        }
        // It had its notification when it was dropped, and nobody saw it.
        drop(early);
        pair.b.notified(2, 1).await.unwrap();
        pair.b.notified(1, 3).await.unwrap();
        let waited = tokio::time::timeout(Duration::from_millis(5), pair.b.notified(1, 1)).await;
        assert!(waited.is_err(), "three were taken, and there were no more");
        pair.b.notified(3, 0).await.unwrap();
        pair.b.notified(3, 1).await.unwrap();
    }

    /// Case 22: dropped right after it was posted, the buffer freed and its memory used again.
    async fn a_dropped_read_never_writes_into_freed_memory(pair: Pair) {
        let size = 64 << 20;
        let target = filled(&pair.ctx_b, size, 7);
        let lease = pair.b.expose(&target, Access::READ).unwrap();
        let remote = over(&lease);
        for polls in 1..4 {
            let mut dest = pair.ctx_a.alloc("host", size as u64).unwrap();
            let mut read = pair.a.read_remote(&mut dest, &remote);
            for _ in 0..polls {
                let _ = poll_once(&mut read).await;
            }
            drop(read);
            drop(dest);
            // Memory of the same size, which the allocator would take from what was freed.
            let next = pair.ctx_a.alloc("host", size as u64).unwrap();
            next.copy_from_slice(0, &vec![0x77; size]).unwrap();
            pair.a.flush().await.unwrap();
            while pair.a.stats().in_flight > 0 {
                tokio::task::yield_now().await;
            }
            assert!(next.to_vec().unwrap().iter().all(|&b| b == 0x77), "a late byte came");
        }
    }

    /// Case 4: after the timeout and the end of the lease, nothing lands any more.
    async fn a_write_that_timed_out_no_longer_lands(pair: Pair) {
        let size = 48 << 20;
        let source = filled(&pair.ctx_a, size, 8);
        for round in 0..4u64 {
            let mut target = pair.ctx_b.alloc("host", size as u64).unwrap();
            let lease = pair.b.expose(&target, Access::WRITE).unwrap();
            let remote = over(&lease);
            let write = pair.a.write_remote(&source, &remote).timeout(Duration::from_micros(300 * round)).await;
            if let Err(error) = write {
                assert!(matches!(error, Error::Timeout { .. }), "{error:?}");
            }
            drop(lease);
            let before = {
                let mut map = target.map_mut().expect("the lease is gone, so is the exposure");
                map.fill(0x33);
                map.as_ptr()
            };
            pair.a.flush().await.unwrap();
            while pair.a.stats().in_flight > 0 {
                tokio::task::yield_now().await;
            }
            let map = target.map().unwrap();
            assert!(map.as_ptr() == before && map.iter().all(|&b| b == 0x33), "late bytes in round {round}");
        }
        // The endpoint works on.
        pair.a.send_bytes("x").await.unwrap();
        assert_eq!(pair.b.recv_bytes().await.unwrap().0, "x");
    }

    async fn cancel_ends_when_the_memory_is_let_go_of(pair: Pair) {
        let size = 32 << 20;
        let mut source = filled(&pair.ctx_a, size, 9);
        let target = pair.ctx_b.alloc("host", size as u64).unwrap();
        let lease = pair.b.expose(&target, Access::WRITE | Access::READ).unwrap();
        let remote = over(&lease);
        let mut write = pair.a.write_remote(&source, &remote).notify(5);
        assert!(poll_once(&mut write).await.is_pending());
        assert!(matches!(source.map_mut(), Err(Error::Busy { .. })));
        match write.cancel().await {
            Err(Error::Cancelled) | Ok(_) => {}
            Err(error) => panic!("{error}"),
        }
        assert!(source.map_mut().is_ok(), "the source is free");
        let mut dest = pair.ctx_a.alloc("host", size as u64).unwrap();
        let mut read = pair.a.read_remote(&mut dest, &remote);
        assert!(poll_once(&mut read).await.is_pending());
        let _ = read.cancel().await;
        assert!(dest.map_mut().is_ok(), "the destination is free");
        pair.a.write_remote(source.slice(..8), &remote.slice(..8).unwrap()).notify(6).await.unwrap();
        pair.b.notified(6, 1).await.unwrap();
    }

    async fn exposed_memory_is_reached_by_copies(pair: Pair) {
        let mut target = pair.ctx_b.alloc("host", 16).unwrap();
        let lease = pair.b.expose(&target, Access::WRITE).unwrap();
        assert!(matches!(target.map(), Err(Error::Busy { .. })) && matches!(target.map_mut(), Err(Error::Busy { .. })));
        target.copy_from_slice(0, b"0123456789abcdef").unwrap();
        pair.a.write_remote(&filled(&pair.ctx_a, 4, 1), &over(&lease).slice(4..8).unwrap()).await.unwrap();
        let mut bytes = [0; 16];
        target.copy_to_slice(0, &mut bytes).unwrap();
        assert_eq!(bytes[..4], *b"0123");
        assert_eq!(bytes[4..8], pattern(4, 1)[..]);
        assert!(is_out(&target.copy_to_slice(10, &mut [0; 7])) && is_out(&target.copy_from_slice(u64::MAX, &[0])));
        drop(lease);
        assert!(target.map_mut().is_ok());
    }

    /// Cases 7 and 8: buffers come and go; nothing is left of them, and their addresses do not confuse anybody.
    async fn thousands_of_buffers_come_and_go(pair: Pair) {
        let mut dest = pair.ctx_b.alloc("host", 300_000).unwrap();
        let mut before = 0;
        for i in 0..2500u64 {
            if i == 100 {
                before = common::descriptors();
            }
            // One in five is a memory file, with a descriptor of its own.
            let len = if i % 5 == 0 { 262_144 + i } else { 1 + i % 5000 };
            let source = filled(&pair.ctx_a, len as usize, i);
            let (sent, got) = tokio::join!(pair.a.send(&source), pair.b.recv(&mut dest));
            sent.unwrap();
            assert_eq!(got.unwrap().len, len);
            assert!(dest.map().unwrap()[..len as usize] == pattern(len as usize, i));
        }
        // Where other tests run in the same process, they open and close theirs; a leak would be 480.
        assert!(common::descriptors() < before + 100, "descriptors leak");
        assert_eq!((pair.a.stats().in_flight, pair.b.stats().in_flight), (0, 0));
    }
}

/// Case 14: more than 4 GiB in one operation.
#[tokio::test]
async fn five_gibibytes() {
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap();
    let available = memory.lines().find_map(|line| line.strip_prefix("MemAvailable:")).unwrap();
    let kib: u64 = available.split_whitespace().next().unwrap().parse().unwrap();
    if kib < 14 << 20 {
        println!("not run: {} MiB of memory are available, and 14 GiB are needed", kib >> 10);
        return;
    }
    let pair = common::pair(common::Transport::Tcp).await;
    let len = 5 * (1u64 << 30) + 3;
    let source = pair.ctx_a.alloc("host", len).unwrap();
    // Pages that are never written cost nothing; these are what is looked at.
    let marks = [0, (1 << 32) - 5, (1 << 32) + 4096, len - 16];
    for (i, at) in marks.iter().enumerate() {
        source.copy_from_slice(*at, &pattern(16, i as u64)).unwrap();
    }
    let mut dest = pair.ctx_b.alloc("host", len).unwrap();
    let check = |dest: &GpuBuf| {
        for (i, at) in marks.iter().enumerate() {
            let mut bytes = [0; 16];
            dest.copy_to_slice(*at, &mut bytes).unwrap();
            assert_eq!(bytes[..], pattern(16, i as u64)[..], "at {at}");
        }
    };
    let (sent, got) = tokio::join!(pair.a.send(&source), pair.b.recv(&mut dest));
    assert_eq!((sent.unwrap().bytes, got.unwrap().len), (len, len));
    check(&dest);
    dest.copy_from_slice((1 << 32) + 4096, &[0; 16]).unwrap();
    let lease = pair.b.expose(&dest, Access::WRITE).unwrap();
    assert_eq!(pair.a.write_remote(&source, &over(&lease)).await.unwrap().bytes, len);
    check(&dest);
}
