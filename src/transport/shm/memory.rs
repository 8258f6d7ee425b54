//! The memory of a connection that both processes map: a page of words, and a ring in each direction.
//!
//! Each ring is mapped twice, one copy behind the other, so that no record ever wraps.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::ring::{LINE, Store};

/// Bytes of a ring. Small enough to stay in a core's cache.
const RING: usize = 128 << 10;
/// Bytes of the control page: one of any architecture.
const PAGE: usize = 64 << 10;
/// The file: control page, ring of the side that accepts, ring of the side that connects.
pub(super) const SIZE: usize = PAGE + 2 * RING;
/// Where the words of a direction are in the control page, each on a pair of lines of its own (processors fetch two at a time).
const DIRECTION: usize = 1024;
const CONSUMED: usize = 0;
const RELEASED: usize = 8;
const SLEEPS: usize = 128;
const WAITS: usize = 256;
/// What the producer shows of its own memory, and whether the consumer could read it there: 1, or 2 if not.
const PROBE: usize = 384;
const READS: usize = 16;

/// Seals without which a file could shrink under a mapping.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// A mapping that goes when it is dropped.
#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: an address and a length; what is there is reached through raw pointers and atomics only.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Bytes of a file of the peer's, to be read. The file cannot get shorter.
    pub(super) fn of_peer(fd: BorrowedFd<'_>, len: usize) -> Result<Self, Errno> {
        check(fd, len)?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory that exists.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, fd, 0)? };
        Ok(Mapping { base: NonNull::new(base.cast()).ok_or(Errno::NOMEM)?, len })
    }

    /// The address of byte `at`, if `len` bytes from there on are mapped.
    pub(super) fn at(&self, at: u64, len: usize) -> Option<*const u8> {
        let at = usize::try_from(at).ok()?;
        let end = at.checked_add(len)?;
        (end <= self.len).then(|| self.base.as_ptr().wrapping_add(at).cast_const())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by this side with this address and length, and nobody refers to it any more.
        if let Err(error) = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) } {
            tracing::error!(%error, "a mapping could not be removed");
        }
    }
}

/// Whether a file that came from the peer has `len` bytes for good.
fn check(fd: BorrowedFd<'_>, len: usize) -> Result<(), Errno> {
    if len == 0 || !rustix::fs::fcntl_get_seals(fd)?.contains(SealFlags::SHRINK) {
        return Err(Errno::PERM);
    }
    let size = rustix::fs::fstat(fd)?.st_size;
    if u64::try_from(size).is_ok_and(|size| size >= len as u64) { Ok(()) } else { Err(Errno::INVAL) }
}

/// The memory of a connection.
#[derive(Debug)]
pub(super) struct Shared {
    control: Mapping,
    /// Each twice as long as a ring.
    rings: [Mapping; 2],
    /// A number that the peer looks for in this process's memory.
    probe: Box<u64>,
}

impl Shared {
    /// New memory, and its file, for the peer.
    pub(super) fn create() -> Result<(Self, OwnedFd), Errno> {
        let fd = rustix::fs::memfd_create("gpusock-rings", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, SIZE as u64)?;
        rustix::fs::fcntl_add_seals(&fd, SEALS | SealFlags::SEAL)?;
        Ok((Self::map(fd.as_fd(), 0)?, fd))
    }

    /// The memory that the peer made.
    pub(super) fn of_peer(fd: BorrowedFd<'_>) -> Result<Self, Errno> {
        check(fd, SIZE)?;
        Self::map(fd, 1)
    }

    fn map(fd: BorrowedFd<'_>, side: usize) -> Result<Self, Errno> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory that exists.
        let control = unsafe { rustix::mm::mmap(std::ptr::null_mut(), PAGE, access, MapFlags::SHARED, fd, 0)? };
        let control = Mapping { base: NonNull::new(control.cast()).ok_or(Errno::NOMEM)?, len: PAGE };
        let ring = |which: usize| {
            // SAFETY: as above; it only keeps the addresses together.
            let base =
                unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), 2 * RING, ProtFlags::empty(), MapFlags::PRIVATE)? };
            let ring = Mapping { base: NonNull::new(base.cast()).ok_or(Errno::NOMEM)?, len: 2 * RING };
            for half in 0..2 {
                let offset = (PAGE + which * RING) as u64;
                let at = ring.base.as_ptr().wrapping_add(half * RING).cast();
                // SAFETY: it replaces one half of the mapping that was just made, and that nobody uses.
                unsafe { rustix::mm::mmap(at, RING, access, MapFlags::SHARED | MapFlags::FIXED, fd, offset)? };
            }
            Ok(ring)
        };
        let mut number = [0; 8];
        getrandom::fill(&mut number).map_err(|_| Errno::IO)?;
        let shared = Shared { control, rings: [ring(0)?, ring(1)?], probe: Box::new(u64::from_le_bytes(number)) };
        shared.word(side, PROBE).store(std::ptr::from_ref(&*shared.probe).addr() as u64, Ordering::Relaxed);
        shared.word(side, PROBE + 8).store(*shared.probe, Ordering::Release);
        Ok(shared)
    }

    /// Finds out whether this process may read the memory of the peer's, which produces from side `from`, and tells it.
    pub(super) fn try_reading(&self, from: usize, peer: Option<rustix::process::Pid>) -> Result<(), Errno> {
        let number = self.word(from, PROBE + 8).load(Ordering::Acquire);
        let address = self.word(from, PROBE).load(Ordering::Relaxed);
        let mut seen = 0u64;
        // A process of another process namespace has no number here.
        let read = peer.ok_or(Errno::SRCH).and_then(|peer| {
            // SAFETY: eight bytes of this side's own.
            unsafe { read_process(peer, address, std::ptr::from_mut(&mut seen).cast(), 8) }
        });
        let read = match read {
            Ok(()) if seen != number => Err(Errno::SRCH),
            other => other,
        };
        self.word(from, READS).store(if read.is_ok() { 1 } else { 2 }, Ordering::Release);
        read
    }

    /// A word of the control page, in the direction that `from` produces.
    fn word(&self, from: usize, at: usize) -> &AtomicU64 {
        let pointer = self.control.base.as_ptr().wrapping_add(from * DIRECTION + at);
        // SAFETY: within the page, aligned, mapped for as long as `self`; both sides use it as an atomic word only.
        unsafe { AtomicU64::from_ptr(pointer.cast()) }
    }
}

/// Copies bytes of another process's memory.
///
/// # Safety
///
/// `to` is valid for writes of `len` bytes.
pub(super) unsafe fn read_process(peer: rustix::process::Pid, from: u64, to: *mut u8, len: usize) -> Result<(), Errno> {
    let mut done = 0;
    while done < len {
        let local = libc::iovec { iov_base: to.wrapping_add(done).cast(), iov_len: len - done };
        let remote = libc::iovec { iov_base: (from as usize).wrapping_add(done) as *mut libc::c_void, iov_len: len - done };
        // SAFETY: the local range is the caller's word; the remote one is an address in another process, which the kernel checks.
        let n = unsafe { libc::process_vm_readv(peer.as_raw_nonzero().get(), &local, 1, &remote, 1, 0) };
        match usize::try_from(n) {
            Ok(0) => return Err(Errno::FAULT),
            Ok(n) => done += n,
            Err(_) => {
                let errno = std::io::Error::last_os_error().raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error);
                if errno != Errno::INTR {
                    return Err(errno);
                }
            }
        }
    }
    Ok(())
}

/// One direction of a connection's memory.
#[derive(Debug, Clone)]
pub(super) struct Direction {
    shared: Arc<Shared>,
    /// The side that produces: 0 is the one that accepted.
    from: usize,
}

impl Direction {
    pub(super) fn new(shared: &Arc<Shared>, from: usize) -> Self {
        Direction { shared: Arc::clone(shared), from }
    }

    /// How many frames with named memory the consumer is done with.
    pub(super) fn released(&self) -> &AtomicU64 {
        self.shared.word(self.from, RELEASED)
    }

    /// Whether the consumer can read this side's memory in place.
    pub(super) fn is_read(&self) -> bool {
        self.shared.word(self.from, READS).load(Ordering::Relaxed) == 1
    }

    /// The address of a position; a record from there on is in one piece.
    pub(super) fn pointer(&self, at: u64) -> *mut u8 {
        self.shared.rings[self.from].base.as_ptr().wrapping_add(at as usize % RING)
    }
}

impl Store for Direction {
    type Word = AtomicU64;

    fn len(&self) -> u64 {
        RING as u64
    }

    fn word(&self, at: u64) -> &AtomicU64 {
        debug_assert_eq!(at % LINE, 0);
        // SAFETY: within the ring and aligned, mapped for as long as `self`; both sides use the first words of records as atomics, and an
        // old record's bytes there were written before the new word was cleared, by the same side.
        unsafe { AtomicU64::from_ptr(self.pointer(at).cast()) }
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        // SAFETY: a record is shorter than a ring, and the ring is mapped twice; this side wrote nothing there that the other still reads.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.pointer(at), bytes.len()) };
    }

    fn get(&self, at: u64, bytes: &mut [u8]) {
        // SAFETY: as above. A peer that goes on writing what it has published changes what is read, and nothing else.
        unsafe { std::ptr::copy_nonoverlapping(self.pointer(at).cast_const(), bytes.as_mut_ptr(), bytes.len()) };
    }

    fn consumed(&self) -> &AtomicU64 {
        self.shared.word(self.from, CONSUMED)
    }

    fn sleeps(&self) -> &AtomicU64 {
        self.shared.word(self.from, SLEEPS)
    }

    fn waits(&self) -> &AtomicU64 {
        self.shared.word(self.from, WAITS)
    }
}
