//! Memory that a user owns and hands over.

use bytes::Bytes;

use super::Region;
use super::host::HostRegion;
use crate::error::Result;

pub(crate) mod sealed {
    pub trait Sealed {}
    impl Sealed for Vec<u8> {}
    impl Sealed for Box<[u8]> {}
    impl Sealed for bytes::Bytes {}
    impl Sealed for &'static [u8] {}
}

/// Memory that a user owns and can hand over to [`Context::register`](crate::Context::register).
///
/// On the host: `Vec<u8>` and `Box<[u8]>`; for reading only, `Bytes` and `&'static [u8]`. On a GPU, with the feature `cudarc`:
/// `CudaSlice<T>`, `Arc<CudaSlice<T>>`, and a range of one, `(Arc<CudaSlice<T>>, Range<usize>)` in elements.
pub trait OwnedMemory: sealed::Sealed {
    #[doc(hidden)]
    #[allow(private_interfaces)]
    fn into_region(self) -> Result<Region>;
}

impl OwnedMemory for Vec<u8> {
    #[allow(private_interfaces)]
    fn into_region(self) -> Result<Region> {
        Ok(Region::Host(HostRegion::of_vec(self)))
    }
}

impl OwnedMemory for Box<[u8]> {
    #[allow(private_interfaces)]
    fn into_region(self) -> Result<Region> {
        self.into_vec().into_region()
    }
}

impl OwnedMemory for Bytes {
    #[allow(private_interfaces)]
    fn into_region(self) -> Result<Region> {
        Ok(Region::Host(HostRegion::of_bytes(self)))
    }
}

impl OwnedMemory for &'static [u8] {
    #[allow(private_interfaces)]
    fn into_region(self) -> Result<Region> {
        Ok(Region::Host(HostRegion::of_static(self)))
    }
}
