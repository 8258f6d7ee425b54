//! Where bytes live: allocation, borrowing, copies. Nothing here knows about peers.
//!
//! A [`Region`] is a piece of memory, reference-counted. A [`GpuBuf`] is the unique handle to a range of one. What an operation holds
//! while it is in flight is a *lease*: a [`Chunk`] of the region, and a share of the buffer's borrow state. So the memory outlives
//! every engine that may touch it, whatever futures and handles are dropped.

mod borrow;
mod buf;
mod chunk;
mod host;
mod kind;
mod lease;
mod map;

pub use buf::{GpuBuf, GpuSlice, GpuSliceMut};
pub(crate) use chunk::Chunk;
pub use host::HostMemory;
pub(crate) use host::Region;
pub use kind::MemKind;
pub(crate) use lease::{BufKey, ReadLease, WriteLease};
pub use lease::{Dest, Memory, Source};
pub use map::{MapGuard, MapMutGuard, OwnedMap};

use std::sync::Arc;

use crate::error::{Error, Result};

/// Allocates `len` zeroed bytes.
pub(crate) fn alloc(kind: MemKind, len: u64) -> Result<GpuBuf> {
    match kind {
        MemKind::Host => Ok(GpuBuf::whole(Arc::new(Region::alloc(len)?))),
        MemKind::Cuda(_) => Err(Error::Unsupported {
            what: format!("{kind}: this version of gpusock has no CUDA engine; allocate \"host\" memory").into(),
        }),
    }
}

/// Takes memory that the user owns into use.
pub(crate) fn register(owner: impl HostMemory) -> GpuBuf {
    GpuBuf::whole(Arc::new(owner.into_region()))
}
