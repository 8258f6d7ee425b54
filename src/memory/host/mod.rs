//! Host memory: memory files, the heap, and what the user brings.

mod region;

pub use region::HostMemory;
pub(crate) use region::Region;
