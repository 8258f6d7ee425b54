//! Messages from and to GPU memory.

use std::time::Duration;

use futures::future::join_all;
use gpusock::{Error, MemKind, PathKind, Spin};

use crate::common::{self, pattern};
use crate::device::{Device, bytes, filled};
use crate::{Link, Suite, pair, pair_spinning};

pub fn add(suite: &mut Suite) {
    suite.on_links("messages::every_length_arrives_between_every_two_memories", every_length_arrives);
    suite.on_links("messages::unexpected_ones_wait_and_arrive", unexpected_ones_wait_and_arrive);
    suite.on_links("messages::bytes_are_there_when_the_future_ends", bytes_are_there_when_the_future_ends);
    suite.on_links("messages::receipts_tell_what_happened", receipts_tell_what_happened);
    suite.on_links("messages::a_dropped_receive_loses_nothing", a_dropped_receive_loses_nothing);
    suite.on_links("messages::a_dropped_copy_loses_nothing", a_dropped_copy_loses_nothing);
    suite.on_links("messages::more_than_the_pinned_pool_holds", more_than_the_pinned_pool_holds);
    suite.on_links("messages::waits_of_every_kind_end", waits_of_every_kind_end);
    suite.on_links("messages::what_has_arrived_outlives_the_connection", what_has_arrived_outlives_the_connection);
    suite.on_links("messages::short_and_truncated", short_and_truncated);
    suite.add("messages::staging_is_warned_of_once", staging_is_warned_of_once);
    suite.add("messages::a_policy_without_staging_refuses", a_policy_without_staging_refuses);
    suite.add("messages::lanes_share_a_long_message", lanes_share_a_long_message);
    suite.add_with_two("messages::between_two_gpus", between_two_gpus);
}

const LENS: [usize; 11] = [0, 1, 8, 4095, 65_536, 65_537, 524_288, 524_289, 1 << 20, (3 << 20) + 5, 16 << 20];

async fn every_length_arrives(link: Link) {
    let pair = pair(link).await;
    for (from, to) in [("cuda:0", "cuda:0"), ("cuda:0", "host"), ("host", "cuda:0")] {
        for (i, len) in LENS.into_iter().enumerate() {
            let source = filled(&pair.ctx_a, from, len, i as u64);
            let mut target = pair.ctx_b.alloc(to, len as u64 + 16).unwrap();
            target.copy_from_slice(len as u64, &[7; 16]).unwrap();
            let (sent, received) = tokio::join!(pair.a.send(&source).tag(i as u64), pair.b.recv(&mut target));
            let received = received.unwrap();
            assert_eq!((received.len, received.tag, sent.unwrap().bytes), (len as u64, i as u64, len as u64));
            let got = bytes(&target);
            assert!(got[..len] == pattern(len, i as u64), "{len} bytes from {from} to {to}");
            assert_eq!(got[len..], [7; 16], "behind {len} bytes");
        }
    }
}

/// Sent before anybody receives: what is short waits in buffers, what is long at its sender.
async fn unexpected_ones_wait_and_arrive(link: Link) {
    let pair = pair(link).await;
    let lens = [8, 100, 4096, 65_536, 200_000, 2 << 20];
    let sources: Vec<_> = lens.iter().enumerate().map(|(i, &len)| filled(&pair.ctx_a, "cuda:0", len, i as u64)).collect();
    // Polled in this order, which is that of the messages.
    let sends = tokio::spawn(join_all(sources.iter().map(|source| pair.a.send(source))));
    for (i, &len) in lens.iter().enumerate() {
        let message = pair.b.incoming().await.unwrap();
        assert_eq!(message.len(), len as u64);
        let mut target = pair.ctx_b.alloc("cuda:0", len as u64).unwrap();
        message.recv_into(&mut target).await.unwrap();
        assert!(bytes(&target) == pattern(len, i as u64), "{len} bytes");
    }
    for send in sends.await.unwrap() {
        send.unwrap();
    }
    // From the host they are there as bytes already.
    for len in [1, 5000, 65_536] {
        pair.a.send_bytes(pattern(len, 1)).await.unwrap();
        let mut target = pair.ctx_b.alloc("cuda:0", len as u64).unwrap();
        assert_eq!(pair.b.recv(&mut target).await.unwrap().len, len as u64);
        assert!(bytes(&target) == pattern(len, 1), "{len} bytes");
    }
}

/// Case 26: the future never ends before the copy.
async fn bytes_are_there_when_the_future_ends(link: Link) {
    let pair = pair(link).await;
    let mut target = pair.ctx_b.alloc("cuda:0", 1 << 20).unwrap();
    for round in 0..30u64 {
        let source = filled(&pair.ctx_a, "cuda:0", 1 << 20, round);
        let (sent, received) = tokio::join!(pair.a.send(&source), pair.b.recv(&mut target));
        received.unwrap();
        let mut seen = vec![0; 1 << 20];
        target.copy_to_slice(0, &mut seen).unwrap();
        assert!(seen == pattern(1 << 20, round), "round {round}");
        sent.unwrap();
        // The source is free again: what is written to it now is not what arrived.
        source.copy_from_slice(0, &[0; 4096]).unwrap();
    }
}

async fn receipts_tell_what_happened(link: Link) {
    let pair = pair(link).await;
    let len = 3 << 20;
    let source = filled(&pair.ctx_a, "cuda:0", len, 1);
    let mut target = pair.ctx_b.alloc("cuda:0", len as u64).unwrap();
    let (sent, received) = tokio::join!(pair.a.send(&source), pair.b.recv(&mut target));
    let staged = if link == Link::Inproc { 0 } else { len as u64 };
    for receipt in [sent.unwrap(), received.unwrap().receipt] {
        assert_eq!((receipt.path, receipt.gpu, receipt.staged_bytes), (link.path(), Some(0), staged));
    }
    for stats in [pair.a.stats(), pair.b.stats()] {
        assert_eq!(stats.staged_bytes, staged);
    }
    let host = common::filled(&pair.ctx_a, 100, 1);
    let mut into = pair.ctx_b.alloc("host", 100).unwrap();
    let (sent, received) = tokio::join!(pair.a.send(&host), pair.b.recv(&mut into));
    for receipt in [sent.unwrap(), received.unwrap().receipt] {
        assert_eq!((receipt.gpu, receipt.staged_bytes, receipt.path.is_staged()), (None, 0, false));
    }
}

/// Case 3 on GPU memory: `recv` in a `select!` loop, dropped at every point.
async fn a_dropped_receive_loses_nothing(link: Link) {
    let pair = pair(link).await;
    let count = 40u64;
    let len = |i: u64| [100, 70_000, 600_000, 2 << 20][i as usize % 4];
    let sender = async {
        for i in 0..count {
            let source = filled(&pair.ctx_a, "cuda:0", len(i), i);
            pair.a.send(&source).await.unwrap();
        }
    };
    let receiver = async {
        let mut target = pair.ctx_b.alloc("cuda:0", 2 << 20).unwrap();
        let mut next = 0;
        let mut pause = 0u64;
        while next < count {
            pause = (pause * 7 + 13) % 400;
            tokio::select! {
                biased;
                received = pair.b.recv(&mut target) => {
                    let n = received.unwrap().len as usize;
                    assert_eq!(n, len(next));
                    let mut seen = vec![0; n];
                    target.copy_to_slice(0, &mut seen).unwrap();
                    assert!(seen == pattern(n, next), "message {next}");
                    next += 1;
                }
                () = tokio::time::sleep(Duration::from_micros(pause)) => {}
            }
        }
    };
    tokio::join!(sender, receiver);
}

/// A message that is in a buffer of the protocol's, and on its way into GPU memory when its receive is dropped.
async fn a_dropped_copy_loses_nothing(link: Link) {
    let pair = pair(link).await;
    let device = Device::new();
    for round in 0..10u64 {
        pair.a.send_bytes(pattern(60_000, round)).await.unwrap();
        pair.a.flush().await.unwrap();
        let mut first = pair.ctx_b.alloc("cuda:0", 60_000).unwrap();
        // The copy waits for a kernel, so the drop comes in its middle.
        device.fill(&mut first, 1, 20);
        let mut receive = Box::pin(pair.b.recv(&mut first));
        assert!(futures::poll!(&mut receive).is_pending());
        drop(receive);
        let mut second = pair.ctx_b.alloc("cuda:0", 60_000).unwrap();
        let target = if round % 2 == 0 { &mut first } else { &mut second };
        assert_eq!(pair.b.recv(&mut *target).await.unwrap().len, 60_000);
        assert!(bytes(target) == pattern(60_000, round), "round {round}");
    }
    assert_eq!(pair.b.stats().in_flight, 0);
}

async fn more_than_the_pinned_pool_holds(link: Link) {
    for spin in [Spin::Adaptive, Spin::Never] {
        let pair = pair_spinning(link, spin).await;
        let (count, len) = (24, 4 << 20);
        let exchange = |from: gpusock::GpuEndpoint,
                        ctx_from: gpusock::Context,
                        to: gpusock::GpuEndpoint,
                        ctx_to: gpusock::Context| async move {
            let sources: Vec<_> = (0..count).map(|i| filled(&ctx_from, "cuda:0", len, i)).collect();
            let sends = tokio::spawn(join_all(sources.iter().map(|source| from.send(source))));
            for i in 0..count {
                let mut target = ctx_to.alloc("cuda:0", len as u64).unwrap();
                to.recv(&mut target).await.unwrap();
                assert!(bytes(&target) == pattern(len, i), "message {i}");
            }
            for send in sends.await.unwrap() {
                send.unwrap();
            }
        };
        tokio::join!(
            exchange(pair.a.clone(), pair.ctx_a.clone(), pair.b.clone(), pair.ctx_b.clone()),
            exchange(pair.b.clone(), pair.ctx_b.clone(), pair.a.clone(), pair.ctx_a.clone()),
        );
    }
}

async fn waits_of_every_kind_end(link: Link) {
    let device = Device::new();
    for spin in [Spin::Never, Spin::Adaptive, Spin::Always, Spin::Thread] {
        let pair = pair_spinning(link, spin).await;
        for (round, delay) in [0, 30, 0, 5].into_iter().enumerate() {
            let mut source = pair.ctx_a.alloc("cuda:0", 1 << 20).unwrap();
            device.fill(&mut source, round as u32 + 1, delay);
            let mut target = pair.ctx_b.alloc("cuda:0", 1 << 20).unwrap();
            let (sent, received) = tokio::join!(pair.a.send(&source), pair.b.recv(&mut target));
            sent.unwrap();
            received.unwrap();
            let seen = bytes(&target);
            assert!(seen.chunks(4).all(|word| word == (round as u32 + 1).to_le_bytes()), "{spin:?}, round {round}");
        }
    }
}

async fn what_has_arrived_outlives_the_connection(link: Link) {
    let pair = pair(link).await;
    for i in 0..4 {
        pair.a.send_bytes(pattern(10_000, i)).await.unwrap();
    }
    pair.a.flush().await.unwrap();
    pair.a.close().await.unwrap();
    for i in 0..4 {
        let mut target = pair.ctx_b.alloc("cuda:0", 10_000).unwrap();
        pair.b.recv(&mut target).await.unwrap();
        assert!(bytes(&target) == pattern(10_000, i), "message {i}");
    }
    let mut target = pair.ctx_b.alloc("cuda:0", 10_000).unwrap();
    assert!(matches!(pair.b.recv(&mut target).await, Err(Error::Closed)));
}

async fn short_and_truncated(link: Link) {
    let pair = pair(link).await;
    let source = filled(&pair.ctx_a, "cuda:0", 5000, 3);
    let send = tokio::spawn(pair.a.send(&source));
    let mut small = pair.ctx_b.alloc("cuda:0", 100).unwrap();
    assert!(matches!(pair.b.recv(&mut small).await, Err(Error::Truncated { needed: 5000, got: 100 })));
    let (first, second) = pair.ctx_b.alloc("cuda:0", 6000).unwrap().split_at(5500).unwrap();
    let mut first = first;
    assert_eq!(pair.b.recv(&mut first).await.unwrap().len, 5000);
    send.await.unwrap().unwrap();
    assert!(bytes(&first)[..5000] == pattern(5000, 3));
    assert!(bytes(&first)[5000..].iter().chain(&bytes(&second)).all(|&b| b == 0), "neighbours changed");
}

/// Case 11: works, staged, with one warning that names the reason.
async fn staging_is_warned_of_once() {
    use std::sync::{Arc, Mutex};
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);
    impl std::io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).with_ansi(false).finish();
    let _default = tracing::subscriber::set_default(subscriber);
    let pair = pair(Link::Tcp).await;
    let source = filled(&pair.ctx_a, "cuda:0", 100, 1);
    let mut target = pair.ctx_b.alloc("cuda:0", 100).unwrap();
    for _ in 0..3 {
        // On this very thread, which the subscriber is set for.
        let (sent, received) = tokio::join!(pair.a.send(&source), pair.b.recv(&mut target));
        sent.unwrap();
        received.unwrap();
    }
    let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    let warnings: Vec<_> = text.lines().filter(|line| line.contains("WARN") && line.contains("through host memory")).collect();
    // One for each end, and both are in this process.
    assert_eq!(warnings.len(), 2, "{text}");
    assert!(warnings[0].contains("tcp-staged") && warnings[0].contains("cuda-ipc: "), "{text}");
}

async fn a_policy_without_staging_refuses() {
    let builder = || Link::Tcp.builder().policy(gpusock::PathPolicy::new().require(PathKind::Tcp));
    let pair = common::pair_of(common::Transport::Tcp, builder(), builder()).await;
    let source = filled(&pair.ctx_a, "cuda:0", 100, 1);
    let error = pair.a.send(&source).await.unwrap_err();
    assert!(matches!(error, Error::NoPath { .. }) && error.to_string().contains("tcp-staged: not allowed"), "{error}");
    let mut target = pair.ctx_b.alloc("cuda:0", 100).unwrap();
    assert!(matches!(pair.b.recv(&mut target).await, Err(Error::NoPath { .. })));
    assert!(matches!(pair.b.expose(&target, gpusock::Access::ALL), Err(Error::NoPath { .. })));
    // Host memory goes on.
    let host = common::filled(&pair.ctx_a, 100, 1);
    let mut into = pair.ctx_b.alloc("host", 100).unwrap();
    let (sent, received) = tokio::join!(pair.a.send(&host), pair.b.recv(&mut into));
    sent.unwrap();
    received.unwrap();
}

async fn lanes_share_a_long_message() {
    let builder = || Link::Tcp.builder().lanes(4);
    let pair = common::pair_of(common::Transport::TcpLanes, builder(), builder()).await;
    let len = (24 << 20) + 77;
    for round in 0..3 {
        let source = filled(&pair.ctx_a, "cuda:0", len, round);
        let mut target = pair.ctx_b.alloc("cuda:0", len as u64).unwrap();
        let (sent, received) = tokio::join!(pair.a.send(&source), pair.b.recv(&mut target));
        sent.unwrap();
        received.unwrap();
        assert!(bytes(&target) == pattern(len, round));
    }
}

async fn between_two_gpus() {
    for link in Link::ALL {
        let pair = pair(link).await;
        for len in LENS {
            let source = filled(&pair.ctx_a, "cuda:0", len, 5);
            let mut target = pair.ctx_b.alloc("cuda:1", len as u64).unwrap();
            let (sent, received) = tokio::join!(pair.a.send(&source), pair.b.recv(&mut target));
            sent.unwrap();
            let receipt = received.unwrap().receipt;
            assert!(bytes(&target) == pattern(len, 5), "{len} bytes over {link:?}");
            if len > 0 && link == Link::Inproc {
                assert_eq!((receipt.path, receipt.gpu, receipt.staged_bytes), (PathKind::InprocPeer, Some(1), 0));
            }
        }
        let there = pair.ctx_b.alloc("cuda:1", 4096).unwrap();
        let lease = pair.b.expose(&there, gpusock::Access::ALL).unwrap();
        let remote = gpusock::RemoteBuf::from_bytes(&lease.to_bytes()).unwrap();
        let source = filled(&pair.ctx_a, "cuda:0", 4096, 6);
        let receipt = pair.a.write_remote(&source, &remote).await.unwrap();
        assert_eq!(receipt.path, if link == Link::Inproc { PathKind::InprocPeer } else { link.path() });
        assert!(bytes(&there) == pattern(4096, 6));
        let report = pair.a.path(&source, &remote).unwrap();
        assert_eq!(report.chosen(), Some(receipt.path));
        assert_eq!(remote.mem(), MemKind::Cuda(1));
    }
}
