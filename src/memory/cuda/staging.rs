//! Pinned host memory through which device bytes pass on their way to and from a socket.
//!
//! Bounded per context. What goes out and what comes in have pools of their own: if all chunks waited for peers that do not read, nothing
//! could be received, and two endpoints that send to each other would wait for good.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use super::Device;
use super::stream::Ring;
use crate::error::Result;
use crate::memory::host::HostRegion;
use crate::memory::{Chunk, Region};
use crate::reactor::lock;

/// Short payloads have chunks of their own, so that they do not wait for long ones.
pub(crate) const SMALL: u32 = 64 << 10;
/// What one frame of device memory carries on a socket, in bytes. The fixed cost of a copy and its completion, 10 µs on an H200, is then an
/// eighth of the time that the bytes take at 6 GB/s, and a message of 16 MiB is 32 of them, so that what does not overlap at its two ends is
/// a few per cent.
pub(crate) const FRAME: u32 = 512 << 10;
/// Frames of one lane that are copied ahead of the socket.
pub(crate) const AHEAD: usize = 6;
/// Chunks of a pool at most.
const SMALL_MAX: usize = 128;
const LARGE_MAX: usize = 32;
/// Chunks that are allocated together.
const BATCH: usize = 4;

/// The pools of a context.
pub(crate) struct Staging {
    outgoing: [Arc<Pool>; 2],
    incoming: [Arc<Pool>; 2],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    Outgoing,
    Incoming,
}

struct Pool {
    size: usize,
    max: usize,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    free: Vec<NonNull<u8>>,
    made: usize,
    arenas: Vec<Arena>,
    /// Who waits for a free chunk.
    waiters: Vec<Ring>,
}

struct Arena {
    device: &'static Device,
    base: NonNull<u8>,
}

// SAFETY: addresses of memory that the pool owns; each chunk is handed to one user at a time.
unsafe impl Send for Inner {}

impl Drop for Arena {
    fn drop(&mut self) {
        let Ok(_current) = self.device.enter() else { return };
        // SAFETY: allocated by `grow`, and all chunks have come back, since each holds the pool.
        unsafe { (self.device.driver.table.host_free)(self.base.as_ptr().cast()) };
    }
}

/// Keeps a chunk taken; gives it back when it is dropped.
pub(crate) struct Taken {
    pool: Arc<Pool>,
    base: NonNull<u8>,
}

// SAFETY: as for `Inner`.
unsafe impl Send for Taken {}
// SAFETY: nothing can be done with a shared reference to it.
unsafe impl Sync for Taken {}

impl Drop for Taken {
    fn drop(&mut self) {
        let waiters = {
            let mut inner = lock(&self.pool.inner);
            inner.free.push(self.base);
            std::mem::take(&mut inner.waiters)
        };
        waiters.iter().for_each(|ring| ring());
    }
}

impl Staging {
    /// `segment`: the longest frame that peers send, in bytes.
    pub(crate) fn new(segment: u32) -> Self {
        let pool = |size: u32, max| Arc::new(Pool { size: size as usize, max, inner: Mutex::default() });
        let pools = || [pool(SMALL, SMALL_MAX), pool(segment.max(FRAME), LARGE_MAX)];
        Staging { outgoing: pools(), incoming: pools() }
    }

    /// A free chunk, cut to `len` bytes; `None` while there is none, in which case `ring` is called once there may be.
    pub(crate) fn take(&self, device: &'static Device, which: Use, len: u32, ring: &Ring) -> Result<Option<Chunk>> {
        let pools = if which == Use::Outgoing { &self.outgoing } else { &self.incoming };
        let pool = &pools[usize::from(len as usize > pools[0].size)];
        let mut inner = lock(&pool.inner);
        if inner.free.is_empty() && inner.made < pool.max {
            inner.grow(device, pool.size)?;
        }
        let Some(base) = inner.free.pop() else {
            if !inner.waiters.iter().any(|waiter| Arc::ptr_eq(waiter, ring)) {
                inner.waiters.push(Arc::clone(ring));
            }
            return Ok(None);
        };
        drop(inner);
        let taken = Taken { pool: Arc::clone(pool), base };
        let region = Region::Host(HostRegion::pinned(base, pool.size, taken));
        Ok(Chunk::whole(Arc::new(region)).sub(0, len.into()))
    }

    /// For the path report.
    pub(crate) fn describe() -> String {
        format!("frames of {} KiB, up to {AHEAD} a lane ahead, {LARGE_MAX} pinned chunks a direction", FRAME >> 10)
    }
}

impl Inner {
    fn grow(&mut self, device: &'static Device, size: usize) -> Result<()> {
        let _current = device.enter()?;
        let mut base = std::ptr::null_mut();
        // SAFETY: writes to a valid place; 1 is "portable": every device's copies are fast with it.
        let answer = unsafe { (device.driver.table.host_alloc)(&mut base, size * BATCH, 1) };
        device.check(answer, "cuMemHostAlloc")?;
        let Some(base) = NonNull::new(base.cast::<u8>()) else { return Ok(()) };
        self.arenas.push(Arena { device, base });
        self.made += BATCH;
        // SAFETY: within the allocation.
        self.free.extend((0..BATCH).map(|i| unsafe { base.add(i * size) }));
        Ok(())
    }
}
