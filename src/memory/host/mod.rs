//! Host memory: memory files, the heap, what the user brings, and chunks of pinned pools.

mod region;

pub(crate) use region::HostRegion;
