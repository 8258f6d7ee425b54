//! What the engines of a connection deliver to.

use std::sync::MutexGuard;

use super::conn::Conn;
use super::copies::{Job, Then};
use super::state::State;
use crate::error::{Error, Result};
use crate::memory::Chunk;
use crate::memory::cuda::staging::Use;
use crate::memory::cuda::{Transfer, copy};
use crate::path::{self, Link};
use crate::proto::{Place, Token};
use crate::transport::tcp::rx::violation;
use crate::transport::{Arrival, Dest, ReadMark, Sink};
use crate::wire::frame::Frame;

/// Takes what the lanes of a connection receive. Holds the state's lock between `resume` and `pause`.
pub(super) struct ConnSink<'a> {
    conn: &'a Conn,
    state: Option<MutexGuard<'a, State>>,
    heard: bool,
    /// Something is left to wake or drop when the lane's lock is free.
    pub(super) leftovers: bool,
}

impl<'a> ConnSink<'a> {
    pub(super) fn new(conn: &'a Conn) -> Self {
        ConnSink { conn, state: None, heard: false, leftovers: false }
    }

    fn state(&mut self) -> &mut State {
        let conn = self.conn;
        self.state.get_or_insert_with(|| conn.lock())
    }

    fn end(&mut self, token: Token) -> Result<()> {
        let state = self.state();
        state.proto.landed(token).map_err(|e| violation(&e))?;
        state.settle();
        Ok(())
    }
}

impl Sink for ConnSink<'_> {
    fn resume(&mut self) {
        let heard = self.heard;
        self.heard = true;
        let state = self.state();
        if !heard {
            state.proto.heard();
        }
    }

    fn pause(&mut self) {
        if let Some(state) = self.state.take() {
            self.leftovers |= self.conn.unlock_in_lane(state);
        }
    }

    fn frame(&mut self, head: &[u8], payload: u32, direct: bool) -> Result<(Dest, Arrival)> {
        let state = self.state();
        let frame = Frame::decode(head).map_err(|e| violation(&e))?;
        let landing = state.proto.on_frame(&frame, payload).map_err(|e| violation(&e))?;
        state.counters.bytes_received += u64::from(payload);
        let op = match landing.place {
            Place::Op { op, .. } => Some(op),
            _ => None,
        };
        let mut arrival = Arrival { token: landing.token, op, onward: None };
        let dest = match landing.place {
            Place::Discard => Dest::Discard,
            Place::Buffer(_) => Dest::Sink,
            _ if payload == 0 => Dest::Discard,
            place => match state.chunk(place, payload) {
                Some(chunk) if direct || chunk.device().is_none() => Dest::Memory(chunk),
                Some(chunk) => {
                    arrival.onward = Some(chunk);
                    self.place(&arrival)?
                }
                None => Dest::Discard,
            },
        };
        Ok((dest, arrival))
    }

    fn place(&mut self, arrival: &Arrival) -> Result<Dest> {
        let Some((onward, device)) = arrival.onward.as_ref().and_then(|chunk| Some((chunk, chunk.device()?))) else {
            return Ok(Dest::Discard);
        };
        if !self.state().proto.wants(&arrival.token) {
            return Ok(Dest::Discard);
        }
        let gpu = self.conn.gpu();
        let slot = gpu.staging.take(device, Use::Incoming, onward.len() as u32, &gpu.ring)?;
        Ok(slot.map_or(Dest::Later, Dest::Memory))
    }

    fn carry(&mut self, from: Chunk, to: Chunk, arrival: Arrival, read: Option<ReadMark>) -> Result<()> {
        let conn = self.conn;
        let kind = path::kind_of(Link::Inproc, to.kind(), from.kind());
        if !conn.info.policy.allows(kind) {
            return Err(Error::NoPath { rejected: format!("{kind}: a message came that only this path could take") });
        }
        let Arrival { token, op, .. } = arrival;
        let gpu = to.device().or_else(|| from.device()).map(|device| device.ordinal);
        if let Some(slot) = op.and_then(|op| self.state().ops.get_mut(op.0)) {
            (slot.route.kind, slot.route.gpu) = (kind, gpu);
        }
        self.pause();
        let gpu = conn.gpu();
        let mut transfer = Transfer::new(from, to, Some(gpu.staging.clone()));
        // What can be under way at once is.
        transfer.poll(&gpu.ring)?;
        conn.copies.push(Job::transfer(transfer, Then::Landed { token, read, op, staged: 0 }));
        self.resume();
        Ok(())
    }

    fn put(&mut self, token: &Token, at: usize, bytes: &[u8]) {
        if let Token::EagerBuffered { buf, .. } = *token {
            if let Some(to) = self.state().proto.buffer_mut(buf).get_mut(at..at + bytes.len()) {
                to.copy_from_slice(bytes);
            }
        }
    }

    fn wants(&mut self, token: &Token) -> bool {
        self.state().proto.wants(token)
    }

    fn landed(&mut self, dest: Dest, arrival: Arrival) -> Result<()> {
        let Arrival { token, op, onward } = arrival;
        match (dest, onward) {
            (Dest::Memory(slot), Some(to)) if self.wants(&token) => {
                self.pause();
                let staged = slot.len();
                let ticket = copy::start(&slot, &to)?;
                let then = Then::Landed { token, read: None, op, staged };
                self.conn.copies.push(Job::transfer(Transfer::of(ticket, slot, to), then));
                self.resume();
                Ok(())
            }
            _ => self.end(token),
        }
    }
}
