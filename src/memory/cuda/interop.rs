//! cudarc at the edge: slices that are registered, streams and events to order with, and views for kernels.

use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, DevicePtr as _, DeviceRepr};

use super::CudaRegion;
use super::Device;
use super::ordered::sealed::Ordered;
use super::stream::Event;
use crate::error::{Error, Result};
use crate::memory::borrow::{BorrowGuard, Use};
use crate::memory::owned::OwnedMemory;
use crate::memory::owned::sealed::Sealed;
use crate::memory::{GpuBuf, Region};

impl Ordered for CudaStream {
    #[allow(private_interfaces)]
    fn event(&self, device: &'static Device) -> Result<Event> {
        check_device(device, self)?;
        // SAFETY: the stream is borrowed, and so valid.
        unsafe { device.record(self.cu_stream().cast()) }
    }

    #[allow(private_interfaces)]
    fn wait_for(&self, device: &'static Device, event: &Arc<Event>) -> Result<()> {
        // SAFETY: as above.
        unsafe { device.make_wait(self.cu_stream().cast(), event) }
    }
}

impl Ordered for CudaEvent {
    #[allow(private_interfaces)]
    fn event(&self, device: &'static Device) -> Result<Event> {
        // SAFETY: the event is borrowed, and so valid; what it marks now is what counts.
        unsafe { device.capture(self.cu_event().cast()) }
    }

    #[allow(private_interfaces)]
    fn wait_for(&self, _: &'static Device, _: &Arc<Event>) -> Result<()> {
        Err(Error::invalid("an event cannot wait; name the stream"))
    }
}

impl<T: Ordered + ?Sized> Ordered for &T {
    #[allow(private_interfaces)]
    fn event(&self, device: &'static Device) -> Result<Event> {
        (**self).event(device)
    }

    #[allow(private_interfaces)]
    fn wait_for(&self, device: &'static Device, event: &Arc<Event>) -> Result<()> {
        (**self).wait_for(device, event)
    }
}

impl<T: Ordered + ?Sized> Ordered for Arc<T> {
    #[allow(private_interfaces)]
    fn event(&self, device: &'static Device) -> Result<Event> {
        (**self).event(device)
    }

    #[allow(private_interfaces)]
    fn wait_for(&self, device: &'static Device, event: &Arc<Event>) -> Result<()> {
        (**self).wait_for(device, event)
    }
}

fn check_device(device: &Device, stream: &CudaStream) -> Result<()> {
    let ordinal = stream.context().ordinal();
    if ordinal == device.ordinal as usize {
        return Ok(());
    }
    Err(Error::invalid(format!("the stream is of cuda:{ordinal}, and the memory of cuda:{}", device.ordinal)))
}

impl<T> Sealed for CudaSlice<T> {}
impl<T> Sealed for Arc<CudaSlice<T>> {}
impl<T> Sealed for (Arc<CudaSlice<T>>, Range<usize>) {}

impl<T: DeviceRepr + Send + Sync + 'static> OwnedMemory for CudaSlice<T> {
    #[allow(private_interfaces)]
    fn into_region(self) -> Result<Region> {
        Arc::new(self).into_region()
    }
}

impl<T: DeviceRepr + Send + Sync + 'static> OwnedMemory for Arc<CudaSlice<T>> {
    #[allow(private_interfaces)]
    fn into_region(self) -> Result<Region> {
        let all = 0..self.len();
        (self, all).into_region()
    }
}

impl<T: DeviceRepr + Send + Sync + 'static> OwnedMemory for (Arc<CudaSlice<T>>, Range<usize>) {
    #[allow(private_interfaces)]
    fn into_region(self) -> Result<Region> {
        let (slice, range) = self;
        if range.start > range.end || range.end > slice.len() {
            let len = range.end.saturating_sub(range.start) as u64;
            return Err(Error::OutOfBounds { offset: range.start as u64, len, size: slice.len() as u64 });
        }
        let size = size_of::<T>() as u64;
        let stream = Arc::clone(slice.stream());
        let (address, order) = {
            // The guard records an event for cudarc's own bookkeeping when it goes.
            let (address, _guard) = slice.device_ptr(&stream);
            (address + range.start as u64 * size, Arc::clone(&stream))
        };
        let len = (range.end - range.start) as u64 * size;
        let ordinal = stream.context().ordinal() as u32;
        // Opened first, so that a driver's complaint is about the device and not about the pointer.
        let device = super::device::device(ordinal)?;
        // SAFETY: the slice keeps the memory, and frees it alone.
        let region = unsafe { CudaRegion::of_user(address, len, Box::new(slice)) }?;
        if len > 0 {
            // Allocation and filling of a slice are themselves work of its stream.
            region.order().add(0, len, order.event(device)?);
        }
        Ok(Region::Cuda(region))
    }
}

/// The memory of a buffer as a [`CudaSlice`], for kernels that read it. Made by [`GpuBuf::cuda_slice`].
///
/// While it lives, no operation writes the buffer. When it goes, the buffer is ordered behind the stream that it was made for
/// ([`GpuBuf::ready_after`]), so a kernel that was launched on it may still be running.
pub struct CudaRef<'a, T>(View<'a, T>);

/// The memory of a buffer as a [`CudaSlice`], for kernels that write it. Made by [`GpuBuf::cuda_slice_mut`]. Otherwise like [`CudaRef`].
pub struct CudaRefMut<'a, T>(View<'a, T>);

struct View<'a, T> {
    /// `None` only while it is dropped.
    slice: Option<CudaSlice<T>>,
    buf: &'a GpuBuf,
    stream: Arc<CudaStream>,
    _guard: BorrowGuard,
}

impl<T> Drop for View<'_, T> {
    fn drop(&mut self) {
        if let Some(slice) = self.slice.take() {
            // The memory is the buffer's: cudarc lets go of it without freeing it.
            let _ = slice.leak();
        }
        if let Err(error) = self.buf.ready_after(&*self.stream) {
            tracing::warn!(%error, "a buffer could not be ordered behind its stream");
        }
    }
}

impl<T> Deref for CudaRef<'_, T> {
    type Target = CudaSlice<T>;

    fn deref(&self) -> &CudaSlice<T> {
        slice_of(&self.0)
    }
}

impl<T> Deref for CudaRefMut<'_, T> {
    type Target = CudaSlice<T>;

    fn deref(&self) -> &CudaSlice<T> {
        slice_of(&self.0)
    }
}

impl<T> DerefMut for CudaRefMut<'_, T> {
    fn deref_mut(&mut self) -> &mut CudaSlice<T> {
        match &mut self.0.slice {
            Some(slice) => slice,
            None => unreachable!("the slice is there until the drop"),
        }
    }
}

fn slice_of<'a, T>(view: &'a View<'_, T>) -> &'a CudaSlice<T> {
    match &view.slice {
        Some(slice) => slice,
        None => unreachable!("the slice is there until the drop"),
    }
}

impl GpuBuf {
    /// The memory as a slice of cudarc, for kernels on `stream` that read it. The stream is made to wait for what the buffer is ordered behind.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] if an operation writes the buffer; [`Error::InvalidArgument`] for memory of the host or of another device, or whose
    /// address or length does not fit `T`; [`Error::Cuda`].
    pub fn cuda_slice<T: DeviceRepr>(&self, stream: &Arc<CudaStream>) -> Result<CudaRef<'_, T>> {
        self.view_for(stream, Use::Read).map(CudaRef)
    }

    /// The same for kernels that write it.
    ///
    /// # Errors
    ///
    /// As for [`cuda_slice`](Self::cuda_slice), and [`Error::Busy`] if anything uses the buffer.
    pub fn cuda_slice_mut<T: DeviceRepr>(&mut self, stream: &Arc<CudaStream>) -> Result<CudaRefMut<'_, T>> {
        self.view_for(stream, Use::CopyIn).map(CudaRefMut)
    }

    fn view_for<T: DeviceRepr>(&self, stream: &Arc<CudaStream>, what: Use) -> Result<View<'_, T>> {
        let (Some(address), Some(device)) = (self.device_ptr(), self.device()) else {
            return Err(Error::invalid("the memory of the host is no CudaSlice"));
        };
        check_device(device, stream)?;
        let size = size_of::<T>().max(1) as u64;
        if self.len() % size != 0 || address % align_of::<T>() as u64 != 0 {
            return Err(Error::invalid(format!(
                "{} bytes at {address:#x} are no whole number of {}",
                self.len(),
                std::any::type_name::<T>()
            )));
        }
        let guard = self.borrow(what)?;
        self.make_wait(&**stream)?;
        stream.context().bind_to_thread().map_err(|e| Error::Cuda { what: format!("binding the stream's context: {e}") })?;
        // SAFETY: the memory is the buffer's, which is borrowed, and has this many elements; any bytes are a `T` (DeviceRepr is for types that
        // kernels take). It is not freed through this slice: the drop leaks it.
        let slice = unsafe { stream.upgrade_device_ptr::<T>(address, (self.len() / size) as usize) };
        Ok(View { slice: Some(slice), buf: self, stream: Arc::clone(stream), _guard: guard })
    }
}
