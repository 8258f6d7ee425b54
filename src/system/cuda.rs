//! What the CUDA driver says.

/// The CUDA driver and its devices.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Cuda {
    /// The version of CUDA that it supports, as in `13.0`; `None` if there is no driver.
    pub driver: Option<String>,
    /// Why there is no device.
    pub problem: Option<String>,
    /// What this driver is too old for, and what is done instead.
    pub missing: Vec<String>,
    /// The devices.
    pub devices: Vec<CudaDevice>,
}

/// A device of the CUDA driver.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
#[non_exhaustive]
pub struct CudaDevice {
    /// The number in `cuda:0`.
    pub ordinal: u32,
    /// Its model.
    pub name: String,
    /// Its place on the PCI bus.
    pub address: String,
    /// Its compute capability, as in `9.0`.
    pub capability: String,
    /// Its memory, in bytes.
    pub memory: u64,
    /// Its memory can be shared as file descriptors.
    pub descriptors: bool,
    /// NICs can reach its memory.
    pub gpudirect_rdma: bool,
    /// Its memory can be had as dma-buf.
    pub dma_buf: bool,
}
