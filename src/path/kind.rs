//! The kinds of path, in order of preference.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// A way from one memory to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum PathKind {
    /// Both sides are in this process, on the same memory device: one direct copy.
    Inproc,
    /// Both sides are in this process, on different GPUs: NVLink or PCIe peer copies.
    InprocPeer,
    /// Another process of this host, GPU memory: CUDA IPC.
    CudaIpc,
    /// Another process of this host, host memory: shared memory.
    Shm,
    /// Another process of this host, through shared and pinned host memory, for GPU memory that the other process cannot reach.
    ShmStaged,
    /// The NIC reads and writes GPU memory itself.
    GpuDirectRdma,
    /// The NIC reads and writes host memory.
    Rdma,
    /// RDMA through pinned host memory, for GPU memory that the NIC cannot reach.
    RdmaStaged,
    /// TCP from and into host memory.
    Tcp,
    /// TCP through pinned host memory, for GPU memory.
    TcpStaged,
}

impl PathKind {
    /// All kinds, best first.
    pub const ALL: [PathKind; 10] = [
        PathKind::Inproc,
        PathKind::InprocPeer,
        PathKind::CudaIpc,
        PathKind::Shm,
        PathKind::ShmStaged,
        PathKind::GpuDirectRdma,
        PathKind::Rdma,
        PathKind::RdmaStaged,
        PathKind::Tcp,
        PathKind::TcpStaged,
    ];

    /// The name used by [`Display`](fmt::Display), the command line and `GPUSOCK_PATHS`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            PathKind::Inproc => "inproc",
            PathKind::InprocPeer => "inproc-peer",
            PathKind::CudaIpc => "cuda-ipc",
            PathKind::Shm => "shm",
            PathKind::ShmStaged => "shm-staged",
            PathKind::GpuDirectRdma => "gpudirect-rdma",
            PathKind::Rdma => "rdma",
            PathKind::RdmaStaged => "rdma-staged",
            PathKind::Tcp => "tcp",
            PathKind::TcpStaged => "tcp-staged",
        }
    }

    /// Whether bytes pass through host memory that is neither their source nor their destination.
    #[must_use]
    pub fn is_staged(self) -> bool {
        matches!(self, PathKind::ShmStaged | PathKind::RdmaStaged | PathKind::TcpStaged)
    }

    pub(crate) fn bit(self) -> u32 {
        1 << self as u32
    }
}

impl fmt::Display for PathKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for PathKind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        PathKind::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let names: Vec<_> = PathKind::ALL.iter().map(|kind| kind.name()).collect();
            Error::invalid(format!("{name:?} is no path; the paths are {}", names.join(", ")))
        })
    }
}
