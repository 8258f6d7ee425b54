//! What a connection's lock protects: the protocol, the operations, the exposed memory.

use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use super::copies::{Job, Then};
use super::route::Route;
use crate::error::Error;
use crate::memory::cuda::Transfer;
use crate::memory::cuda::staging::Staging;
use crate::memory::{Chunk, HostRegion, MemKind, ReadLease, Region, WriteLease};
use crate::proto::{BufId, Connection, Event, OpId, Outcome, Place, Violation};
use crate::reactor::slab::{Slab, Waiters};
use crate::reactor::spin::Learnt;
use crate::wire::frame::Status;

/// The memory that an operation holds, borrow and all, until no engine touches it any more.
#[derive(Debug)]
pub(crate) enum Held {
    None,
    Read(ReadLease),
    Write(WriteLease),
    Many(Box<[ReadLease]>),
}

impl Held {
    fn chunk(&self, part: u32) -> Option<&Chunk> {
        match self {
            Held::None => None,
            Held::Read(lease) => Some(lease.chunk()),
            Held::Write(lease) => Some(lease.chunk()),
            Held::Many(leases) => leases.get(part as usize).map(ReadLease::chunk),
        }
    }

    /// Where its first piece is.
    pub(crate) fn kind(&self) -> MemKind {
        self.chunk(0).map_or(MemKind::Host, Chunk::kind)
    }
}

/// An operation in flight, or over and not yet seen by its future.
#[derive(Debug)]
pub(crate) struct Op {
    pub held: Held,
    pub waker: Option<Waker>,
    pub result: Option<Result<Outcome, Error>>,
    /// Its future is gone.
    pub detached: bool,
    pub started: Instant,
    pub route: Route,
    /// Bytes of it that were seen to pass through pinned memory here.
    pub staged: u64,
}

/// What is dropped outside of the lock, since the drop may run code of the user's.
#[derive(Debug)]
#[allow(dead_code)]
pub(crate) enum Trash {
    Op(Op),
    Waker(Waker),
}

/// Counters of an endpoint since it was made. See [`Stats`](crate::Stats).
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Counters {
    pub bytes_sent: u64,
    pub bytes_received: u64,
    pub messages_sent: u64,
    pub writes: u64,
    pub reads: u64,
    pub atomics: u64,
    pub staged: u64,
}

pub(crate) struct State {
    pub proto: Connection,
    pub ops: Slab<Op>,
    /// By number. A chunk carries the exposure's share of its buffer's borrow state.
    exposures: Vec<Option<Chunk>>,
    pub counters: Counters,
    /// Why the connection is over.
    pub ended: Option<Error>,
    /// When a close that the peer does not answer is given up.
    pub linger_until: Option<Instant>,
    /// Operations with a waker, and those of their futures that will look again by themselves.
    pub waiting: usize,
    pub spinning: usize,
    /// Wake these, and drop these, once the lock is free: both can run code of the user's.
    pub wakers: Vec<Waker>,
    pub trash: Vec<Trash>,
    /// What waits have cost lately.
    pub learnt: Learnt,
    /// Who waits for the end.
    pub mourners: Waiters,
    /// Work for devices, which is taken over when the lock is given up.
    pub jobs: Vec<Job>,
    staging: Arc<Staging>,
}

impl State {
    pub(crate) fn new(proto: Connection, staging: Arc<Staging>) -> Self {
        State {
            proto,
            ops: Slab::default(),
            exposures: Vec::new(),
            counters: Counters::default(),
            ended: None,
            linger_until: None,
            waiting: 0,
            spinning: 0,
            wakers: Vec::new(),
            trash: Vec::new(),
            learnt: Learnt::default(),
            mourners: Waiters::default(),
            jobs: Vec::new(),
            staging,
        }
    }

    /// Whether something is to be woken or dropped outside of the lock.
    pub(crate) fn has_leftovers(&self) -> bool {
        !self.wakers.is_empty() || !self.trash.is_empty()
    }

    pub(crate) fn insert(&mut self, held: Held, route: Route) -> OpId {
        let op = Op { held, waker: None, result: None, detached: false, started: Instant::now(), route, staged: 0 };
        OpId(self.ops.insert(op))
    }

    /// The memory behind a place.
    pub(crate) fn chunk(&self, place: Place, len: u32) -> Option<Chunk> {
        let (chunk, offset) = match place {
            Place::Op { op, part, offset } => (self.ops.get(op.0)?.held.chunk(part)?, offset),
            Place::Exposed { exposure, offset } => (self.exposures.get(exposure as usize)?.as_ref()?, offset),
            Place::Buffer(_) | Place::Discard => return None,
        };
        chunk.sub(offset, len.into())
    }

    pub(crate) fn expose(&mut self, index: u32, chunk: Chunk) {
        let index = index as usize;
        if self.exposures.len() <= index {
            self.exposures.resize_with(index + 1, || None);
        }
        self.exposures[index] = Some(chunk);
    }

    pub(crate) fn revoke(&mut self, index: u32) -> Option<Chunk> {
        self.proto.revoke(index);
        self.exposures.get_mut(index as usize)?.take()
    }

    pub(crate) fn revoke_all(&mut self) -> Vec<Option<Chunk>> {
        for index in 0..self.exposures.len() {
            self.proto.revoke(index as u32);
        }
        std::mem::take(&mut self.exposures)
    }

    pub(crate) fn exposures(&self) -> usize {
        self.exposures.iter().flatten().count()
    }

    /// Carries out what the protocol asks for. Called before the lock is given up, so that no event is ever seen half done.
    pub(crate) fn settle(&mut self) {
        while let Some(event) = self.proto.poll_event() {
            match event {
                Event::Done { op, result } => self.finish(op, result),
                Event::CopyBuffer { op, buf, bytes } => self.copy_buffer(op, buf, bytes),
                Event::CopyOp { from, to, bytes } => self.copy_op(from, to, bytes),
                Event::Forget { op } => self.bury(op),
                Event::Atomic { seq, exposure, offset, swap, operand, compare } => {
                    let chunk = self.chunk(Place::Exposed { exposure, offset }, 8);
                    if let Some(word) = chunk.filter(|chunk| chunk.device().is_some()) {
                        self.jobs.push(Job::atomic(word, operand, swap.then_some(compare), seq));
                        continue;
                    }
                    let result = self.atomic(exposure, offset, swap, operand, compare);
                    // A violation cannot come of our own answer; what it may release is settled by this loop.
                    let _ = self.proto.atomic_done(seq, result);
                }
                Event::PeerClosed => {}
            }
        }
    }

    /// The memory of an operation, cut to the length of a message.
    fn memory(&self, op: OpId, bytes: u64) -> Option<Chunk> {
        self.ops.get(op.0)?.held.chunk(0)?.sub(0, bytes)
    }

    fn copy_buffer(&mut self, op: OpId, buf: BufId, bytes: u64) {
        match self.memory(op, bytes) {
            Some(to) if to.device().is_some() && bytes > 0 => {
                let mut message = self.proto.detach_buffer(buf);
                message.truncate(bytes as usize);
                let from = Chunk::whole(Arc::new(Region::Host(HostRegion::of_vec(message))));
                self.copy_by_device(from, to, op, None);
            }
            Some(to) => {
                let copied = to.write_from(0, self.proto.buffer(buf).get(..bytes as usize).unwrap_or(&[]));
                self.proto.release(buf);
                self.proto.copied(op, copied);
            }
            None => {
                self.proto.release(buf);
                self.proto.copied(op, Err(Error::Cancelled));
            }
        }
    }

    fn copy_op(&mut self, from: OpId, to: OpId, bytes: u64) {
        let copied = match (self.memory(from, bytes), self.memory(to, bytes)) {
            (Some(source), Some(target)) if bytes > 0 && source.device().or(target.device()).is_some() => {
                return self.copy_by_device(source, target, to, Some(from));
            }
            (Some(source), Some(target)) => source.copy_to(&target),
            _ => Err(Error::Cancelled),
        };
        self.bury(from);
        self.proto.copied(to, copied);
    }

    fn copy_by_device(&mut self, source: Chunk, target: Chunk, op: OpId, from: Option<OpId>) {
        let transfer = Transfer::new(source, target, Some(Arc::clone(&self.staging)));
        self.jobs.push(Job::transfer(transfer, Then::Copied { op, from, staged: 0, result: Ok(()) }));
    }

    /// Carries out what follows work of a device that is over.
    pub(crate) fn follow(&mut self, then: Then) -> Result<(), Violation> {
        match then {
            Then::Landed { token, read, op, staged } => {
                self.count_staged(op, staged);
                // Before the sender can hear of it.
                read.iter().for_each(|read| read.marks.set(read.index));
                self.proto.landed(token)?;
            }
            Then::Copied { op, from, staged, result } => {
                self.count_staged(Some(op), staged);
                from.into_iter().for_each(|from| self.bury(from));
                self.proto.copied(op, result);
            }
            Then::Atomic { seq, result } => self.proto.atomic_done(seq, result)?,
        }
        Ok(())
    }

    fn count_staged(&mut self, op: Option<OpId>, bytes: u64) {
        self.counters.staged += bytes;
        if let Some(slot) = op.and_then(|op| self.ops.get_mut(op.0)) {
            slot.staged += bytes;
        }
    }

    fn atomic(&self, exposure: u32, offset: u64, swap: bool, operand: u64, compare: u64) -> Result<u64, Status> {
        let chunk = self.chunk(Place::Exposed { exposure, offset }, 8).ok_or(Status::Unknown)?;
        let result = if swap { chunk.compare_swap_u64(0, compare, operand) } else { chunk.fetch_add_u64(0, operand) };
        result.map_err(|error| match error {
            Error::InvalidArgument { .. } => Status::Misaligned,
            Error::OutOfBounds { .. } => Status::Bounds,
            _ => Status::Unsupported,
        })
    }

    fn finish(&mut self, op: OpId, result: Result<Outcome, Error>) {
        let Some(slot) = self.ops.get_mut(op.0) else { return };
        if slot.detached {
            return self.bury(op);
        }
        slot.result = Some(result);
        if let Some(waker) = slot.waker.take() {
            self.waiting -= 1;
            self.wakers.push(waker);
        }
    }

    /// Why memory that the peer or an operation uses can no longer be reached.
    pub(crate) fn lost_memory(&mut self) -> Option<Error> {
        let held = self.ops.iter_mut().filter_map(|(_, op)| op.held.chunk(0)?.device());
        let exposed = self.exposures.iter().flatten().filter_map(Chunk::device);
        held.chain(exposed).find_map(|device| device.usable().err())
    }

    /// Removes an operation; its memory is let go of outside the lock.
    pub(crate) fn bury(&mut self, op: OpId) {
        if let Some(slot) = self.ops.remove(op.0) {
            self.waiting -= usize::from(slot.waker.is_some());
            if slot.waker.is_some() || !matches!(slot.held, Held::None) {
                self.trash.push(Trash::Op(slot));
            }
        }
    }

    /// Takes an operation's waker away.
    pub(crate) fn silence(&mut self, op: OpId) {
        if let Some(waker) = self.ops.get_mut(op.0).and_then(|slot| slot.waker.take()) {
            self.waiting -= 1;
            self.trash.push(Trash::Waker(waker));
        }
    }

    /// Leaves `waker` with an operation that is not over.
    pub(crate) fn wait(&mut self, op: OpId, waker: &Waker) {
        if let Some(slot) = self.ops.get_mut(op.0) {
            match &slot.waker {
                Some(old) if old.will_wake(waker) => {}
                Some(_) => {
                    let old = slot.waker.replace(waker.clone());
                    self.trash.extend(old.map(Trash::Waker));
                }
                None => {
                    slot.waker = Some(waker.clone());
                    self.waiting += 1;
                }
            }
        }
    }
}
