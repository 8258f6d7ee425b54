//! Host bytes as Rust slices, behind guards.

use std::fmt;
use std::ops::{Deref, DerefMut};

use super::Chunk;
use super::borrow::BorrowGuard;

macro_rules! guard {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        pub struct $name {
            pub(super) chunk: Chunk,
            pub(super) _guard: BorrowGuard,
        }

        impl Deref for $name {
            type Target = [u8];

            fn deref(&self) -> &[u8] {
                // SAFETY: the chunk is in range and alive, and the guard's share of the borrow state excludes every writer.
                unsafe { std::slice::from_raw_parts(self.chunk.as_ptr(), self.chunk.len() as usize) }
            }
        }

        impl AsRef<[u8]> for $name {
            fn as_ref(&self) -> &[u8] {
                self
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name)).field("len", &self.chunk.len()).finish()
            }
        }
    };
}

guard! {
    /// A buffer's bytes, for reading. While it lives, nothing writes them. Made by [`GpuBuf::map`](super::GpuBuf::map).
    MapGuard
}

guard! {
    /// A buffer's bytes, for writing. While it lives, nothing else uses them. Made by [`GpuBuf::map_mut`](super::GpuBuf::map_mut).
    MapMutGuard
}

guard! {
    /// A buffer turned into a plain owner of its bytes. Made by [`GpuBuf::into_owner`](super::GpuBuf::into_owner).
    OwnedMap
}

impl DerefMut for MapMutGuard {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: the chunk is in range, alive and writable, and the guard's share of the borrow state excludes everybody else.
        unsafe { std::slice::from_raw_parts_mut(self.chunk.as_ptr(), self.chunk.len() as usize) }
    }
}
