//! The sending half.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::link::{LACKS_NOTHING, LACKS_RELEASE, LACKS_ROOM, Link};
use super::memory::Direction;
use super::ring::{BODY, Kind, Producer};
use super::{copy, corrupt};
use crate::error::Error;
use crate::memory::Chunk;
use crate::proto::Sent;
use crate::transport::Sender;

/// Payloads in memory files are copied through the ring up to this length, and read by the peer in place from there on, in bytes.
const COPY_MAX: u64 = BODY as u64;
/// Payloads in other memory from this length on are read by the peer in place, where it can, in bytes. A system call and its page walks cost
/// more than two copies of less.
const PLACE_MIN: u64 = 32 << 10;
/// Frames with named memory that the peer may hold at a time.
const NAMED_MAX: usize = 256;

/// A payload of which some has gone into the ring.
struct Pending {
    chunk: Chunk,
    at: u64,
    sent: Sent,
}

pub(crate) struct ShmSender {
    link: Arc<Link>,
    producer: Producer<Direction>,
    pending: Option<Pending>,
    /// Frames with named memory, until the peer has read it.
    named: VecDeque<(Chunk, Sent)>,
    /// How many of those the peer was done with.
    released: u64,
    /// Payloads that were copied and so are done with.
    copied: Vec<Sent>,
    pushed: bool,
    /// What the peer did wrong where there was no way to say so.
    failed: Option<Error>,
    shut: bool,
}

impl ShmSender {
    pub(super) fn new(link: &Arc<Link>) -> Self {
        ShmSender {
            link: Arc::clone(link),
            producer: Producer::new(link.outgoing()),
            pending: None,
            named: VecDeque::new(),
            released: 0,
            copied: Vec::new(),
            pushed: false,
            failed: None,
            shut: false,
        }
    }

    fn put(&mut self, kind: Kind, head: &[u8], body: usize, fill: impl FnOnce(&Direction, u64)) {
        self.producer.push(kind, head, body, fill);
        self.link.produced.store(self.producer.at(), Ordering::Relaxed);
        self.pushed = true;
    }

    /// Copies on, for as long as there is room. Answers whether all is in the ring.
    fn copy_on(&mut self) -> Result<bool, Error> {
        while let Some(Pending { chunk, at, sent }) = self.pending.take() {
            if !self.producer.has_room().map_err(corrupt)? {
                self.pending = Some(Pending { chunk, at, sent });
                self.link.lacks.store(LACKS_ROOM, Ordering::Relaxed);
                return Ok(false);
            }
            let n = (chunk.len() - at).min(BODY as u64);
            let mut copied = Ok(());
            self.put(Kind::Piece, &[], n as usize, |ring, to| copied = copy::into_ring(ring, to, &chunk, at, n as usize));
            copied?;
            self.wake();
            if at + n < chunk.len() {
                self.pending = Some(Pending { chunk, at: at + n, sent });
            } else {
                self.copied.push(sent);
            }
        }
        Ok(true)
    }

    fn wake(&mut self) {
        if std::mem::take(&mut self.pushed) && self.producer.must_wake() {
            self.link.wake_peer();
        }
    }

    /// Whether the peer is done with the first frame that has named memory.
    fn is_released(&self) -> bool {
        !self.named.is_empty() && self.producer.store().released().load(Ordering::Acquire) != self.released
    }

    fn release(&mut self, done: &mut Vec<Sent>) -> Result<(), Error> {
        let released = self.producer.store().released().load(Ordering::Acquire);
        let n = released.wrapping_sub(self.released);
        if n > self.named.len() as u64 {
            return Err(corrupt(super::ring::Corrupt("it has read more than there was")));
        }
        self.released = released;
        self.link.released.store(released, Ordering::Relaxed);
        done.extend(self.named.drain(..n as usize).map(|(_chunk, sent)| sent));
        Ok(())
    }
}

impl Sender for ShmSender {
    fn has_room(&self) -> bool {
        let lacks = if !super::ring::has_room(self.producer.store(), self.producer.at()) {
            LACKS_ROOM
        } else if self.named.len() >= NAMED_MAX {
            LACKS_RELEASE
        } else {
            LACKS_NOTHING
        };
        self.link.lacks.store(lacks, Ordering::Relaxed);
        lacks == LACKS_NOTHING && self.pending.is_none()
    }

    fn push(&mut self, head: &[u8], payload: Option<Chunk>, sent: Sent) {
        if self.shut {
            return;
        }
        // Also where the peer lies about it: nothing of its own is overwritten that this side reads.
        if let Err(lie) = self.producer.has_room() {
            self.failed = Some(corrupt(lie));
            return;
        }
        let Some(chunk) = payload else {
            self.put(Kind::Whole, head, 0, |_, _| {});
            if sent != Sent::Nothing {
                self.copied.push(sent);
            }
            return;
        };
        let len = chunk.len();
        if len <= BODY as u64 && (len <= COPY_MAX || sent.needs_copy()) {
            let mut copied = Ok(());
            self.put(Kind::Whole, head, len as usize, |ring, to| copied = copy::into_ring(ring, to, &chunk, 0, len as usize));
            self.failed = copied.err();
            self.copied.push(sent);
            return;
        }
        match self.link.name(&chunk).filter(|_| !sent.needs_copy()) {
            Some(name) => {
                let place = [name, chunk.offset()].map(u64::to_le_bytes).concat();
                self.put(Kind::Named, head, place.len(), |ring, to| super::ring::Store::put(ring, to, &place));
                self.named.push_back((chunk, sent));
            }
            None if len >= PLACE_MIN && !sent.needs_copy() && chunk.is_ordinary() && self.producer.store().is_read() => {
                let address = (chunk.as_ptr().addr() as u64).to_le_bytes();
                self.put(Kind::Placed, head, 8, |ring, to| super::ring::Store::put(ring, to, &address));
                self.named.push_back((chunk, sent));
            }
            None => {
                self.put(Kind::Begun, head, 0, |_, _| {});
                self.pending = Some(Pending { chunk, at: 0, sent });
            }
        }
    }

    fn flush(&mut self, done: &mut Vec<Sent>) -> Result<bool, Error> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        if self.shut {
            return Ok(true);
        }
        self.link.tidy();
        self.wake();
        let all = self.copy_on()?;
        self.release(done)?;
        done.append(&mut self.copied);
        Ok(all)
    }

    fn is_idle(&self) -> bool {
        !self.pushed && self.pending.is_none() && self.copied.is_empty() && !self.is_released() && self.failed.is_none()
    }

    fn shut(&mut self) {
        self.shut = true;
        self.pending = None;
        self.named.clear();
        self.copied.clear();
        self.link.end();
    }
}
