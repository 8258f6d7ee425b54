//! The order between operations and the streams of the user.

use gpusock::{Access, Error, RemoteBuf};

use crate::device::{Device, bytes};
use crate::{Link, Suite, pair};

pub fn add(suite: &mut Suite) {
    suite.on_links("order::a_send_waits_for_the_kernel_that_writes_its_buffer", a_send_waits);
    suite.on_links("order::a_receive_waits_for_the_kernel_that_reads_its_buffer", a_receive_waits);
    suite.on_links("order::kernel_send_receive_kernel_without_the_host", kernel_to_kernel);
    suite.on_links("order::events_and_raw_streams_order_too", events_and_raw_streams);
    suite.on_links("order::only_what_overlaps_waits", only_what_overlaps_waits);
    suite.on_links("order::copies_by_the_cpu_wait_too", copies_by_the_cpu_wait_too);
    suite.add("order::what_a_kernel_uses_is_not_freed", what_a_kernel_uses_is_not_freed);
    suite.add("order::what_makes_no_sense_is_refused", what_makes_no_sense_is_refused);
    suite.add_with_two("order::a_stream_of_another_gpu_is_refused", a_stream_of_another_gpu_is_refused);
}

const LEN: u64 = 1 << 20;

fn all(bytes: &[u8], word: u32) -> bool {
    bytes.chunks(4).all(|chunk| chunk == word.to_le_bytes())
}

/// A slow kernel writes the buffer just before it is sent, written from and read by the peer.
async fn a_send_waits(link: Link) {
    let pair = pair(link).await;
    let device = Device::new();
    let there = pair.ctx_b.alloc("cuda:0", LEN).unwrap();
    let lease = pair.b.expose(&there, Access::ALL).unwrap();
    let remote = RemoteBuf::from_bytes(&lease.to_bytes()).unwrap();
    for (round, delay) in [(1, 60), (2, 20), (3, 0)] {
        let mut source = pair.ctx_a.alloc("cuda:0", LEN).unwrap();
        let mut target = pair.ctx_b.alloc("cuda:0", LEN).unwrap();
        device.fill(&mut source, round, delay);
        let (sent, received) = tokio::join!(pair.a.send(&source), pair.b.recv(&mut target));
        sent.unwrap();
        received.unwrap();
        assert!(all(&bytes(&target), round), "sent too early");
        device.fill(&mut source, round + 100, delay);
        pair.a.write_remote(&source, &remote).await.unwrap();
        assert!(all(&bytes(&there), round + 100), "written too early");
        // The peer's own kernel writes what is read from it.
        let mut theirs = pair.ctx_b.alloc("cuda:0", LEN).unwrap();
        device.fill(&mut theirs, round + 200, delay);
        let lease = pair.b.expose(&theirs, Access::READ).unwrap();
        let readable = RemoteBuf::from_bytes(&lease.to_bytes()).unwrap();
        pair.a.read_remote(&mut source, &readable).await.unwrap();
        assert!(all(&bytes(&source), round + 200), "read too early");
    }
}

/// A slow kernel still reads the buffer that is received into.
async fn a_receive_waits(link: Link) {
    let pair = pair(link).await;
    let device = Device::new();
    for delay in [60, 10, 0] {
        let mut target = pair.ctx_b.alloc("cuda:0", LEN).unwrap();
        device.fill(&mut target, 1, 0);
        let seen = device.snapshot(&target, delay);
        let mut source = pair.ctx_a.alloc("cuda:0", LEN).unwrap();
        device.fill(&mut source, 2, 0);
        // On another stream than the reader's, which would order the two by itself.
        let other = Device::new();
        let mut third = pair.ctx_a.alloc("cuda:0", LEN).unwrap();
        other.fill(&mut third, 2, 0);
        let (sent, received) = tokio::join!(pair.a.send(&third), pair.b.recv(&mut target));
        sent.unwrap();
        received.unwrap();
        assert!(all(&bytes(&target), 2));
        assert!(device.words(&seen).iter().all(|&word| word == 1), "the kernel saw what came after it");
    }
}

async fn kernel_to_kernel(link: Link) {
    let pair = pair(link).await;
    let (left, right) = (Device::new(), Device::new());
    let mut source = pair.ctx_a.alloc("cuda:0", LEN).unwrap();
    let mut target = pair.ctx_b.alloc("cuda:0", LEN).unwrap();
    for round in 1..20u32 {
        left.fill(&mut source, round, round % 3);
        let (sent, received) = tokio::join!(pair.a.send(&source), pair.b.recv(&mut target));
        sent.unwrap();
        received.unwrap();
        // Launched at once, on a stream that nobody has synchronized.
        let seen = right.snapshot(&target, 0);
        assert!(right.words(&seen).iter().all(|&word| word == round), "round {round}");
    }
}

async fn events_and_raw_streams(link: Link) {
    let pair = pair(link).await;
    let device = Device::new();
    let mut target = pair.ctx_b.alloc("cuda:0", LEN).unwrap();
    for how in 0..3 {
        let slice = device.stream.alloc_zeros::<u32>(LEN as usize / 4).unwrap();
        let mut slice = slice;
        device.xor(&mut slice, 7 + how, 30);
        let source = pair.ctx_a.register(slice).unwrap();
        match how {
            0 => source.ready_after(device.stream.record_event(None).unwrap()).unwrap(),
            // SAFETY: the stream lives as long as the device.
            1 => source.ready_after(unsafe { gpusock::RawStream::new(device.stream.cu_stream().cast()) }).unwrap(),
            // Registering a slice orders it behind its own stream.
            _ => {}
        }
        let (sent, received) = tokio::join!(pair.a.send(&source), pair.b.recv(&mut target));
        sent.unwrap();
        received.unwrap();
        assert!(all(&bytes(&target), 7 + how), "way {how}");
    }
}

/// A range that no kernel touches is not held up by one that touches another.
async fn only_what_overlaps_waits(link: Link) {
    let pair = pair(link).await;
    let device = Device::new();
    let whole = pair.ctx_a.alloc("cuda:0", 2 * LEN).unwrap();
    whole.copy_from_slice(LEN, &vec![5; LEN as usize]).unwrap();
    let (mut slow, quick) = whole.split_at(LEN).unwrap();
    let event = {
        device.fill(&mut slow, 1, 300);
        device.stream.record_event(None).unwrap()
    };
    let mut target = pair.ctx_b.alloc("cuda:0", LEN).unwrap();
    let (sent, received) = tokio::join!(pair.a.send(&quick), pair.b.recv(&mut target));
    sent.unwrap();
    received.unwrap();
    let still_running = !event.is_complete();
    assert!(bytes(&target).iter().all(|&b| b == 5));
    assert!(still_running, "it waited for a kernel that has nothing to do with it");
    assert!(all(&bytes(&slow), 1));
}

async fn copies_by_the_cpu_wait_too(link: Link) {
    let _ = link;
    let device = Device::new();
    let ctx = gpusock::Context::new().unwrap();
    let mut buf = ctx.alloc("cuda:0", LEN).unwrap();
    device.fill(&mut buf, 3, 30);
    assert!(all(&bytes(&buf), 3));
    device.fill(&mut buf, 4, 30);
    buf.copy_from_slice(0, &[9; 4]).unwrap();
    assert_eq!(bytes(&buf)[..8], [9, 9, 9, 9, 4, 0, 0, 0]);
}

/// A buffer that is dropped while a kernel works on it.
async fn what_a_kernel_uses_is_not_freed() {
    let device = Device::new();
    let ctx = gpusock::Context::new().unwrap();
    for len in [1 << 20, 40 << 20] {
        let mut buf = ctx.alloc("cuda:0", len).unwrap();
        device.fill(&mut buf, 3, 50);
        drop(buf);
        // If it had been freed, this could be the same memory.
        let next = ctx.alloc("cuda:0", len).unwrap();
        device.stream.synchronize().unwrap();
        assert!(bytes(&next).iter().all(|&b| b == 0), "a kernel wrote into memory that is another's");
    }
}

async fn what_makes_no_sense_is_refused() {
    let device = Device::new();
    let ctx = gpusock::Context::new().unwrap();
    let mut host = ctx.alloc("host", 64).unwrap();
    assert!(matches!(host.ready_after(&*device.stream), Err(Error::InvalidArgument { .. })));
    assert!(matches!(host.make_wait(&*device.stream), Err(Error::InvalidArgument { .. })));
    assert!(matches!(host.cuda_slice_mut::<u32>(&device.stream), Err(Error::InvalidArgument { .. })));
    let odd = ctx.alloc("cuda:0", 7).unwrap();
    assert!(matches!(odd.cuda_slice::<u32>(&device.stream), Err(Error::InvalidArgument { .. })));
    assert_eq!(odd.cuda_slice::<u8>(&device.stream).unwrap().len(), 7);
    let mut buf = ctx.alloc("cuda:0", 64).unwrap();
    {
        let view = buf.cuda_slice::<u32>(&device.stream).unwrap();
        assert_eq!(view.len(), 16);
    }
    let event = device.stream.record_event(None).unwrap();
    assert!(matches!(buf.make_wait(&event), Ok(()) | Err(Error::InvalidArgument { .. })));
    let view = buf.cuda_slice_mut::<u32>(&device.stream).unwrap();
    drop(view);
    buf.make_wait(&*device.stream).unwrap();
}

async fn a_stream_of_another_gpu_is_refused() {
    let other = Device::with(1);
    let ctx = gpusock::Context::new().unwrap();
    let buf = ctx.alloc("cuda:0", 64).unwrap();
    let error = buf.ready_after(&*other.stream).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains("cuda:1"), "{error}");
    assert!(matches!(buf.cuda_slice::<u32>(&other.stream), Err(Error::InvalidArgument { .. })));
}
