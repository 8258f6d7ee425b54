//! Matching: messages that arrived on one side, receives that were posted on the other.
//!
//! A message goes to the first posted receive that accepts its tag; a receive takes the first arrived message that it accepts.
//! So at no time does a posted receive accept an arrived message. A receive that is dropped after its match becomes an *orphan*:
//! the message keeps its place in the order, with the dropped receive's memory as its body.

use std::collections::{HashMap, VecDeque};

use super::buffers::Buffers;
use super::{BufId, Detached, Event, MESSAGE_COST, OpId, Outcome, Place, Token, Violation};
use crate::error::Error;
use crate::wire::frame::{Frame, Status};

#[derive(Debug, Clone, Copy)]
struct Posted {
    op: OpId,
    tag: Option<u64>,
    capacity: u64,
    /// Wants the message itself (`incoming`), not its bytes.
    claim: bool,
}

impl Posted {
    fn accepts(&self, tag: u64) -> bool {
        self.tag.is_none_or(|t| t == tag)
    }
}

#[derive(Debug, Clone, Copy)]
enum Body {
    Buffer(BufId),
    /// At the sender, under this number.
    Remote(u64),
    /// In the memory of a dropped receive.
    Orphan {
        op: OpId,
        landed: bool,
    },
}

#[derive(Debug, Clone, Copy)]
struct Arrived {
    seq: u64,
    tag: u64,
    len: u64,
    body: Body,
}

/// A message on its way into the memory of a receive.
#[derive(Debug, Clone, Copy)]
struct Arriving {
    op: OpId,
    seq: u64,
    tag: u64,
    len: u64,
    missing: u64,
    /// Bytes for which engines were given a place. When none are missing, no engine has a place any more.
    handed: u64,
    orphan: bool,
    /// The receive that took over after the first was dropped, with other memory.
    next: Option<OpId>,
}

#[derive(Debug, Default)]
pub(crate) struct Inbox {
    posted: VecDeque<Posted>,
    arrived: VecDeque<Arrived>,
    claimed: HashMap<u64, Arrived>,
    /// The one eager message whose payload is going straight to its receive. Only lane 0 carries them, so there is one at most.
    eager: Option<Arriving>,
    rendezvous: HashMap<u64, Arriving>,
    /// Messages that are here, and that the shell copies to where they belong.
    copies: Vec<Arriving>,
    next_seq: u64,
    /// Credit to hand back.
    pub(crate) freed: u64,
    pub(crate) messages: u64,
    /// No message can come any more.
    closed: Option<Error>,
}

impl Inbox {
    /// Posts a receive, or with `claim` a wish for the next message.
    pub(crate) fn post(&mut self, op: OpId, tag: Option<u64>, capacity: u64, claim: bool, out: &mut Out<'_>) {
        let posted = Posted { op, tag, capacity, claim };
        match self.arrived.iter().position(|m| posted.accepts(m.tag)) {
            Some(i) if self.arrived[i].len > capacity => out.truncated(op, self.arrived[i].len, capacity),
            Some(i) => {
                if let Some(message) = self.arrived.remove(i) {
                    self.deliver(message, posted, out);
                }
            }
            None => match &self.closed {
                Some(error) => out.done(op, Err(error.clone())),
                None => self.posted.push_back(posted),
            },
        }
    }

    /// Receives a claimed message. One that does not fit goes back among the arrived.
    pub(crate) fn take_claimed(&mut self, op: OpId, seq: u64, capacity: u64, out: &mut Out<'_>) {
        let Some(message) = self.claimed.remove(&seq) else {
            let error = self.closed.clone().unwrap_or(Error::Cancelled);
            return out.done(op, Err(error));
        };
        if message.len > capacity {
            out.truncated(op, message.len, capacity);
            self.insert(message, out);
        } else {
            self.deliver(message, Posted { op, tag: None, capacity, claim: false }, out);
        }
    }

    /// Puts a claimed message back at its place in the order.
    pub(crate) fn unclaim(&mut self, seq: u64, out: &mut Out<'_>) {
        if let Some(message) = self.claimed.remove(&seq) {
            self.insert(message, out);
        }
    }

    /// Throws a claimed message away. Its sender learns that it was taken.
    pub(crate) fn discard(&mut self, seq: u64, out: &mut Out<'_>) {
        let Some(message) = self.claimed.remove(&seq) else { return };
        match message.body {
            Body::Buffer(buf) => {
                out.buffers.release(buf);
                self.freed += MESSAGE_COST + message.len;
            }
            Body::Remote(msg) => {
                self.freed += MESSAGE_COST;
                out.control.push_back(Frame::done(msg, Status::Ok));
            }
            Body::Orphan { op, landed: true } => out.events.push_back(Event::Forget { op }),
            // Forgotten when it has landed.
            Body::Orphan { landed: false, .. } => {}
        }
    }

    fn deliver(&mut self, message: Arrived, to: Posted, out: &mut Out<'_>) {
        let Arrived { seq, tag, len, body } = message;
        let outcome = Outcome { bytes: len, tag, seq, value: 0 };
        if to.claim {
            self.claimed.insert(seq, message);
            return out.done(to.op, Ok(outcome));
        }
        let arriving = Arriving { op: to.op, seq, tag, len, missing: len, handed: 0, orphan: false, next: None };
        match body {
            Body::Buffer(buf) => {
                self.freed += MESSAGE_COST + len;
                self.copies.push(arriving);
                out.events.push_back(Event::CopyBuffer { op: to.op, buf, bytes: len });
            }
            Body::Remote(msg) => {
                self.freed += MESSAGE_COST;
                if len == 0 {
                    out.done(to.op, Ok(outcome));
                    out.control.push_back(Frame::done(msg, Status::Ok));
                } else {
                    self.rendezvous.insert(msg, arriving);
                    out.control.push_back(Frame::Cts { flags: 0, msg });
                }
            }
            Body::Orphan { op, landed: true } => {
                self.copies.push(arriving);
                out.events.push_back(Event::CopyOp { from: op, to: to.op, bytes: len });
            }
            Body::Orphan { op, landed: false } => {
                if let Some(arriving) = self.arriving_mut(op) {
                    arriving.next = Some(to.op);
                }
            }
        }
    }

    fn all_arriving(&mut self) -> impl Iterator<Item = &mut Arriving> {
        self.eager.iter_mut().chain(self.rendezvous.values_mut()).chain(&mut self.copies)
    }

    fn arriving_mut(&mut self, op: OpId) -> Option<&mut Arriving> {
        self.all_arriving().find(|a| a.op == op)
    }

    /// The shell has copied a message into the memory of `op`, or could not.
    pub(crate) fn copied(&mut self, op: OpId, result: Result<(), Error>, out: &mut Out<'_>) {
        let Some(i) = self.copies.iter().position(|a| a.op == op) else { return };
        let arriving = self.copies.swap_remove(i);
        match result {
            Ok(()) => self.finished(arriving, out),
            Err(error) => self.abandon(arriving, &error, out),
        }
    }

    /// Ends what was to receive a message that will not be whole.
    fn abandon(&mut self, arriving: Arriving, error: &Error, out: &mut Out<'_>) {
        let Arriving { op, orphan, next, .. } = arriving;
        if let Some(next) = next {
            out.done(next, Err(error.clone()));
        }
        if orphan || next.is_some() {
            out.events.push_back(Event::Forget { op });
        } else {
            out.done(op, Err(error.clone()));
        }
        let other = |m: &Arrived| !matches!(m.body, Body::Orphan { op: o, .. } if o == op);
        self.arrived.retain(other);
        self.claimed.retain(|_, m| other(m));
    }

    /// The header of an eager message came: straight into a receive if one waits for it.
    pub(crate) fn eager_place(&mut self, tag: u64, len: u64) -> Option<OpId> {
        if self.eager.is_some() {
            return None;
        }
        let i = self.posted.iter().position(|p| p.accepts(tag))?;
        if self.posted[i].claim || self.posted[i].capacity < len {
            return None;
        }
        let op = self.posted.remove(i)?.op;
        let seq = self.number();
        self.eager = Some(Arriving { op, seq, tag, len, missing: len, handed: 0, orphan: false, next: None });
        Some(op)
    }

    fn number(&mut self) -> u64 {
        self.next_seq += 1;
        self.messages += 1;
        self.next_seq
    }

    /// The payload of the message that `eager_place` placed is there.
    pub(crate) fn eager_landed(&mut self, out: &mut Out<'_>) {
        if let Some(arriving) = self.eager.take() {
            self.freed += MESSAGE_COST + arriving.len;
            self.finished(arriving, out);
        }
    }

    /// A message is complete in a buffer.
    pub(crate) fn buffered(&mut self, buf: BufId, tag: u64, len: u64, out: &mut Out<'_>) {
        let seq = self.number();
        self.insert(Arrived { seq, tag, len, body: Body::Buffer(buf) }, out);
    }

    /// A message waits at the sender.
    pub(crate) fn announced(&mut self, msg: u64, tag: u64, len: u64, out: &mut Out<'_>) {
        let seq = self.number();
        self.insert(Arrived { seq, tag, len, body: Body::Remote(msg) }, out);
    }

    /// Gives a message to the first receive that accepts it, or keeps it in order. Receives that are too small end as truncated.
    fn insert(&mut self, message: Arrived, out: &mut Out<'_>) {
        if self.closed.is_some() && matches!(message.body, Body::Remote(_)) {
            // Nobody will ask for it; its sender learns by the close.
            return;
        }
        while let Some(i) = self.posted.iter().position(|p| p.accepts(message.tag)) {
            let Some(posted) = self.posted.remove(i) else { break };
            if message.len <= posted.capacity {
                return self.deliver(message, posted, out);
            }
            out.truncated(posted.op, message.len, posted.capacity);
        }
        let at = self.arrived.partition_point(|m| m.seq < message.seq);
        self.arrived.insert(at, message);
    }

    /// Where the bytes of a rendezvous message go.
    pub(crate) fn data_place(&mut self, msg: u64, offset: u64, len: u32) -> Result<Place, Violation> {
        let arriving = self.rendezvous.get_mut(&msg).ok_or(Violation::Rule("data for a message that nobody asked for"))?;
        if offset.checked_add(u64::from(len)).is_none_or(|end| end > arriving.len) {
            return Err(Violation::Rule("data beyond the end of its message"));
        }
        // Counted here and not when it has landed: on several lanes, pieces that overlap would end the message while one of them is
        // still being written.
        arriving.handed += u64::from(len);
        if arriving.handed > arriving.len {
            return Err(Violation::Rule("more data than the message has"));
        }
        Ok(Place::Op { op: arriving.op, part: 0, offset })
    }

    pub(crate) fn data_landed(&mut self, msg: u64, len: u32, out: &mut Out<'_>) -> Result<(), Violation> {
        let Some(arriving) = self.rendezvous.get_mut(&msg) else { return Ok(()) };
        arriving.missing = arriving.missing.checked_sub(len.into()).ok_or(Violation::Rule("more data than the message has"))?;
        if arriving.missing == 0 {
            if let Some(arriving) = self.rendezvous.remove(&msg) {
                out.control.push_back(Frame::done(msg, Status::Ok));
                self.finished(arriving, out);
            }
        }
        Ok(())
    }

    fn finished(&mut self, arriving: Arriving, out: &mut Out<'_>) {
        let Arriving { op, seq, tag, len, orphan, next, .. } = arriving;
        let outcome = Outcome { bytes: len, tag, seq, value: 0 };
        match next {
            Some(to) => {
                self.copies.push(Arriving { op: to, seq, tag, len, missing: 0, handed: 0, orphan: false, next: None });
                out.events.push_back(Event::CopyOp { from: op, to, bytes: len });
            }
            None if orphan => {
                let mut kept = false;
                for message in self.arrived.iter_mut().chain(self.claimed.values_mut()) {
                    if let Body::Orphan { op: o, landed } = &mut message.body {
                        *landed |= *o == op;
                        kept |= *o == op;
                    }
                }
                if !kept {
                    out.events.push_back(Event::Forget { op });
                }
            }
            None => out.done(op, Ok(outcome)),
        }
    }

    /// Gives up a receive or claim to which nothing has come yet. One that has its message goes on.
    pub(crate) fn cancel(&mut self, op: OpId, out: &mut Out<'_>) {
        if let Some(i) = self.posted.iter().position(|p| p.op == op) {
            self.posted.remove(i);
            out.done(op, Err(Error::Cancelled));
        }
    }

    /// The future of a receive or claim was dropped before it ended.
    pub(crate) fn detach(&mut self, op: OpId, out: &mut Out<'_>) -> Detached {
        if let Some(i) = self.posted.iter().position(|p| p.op == op) {
            self.posted.remove(i);
            return Detached::Released;
        }
        if let Some(arriving) = self.arriving_mut(op) {
            arriving.orphan = true;
            let Arriving { seq, tag, len, .. } = *arriving;
            self.insert(Arrived { seq, tag, len, body: Body::Orphan { op, landed: false } }, out);
            return Detached::Held;
        }
        // It had taken over from another receive that was dropped before it.
        let first = self.all_arriving().find(|a| a.next == Some(op));
        if let Some(arriving) = first {
            arriving.next = None;
            let Arriving { op: first, seq, tag, len, .. } = *arriving;
            self.insert(Arrived { seq, tag, len, body: Body::Orphan { op: first, landed: false } }, out);
        }
        Detached::Released
    }

    /// A receive ended, but its future was dropped before it saw the message: the message takes its place in the order again.
    pub(crate) fn requeue(&mut self, op: OpId, outcome: Outcome, out: &mut Out<'_>) {
        let Outcome { bytes, tag, seq, .. } = outcome;
        self.insert(Arrived { seq, tag, len: bytes, body: Body::Orphan { op, landed: true } }, out);
    }

    /// A new receive names the very memory in which an orphan waits or lands: it takes the orphan's place if the message is its
    /// turn. Answers `None` if it is not, and otherwise the outcome, once the message has landed.
    pub(crate) fn adopt(&mut self, op: OpId, tag: Option<u64>) -> Option<Option<Outcome>> {
        let i = self.arrived.iter().position(|m| tag.is_none_or(|t| t == m.tag))?;
        let Arrived { seq, tag, len, body: Body::Orphan { op: orphan, landed } } = self.arrived[i] else { return None };
        if orphan != op {
            return None;
        }
        self.arrived.remove(i);
        if landed {
            return Some(Some(Outcome { bytes: len, tag, seq, value: 0 }));
        }
        if let Some(arriving) = self.arriving_mut(op) {
            arriving.orphan = false;
        }
        Some(None)
    }

    /// The sender withdraws a message. `true` if it was not matched.
    pub(crate) fn withdraw(&mut self, msg: u64) -> bool {
        let is_it = |m: &Arrived| matches!(m.body, Body::Remote(n) if n == msg);
        let before = self.arrived.len() + self.claimed.len();
        self.arrived.retain(|m| !is_it(m));
        self.claimed.retain(|_, m| !is_it(m));
        let found = self.arrived.len() + self.claimed.len() != before;
        if found {
            self.freed += MESSAGE_COST;
        }
        found
    }

    /// No more messages are taken. Receives that wait end at once; messages that are landing still land, since engines write into their
    /// memory; what has arrived whole stays receivable.
    pub(crate) fn close(&mut self, error: &Error, out: &mut Out<'_>) {
        if self.closed.is_none() {
            self.closed = Some(error.clone());
        }
        for posted in self.posted.drain(..) {
            out.done(posted.op, Err(error.clone()));
        }
        let here = |m: &Arrived| !matches!(m.body, Body::Remote(_));
        self.arrived.retain(here);
        self.claimed.retain(|_, m| here(m));
    }

    /// Ends everything that needs the peer. No engine touches any memory any more; copies of what is here go on.
    pub(crate) fn fail(&mut self, error: &Error, out: &mut Out<'_>) {
        self.close(error, out);
        let landing: Vec<_> = self.eager.take().into_iter().chain(self.rendezvous.drain().map(|(_, a)| a)).collect();
        for arriving in landing {
            self.abandon(arriving, error, out);
        }
    }

    /// Whether messages are landing.
    pub(crate) fn is_landing(&self) -> bool {
        self.eager.is_some() || !self.rendezvous.is_empty()
    }

    /// Messages that nobody has asked for yet.
    pub(crate) fn unclaimed(&self) -> usize {
        self.arrived.len()
    }
}

/// What the parts of a connection write to.
pub(crate) struct Out<'a> {
    pub events: &'a mut VecDeque<Event>,
    pub control: &'a mut VecDeque<Frame>,
    pub buffers: &'a mut Buffers,
}

impl Out<'_> {
    pub(crate) fn done(&mut self, op: OpId, result: Result<Outcome, Error>) {
        self.events.push_back(Event::Done { op, result });
    }

    fn truncated(&mut self, op: OpId, needed: u64, got: u64) {
        self.done(op, Err(Error::Truncated { needed, got }));
    }
}

/// The token for an eager payload that goes to `place`.
pub(crate) fn eager_token(place: Place, tag: u64, order: u64, len: u32) -> Token {
    match place {
        Place::Buffer(buf) => Token::EagerBuffered { buf, tag, order, len },
        _ => Token::EagerDirect,
    }
}
