//! A piece of memory that an engine may use.

use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::borrow::BorrowGuard;
use super::cuda::{self, Device};
use super::{MemKind, Region};
use crate::error::{Error, Result};

/// A range of a region. Cheap to clone; keeps the memory alive.
#[derive(Debug, Clone)]
pub(crate) struct Chunk {
    region: Arc<Region>,
    offset: u64,
    len: u64,
    /// The share of the buffer's borrow state under which an engine uses it, for as long as any has a piece of it.
    hold: Option<Arc<BorrowGuard>>,
}

impl Chunk {
    /// The whole region.
    pub(crate) fn whole(region: Arc<Region>) -> Self {
        let len = region.len();
        Chunk { region, offset: 0, len, hold: None }
    }

    pub(crate) fn held_by(mut self, guard: Arc<BorrowGuard>) -> Self {
        self.hold = Some(guard);
        self
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    pub(crate) fn is_writable(&self) -> bool {
        self.region.is_writable()
    }

    /// Offset in the region, for telling chunks apart.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    fn check(&self, offset: u64, len: u64) -> Result<()> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(()),
            _ => Err(Error::OutOfBounds { offset, len, size: self.len }),
        }
    }

    pub(crate) fn sub(&self, offset: u64, len: u64) -> Option<Chunk> {
        self.check(offset, len).ok()?;
        Some(Chunk { region: Arc::clone(&self.region), offset: self.offset + offset, len, hold: self.hold.clone() })
    }

    /// `sub`, or why not.
    pub(crate) fn narrow(&self, offset: u64, len: u64) -> Result<Chunk> {
        self.sub(offset, len).ok_or(Error::OutOfBounds { offset, len, size: self.len })
    }

    pub(crate) fn region(&self) -> &Region {
        &self.region
    }

    pub(crate) fn kind(&self) -> MemKind {
        self.region.kind()
    }

    /// The GPU that has it.
    pub(crate) fn device(&self) -> Option<&'static Device> {
        match &*self.region {
            Region::Host(_) => None,
            Region::Cuda(region) => Some(region.device()),
        }
    }

    /// The address, for host memory; null for a device's, which the CPU cannot reach. Valid for `len` bytes for as long as the chunk lives.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        match &*self.region {
            Region::Host(region) => region.at(self.offset),
            Region::Cuda(_) => std::ptr::null_mut(),
        }
    }

    /// Copies out. From a device, it waits.
    pub(crate) fn read_into(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        self.check(offset, to.len() as u64)?;
        if let Region::Cuda(region) = &*self.region {
            return if to.is_empty() { Ok(()) } else { cuda::copy::read_into(region, self.offset + offset, to) };
        }
        // SAFETY: the range was checked, the region keeps it alive, and `to` is a Rust reference, which memory of a region never has
        // while it can be written otherwise, so the two do not overlap. The caller holds a share that excludes writers, or the memory
        // is exposed, whose users accept old or new bytes.
        unsafe { std::ptr::copy_nonoverlapping(self.as_ptr().wrapping_add(offset as usize), to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    /// Copies in. To a device, it waits.
    pub(crate) fn write_from(&self, offset: u64, from: &[u8]) -> Result<()> {
        self.check(offset, from.len() as u64)?;
        self.check_writable()?;
        if let Region::Cuda(region) = &*self.region {
            return if from.is_empty() { Ok(()) } else { cuda::copy::write_from(region, self.offset + offset, from) };
        }
        // SAFETY: as in `read_into`, the other way round.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.as_ptr().wrapping_add(offset as usize), from.len()) };
        Ok(())
    }

    /// Copies as many bytes as `to` has, within host memory. The two may overlap.
    pub(crate) fn copy_to(&self, to: &Chunk) -> Result<()> {
        self.check(0, to.len)?;
        to.check_writable()?;
        self.check_host()?;
        to.check_host()?;
        // SAFETY: both ranges were checked and are kept alive; `copy` allows overlap.
        unsafe { std::ptr::copy(self.as_ptr().cast_const(), to.as_ptr(), to.len as usize) };
        Ok(())
    }

    pub(crate) fn check_writable(&self) -> Result<()> {
        if self.is_writable() { Ok(()) } else { Err(read_only()) }
    }

    pub(crate) fn check_host(&self) -> Result<()> {
        if self.device().is_none() { Ok(()) } else { Err(Error::invalid("the CPU cannot reach the memory of a GPU")) }
    }

    fn word(&self, offset: u64) -> Result<&AtomicU64> {
        self.check(offset, 8)?;
        self.check_writable()?;
        self.check_host()?;
        let pointer = self.as_ptr().wrapping_add(offset as usize);
        if pointer.addr() % 8 != 0 {
            return Err(Error::invalid("an atomic operation needs an address that is a multiple of 8 bytes"));
        }
        // SAFETY: in range, aligned, alive for as long as `self`; other access to it is by atomics or by copies of users who have
        // exposed it and accept old or new bytes.
        Ok(unsafe { AtomicU64::from_ptr(pointer.cast()) })
    }

    /// Adds, wrapping, and answers the former value.
    pub(crate) fn fetch_add_u64(&self, offset: u64, value: u64) -> Result<u64> {
        Ok(self.word(offset)?.fetch_add(value, Ordering::SeqCst))
    }

    /// Stores `new` if the value is `expected`, and answers the former value.
    pub(crate) fn compare_swap_u64(&self, offset: u64, expected: u64, new: u64) -> Result<u64> {
        let word = self.word(offset)?;
        Ok(word.compare_exchange(expected, new, Ordering::SeqCst, Ordering::SeqCst).unwrap_or_else(|now| now))
    }

    /// Whether the memory is the process's own, which the kernel can read like any other.
    pub(crate) fn is_ordinary(&self) -> bool {
        matches!(&*self.region, Region::Host(region) if region.is_ordinary())
    }

    /// Whether the memory is a memory file.
    pub(crate) fn is_file(&self) -> bool {
        matches!(&*self.region, Region::Host(region) if region.is_file())
    }

    /// For a system call that reads the bytes.
    ///
    /// # Safety
    ///
    /// The slice goes to the kernel only, and no reference to its bytes is used. Nobody holds a `&mut` to them: the caller has a
    /// reader's share of the buffer, or the memory is exposed.
    pub(crate) unsafe fn io_slice(&self) -> Option<IoSlice<'_>> {
        let len = usize::try_from(self.len).ok().filter(|_| self.device().is_none())?;
        // SAFETY: in range and alive; for the rest see above.
        Some(IoSlice::new(unsafe { std::slice::from_raw_parts(self.as_ptr(), len) }))
    }

    /// For a system call that writes the bytes.
    ///
    /// # Safety
    ///
    /// As for `io_slice`, and nobody holds a `&` to the bytes either: the caller has the writer's share of the buffer, or the memory is
    /// exposed for writing.
    pub(crate) unsafe fn io_slice_mut(&self) -> Option<IoSliceMut<'_>> {
        let len = usize::try_from(self.len).ok().filter(|_| self.is_writable() && self.device().is_none())?;
        // SAFETY: in range and alive; for the rest see above.
        Some(IoSliceMut::new(unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), len) }))
    }
}

pub(crate) fn read_only() -> Error {
    Error::invalid("the memory is read-only (it was registered from `Bytes` or a static slice)")
}
