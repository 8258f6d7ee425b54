//! Messages to send: eager ones within the credit that the peer granted, longer ones by rendezvous.

use std::collections::{HashMap, VecDeque};

use super::inbox::Out;
use super::{Limits, MESSAGE_COST, OpId, Outcome, Place, Sent, Shape, Transmit, Violation, refusal};
use crate::error::Error;
use crate::wire::frame::{Frame, Status};

#[derive(Debug, Clone, Copy)]
enum What {
    Message { tag: u64, len: u64, shape: Shape },
    Flush,
}

#[derive(Debug, Clone, Copy)]
struct Queued {
    op: OpId,
    /// One-sided operations that were issued before it.
    order: u64,
    what: What,
}

/// A message that was announced to the peer.
#[derive(Debug, Clone, Copy)]
struct Announced {
    op: OpId,
    len: u64,
    segment: u32,
    /// Bytes handed to the engine.
    sent: u64,
    /// Frames that the engine has not let go of.
    in_engine: u32,
    asked_for: bool,
    finished: Option<Status>,
}

#[derive(Debug)]
pub(crate) struct Outbox {
    queue: VecDeque<Queued>,
    /// Eager messages that the engine has and has not let go of.
    leaving: Vec<OpId>,
    granted: u64,
    spent: u64,
    announced: HashMap<u64, Announced>,
    /// Rendezvous messages with bytes to send.
    bulk: VecDeque<u64>,
    flushes: VecDeque<(u64, OpId)>,
    next_msg: u64,
    next_flush: u64,
}

impl Outbox {
    pub(crate) fn new(limits: &Limits) -> Self {
        Outbox {
            queue: VecDeque::new(),
            leaving: Vec::new(),
            granted: limits.credit_out,
            spent: 0,
            announced: HashMap::new(),
            bulk: VecDeque::new(),
            flushes: VecDeque::new(),
            next_msg: 0,
            next_flush: 0,
        }
    }

    pub(crate) fn send(&mut self, op: OpId, tag: u64, len: u64, shape: Shape, order: u64) {
        self.queue.push_back(Queued { op, order, what: What::Message { tag, len, shape } });
    }

    pub(crate) fn flush(&mut self, op: OpId, order: u64) {
        self.queue.push_back(Queued { op, order, what: What::Flush });
    }

    /// The next message or flush, if order and credit allow it. `ready` is how many one-sided operations have left.
    pub(crate) fn poll(&mut self, ready: u64) -> Option<Transmit> {
        let Queued { op, order, what } = *self.queue.front()?;
        if order > ready {
            return None;
        }
        let transmit = match what {
            What::Flush => {
                self.next_flush += 1;
                let id = self.next_flush;
                self.flushes.push_back((id, op));
                Transmit { head: Frame::Flush { flags: 0, id, order }.encode(0), payload: None, sent: Sent::Nothing }
            }
            What::Message { tag, len, shape } if shape.eager_max.is_some_and(|max| len <= u64::from(max)) => {
                self.spend(MESSAGE_COST + len)?;
                let len = len as u32;
                self.leaving.push(op);
                Transmit {
                    head: Frame::Eager { flags: 0, tag, order }.encode(len),
                    payload: Some((Place::Op { op, part: 0, offset: 0 }, len)),
                    sent: Sent::Eager { op, len },
                }
            }
            What::Message { tag, len, shape } => {
                self.spend(MESSAGE_COST)?;
                self.next_msg += 1;
                let msg = self.next_msg;
                let segment = shape.segment;
                let announced = Announced { op, len, segment, sent: 0, in_engine: 0, asked_for: false, finished: None };
                self.announced.insert(msg, announced);
                let head = Frame::Rts { flags: 0, tag, order, msg, total: len }.encode(0);
                Transmit { head, payload: None, sent: Sent::Nothing }
            }
        };
        self.queue.pop_front();
        Some(transmit)
    }

    fn spend(&mut self, cost: u64) -> Option<()> {
        if self.granted - self.spent < cost {
            return None;
        }
        self.spent += cost;
        Some(())
    }

    /// The peer granted `granted` units since the beginning.
    pub(crate) fn grant(&mut self, granted: u64, window: u64) -> Result<(), Violation> {
        if granted < self.granted || granted - self.spent > window {
            return Err(Violation::Rule("a grant of credit that cannot be"));
        }
        self.granted = granted;
        Ok(())
    }

    /// The next piece of a rendezvous message.
    pub(crate) fn poll_bulk(&mut self) -> Option<Transmit> {
        loop {
            let msg = *self.bulk.front()?;
            let Some(announced) = self.announced.get_mut(&msg).filter(|a| a.finished.is_none() && a.sent < a.len) else {
                self.bulk.pop_front();
                continue;
            };
            let offset = announced.sent;
            let len = (announced.len - offset).min(announced.segment.into()) as u32;
            announced.sent += u64::from(len);
            announced.in_engine += 1;
            // Take turns, so that a long message does not keep the others waiting.
            self.bulk.rotate_left(1);
            return Some(Transmit {
                head: Frame::Data { flags: 0, msg, offset }.encode(len),
                payload: Some((Place::Op { op: announced.op, part: 0, offset }, len)),
                sent: Sent::Data { msg },
            });
        }
    }

    /// The receiver wants the message.
    pub(crate) fn asked_for(&mut self, msg: u64) -> Result<(), Violation> {
        match self.announced.get_mut(&msg) {
            Some(announced) if !announced.asked_for => {
                announced.asked_for = true;
                self.bulk.push_back(msg);
                Ok(())
            }
            _ => Err(Violation::Rule("the peer asked for a message that was not announced")),
        }
    }

    /// The receiver is done with the message.
    pub(crate) fn finished(&mut self, msg: u64, status: Status, out: &mut Out<'_>) -> Result<(), Violation> {
        let announced =
            self.announced.get_mut(&msg).ok_or(Violation::Rule("the peer finished a message that was not announced"))?;
        announced.finished = Some(status);
        self.settle(msg, out);
        Ok(())
    }

    /// The engine has let go of an eager message. Not after a failure, which has ended it already.
    pub(crate) fn eager_sent(&mut self, op: OpId, len: u32, out: &mut Out<'_>) {
        if let Some(i) = self.leaving.iter().position(|&leaving| leaving == op) {
            self.leaving.swap_remove(i);
            out.done(op, Ok(Outcome { bytes: len.into(), ..Outcome::default() }));
        }
    }

    /// The engine has let go of a piece.
    pub(crate) fn data_sent(&mut self, msg: u64, out: &mut Out<'_>) {
        if let Some(announced) = self.announced.get_mut(&msg) {
            announced.in_engine -= 1;
            self.settle(msg, out);
        }
    }

    fn settle(&mut self, msg: u64, out: &mut Out<'_>) {
        let Some(&Announced { op, len, in_engine: 0, finished: Some(status), .. }) = self.announced.get(&msg) else { return };
        self.announced.remove(&msg);
        let result = match status {
            Status::Ok => Ok(Outcome { bytes: len, ..Outcome::default() }),
            status => Err(refusal(status, 0, len)),
        };
        out.done(op, result);
    }

    pub(crate) fn flushed(&mut self, id: u64, out: &mut Out<'_>) -> Result<(), Violation> {
        match self.flushes.pop_front() {
            Some((expected, op)) if expected == id => {
                out.done(op, Ok(Outcome::default()));
                Ok(())
            }
            _ => Err(Violation::Rule("an answer to a flush that was not asked")),
        }
    }

    /// Gives a message up if the peer has not matched it yet. Its end is an event either way.
    pub(crate) fn cancel(&mut self, op: OpId, out: &mut Out<'_>) {
        if let Some(i) = self.queue.iter().position(|q| q.op == op) {
            self.queue.remove(i);
            return out.done(op, Err(Error::Cancelled));
        }
        if let Some((&msg, _)) = self.announced.iter().find(|(_, a)| a.op == op && !a.asked_for && a.finished.is_none()) {
            out.control.push_back(Frame::Withdraw { flags: 0, msg });
        }
    }

    pub(crate) fn has_output(&self) -> bool {
        !self.queue.is_empty() || !self.bulk.is_empty()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.announced.is_empty() && self.flushes.is_empty()
    }

    /// Messages that wait for credit or order.
    pub(crate) fn queued(&self) -> usize {
        self.queue.len()
    }

    pub(crate) fn fail(&mut self, error: &Error, out: &mut Out<'_>) {
        let queued = self.queue.drain(..).map(|q| q.op);
        let flushes = self.flushes.drain(..).map(|(_, op)| op);
        let announced = self.announced.drain().map(|(_, a)| a.op);
        for op in queued.chain(flushes).chain(announced).chain(self.leaving.drain(..)) {
            out.done(op, Err(error.clone()));
        }
        self.bulk.clear();
    }
}
