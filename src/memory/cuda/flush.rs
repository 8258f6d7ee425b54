//! Whether bytes that a NIC wrote into a GPU's memory must be flushed before anybody is told of them.

use std::ffi::c_int;

use super::Device;
use super::driver::attribute;
use crate::error::Result;

/// What the device says of GPUDirect RDMA writes (CUDA driver API, "GPU Direct RDMA writes ordering").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flush {
    /// The device's own reads see a NIC's writes in order.
    NotNeeded,
    /// By a call from the host.
    Call,
    /// It is needed, and the device offers no call: such bytes must not go by GPUDirect.
    Impossible,
}

/// `CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER`: from here on, the device that owns the memory sees writes in order.
const ORDERED_FOR_OWNER: c_int = 100;
/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST`: `cuFlushGPUDirectRDMAWrites` works.
const BY_HOST: c_int = 1;

impl Flush {
    pub(super) fn of(ask: impl Fn(c_int) -> c_int) -> Self {
        if ask(attribute::RDMA_WRITES_ORDERING) >= ORDERED_FOR_OWNER {
            Flush::NotNeeded
        } else if ask(attribute::RDMA_FLUSH_OPTIONS) & BY_HOST != 0 {
            Flush::Call
        } else {
            Flush::Impossible
        }
    }
}

impl Device {
    /// Makes what NICs have written visible to kernels of the device.
    #[allow(dead_code)] // Called by the engine for RDMA, behind each completion.
    pub(crate) fn flush_rdma(&'static self) -> Result<()> {
        let (Flush::Call, Some(flush)) = (self.flush, self.driver.table.flush_rdma) else { return Ok(()) };
        let _current = self.enter()?;
        /// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX`, and to the device that owns the memory.
        const TARGET_CONTEXT: c_int = 0;
        // SAFETY: takes numbers only.
        self.check(unsafe { flush(TARGET_CONTEXT, ORDERED_FOR_OWNER) }, "cuFlushGPUDirectRDMAWrites")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_is_made_where_the_device_asks_for_it() {
        let with = |ordering, options| {
            Flush::of(|which| match which {
                attribute::RDMA_WRITES_ORDERING => ordering,
                attribute::RDMA_FLUSH_OPTIONS => options,
                _ => 0,
            })
        };
        assert_eq!(with(0, 1), Flush::Call);
        assert_eq!(with(0, 3), Flush::Call);
        assert_eq!(with(0, 2), Flush::Impossible, "only kernels could flush");
        assert_eq!(with(0, 0), Flush::Impossible);
        // An H200 answers 100.
        assert_eq!(with(100, 1), Flush::NotNeeded);
        assert_eq!(with(200, 0), Flush::NotNeeded);
    }
}
