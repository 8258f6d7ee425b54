//! A piece of memory of any kind, reference-counted by those who use it.

use super::MemKind;
use super::cuda::CudaRegion;
use super::host::HostRegion;
use crate::error::Result;

/// Memory at a fixed address, freed when the last reference goes.
#[derive(Debug)]
pub(crate) enum Region {
    Host(HostRegion),
    Cuda(CudaRegion),
}

impl Region {
    pub(crate) fn len(&self) -> u64 {
        match self {
            Region::Host(region) => region.len(),
            Region::Cuda(region) => region.len(),
        }
    }

    pub(crate) fn is_writable(&self) -> bool {
        match self {
            Region::Host(region) => region.is_writable(),
            Region::Cuda(_) => true,
        }
    }

    pub(crate) fn kind(&self) -> MemKind {
        match self {
            Region::Host(_) => MemKind::Host,
            Region::Cuda(region) => MemKind::Cuda(region.device().ordinal),
        }
    }

    /// Whether it is still the memory that it was made from.
    pub(crate) fn verify(&self) -> Result<()> {
        match self {
            Region::Host(_) => Ok(()),
            Region::Cuda(region) => region.verify(),
        }
    }
}
