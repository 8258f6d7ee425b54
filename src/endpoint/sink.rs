//! What the engines of a connection deliver to.

use std::sync::MutexGuard;

use super::conn::Conn;
use super::state::State;
use crate::error::Error;
use crate::proto::{Place, Token};
use crate::transport::tcp::rx::violation;
use crate::transport::{Dest, Sink};
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

    fn frame(&mut self, head: &[u8], payload: u32) -> Result<(Dest, Token), Error> {
        let state = self.state();
        let frame = Frame::decode(head).map_err(|e| violation(&e))?;
        let landing = state.proto.on_frame(&frame, payload).map_err(|e| violation(&e))?;
        let dest = match landing.place {
            Place::Discard => Dest::Discard,
            Place::Buffer(_) => Dest::Sink,
            _ if payload == 0 => Dest::Discard,
            place => match state.chunk(place, payload) {
                Some(chunk) => Dest::Memory(chunk),
                None => Dest::Discard,
            },
        };
        state.counters.bytes_received += u64::from(payload);
        Ok((dest, landing.token))
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

    fn landed(&mut self, token: Token) -> Result<(), Error> {
        let state = self.state();
        state.proto.landed(token).map_err(|e| violation(&e))?;
        state.settle();
        Ok(())
    }
}
