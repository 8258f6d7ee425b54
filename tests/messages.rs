//! Messages: sizes, order, matching, dropped futures.

mod common;

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use common::{filled, pattern};
use futures::{SinkExt, StreamExt};
use gpusock::{Error, GpuEndpoint};

/// Polls once.
async fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    poll_fn(|cx| Poll::Ready(Pin::new(&mut *future).poll(cx))).await
}

/// Waits until `n` messages have come to an endpoint, without receiving any.
async fn arrived(endpoint: &GpuEndpoint, n: u64) {
    while endpoint.stats().messages_received < n {
        tokio::task::yield_now().await;
    }
}

on_every_transport! {
    /// Case 14 and 27: every length arrives whole, and nothing behind it changes.
    async fn every_length_arrives(pair: Pair) {
        let longest = (5 << 20) + 13;
        let source = filled(&pair.ctx_a, longest, 1);
        let bytes = pattern(longest, 1);
        let mut dest = pair.ctx_b.alloc("host", longest as u64 + 7).unwrap();
        for len in [0, 1, 7, 8, 4095, 4096, 4097, 16_384, 65_535, 65_536, 65_537, 1 << 20, (1 << 20) + 1, longest] {
            dest.map_mut().unwrap().fill(0xee);
            let (sent, got) = tokio::join!(pair.a.send(source.slice(..len as u64)).tag(len as u64), pair.b.recv(&mut dest));
            let (sent, got) = (sent.unwrap(), got.unwrap());
            assert_eq!((sent.bytes, got.len, got.tag), (len as u64, len as u64, len as u64));
            assert_eq!((sent.path, got.receipt.path), (pair.transport.kind(), pair.transport.kind()));
            let map = dest.map().unwrap();
            assert!(map[..len] == bytes[..len], "{len} bytes");
            assert!(map[len..].iter().all(|&b| b == 0xee), "bytes behind {len}");
        }
    }

    async fn messages_keep_their_order_across_lengths(pair: Pair) {
        const LENS: [usize; 5] = [8, 100_000, 8, 70_000, 40_000];
        let sender = async {
            for i in 0..50u64 {
                let len = LENS[i as usize % 5];
                let mut bytes = pattern(len, i);
                bytes[..8].copy_from_slice(&i.to_le_bytes());
                pair.a.send_bytes(bytes).tag(i).await.unwrap();
            }
        };
        let receiver = async {
            for i in 0..50u64 {
                let (bytes, tag) = pair.b.recv_bytes().await.unwrap();
                assert_eq!((bytes.len(), tag), (LENS[i as usize % 5], i));
                assert!(bytes[..8] == i.to_le_bytes() && bytes[8..] == pattern(bytes.len(), i)[8..]);
            }
        };
        tokio::join!(sender, receiver);
    }

    async fn a_tag_picks_its_message(pair: Pair) {
        for tag in [1u64, 2, 3] {
            pair.a.send_bytes(vec![tag as u8; 10]).tag(tag).await.unwrap();
        }
        let mut buf = pair.ctx_b.alloc("host", 10).unwrap();
        assert_eq!(pair.b.recv(&mut buf).tag(2).await.unwrap().tag, 2);
        assert_eq!(buf.to_vec().unwrap(), [2; 10]);
        assert_eq!(pair.b.recv(&mut buf).await.unwrap().tag, 1);
        assert_eq!(pair.b.recv(&mut buf).await.unwrap().tag, 3);
    }

    /// Case 15.
    async fn a_message_that_does_not_fit_can_still_be_received(pair: Pair) {
        for len in [100u64, 200_000] {
            let source = filled(&pair.ctx_a, len as usize, 3);
            let mut small = pair.ctx_b.alloc("host", 50).unwrap();
            let mut large = pair.ctx_b.alloc("host", len).unwrap();
            let receiver = async {
                let error = pair.b.recv(&mut small).await.unwrap_err();
                assert!(matches!(error, Error::Truncated { needed, got: 50 } if needed == len), "{error:?}");
                assert_eq!(pair.b.recv(&mut large).await.unwrap().len, len);
            };
            tokio::join!(async { pair.a.send(&source).await.unwrap() }, receiver);
            assert_eq!(large.to_vec().unwrap(), pattern(len as usize, 3));
            assert!(small.map_mut().is_ok(), "the small buffer is free again");
        }
    }

    /// Case 3: before the match.
    async fn a_receive_dropped_before_its_message_loses_nothing(pair: Pair) {
        let mut buf = pair.ctx_b.alloc("host", 100).unwrap();
        let dropped = tokio::time::timeout(Duration::from_millis(5), pair.b.recv(&mut buf)).await;
        assert!(dropped.is_err());
        assert!(buf.map_mut().is_ok(), "its buffer is free at once");
        pair.a.send_bytes(&b"whole"[..]).await.unwrap();
        let got = pair.b.recv(&mut buf).await.unwrap();
        assert_eq!(&buf.map().unwrap()[..got.len as usize], b"whole");
    }

    /// Case 3: after the match, at every stage of the transfer; the buffer is then freed.
    async fn a_receive_dropped_after_its_match_loses_nothing(pair: Pair) {
        let len = 3 << 20;
        let source = filled(&pair.ctx_a, len, 4);
        for polls in 0..12 {
            let mut first = pair.ctx_b.alloc("host", len as u64).unwrap();
            let mut send = pair.a.send(&source);
            let mut recv = pair.b.recv(&mut first);
            let (mut sent, mut seen) = (None, false);
            for _ in 0..polls {
                if sent.is_none() {
                    if let Poll::Ready(result) = poll_once(&mut send).await {
                        sent = Some(result);
                    }
                }
                if poll_once(&mut recv).await.is_ready() {
                    // It was received, and the next round sends another.
                    seen = true;
                    break;
                }
            }
            drop(recv);
            drop(first);
            let mut second = pair.ctx_b.alloc("host", len as u64).unwrap();
            let again = async {
                if !seen {
                    assert_eq!(pair.b.recv(&mut second).await.unwrap().len, len as u64);
                    assert!(second.to_vec().unwrap() == pattern(len, 4), "after {polls} polls");
                }
            };
            let send = async { match sent { Some(result) => result, None => send.await } };
            tokio::join!(send, again).0.unwrap();
        }
    }

    /// The way people write it: one buffer, a receive in `select!`, a timer that wins again and again.
    async fn a_select_loop_over_one_buffer_receives_everything(pair: Pair) {
        let sender = async {
            for i in 0..40u64 {
                pair.a.send_bytes(pattern(if i % 3 == 0 { 300_000 } else { 100 }, i)).tag(i).await.unwrap();
                tokio::time::sleep(Duration::from_micros(200)).await;
            }
        };
        let receiver = async {
            let mut buf = pair.ctx_b.alloc("host", 300_000).unwrap();
            let (mut next, mut dropped) = (0, 0);
            while next < 40 {
                tokio::select! {
                    biased;
                    () = tokio::time::sleep(Duration::from_micros(if dropped % 2 == 0 { 0 } else { 500 })) => dropped += 1,
                    got = pair.b.recv(&mut buf) => {
                        let got = got.unwrap();
                        assert_eq!(got.tag, next);
                        assert!(buf.map().unwrap()[..got.len as usize] == pattern(got.len as usize, next));
                        next += 1;
                    }
                }
            }
            assert!(dropped > 0);
        };
        tokio::join!(sender, receiver);
    }

    async fn ten_thousand_messages_wait(pair: Pair) {
        let sender = async {
            let sends: Vec<_> = (0..10_000u64).map(|i| pair.a.send_bytes(i.to_le_bytes().to_vec())).collect();
            for result in futures::future::join_all(sends).await {
                result.unwrap();
            }
        };
        let receiver = async {
            arrived(&pair.b, 1000).await;
            let mut buf = pair.ctx_b.alloc("host", 8).unwrap();
            for i in 0..10_000u64 {
                pair.b.recv(&mut buf).await.unwrap();
                assert_eq!(buf.to_vec().unwrap(), i.to_le_bytes());
            }
        };
        tokio::join!(sender, receiver);
    }

    async fn both_sides_send_at_once(pair: Pair) {
        let talk = |endpoint: GpuEndpoint, ctx: gpusock::Context, own: u64, other: u64| async move {
            let mut bufs: Vec<_> = (0..4).map(|_| ctx.alloc("host", 500_000).unwrap()).collect();
            for round in 0..5 {
                let sends = (0..4).map(|i| endpoint.send_bytes(pattern(500_000, own + round * 4 + i)));
                let (sent, got) = tokio::join!(futures::future::join_all(sends), async {
                    let recvs: Vec<_> = bufs.iter_mut().map(|buf| endpoint.recv(buf)).collect();
                    futures::future::join_all(recvs).await
                });
                assert!(sent.iter().all(Result::is_ok) && got.iter().all(Result::is_ok));
                for (i, buf) in bufs.iter().enumerate() {
                    assert!(buf.to_vec().unwrap() == pattern(500_000, other + round * 4 + i as u64));
                }
            }
        };
        tokio::join!(talk(pair.a.clone(), pair.ctx_a.clone(), 100, 200), talk(pair.b.clone(), pair.ctx_b.clone(), 200, 100));
    }

    /// Case 28.
    async fn a_close_ends_receives_that_wait_on_both_sides(pair: Pair) {
        let mut buf_a = pair.ctx_a.alloc("host", 8).unwrap();
        let mut buf_b = pair.ctx_b.alloc("host", 8).unwrap();
        let (mut recv_a, mut recv_b) = (pair.a.recv(&mut buf_a), pair.b.recv(&mut buf_b));
        assert!(poll_once(&mut recv_a).await.is_pending() && poll_once(&mut recv_b).await.is_pending());
        pair.a.close().await.unwrap();
        assert!(matches!(recv_a.await, Err(Error::Closed)));
        assert!(matches!(recv_b.await, Err(Error::Closed)));
        assert!(matches!(pair.b.closed().await, Error::Closed));
        assert!(matches!(pair.b.send_bytes("x").await, Err(Error::Closed)));
        assert!(matches!(pair.a.notified(1, 1).await, Err(Error::Closed)));
        assert!(buf_a.map_mut().is_ok() && buf_b.map_mut().is_ok());
    }

    async fn what_was_sent_before_a_close_can_be_received_after_it(pair: Pair) {
        pair.a.send_bytes("first").await.unwrap();
        pair.a.send_bytes("second").await.unwrap();
        pair.a.close().await.unwrap();
        pair.b.closed().await;
        assert_eq!(pair.b.recv_bytes().await.unwrap().0, "first");
        assert_eq!(pair.b.recv_bytes().await.unwrap().0, "second");
        assert!(matches!(pair.b.recv_bytes().await, Err(Error::Closed)));
    }

    /// The engine is in the middle of the buffer: it is nobody else's before the message is whole, or the engine has stopped.
    async fn a_close_in_mid_receive_is_sound_and_orderly(pair: Pair) {
        let common::Pair { ctx_a, a, ctx_b, b, .. } = pair;
        let len = 32 << 20;
        let source = filled(&ctx_b, len, 8);
        let sender = b.clone();
        let sending = tokio::spawn(async move { (sender.send(&source).await, sender.closed().await) });
        let mut buf = ctx_a.alloc("host", len as u64).unwrap();
        let mut recv = a.recv(&mut buf);
        while a.stats().bytes_received < 1 << 20 {
            if poll_once(&mut recv).await.is_ready() {
                break;
            }
            tokio::task::yield_now().await;
        }
        drop(recv);
        drop(a);
        let before = loop {
            match buf.map_mut() {
                Ok(mut map) => {
                    map.fill(0x5a);
                    break map;
                }
                Err(Error::Busy { .. }) => tokio::task::yield_now().await,
                Err(error) => panic!("{error}"),
            }
        };
        let (sent, why) = sending.await.unwrap();
        assert!(before.iter().all(|&b| b == 0x5a), "late bytes under a guard");
        assert!(sent.is_ok() && matches!(why, Error::Closed), "{sent:?} {why:?}");
    }

    async fn dropping_the_endpoint_still_delivers(pair: Pair) {
        let common::Pair { a, b, .. } = pair;
        let (short, long) = (a.send_bytes("short"), a.send_bytes(pattern(400_000, 5)));
        tokio::spawn(async move { drop((short.await, long.await)) });
        drop(a);
        assert_eq!(b.recv_bytes().await.unwrap().0, "short");
        assert!(b.recv_bytes().await.unwrap().0 == pattern(400_000, 5));
        assert!(matches!(b.recv_bytes().await, Err(Error::Closed)));
    }

    async fn incoming_tells_the_size_first(pair: Pair) {
        let sender = async {
            pair.a.send_bytes(pattern(10, 1)).tag(1).await.unwrap();
            pair.a.send_bytes(pattern(200_000, 2)).tag(2).await.unwrap();
            pair.a.send_bytes("thrown away").await.unwrap();
            pair.a.send_bytes(pattern(200_000, 2)).tag(9).await.unwrap();
            pair.a.send_bytes("last").await.unwrap();
        };
        let receiver = async {
            let mut incoming = pair.b.incoming();
            assert!(poll_once(&mut incoming).await.is_pending());
            arrived(&pair.b, 1).await;
            // The message has been given to it; dropped unseen, it loses none.
            drop(incoming);
            let message = pair.b.incoming().await.unwrap();
            assert_eq!((message.len(), message.tag()), (10, 1));
            let mut buf = pair.ctx_b.alloc("host", message.len()).unwrap();
            message.recv_into(&mut buf).await.unwrap();
            assert_eq!(buf.to_vec().unwrap(), pattern(10, 1));
            let message = pair.b.incoming().await.unwrap();
            assert_eq!((message.len(), message.tag()), (200_000, 2));
            assert!(message.into_bytes().await.unwrap() == pattern(200_000, 2));
            pair.b.incoming().await.unwrap().discard();
            // A long one that is thrown away ends its send, too.
            drop(pair.b.incoming().await.unwrap());
            let message = pair.b.incoming().await.unwrap();
            let mut small = pair.ctx_b.alloc("host", 2).unwrap();
            assert!(matches!(message.recv_into(&mut small).await, Err(Error::Truncated { needed: 4, got: 2 })));
            assert_eq!(pair.b.recv_bytes().await.unwrap().0, "last");
        };
        tokio::join!(receiver, sender);
    }

    async fn streams_and_sinks_carry_bytes(pair: Pair) {
        let sender = async {
            let mut sink = pair.a.bytes_sink();
            for i in 0..20u64 {
                sink.send(Bytes::from(pattern(1000 * i as usize, i))).await.unwrap();
            }
            sink.close().await.unwrap();
        };
        let receiver = async {
            let got: Vec<_> = pair.b.bytes_stream().map(Result::unwrap).collect().await;
            assert_eq!(got.len(), 20, "the stream ends with the endpoint");
            assert!(got.iter().enumerate().all(|(i, bytes)| *bytes == pattern(1000 * i, i as u64)));
        };
        tokio::join!(sender, receiver);
    }

    async fn a_cancelled_send_that_was_not_matched_has_no_effect(pair: Pair) {
        let source = filled(&pair.ctx_a, 200_000, 6);
        let mut send = pair.a.send(&source).tag(1);
        assert!(poll_once(&mut send).await.is_pending(), "nobody receives yet");
        arrived(&pair.b, 1).await;
        assert!(matches!(send.cancel().await, Err(Error::Cancelled)));
        pair.a.send_bytes("next").await.unwrap();
        assert_eq!(pair.b.recv_bytes().await.unwrap().0, "next");
        assert!(matches!(pair.a.send(&source).cancel().await, Err(Error::Cancelled)), "never posted");
        let mut buf = pair.ctx_b.alloc("host", 8).unwrap();
        assert!(matches!(pair.b.recv(&mut buf).cancel().await, Err(Error::Cancelled)));
    }

    async fn a_timeout_leaves_the_message_for_the_next_receive(pair: Pair) {
        let mut buf = pair.ctx_b.alloc("host", 100).unwrap();
        let after = Duration::from_millis(10);
        assert!(matches!(pair.b.recv(&mut buf).timeout(after).await, Err(Error::Timeout { after: a }) if a == after));
        let source = filled(&pair.ctx_a, 200_000, 6);
        assert!(matches!(pair.a.send(&source).timeout(after).await, Err(Error::Timeout { .. })), "nobody receives");
        // The withdrawal of the message has arrived.
        pair.a.flush().await.unwrap();
        pair.a.send_bytes("x").await.unwrap();
        assert_eq!(pair.b.recv(&mut buf).await.unwrap().len, 1);
    }

    async fn an_overlap_is_busy_and_not_a_race(pair: Pair) {
        let mut buf = pair.ctx_b.alloc("host", 100).unwrap();
        let mut recv = pair.b.recv(&mut buf);
        assert!(poll_once(&mut recv).await.is_pending());
        assert!(matches!(buf.map(), Err(Error::Busy { .. })));
        assert!(matches!(pair.b.send(&buf).await, Err(Error::Busy { .. })));
        assert!(matches!(pair.b.recv(&mut buf).await, Err(Error::Busy { .. })));
        assert!(matches!(buf.copy_from_slice(0, &[1]), Err(Error::Busy { .. })));
        pair.a.send_bytes("ok").await.unwrap();
        recv.await.unwrap();
        assert_eq!(&buf.map().unwrap()[..2], b"ok");
        let slice = buf.slice(..10);
        assert!(matches!(buf.split_off(50), Err(Error::Busy { .. })), "a slice still reaches across");
        drop(slice);
        assert!(matches!(buf.split_off(101), Err(Error::OutOfBounds { .. })));
        let (mut one, mut two) = buf.split_at(50).unwrap();
        let (one, two) = (pair.b.recv(&mut one), pair.b.recv(&mut two));
        pair.a.send_bytes("1").await.unwrap();
        pair.a.send_bytes("2").await.unwrap();
        let (one, two) = tokio::join!(one, two);
        assert!(one.is_ok() && two.is_ok(), "halves are used independently");
    }

    async fn a_flush_says_that_everything_has_arrived(pair: Pair) {
        for i in 0..100 {
            pair.a.send_bytes(vec![0; i]).await.unwrap();
        }
        pair.a.flush().await.unwrap();
        assert_eq!(pair.b.stats().messages_received, 100);
    }

    async fn slices_outside_their_buffer_are_errors(pair: Pair) {
        let mut buf = pair.ctx_a.alloc("host", 100).unwrap();
        let is_out = |result: Result<gpusock::Receipt, Error>| matches!(result, Err(Error::OutOfBounds { .. }));
        assert!(is_out(pair.a.send(buf.slice(99..101)).await));
        assert!(is_out(pair.a.send(buf.slice(50..60).slice(5..11)).await), "inside of the buffer, outside of the slice");
        assert!(is_out(pair.a.send(buf.slice(u64::MAX..)).await));
        assert!(matches!(pair.a.recv(buf.slice_mut(100..101)).await, Err(Error::OutOfBounds { offset: 100, len: 1, size: 100 })));
        // The last byte, and nothing behind it.
        assert_eq!(pair.a.send(buf.slice(99..)).await.unwrap().bytes, 1);
        assert_eq!(pair.a.send(buf.slice(100..)).await.unwrap().bytes, 0);
    }
}
