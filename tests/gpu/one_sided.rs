//! Writes, reads and atomics on GPU memory.

use futures::future::join_all;
use gpusock::{Access, Context, Error, GpuBuf, GpuEndpoint, RemoteBuf};

use crate::common::pattern;
use crate::device::{Device, bytes, filled};
use crate::{Link, Suite, pair};

pub fn add(suite: &mut Suite) {
    suite.on_links("one_sided::every_length_between_every_two_memories", every_length);
    suite.on_links("one_sided::ranges_are_exact_and_neighbours_unchanged", ranges_are_exact);
    suite.on_links("one_sided::a_kernel_sees_what_a_notification_told_of", a_kernel_sees_what_a_notification_told_of);
    suite.on_links("one_sided::thousands_of_blocks_in_one_call", thousands_of_blocks_in_one_call);
    suite.on_links("one_sided::tensors_of_one_allocation", tensors_of_one_allocation);
    suite.on_links("one_sided::atomics_are_atomic", atomics_are_atomic);
    suite.on_links("one_sided::misaligned_atomics_are_refused", misaligned_atomics_are_refused);
    suite.on_links("one_sided::a_dropped_read_never_touches_freed_memory", a_dropped_read_never_touches_freed_memory);
    suite.on_links("one_sided::a_revoked_exposure_is_not_written", a_revoked_exposure_is_not_written);
    suite.on_links("one_sided::reads_see_earlier_writes", reads_see_earlier_writes);
}

/// The peer's view of memory that `owner` exposes.
fn exposed(owner: &GpuEndpoint, buf: &GpuBuf) -> (RemoteBuf, RemoteBuf) {
    let lease = owner.expose(buf, Access::ALL).unwrap();
    let remote = RemoteBuf::from_bytes(&lease.to_bytes()).unwrap();
    (lease, remote)
}

async fn every_length(link: Link) {
    let pair = pair(link).await;
    for (here, there) in [("cuda:0", "cuda:0"), ("cuda:0", "host"), ("host", "cuda:0")] {
        for len in [0, 1, 8, 4095, 65_537, 524_288, (1 << 20) + 1, 9 << 20] {
            let target = pair.ctx_b.alloc(there, len as u64).unwrap();
            let (_lease, remote) = exposed(&pair.b, &target);
            let source = filled(&pair.ctx_a, here, len, len as u64);
            let receipt = pair.a.write_remote(&source, &remote).await.unwrap();
            assert!(bytes(&target) == pattern(len, len as u64), "{len} bytes written from {here} to {there}");
            let mut back = pair.ctx_a.alloc(here, len as u64).unwrap();
            let read = pair.a.read_remote(&mut back, &remote).await.unwrap();
            assert!(bytes(&back) == pattern(len, len as u64), "{len} bytes read from {there} to {here}");
            let all_staged = link != Link::Inproc || here != there;
            for receipt in [receipt, read] {
                assert_eq!((receipt.path, receipt.bytes), (link.path(), len as u64));
                assert_eq!(receipt.staged_bytes, if all_staged { len as u64 } else { 0 }, "{here} {there}");
            }
        }
    }
}

/// Case 21: ranges from the middle of an allocation, at odd places.
async fn ranges_are_exact(link: Link) {
    let pair = pair(link).await;
    let size = 3 << 20;
    let target = pair.ctx_b.alloc("cuda:0", size).unwrap();
    let (_lease, remote) = exposed(&pair.b, &target);
    let source = filled(&pair.ctx_a, "cuda:0", size as usize, 9);
    for (at, len) in [(4096, 100), (100, 4096), (1, 1), (size - 1, 1), (524_287, 524_290), (77, 1 << 20), (0, 0), (size, 0)] {
        target.copy_from_slice(0, &vec![0xee; size as usize]).unwrap();
        pair.a.write_remote(source.slice(3..3 + len), &remote.slice(at..at + len).unwrap()).await.unwrap();
        let (got, sent) = (bytes(&target), pattern(size as usize, 9));
        let (at, len) = (at as usize, len as usize);
        assert!(got[at..at + len] == sent[3..3 + len], "{len} bytes at {at}");
        assert!(got[..at].iter().chain(&got[at + len..]).all(|&b| b == 0xee), "neighbours of {len} bytes at {at}");
    }
    assert!(matches!(remote.slice(size..size + 1), Err(Error::OutOfBounds { .. })));
    // Only a piece of a buffer is exposed.
    let lease = pair.b.expose(target.slice(100..200), Access::ALL).unwrap();
    let piece = RemoteBuf::from_bytes(&lease.to_bytes()).unwrap();
    target.copy_from_slice(0, &[0xee; 300]).unwrap();
    pair.a.write_remote(source.slice(0..100), &piece).await.unwrap();
    let got = bytes(&target);
    assert!(got[..100].iter().chain(&got[200..300]).all(|&b| b == 0xee) && got[100..200] == pattern(size as usize, 9)[..100]);
}

/// Case 18: a kernel that is launched when the notification is there reads the new bytes.
async fn a_kernel_sees_what_a_notification_told_of(link: Link) {
    let pair = pair(link).await;
    let device = Device::new();
    for len in [64u64, 40_000, 2 << 20] {
        let target = pair.ctx_b.alloc("cuda:0", len).unwrap();
        let (_lease, remote) = exposed(&pair.b, &target);
        for round in 1..8u32 {
            let mut source = pair.ctx_a.alloc("cuda:0", len).unwrap();
            device.fill(&mut source, round, round);
            let write = tokio::spawn(pair.a.write_remote(&source, &remote).notify(3));
            pair.b.notified(3, 1).await.unwrap();
            let seen = device.snapshot(&target, 0);
            assert!(device.words(&seen).iter().all(|&word| word == round), "round {round}, {len} bytes");
            write.await.unwrap().unwrap();
        }
    }
}

/// Case 20: scattered blocks, one completion.
async fn thousands_of_blocks_in_one_call(link: Link) {
    let pair = pair(link).await;
    let (blocks, len) = (4096u64, 4096u64);
    let target = pair.ctx_b.alloc("cuda:0", blocks * len).unwrap();
    let (_lease, remote) = exposed(&pair.b, &target);
    let source = filled(&pair.ctx_a, "cuda:0", (blocks * len) as usize, 4);
    let place = |i: u64| (i * 1789) % blocks * len;
    let pieces = (0..blocks).map(|i| (source.slice(i * len..(i + 1) * len), remote.slice(place(i)..place(i) + len).unwrap()));
    let receipt = pair.a.write_remote_vectored(pieces).notify(1).await.unwrap();
    assert_eq!(receipt.bytes, blocks * len);
    pair.b.notified(1, 1).await.unwrap();
    let (got, sent) = (bytes(&target), bytes(&source));
    for i in 0..blocks {
        let (from, to) = ((i * len) as usize, place(i) as usize);
        assert!(got[to..to + len as usize] == sent[from..from + len as usize], "block {i}");
    }
}

/// Cases 19 and 30: many tensors of one allocation are exposed, written and revoked.
async fn tensors_of_one_allocation(link: Link) {
    let pair = pair(link).await;
    let (count, len) = (1265u64, 1000u64);
    let all = pair.ctx_b.alloc("cuda:0", count * len).unwrap();
    let leases: Vec<_> = (0..count).map(|i| pair.b.expose(all.slice(i * len..(i + 1) * len), Access::WRITE).unwrap()).collect();
    assert_eq!(pair.b.stats().exposures, count);
    let source = filled(&pair.ctx_a, "cuda:0", (count * len) as usize, 8);
    let writes = leases.iter().enumerate().map(|(i, lease)| {
        let remote = RemoteBuf::from_bytes(&lease.to_bytes()).unwrap();
        let at = i as u64 * len;
        pair.a.write_remote(source.slice(at..at + len), &remote)
    });
    for write in join_all(writes).await {
        write.unwrap();
    }
    assert!(bytes(&all) == bytes(&source));
    drop(leases);
    assert_eq!(pair.b.stats().exposures, 0);
}

async fn atomics_are_atomic(link: Link) {
    let pair = pair(link).await;
    let target = pair.ctx_b.alloc("cuda:0", 64).unwrap();
    let (_lease, remote) = exposed(&pair.b, &target);
    let word = remote.at(8).unwrap();
    let (clients, rounds) = (4, 50);
    let tasks = (0..clients).map(|_| {
        let (a, word) = (pair.a.clone(), word.clone());
        tokio::spawn(async move {
            let mut seen = Vec::new();
            for _ in 0..rounds {
                seen.push(a.fetch_add(&word, 3).await.unwrap());
            }
            seen
        })
    });
    let mut seen: Vec<_> = join_all(tasks).await.into_iter().flat_map(Result::unwrap).collect();
    seen.sort_unstable();
    let total = clients * rounds;
    assert_eq!(seen, (0..total).map(|i| i * 3).collect::<Vec<_>>());
    assert_eq!(pair.a.compare_swap(&word, 1, 2).await.unwrap(), total * 3, "not what was expected: no exchange");
    assert_eq!(pair.a.compare_swap(&word, total * 3, u64::MAX).await.unwrap(), total * 3);
    assert_eq!(pair.a.fetch_add(&word, 2).await.unwrap(), u64::MAX);
    let got = bytes(&target);
    assert_eq!(u64::from_le_bytes(got[8..16].try_into().unwrap()), 1, "it wraps");
    assert!(got[..8].iter().chain(&got[16..]).all(|&b| b == 0), "neighbours changed");
    // An atomic sees the writes before it, and the reads after it see the atomic.
    let mut source = pair.ctx_a.alloc("cuda:0", 64).unwrap();
    Device::new().fill(&mut source, 5, 10);
    let mut back = pair.ctx_a.alloc("cuda:0", 64).unwrap();
    let (write, add, read) =
        tokio::join!(pair.a.write_remote(&source, &remote), pair.a.fetch_add(&word, 1), pair.a.read_remote(&mut back, &remote));
    write.unwrap();
    assert_eq!(add.unwrap(), 5 | 5 << 32);
    read.unwrap();
    assert_eq!(bytes(&back)[8..16], (6u64 | 5 << 32).to_le_bytes());
}

async fn misaligned_atomics_are_refused(link: Link) {
    let pair = pair(link).await;
    let target = pair.ctx_b.alloc("cuda:0", 64).unwrap();
    let (_lease, remote) = exposed(&pair.b, &target);
    assert!(matches!(remote.at(4), Err(Error::InvalidArgument { .. })));
    assert!(matches!(remote.at(60), Err(Error::OutOfBounds { .. })));
    // The offset is a multiple of eight, but the memory begins at an odd address.
    let lease = pair.b.expose(target.slice(4..44), Access::ALL).unwrap();
    let odd = RemoteBuf::from_bytes(&lease.to_bytes()).unwrap();
    assert!(matches!(pair.a.fetch_add(&odd.at(0).unwrap(), 1).await, Err(Error::InvalidArgument { .. })));
    assert!(bytes(&target).iter().all(|&b| b == 0));
    assert_eq!(pair.a.fetch_add(&remote.at(0).unwrap(), 1).await.unwrap(), 0, "the endpoint goes on");
}

/// Case 22: a long read is dropped right after it was posted; its memory is freed and used again.
async fn a_dropped_read_never_touches_freed_memory(link: Link) {
    let pair = pair(link).await;
    let len = 32 << 20;
    let theirs = pair.ctx_b.alloc("cuda:0", len).unwrap();
    theirs.copy_from_slice(0, &vec![0x77; len as usize]).unwrap();
    let (_lease, remote) = exposed(&pair.b, &theirs);
    for _ in 0..4 {
        let mut mine = pair.ctx_a.alloc("cuda:0", len).unwrap();
        let mut read = Box::pin(pair.a.read_remote(&mut mine, &remote));
        let _ = futures::poll!(&mut read);
        drop(read);
        assert!(matches!(mine.copy_to_slice(0, &mut [0]), Err(Error::Busy { .. }) | Ok(())));
        drop(mine);
        // Whoever gets the memory next sees zeros, and they stay.
        let next = pair.ctx_a.alloc("cuda:0", len).unwrap();
        pair.a.flush().await.unwrap();
        assert!(bytes(&next).iter().all(|&b| b == 0), "a late byte");
    }
}

async fn a_revoked_exposure_is_not_written(link: Link) {
    let pair = pair(link).await;
    let device = Device::new();
    for round in 0..6 {
        let target = pair.ctx_b.alloc("cuda:0", 1 << 20).unwrap();
        let (lease, remote) = exposed(&pair.b, &target);
        let mut source = pair.ctx_a.alloc("cuda:0", 1 << 20).unwrap();
        device.fill(&mut source, 9, round);
        let mut write = Box::pin(pair.a.write_remote(&source, &remote));
        let _ = futures::poll!(&mut write);
        for _ in 0..round {
            tokio::task::yield_now().await;
        }
        drop(lease);
        // Either it came in time, whole, or it was refused; and from now on nothing comes.
        let written = write.await;
        assert!(matches!(written, Ok(_) | Err(Error::AccessDenied { .. })), "{written:?}");
        let mut all = vec![0; 1 << 20];
        let before = loop {
            match target.copy_to_slice(0, &mut all) {
                Ok(()) => break all.clone(),
                // A device is still at it, and the memory in use until it has done.
                Err(Error::Busy { .. }) => tokio::task::yield_now().await,
                Err(error) => panic!("{error}"),
            }
        };
        assert!(matches!(pair.a.write_remote(&source, &remote).await, Err(Error::AccessDenied { .. })));
        assert!(bytes(&target) == before, "written after the revocation");
        if written.is_ok() {
            assert!(before.chunks(4).all(|word| word == 9u32.to_le_bytes()));
        }
    }
}

async fn reads_see_earlier_writes(link: Link) {
    let pair = pair(link).await;
    let target = pair.ctx_b.alloc("cuda:0", 3 << 20).unwrap();
    let (_lease, remote) = exposed(&pair.b, &target);
    for round in 0..10 {
        let source = filled(&pair.ctx_a, "cuda:0", 3 << 20, round);
        let mut back = pair.ctx_a.alloc("cuda:0", 3 << 20).unwrap();
        let (write, read) = tokio::join!(pair.a.write_remote(&source, &remote), pair.a.read_remote(&mut back, &remote));
        write.unwrap();
        read.unwrap();
        assert!(bytes(&back) == pattern(3 << 20, round), "round {round}");
    }
    let _ = Context::new().unwrap();
}
