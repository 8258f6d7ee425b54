//! One-sided operations that the peer started: checked here, carried out by the shell.
//!
//! Each access is checked against the exposure's range, rights, generation and token, frame by frame, so that a revoked exposure
//! stops a transfer in its middle. Operations complete in any order, but notifications are delivered, reads and atomics are
//! executed, and later messages are released, only when every earlier operation has landed.

use std::collections::VecDeque;

use super::inbox::Out;
use super::notes::Notes;
use super::{Event, Landing, Place, Sent, Token, Transmit, Violation, WINDOW};
use crate::wire::frame::{FLAG_NOTIFY, FLAG_SWAP, Frame, Status};

/// What an exposure allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rights {
    pub read: bool,
    pub write: bool,
    pub atomic: bool,
}

#[derive(Debug, Clone, Copy)]
struct Live {
    len: u64,
    rights: Rights,
    token: u64,
    segment: u32,
}

#[derive(Debug, Default)]
struct Exposure {
    generation: u32,
    live: Option<Live>,
}

#[derive(Debug, Clone, Copy)]
struct Access {
    exposure: u64,
    token: u64,
    offset: u64,
    len: u64,
}

#[derive(Debug)]
enum Op {
    /// Its first frame has not come yet, but that of a later one has.
    Unknown,
    Write {
        total: u64,
        landed: u64,
        active: u32,
        status: Status,
        notify: Option<u64>,
    },
    Read(Access),
    Atomic {
        access: Access,
        swap: bool,
        operand: u64,
        compare: u64,
    },
    /// The shell is at it.
    Executing,
    Over {
        notify: Option<u64>,
    },
}

#[derive(Debug, Clone, Copy)]
struct Serve {
    seq: u64,
    access: Access,
    sent: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Target {
    exposures: Vec<Exposure>,
    vacant: Vec<u32>,
    ops: VecDeque<Op>,
    base: u64,
    serving: VecDeque<Serve>,
}

impl Target {
    /// Opens `len` bytes. Answers the number under which the shell keeps the memory, and the name that travels.
    /// Its bytes leave in frames of at most `segment` bytes.
    pub(crate) fn expose(&mut self, len: u64, rights: Rights, token: u64, segment: u32) -> (u32, u64) {
        let index = self.vacant.pop().unwrap_or_else(|| {
            self.exposures.push(Exposure::default());
            (self.exposures.len() - 1) as u32
        });
        let exposure = &mut self.exposures[index as usize];
        exposure.live = Some(Live { len, rights, token, segment });
        (index, u64::from(index) | u64::from(exposure.generation) << 32)
    }

    /// From now on no access is allowed. The shell sees to it that an engine at work has stopped.
    pub(crate) fn revoke(&mut self, index: u32) {
        if let Some(exposure) = self.exposures.get_mut(index as usize) {
            if exposure.live.take().is_some() {
                exposure.generation = exposure.generation.wrapping_add(1);
                self.vacant.push(index);
            }
        }
    }

    pub(crate) fn is_exposed(&self, name: u64) -> bool {
        self.live(name).is_ok()
    }

    fn live(&self, name: u64) -> Result<(u32, Live), Status> {
        let (index, generation) = (name as u32, (name >> 32) as u32);
        let exposure = self.exposures.get(index as usize).ok_or(Status::Unknown)?;
        match exposure.live {
            Some(live) if exposure.generation == generation => Ok((index, live)),
            _ if generation < exposure.generation => Err(Status::Revoked),
            _ => Err(Status::Unknown),
        }
    }

    /// Whether bytes may still be written into this exposure by this operation.
    pub(crate) fn wants(&self, seq: u64, name: u64) -> bool {
        let op = seq.checked_sub(self.base).and_then(|i| self.ops.get(usize::try_from(i).ok()?));
        matches!(op, Some(Op::Write { status: Status::Ok, .. })) && self.live(name).is_ok()
    }

    fn check(&self, access: &Access, allowed: impl Fn(&Rights) -> bool) -> Result<u32, Status> {
        let (index, live) = self.live(access.exposure)?;
        if live.token != access.token {
            return Err(Status::Unknown);
        }
        if !allowed(&live.rights) {
            return Err(Status::Rights);
        }
        match access.offset.checked_add(access.len) {
            Some(end) if end <= live.len => Ok(index),
            _ => Err(Status::Bounds),
        }
    }

    /// The place of an operation in the window; `None` if it is over.
    fn slot(&mut self, seq: u64) -> Result<Option<&mut Op>, Violation> {
        let Some(index) = seq.checked_sub(self.base) else { return Ok(None) };
        if index >= WINDOW {
            return Err(Violation::Rule("more one-sided operations open than the window allows"));
        }
        while self.ops.len() <= index as usize {
            self.ops.push_back(Op::Unknown);
        }
        Ok(self.ops.get_mut(index as usize))
    }

    pub(crate) fn on_write(&mut self, frame: &Frame, len: u32, out: &mut Out<'_>) -> Result<Landing, Violation> {
        let Frame::Write { flags, seq, total, exposure, token, offset, notify } = *frame else {
            return Err(Violation::Rule("not a write"));
        };
        let nowhere = Landing { place: Place::Discard, token: Token::None };
        let notify = (flags & FLAG_NOTIFY != 0).then_some(notify);
        match self.slot(seq)? {
            None | Some(Op::Over { .. }) => return Ok(nowhere),
            Some(op @ Op::Unknown) => *op = Op::Write { total, landed: 0, active: 0, status: Status::Ok, notify },
            Some(Op::Write { total: t, .. }) if *t == total => {}
            Some(_) => return Err(Violation::Rule("one number for two one-sided operations")),
        }
        let access = Access { exposure, token, offset, len: len.into() };
        let checked = self.check(&access, |rights| rights.write);
        let Some(Op::Write { active, status, .. }) = self.slot(seq)? else { return Ok(nowhere) };
        match checked {
            Ok(index) if *status == Status::Ok => {
                *active += 1;
                let place = Place::Exposed { exposure: index, offset };
                Ok(Landing { place, token: Token::Write { seq, len, exposure } })
            }
            refused => {
                if let (Err(refused), Status::Ok) = (refused, *status) {
                    *status = refused;
                }
                self.settle(seq, out);
                Ok(nowhere)
            }
        }
    }

    pub(crate) fn write_landed(&mut self, seq: u64, len: u32, name: u64, out: &mut Out<'_>) -> Result<(), Violation> {
        let revoked = self.live(name).is_err();
        if let Some(Op::Write { total, landed, active, status, .. }) = self.slot(seq)? {
            *active -= 1;
            *landed += u64::from(len);
            if *landed > *total {
                return Err(Violation::Rule("more bytes than the write has"));
            }
            if revoked && *status == Status::Ok {
                *status = Status::Revoked;
            }
        }
        self.settle(seq, out);
        Ok(())
    }

    /// Ends a write that has landed, or failed and come to rest.
    fn settle(&mut self, seq: u64, out: &mut Out<'_>) {
        let Ok(Some(op)) = self.slot(seq) else { return };
        if let Op::Write { total, landed, active: 0, status, notify } = *op {
            if status != Status::Ok || landed == total {
                *op = Op::Over { notify: notify.filter(|_| status == Status::Ok) };
                out.control.push_back(Frame::reply(seq, status, 0));
            }
        }
    }

    pub(crate) fn on_read(&mut self, frame: &Frame) -> Result<(), Violation> {
        let Frame::Read { seq, exposure, token, offset, len, .. } = *frame else {
            return Err(Violation::Rule("not a read"));
        };
        self.enter(seq, Op::Read(Access { exposure, token, offset, len }))
    }

    pub(crate) fn on_atomic(&mut self, frame: &Frame) -> Result<(), Violation> {
        let Frame::Atomic { flags, seq, exposure, token, offset, operand, compare } = *frame else {
            return Err(Violation::Rule("not an atomic"));
        };
        let access = Access { exposure, token, offset, len: 8 };
        self.enter(seq, Op::Atomic { access, swap: flags & FLAG_SWAP != 0, operand, compare })
    }

    fn enter(&mut self, seq: u64, new: Op) -> Result<(), Violation> {
        match self.slot(seq)? {
            // Given up before it came.
            None | Some(Op::Over { .. }) => Ok(()),
            Some(op @ Op::Unknown) => {
                *op = new;
                Ok(())
            }
            Some(_) => Err(Violation::Rule("one number for two one-sided operations")),
        }
    }

    pub(crate) fn on_abort(&mut self, seq: u64, out: &mut Out<'_>) -> Result<(), Violation> {
        if let Some(i) = self.serving.iter().position(|s| s.seq == seq) {
            self.serving.remove(i);
            out.control.push_back(Frame::reply(seq, Status::Aborted, 0));
            return Ok(());
        }
        match self.slot(seq)? {
            // Its answer is on the way.
            None | Some(Op::Over { .. } | Op::Executing) => {}
            Some(Op::Write { status, .. }) => {
                *status = Status::Aborted;
                self.settle(seq, out);
            }
            Some(op) => {
                *op = Op::Over { notify: None };
                out.control.push_back(Frame::reply(seq, Status::Aborted, 0));
            }
        }
        Ok(())
    }

    /// Moves on over everything that is complete. Answers how many operations, from the first on, have landed.
    pub(crate) fn advance(&mut self, notes: &mut Notes, out: &mut Out<'_>) -> Result<u64, Violation> {
        loop {
            match self.ops.front() {
                Some(&Op::Over { notify }) => {
                    self.ops.pop_front();
                    self.base += 1;
                    if let Some(tag) = notify {
                        notes.add(tag, 1, out.events)?;
                    }
                }
                Some(&Op::Read(access)) => {
                    match self.check(&access, |rights| rights.read) {
                        Ok(_) if access.len > 0 => self.serving.push_back(Serve { seq: self.base, access, sent: 0 }),
                        checked => {
                            let status = checked.err().unwrap_or(Status::Ok);
                            out.control.push_back(Frame::reply(self.base, status, 0));
                        }
                    }
                    self.ops[0] = Op::Over { notify: None };
                }
                Some(&Op::Atomic { access, swap, operand, compare }) => {
                    let checked = self
                        .check(&access, |rights| rights.atomic)
                        .and_then(|index| if access.offset % 8 == 0 { Ok(index) } else { Err(Status::Misaligned) });
                    match checked {
                        Ok(exposure) => {
                            let (seq, offset) = (self.base, access.offset);
                            out.events.push_back(Event::Atomic { seq, exposure, offset, swap, operand, compare });
                            self.ops[0] = Op::Executing;
                        }
                        Err(status) => {
                            out.control.push_back(Frame::reply(self.base, status, 0));
                            self.ops[0] = Op::Over { notify: None };
                        }
                    }
                }
                _ => return Ok(self.base),
            }
        }
    }

    pub(crate) fn atomic_done(&mut self, seq: u64, result: Result<u64, Status>, out: &mut Out<'_>) {
        if let Ok(Some(op @ Op::Executing)) = self.slot(seq) {
            *op = Op::Over { notify: None };
            let (status, value) = match result {
                Ok(value) => (Status::Ok, value),
                Err(status) => (status, 0),
            };
            out.control.push_back(Frame::reply(seq, status, value));
        }
    }

    /// The next piece of an answer to a read.
    pub(crate) fn poll_bulk(&mut self, out: &mut Out<'_>) -> Option<Transmit> {
        loop {
            let Serve { seq, access, sent } = *self.serving.front()?;
            let rest = Access { offset: access.offset + sent, len: access.len - sent, ..access };
            match self.check(&rest, |rights| rights.read) {
                Err(status) => {
                    self.serving.pop_front();
                    out.control.push_back(Frame::reply(seq, status, 0));
                }
                Ok(exposure) => {
                    let segment = self.live(access.exposure).map_or(u32::MAX, |(_, live)| live.segment);
                    let len = rest.len.min(segment.into()) as u32;
                    if u64::from(len) == rest.len {
                        self.serving.pop_front();
                    } else if let Some(serve) = self.serving.front_mut() {
                        serve.sent += u64::from(len);
                        // Take turns.
                        self.serving.rotate_left(1);
                    }
                    let place = Place::Exposed { exposure, offset: rest.offset };
                    let head = Frame::ReadData { flags: 0, seq, offset: sent }.encode(len);
                    return Some(Transmit { head, payload: Some((place, len)), sent: Sent::Nothing });
                }
            }
        }
    }

    pub(crate) fn has_output(&self) -> bool {
        !self.serving.is_empty()
    }

    pub(crate) fn clear(&mut self) {
        self.serving.clear();
        self.ops.clear();
    }
}
