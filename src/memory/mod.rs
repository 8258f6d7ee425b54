//! Where bytes live: allocation, borrowing, copies. Nothing here knows about peers.
//!
//! A [`Region`] is a piece of memory, reference-counted. A [`GpuBuf`] is the unique handle to a range of one. What an operation holds
//! while it is in flight is a *lease*: a [`Chunk`] of the region, and a share of the buffer's borrow state. So the memory outlives
//! every engine that may touch it, whatever futures and handles are dropped.

mod borrow;
mod buf;
mod chunk;
pub(crate) mod cuda;
mod host;
mod kind;
mod lease;
mod map;
mod owned;
mod region;

pub use buf::{GpuBuf, GpuSlice, GpuSliceMut};
pub(crate) use chunk::Chunk;
#[cfg(feature = "cudarc")]
pub use cuda::interop::{CudaRef, CudaRefMut};
pub use cuda::{RawStream, StreamOrder};
pub(crate) use host::{FileUser, HostRegion};
pub use kind::MemKind;
pub(crate) use lease::{BufKey, ReadLease, WriteLease};
pub use lease::{Dest, Memory, Source};
pub use map::{MapGuard, MapMutGuard, OwnedMap};
pub use owned::OwnedMemory;
pub(crate) use region::Region;

use std::sync::Arc;

use crate::error::Result;

/// Allocates `len` zeroed bytes.
pub(crate) fn alloc(kind: MemKind, len: u64) -> Result<GpuBuf> {
    let region = match kind {
        MemKind::Host => Region::Host(HostRegion::alloc(len)?),
        MemKind::Cuda(ordinal) => Region::Cuda(cuda::CudaRegion::alloc(ordinal, len)?),
    };
    Ok(GpuBuf::whole(Arc::new(region)))
}

/// Takes memory that the user owns into use.
pub(crate) fn register(owner: impl OwnedMemory) -> Result<GpuBuf> {
    Ok(GpuBuf::whole(Arc::new(owner.into_region()?)))
}

/// Takes device memory that the user keeps into use.
///
/// # Safety
///
/// As for [`Context::register_raw`](crate::Context::register_raw).
pub(crate) unsafe fn register_raw(address: u64, len: u64, keep: Box<dyn std::any::Any + Send + Sync>) -> Result<GpuBuf> {
    // SAFETY: as the caller says.
    let region = unsafe { cuda::CudaRegion::of_user(address, len, keep) }?;
    Ok(GpuBuf::whole(Arc::new(Region::Cuda(region))))
}
