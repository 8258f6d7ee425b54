//! The driver: a tokio task that sleeps on the context's epoll instance.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::panic::AssertUnwindSafe;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, MissedTickBehavior};

use super::poller::{Poller, Ready};
use super::{Kicks, Reactor, SourceId, lock};
use crate::error::{Error, Result};

/// How long a source may stay unarmed with nobody driving it.
const REST: Duration = Duration::from_millis(2);

/// Descriptor of the epoll instance, as [`AsyncFd`] wants it.
struct Watched(Arc<Poller>);

impl AsRawFd for Watched {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// Tells the sources when the task is dropped, which happens when its runtime ends.
struct Abandon(Weak<Reactor>);

impl Drop for Abandon {
    fn drop(&mut self) {
        if let Some(reactor) = self.0.upgrade() {
            reactor.abandoned.store(true, Ordering::SeqCst);
            reactor.all().iter().for_each(|source| source.abandon());
        }
    }
}

pub(super) fn spawn(reactor: &Arc<Reactor>, tick: Duration) -> Result<()> {
    let missing = |what: &'static str| Error::Unsupported { what: what.into() };
    let runtime = tokio::runtime::Handle::try_current()
        .map_err(|_| missing("a context needs a tokio runtime: create it inside `#[tokio::main]` or `Runtime::enter`"))?;
    let poller = Arc::clone(&reactor.poller);
    // A runtime without I/O or time answers with a panic; there is no other way to ask it.
    let parts = std::panic::catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the descriptor belongs to the poller, which lives in `Watched` for as long as tokio watches it.
        let fd = unsafe { AsyncFd::register_with_interest(Watched(poller), Interest::READABLE) }.map_err(|e| e.into_parts().1)?;
        let mut ticker = tokio::time::interval_at(Instant::now() + tick, tick);
        ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Ok((fd, ticker))
    }));
    let (fd, ticker) = parts
        .map_err(|_| missing("the tokio runtime must have I/O and time enabled (`Builder::enable_all`)"))?
        .map_err(|e: std::io::Error| Error::io("watching the epoll instance", e))?;
    let weak = Arc::downgrade(reactor);
    let kicks = Arc::clone(&reactor.kicks);
    // Made here, since a task can be dropped before it was ever polled.
    let abandon = Abandon(Weak::clone(&weak));
    runtime.spawn(async move {
        let _abandon = abandon;
        drive(weak, fd, ticker, kicks).await;
    });
    Ok(())
}

async fn drive(weak: Weak<Reactor>, fd: AsyncFd<Watched>, mut ticker: tokio::time::Interval, kicks: Arc<Kicks>) {
    let mut ready: Vec<Ready> = Vec::new();
    let mut watching = false;
    // Lists that are swapped with the reactor's, so that a steady flow allocates nothing.
    let (mut kicked, mut resting) = (Vec::new(), Vec::new());
    loop {
        tokio::select! {
            guard = fd.readable() => {
                let Ok(mut guard) = guard else { return };
                let Some(reactor) = weak.upgrade() else { return };
                // Until it is empty: tokio watches for the edge only.
                loop {
                    ready.clear();
                    if let Err(error) = reactor.poller.poll(&mut ready) {
                        tracing::error!(%error, "the reactor cannot wait for its sockets");
                        return;
                    }
                    if ready.is_empty() {
                        break;
                    }
                    for event in &ready {
                        let (id, lane) = SourceId::parse(event.key);
                        if let Some(source) = reactor.get(id) {
                            source.on_ready(lane);
                        }
                    }
                }
                guard.clear_ready();
            }
            () = kicks.wake.notified() => {}
            () = tokio::time::sleep(REST), if watching => {}
            _ = ticker.tick() => {
                let Some(reactor) = weak.upgrade() else { return };
                let now = std::time::Instant::now();
                reactor.all().iter().for_each(|source| source.on_tick(now));
            }
        }
        let Some(reactor) = weak.upgrade() else { return };
        std::mem::swap(&mut kicked, &mut *lock(&kicks.list));
        for (id, lane) in kicked.drain(..) {
            if let Some(source) = reactor.get(id) {
                source.on_ready(lane);
            }
        }
        watching = rest(&reactor, watching, &mut resting);
        let again = !lock(&kicks.list).is_empty();
        drop(reactor);
        if again {
            // One connection has much to do: let the tasks run for which it does it.
            tokio::task::yield_now().await;
        }
    }
}

/// Puts to rest what nobody drives. Answers whether something is left to look after.
fn rest(reactor: &Reactor, was_watching: bool, list: &mut Vec<SourceId>) -> bool {
    // The first time round only starts the clock.
    if was_watching {
        std::mem::swap(list, &mut *lock(&reactor.watch));
    }
    for id in list.drain(..) {
        if reactor.get(id).is_some_and(|source| !source.rest()) {
            lock(&reactor.watch).push(id);
        }
    }
    let watch = lock(&reactor.watch);
    reactor.watching.store(!watch.is_empty(), Ordering::Release);
    !watch.is_empty()
}
