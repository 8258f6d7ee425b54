//! Memory of CUDA devices: allocation, registration, copies, and their order with the streams of the user.
//!
//! Nothing here links to CUDA: the driver's library is looked for at run time, and without it every call answers why.

mod alloc;
pub(crate) mod atomic;
pub(crate) mod copy;
mod describe;
mod device;
pub(crate) mod driver;
mod flush;
#[cfg(feature = "cudarc")]
pub(crate) mod interop;
mod limbo;
pub(crate) mod order;
mod ordered;
mod region;
pub(crate) mod staging;
pub(crate) mod stream;
pub(crate) mod topology;
pub(crate) mod transfer;

pub(crate) use describe::describe;
pub(crate) use device::{Device, any_lost, device, reap};
pub(crate) use limbo::Until;
pub use ordered::{RawStream, StreamOrder};
pub(crate) use region::CudaRegion;
pub(crate) use transfer::{Stands, Transfer};
