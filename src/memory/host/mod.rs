//! Host memory: memory files, the heap, what the user brings, and chunks of pinned pools.

mod file;
mod region;

pub(crate) use file::{FileUser, MemoryFile};
pub(crate) use region::HostRegion;
