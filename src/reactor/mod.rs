//! The reactor: one per context. It sleeps on the descriptors of all connections, ticks their timers, and puts those to rest that no
//! future drives any more.
//!
//! Connections are driven from three sides: by the `poll` of whoever waits on them (inline, without a wake-up), by the driver task
//! below when a descriptor that was armed becomes ready, and under [`Spin::Thread`](crate::Spin::Thread) by a thread of its own.

mod driver;
pub(crate) mod poller;
pub(crate) mod slab;
pub(crate) mod spin;

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::error::Result;
use poller::Poller;
use slab::Slab;
use spin::Spin;

/// What the reactor drives: a connection. It knows nothing of the transport behind it.
pub(crate) trait Source: Send + Sync {
    /// A descriptor that was armed is ready.
    fn on_ready(&self, lane: usize);
    /// Time has passed.
    fn on_tick(&self, now: Instant);
    /// Called every few milliseconds while nothing is armed. `true`: the source is armed now, or over, and needs no more calls.
    fn rest(&self) -> bool;
    /// One round of progress, for the spinning thread.
    fn progress(&self);
    /// The runtime that ran the driver is gone.
    fn abandon(&self);
}

/// Names a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SourceId(u64);

const LANE_SHIFT: u32 = 24;
const LANE_MASK: u64 = 0xff << LANE_SHIFT;

impl SourceId {
    fn key(self, lane: usize) -> u64 {
        self.0 | (lane as u64) << LANE_SHIFT & LANE_MASK
    }

    fn parse(key: u64) -> (Self, usize) {
        (SourceId(key & !LANE_MASK), ((key & LANE_MASK) >> LANE_SHIFT) as usize)
    }
}

pub(crate) struct Reactor {
    poller: Arc<Poller>,
    sources: Mutex<Slab<Arc<dyn Source>>>,
    /// Counts changes of `sources`.
    version: AtomicU64,
    /// Sources that are to be put to rest, and whether the driver has been told.
    watch: Mutex<Vec<SourceId>>,
    watching: AtomicBool,
    kicks: Arc<Kicks>,
    /// The driver's runtime has ended.
    abandoned: AtomicBool,
    pub(crate) spin: Spin,
    thread: Mutex<Option<std::thread::Thread>>,
}

/// Sources that became ready without a descriptor. Apart from the reactor, so that whoever kicks, a thread of a driver's for instance, never
/// holds the reactor itself.
#[derive(Default)]
pub(crate) struct Kicks {
    list: Mutex<Vec<(SourceId, usize)>>,
    wake: Notify,
}

impl Kicks {
    /// Calls [`Source::on_ready`] from the driver.
    pub(crate) fn kick(&self, id: SourceId, lane: usize) {
        lock(&self.list).push((id, lane));
        self.wake.notify_one();
    }
}

/// A poisoned lock only says that a thread panicked elsewhere; what it protects is consistent between any two of our statements.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Reactor {
    /// Starts the driver task on the current tokio runtime, and the spinning thread if one is wanted.
    pub(crate) fn start(spin: Spin, core: Option<usize>, tick: Duration) -> Result<Arc<Self>> {
        let reactor = Arc::new(Reactor {
            poller: Arc::new(Poller::new()?),
            sources: Mutex::default(),
            version: AtomicU64::new(0),
            watch: Mutex::default(),
            watching: AtomicBool::new(false),
            kicks: Arc::default(),
            abandoned: AtomicBool::new(false),
            spin,
            thread: Mutex::new(None),
        });
        driver::spawn(&reactor, tick)?;
        if spin == Spin::Thread {
            let thread = spin::spawn(Arc::downgrade(&reactor), core)?;
            *lock(&reactor.thread) = Some(thread);
        }
        Ok(reactor)
    }

    pub(crate) fn add(&self, source: Arc<dyn Source>) -> SourceId {
        let id = SourceId(lock(&self.sources).insert(source));
        self.version.fetch_add(1, Ordering::Release);
        if let Some(thread) = &*lock(&self.thread) {
            thread.unpark();
        }
        id
    }

    pub(crate) fn remove(&self, id: SourceId) {
        // Dropped after the lock is free: it may be the last reference.
        let source = lock(&self.sources).remove(id.0);
        self.version.fetch_add(1, Ordering::Release);
        drop(source);
    }

    fn get(&self, id: SourceId) -> Option<Arc<dyn Source>> {
        lock(&self.sources).get(id.0).cloned()
    }

    fn all(&self) -> Vec<Arc<dyn Source>> {
        lock(&self.sources).iter_mut().map(|(_, source)| Arc::clone(source)).collect()
    }

    /// Whether nothing drives the sources any more. Looked at after a source was added, so that none is forgotten in between.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::SeqCst)
    }

    /// How many connections there are.
    pub(crate) fn len(&self) -> usize {
        lock(&self.sources).len()
    }

    pub(crate) fn register(&self, fd: BorrowedFd<'_>, id: SourceId, lane: usize) -> Result<()> {
        self.poller.add(fd, id.key(lane))
    }

    pub(crate) fn arm(&self, fd: BorrowedFd<'_>, id: SourceId, lane: usize, read: bool, write: bool) -> Result<()> {
        self.poller.arm(fd, id.key(lane), read, write)
    }

    pub(crate) fn deregister(&self, fd: BorrowedFd<'_>) {
        self.poller.remove(fd);
    }

    /// Asks for [`Source::rest`] in a few milliseconds. Each source is asked for once at a time.
    pub(crate) fn watch(&self, id: SourceId) {
        let first = {
            // Under the lock, so that the driver does not think the list empty in between.
            let mut watch = lock(&self.watch);
            watch.push(id);
            !self.watching.swap(true, Ordering::AcqRel)
        };
        if first {
            self.kicks.wake.notify_one();
        }
    }

    /// Calls [`Source::on_ready`] from the driver.
    pub(crate) fn kick(&self, id: SourceId, lane: usize) {
        self.kicks.kick(id, lane);
    }

    pub(crate) fn kicks(&self) -> &Arc<Kicks> {
        &self.kicks
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        // The driver sees that it is alone, and ends; so does the thread.
        self.kicks.wake.notify_one();
        if let Some(thread) = &*lock(&self.thread) {
            thread.unpark();
        }
    }
}
