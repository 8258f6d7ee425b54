//! One connection: the parts put together, the order of transmission, close, failure and liveness.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::buffers::Buffers;
use super::inbox::{Inbox, Out, eager_token};
use super::initiator::{Initiator, Work};
use super::notes::Notes;
use super::outbox::Outbox;
use super::target::{Rights, Target};
use super::{
    BufId, Detached, Event, Landing, Limits, MESSAGE_COST, OpId, Outcome, Place, Sent, Shape, Token, Transmit, Violation,
};
use crate::error::Error;
use crate::wire::frame::{Frame, Status, status};

/// Answers that may wait to leave. A peer that keeps to the windows never comes near it.
const CONTROL_MAX: usize = 1 << 16;

/// Something that arrived before the one-sided operations that it follows have landed.
#[derive(Debug, Clone, Copy)]
enum Held {
    Message { buf: BufId, tag: u64, len: u64 },
    Announced { msg: u64, tag: u64, len: u64 },
    Flush { id: u64 },
}

#[derive(Debug)]
pub(crate) struct Connection {
    limits: Limits,
    inbox: Inbox,
    outbox: Outbox,
    initiator: Initiator,
    target: Target,
    notes: Notes,
    buffers: Buffers,
    held: VecDeque<(u64, Held)>,
    /// One-sided operations of the peer that have landed, from the first on.
    landed: u64,
    /// Number of the last message that the peer announced.
    announced: u64,
    control: VecDeque<Frame>,
    events: VecDeque<Event>,
    /// Credit that the peer has spent, and that it was granted.
    spent_in: u64,
    granted_in: u64,
    bulk_turn: bool,
    closing: bool,
    close_sent: bool,
    peer_closed: bool,
    failed: Option<Error>,
    heard: bool,
    last_heard: Instant,
    last_ping: Instant,
    started: Instant,
}

macro_rules! out {
    ($self:ident) => {
        &mut Out { events: &mut $self.events, control: &mut $self.control, buffers: &mut $self.buffers }
    };
}

impl Connection {
    pub(crate) fn new(limits: Limits, now: Instant) -> Self {
        Connection {
            outbox: Outbox::new(&limits),
            granted_in: limits.credit_in,
            limits,
            inbox: Inbox::default(),
            initiator: Initiator::default(),
            target: Target::default(),
            notes: Notes::default(),
            buffers: Buffers::default(),
            held: VecDeque::new(),
            landed: 0,
            announced: 0,
            control: VecDeque::new(),
            events: VecDeque::new(),
            spent_in: 0,
            bulk_turn: false,
            closing: false,
            close_sent: false,
            peer_closed: false,
            failed: None,
            heard: false,
            last_heard: now,
            last_ping: now,
            started: now,
        }
    }

    // ---- what the local side wants ----

    /// Why nothing can be started any more.
    pub(crate) fn refusal(&self) -> Option<Error> {
        match &self.failed {
            Some(error) => Some(error.clone()),
            None if self.closing || self.peer_closed => Some(Error::Closed),
            None => None,
        }
    }

    pub(crate) fn send(&mut self, op: OpId, tag: u64, len: u64, shape: Shape) {
        self.outbox.send(op, tag, len, shape, self.initiator.issued());
    }

    pub(crate) fn flush(&mut self, op: OpId) {
        self.outbox.flush(op, self.initiator.issued());
    }

    /// Posts a receive. Allowed after a close: messages that have arrived can still be received.
    pub(crate) fn recv(&mut self, op: OpId, tag: Option<u64>, capacity: u64) {
        self.inbox.post(op, tag, capacity, false, out!(self));
    }

    /// Waits for the next message, to be taken by [`take_claimed`](Self::take_claimed) under its arrival number.
    pub(crate) fn claim(&mut self, op: OpId) {
        self.inbox.post(op, None, u64::MAX, true, out!(self));
    }

    pub(crate) fn take_claimed(&mut self, op: OpId, seq: u64, capacity: u64) {
        self.inbox.take_claimed(op, seq, capacity, out!(self));
    }

    pub(crate) fn unclaim(&mut self, seq: u64) {
        self.inbox.unclaim(seq, out!(self));
    }

    pub(crate) fn discard(&mut self, seq: u64) {
        self.inbox.discard(seq, out!(self));
    }

    pub(crate) fn detach(&mut self, op: OpId) -> Detached {
        self.inbox.detach(op, out!(self))
    }

    pub(crate) fn requeue(&mut self, op: OpId, outcome: Outcome) {
        self.inbox.requeue(op, outcome, out!(self));
    }

    pub(crate) fn adopt(&mut self, op: OpId, tag: Option<u64>) -> Option<Option<Outcome>> {
        self.inbox.adopt(op, tag)
    }

    /// Starts a one-sided operation, whose payloads are cut into segments of this length.
    pub(crate) fn start(&mut self, op: OpId, work: Work, segment: u32) {
        self.initiator.start(op, work, segment);
    }

    pub(crate) fn wait_note(&mut self, op: OpId, tag: u64, n: u64) {
        self.notes.wait(op, tag, n, &mut self.events);
    }

    pub(crate) fn forget_note(&mut self, op: OpId, tag: u64) -> bool {
        self.notes.forget(op, tag, &mut self.events)
    }

    /// Gives back notifications that were taken by a future which was dropped before it saw them.
    pub(crate) fn return_notes(&mut self, tag: u64, n: u64) {
        // The tag was in use a moment ago, so the limit on tags, the only error, is not a fault of the peer here.
        let _ = self.notes.add(tag, n, &mut self.events);
    }

    /// Asks for the end of an operation; it ends with an event in any case.
    pub(crate) fn cancel(&mut self, op: OpId) {
        self.inbox.cancel(op, out!(self));
        self.notes.cancel(op, &mut self.events);
        self.outbox.cancel(op, out!(self));
        self.initiator.cancel(op, out!(self));
    }

    pub(crate) fn expose(&mut self, len: u64, rights: Rights, token: u64, segment: u32) -> (u32, u64) {
        self.target.expose(len, rights, token, segment)
    }

    pub(crate) fn is_exposed(&self, name: u64) -> bool {
        self.target.is_exposed(name)
    }

    pub(crate) fn revoke(&mut self, index: u32) {
        self.target.revoke(index);
    }

    pub(crate) fn buffer(&self, buf: BufId) -> &[u8] {
        self.buffers.get(buf)
    }

    pub(crate) fn buffer_mut(&mut self, buf: BufId) -> &mut [u8] {
        self.buffers.get_mut(buf)
    }

    /// What a [`CopyBuffer`](Event::CopyBuffer) or [`CopyOp`](Event::CopyOp) asked for is done, or failed.
    pub(crate) fn copied(&mut self, op: OpId, result: Result<(), Error>) {
        self.inbox.copied(op, result, out!(self));
    }

    /// Takes a buffer's bytes out, and releases it.
    pub(crate) fn detach_buffer(&mut self, buf: BufId) -> Vec<u8> {
        self.buffers.detach(buf)
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    pub(crate) fn release(&mut self, buf: BufId) {
        self.buffers.release(buf);
    }

    pub(crate) fn atomic_done(&mut self, seq: u64, result: Result<u64, Status>) -> Result<(), Violation> {
        self.target.atomic_done(seq, result, out!(self));
        self.advance()
    }

    // ---- what comes from the peer ----

    /// A frame's header came, and `len` bytes of payload follow it: where to?
    ///
    /// [`landed`](Self::landed) is called with the token when the payload is there, also for an empty one.
    pub(crate) fn on_frame(&mut self, frame: &Frame, len: u32) -> Result<Landing, Violation> {
        if self.control.len() > CONTROL_MAX {
            return Err(Violation::Rule("the peer asks without reading the answers"));
        }
        let mut landing = Landing { place: Place::Discard, token: Token::None };
        if len > self.limits.frame_max {
            return Err(Violation::Rule("a frame longer than was agreed on"));
        }
        match *frame {
            Frame::Eager { tag, order, .. } => {
                if len > self.limits.eager_max {
                    return Err(Violation::Rule("a message longer than the eager limit"));
                }
                self.spend_in(MESSAGE_COST + u64::from(len))?;
                let direct = if self.in_order(order) { self.inbox.eager_place(tag, len.into()) } else { None };
                let place = match direct {
                    Some(op) => Place::Op { op, part: 0, offset: 0 },
                    None => Place::Buffer(self.buffers.take(len as usize)),
                };
                landing = Landing { place, token: eager_token(place, tag, order, len) };
            }
            Frame::Rts { tag, order, msg, total, .. } => {
                self.spend_in(MESSAGE_COST)?;
                // Numbered one by one, so that no number ever means two messages.
                if msg != self.announced + 1 {
                    return Err(Violation::Rule("a message under a number that is not its turn"));
                }
                self.announced = msg;
                self.arrive(order, Held::Announced { msg, tag, len: total })?;
            }
            Frame::Flush { id, order, .. } => self.arrive(order, Held::Flush { id })?,
            Frame::Cts { msg, .. } => self.outbox.asked_for(msg)?,
            Frame::Data { msg, offset, .. } => {
                landing = Landing { place: self.inbox.data_place(msg, offset, len)?, token: Token::Data { msg, len } };
            }
            Frame::Done { msg, status: s, .. } => self.outbox.finished(msg, status(s)?, out!(self))?,
            Frame::Withdraw { msg, .. } => self.withdraw(msg),
            Frame::Write { .. } => {
                landing = self.target.on_write(frame, len, out!(self))?;
                self.advance()?;
            }
            Frame::Read { .. } => {
                self.target.on_read(frame)?;
                self.advance()?;
            }
            Frame::Atomic { .. } => {
                self.target.on_atomic(frame)?;
                self.advance()?;
            }
            Frame::Abort { seq, .. } => {
                self.target.on_abort(seq, out!(self))?;
                self.advance()?;
            }
            Frame::ReadData { seq, offset, .. } => {
                let (place, token) = self.initiator.read_place(seq, offset, len)?;
                landing = Landing { place, token };
            }
            Frame::Reply { seq, status: s, value, .. } => self.initiator.replied(seq, status(s)?, value, out!(self))?,
            Frame::Credit { granted, .. } => self.outbox.grant(granted, self.limits.credit_out)?,
            Frame::Flushed { id, .. } => self.outbox.flushed(id, out!(self))?,
            Frame::Ping { stamp, .. } => self.control.push_back(Frame::Pong { flags: 0, stamp }),
            // That it came is what counts.
            Frame::Pong { .. } => {}
            Frame::Close { .. } => self.on_close(),
        }
        Ok(landing)
    }

    /// Whether bytes that are on their way to a place are still wanted there. If not, they are to be discarded.
    pub(crate) fn wants(&self, token: &Token) -> bool {
        match *token {
            Token::Write { seq, exposure, .. } => self.target.wants(seq, exposure),
            Token::Read { seq, .. } => self.initiator.wants(seq),
            _ => true,
        }
    }

    /// The payload of a frame has landed, or was discarded because it was not wanted.
    pub(crate) fn landed(&mut self, token: Token) -> Result<(), Violation> {
        match token {
            Token::None => Ok(()),
            Token::EagerDirect => {
                self.inbox.eager_landed(out!(self));
                Ok(())
            }
            Token::EagerBuffered { buf, tag, order, len } => self.arrive(order, Held::Message { buf, tag, len: len.into() }),
            Token::Data { msg, len } => self.inbox.data_landed(msg, len, out!(self)),
            Token::Write { seq, len, exposure } => {
                self.target.write_landed(seq, len, exposure, out!(self))?;
                self.advance()
            }
            Token::Read { seq, len } => {
                self.initiator.read_landed(seq, len, out!(self));
                Ok(())
            }
        }
    }

    fn spend_in(&mut self, cost: u64) -> Result<(), Violation> {
        self.spent_in += cost;
        if self.spent_in > self.granted_in { Err(Violation::Rule("messages beyond the credit that was granted")) } else { Ok(()) }
    }

    fn in_order(&self, order: u64) -> bool {
        self.held.is_empty() && order <= self.landed
    }

    fn arrive(&mut self, order: u64, what: Held) -> Result<(), Violation> {
        if self.in_order(order) {
            self.release_held(what);
        } else {
            if self.held.len() > CONTROL_MAX {
                return Err(Violation::Rule("too many messages and flushes ahead of their writes"));
            }
            self.held.push_back((order, what));
        }
        Ok(())
    }

    fn release_held(&mut self, what: Held) {
        match what {
            Held::Message { buf, tag, len } => self.inbox.buffered(buf, tag, len, out!(self)),
            Held::Announced { msg, tag, len } => self.inbox.announced(msg, tag, len, out!(self)),
            Held::Flush { id } => self.control.push_back(Frame::Flushed { flags: 0, id }),
        }
    }

    fn advance(&mut self) -> Result<(), Violation> {
        self.landed = self.target.advance(&mut self.notes, out!(self))?;
        while let Some(&(order, what)) = self.held.front() {
            if order > self.landed {
                break;
            }
            self.held.pop_front();
            self.release_held(what);
        }
        Ok(())
    }

    fn withdraw(&mut self, msg: u64) {
        let before = self.held.len();
        self.held.retain(|(_, h)| !matches!(h, Held::Announced { msg: m, .. } if *m == msg));
        let held = self.held.len() != before;
        if held {
            self.inbox.freed += MESSAGE_COST;
        }
        if held || self.inbox.withdraw(msg) {
            self.control.push_back(Frame::done(msg, Status::Aborted));
        }
    }

    // ---- what goes to the peer ----

    /// Whether [`poll_transmit`](Self::poll_transmit) may have something. It may be wrong only in saying yes.
    pub(crate) fn has_output(&self) -> bool {
        !self.control.is_empty()
            || self.inbox.freed >= self.limits.credit_in / 4
            || self.outbox.has_output()
            || self.initiator.has_output()
            || self.target.has_output()
            || self.closing
    }

    /// The next frame for a lane. Lane 0 carries everything; the others only pieces of long transfers.
    pub(crate) fn poll_transmit(&mut self, lane: usize) -> Option<Transmit> {
        if self.failed.is_some() {
            return None;
        }
        if lane > 0 {
            return self.poll_bulk().or_else(|| self.initiator.poll(true));
        }
        if let Some(transmit) = self.poll_control() {
            return Some(transmit);
        }
        // Bulk and the rest take turns, so that neither starves.
        self.bulk_turn = !self.bulk_turn;
        let transmit = if self.bulk_turn {
            self.poll_bulk().or_else(|| self.poll_ordered())
        } else {
            self.poll_ordered().or_else(|| self.poll_bulk())
        };
        // Serving reads may have ended in answers.
        transmit.or_else(|| self.control.pop_front().map(|frame| plain(&frame))).or_else(|| self.poll_close())
    }

    /// The next frame for lane 0 that may overtake others: answers, credit, signs of life.
    pub(crate) fn poll_control(&mut self) -> Option<Transmit> {
        if self.failed.is_some() {
            return None;
        }
        // A fourth of the window at a time: rare frames, and the sender never runs dry.
        if self.inbox.freed >= self.limits.credit_in / 4 {
            self.granted_in += self.inbox.freed;
            self.inbox.freed = 0;
            self.control.push_back(Frame::Credit { flags: 0, granted: self.granted_in });
        }
        self.control.pop_front().map(|frame| plain(&frame))
    }

    fn poll_bulk(&mut self) -> Option<Transmit> {
        self.outbox.poll_bulk().or_else(|| self.target.poll_bulk(out!(self)))
    }

    fn poll_ordered(&mut self) -> Option<Transmit> {
        self.initiator.poll(false).or_else(|| self.outbox.poll(self.initiator.left()))
    }

    fn poll_close(&mut self) -> Option<Transmit> {
        if !self.closing || self.close_sent || !self.is_drained() {
            return None;
        }
        self.close_sent = true;
        Some(plain(&Frame::Close { flags: 0, reason: 0 }))
    }

    /// The engine has let go of a frame's payload.
    pub(crate) fn sent(&mut self, sent: Sent) {
        match sent {
            Sent::Nothing => {}
            Sent::Eager { op, len } => self.outbox.eager_sent(op, len, out!(self)),
            Sent::Data { msg } => self.outbox.data_sent(msg, out!(self)),
            Sent::Write { seq } => self.initiator.write_sent(seq, out!(self)),
        }
    }

    pub(crate) fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    // ---- close, failure, liveness ----

    /// Nothing of ours is open any more, and nothing of the peer's is landing in our memory.
    pub(crate) fn is_drained(&self) -> bool {
        self.outbox.is_empty() && self.initiator.is_empty() && !self.inbox.is_landing()
    }

    /// Starts an orderly close: what was issued is completed, receives fail at once.
    pub(crate) fn close(&mut self) {
        if !self.closing && self.failed.is_none() {
            self.closing = true;
            self.inbox.close(&Error::Closed, out!(self));
            self.notes.fail(&Error::Closed, &mut self.events);
        }
    }

    fn on_close(&mut self) {
        if self.peer_closed {
            return;
        }
        self.peer_closed = true;
        self.events.push_back(Event::PeerClosed);
    }

    /// Whether both sides have said that nothing follows.
    pub(crate) fn is_closed(&self) -> bool {
        self.peer_closed && self.close_sent
    }

    pub(crate) fn peer_closed(&self) -> bool {
        self.peer_closed
    }

    pub(crate) fn close_sent(&self) -> bool {
        self.close_sent
    }

    /// Ends everything with `error`. The shell has seen to it that no engine touches any memory.
    pub(crate) fn fail(&mut self, error: &Error) {
        if self.failed.is_some() {
            return;
        }
        self.failed = Some(error.clone());
        self.outbox.fail(error, out!(self));
        self.initiator.fail(error, out!(self));
        self.inbox.fail(error, out!(self));
        self.notes.fail(error, &mut self.events);
        for (_, held) in self.held.drain(..) {
            if let Held::Message { buf, .. } = held {
                self.buffers.release(buf);
            }
        }
        self.target.clear();
        self.control.clear();
    }

    /// Something came from the peer since the last tick.
    pub(crate) fn heard(&mut self) {
        self.heard = true;
    }

    /// To be called a few times per heartbeat interval. An error says how long nothing was heard.
    pub(crate) fn tick(&mut self, now: Instant) -> Result<(), Duration> {
        if std::mem::take(&mut self.heard) {
            self.last_heard = now;
        }
        let silent = now.saturating_duration_since(self.last_heard);
        if silent >= self.limits.liveness {
            return Err(silent);
        }
        if silent >= self.limits.heartbeat && now.saturating_duration_since(self.last_ping) >= self.limits.heartbeat {
            self.ping(now);
        }
        Ok(())
    }

    /// This side cannot take in what comes, but is alive, and so may be the peer.
    pub(crate) fn stalled(&mut self) {
        self.heard = true;
        self.control.push_back(Frame::Pong { flags: 0, stamp: 0 });
    }

    fn ping(&mut self, now: Instant) {
        self.last_ping = now;
        let stamp = now.saturating_duration_since(self.started).as_nanos() as u64;
        self.control.push_back(Frame::Ping { flags: 0, stamp });
    }

    /// Messages that arrived so far, that wait for a receive, and that wait to be sent.
    pub(crate) fn message_counts(&self) -> (u64, usize, usize) {
        (self.inbox.messages, self.inbox.unclaimed(), self.outbox.queued())
    }

    #[cfg(test)]
    pub(crate) fn buffers_in_use(&self) -> usize {
        self.buffers.in_use()
    }
}

fn plain(frame: &Frame) -> Transmit {
    Transmit { head: frame.encode(0), payload: None, sent: Sent::Nothing }
}

/// For [`crate::fuzzing`].
impl Connection {
    pub(crate) fn fuzz_open(&mut self) {
        use super::initiator::{Parts, RemoteRange};
        self.expose(4096, Rights { read: true, write: true, atomic: true }, 0, self.limits.segment);
        self.recv(OpId(1), None, 100);
        self.recv(OpId(2), Some(3), 1 << 20);
        self.claim(OpId(3));
        let shape = self.limits.shape();
        self.send(OpId(4), 0, 10, shape);
        self.send(OpId(5), 0, 1 << 20, shape);
        self.flush(OpId(6));
        let remote = RemoteRange { exposure: 0, token: 0, offset: 0, len: 8192 };
        self.start(OpId(7), Work::Write { parts: Parts::One(remote), notify: Some(1) }, shape.segment);
        self.start(OpId(8), Work::Read { remote }, shape.segment);
        self.start(OpId(9), Work::Atomic { remote, swap: true, operand: 1, compare: 2 }, shape.segment);
        self.wait_note(OpId(10), 0, 1);
        while let Some(transmit) = self.poll_transmit(0) {
            self.sent(transmit.sent);
        }
    }

    /// Does what events ask for, without memory.
    pub(crate) fn fuzz_answer(&mut self) {
        while let Some(event) = self.poll_event() {
            match event {
                Event::CopyBuffer { op, buf, .. } => {
                    self.release(buf);
                    self.copied(op, Ok(()));
                }
                Event::CopyOp { to, .. } => self.copied(to, Ok(())),
                Event::Atomic { seq, .. } => drop(self.atomic_done(seq, Ok(0))),
                _ => {}
            }
        }
    }
}
