//! The named futures of an endpoint.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context as Task, Poll};
use std::time::Duration;

use bytes::Bytes;
use pin_project::pin_project;

use super::message::Message;
use super::operation::{Finished, Operation, Request};
use crate::error::{Error, Result};
use crate::proto::initiator::Work;

/// What really happened to the bytes of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Receipt {
    /// The path that they took.
    pub path: crate::path::PathKind,
    /// How many there were.
    pub bytes: u64,
    /// How many of them passed through host memory that is neither source nor destination.
    pub staged_bytes: u64,
    /// From the first poll of the future until it was seen to be complete.
    pub elapsed: Duration,
    /// Index of the NIC that moved them, as listed by `gpusock info`, if one did.
    pub nic: Option<u32>,
    /// The GPU that moved them, if one did.
    pub gpu: Option<u32>,
}

/// A message that was received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Received {
    /// Length of the message in bytes; what lies behind it in the buffer is unchanged.
    pub len: u64,
    /// The tag that its sender gave it, 0 without one.
    pub tag: u64,
    /// How it came.
    pub receipt: Receipt,
}

macro_rules! operation_future {
    ($(#[$doc:meta])* $name:ident -> $output:ty, |$op:ident, $finished:ident| $map:expr) => {
        $(#[$doc])*
        #[pin_project]
        #[must_use = "futures do nothing unless polled"]
        pub struct $name {
            op: Operation,
        }

        impl $name {
            pub(crate) fn new(op: Operation) -> Self {
                $name { op }
            }

            /// Limits the time from the first poll on. When it has passed, the operation is asked to stop and the future ends with
            /// [`Error::Timeout`]; the memory stays in use until the transport has let go of it.
            pub fn timeout(mut self, after: Duration) -> Self {
                self.op.set_timeout(after);
                self
            }

            /// Asks the operation to stop. The returned future ends when the transport has let go of its memory: with
            /// [`Error::Cancelled`] if it had no effect, and with its own result if it was too late.
            pub fn cancel(self) -> Cancel<Self> {
                Cancel { op: self, asked: false }
            }
        }

        impl Future for $name {
            type Output = Result<$output>;

            fn poll(self: Pin<&mut Self>, cx: &mut Task<'_>) -> Poll<Self::Output> {
                let $op = self.project().op;
                $op.poll(cx).map_ok(|$finished| $map)
            }
        }

        impl Cancellable for $name {
            #[allow(private_interfaces)]
            fn operation(&mut self) -> &mut Operation {
                &mut self.op
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($name)).finish_non_exhaustive()
            }
        }
    };
}

mod sealed {
    use super::Operation;

    /// Implemented by every future that stands for an operation.
    pub trait Cancellable {
        #[allow(private_interfaces)]
        fn operation(&mut self) -> &mut Operation;
    }
}
use sealed::Cancellable;

operation_future! {
    /// Sends one message. Made by [`GpuEndpoint::send`](super::GpuEndpoint::send).
    ///
    /// Ends when the memory may be used again: for a short message when it was handed to the transport, for one above the eager limit
    /// when the peer has received it. [`GpuEndpoint::flush`](super::GpuEndpoint::flush) tells when the peer has a short one.
    ///
    /// # Ordering
    ///
    /// Messages of an endpoint are matched in the order in which their futures were first polled.
    ///
    /// # Cancel safety
    ///
    /// Dropped before the first poll, nothing is sent. Dropped later, the message is sent all the same, and its memory is held until
    /// then.
    Send -> Receipt, |op, done| op.receipt(&done)
}

operation_future! {
    /// Receives one message. Made by [`GpuEndpoint::recv`](super::GpuEndpoint::recv).
    ///
    /// # Errors
    ///
    /// [`Error::Truncated`] if the next message does not fit; it can still be received. [`Error::Busy`] if the buffer is in use.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: no message is lost. If a message had been matched when the future was dropped, its transfer finishes into the
    /// buffer, which stays busy, and the next receive gets the message. A receive into the very same buffer takes it over in place, so
    /// `recv(&mut buf)` in a `select!` loop works as expected. It must be that message's turn, though: while a message that the new receive
    /// accepts as well waits ahead of it, which takes receives of different tags, the buffer is [`Error::Busy`], and another buffer is needed.
    Recv -> Received, |op, done| Received { len: done.outcome.bytes, tag: done.outcome.tag, receipt: op.receipt(&done) }
}

operation_future! {
    /// Waits for the next message and answers its size and tag, before a buffer is chosen. Made by
    /// [`GpuEndpoint::incoming`](super::GpuEndpoint::incoming).
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: a message that the dropped future had taken goes back to its place in the order.
    Incoming -> Message, |op, done| Message::new(op.handle(), &done.outcome)
}

operation_future! {
    /// Writes into the peer's memory. Made by [`GpuEndpoint::write_remote`](super::GpuEndpoint::write_remote) and
    /// [`write_remote_vectored`](super::GpuEndpoint::write_remote_vectored).
    ///
    /// Ends when all bytes are in place at the target, and the source may be used again.
    ///
    /// # Ordering
    ///
    /// The bytes are visible at the target before any message or notification that this endpoint issues later is delivered.
    ///
    /// # Cancel safety
    ///
    /// Dropped before the first poll, nothing is written. Dropped later, the write goes on, with its memory held. After a timeout or
    /// `cancel`, bytes that have landed stay; the target has acknowledged that nothing more will land when `cancel` ends.
    WriteRemote -> Receipt, |op, done| op.receipt(&done)
}

operation_future! {
    /// Reads from the peer's memory. Made by [`GpuEndpoint::read_remote`](super::GpuEndpoint::read_remote).
    ///
    /// # Ordering
    ///
    /// It sees every write that this endpoint issued earlier. Bytes that the target's own program changes meanwhile are seen as old
    /// or new, each byte for itself.
    ///
    /// # Cancel safety
    ///
    /// Dropped before the first poll, nothing is read. Dropped later, the transfer finishes into the destination, which stays busy
    /// until then.
    ReadRemote -> Receipt, |op, done| op.receipt(&done)
}

operation_future! {
    /// Adds to eight bytes of the peer's memory, atomically, and answers the former value. Made by
    /// [`GpuEndpoint::fetch_add`](super::GpuEndpoint::fetch_add).
    ///
    /// # Cancel safety
    ///
    /// **Not** cancel safe: dropped after the first poll, the addition happens all the same.
    FetchAdd -> u64, |_op, done| done.outcome.value
}

operation_future! {
    /// Replaces eight bytes of the peer's memory if they hold an expected value, atomically, and answers the former value. Made by
    /// [`GpuEndpoint::compare_swap`](super::GpuEndpoint::compare_swap).
    ///
    /// # Cancel safety
    ///
    /// **Not** cancel safe: dropped after the first poll, the exchange happens all the same.
    CompareSwap -> u64, |_op, done| done.outcome.value
}

operation_future! {
    /// Waits for notifications of a tag and takes them. Made by [`GpuEndpoint::notified`](super::GpuEndpoint::notified).
    ///
    /// When it ends, the bytes of the writes that carried the notifications are visible.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: notifications that a dropped future had taken are given back.
    Notified -> (), |_op, _done| ()
}

operation_future! {
    /// Waits until everything issued before has reached the peer's endpoint. Made by
    /// [`GpuEndpoint::flush`](super::GpuEndpoint::flush).
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    Flush -> (), |_op, _done| ()
}

impl Send {
    /// A number that travels with the message. Without it, the tag is 0.
    pub fn tag(mut self, tag: u64) -> Self {
        if let Some(Request::Send { tag: slot, .. }) = self.op.request_mut() {
            *slot = tag;
        }
        self
    }
}

impl Recv {
    /// Accepts only messages with this tag. Without it, the next message is taken whatever its tag.
    pub fn tag(mut self, only: u64) -> Self {
        if let Some(Request::Recv { tag, .. } | Request::RecvBusy { tag, .. }) = self.op.request_mut() {
            *tag = Some(only);
        }
        self
    }
}

impl WriteRemote {
    /// Delivers a notification with this tag to the target when all bytes of this write, and of every earlier one of this endpoint,
    /// are in place.
    ///
    /// At the target, up to 65,536 tags may have notifications that nobody has waited for; more end the connection. Counts have no limit.
    pub fn notify(mut self, tag: u64) -> Self {
        if let Some(Request::Work { work: Work::Write { notify, .. }, .. }) = self.op.request_mut() {
            *notify = Some(tag);
        }
        self
    }
}

/// Ends when the transport has let go of an operation's memory. Made by the `cancel` method of every operation.
///
/// # Cancel safety
///
/// Dropping it is like dropping the operation.
#[pin_project]
#[must_use = "futures do nothing unless polled"]
#[derive(Debug)]
pub struct Cancel<F> {
    #[pin]
    op: F,
    asked: bool,
}

impl<F: Future + Cancellable + Unpin> Future for Cancel<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Task<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        if !std::mem::replace(this.asked, true) {
            this.op.operation().cancel();
        }
        this.op.poll(cx)
    }
}

/// Receives the next message as [`Bytes`]. Made by [`GpuEndpoint::recv_bytes`](super::GpuEndpoint::recv_bytes).
///
/// # Cancel safety
///
/// Cancel safe, like [`Incoming`]: no message is lost.
#[pin_project]
#[must_use = "futures do nothing unless polled"]
#[derive(Debug)]
pub struct RecvBytes {
    incoming: Incoming,
    body: Option<super::message::IntoBytes>,
}

impl RecvBytes {
    pub(crate) fn new(incoming: Incoming) -> Self {
        RecvBytes { incoming, body: None }
    }
}

impl Future for RecvBytes {
    type Output = Result<(Bytes, u64)>;

    fn poll(self: Pin<&mut Self>, cx: &mut Task<'_>) -> Poll<Self::Output> {
        let this = self.project();
        loop {
            if let Some(body) = this.body {
                return Pin::new(body).poll_tagged(cx);
            }
            match Pin::new(&mut *this.incoming).poll(cx) {
                Poll::Ready(Ok(message)) => *this.body = Some(message.into_bytes()),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}

/// Why an endpoint ended. Made by [`GpuEndpoint::closed`](super::GpuEndpoint::closed).
///
/// # Cancel safety
///
/// Cancel safe.
#[must_use = "futures do nothing unless polled"]
pub struct Closed {
    pub(crate) handle: std::sync::Arc<super::Handle>,
    pub(crate) place: Option<u64>,
}

impl Drop for Closed {
    fn drop(&mut self) {
        let waker = self.place.and_then(|place| self.handle.conn.lock().mourners.leave(Some(place)));
        drop(waker);
    }
}

impl Future for Closed {
    type Output = Error;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Task<'_>) -> Poll<Error> {
        let handle = std::sync::Arc::clone(&self.handle);
        let mut state = handle.conn.lock();
        if let Some(error) = &state.ended {
            return Poll::Ready(error.clone());
        }
        let old = state.mourners.wait(&mut self.place, cx.waker());
        drop(state);
        drop(old);
        handle.conn.arm();
        Poll::Pending
    }
}

/// Closes an endpoint in good order. Made by [`GpuEndpoint::close`](super::GpuEndpoint::close).
///
/// # Cancel safety
///
/// Dropped after the first poll, the endpoint closes all the same.
#[must_use = "futures do nothing unless polled"]
pub struct Close {
    pub(crate) closed: Closed,
    pub(crate) begun: bool,
}

impl Future for Close {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Task<'_>) -> Poll<Result<()>> {
        if !std::mem::replace(&mut self.begun, true) {
            self.closed.handle.conn.close();
        }
        Pin::new(&mut self.closed).poll(cx).map(|why| match why {
            Error::Closed => Ok(()),
            error => Err(error),
        })
    }
}

impl std::fmt::Debug for Closed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Closed").field(&self.handle).finish()
    }
}

impl std::fmt::Debug for Close {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Close").field("begun", &self.begun).finish_non_exhaustive()
    }
}

/// Used by the futures of other modules.
pub(crate) fn poll_operation(op: &mut Operation, cx: &mut Task<'_>) -> Poll<Result<Finished>> {
    op.poll(cx)
}
