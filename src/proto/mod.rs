//! The message protocol as a state machine without I/O.
//!
//! Frames and local commands go in; frames to transmit, places for payloads, and events come out. There is no socket, no clock,
//! no memory address and no `unsafe` here: memory is named by operation, exposure or buffer number, and time is passed in. So the
//! whole protocol is driven in memory by its tests.
//!
//! - [`inbox`]: matching of messages and receives, and what becomes of a receive that is dropped.
//! - [`outbox`]: messages to send, credit, rendezvous, flush.
//! - [`initiator`] and [`target`]: the two ends of one-sided operations.
//! - [`connection`]: puts them together; close, failure, transmission order.

pub(crate) mod buffers;
pub(crate) mod connection;
pub(crate) mod inbox;
pub(crate) mod initiator;
pub(crate) mod notes;
pub(crate) mod outbox;
pub(crate) mod target;
#[cfg(test)]
mod tests;

use std::time::Duration;

use crate::error::Error;
use crate::wire::WireError;
use crate::wire::frame::{Head, Status};

pub(crate) use buffers::BufId;
pub(crate) use connection::Connection;

/// A local operation, as numbered by the shell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct OpId(pub u64);

/// What both sides agreed on in the handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Longest message that travels without asking first, in bytes.
    pub eager_max: u32,
    /// Longest payload of one frame from host memory, in bytes.
    pub segment: u32,
    /// Longest payload of one frame that the peer may send, in bytes.
    pub frame_max: u32,
    /// Credit that this side may spend before the peer grants more.
    pub credit_out: u64,
    /// Credit that this side has granted.
    pub credit_in: u64,
    /// After this long without a word from the peer, ask.
    pub heartbeat: Duration,
    /// After this long without a word from the peer, it is lost.
    pub liveness: Duration,
}

/// How a transfer from some memory is cut. The shell knows what suits the memory and the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Longest message that travels without asking first, in bytes; `None` for none.
    pub eager_max: Option<u32>,
    /// Longest payload of one frame, in bytes.
    pub segment: u32,
}

impl Limits {
    /// For host memory.
    pub(crate) fn shape(&self) -> Shape {
        Shape { eager_max: Some(self.eager_max), segment: self.segment }
    }
}

/// One-sided operations that one side may have open at the other.
pub(crate) const WINDOW: u64 = 1024;
/// What a message costs in credit besides its bytes, so that empty ones are bounded too.
pub(crate) const MESSAGE_COST: u64 = 64;

/// Where bytes are, or are to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// In the memory of a local operation: byte `offset` of its piece `part`.
    Op { op: OpId, part: u32, offset: u64 },
    /// In exposed memory.
    Exposed { exposure: u32, offset: u64 },
    /// In a buffer of the protocol's own.
    Buffer(BufId),
    /// Nowhere: read and forget.
    Discard,
}

/// What to do with the payload of a frame that came in.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Landing {
    pub place: Place,
    pub token: Token,
}

/// Says which frame a payload belonged to, once it has landed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Token {
    None,
    EagerDirect,
    EagerBuffered { buf: BufId, tag: u64, order: u64, len: u32 },
    Data { msg: u64, len: u32 },
    Write { seq: u64, len: u32, exposure: u64 },
    Read { seq: u64, len: u32 },
}

/// A frame to transmit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Transmit {
    pub head: Head,
    /// Where the payload is, and its length.
    pub payload: Option<(Place, u32)>,
    /// To be handed back when the engine has let go of the payload.
    pub sent: Sent,
}

/// Says which frame has left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sent {
    Nothing,
    /// The engine must have *copied* the payload: the sender's buffer is free from then on.
    Eager {
        op: OpId,
        len: u32,
    },
    Data {
        msg: u64,
    },
    Write {
        seq: u64,
    },
}

impl Sent {
    /// Whether the payload must be copied rather than referenced, because nothing later says that the peer has it.
    pub(crate) fn needs_copy(self) -> bool {
        matches!(self, Sent::Eager { .. })
    }
}

/// How an operation ended well.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Outcome {
    /// Bytes moved.
    pub bytes: u64,
    /// Tag of a received message.
    pub tag: u64,
    /// Arrival number of a received or claimed message.
    pub seq: u64,
    /// Former value, for atomics.
    pub value: u64,
}

/// What the shell has to do or know.
#[derive(Debug, Clone)]
pub(crate) enum Event {
    /// The operation is over, and no engine touches its memory any more.
    Done { op: OpId, result: Result<Outcome, Error> },
    /// Copy `bytes` from the buffer into the operation's memory, release the buffer, and say [`Connection::copied`].
    CopyBuffer { op: OpId, buf: BufId, bytes: u64 },
    /// Copy `bytes` from the memory of `from` to that of `to`, free the first, and say [`Connection::copied`] of the other.
    CopyOp { from: OpId, to: OpId, bytes: u64 },
    /// A dropped receive's message was discarded or withdrawn: free its slot and memory.
    Forget { op: OpId },
    /// Carry out an atomic operation and answer with [`Connection::atomic_done`].
    Atomic { seq: u64, exposure: u32, offset: u64, swap: bool, operand: u64, compare: u64 },
    /// The peer closed in good order.
    PeerClosed,
}

/// What became of a receive that its future no longer waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Detached {
    /// Nothing had matched: its memory is free.
    Released,
    /// A message is landing in its memory, which stays in use until a later receive takes the message.
    Held,
}

/// The peer broke the protocol. Ends the connection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Violation {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("{0}")]
    Rule(&'static str),
}

/// What a peer's refusal of a one-sided operation means to the caller.
pub(crate) fn refusal(status: Status, offset: u64, len: u64) -> Error {
    match status {
        Status::Unknown => Error::denied("the target knows no such exposure, or the token is wrong"),
        Status::Revoked => Error::denied("the exposure was revoked"),
        Status::Rights => Error::denied("the exposure does not grant this right"),
        Status::Bounds => Error::OutOfBounds { offset, len, size: 0 },
        Status::Misaligned => Error::invalid("an atomic operation needs an offset that is a multiple of 8 bytes"),
        Status::Aborted => Error::Cancelled,
        Status::Unsupported => Error::Unsupported { what: "the target's memory cannot do this operation".into() },
        Status::Ok | Status::Failed => Error::denied("the target failed to carry the operation out"),
    }
}
