//! scratch
use gpusock::*;
use std::time::Duration;

async fn pair(policy: PathPolicy) -> (Context, GpuEndpoint, Context, GpuEndpoint) {
    let a = Context::builder().policy(policy).build().unwrap();
    let b = Context::builder().policy(policy).build().unwrap();
    let l = a.bind("127.0.0.1:0").await.unwrap();
    let addr = l.local_addr().unwrap();
    let (x, y) = tokio::join!(l.accept(), b.connect(addr));
    (a, x.unwrap(), b, y.unwrap())
}

async fn everything(policy: PathPolicy) {
    let (a, x, b, y) = pair(policy).await;
    println!("{}", y.path_report().unwrap());
    let mut src = a.alloc("host", 3 << 20).unwrap();
    src.map_mut().unwrap().iter_mut().enumerate().for_each(|(i, b)| *b = (i * 7 % 251) as u8);
    let mut dst = b.alloc("host", 3 << 20).unwrap();
    for n in [0u64, 1, 8, 4096, 5000, 65536, 65537, 1 << 20, 3 << 20] {
        let (s, r) = tokio::join!(x.send(src.slice(..n)).tag(n), y.recv(&mut dst));
        println!("{:?} {:?}", s.unwrap(), r.unwrap());
        assert_eq!(&src.map().unwrap()[..n as usize], &dst.map().unwrap()[..n as usize]);
    }
    let back = b.alloc("host", 3 << 20).unwrap();
    let remote = y.expose(&back, Access::ALL).unwrap();
    let remote_x = RemoteBuf::from_bytes(&remote.to_bytes()).unwrap();
    x.write_remote(&src, &remote_x).notify(9).await.unwrap();
    y.notified(9, 1).await.unwrap();
    assert_eq!(back.to_vec().unwrap(), src.to_vec().unwrap());
    let mut again = a.alloc("host", 3 << 20).unwrap();
    x.read_remote(&mut again, &remote_x).await.unwrap();
    assert_eq!(again.to_vec().unwrap(), src.to_vec().unwrap());
    let old = x.fetch_add(&remote_x.at(8).unwrap(), 5).await.unwrap();
    let new = x.compare_swap(&remote_x.at(8).unwrap(), old + 5, 1).await.unwrap();
    assert_eq!(new, old + 5);
    x.flush().await.unwrap();
    x.send_bytes("hello").await.unwrap();
    assert_eq!(y.recv_bytes().await.unwrap().0, "hello");
    x.close().await.unwrap();
    assert!(matches!(y.recv(&mut dst).await, Err(Error::Closed)));
    assert!(matches!(y.closed().await, Error::Closed));
}

#[tokio::test]
async fn tcp() {
    tokio::time::timeout(Duration::from_secs(20), everything(PathPolicy::new().forbid(PathKind::Inproc))).await.unwrap();
}
#[tokio::test]
async fn inproc() {
    tokio::time::timeout(Duration::from_secs(20), everything(PathPolicy::new())).await.unwrap();
}
