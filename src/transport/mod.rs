//! Engines: each moves frames between two processes, and knows nothing of messages, matching or futures.
//!
//! A connection has one or more *lanes*, each with a receiving and a sending half that can be driven from different threads. The
//! halves never block. What they move is named by [`Chunk`]s, which keep the memory alive for as long as an engine may touch it.

pub(crate) mod inproc;
pub(crate) mod tcp;

use crate::error::Error;
use crate::memory::Chunk;
use crate::proto::{Sent, Token};

/// Where an engine is to put the payload of a frame.
pub(crate) enum Dest {
    /// Straight into memory.
    Memory(Chunk),
    /// To the sink, piece by piece ([`Sink::put`]).
    Sink,
    /// Nowhere.
    Discard,
}

/// Takes what an engine receives.
pub(crate) trait Sink {
    /// Frames follow: something came from the peer.
    fn resume(&mut self);
    /// The engine is about to make a system call or a long copy.
    fn pause(&mut self);
    /// A frame's header. `payload` bytes follow.
    fn frame(&mut self, head: &[u8], payload: u32) -> Result<(Dest, Token), Error>;
    /// Bytes of the payload, for [`Dest::Sink`], from byte `at` of it.
    fn put(&mut self, token: &Token, at: usize, bytes: &[u8]);
    /// Whether the payload is still wanted where it goes.
    fn wants(&mut self, token: &Token) -> bool;
    /// The whole payload is in place.
    fn landed(&mut self, token: Token) -> Result<(), Error>;
}

/// What a receiving half found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Received {
    /// Nothing is there any more.
    Idle { any: bool },
    /// The budget was used up; there may be more.
    More,
    /// The peer ended the stream.
    End,
}

/// The receiving half of a lane.
pub(crate) trait Receiver: Send {
    /// Takes in what is there, up to about `budget` bytes.
    fn poll(&mut self, sink: &mut dyn Sink, budget: usize) -> Result<Received, Error>;
    /// Lets go of memory in which a payload that is under way is no longer wanted.
    fn review(&mut self, sink: &mut dyn Sink);
    /// Lets go of all memory, for good.
    fn shut(&mut self);
}

/// The sending half of a lane.
pub(crate) trait Sender: Send {
    /// Whether another frame may be pushed.
    fn has_room(&self) -> bool;
    /// Queues a frame. `sent` comes back from `flush` once the engine has let go of the payload; where `sent` asks for a copy, the
    /// payload is copied before that.
    fn push(&mut self, head: &[u8], payload: Option<Chunk>, sent: Sent);
    /// Moves what can be moved. `false`: something is left, and the lane must be watched for room.
    fn flush(&mut self, sent: &mut Vec<Sent>) -> Result<bool, Error>;
    /// Whether a flush would change nothing.
    fn is_idle(&self) -> bool;
    /// Lets go of all memory, for good.
    fn shut(&mut self);
}
