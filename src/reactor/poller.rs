//! The descriptors of a context, in one epoll instance of its own.
//!
//! tokio watches a descriptor for as long as it is registered, so each arrival on a socket would wake its driver, also while a future
//! spins on that socket. Here a socket is watched only after it was armed, once, and costs nothing otherwise; tokio watches the one
//! descriptor of this instance.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll;

use crate::error::{Error, Result};

#[derive(Debug)]
pub(crate) struct Poller {
    epoll: OwnedFd,
}

/// What was seen on a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ready {
    pub key: u64,
}

/// Events taken per call.
const BATCH: usize = 64;

impl Poller {
    pub(crate) fn new() -> Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|e| Error::io("creating an epoll instance", e))?;
        Ok(Poller { epoll })
    }

    /// Registers a descriptor, disarmed.
    pub(crate) fn add(&self, fd: BorrowedFd<'_>, key: u64) -> Result<()> {
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(key), epoll::EventFlags::ONESHOT)
            .map_err(|e| Error::io("registering a socket with epoll", e))
    }

    /// Watches for the next event. One that is already there counts, so nothing is lost between a last look and this call.
    pub(crate) fn arm(&self, fd: BorrowedFd<'_>, key: u64, read: bool, write: bool) -> Result<()> {
        let mut flags = epoll::EventFlags::ONESHOT;
        if read {
            flags |= epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        }
        if write {
            flags |= epoll::EventFlags::OUT;
        }
        epoll::modify(&self.epoll, fd, epoll::EventData::new_u64(key), flags).map_err(|e| Error::io("arming a socket", e))
    }

    pub(crate) fn remove(&self, fd: BorrowedFd<'_>) {
        // It can only fail if the descriptor is not registered, which is what is wanted.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Takes what is there, without waiting.
    pub(crate) fn poll(&self, ready: &mut Vec<Ready>) -> Result<()> {
        let mut events = [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; BATCH];
        let timeout = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        match epoll::wait(&self.epoll, &mut events[..], Some(&timeout)) {
            Ok(n) => ready.extend(events[..n].iter().map(|event| Ready { key: event.data.u64() })),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(Error::io("waiting for sockets", errno)),
        }
        Ok(())
    }
}

impl AsFd for Poller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
