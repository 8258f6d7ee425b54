//! Streams and events of the user's, as what a buffer is ordered behind.

use std::sync::Arc;

use super::Device;
use super::driver::Raw;
use super::stream::Event;
use crate::error::Result;

pub(crate) mod sealed {
    use super::{Arc, Device, Event, Result};

    pub trait Ordered {
        #[doc(hidden)]
        #[allow(private_interfaces)]
        fn event(&self, device: &'static Device) -> Result<Event>;

        #[doc(hidden)]
        #[allow(private_interfaces)]
        fn wait_for(&self, device: &'static Device, event: &Arc<Event>) -> Result<()>;
    }
}

/// A stream or event of CUDA: `CudaStream` and `CudaEvent` of cudarc with the feature `cudarc`, or a [`RawStream`].
pub trait StreamOrder: sealed::Ordered {}

impl<T: sealed::Ordered> StreamOrder for T {}

/// A stream of the driver (`CUstream`, `cudaStream_t`), as other libraries hand it out.
#[derive(Debug, Clone, Copy)]
pub struct RawStream(Raw);

impl RawStream {
    /// Null is the legacy default stream.
    ///
    /// # Safety
    ///
    /// `stream` is a stream of a primary context, and stays valid while this value and its copies are used.
    #[must_use]
    pub unsafe fn new(stream: *mut std::ffi::c_void) -> Self {
        RawStream(stream)
    }
}

impl sealed::Ordered for RawStream {
    #[allow(private_interfaces)]
    fn event(&self, device: &'static Device) -> Result<Event> {
        // SAFETY: valid, as said when it was made.
        unsafe { device.record(self.0) }
    }

    #[allow(private_interfaces)]
    fn wait_for(&self, device: &'static Device, event: &Arc<Event>) -> Result<()> {
        // SAFETY: valid, as said when it was made.
        unsafe { device.make_wait(self.0, event) }
    }
}
