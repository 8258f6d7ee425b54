//! Memory that the user allocated.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::{DevicePtr, result};
use gpusock::{Context, Error};

use crate::common::pattern;
use crate::device::{Device, bytes, filled};
use crate::{Link, Suite, pair};

pub fn add(suite: &mut Suite) {
    suite.on_links("registered::slices_of_cudarc_whole_and_in_part", slices_of_cudarc);
    suite.on_links("registered::pool_memory_is_copied_directly", pool_memory_is_copied_directly);
    suite.on_links("registered::a_kernel_reads_what_was_received", a_kernel_reads_what_was_received);
    suite.on_links("registered::the_same_address_for_another_buffer", the_same_address_for_another_buffer);
    suite.add("registered::raw_memory_from_the_middle_of_an_allocation", raw_memory);
    suite.add("registered::what_is_no_device_memory_is_refused", what_is_no_device_memory_is_refused);
    suite.add("registered::memory_that_was_freed_is_noticed", memory_that_was_freed_is_noticed);
    suite.add("registered::memory_of_a_destroyed_context_is_noticed", memory_of_a_destroyed_context_is_noticed);
}

async fn slices_of_cudarc(link: Link) {
    let pair = pair(link).await;
    let device = Device::new();
    let words: Vec<u32> = (0..50_000).collect();
    let whole = Arc::new(device.stream.clone_htod(&words).unwrap());
    let of = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>();
    let mut target = pair.ctx_b.alloc("cuda:0", 200_000).unwrap();
    for range in [0..50_000, 10..20, 49_999..50_000, 777..44_444, 5..5] {
        let part = pair.ctx_a.register((Arc::clone(&whole), range.clone())).unwrap();
        assert_eq!(part.len(), range.len() as u64 * 4);
        let (sent, received) = tokio::join!(pair.a.send(&part), pair.b.recv(&mut target));
        sent.unwrap();
        let n = received.unwrap().len as usize;
        assert!(bytes(&target)[..n] == of(&words[range]));
    }
    let backwards = std::ops::Range { start: 7, end: 5 };
    for range in [50_000..50_001, backwards, 0..usize::MAX] {
        assert!(matches!(pair.ctx_a.register((Arc::clone(&whole), range)), Err(Error::OutOfBounds { .. })));
    }
    // The slice is freed when the last that uses it goes.
    let weak = Arc::downgrade(&whole);
    let part = pair.ctx_a.register((whole, 0..10)).unwrap();
    assert!(weak.upgrade().is_some());
    drop(part);
    // Behind the stream that it is ordered behind.
    device.stream.synchronize().unwrap();
    drop(pair.ctx_a.alloc("cuda:0", 8).unwrap());
    assert!(weak.upgrade().is_none(), "the slice was not let go of");
}

/// Case 1, within a process: memory of the stream-ordered pool, which cudarc takes by default, moves without staging.
async fn pool_memory_is_copied_directly(link: Link) {
    let pair = pair(link).await;
    let device = Device::new();
    let len = 1 << 20;
    let slice = device.stream.clone_htod(&pattern(len, 4)).unwrap();
    let source = pair.ctx_a.register(slice).unwrap();
    let mut target = pair.ctx_b.register(device.stream.alloc_zeros::<u8>(len).unwrap()).unwrap();
    let (sent, received) = tokio::join!(pair.a.send(&source), pair.b.recv(&mut target));
    for receipt in [sent.unwrap(), received.unwrap().receipt] {
        assert_eq!(receipt.path, link.path());
        assert_eq!(receipt.staged_bytes == 0, link == Link::Inproc);
    }
    assert!(bytes(&target) == pattern(len, 4));
}

async fn a_kernel_reads_what_was_received(link: Link) {
    let pair = pair(link).await;
    let device = Device::new();
    let mut source = pair.ctx_a.alloc("cuda:0", 4096).unwrap();
    let mut target = pair.ctx_b.register(device.stream.alloc_zeros::<u32>(1024).unwrap()).unwrap();
    for round in 1..5 {
        device.fill(&mut source, round, 2);
        let (sent, received) = tokio::join!(pair.a.send(&source), pair.b.recv(&mut target));
        sent.unwrap();
        received.unwrap();
        let seen = device.snapshot(&target, 0);
        assert!(device.words(&seen).iter().all(|&word| word == round));
    }
}

/// Case 8: memory is freed, and other memory with the same address is sent.
async fn the_same_address_for_another_buffer(link: Link) {
    let pair = pair(link).await;
    let device = Device::new();
    let mut addresses = Vec::new();
    let mut target = pair.ctx_b.alloc("cuda:0", 1 << 20).unwrap();
    for (round, len) in [1 << 20, 4096, 65_536, 1 << 20, 100, 4096, 1 << 20, 1 << 20].into_iter().enumerate() {
        let slice = device.stream.clone_htod(&pattern(len, round as u64)).unwrap();
        device.stream.synchronize().unwrap();
        addresses.push(slice.device_ptr(&device.stream).0);
        let source = pair.ctx_a.register(slice).unwrap();
        let (sent, received) = tokio::join!(pair.a.send(&source), pair.b.recv(&mut target));
        sent.unwrap();
        received.unwrap();
        assert!(bytes(&target)[..len] == pattern(len, round as u64), "round {round}");
        drop(source);
        device.stream.synchronize().unwrap();
    }
    let distinct: std::collections::HashSet<_> = addresses.iter().collect();
    eprintln!("{} buffers at {} addresses", addresses.len(), distinct.len());
}

/// Told when it is dropped.
struct Keep(Arc<AtomicBool>);

impl Drop for Keep {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

async fn raw_memory() {
    for link in Link::ALL {
        let pair = pair(link).await;
        let device = Device::new();
        device.context.bind_to_thread().unwrap();
        // SAFETY: freed below, when nothing uses it any more.
        let base = unsafe { result::malloc_sync(1 << 20) }.unwrap();
        for (at, len) in [(4096, 100_000), (100, 5000), (0, 1 << 20)] {
            let dropped = Arc::new(AtomicBool::new(false));
            // SAFETY: the memory is kept until after the buffer is gone.
            let mut buf = unsafe { pair.ctx_b.register_raw(base + at, len, Keep(Arc::clone(&dropped))) }.unwrap();
            buf.copy_from_slice(0, &vec![0xee; len as usize]).unwrap();
            let source = filled(&pair.ctx_a, "cuda:0", len as usize - 20, 6);
            let (sent, received) = tokio::join!(pair.a.send(&source), pair.b.recv(buf.slice_mut(10..len - 10)));
            sent.unwrap();
            received.unwrap();
            let got = bytes(&buf);
            assert!(got[10..len as usize - 10] == pattern(len as usize - 20, 6));
            assert!(got[..10].iter().chain(&got[len as usize - 10..]).all(|&b| b == 0xee), "neighbours changed");
            assert!(!dropped.load(Ordering::SeqCst));
            drop(buf);
            assert!(dropped.load(Ordering::SeqCst), "it was not let go of");
        }
        // SAFETY: nothing uses it any more, and it was not freed before.
        unsafe { result::free_sync(base) }.unwrap();
    }
}

async fn what_is_no_device_memory_is_refused() {
    let device = Device::new();
    device.context.bind_to_thread().unwrap();
    let ctx = Context::new().unwrap();
    let host = vec![0u8; 4096];
    // SAFETY: it is refused, or nothing is done with it.
    let error = unsafe { ctx.register_raw(host.as_ptr() as u64, 4096, ()) }.unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains("host pointer"), "{error}");
    // SAFETY: as above.
    let pinned = unsafe { device.context.alloc_pinned::<u8>(4096) }.unwrap();
    // SAFETY: as above.
    let error = unsafe { ctx.register_raw(pinned.as_ptr().unwrap() as u64, 4096, ()) }.unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains("host memory"), "{error}");
    // SAFETY: freed below.
    let base = unsafe { result::malloc_sync(4096) }.unwrap();
    // SAFETY: as above.
    let error = unsafe { ctx.register_raw(base, 1 << 40, ()) }.unwrap_err();
    assert!(matches!(error, Error::OutOfBounds { .. }), "{error}");
    // SAFETY: as above.
    assert!(unsafe { ctx.register_raw(base, u64::MAX, ()) }.is_err());
    // SAFETY: as above.
    assert!(unsafe { ctx.register_raw(base, 0, ()) }.unwrap().is_empty());
    // SAFETY: nothing uses it.
    unsafe { result::free_sync(base) }.unwrap();
}

/// The user breaks his word, which is noticed at the next use rather than by foreign bytes.
async fn memory_that_was_freed_is_noticed() {
    let pair = pair(Link::Inproc).await;
    let device = Device::new();
    device.context.bind_to_thread().unwrap();
    // SAFETY: the break of the promise is what is tested; the buffer is used after it only to be refused.
    let buf = unsafe {
        let base = result::malloc_sync(64 << 20).unwrap();
        let buf = pair.ctx_a.register_raw(base, 64 << 20, ()).unwrap();
        result::free_sync(base).unwrap();
        buf
    };
    let error = pair.a.send(&buf).await.unwrap_err();
    assert!(matches!(error, Error::Cuda { .. }) && error.to_string().contains("freed"), "{error}");
    // Another allocation may now have its address.
    // SAFETY: freed below.
    let other = unsafe { result::malloc_sync(64 << 20) }.unwrap();
    assert!(matches!(pair.a.send(&buf).await, Err(Error::Cuda { .. })));
    // SAFETY: nothing uses it.
    unsafe { result::free_sync(other) }.unwrap();
}

async fn memory_of_a_destroyed_context_is_noticed() {
    let pair = pair(Link::Inproc).await;
    let _primary = Device::new();
    // SAFETY: the types are those of cuda.h, and the memory goes with its context; that it does is what is tested.
    let buf = unsafe {
        let library = libloading::Library::new("libcuda.so.1").unwrap();
        let create: unsafe extern "C" fn(*mut *mut c_void, u32, i32) -> u32 = *library.get(b"cuCtxCreate_v2\0").unwrap();
        let destroy: unsafe extern "C" fn(*mut c_void) -> u32 = *library.get(b"cuCtxDestroy_v2\0").unwrap();
        let mut context = std::ptr::null_mut();
        assert_eq!(create(&mut context, 0, 0), 0);
        let base = result::malloc_sync(4096).unwrap();
        let buf = pair.ctx_a.register_raw(base, 4096, ()).unwrap();
        assert_eq!(destroy(context), 0);
        buf
    };
    let error = pair.a.send(&buf).await.unwrap_err();
    assert!(matches!(error, Error::Cuda { .. }) && error.to_string().contains("context was destroyed"), "{error}");
    // The device itself goes on.
    assert_eq!(pair.ctx_a.alloc("cuda:0", 8).unwrap().to_vec().unwrap(), [0; 8]);
}
