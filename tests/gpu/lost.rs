//! Peers that die, endpoints that end, and devices that fail, with copies under way.

use futures::future::join_all;
use gpusock::{Access, Context, Error, GpuEndpoint, RemoteBuf};

use crate::common::{self, Process, pattern};
use crate::device::{Device, bytes, filled};
use crate::{Link, Suite, pair};

pub fn add(suite: &mut Suite) {
    suite.add("lost::a_killed_peer_ends_everything_and_frees_the_memory", a_killed_peer_ends_everything);
    suite.on_links("lost::a_close_lets_what_was_issued_arrive", a_close_lets_what_was_issued_arrive);
    suite.on_links("lost::a_dropped_endpoint_leaves_no_copy_behind", a_dropped_endpoint_leaves_no_copy_behind);
    suite.add("lost::between_two_processes", between_two_processes);
    suite.add("lost::a_failed_device_ends_its_operations_and_nothing_else", || in_a_child("fail"));
    suite.add("lost::a_device_that_fails_in_a_copy_is_noticed", || in_a_child("fail-late"));
}

/// What the other process does.
pub async fn child(role: String) {
    match role.as_str() {
        "mirror" => mirror().await,
        "fail" => fail().await,
        "fail-late" => fail_late().await,
        other => panic!("no role {other}"),
    }
}

async fn in_a_child(role: &str) {
    let mut process = Process::start(role);
    assert_eq!(process.hear(), "well");
}

/// Sends back what comes, from and into GPU memory.
async fn mirror() {
    let ctx = Link::Tcp.builder().build().unwrap();
    let listener = ctx.bind("127.0.0.1:0").await.unwrap();
    common::say(&listener.local_addr().unwrap().to_string());
    let peer = listener.accept().await.unwrap();
    let exposed = ctx.alloc("cuda:0", 64 << 20).unwrap();
    let lease = peer.expose(&exposed, Access::ALL).unwrap();
    peer.send_bytes(lease.to_bytes()).await.unwrap();
    while let Ok(message) = peer.incoming().await {
        let mut buf = ctx.alloc("cuda:0", message.len()).unwrap();
        if message.recv_into(&mut buf).await.is_err() || peer.send(&buf).await.is_err() {
            break;
        }
    }
}

async fn to_mirror() -> (Process, Context, GpuEndpoint, RemoteBuf) {
    let mut process = Process::start("mirror");
    let ctx = Link::Tcp.builder().build().unwrap();
    let peer = ctx.connect(process.hear()).await.unwrap();
    let remote = RemoteBuf::from_bytes(&peer.recv_bytes().await.unwrap().0).unwrap();
    (process, ctx, peer, remote)
}

async fn between_two_processes() {
    let (_process, ctx, peer, remote) = to_mirror().await;
    for len in [1, 4096, 3 << 20] {
        let source = filled(&ctx, "cuda:0", len, 2);
        let mut back = ctx.alloc("cuda:0", len as u64).unwrap();
        let (sent, received) = tokio::join!(peer.send(&source), peer.recv(&mut back));
        sent.unwrap();
        assert_eq!(received.unwrap().receipt.staged_bytes, len as u64);
        assert!(bytes(&back) == pattern(len, 2));
        let place = remote.slice(5..5 + len as u64).unwrap();
        peer.write_remote(&source, &place).await.unwrap();
        let mut again = ctx.alloc("cuda:0", len as u64).unwrap();
        peer.read_remote(&mut again, &place).await.unwrap();
        assert!(bytes(&again) == pattern(len, 2));
    }
}

/// Case 5 on GPU memory.
async fn a_killed_peer_ends_everything() {
    let device = Device::new();
    for round in 0..3 {
        let (mut process, ctx, peer, remote) = to_mirror().await;
        let source = filled(&ctx, "cuda:0", 8 << 20, 1);
        let mut targets: Vec<_> = (0..32).map(|_| ctx.alloc("cuda:0", 8 << 20).unwrap()).collect();
        let piece = remote.slice(0..8 << 20).unwrap();
        let writes: Vec<_> = (0..32).map(|_| tokio::spawn(peer.write_remote(&source, &piece))).collect();
        let reads: Vec<_> = targets.iter_mut().map(|buf| tokio::spawn(peer.read_remote(buf, &piece))).collect();
        for _ in 0..round * 20 {
            tokio::task::yield_now().await;
        }
        process.kill();
        let results = join_all(writes.into_iter().chain(reads)).await;
        let lost = results.iter().filter(|result| matches!(result, Ok(Err(Error::PeerLost { .. })))).count();
        assert!(results.iter().all(|result| matches!(result, Ok(Ok(_) | Err(Error::PeerLost { .. })))), "{results:?}");
        assert!(lost > 0, "all was over before the peer died");
        // When the device is done, the memory is free.
        device.context.synchronize().unwrap();
        for buf in targets.iter().chain([&source]) {
            loop {
                match buf.copy_from_slice(0, &[1]) {
                    Ok(()) => break,
                    Err(Error::Busy { .. }) => tokio::task::yield_now().await,
                    Err(error) => panic!("{error}"),
                }
                drop(ctx.alloc("cuda:0", 8).unwrap());
            }
        }
    }
}

async fn a_close_lets_what_was_issued_arrive(link: Link) {
    let pair = pair(link).await;
    let device = Device::new();
    let target = pair.ctx_b.alloc("cuda:0", 1 << 20).unwrap();
    let lease = pair.b.expose(&target, Access::ALL).unwrap();
    let remote = RemoteBuf::from_bytes(&lease.to_bytes()).unwrap();
    let mut source = pair.ctx_a.alloc("cuda:0", 1 << 20).unwrap();
    device.fill(&mut source, 6, 50);
    let mut write = Box::pin(pair.a.write_remote(&source, &remote).notify(1));
    assert!(futures::poll!(&mut write).is_pending());
    drop(write);
    let closed = tokio::spawn(pair.a.close());
    pair.b.notified(1, 1).await.unwrap();
    assert!(bytes(&target).chunks(4).all(|word| word == 6u32.to_le_bytes()));
    let _ = pair.b.closed().await;
    closed.await.unwrap().unwrap();
}

async fn a_dropped_endpoint_leaves_no_copy_behind(link: Link) {
    let device = Device::new();
    for _ in 0..5 {
        let pair = pair(link).await;
        let target = pair.ctx_b.alloc("cuda:0", 4 << 20).unwrap();
        let lease = pair.b.expose(&target, Access::ALL).unwrap();
        let remote = RemoteBuf::from_bytes(&lease.to_bytes()).unwrap();
        let mut source = pair.ctx_a.alloc("cuda:0", 4 << 20).unwrap();
        device.fill(&mut source, 6, 10);
        let mut write = Box::pin(pair.a.write_remote(&source, &remote));
        let _ = futures::poll!(&mut write);
        // The side that is written to goes at once.
        let (a, b) = (pair.a, pair.b);
        drop(lease);
        drop(b);
        let result = write.await;
        assert!(result.is_err() || bytes(&target).iter().any(|&b| b != 0), "{result:?}");
        drop((a, source));
        let next = pair.ctx_b.alloc("cuda:0", 4 << 20).unwrap();
        device.context.synchronize().unwrap();
        assert!(bytes(&next).iter().all(|&b| b == 0));
    }
}

/// A kernel breaks the device's context: what needs the device fails with the error's name, host memory goes on.
async fn fail() {
    let gpu = pair(Link::Inproc).await;
    let tcp = pair(Link::Tcp).await;
    let host = pair(Link::Tcp).await;
    let source = filled(&gpu.ctx_a, "cuda:0", 1 << 20, 1);
    Device::new().fault();
    let mut target_error = None;
    for a in [&gpu.a, &tcp.a] {
        let error = a.send(&source).await.unwrap_err();
        assert!(matches!(error, Error::Cuda { .. }) && error.to_string().contains("ILLEGAL_ADDRESS"), "{error}");
        target_error = Some(error);
    }
    let error = gpu.ctx_a.alloc("cuda:0", 8).unwrap_err();
    assert_eq!(error.to_string().contains("ILLEGAL_ADDRESS"), target_error.is_some(), "{error}");
    assert!(source.to_vec().is_err() && source.copy_from_slice(0, &[1]).is_err());
    let bytes = common::filled(&host.ctx_a, 1 << 20, 4);
    let mut into = host.ctx_b.alloc("host", 1 << 20).unwrap();
    let (sent, received) = tokio::join!(host.a.send(&bytes), host.b.recv(&mut into));
    sent.unwrap();
    received.unwrap();
    assert!(into.to_vec().unwrap() == pattern(1 << 20, 4));
    drop((source, gpu, tcp));
    common::say("well");
}

/// The context breaks while operations wait for it.
async fn fail_late() {
    let pair = pair(Link::Tcp).await;
    let mut source = pair.ctx_a.alloc("cuda:0", 1 << 20).unwrap();
    let mut target = pair.ctx_b.alloc("cuda:0", 1 << 20).unwrap();
    let device = Device::new();
    device.fill(&mut source, 1, 200);
    device.launch_fault();
    source.ready_after(&*device.stream).unwrap();
    let (sent, received) = tokio::join!(pair.a.send(&source), pair.b.recv(&mut target));
    let ended = |error: &Option<Error>| matches!(error, Some(Error::Cuda { .. } | Error::PeerLost { .. }));
    let (sent, received) = (sent.err(), received.err());
    assert!(ended(&sent) && ended(&received), "the bytes never came: {sent:?}, {received:?}");
    common::say("well");
}
