//! What the halves of a connection share: its memory, its socket, and the memory files that went over it.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use rustix::io::Errno;
use rustix::process::Pid;

use super::memory::{Direction, Mapping, Shared};
use super::ring::{self, Store};
use super::socket::{self, Packet};
use crate::error::Error;
use crate::memory::{Chunk, FileUser, Region};
use crate::reactor::{Reactor, SourceId, lock};
use crate::transport::tcp::rx::violation;

pub(super) const LACKS_NOTHING: u8 = 0;
pub(super) const LACKS_ROOM: u8 = 1;
pub(super) const LACKS_RELEASE: u8 = 2;

/// Memory files of this side that the peer may have mapped at a time. More payloads than these go through the ring.
const EXPORTS_MAX: usize = 4096;
/// Files of the peer's that this side maps at a time.
const IMPORTS_MAX: usize = 2 * EXPORTS_MAX;

/// How to wake this side from within.
struct Waker {
    reactor: Weak<Reactor>,
    source: SourceId,
    lane: usize,
}

/// What this side has handed out.
#[derive(Default)]
struct Exports {
    names: HashSet<u64>,
    /// Names that the peer is to be told to forget, when its socket has room.
    forget: Vec<u64>,
    over: bool,
}

pub(crate) struct Link {
    shared: Arc<Shared>,
    socket: OwnedFd,
    /// 0: this side has accepted.
    side: usize,
    /// The peer's process, if it has a number here.
    peer: Option<Pid>,
    waker: OnceLock<Waker>,
    /// How far the halves of this side have come, for who arms them.
    pub(super) consumed: AtomicU64,
    pub(super) produced: AtomicU64,
    /// How many frames with named memory the sending half knows to be released.
    pub(super) released: AtomicU64,
    /// What the sending half waits for: nothing, room in the ring, or the release of named memory.
    pub(super) lacks: AtomicU8,
    exports: Mutex<Exports>,
    /// Whether `Exports::forget` has something.
    behind: AtomicBool,
    imports: Mutex<HashMap<u64, Arc<Mapping>>>,
}

impl Link {
    pub(super) fn new(shared: Shared, socket: OwnedFd, side: usize, peer: Option<Pid>) -> Arc<Self> {
        Arc::new(Link {
            shared: Arc::new(shared),
            socket,
            side,
            peer,
            waker: OnceLock::new(),
            consumed: AtomicU64::new(0),
            produced: AtomicU64::new(0),
            released: AtomicU64::new(0),
            lacks: AtomicU8::new(LACKS_NOTHING),
            exports: Mutex::default(),
            behind: AtomicBool::new(false),
            imports: Mutex::default(),
        })
    }

    pub(super) fn peer(&self) -> Option<Pid> {
        self.peer
    }

    pub(super) fn outgoing(&self) -> Direction {
        Direction::new(&self.shared, self.side)
    }

    pub(super) fn incoming(&self) -> Direction {
        Direction::new(&self.shared, 1 - self.side)
    }

    pub(crate) fn attach(&self, reactor: &Arc<Reactor>, source: SourceId, lane: usize) {
        let _ = self.waker.set(Waker { reactor: Arc::downgrade(reactor), source, lane });
    }

    fn wake_self(&self) {
        if let Some(Waker { reactor, source, lane }) = self.waker.get() {
            if let Some(reactor) = reactor.upgrade() {
                reactor.kick(*source, *lane);
            }
        }
    }

    /// Wakes the peer. If its socket is full, it has not read what would wake it anyway; if it is gone, others notice.
    pub(super) fn wake_peer(&self) {
        let _ = socket::wake(self.socket.as_fd());
    }

    /// Asks the peer for a packet, if `read` at its next record, if `write` when there is room. What is there already counts.
    pub(crate) fn arm(&self, read: bool, write: bool) {
        let (incoming, outgoing) = (self.incoming(), self.outgoing());
        let word = || incoming.word(self.consumed.load(Ordering::Relaxed)).load(Ordering::Acquire);
        let mut at_once = read && ring::sleep(incoming.sleeps(), || word() != 0);
        if write {
            let go_on = || match self.lacks.load(Ordering::Relaxed) {
                LACKS_ROOM => ring::has_room(&outgoing, self.produced.load(Ordering::Relaxed)),
                LACKS_RELEASE => outgoing.released().load(Ordering::Acquire) != self.released.load(Ordering::Relaxed),
                _ => true,
            };
            at_once |= ring::sleep(outgoing.waits(), go_on);
        }
        if at_once {
            self.wake_self();
        }
    }

    /// The name under which the peer has, or now gets, the memory file of a chunk.
    pub(super) fn name(self: &Arc<Self>, chunk: &Chunk) -> Option<u64> {
        let Region::Host(region) = chunk.region() else { return None };
        let file = region.shared_file()?;
        let mut exports = lock(&self.exports);
        if exports.names.contains(&file.name()) {
            return Some(file.name());
        }
        if exports.over || exports.names.len() >= EXPORTS_MAX {
            return None;
        }
        // If the socket is full, this payload goes through the ring.
        socket::export(self.socket.as_fd(), file.name(), region.len(), file.as_fd()).ok()?;
        exports.names.insert(file.name());
        drop(exports);
        let user: Weak<Self> = Arc::downgrade(self);
        file.add_user(user);
        Some(file.name())
    }

    /// Tells the peer what could not be told before.
    pub(crate) fn tidy(&self) {
        if !self.behind.load(Ordering::Acquire) {
            return;
        }
        let mut exports = lock(&self.exports);
        while let Some(&name) = exports.forget.last() {
            if socket::forget(self.socket.as_fd(), name).is_err() {
                return;
            }
            exports.forget.pop();
        }
        self.behind.store(false, Ordering::Release);
    }

    /// Reads what has come over the socket. Answers whether there was a wake-up among it; `None` at the end.
    pub(crate) fn drain(&self) -> Result<Option<bool>, Error> {
        let mut woken = false;
        loop {
            match socket::next(&self.socket) {
                Ok(None) => return Ok(Some(woken)),
                Ok(Some(Packet::Wake)) => woken = true,
                Ok(Some(Packet::Export { name, len, file })) => self.import(name, len, file.as_fd())?,
                Ok(Some(Packet::Forget { name })) => {
                    let gone = lock(&self.imports).remove(&name);
                    drop(gone);
                }
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(None),
                Err(Errno::BADMSG) => return Err(violation(&"a packet that is none")),
                Err(errno) => return Err(Error::io("receiving a memory file of the peer's", errno)),
            }
        }
    }

    fn import(&self, name: u64, len: u64, file: BorrowedFd<'_>) -> Result<(), Error> {
        let mut imports = lock(&self.imports);
        if imports.len() >= IMPORTS_MAX || imports.contains_key(&name) {
            return Err(violation(&"a memory file too many"));
        }
        let len = usize::try_from(len).map_err(|_| violation(&"a memory file that is too long"))?;
        let mapping = match Mapping::of_peer(file, len) {
            Ok(mapping) => mapping,
            Err(Errno::PERM | Errno::INVAL) => {
                return Err(violation(&"a memory file that can shrink, or is shorter than it says"));
            }
            Err(errno) => return Err(Error::io("mapping a memory file of the peer's", errno)),
        };
        imports.insert(name, Arc::new(mapping));
        Ok(())
    }

    /// The peer's memory of that name.
    pub(super) fn mapping(&self, name: u64) -> Result<Arc<Mapping>, Error> {
        let find = || lock(&self.imports).get(&name).map(Arc::clone);
        if let Some(mapping) = find() {
            return Ok(mapping);
        }
        // It was sent before it was named.
        if self.drain()? == Some(true) {
            // The packet was meant for who sleeps.
            self.wake_self();
        }
        find().ok_or_else(|| violation(&"a memory file that it never sent"))
    }

    /// Files of the peer's that are mapped here.
    #[cfg(test)]
    pub(super) fn imported(&self) -> usize {
        lock(&self.imports).len()
    }

    /// Lets go of the peer's memory, and hands out nothing more.
    pub(super) fn end(&self) {
        lock(&self.exports).over = true;
        let imports = std::mem::take(&mut *lock(&self.imports));
        drop(imports);
    }
}

impl FileUser for Link {
    fn freed(&self, name: u64) {
        let mut exports = lock(&self.exports);
        if exports.names.remove(&name) && !exports.over && socket::forget(self.socket.as_fd(), name).is_err() {
            exports.forget.push(name);
            self.behind.store(true, Ordering::Release);
        }
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("side", &self.side).finish_non_exhaustive()
    }
}
