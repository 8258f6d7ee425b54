//! In steady state an operation allocates nothing, and what is idle costs nothing.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::{Pair, Transport, in_time};
use gpusock::{Access, RemoteBuf, Spin};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as the caller promised.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

/// One test, since all of it counts for the whole process.
#[test]
fn steady_and_idle() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(in_time(async {
        for transport in [Transport::Tcp, Transport::TcpNever, Transport::Inproc] {
            operations_allocate_nothing(transport).await;
        }
        idle_endpoints_cost_little().await;
    }));
}

async fn operations_allocate_nothing(transport: Transport) {
    // Under `Always` nothing sleeps, so that the driver's timers, which belong to tokio, stay out of the count.
    let builder = || if transport == Transport::TcpNever { transport.builder() } else { transport.builder().spin(Spin::Always) };
    let Pair { ctx_a, a, ctx_b, b, .. } = common::pair_of(transport, builder(), builder()).await;
    for len in [8u64, 4096, 50_000, 200_000] {
        let source = ctx_a.alloc("host", len).unwrap();
        let mut dest = ctx_b.alloc("host", len).unwrap();
        let target = ctx_b.alloc("host", len).unwrap();
        let lease = b.expose(&target, Access::ALL).unwrap();
        let remote = RemoteBuf::from_bytes(&lease.to_bytes()).unwrap();
        let mut back = ctx_a.alloc("host", len).unwrap();
        let word = remote.at(0).unwrap();
        let mut before = 0;
        const WARM: u64 = 50;
        const ROUNDS: u64 = 200;
        for round in 0..WARM + ROUNDS {
            if round == WARM {
                before = ALLOCATIONS.load(Ordering::Relaxed);
            }
            let (sent, got) = tokio::join!(a.send(&source), b.recv(&mut dest));
            assert!(sent.is_ok() && got.is_ok());
            let (wrote, noted) = tokio::join!(a.write_remote(&source, &remote).notify(3), b.notified(3, 1));
            assert!(wrote.is_ok() && noted.is_ok());
            a.read_remote(&mut back, &remote).await.unwrap();
            a.fetch_add(&word, 1).await.unwrap();
        }
        let allocated = ALLOCATIONS.load(Ordering::Relaxed) - before;
        // The heartbeat's tick lists the endpoints: a few allocations a second, whatever the rate of operations.
        assert!(allocated < ROUNDS / 10, "{allocated} allocations in {ROUNDS} rounds of {len} bytes over {transport:?}");
    }
}

async fn idle_endpoints_cost_little() {
    const ENDPOINTS: usize = 1000;
    let files = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    if files.current.is_some_and(|limit| limit < 3 * ENDPOINTS as u64) {
        println!("not run: {ENDPOINTS} endpoints need {} descriptors, and the limit is {:?}", 3 * ENDPOINTS, files.current);
        return;
    }
    let (server, client) = (Transport::Tcp.builder().build().unwrap(), Transport::Tcp.builder().build().unwrap());
    let listener = server.bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let memory = resident_kib();
    let mut endpoints = Vec::new();
    for _ in 0..ENDPOINTS {
        let (a, b) = tokio::join!(listener.accept(), client.connect(address));
        endpoints.push((a.unwrap(), b.unwrap()));
    }
    for (i, (a, b)) in endpoints.iter().enumerate() {
        let bytes = (i as u64).to_le_bytes().to_vec();
        let (sent, got) = tokio::join!(a.send_bytes(bytes.clone()), b.recv_bytes());
        sent.unwrap();
        assert_eq!(got.unwrap().0, bytes);
    }
    let each = (resident_kib() - memory) / (2 * ENDPOINTS as u64);
    assert!(each <= 64, "{each} KiB for an idle endpoint");
    // Until the reactor has put all of them to rest.
    tokio::time::sleep(Duration::from_millis(100)).await;
    let (wall, before) = (Duration::from_secs(3), cpu());
    tokio::time::sleep(wall).await;
    let used = cpu() - before;
    // An endpoint that spins would use all of it.
    assert!(used < wall / 10, "{used:?} of CPU in {wall:?} with everything idle");
    println!(
        "{each} KiB an idle endpoint, {:.2} % of a core for {} of them",
        100.0 * used.as_secs_f64() / wall.as_secs_f64(),
        2 * ENDPOINTS
    );
}
