//! Allocation, copies by the CPU, and what is refused.

use gpusock::{Context, Error};

use crate::common::pattern;
use crate::device::Device;
use crate::{Link, Suite, pair};

pub fn add(suite: &mut Suite) {
    suite.add("memory::buffers_are_zeroed_and_their_own", buffers_are_zeroed_and_their_own);
    suite.add("memory::what_is_dropped_is_freed", what_is_dropped_is_freed);
    suite.add("memory::what_cannot_be_had_is_refused", what_cannot_be_had_is_refused);
    suite.add("memory::a_device_without_room_says_so", a_device_without_room_says_so);
    suite.add("memory::bytes_of_a_gpu_are_no_slice", bytes_of_a_gpu_are_no_slice);
    suite.add("memory::ten_thousand_buffers_leave_nothing_behind", ten_thousand_buffers_leave_nothing_behind);
}

async fn buffers_are_zeroed_and_their_own() {
    let ctx = Context::new().unwrap();
    // Odd lengths beside each other in one allocation, and ones that have an allocation each.
    let lens = [1, 8, 511, 512, 513, 4096, 70_001, 1 << 20, (8 << 20) + 1, 33 << 20, 0];
    for round in 0..3 {
        let buffers: Vec<_> = lens.iter().map(|&len| ctx.alloc("cuda:0", len).unwrap()).collect();
        for buf in &buffers {
            assert!(buf.to_vec().unwrap().iter().all(|&b| b == 0), "{} bytes are not zeroed", buf.len());
        }
        for (i, buf) in buffers.iter().enumerate() {
            buf.copy_from_slice(0, &pattern(buf.len() as usize, i as u64 + round)).unwrap();
        }
        for (i, buf) in buffers.iter().enumerate() {
            assert!(buf.to_vec().unwrap() == pattern(buf.len() as usize, i as u64 + round), "{} bytes", buf.len());
            assert_eq!(buf.mem().to_string(), "cuda:0");
        }
    }
    let buf = ctx.alloc("cuda:0", 100).unwrap();
    buf.copy_from_slice(98, &[1, 2]).unwrap();
    assert!(matches!(buf.copy_from_slice(98, &[1, 2, 3]), Err(Error::OutOfBounds { offset: 98, len: 3, size: 100 })));
    assert!(matches!(buf.copy_to_slice(101, &mut [0]), Err(Error::OutOfBounds { .. })));
    let (first, second) = buf.split_at(98).unwrap();
    assert_eq!((first.len(), second.to_vec().unwrap()), (98, vec![1, 2]));
}

async fn what_is_dropped_is_freed() {
    let device = Device::new();
    let ctx = Context::new().unwrap();
    let free = || device.context.mem_get_info().unwrap().0;
    let small: Vec<_> = (0..100).map(|_| ctx.alloc("cuda:0", 1 << 20).unwrap()).collect();
    drop(small);
    let before = free();
    for _ in 0..20 {
        let buffers: Vec<_> = [1 << 10, 3 << 20, 40 << 20, 200 << 20].map(|len| ctx.alloc("cuda:0", len).unwrap()).into();
        drop(buffers);
    }
    assert!(free() + (64 << 20) > before, "{} bytes were free, and now {}", before, free());
}

async fn what_cannot_be_had_is_refused() {
    let ctx = Context::new().unwrap();
    let error = ctx.alloc("cuda:99", 8).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }) && error.to_string().contains("no such device"), "{error}");
    let error = ctx.alloc("cuda:0", 1 << 50).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains("more than"), "{error}");
    assert!(ctx.alloc("cuda:0", u64::MAX).is_err());
}

async fn a_device_without_room_says_so() {
    let device = Device::new();
    let ctx = Context::new().unwrap();
    let total = device.context.total_mem().unwrap() as u64;
    let mut held = Vec::new();
    let error = loop {
        match ctx.alloc("cuda:0", total / 4) {
            Ok(buf) => held.push(buf),
            Err(error) => break error,
        }
        assert!(held.len() <= 4, "more than the device has");
    };
    assert!(matches!(error, Error::Cuda { .. }) && error.to_string().contains("OUT_OF_MEMORY"), "{error}");
    // Small buffers are there all the same, and what is dropped can be had again.
    drop(held);
    assert_eq!(ctx.alloc("cuda:0", total / 4).unwrap().len(), total / 4);
}

async fn bytes_of_a_gpu_are_no_slice() {
    let ctx = Context::new().unwrap();
    let mut buf = ctx.alloc("cuda:0", 64).unwrap();
    assert!(matches!(buf.map(), Err(Error::Unsupported { .. })));
    assert!(matches!(buf.map_mut(), Err(Error::Unsupported { .. })));
    assert!(matches!(buf.into_owner(), Err(Error::Unsupported { .. })));
}

/// Case 7: buffers that are sent once each and dropped do not accumulate anywhere.
async fn ten_thousand_buffers_leave_nothing_behind() {
    let device = Device::new();
    let free = || device.context.mem_get_info().unwrap().0;
    for link in Link::ALL {
        let pair = pair(link).await;
        let mut into = pair.ctx_b.alloc("cuda:0", 4096).unwrap();
        let mut at_first = 0;
        for i in 0..5_000u32 {
            let buf = pair.ctx_a.alloc("cuda:0", 4096).unwrap();
            buf.copy_from_slice(0, &i.to_le_bytes()).unwrap();
            let (sent, received) = tokio::join!(pair.a.send(&buf), pair.b.recv(&mut into));
            sent.unwrap();
            received.unwrap();
            if i % 500 == 0 {
                let mut first = [0; 4];
                into.copy_to_slice(0, &mut first).unwrap();
                assert_eq!(u32::from_le_bytes(first), i);
            }
            if i == 100 {
                at_first = free();
            }
        }
        assert!(free() >= at_first, "{at_first} bytes were free after 100 buffers, and {} after 5,000", free());
    }
}
