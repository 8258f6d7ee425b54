//! Buffers and slices of them, as users hold them.

use std::fmt;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use super::borrow::{BorrowGuard, BorrowState, Use};
use super::chunk::read_only;
use super::cuda::StreamOrder;
use super::lease::View;
use super::map::{MapGuard, MapMutGuard, OwnedMap};
use super::{Chunk, MemKind, Region};
use crate::error::{Error, Result};

/// The unique handle to a range of memory that operations can use.
///
/// Made by [`Context::alloc`](crate::Context::alloc) and [`Context::register`](crate::Context::register). Every operation in flight holds
/// its own reference to the memory, so a buffer may be dropped, and its futures too, at any time: the memory is freed when nothing
/// touches it any more.
///
/// # Overlap
///
/// A buffer knows who uses it. What would be a data race is [`Error::Busy`] instead:
///
/// | | needs |
/// | --- | --- |
/// | [`map`](Self::map) | nothing writes it, not exposed for writing |
/// | [`map_mut`](Self::map_mut) | nothing uses it, not exposed |
/// | sending or writing from it | nothing on this side writes it |
/// | receiving or reading into it | nothing on this side uses it, not exposed for writing |
/// | exposing it for reading | nothing on this side writes it |
/// | exposing it for writing | not mapped, nothing on this side writes it |
/// | [`copy_to_slice`](Self::copy_to_slice) | nothing on this side writes it |
/// | [`copy_from_slice`](Self::copy_from_slice) | nothing on this side uses it |
///
/// At most 1,048,575 operations may read one buffer at a time, 4,095 guards map it, and 16,383 exposures of each kind exist: to open many
/// pieces of one buffer, expose it once and slice the [`RemoteBuf`](crate::RemoteBuf).
///
/// The last two are also the way to memory that is exposed: a copy sees each byte as it was before or after a write of a peer that goes
/// on at the same time, and what came before a message or notification that was received is always seen.
/// [`split_at`](Self::split_at) gives buffers that are used independently.
///
/// What cannot be right does not compile:
///
/// ```compile_fail,E0599
/// # fn f(buf: gpusock::GpuBuf) {
/// let copy = buf.clone(); // a buffer is unique; `slice` gives shared handles
/// # }
/// ```
///
/// ```compile_fail,E0277
/// # fn f(ep: gpusock::GpuEndpoint, buf: gpusock::GpuBuf) {
/// let receive = ep.recv(&buf); // it writes the buffer, so it takes it by `&mut`
/// # }
/// ```
///
/// ```compile_fail,E0277
/// # fn f(ep: gpusock::GpuEndpoint, bytes: &[u8]) {
/// let send = ep.send(bytes); // an operation must own its share of the memory: `register` it, or `send_bytes`
/// # }
/// ```
pub struct GpuBuf {
    region: Arc<Region>,
    state: Arc<BorrowState>,
    start: u64,
    len: u64,
}

/// A shared handle to a range of a buffer, for reading from it. Cheap to clone.
///
/// A range that does not lie within the buffer is no panic, but [`Error::OutOfBounds`] when the slice is used.
#[derive(Clone)]
pub struct GpuSlice {
    pub(super) view: View,
}

/// A handle to a range of a buffer, for writing into it. Otherwise like [`GpuSlice`].
pub struct GpuSliceMut {
    pub(super) view: View,
}

/// Offset and length, which may lie outside; reversed bounds are an empty range.
fn resolve(range: &impl RangeBounds<u64>, size: u64) -> (u64, u64) {
    let start = match range.start_bound() {
        Bound::Included(&start) => start,
        Bound::Excluded(&start) => start.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&end) => end.saturating_add(1),
        Bound::Excluded(&end) => end,
        Bound::Unbounded => size.max(start),
    };
    (start, end.saturating_sub(start))
}

impl GpuBuf {
    pub(super) fn whole(region: Arc<Region>) -> Self {
        let len = region.len();
        GpuBuf { region, state: Arc::default(), start: 0, len }
    }

    pub(super) fn whole_view(&self) -> View {
        self.view(0, self.len)
    }

    fn view(&self, offset: u64, len: u64) -> View {
        let GpuBuf { region, state, start, len: size } = self;
        View { region: Arc::clone(region), state: Arc::clone(state), start: *start, size: *size, offset, len }
    }

    #[cfg(feature = "cudarc")]
    pub(super) fn device(&self) -> Option<&'static super::cuda::Device> {
        match &*self.region {
            Region::Host(_) => None,
            Region::Cuda(region) => Some(region.device()),
        }
    }

    #[cfg(feature = "cudarc")]
    pub(super) fn borrow(&self, what: Use) -> Result<BorrowGuard> {
        BorrowGuard::new(&self.state, what)
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where the memory is.
    #[must_use]
    pub fn mem(&self) -> MemKind {
        self.region.kind()
    }

    /// A range of it, in bytes, to send or write from.
    #[must_use]
    pub fn slice(&self, range: impl RangeBounds<u64>) -> GpuSlice {
        let (offset, len) = resolve(&range, self.len);
        GpuSlice { view: self.view(offset, len) }
    }

    /// A range of it, in bytes, to receive or read into.
    #[must_use]
    pub fn slice_mut(&mut self, range: impl RangeBounds<u64>) -> GpuSliceMut {
        let (offset, len) = resolve(&range, self.len);
        GpuSliceMut { view: self.view(offset, len) }
    }

    /// Two buffers on the same memory, the second from byte `mid` on, that are used independently.
    ///
    /// # Errors
    ///
    /// As for [`split_off`](Self::split_off), which keeps the buffer in that case.
    pub fn split_at(mut self, mid: u64) -> Result<(GpuBuf, GpuBuf)> {
        let second = self.split_off(mid)?;
        Ok((self, second))
    }

    /// Takes everything from byte `at` on away, as a buffer on the same memory that is used independently.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`] if `at` is behind the end, [`Error::Busy`] while something uses the buffer or a slice of it lives. Nothing
    /// has changed then.
    pub fn split_off(&mut self, at: u64) -> Result<GpuBuf> {
        if at > self.len {
            return Err(Error::OutOfBounds { offset: at, len: 0, size: self.len });
        }
        // Slices and leases hold the state: with this the only reference, nobody can use the memory under the old one any more.
        if Arc::get_mut(&mut self.state).is_none() {
            return Err(Error::Busy { what: "a buffer in use, or of which a slice lives, cannot be split" });
        }
        let rest = GpuBuf { region: Arc::clone(&self.region), state: Arc::default(), start: self.start + at, len: self.len - at };
        self.len = at;
        Ok(rest)
    }

    fn mappable(&self) -> Result<Chunk> {
        let chunk = self.whole_view().chunk()?;
        match chunk.kind() {
            MemKind::Host => Ok(chunk),
            kind => Err(Error::Unsupported {
                what: format!("{kind}: the bytes of a GPU are no Rust slice; use copy_to_slice and copy_from_slice").into(),
            }),
        }
    }

    /// The bytes, for reading.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`]; see [`GpuBuf`]. [`Error::Unsupported`] for memory of a GPU.
    pub fn map(&self) -> Result<MapGuard> {
        let chunk = self.mappable()?;
        Ok(MapGuard { chunk, _guard: BorrowGuard::new(&self.state, Use::Map)? })
    }

    /// The bytes, for writing.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`]; see [`GpuBuf`]. [`Error::InvalidArgument`] for memory that is read-only, [`Error::Unsupported`] for that of a GPU.
    pub fn map_mut(&mut self) -> Result<MapMutGuard> {
        let chunk = self.mappable()?;
        if !chunk.is_writable() {
            return Err(read_only());
        }
        Ok(MapMutGuard { chunk, _guard: BorrowGuard::new(&self.state, Use::MapMut)? })
    }

    /// Turns the buffer into an owner of plain bytes, for [`Bytes::from_owner`](bytes::Bytes::from_owner) for instance.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] if something writes it, or it is exposed for writing. [`Error::Unsupported`] for memory of a GPU.
    pub fn into_owner(self) -> Result<OwnedMap> {
        let chunk = self.mappable()?;
        Ok(OwnedMap { chunk, _guard: BorrowGuard::new(&self.state, Use::Map)? })
    }

    /// Orders the buffer behind a stream: every operation on it from now on waits, on the device, for what the stream has been given so
    /// far, or for the event. Call it after launching a kernel that writes the buffer, before [`send`](crate::GpuEndpoint::send); or after
    /// one that reads it, before it is received into. Several streams add up. A buffer that is dropped is freed behind them.
    ///
    /// `order` is a `CudaStream` or `CudaEvent` of cudarc (feature `cudarc`), or a [`RawStream`](crate::RawStream).
    ///
    /// # Errors
    ///
    /// [`Error::Cuda`]; [`Error::InvalidArgument`] for memory of the host, which no stream produces.
    pub fn ready_after(&self, order: impl StreamOrder) -> Result<()> {
        let Region::Cuda(region) = &*self.region else {
            return Err(Error::invalid("the memory of the host is ordered with no stream"));
        };
        if self.len > 0 {
            region.order().add(self.start, self.len, order.event(region.device())?);
        }
        Ok(())
    }

    /// Makes a stream wait, on the device, for the work that [`ready_after`](Self::ready_after) named and that is not over: what was said of
    /// one stream is passed on to another. What an operation of an endpoint wrote needs no such call: its future ends when the bytes are
    /// there, so whatever is launched after it sees them.
    ///
    /// # Errors
    ///
    /// As for [`ready_after`](Self::ready_after).
    pub fn make_wait(&self, stream: impl StreamOrder) -> Result<()> {
        let Region::Cuda(region) = &*self.region else {
            return Err(Error::invalid("the memory of the host is ordered with no stream"));
        };
        region.before(self.start, self.len).iter().try_for_each(|event| stream.wait_for(region.device(), event))
    }

    /// The address of the first byte on its device, for kernels; `None` for memory of the host. Valid while the buffer lives. What is
    /// launched with it is not seen by the crate: say [`ready_after`](Self::ready_after).
    #[must_use]
    pub fn device_ptr(&self) -> Option<u64> {
        match &*self.region {
            Region::Host(_) => None,
            Region::Cuda(region) => Some(region.at(self.start)),
        }
    }

    /// Copies `from` to byte `offset` and on. Works for any memory, also while it is exposed. With memory of a GPU the call waits for
    /// the copy, and for the streams named with [`ready_after`](Self::ready_after).
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`]; [`Error::Busy`] while an operation of this side uses the buffer; [`Error::Cuda`].
    pub fn copy_from_slice(&self, offset: u64, from: &[u8]) -> Result<()> {
        let chunk = self.view(offset, from.len() as u64).chunk()?;
        let _guard = BorrowGuard::new(&self.state, Use::CopyIn)?;
        chunk.write_from(0, from)
    }

    /// Copies from byte `offset` and on to `to`. Works for any memory, also while it is exposed. With memory of a GPU the call waits, as
    /// for [`copy_from_slice`](Self::copy_from_slice).
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`]; [`Error::Busy`] while an operation of this side writes the buffer; [`Error::Cuda`].
    pub fn copy_to_slice(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        let chunk = self.view(offset, to.len() as u64).chunk()?;
        let _guard = BorrowGuard::new(&self.state, Use::Read)?;
        chunk.read_into(0, to)
    }

    /// A copy of all bytes.
    ///
    /// # Errors
    ///
    /// As for [`copy_to_slice`](Self::copy_to_slice).
    pub fn to_vec(&self) -> Result<Vec<u8>> {
        let len = usize::try_from(self.len).map_err(|_| Error::invalid("the buffer does not fit the address space"))?;
        let mut bytes = Vec::new();
        // A buffer's pages may never have been touched, so it can exist where a copy of it cannot.
        bytes
            .try_reserve_exact(len)
            .map_err(|_| Error::io(format!("allocating {len} bytes"), std::io::ErrorKind::OutOfMemory))?;
        bytes.resize(len, 0);
        self.copy_to_slice(0, &mut bytes)?;
        Ok(bytes)
    }
}

impl fmt::Debug for GpuBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuBuf").field("mem", &self.mem()).field("len", &self.len).finish_non_exhaustive()
    }
}

macro_rules! slice {
    ($name:ident) => {
        impl $name {
            /// Length in bytes.
            #[must_use]
            pub fn len(&self) -> u64 {
                self.view.len
            }

            /// Whether it has no bytes.
            #[must_use]
            pub fn is_empty(&self) -> bool {
                self.view.len == 0
            }

            /// A range of this range, in bytes.
            #[must_use]
            pub fn slice(self, range: impl RangeBounds<u64>) -> Self {
                let (offset, len) = resolve(&range, self.view.len);
                // What lies outside of this range must not become valid because it is inside the buffer.
                let inside = offset.checked_add(len).is_some_and(|end| end <= self.view.len);
                let size =
                    if inside { self.view.size } else { self.view.offset.saturating_add(self.view.len).min(self.view.size) };
                $name { view: View { offset: self.view.offset.saturating_add(offset), len, size, ..self.view } }
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let View { offset, len, .. } = &self.view;
                f.debug_struct(stringify!($name)).field("offset", offset).field("len", len).finish_non_exhaustive()
            }
        }
    };
}

slice!(GpuSlice);
slice!(GpuSliceMut);
