//! A piece of host memory.

use std::alloc::Layout;
use std::fmt;
use std::ptr::NonNull;

use bytes::Bytes;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::MemoryFile;
use crate::error::{Error, Result};
use crate::memory::cuda::staging::Taken;

/// Allocations from this size on are files in memory, whose pages can be handed to a socket as they are.
const FILE_MIN: u64 = 256 << 10;
/// The alignment of what is allocated here, in bytes: a cache line.
const ALIGN: usize = 64;

/// Memory at a fixed address, freed when the last reference goes.
pub(crate) struct HostRegion {
    base: NonNull<u8>,
    len: u64,
    writable: bool,
    backing: Backing,
}

enum Backing {
    /// Nothing to free.
    Empty,
    Heap(Layout),
    /// A mapping of a file in memory, and the file itself where other processes can be given it.
    File(Option<MemoryFile>),
    /// A vector taken apart; its capacity.
    Vec(usize),
    /// Kept for its drop.
    Bytes(#[allow(dead_code)] Bytes),
    /// A chunk of a pinned pool, which gets it back.
    Pinned(#[allow(dead_code)] Taken),
}

// SAFETY: a region is an address, a length and an owner. Its bytes are reached only through raw pointers, by holders of a share of a
// buffer's borrow state, which excludes conflicting access from any thread.
unsafe impl Send for HostRegion {}
// SAFETY: as above.
unsafe impl Sync for HostRegion {}

impl fmt::Debug for HostRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostRegion").field("len", &self.len).field("writable", &self.writable).finish_non_exhaustive()
    }
}

impl HostRegion {
    /// Zeroed bytes.
    pub(crate) fn alloc(len: u64) -> Result<Self> {
        let size = usize::try_from(len).ok().filter(|&size| size <= isize::MAX as usize - ALIGN);
        let memory = memory_of_the_machine();
        let Some(size) = size.filter(|_| len <= memory) else {
            return Err(Error::invalid(format!("{len} bytes are more than this machine's memory of {memory} bytes")));
        };
        if size == 0 {
            return Ok(HostRegion { base: NonNull::dangling(), len, writable: true, backing: Backing::Empty });
        }
        if len >= FILE_MIN {
            match Self::file(size) {
                Ok(region) => return Ok(region),
                // Out of descriptors, or refused by a sandbox: the heap does as well, only without handing pages over.
                Err(error) => tracing::debug!(%error, size, "no memory file; allocating from the heap"),
            }
        }
        let layout = Layout::from_size_align(size, ALIGN).map_err(|_| Error::invalid(format!("cannot allocate {len} bytes")))?;
        // SAFETY: the layout's size is not zero.
        let pointer = unsafe { std::alloc::alloc_zeroed(layout) };
        let base = NonNull::new(pointer).ok_or_else(|| Error::io(format!("allocating {len} bytes"), Errno::NOMEM))?;
        Ok(HostRegion { base, len, writable: true, backing: Backing::Heap(layout) })
    }

    /// A chunk of pinned memory, of `len` bytes from `base` on.
    pub(crate) fn pinned(base: NonNull<u8>, len: usize, taken: Taken) -> Self {
        HostRegion { base, len: len as u64, writable: true, backing: Backing::Pinned(taken) }
    }

    fn file(size: usize) -> Result<Self, Errno> {
        let fd = rustix::fs::memfd_create("gpusock", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, size as u64)?;
        // Nobody who gets the descriptor can take the pages away under a mapping.
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory that exists.
        let pointer = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), size, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &fd, 0)?
        };
        let base = NonNull::new(pointer.cast()).ok_or(Errno::NOMEM)?;
        Ok(HostRegion { base, len: size as u64, writable: true, backing: Backing::File(MemoryFile::keep(fd)) })
    }

    /// The bytes of a vector.
    pub(crate) fn of_vec(bytes: Vec<u8>) -> Self {
        let mut parts = std::mem::ManuallyDrop::new(bytes);
        let base = NonNull::new(parts.as_mut_ptr()).unwrap_or(NonNull::dangling());
        HostRegion { base, len: parts.len() as u64, writable: true, backing: Backing::Vec(parts.capacity()) }
    }

    /// Bytes that are read-only for good.
    pub(crate) fn of_bytes(bytes: Bytes) -> Self {
        let base = NonNull::new(bytes.as_ptr().cast_mut()).unwrap_or(NonNull::dangling());
        HostRegion { base, len: bytes.len() as u64, writable: false, backing: Backing::Bytes(bytes) }
    }

    /// Bytes of the program, read-only for good.
    pub(crate) fn of_static(bytes: &'static [u8]) -> Self {
        HostRegion { base: NonNull::from(bytes).cast(), len: bytes.len() as u64, writable: false, backing: Backing::Empty }
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    pub(crate) fn is_writable(&self) -> bool {
        self.writable
    }

    /// The address of byte `offset`, which is within the region or at its end.
    pub(crate) fn at(&self, offset: u64) -> *mut u8 {
        // A wrapping step never leaves what the language allows; users of the address check their range.
        self.base.as_ptr().wrapping_add(offset as usize)
    }

    /// Whether its pages are those of a memory file, and of nothing else, ever.
    pub(crate) fn is_file(&self) -> bool {
        matches!(self.backing, Backing::File(_))
    }

    /// Whether it is neither a file nor a driver's.
    pub(crate) fn is_ordinary(&self) -> bool {
        !matches!(self.backing, Backing::File(_) | Backing::Pinned(_))
    }

    /// The memory file that has exactly these bytes, for other processes.
    pub(crate) fn shared_file(&self) -> Option<&MemoryFile> {
        match &self.backing {
            Backing::File(file) => file.as_ref(),
            _ => None,
        }
    }
}

impl Drop for HostRegion {
    fn drop(&mut self) {
        match &self.backing {
            Backing::Empty | Backing::Bytes(_) | Backing::Pinned(_) => {}
            // SAFETY: allocated with this layout, and this is the last reference.
            Backing::Heap(layout) => unsafe { std::alloc::dealloc(self.base.as_ptr(), *layout) },
            Backing::File(_) => {
                // SAFETY: mapped with this address and length, and this is the last reference.
                if let Err(error) = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len as usize) } {
                    tracing::error!(%error, "a mapping could not be removed");
                }
            }
            // SAFETY: these are the parts of a vector that was taken apart.
            Backing::Vec(capacity) => unsafe {
                drop(Vec::from_raw_parts(self.base.as_ptr(), self.len as usize, *capacity));
            },
        }
    }
}

/// Physical memory and swap, in bytes.
fn memory_of_the_machine() -> u64 {
    let info = rustix::system::sysinfo();
    (info.totalram as u64).saturating_add(info.totalswap as u64).saturating_mul(u64::from(info.mem_unit.max(1)))
}
