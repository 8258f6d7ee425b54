//! One-sided operations that this side started.
//!
//! They are numbered in the order in which they were issued, leave in that order, and may end in any. At most `WINDOW` of them
//! are open at the target at a time; the rest wait here.

use std::collections::VecDeque;

use super::inbox::Out;
use super::{OpId, Outcome, Place, Sent, Token, Transmit, Violation, WINDOW, refusal};
use crate::error::Error;
use crate::wire::frame::{FLAG_NOTIFY, FLAG_SWAP, Frame, Status};

/// A range of memory that the peer exposed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RemoteRange {
    pub exposure: u64,
    pub token: u64,
    pub offset: u64,
    pub len: u64,
}

/// The pieces of a write: usually one, and no allocation for it.
#[derive(Debug, Clone)]
pub(crate) enum Parts {
    One(RemoteRange),
    Many(Box<[RemoteRange]>),
}

impl Parts {
    pub(crate) fn as_slice(&self) -> &[RemoteRange] {
        match self {
            Parts::One(range) => std::slice::from_ref(range),
            Parts::Many(ranges) => ranges,
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) enum Work {
    Write { parts: Parts, notify: Option<u64> },
    Read { remote: RemoteRange },
    Atomic { remote: RemoteRange, swap: bool, operand: u64, compare: u64 },
}

#[derive(Debug)]
struct Started {
    op: OpId,
    work: Work,
    segment: u32,
    total: u64,
    /// Next piece and byte in it to hand to an engine, and bytes handed over so far.
    part: u32,
    offset: u64,
    handed: u64,
    /// Bytes of a read that have landed.
    landed: u64,
    /// Payloads that an engine has not let go of, in either direction.
    in_engine: u32,
    /// A frame of it has left; all of them have.
    begun: bool,
    left: bool,
    aborting: bool,
    answer: Option<(Status, u64)>,
    /// Its end was reported.
    over: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Initiator {
    ops: VecDeque<Started>,
    /// Number of the first in `ops`.
    base: u64,
    /// Number of the first that has not wholly left.
    next: u64,
}

impl Initiator {
    /// How many have been issued so far.
    pub(crate) fn issued(&self) -> u64 {
        self.base + self.ops.len() as u64
    }

    /// How many, from the first on, have wholly left.
    pub(crate) fn left(&self) -> u64 {
        self.next
    }

    pub(crate) fn has_output(&self) -> bool {
        self.next < self.issued()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    pub(crate) fn start(&mut self, op: OpId, work: Work, segment: u32) {
        let total = match &work {
            Work::Write { parts, .. } => parts.as_slice().iter().map(|p| p.len).sum(),
            Work::Read { remote } => remote.len,
            Work::Atomic { .. } => 8,
        };
        self.ops.push_back(Started {
            op,
            work,
            segment,
            total,
            part: 0,
            offset: 0,
            handed: 0,
            landed: 0,
            in_engine: 0,
            begun: false,
            left: false,
            aborting: false,
            answer: None,
            over: false,
        });
    }

    fn index(&self, seq: u64) -> Option<usize> {
        usize::try_from(seq.checked_sub(self.base)?).ok().filter(|&i| i < self.ops.len())
    }

    fn get_mut(&mut self, seq: u64) -> Option<&mut Started> {
        self.index(seq).and_then(|i| self.ops.get_mut(i))
    }

    /// The next frame. Lanes besides the first (`bulk_only`) carry only pieces of long writes.
    pub(crate) fn poll(&mut self, bulk_only: bool) -> Option<Transmit> {
        loop {
            let seq = self.next;
            if seq >= self.base + WINDOW {
                return None;
            }
            let started = self.get_mut(seq)?;
            if started.aborting && started.begun {
                started.left = true;
            } else if bulk_only && (started.aborting || started.total <= u64::from(started.segment)) {
                return None;
            }
            let transmit = if started.left { None } else { started.transmit(seq, bulk_only) };
            if started.left {
                self.next += 1;
                self.trim();
            }
            if transmit.is_some() || self.next == seq {
                return transmit;
            }
        }
    }

    /// The engine has let go of a piece of a write.
    pub(crate) fn write_sent(&mut self, seq: u64, out: &mut Out<'_>) {
        if let Some(started) = self.get_mut(seq) {
            started.in_engine -= 1;
            self.settle(seq, out);
        }
    }

    pub(crate) fn replied(&mut self, seq: u64, status: Status, value: u64, out: &mut Out<'_>) -> Result<(), Violation> {
        match self.get_mut(seq) {
            Some(started) if started.answer.is_none() && started.begun => {
                started.answer = Some((status, value));
                // Nothing more of it needs to leave.
                started.aborting |= !started.left;
                self.settle(seq, out);
                Ok(())
            }
            _ => Err(Violation::Rule("an answer to an operation that is not open")),
        }
    }

    /// Where a piece of a read's answer goes.
    pub(crate) fn read_place(&mut self, seq: u64, offset: u64, len: u32) -> Result<(Place, Token), Violation> {
        if seq < self.base {
            // It was given up, and this piece was still on its way by another lane.
            return Ok((Place::Discard, Token::None));
        }
        let started = self.get_mut(seq).ok_or(Violation::Rule("an answer to a read that is not open"))?;
        let end = offset.checked_add(len.into()).ok_or(Violation::Rule("an answer beyond the end of its read"))?;
        if !matches!(started.work, Work::Read { .. }) || !started.left || end > started.total {
            return Err(Violation::Rule("an answer that fits no read"));
        }
        started.in_engine += 1;
        let wanted = !started.aborting && started.answer.is_none();
        let place = if wanted { Place::Op { op: started.op, part: 0, offset } } else { Place::Discard };
        Ok((place, Token::Read { seq, len }))
    }

    /// Whether bytes for this read are still wanted.
    pub(crate) fn wants(&self, seq: u64) -> bool {
        self.index(seq).and_then(|i| self.ops.get(i)).is_some_and(|s| !s.aborting && !s.over)
    }

    pub(crate) fn read_landed(&mut self, seq: u64, len: u32, out: &mut Out<'_>) {
        if let Some(started) = self.get_mut(seq) {
            started.in_engine -= 1;
            started.landed += u64::from(len);
            if started.landed >= started.total && started.answer.is_none() {
                started.answer = Some((Status::Ok, 0));
            }
            self.settle(seq, out);
        }
    }

    fn settle(&mut self, seq: u64, out: &mut Out<'_>) {
        let Some(started) = self.get_mut(seq) else { return };
        if let (Some((status, value)), 0, false) = (started.answer, started.in_engine, started.over) {
            started.over = true;
            let (offset, len, is_read) = match &started.work {
                Work::Write { parts, .. } => (parts.as_slice().first().map_or(0, |p| p.offset), started.total, false),
                Work::Read { remote } => (remote.offset, remote.len, true),
                Work::Atomic { remote, .. } => (remote.offset, remote.len, false),
            };
            let result = match status {
                // What came after a read was given up was thrown away.
                Status::Ok if is_read && started.aborting => Err(Error::Cancelled),
                Status::Ok => Ok(Outcome { bytes: started.total, value, ..Outcome::default() }),
                status => Err(refusal(status, offset, len)),
            };
            out.done(started.op, result);
        }
        self.trim();
    }

    fn trim(&mut self) {
        while self.ops.front().is_some_and(|s| s.over && s.left && s.answer.is_some() && s.in_engine == 0) {
            self.ops.pop_front();
            self.base += 1;
        }
    }

    /// Gives an operation up. Its end is an event, when no engine touches its memory any more.
    pub(crate) fn cancel(&mut self, op: OpId, out: &mut Out<'_>) {
        let Some(index) = self.ops.iter().position(|s| s.op == op) else { return };
        let started = &mut self.ops[index];
        if started.aborting || started.over {
            return;
        }
        started.aborting = true;
        if started.begun {
            out.control.push_back(Frame::Abort { flags: 0, seq: self.base + index as u64 });
        } else {
            // Nothing has left, so nothing has to come to rest. `poll` tells the target, to fill its place in the order.
            started.over = true;
            out.done(op, Err(Error::Cancelled));
        }
    }

    pub(crate) fn fail(&mut self, error: &Error, out: &mut Out<'_>) {
        for started in self.ops.drain(..).filter(|s| !s.over) {
            out.done(started.op, Err(error.clone()));
        }
        self.next = 0;
        self.base = 0;
    }
}

impl Started {
    fn transmit(&mut self, seq: u64, bulk_only: bool) -> Option<Transmit> {
        let plain = |frame: Frame| Transmit { head: frame.encode(0), payload: None, sent: Sent::Nothing };
        let transmit = match &self.work {
            _ if self.aborting => {
                self.left = true;
                plain(Frame::Abort { flags: 0, seq })
            }
            Work::Write { parts, notify } => {
                let parts = parts.as_slice();
                while self.total > 0 && parts.get(self.part as usize).is_some_and(|p| p.len == self.offset) {
                    self.part += 1;
                    self.offset = 0;
                }
                let range = parts.get(self.part as usize)?;
                let len = (range.len - self.offset).min(self.segment.into()) as u32;
                let place = Place::Op { op: self.op, part: self.part, offset: self.offset };
                let frame = Frame::Write {
                    flags: if notify.is_some() { FLAG_NOTIFY } else { 0 },
                    seq,
                    total: self.total,
                    exposure: range.exposure,
                    token: range.token,
                    offset: range.offset + self.offset,
                    notify: notify.unwrap_or(0),
                };
                self.offset += u64::from(len);
                self.handed += u64::from(len);
                self.left = self.handed == self.total;
                self.in_engine += 1;
                Transmit { head: frame.encode(len), payload: Some((place, len)), sent: Sent::Write { seq } }
            }
            _ if bulk_only => return None,
            Work::Read { remote } => {
                self.left = true;
                let RemoteRange { exposure, token, offset, len } = *remote;
                plain(Frame::Read { flags: 0, seq, exposure, token, offset, len })
            }
            Work::Atomic { remote, swap, operand, compare } => {
                self.left = true;
                let RemoteRange { exposure, token, offset, .. } = *remote;
                let (flags, operand, compare) = (if *swap { FLAG_SWAP } else { 0 }, *operand, *compare);
                plain(Frame::Atomic { flags, seq, exposure, token, offset, operand, compare })
            }
        };
        self.begun = true;
        Some(transmit)
    }
}
