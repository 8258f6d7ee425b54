//! What operations take from buffers.

use std::sync::Arc;

use super::borrow::{BorrowGuard, BorrowState, Use};
use super::chunk::read_only;
use super::{Chunk, GpuBuf, GpuSlice, GpuSliceMut, HostRegion, MemKind, Region};
use crate::error::{Error, Result};

/// Memory that an operation reads, and its share of the buffer.
#[derive(Debug)]
pub struct ReadLease {
    chunk: Chunk,
    /// `None` for memory that nobody else can write, and where the chunk has it.
    _guard: Option<BorrowGuard>,
}

/// Memory that an operation writes, and its share of the buffer.
#[derive(Debug)]
pub struct WriteLease {
    chunk: Chunk,
    state: Arc<BorrowState>,
    _guard: Option<BorrowGuard>,
}

/// Tells whether two operations use the very same range of the very same buffer.
#[derive(Debug, Clone)]
pub struct BufKey {
    state: Arc<BorrowState>,
    offset: u64,
    len: u64,
}

impl PartialEq for BufKey {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.state, &other.state) && (self.offset, self.len) == (other.offset, other.len)
    }
}

impl ReadLease {
    pub(crate) fn chunk(&self) -> &Chunk {
        &self.chunk
    }

    /// Memory that is read-only for good.
    pub(crate) fn of_bytes(bytes: bytes::Bytes) -> Self {
        ReadLease { chunk: Chunk::whole(Arc::new(Region::Host(HostRegion::of_bytes(bytes)))), _guard: None }
    }
}

impl WriteLease {
    pub(crate) fn chunk(&self) -> &Chunk {
        &self.chunk
    }

    pub(crate) fn key(&self) -> BufKey {
        key(&self.state, self.chunk.offset(), self.chunk.len())
    }
}

/// Device memory may still be copied when its operation is over, at the end of an endpoint; so its share goes with the chunk.
fn hold(chunk: Chunk, guard: BorrowGuard) -> (Chunk, Option<BorrowGuard>) {
    if chunk.device().is_some() { (chunk.held_by(Arc::new(guard)), None) } else { (chunk, Some(guard)) }
}

fn key(state: &Arc<BorrowState>, offset: u64, len: u64) -> BufKey {
    BufKey { state: Arc::clone(state), offset, len }
}

/// A range that may lie outside its buffer; that shows when it is used.
#[derive(Debug, Clone)]
pub(crate) struct View {
    pub region: Arc<Region>,
    pub state: Arc<BorrowState>,
    /// The buffer's part of the region, and the range within it.
    pub start: u64,
    pub size: u64,
    pub offset: u64,
    pub len: u64,
}

impl View {
    pub(crate) fn chunk(&self) -> Result<Chunk> {
        let View { offset, len, size, start, .. } = *self;
        let inside = offset.checked_add(len).is_some_and(|end| end <= size);
        let chunk = if inside { Chunk::whole(Arc::clone(&self.region)).sub(start + offset, len) } else { None };
        chunk.ok_or(Error::OutOfBounds { offset, len, size })
    }

    /// The chunk, of memory that is still there.
    fn live_chunk(&self) -> Result<Chunk> {
        let chunk = self.chunk()?;
        self.region.verify()?;
        Ok(chunk)
    }

    fn read_lease(&self) -> Result<ReadLease> {
        let (chunk, guard) = hold(self.live_chunk()?, BorrowGuard::new(&self.state, Use::Read)?);
        Ok(ReadLease { chunk, _guard: guard })
    }

    fn write_lease(&self) -> Result<WriteLease> {
        let chunk = self.live_chunk()?;
        if !chunk.is_writable() {
            return Err(read_only());
        }
        let (chunk, guard) = hold(chunk, BorrowGuard::new(&self.state, Use::Write)?);
        Ok(WriteLease { chunk, state: Arc::clone(&self.state), _guard: guard })
    }

    fn expose(&self, write: bool) -> Result<Chunk> {
        let chunk = self.live_chunk()?;
        if write && !chunk.is_writable() {
            return Err(read_only());
        }
        let guard = BorrowGuard::new(&self.state, if write { Use::ExposeWrite } else { Use::ExposeRead })?;
        Ok(chunk.held_by(Arc::new(guard)))
    }

    fn key(&self) -> BufKey {
        key(&self.state, self.start + self.offset, self.len)
    }
}

mod sealed {
    use super::View;

    pub trait Viewed {
        #[doc(hidden)]
        #[allow(private_interfaces)]
        fn view(&self) -> View;
    }
}
use sealed::Viewed;

macro_rules! viewed {
    ($($type:ty: |$this:ident| $view:expr;)*) => {
        $(impl Viewed for $type {
            #[allow(private_interfaces)]
            fn view(&self) -> View {
                let $this = self;
                $view
            }
        })*
    };
}

viewed! {
    GpuBuf: |this| this.whole_view();
    &GpuBuf: |this| this.whole_view();
    &mut GpuBuf: |this| this.whole_view();
    GpuSlice: |this| this.view.clone();
    &GpuSlice: |this| this.view.clone();
    GpuSliceMut: |this| this.view.clone();
    &GpuSliceMut: |this| this.view.clone();
    &mut GpuSliceMut: |this| this.view.clone();
}

/// Anything that is memory of a kind.
pub trait Memory: Viewed {
    /// Where the memory is.
    fn memory_kind(&self) -> MemKind {
        self.view().region.kind()
    }
}

impl<T: Viewed> Memory for T {}

/// What can be sent or written from: `&GpuBuf`, `GpuSlice`, and the mutable ones.
pub trait Source: Viewed {
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn read_lease(&self) -> Result<ReadLease> {
        self.view().read_lease()
    }

    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn expose(&self, write: bool) -> Result<Chunk> {
        self.view().expose(write)
    }
}

impl Source for &GpuBuf {}
impl Source for &mut GpuBuf {}
impl Source for GpuSlice {}
impl Source for &GpuSlice {}
impl Source for GpuSliceMut {}
impl Source for &GpuSliceMut {}

/// What can be received or read into: `&mut GpuBuf` and `GpuSliceMut`.
pub trait Dest: Viewed {
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn write_lease(&self) -> Result<WriteLease> {
        self.view().write_lease()
    }

    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn key(&self) -> BufKey {
        self.view().key()
    }
}

impl Dest for &mut GpuBuf {}
impl Dest for GpuSliceMut {}
impl Dest for &mut GpuSliceMut {}
