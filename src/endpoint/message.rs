//! A message that has been announced, and whose buffer is still to be chosen.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as Task, Poll};

use bytes::Bytes;

use super::Handle;
use super::futures::{Recv, poll_operation};
use super::operation::{Operation, Request};
use crate::error::{Error, Result};
use crate::memory::{self, Dest, GpuBuf, MemKind};
use crate::proto::Outcome;

/// A message of known size and tag. Its bytes may still be at the sender.
///
/// Dropping it throws the message away; its sender's `send` ends well.
#[derive(Debug)]
pub struct Message {
    handle: Arc<Handle>,
    seq: u64,
    len: u64,
    tag: u64,
    taken: bool,
}

impl Message {
    pub(crate) fn new(handle: &Arc<Handle>, outcome: &Outcome) -> Self {
        Message { handle: Arc::clone(handle), seq: outcome.seq, len: outcome.bytes, tag: outcome.tag, taken: false }
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

    /// The tag that its sender gave it, 0 without one.
    #[must_use]
    pub fn tag(&self) -> u64 {
        self.tag
    }

    /// Receives it into `dest`.
    ///
    /// # Errors
    ///
    /// [`Error::Truncated`] if it does not fit, [`Error::Busy`] if the buffer is in use; the message can then be received by another
    /// receive of the endpoint.
    ///
    /// # Cancel safety
    ///
    /// As for [`Recv`]: a message whose receive is dropped goes back to its place in the order.
    pub fn recv_into(mut self, dest: impl Dest) -> Recv {
        let request = dest.write_lease().map(|lease| {
            self.taken = true;
            Request::Claimed { lease, seq: self.seq }
        });
        if request.is_err() {
            self.put_back();
        }
        Recv::new(Operation::new(&self.handle, request))
    }

    /// Receives it into memory of its own.
    pub fn into_bytes(mut self) -> IntoBytes {
        let made = memory::alloc(MemKind::Host, self.len).and_then(|mut buf| Ok((Dest::write_lease(&&mut buf)?, buf)));
        let (request, buf) = match made {
            Ok((lease, buf)) => {
                self.taken = true;
                (Ok(Request::Claimed { lease, seq: self.seq }), Some(buf))
            }
            Err(error) => {
                self.put_back();
                (Err(error), None)
            }
        };
        IntoBytes { op: Operation::new(&self.handle, request), buf, tag: self.tag }
    }

    /// Throws the message away, as dropping it does.
    pub fn discard(self) {}

    fn put_back(&mut self) {
        if !std::mem::replace(&mut self.taken, true) {
            self.handle.conn.with(|state| state.proto.unclaim(self.seq));
        }
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        if !self.taken {
            self.handle.conn.with(|state| state.proto.discard(self.seq));
            self.handle.conn.transmit();
        }
    }
}

/// Receives a message into memory of its own. Made by [`Message::into_bytes`].
///
/// # Cancel safety
///
/// Cancel safe: the message goes back to its place in the order.
#[must_use = "futures do nothing unless polled"]
pub struct IntoBytes {
    op: Operation,
    buf: Option<GpuBuf>,
    tag: u64,
}

impl std::fmt::Debug for IntoBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IntoBytes").finish_non_exhaustive()
    }
}

impl IntoBytes {
    pub(crate) fn poll_tagged(mut self: Pin<&mut Self>, cx: &mut Task<'_>) -> Poll<Result<(Bytes, u64)>> {
        match poll_operation(&mut self.op, cx) {
            Poll::Ready(Ok(_)) => {
                let tag = self.tag;
                let buf = self.buf.take().ok_or_else(|| Error::invalid("the future was polled after it had ended"));
                Poll::Ready(buf.and_then(|buf| Ok((Bytes::from_owner(buf.into_owner()?), tag))))
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl Future for IntoBytes {
    type Output = Result<Bytes>;

    fn poll(self: Pin<&mut Self>, cx: &mut Task<'_>) -> Poll<Self::Output> {
        self.poll_tagged(cx).map_ok(|(bytes, _)| bytes)
    }
}
