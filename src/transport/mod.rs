//! Engines: each moves frames between two processes, and knows nothing of messages, matching or futures.
//!
//! A connection has one or more *lanes*, each with a receiving and a sending half that can be driven from different threads. The
//! halves never block. What they move is named by [`Chunk`]s, which keep the memory alive for as long as an engine may touch it.

pub(crate) mod inproc;
pub(crate) mod shm;
pub(crate) mod tcp;

use std::sync::Arc;

use crate::error::Error;
use crate::memory::Chunk;
use crate::proto::{OpId, Sent, Token};

/// A payload on its way.
pub(crate) struct Arrival {
    pub token: Token,
    /// The operation of this side that it belongs to.
    pub op: Option<OpId>,
    /// The device memory that it is for, where the engine puts it into pinned host memory.
    pub onward: Option<Chunk>,
}

/// Where an engine is to put the payload of a frame.
pub(crate) enum Dest {
    /// Straight into memory. Only engines that say so get memory of a device.
    Memory(Chunk),
    /// There is no pinned memory for it just now. Ask again ([`Sink::place`]).
    Later,
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
    /// A frame's header. `payload` bytes follow. Whether the engine can put them into device memory by itself is for it to say.
    fn frame(&mut self, head: &[u8], payload: u32, direct: bool) -> Result<(Dest, Arrival), Error>;
    /// Asks again for a place.
    fn place(&mut self, arrival: &Arrival) -> Result<Dest, Error>;
    /// Copies a payload from memory to memory, where one of the two is a device's. It has landed when the device says so; `read` is told then.
    fn carry(&mut self, from: Chunk, to: Chunk, arrival: Arrival, read: Option<ReadMark>) -> Result<(), Error>;
    /// Bytes of the payload, for [`Dest::Sink`], from byte `at` of it.
    fn put(&mut self, token: &Token, at: usize, bytes: &[u8]);
    /// Whether the payload is still wanted where it goes.
    fn wants(&mut self, token: &Token) -> bool;
    /// The whole payload is where `frame` said.
    fn landed(&mut self, dest: Dest, arrival: Arrival) -> Result<(), Error>;
}

/// Told when the sender's memory has been read.
pub(crate) struct ReadMark {
    pub marks: Arc<inproc::Marks>,
    pub index: u64,
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
    /// Whether it waits for pinned memory, and takes nothing in.
    fn is_stalled(&self) -> bool {
        false
    }
    /// Lets go of all memory, for good.
    fn shut(&mut self);
}

/// The sending half of a lane.
pub(crate) trait Sender: Send {
    /// Whether it takes payloads in memory of a device as they are.
    fn takes_devices(&self) -> bool {
        false
    }
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
