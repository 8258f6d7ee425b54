//! Changes of path, as a stream.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context as Task, Poll, Waker};

use futures_core::Stream;

use super::Handle;
use super::conn::Info;
use crate::error::Error;
use crate::path::PathEvent;
use crate::reactor::lock;
use crate::reactor::slab::Waiters;

/// Events that are kept for streams that come later.
const KEEP: usize = 64;

/// What has happened to the paths of an endpoint.
#[derive(Debug)]
pub(crate) struct Log {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    events: VecDeque<PathEvent>,
    /// Number of the first in `events`.
    base: u64,
    ended: bool,
    waiters: Waiters,
}

impl Log {
    pub(crate) fn new(info: &Info) -> Self {
        let log = Log { inner: Mutex::default() };
        log.push(PathEvent::Selected { kind: info.kind, reason: info.reason.clone() }, false);
        log
    }

    pub(crate) fn ended(&self, why: &Error) {
        self.push(PathEvent::Ended { reason: why.to_string() }, true);
    }

    fn push(&self, event: PathEvent, last: bool) {
        let wakers = {
            let mut inner = lock(&self.inner);
            inner.events.push_back(event);
            inner.ended |= last;
            if inner.events.len() > KEEP {
                inner.events.pop_front();
                inner.base += 1;
            }
            inner.waiters.take()
        };
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// The paths of an endpoint, from the first on. Ends after [`PathEvent::Ended`]. Made by
/// [`GpuEndpoint::path_events`](super::GpuEndpoint::path_events).
///
/// Cancel safe: dropping it, or a `next()` on it, loses nothing that another stream would not see.
pub struct PathEvents {
    handle: Arc<Handle>,
    next: u64,
    place: Option<u64>,
}

impl Drop for PathEvents {
    fn drop(&mut self) {
        let waker = lock(&self.handle.conn.log.inner).waiters.leave(self.place);
        drop(waker);
    }
}

impl PathEvents {
    pub(crate) fn new(handle: &Arc<Handle>) -> Self {
        PathEvents { handle: Arc::clone(handle), next: 0, place: None }
    }
}

impl Stream for PathEvents {
    type Item = PathEvent;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Task<'_>) -> Poll<Option<PathEvent>> {
        let handle = Arc::clone(&self.handle);
        let mut inner = lock(&handle.conn.log.inner);
        let index = self.next.saturating_sub(inner.base);
        match inner.events.get(index as usize) {
            Some(event) => {
                self.next = inner.base + index + 1;
                Poll::Ready(Some(event.clone()))
            }
            None if inner.ended => Poll::Ready(None),
            None => {
                let old = inner.waiters.wait(&mut self.place, cx.waker());
                drop(inner);
                drop(old);
                Poll::Pending
            }
        }
    }
}
