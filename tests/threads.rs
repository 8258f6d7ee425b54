//! Many tasks on many threads, over one endpoint and under every spin policy.

mod common;

use std::sync::Arc;

use common::{Pair, Transport, filled, in_time, pattern};
use gpusock::{Access, GpuEndpoint, RemoteBuf, Spin};

const TASKS: u64 = 8;
const ROUNDS: u64 = 40;

/// Tasks on both sides send, receive, write and add over the same endpoint at once.
async fn crowd(transport: Transport, spin: Spin) {
    let Pair { ctx_a, a, ctx_b, b, .. } =
        common::pair_of(transport, transport.builder().spin(spin), transport.builder().spin(spin)).await;
    let target = Arc::new(ctx_b.alloc("host", 8 + TASKS * 100_000).unwrap());
    let lease = b.expose(&*target, Access::ALL).unwrap();
    let remote = RemoteBuf::from_bytes(&lease.to_bytes()).unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..TASKS {
        let len = if task % 2 == 0 { 500 } else { 100_000 };
        let (ep, ctx) = (a.clone(), ctx_a.clone());
        tasks.spawn(async move {
            for round in 0..ROUNDS {
                let source = filled(&ctx, len, task * 1000 + round);
                ep.send(&source).tag(task).await.unwrap();
            }
        });
        let (ep, ctx) = (b.clone(), ctx_b.clone());
        tasks.spawn(async move {
            let mut buf = ctx.alloc("host", 100_000).unwrap();
            for round in 0..ROUNDS {
                let got = ep.recv(&mut buf).tag(task).await.unwrap();
                assert_eq!(got.len, len as u64);
                assert!(buf.map().unwrap()[..len] == pattern(len, task * 1000 + round), "task {task} round {round}");
            }
        });
        let (ep, ctx, remote) = (a.clone(), ctx_a.clone(), remote.clone());
        tasks.spawn(async move {
            let place = remote.slice(8 + task * 100_000..8 + (task + 1) * 100_000).unwrap();
            let mut back = ctx.alloc("host", 100_000).unwrap();
            for round in 0..ROUNDS {
                let source = filled(&ctx, 100_000, round);
                ep.write_remote(&source, &place).notify(task).await.unwrap();
                ep.fetch_add(&remote.at(0).unwrap(), 1).await.unwrap();
                ep.read_remote(&mut back, &place).await.unwrap();
                assert!(back.to_vec().unwrap() == pattern(100_000, round));
            }
        });
        let ep = b.clone();
        tasks.spawn(async move {
            for _ in 0..ROUNDS {
                ep.notified(task, 1).await.unwrap();
            }
        });
    }
    while let Some(result) = tasks.join_next().await {
        result.unwrap();
    }
    assert_eq!(target.to_vec().unwrap()[..8], (TASKS * ROUNDS).to_le_bytes());
    drop(lease);
    a.close().await.unwrap();
    b.closed().await;
}

macro_rules! crowds {
    ($($name:ident: $transport:ident, $spin:ident;)*) => {
        $(#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
        async fn $name() {
            in_time(crowd(Transport::$transport, Spin::$spin)).await;
        })*
    };
}

crowds! {
    tcp_adaptive: Tcp, Adaptive;
    tcp_never: Tcp, Never;
    tcp_always: Tcp, Always;
    tcp_thread: Tcp, Thread;
    lanes_adaptive: TcpLanes, Adaptive;
    lanes_thread: TcpLanes, Thread;
    inproc_adaptive: Inproc, Adaptive;
    inproc_never: Inproc, Never;
    inproc_thread: Inproc, Thread;
}

/// Endpoints, futures and streams may go from thread to thread.
#[test]
fn everything_is_send() {
    fn send<T: Send + 'static>() {}
    fn sync<T: Send + Sync + 'static>() {}
    fn unpin<T: Unpin>() {}
    sync::<gpusock::Context>();
    sync::<GpuEndpoint>();
    sync::<gpusock::GpuListener>();
    sync::<gpusock::GpuBuf>();
    sync::<gpusock::GpuSlice>();
    sync::<gpusock::GpuSliceMut>();
    sync::<RemoteBuf>();
    sync::<gpusock::Error>();
    sync::<gpusock::MapGuard>();
    send::<gpusock::Send>();
    send::<gpusock::Recv>();
    send::<gpusock::RecvBytes>();
    send::<gpusock::Incoming>();
    send::<gpusock::Message>();
    send::<gpusock::IntoBytes>();
    send::<gpusock::WriteRemote>();
    send::<gpusock::ReadRemote>();
    send::<gpusock::FetchAdd>();
    send::<gpusock::CompareSwap>();
    send::<gpusock::Notified>();
    send::<gpusock::Flush>();
    send::<gpusock::Close>();
    send::<gpusock::Closed>();
    send::<gpusock::Cancel<gpusock::Send>>();
    send::<gpusock::Messages>();
    send::<gpusock::BytesStream>();
    send::<gpusock::BytesSink>();
    send::<gpusock::PathEvents>();
    unpin::<gpusock::Send>();
    unpin::<gpusock::Recv>();
    unpin::<gpusock::Cancel<gpusock::ReadRemote>>();
    let ctx = |ctx: gpusock::Context| async move { ctx.connect("x:1").await.map(drop) };
    fn is_send<F: Send>(_: impl Fn(gpusock::Context) -> F) {}
    is_send(ctx);
}
