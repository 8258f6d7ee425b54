//! What people do to endpoints without meaning harm: code that runs in drops, threads that end, runtimes that go, durations without end.

mod common;

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::mpsc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use common::{Pair, Process, Transport, filled, in_time};
use gpusock::{Access, Context, Error, RemoteBuf, Spin};

async fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    poll_fn(|cx| Poll::Ready(Pin::new(&mut *future).poll(cx))).await
}

thread_local! {
    static KEPT: RefCell<Option<Box<dyn std::any::Any>>> = const { RefCell::new(None) };
}

/// What other processes do. Without a role it is no test.
#[test]
fn child() {
    if common::role().is_none() {
        return;
    }
    // An operation that is dropped when its thread's locals are, after those of the crate.
    let thread = std::thread::spawn(|| {
        KEPT.with(|kept| *kept.borrow_mut() = Some(Box::new(())));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let Pair { a, b, .. } = runtime.block_on(common::pair(Transport::Tcp));
        let mut first = a.recv_bytes();
        let mut kept = a.recv_bytes();
        runtime.block_on(async {
            assert!(poll_once(&mut first).await.is_pending() && poll_once(&mut kept).await.is_pending());
            drop(first);
        });
        KEPT.with(|slot| *slot.borrow_mut() = Some(Box::new((kept, a, b, runtime))));
    });
    thread.join().unwrap();
    common::say("alive");
}

#[test]
fn a_thread_may_end_with_an_operation_in_its_locals() {
    assert_eq!(Process::start("thread").hear(), "alive");
}

/// Memory whose owner holds something of the endpoint, which is dropped when the operation ends.
struct Owner<T>(Vec<u8>, #[allow(dead_code)] T);

impl<T> AsRef<[u8]> for Owner<T> {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

async fn drop_in_flight<T: Send + 'static>(transport: Transport, make: impl FnOnce(&Pair) -> T) {
    let pair = common::pair(transport).await;
    let bytes = Bytes::from_owner(Owner(vec![7; 1 << 20], make(&pair)));
    let Pair { a, b, .. } = pair;
    let mut send = b.send_bytes(bytes);
    let _ = poll_once(&mut send).await;
    drop((send, b));
    assert_eq!(a.recv_bytes().await.unwrap().0.len(), 1 << 20);
    a.closed().await;
}

/// A drop that comes back to the connection runs under none of its locks. In a thread of its own, since a deadlock would stop the test.
#[test]
fn drops_that_come_back_do_not_deadlock() {
    for transport in [Transport::Tcp, Transport::Inproc] {
        for case in 0..2 {
            let (done, wait) = mpsc::channel();
            std::thread::spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(async {
                    let lease = |pair: &Pair| {
                        let buf = pair.ctx_b.alloc("host", 8).unwrap();
                        pair.b.expose(&buf, Access::READ).unwrap()
                    };
                    match case {
                        0 => drop_in_flight(transport, lease).await,
                        _ => drop_in_flight(transport, |pair| pair.b.clone()).await,
                    }
                });
                done.send(()).unwrap();
            });
            assert!(wait.recv_timeout(Duration::from_secs(60)).is_ok(), "{transport:?} case {case}");
        }
    }
}

on_every_transport! {
    async fn a_claimed_message_that_is_never_polled_goes_back(pair: Pair) {
        let source = filled(&pair.ctx_a, 300_000, 1);
        let mut buf = pair.ctx_b.alloc("host", 300_000).unwrap();
        for case in 0..3 {
            let receiver = async {
                let message = pair.b.incoming().await.unwrap();
                match case {
                    0 => drop(message.into_bytes()),
                    1 => drop(message.recv_into(&mut buf)),
                    _ => assert!(matches!(message.recv_into(&mut buf).cancel().await, Err(Error::Cancelled))),
                }
                assert_eq!(pair.b.recv(&mut buf).await.unwrap().len, 300_000);
            };
            tokio::join!(async { pair.a.send(&source).await.unwrap() }, receiver);
        }
    }
}

#[tokio::test]
async fn durations_without_end_are_no_panic() {
    let forever = Duration::MAX;
    let builder = || Transport::Tcp.builder().linger(forever).connect_timeout(forever).handshake_timeout(forever);
    let pair = common::pair_of(Transport::Tcp, builder().liveness(forever), builder().heartbeat(forever).liveness(forever)).await;
    let Pair { a, b, .. } = pair;
    a.send_bytes("x").timeout(forever).await.unwrap();
    assert!(matches!(b.incoming().await.unwrap().into_bytes().await, Ok(bytes) if bytes == "x"));
    assert!(matches!(b.incoming().timeout(Duration::ZERO).await, Err(Error::Timeout { .. })));
    drop(a);
    in_time(b.closed()).await;
}

#[test]
fn a_context_does_not_outlive_its_runtime() {
    let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let first = runtime();
    let ctx = first.block_on(async { Transport::Tcp.builder().build().unwrap() });
    drop(first);
    runtime().block_on(async {
        let live = Context::new().unwrap();
        let listener = live.bind("127.0.0.1:0").await.unwrap();
        let error = ctx.connect(listener.local_addr().unwrap()).await.unwrap_err();
        assert!(matches!(&error, Error::Unsupported { what } if what.contains("runtime")), "{error}");
    });
}

#[test]
fn a_timeout_outside_of_tokio_is_an_error() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let pair = runtime.block_on(common::pair(Transport::Tcp));
    let result = futures::executor::block_on(pair.a.incoming().timeout(Duration::from_millis(50)));
    assert!(matches!(result, Err(Error::Unsupported { .. })));
}

/// A future that was polled once and is kept, as `select!` with a reference keeps it, goes on all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_that_nobody_polls_any_more_goes_on() {
    for spin in [Spin::Adaptive, Spin::Always, Spin::Never, Spin::Thread] {
        let Pair { ctx_a, a, ctx_b, b, .. } = common::pair_of(
            Transport::Tcp,
            Transport::Tcp.builder(),
            Transport::Tcp.builder().spin(spin).heartbeat(Duration::from_secs(600)).liveness(Duration::from_secs(2000)),
        )
        .await;
        let slot = ctx_a.alloc("host", 64 << 20).unwrap();
        let lease = a.expose(&slot, Access::WRITE).unwrap();
        let remote = RemoteBuf::from_bytes(&lease.to_bytes()).unwrap();
        let source = filled(&ctx_b, 64 << 20, 1);
        let mut write = b.write_remote(&source, &remote).notify(1);
        assert!(poll_once(&mut write).await.is_pending());
        in_time(a.notified(1, 1)).await.unwrap();
        write.await.unwrap();
    }
}

/// The peer was only slow, and comes back after it was given up: it never takes bytes that were changed since for what was written.
#[test]
fn what_changed_after_the_peer_was_lost_is_never_delivered() {
    let (tell_address, address) = mpsc::channel();
    let (tell_slot, slot) = mpsc::channel();
    let (wake, woken) = mpsc::channel::<()>();
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let peer = std::thread::spawn(move || {
        runtime().block_on(async {
            let ctx = Transport::TcpNever.builder().build().unwrap();
            let listener = ctx.bind("127.0.0.1:0").await.unwrap();
            tell_address.send(listener.local_addr().unwrap()).unwrap();
            let ep = listener.accept().await.unwrap();
            let slot = ctx.alloc("host", 1 << 20).unwrap();
            let lease = ep.expose(&slot, Access::WRITE).unwrap();
            tell_slot.send(lease.to_bytes()).unwrap();
            // Its executor is stuck, as if it were stopped, until the writer has given it up and changed the bytes.
            woken.recv().unwrap();
            let delivered = in_time(ep.notified(1, 1)).await;
            assert!(matches!(delivered, Err(Error::PeerLost { .. })), "{delivered:?}");
        });
    });
    runtime().block_on(in_time(async {
        let ctx =
            Transport::Tcp.builder().heartbeat(Duration::from_millis(50)).liveness(Duration::from_millis(300)).build().unwrap();
        let ep = ctx.connect(address.recv().unwrap()).await.unwrap();
        let remote = RemoteBuf::from_bytes(&slot.recv().unwrap()).unwrap();
        let mut source = ctx.alloc("host", 1 << 20).unwrap();
        source.map_mut().unwrap().fill(1);
        let written = ep.write_remote(&source, &remote).notify(1).await;
        assert!(matches!(written, Err(Error::PeerLost { .. })), "{written:?}");
        source.map_mut().unwrap().fill(2);
        wake.send(()).unwrap();
    }));
    peer.join().unwrap();
}

#[tokio::test]
async fn endpoints_that_nobody_accepts_are_bounded() {
    let server = Transport::Tcp.builder().build().unwrap();
    let _listener = server.bind("127.0.0.1:0").await.unwrap();
    let client = Transport::Tcp.builder().handshake_timeout(Duration::from_millis(200)).build().unwrap();
    let address = _listener.local_addr().unwrap();
    let mut endpoints = Vec::new();
    // The backlog and the handshakes that wait behind it; then connecting takes too long.
    while let Ok(endpoint) = client.connect(address).await {
        endpoints.push(endpoint);
        assert!(endpoints.len() < 1000, "no bound");
    }
    assert!(endpoints.len() >= 128);
}
