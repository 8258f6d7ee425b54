//! Memory that a peer exposed, and the lease that keeps it exposed.

use std::fmt;
use std::ops::{BitOr, Bound, RangeBounds};
use std::sync::{Arc, Weak};

use bytes::Bytes;

use super::conn::Conn;
use crate::error::{Error, Result};
use crate::memory::MemKind;
use crate::proto::initiator::RemoteRange;
use crate::proto::target::Rights;
use crate::wire::remote::Descriptor;

/// What a peer may do with exposed memory. Rights are combined with `|`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Access(u8);

impl Access {
    /// [`read_remote`](super::GpuEndpoint::read_remote).
    pub const READ: Access = Access(1);
    /// [`write_remote`](super::GpuEndpoint::write_remote).
    pub const WRITE: Access = Access(2);
    /// [`fetch_add`](super::GpuEndpoint::fetch_add) and [`compare_swap`](super::GpuEndpoint::compare_swap).
    pub const ATOMIC: Access = Access(4);
    /// All of them.
    pub const ALL: Access = Access(7);

    /// Whether it includes `other`.
    #[must_use]
    pub fn contains(self, other: Access) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether the peer can change the memory.
    pub(crate) fn changes(self) -> bool {
        self.0 & (Access::WRITE.0 | Access::ATOMIC.0) != 0
    }

    pub(crate) fn rights(self) -> Rights {
        Rights { read: self.contains(Access::READ), write: self.contains(Access::WRITE), atomic: self.contains(Access::ATOMIC) }
    }

    pub(crate) fn bits(self) -> u8 {
        self.0
    }
}

impl BitOr for Access {
    type Output = Access;

    fn bitor(self, other: Access) -> Access {
        Access(self.0 | other.0)
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [(Access::READ, "READ"), (Access::WRITE, "WRITE"), (Access::ATOMIC, "ATOMIC")];
        let names: Vec<_> = names.iter().filter(|(right, _)| self.contains(*right)).map(|(_, name)| *name).collect();
        f.write_str(if names.is_empty() { "none".into() } else { names.join(" | ") }.as_str())
    }
}

/// Keeps memory exposed.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) conn: Weak<Conn>,
    pub(crate) index: u32,
    /// Its full name: the number may be in use for another exposure by now.
    pub(crate) exposure: u64,
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(conn) = self.conn.upgrade() {
            conn.revoke(self.index, self.exposure);
        }
    }
}

/// A range of memory that one side of an endpoint exposed to the other.
///
/// On the side that exposed it, it is the *lease*: while it or a clone or slice of it lives, the peer has access; when the last is
/// dropped, the exposure is revoked, and nothing of the peer's lands in the memory any more. On the other side, made with
/// [`from_bytes`](Self::from_bytes) from what [`to_bytes`](Self::to_bytes) gave, it names the memory and holds nothing.
///
/// It belongs to the endpoint on which it was exposed; with any other endpoint it is refused. The bytes carry a secret token: who has them
/// and that endpoint has access.
#[derive(Clone)]
pub struct RemoteBuf {
    pub(crate) descriptor: Descriptor,
    pub(crate) lease: Option<Arc<Lease>>,
}

/// Eight bytes in exposed memory, for atomic operations. Made by [`RemoteBuf::at`].
#[derive(Clone, Debug)]
pub struct RemoteWord {
    pub(crate) buf: RemoteBuf,
}

impl RemoteBuf {
    /// Length of the range in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.descriptor.len
    }

    /// Whether the range has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.descriptor.len == 0
    }

    /// What the peer may do.
    #[must_use]
    pub fn access(&self) -> Access {
        Access(self.descriptor.access)
    }

    /// Where the memory is, at the side that exposed it.
    #[must_use]
    pub fn mem(&self) -> MemKind {
        match self.descriptor.place {
            0 => MemKind::Host,
            n => MemKind::Cuda(n - 1),
        }
    }

    /// A range of the range, in bytes.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`].
    pub fn slice(&self, range: impl RangeBounds<u64>) -> Result<RemoteBuf> {
        let size = self.descriptor.len;
        let start = match range.start_bound() {
            Bound::Included(&start) => start,
            Bound::Excluded(&start) => start.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(&end) => end.saturating_add(1),
            Bound::Excluded(&end) => end,
            Bound::Unbounded => size,
        };
        if start > end || end > size {
            return Err(Error::OutOfBounds { offset: start, len: end.saturating_sub(start), size });
        }
        let descriptor = Descriptor { offset: self.descriptor.offset + start, len: end - start, ..self.descriptor };
        Ok(RemoteBuf { descriptor, lease: self.lease.clone() })
    }

    /// The eight bytes from `offset` on.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`]; [`Error::InvalidArgument`] if `offset` is not a multiple of eight within the exposed memory.
    pub fn at(&self, offset: u64) -> Result<RemoteWord> {
        let buf = self.slice(offset..offset.saturating_add(8))?;
        if buf.descriptor.offset % 8 != 0 {
            return Err(Error::invalid("an atomic operation needs an offset that is a multiple of 8 bytes"));
        }
        Ok(RemoteWord { buf })
    }

    /// The descriptor, 64 bytes, to be given to the peer by any way.
    #[must_use]
    pub fn to_bytes(&self) -> Bytes {
        Bytes::copy_from_slice(&self.descriptor.encode())
    }

    /// Reads a descriptor.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for bytes that are none. That a descriptor can be read says nothing of the access: the side that
    /// exposed the memory checks every operation.
    pub fn from_bytes(bytes: &[u8]) -> Result<RemoteBuf> {
        let descriptor = Descriptor::decode(bytes)
            .map_err(|why| Error::invalid(format!("these {} bytes are no descriptor of exposed memory: {why}", bytes.len())))?;
        Ok(RemoteBuf { descriptor, lease: None })
    }

    /// Ends the exposure now, whoever else holds the lease. On the other side it does nothing.
    pub fn revoke(&self) {
        if let Some(conn) = self.lease.as_ref().and_then(|lease| lease.conn.upgrade()) {
            if let Some(lease) = &self.lease {
                conn.revoke(lease.index, lease.exposure);
            }
        }
    }

    /// The range as the protocol wants it, if it is one of `conn`'s peer.
    pub(crate) fn range(&self, conn: &Conn, need: Access) -> Result<RemoteRange> {
        let Descriptor { session, by_acceptor, exposure, token, offset, len, .. } = self.descriptor;
        if session != conn.info.session {
            return Err(Error::denied("the RemoteBuf belongs to another endpoint"));
        }
        if by_acceptor == conn.info.acceptor {
            return Err(Error::denied("the RemoteBuf is this side's own; give its to_bytes() to the peer"));
        }
        if !self.access().contains(need) {
            return Err(Error::denied(format!("the RemoteBuf grants {:?}, and {need:?} is needed", self.access())));
        }
        Ok(RemoteRange { exposure, token, offset, len })
    }
}

impl fmt::Debug for RemoteBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the token, which is a secret.
        f.debug_struct("RemoteBuf")
            .field("mem", &self.mem())
            .field("len", &self.len())
            .field("access", &self.access())
            .field("is_lease", &self.lease.is_some())
            .finish_non_exhaustive()
    }
}
