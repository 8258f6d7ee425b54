//! Beginnings and ends: strangers at the port, other versions, peers that die, policies, offers.

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::time::{Duration, Instant};

use common::{Pair, Process, Transport, filled, in_time, pattern};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use gpusock::{Access, Context, Error, GpuEndpoint, PathEvent, PathKind, PathPolicy, RemoteBuf, Spin};

/// What other processes do. Without a role it is no test.
#[tokio::test]
async fn child() {
    let Some(role) = common::role() else { return };
    let (what, address) = role.split_once(' ').unwrap();
    let ctx = Context::builder().shm_between_users(what == "path-of-another-user").build().unwrap();
    let ep = ctx.connect(address).await.unwrap();
    match what {
        // Receives a little of what comes, then waits to be killed.
        "sink" => {
            let mut buf = ctx.alloc("host", 1 << 20).unwrap();
            ep.recv(&mut buf).await.unwrap();
            common::say("one");
            std::future::pending::<()>().await;
        }
        // Reads what the other side exposed, and ends without a word.
        "reader" => {
            let remote = RemoteBuf::from_bytes(&ep.recv_bytes().await.unwrap().0).unwrap();
            let mut buf = ctx.alloc("host", remote.len()).unwrap();
            ep.read_remote(&mut buf, &remote).await.unwrap();
            assert!(buf.to_vec().unwrap() == pattern(remote.len() as usize, 1));
            common::say("read");
            std::future::pending::<()>().await;
        }
        // Sends messages from memory files until it is killed.
        "source" => {
            let sources: Vec<_> = (0..8).map(|i| filled(&ctx, 1 << 20, i)).collect();
            loop {
                for source in &sources {
                    ep.send(source).await.unwrap();
                }
            }
        }
        // Tells which path it has, and what was rejected.
        "path" | "path-of-another-user" => {
            common::say(&ep.path_report().unwrap().to_string().replace('\n', "|"));
            ep.closed().await;
        }
        other => panic!("{other}"),
    }
}

async fn listen(ctx: &Context) -> (gpusock::GpuListener, SocketAddr) {
    let listener = ctx.bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// Case 5: killed in the middle of 64 transfers.
#[tokio::test]
async fn a_killed_peer_fails_everything_and_nothing_else() {
    for kind in [PathKind::Shm, PathKind::Tcp] {
        in_time(killed_in_the_middle(kind)).await;
    }
}

async fn killed_in_the_middle(kind: PathKind) {
    let ctx = only(kind);
    let (listener, address) = listen(&ctx).await;
    let mut victim = Process::start(&format!("sink {address}"));
    let ep = listener.accept().await.unwrap();
    let mut bystander = Process::start(&format!("path {address}"));
    let other = listener.accept().await.unwrap();
    let sources: Vec<_> = (0..64).map(|i| filled(&ctx, 1 << 20, i)).collect();
    let target = ctx.alloc("host", 8).unwrap();
    let lease = ep.expose(&target, Access::WRITE).unwrap();
    let mut sends: FuturesUnordered<_> = sources.iter().map(|source| ep.send(source)).collect();
    sends.next().await.unwrap().unwrap();
    let (mut recv_buf, began) = (ctx.alloc("host", 8).unwrap(), Instant::now());
    let recv = ep.recv(&mut recv_buf);
    tokio::task::spawn_blocking(move || {
        assert_eq!(victim.hear(), "one");
        victim.kill();
    })
    .await
    .unwrap();
    let mut lost = 0;
    while let Some(result) = sends.next().await {
        match result {
            Err(Error::PeerLost { .. }) => lost += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(lost, 63);
    assert!(matches!(recv.await, Err(Error::PeerLost { .. })));
    assert!(matches!(ep.closed().await, Error::PeerLost { .. }));
    assert!(matches!(ep.send_bytes("x").await, Err(Error::PeerLost { .. })));
    assert!(began.elapsed() < Duration::from_secs(15), "within the liveness time");
    assert_eq!(ep.stats().in_flight, 0);
    drop((lease, sources));
    // The other endpoint and new ones work on.
    assert!(bystander.hear().contains(&format!("{kind} ")));
    other.send_bytes("x").await.unwrap();
    other.flush().await.unwrap();
    let (again, peer) = tokio::join!(listener.accept(), ctx.connect(address));
    again.unwrap().send_bytes("y").await.unwrap();
    assert_eq!(peer.unwrap().recv_bytes().await.unwrap().0, "y");
}

fn only(kind: PathKind) -> Context {
    Context::builder().policy(PathPolicy::new().require(kind)).build().unwrap()
}

/// What a peer had handed over is let go of when it dies.
#[tokio::test]
async fn a_killed_peer_leaves_no_mapping() {
    in_time(async {
        let ctx = only(PathKind::Shm);
        let (listener, address) = listen(&ctx).await;
        let mut target = ctx.alloc("host", 1 << 20).unwrap();
        let (mappings, descriptors) = (common::mappings(), common::descriptors());
        for _ in 0..5 {
            let mut source = Process::start(&format!("source {address}"));
            let ep = listener.accept().await.unwrap();
            for i in 0..20 {
                assert_eq!(ep.recv(&mut target).await.unwrap().receipt.path, PathKind::Shm);
                assert!(target.to_vec().unwrap() == pattern(1 << 20, i % 8));
            }
            assert!(common::mappings() > mappings, "nothing was mapped");
            source.kill();
            assert!(matches!(ep.closed().await, Error::PeerLost { .. }));
            drop(ep);
        }
        while ctx.endpoints() > 0 {
            tokio::task::yield_now().await;
        }
        assert!(common::mappings() <= mappings + 8 && common::descriptors() <= descriptors + 8, "other tests use a few");
    })
    .await;
}

/// A process of another user gets no memory of this one's, unless both allow it.
#[tokio::test]
async fn another_user_is_reached_over_tcp() {
    if !is_root() {
        eprintln!("not run: only root can start a process of another user");
        return;
    }
    in_time(async {
        // Where the other user can reach it.
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("test");
        std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        for (role, allowed, kind) in [
            ("path", false, PathKind::Tcp),
            ("path", true, PathKind::Tcp),
            ("path-of-another-user", false, PathKind::Tcp),
            ("path-of-another-user", true, PathKind::Shm),
        ] {
            let ctx = Context::builder().shm_between_users(allowed).build().unwrap();
            let (listener, address) = listen(&ctx).await;
            let mut command = std::process::Command::new(&program);
            command.uid(65534).gid(65534).current_dir("/");
            let mut other = Process::start_by(command, &format!("{role} {address}"));
            let report = listener.accept().await.unwrap().path_report().unwrap();
            assert_eq!(report.chosen(), Some(kind), "{role} {allowed}: {report}");
            if kind == PathKind::Tcp {
                assert!(report.to_string().contains("runs as user"), "{report}");
            }
            assert!(other.hear().contains(&format!("{kind} ")));
        }
    })
    .await;
}

fn is_root() -> bool {
    std::fs::metadata("/proc/self").unwrap().uid() == 0
}

/// Case 6: readers come, read and vanish, 200 times.
#[tokio::test]
async fn readers_that_vanish_leave_nothing_behind() {
    for kind in [PathKind::Shm, PathKind::Tcp] {
        in_time(readers_that_vanish(kind)).await;
    }
}

async fn readers_that_vanish(kind: PathKind) {
    const LEN: usize = 400_000;
    let ctx = only(kind);
    let (listener, address) = listen(&ctx).await;
    let source = filled(&ctx, LEN, 1);
    let serve = |ep: GpuEndpoint| {
        let lease = ep.expose(&source, Access::READ).unwrap();
        async move {
            ep.send_bytes(lease.to_bytes()).await.unwrap();
            ep.closed().await
        }
    };
    let mut baseline = (0, 0);
    for i in 0..200 {
        if i % 20 == 0 {
            let mut reader = Process::start(&format!("reader {address}"));
            let ep = listener.accept().await.unwrap();
            let killed = tokio::task::spawn_blocking(move || {
                assert_eq!(reader.hear(), "read");
                reader.kill();
            });
            let (why, killed) = tokio::join!(serve(ep), killed);
            killed.unwrap();
            assert!(matches!(why, Error::PeerLost { .. }), "{why:?}");
        } else {
            let reader_ctx = only(kind);
            let (ep, reader) = tokio::join!(listener.accept(), reader_ctx.connect(address));
            let reader = reader.unwrap();
            let read = async move {
                let remote = RemoteBuf::from_bytes(&reader.recv_bytes().await.unwrap().0).unwrap();
                let mut buf = reader_ctx.alloc("host", remote.len()).unwrap();
                reader.read_remote(&mut buf, &remote).await.unwrap();
                assert!(buf.to_vec().unwrap() == pattern(LEN, 1));
            };
            let (why, ()) = tokio::join!(serve(ep.unwrap()), read);
            assert!(matches!(why, Error::Closed), "{why:?}");
        }
        if i == 40 {
            baseline = (common::descriptors(), common::mappings());
        }
    }
    while ctx.endpoints() > 0 {
        tokio::task::yield_now().await;
    }
    // Other tests of the same process open and close theirs; a leak would be 160 and more.
    let now = (common::descriptors(), common::mappings());
    assert!(now.0 < baseline.0 + 100 && now.1 < baseline.1 + 100, "descriptors and mappings grow: {baseline:?} to {now:?}");
    let mut source = source;
    assert!(source.map_mut().is_ok(), "all exposures ended");
}

/// Case 16: what comes to an open port.
#[tokio::test]
async fn strangers_at_the_port_disturb_nobody() {
    in_time(async {
        let ctx = Context::builder().handshake_timeout(Duration::from_millis(300)).build().unwrap();
        let (listener, address) = listen(&ctx).await;
        let silent = TcpStream::connect(address).unwrap();
        let mut half = TcpStream::connect(address).unwrap();
        half.write_all(b"GPUSOCK\n\x01\x00").unwrap();
        let mut http = TcpStream::connect(address).unwrap();
        http.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let zeros = std::thread::spawn(move || {
            let mut stream = TcpStream::connect(address).unwrap();
            let block = vec![0; 1 << 20];
            // Ends with an error as soon as the listener has seen enough.
            (0..64).take_while(|_| stream.write_all(&block).is_ok()).count()
        });
        let mut long = TcpStream::connect(address).unwrap();
        long.write_all(b"GPUSOCK\n\x01\x00\x01\x00\xff\xff\xff\xff").unwrap();
        let good = ctx.connect(address).await.unwrap();
        let served = listener.accept().await.unwrap();
        served.send_bytes("hello").await.unwrap();
        assert_eq!(good.recv_bytes().await.unwrap().0, "hello");
        let closed = tokio::task::spawn_blocking(move || {
            for mut stream in [silent, half, http, long] {
                stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
                let mut rest = Vec::new();
                // The end, or a reset: anything but a time-out.
                if let Err(error) = stream.read_to_end(&mut rest) {
                    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
                }
                assert!(rest.is_empty(), "a stranger is told nothing: {rest:?}");
            }
            zeros.join().unwrap()
        });
        assert!(closed.await.unwrap() < 64, "the zeros were not all read");
    })
    .await;
}

/// A peer that says, in the right form, what is not allowed.
#[tokio::test]
async fn a_peer_that_breaks_the_protocol_is_lost_and_no_panic() {
    in_time(async {
        let ctx = Transport::Tcp.builder().build().unwrap();
        let (listener, address) = listen(&ctx).await;
        let hello = record_hello().await;
        for (i, garbage) in
            [vec![0xff; 100], vec![0; 100], pattern(5000, 3), b"GET / HTTP/1.1\r\n\r\n".to_vec()].into_iter().enumerate()
        {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(&hello).unwrap();
            let ep = listener.accept().await.unwrap();
            stream.write_all(&garbage).unwrap();
            let why = ep.closed().await;
            assert!(matches!(&why, Error::PeerLost { reason, .. } if reason.contains("protocol")), "{i}: {why:?}");
        }
    })
    .await;
}

/// What a client of this version says first.
async fn record_hello() -> Vec<u8> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let recorded = tokio::task::spawn_blocking(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut header = [0; 16];
        stream.read_exact(&mut header).unwrap();
        let mut body = vec![0; u32::from_le_bytes(header[12..].try_into().unwrap()) as usize];
        stream.read_exact(&mut body).unwrap();
        [&header[..], &body].concat()
    });
    let ctx = Transport::Tcp.builder().build().unwrap();
    assert!(matches!(ctx.connect(address).await, Err(Error::Handshake { .. })), "it was hung up on");
    recorded.await.unwrap()
}

#[tokio::test]
async fn another_version_is_told_so_on_both_sides() {
    in_time(async {
        let ctx = Context::new().unwrap();
        let (_listener, address) = listen(&ctx).await;
        let mut hello = record_hello().await;
        (hello[8], hello[10]) = (9, 9);
        let answer = tokio::task::spawn_blocking(move || {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(&hello).unwrap();
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
            answer
        });
        let answer = answer.await.unwrap();
        assert!(String::from_utf8_lossy(&answer).contains("no common protocol version"), "{answer:?}");

        let future = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = future.local_addr().unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = future.accept().unwrap();
            let _ = stream.write_all(b"GPUSOCK\n\x07\x00\x09\x00\x00\x00\x00\x00");
            let _ = stream.read(&mut [0; 1000]);
        });
        let error = ctx.connect(address).await.unwrap_err().to_string();
        assert!(error.contains("version 9") && error.contains("same version"), "{error}");
    })
    .await;
}

#[tokio::test]
async fn what_is_no_gpusock_is_named() {
    in_time(async {
        let ctx = Context::builder().handshake_timeout(Duration::from_millis(200)).build().unwrap();
        let web = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = web.local_addr().unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = web.accept().unwrap();
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
            let _ = stream.read(&mut [0; 1000]);
        });
        let error = ctx.connect(address).await.unwrap_err();
        assert!(matches!(&error, Error::Handshake { reason, .. } if reason.contains("not that of a gpusock")), "{error}");
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let error = ctx.connect(silent.local_addr().unwrap()).await.unwrap_err();
        assert!(matches!(&error, Error::Handshake { reason, .. } if reason.contains("did not answer")), "{error}");
        let address = silent.local_addr().unwrap();
        drop(silent);
        assert!(matches!(ctx.connect(address).await, Err(Error::Io { .. })), "nobody is there");
        assert!(matches!(ctx.connect("no such name:1").await, Err(Error::Io { .. })));
        let (_listener, address) = listen(&ctx).await;
        let error = ctx.bind(address).await.unwrap_err();
        assert!(error.to_string().contains("in use") && error.to_string().contains(&address.to_string()), "{error}");
    })
    .await;
}

/// A peer that is there and says nothing: stopped, cut off, or its executor blocked.
#[tokio::test]
async fn silence_ends_an_endpoint() {
    in_time(async {
        let quick = Transport::Tcp.builder().heartbeat(Duration::from_millis(20)).liveness(Duration::from_millis(150));
        let ctx = quick.build().unwrap();
        let (listener, address) = listen(&ctx).await;
        let hello = record_hello().await;
        // It shakes hands, and that was all.
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(&hello).unwrap();
        let ep = listener.accept().await.unwrap();
        let mut buf = ctx.alloc("host", 8).unwrap();
        let error = ep.recv(&mut buf).await.unwrap_err();
        assert!(matches!(&error, Error::PeerLost { reason, .. } if reason.contains("nothing was heard")), "{error}");
        drop(stream);
        // One that answers stays, however long nothing is said.
        let pair = common::pair_of(
            Transport::Tcp,
            Transport::Tcp.builder().heartbeat(Duration::from_millis(20)).liveness(Duration::from_millis(150)),
            Transport::Tcp.builder(),
        )
        .await;
        tokio::time::sleep(Duration::from_millis(500)).await;
        pair.a.send_bytes("still here").await.unwrap();
        assert_eq!(pair.b.recv_bytes().await.unwrap().0, "still here");
    })
    .await;
}

/// Cases 9 and 10: two processes of one host, and what is forced.
#[tokio::test]
async fn the_report_names_every_path_and_why_not() {
    in_time(async {
        let ctx = Context::new().unwrap();
        let (listener, address) = listen(&ctx).await;
        let mut other = Process::start(&format!("path {address}"));
        let ep = listener.accept().await.unwrap();
        let report = ep.path_report().unwrap();
        assert_eq!(report.chosen(), Some(PathKind::Shm));
        assert_eq!(report.candidates().len(), PathKind::ALL.len());
        let why = |kind| report.candidates().iter().find(|c| c.kind == kind).unwrap().reason.to_string();
        assert!(why(PathKind::Shm).contains("the peer is on this host"), "{report}");
        assert!(why(PathKind::Inproc).contains("another process"), "{report}");
        let there = other.hear();
        assert!(there.contains("shm ") && there.contains("chosen") && there.contains(" us"), "{there}");
        let mut events = ep.path_events();
        assert!(matches!(events.next().await, Some(PathEvent::Selected { kind: PathKind::Shm, .. })));
        other.kill();
        assert!(matches!(events.next().await, Some(PathEvent::Ended { .. })));
        assert!(events.next().await.is_none());

        // The same process: the policy of either side decides.
        let only = |kind| Context::builder().policy(PathPolicy::new().require(kind)).build().unwrap();
        let (here, peer) = tokio::join!(ctx.connect(address), listener.accept());
        assert_eq!(here.unwrap().path_report().unwrap().chosen(), Some(PathKind::Inproc));
        drop(peer);
        let tcp = only(PathKind::Tcp);
        let (here, peer) = tokio::join!(tcp.connect(address), listener.accept());
        let report = here.unwrap().path_report().unwrap();
        assert_eq!(report.chosen(), Some(PathKind::Tcp));
        assert!(report.to_string().contains("not allowed by the path policy"), "{report}");
        drop(peer);
        let rdma = only(PathKind::GpuDirectRdma);
        let (strict, address) = listen(&rdma).await;
        assert!(
            matches!(&ctx.connect(address).await.unwrap_err(), Error::Handshake { reason, .. } if reason.contains("no path"))
        );
        drop(strict);
        assert!(matches!(rdma.connect(listener.local_addr().unwrap()).await, Err(Error::NoPath { .. })));
    })
    .await;
}

#[tokio::test]
async fn ipv6_works_like_ipv4() {
    in_time(async {
        let ctx = Transport::Tcp.builder().build().unwrap();
        let Ok(listener) = ctx.bind("[::1]:0").await else {
            println!("not run: this machine has no IPv6 loopback");
            return;
        };
        let (a, b) = tokio::join!(listener.accept(), ctx.connect(listener.local_addr().unwrap()));
        a.unwrap().send_bytes("six").await.unwrap();
        assert_eq!(b.unwrap().recv_bytes().await.unwrap().0, "six");
    })
    .await;
}

#[tokio::test]
async fn offers_connect_without_a_listener() {
    in_time(async {
        let (ctx_a, ctx_b) = (Context::new().unwrap(), Transport::Tcp.builder().build().unwrap());
        let (offer_a, offer_b) = tokio::join!(ctx_a.offer(), ctx_b.offer());
        let (offer_a, offer_b) = (offer_a.unwrap(), offer_b.unwrap());
        let (a, b) = tokio::join!(ctx_a.connect_offer(&offer_b), ctx_b.connect_offer(&offer_a));
        let (a, b) = (a.unwrap(), b.unwrap());
        a.send_bytes("by offer").await.unwrap();
        assert_eq!(b.recv_bytes().await.unwrap().0, "by offer");
        assert!(matches!(ctx_a.connect_offer(&offer_a).await, Err(Error::InvalidArgument { .. })), "its own");
        assert!(matches!(ctx_a.connect_offer(b"nonsense").await, Err(Error::InvalidArgument { .. })));
    })
    .await;
}

#[test]
fn a_context_needs_a_runtime_and_says_so() {
    let error = Context::new().unwrap_err();
    assert!(matches!(&error, Error::Unsupported { what } if what.contains("tokio runtime")), "{error}");
    let bare = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let error = bare.block_on(async { Context::new().unwrap_err() });
    std::panic::set_hook(hook);
    assert!(matches!(&error, Error::Unsupported { what } if what.contains("enable_all")), "{error}");
}

#[test]
fn the_end_of_a_runtime_ends_its_endpoints() {
    let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (one, two) = (runtime(), runtime());
    let ctx = one.block_on(async { Transport::Tcp.builder().build().unwrap() });
    let listener = one.block_on(ctx.bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap();
    let there = two.block_on(async {
        let ctx = Transport::Tcp.builder().build().unwrap();
        ctx.connect(address).await.unwrap()
    });
    let here = one.block_on(listener.accept()).unwrap();
    drop(one);
    let why = two.block_on(in_time(here.closed()));
    assert!(matches!(&why, Error::PeerLost { reason, .. } if reason.contains("runtime")), "{why}");
    let why = two.block_on(in_time(there.closed()));
    assert!(matches!(why, Error::PeerLost { .. }), "{why}");
}

#[tokio::test]
async fn builders_refuse_what_cannot_be() {
    let refused = [
        Context::builder().lanes(0).build(),
        Context::builder().lanes(17).build(),
        Context::builder().eager_max(u32::MAX).build(),
        Context::builder().heartbeat(Duration::ZERO).build(),
        Context::builder().heartbeat(Duration::from_secs(2)).liveness(Duration::from_secs(3)).build(),
    ];
    for result in refused {
        assert!(matches!(result, Err(Error::InvalidArgument { .. })), "{result:?}");
    }
    let ctx = Context::new().unwrap();
    assert!(matches!(ctx.alloc("hots", 1), Err(Error::InvalidArgument { .. })));
    assert!(matches!(ctx.alloc("cuda:0", 1), Err(Error::Unsupported { .. })));
    for too_much in [1 << 60, u64::MAX, u64::MAX - 1, i64::MAX as u64] {
        assert!(matches!(ctx.alloc("host", too_much), Err(Error::InvalidArgument { .. } | Error::Io { .. })));
    }
    let wrong = Context::builder().tcp_congestion("no such").build().unwrap();
    let (listener, address) = listen(&ctx).await;
    let error = wrong.connect(address).await.unwrap_err().to_string();
    assert!(error.contains("no such") && error.contains("tcp_available_congestion_control"), "{error}");
    drop(listener);
}

/// Case 24: arrivals between the last look and the sleep. Each message comes while its receiver is about to sleep.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_wake_up_is_lost() {
    let rounds: u32 = std::env::var("GPUSOCK_TEST_WAKEUPS").ok().and_then(|n| n.parse().ok()).unwrap_or(20_000);
    for (transport, spin) in [
        (Transport::Tcp, Spin::Never),
        (Transport::Tcp, Spin::Adaptive),
        (Transport::Shm, Spin::Never),
        (Transport::Shm, Spin::Adaptive),
        (Transport::Inproc, Spin::Never),
        (Transport::Inproc, Spin::Adaptive),
    ] {
        let builder = || transport.builder().spin(spin).heartbeat(Duration::from_secs(600)).liveness(Duration::from_secs(2000));
        let Pair { ctx_a, a, ctx_b, b, .. } = common::pair_of(transport, builder(), builder()).await;
        let echo = tokio::spawn(async move {
            let (mut inbox, out) = (ctx_b.alloc("host", 8).unwrap(), ctx_b.alloc("host", 8).unwrap());
            for _ in 0..rounds {
                b.recv(&mut inbox).await.unwrap();
                b.send(&out).await.unwrap();
            }
            b
        });
        let (mut inbox, out) = (ctx_a.alloc("host", 8).unwrap(), ctx_a.alloc("host", 8).unwrap());
        for i in 0..rounds {
            // The heartbeat, which would wake a sleeper, is far away: a lost wake-up is a hang here.
            let round = async {
                a.send(&out).await.unwrap();
                a.recv(&mut inbox).await.unwrap();
            };
            tokio::time::timeout(Duration::from_secs(20), round)
                .await
                .unwrap_or_else(|_| panic!("lost in round {i} of {transport:?} {spin}"));
        }
        drop(echo.await.unwrap());
    }
}
