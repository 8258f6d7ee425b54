//! Async, GPU-aware RDMA sockets.
//!
//! Start at [`Context`], then [`GpuEndpoint`] and [`GpuBuf`].

#![doc = include_str!("../README.md")]

mod config;
mod context;
mod endpoint;
mod error;
#[doc(hidden)]
pub mod fuzzing;
mod memory;
mod path;
mod proto;
mod reactor;
pub mod system;
mod transport;
mod wire;

pub use context::{Context, ContextBuilder};
pub use endpoint::adapters::{BytesSink, BytesStream, Messages};
pub use endpoint::events::PathEvents;
pub use endpoint::futures::{
    Cancel, Close, Closed, CompareSwap, FetchAdd, Flush, Incoming, Notified, ReadRemote, Receipt, Received, Recv, RecvBytes,
    Send, WriteRemote,
};
pub use endpoint::listener::GpuListener;
pub use endpoint::message::{IntoBytes, Message};
pub use endpoint::remote::{Access, RemoteBuf, RemoteWord};
pub use endpoint::{GpuEndpoint, Stats};
pub use error::{Error, Result};
#[cfg(feature = "cudarc")]
pub use memory::{CudaRef, CudaRefMut};
pub use memory::{
    Dest, GpuBuf, GpuSlice, GpuSliceMut, MapGuard, MapMutGuard, MemKind, Memory, OwnedMap, OwnedMemory, RawStream, Source,
    StreamOrder,
};
pub use path::{Candidate, Cost, PathEvent, PathKind, PathPolicy, PathReport, Verdict};
pub use reactor::spin::Spin;
