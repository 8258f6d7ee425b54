//! Frames: a fixed header per kind, then a payload.
//!
//! Every frame begins with an eight-byte prelude (kind, flags, header length, payload length), which is all that a transport
//! looks at. The rest of the header has a fixed layout for each kind.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::WireError;

/// Length of the part that a transport reads to find the frame's end.
pub(crate) const PRELUDE: usize = 8;
/// The longest header of any kind, prelude included.
pub(crate) const HEAD_MAX: usize = 64;
/// The longest payload of one frame. Longer transfers are cut into segments.
pub(crate) const PAYLOAD_MAX: u32 = 1 << 30;
/// The longest segment that two processes agree on.
pub(crate) const SEGMENT_MAX: u32 = 4 << 20;

/// `WRITE`: deliver a notification when the whole operation has landed.
pub(crate) const FLAG_NOTIFY: u8 = 1;
/// `ATOMIC`: compare and swap; without it, fetch and add.
pub(crate) const FLAG_SWAP: u8 = 2;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Prelude {
    pub kind: u8,
    pub flags: u8,
    pub head: U16,
    pub payload: U32,
}

impl Prelude {
    /// Reads the prelude and checks both lengths, so that a transport may trust them.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        let (prelude, _) = Self::read_from_prefix(bytes).map_err(|_| WireError::Short)?;
        let want = head_len(prelude.kind).ok_or(WireError::UnknownKind(prelude.kind))?;
        if usize::from(prelude.head.get()) != want {
            return Err(WireError::HeaderLength { kind: prelude.kind, got: prelude.head.get().into(), want });
        }
        let max = if has_payload(prelude.kind) { PAYLOAD_MAX } else { 0 };
        if prelude.payload.get() > max {
            return Err(WireError::PayloadLength { kind: prelude.kind, got: prelude.payload.get(), max });
        }
        Ok(prelude)
    }

    pub(crate) fn head_len(&self) -> usize {
        usize::from(self.head.get())
    }

    pub(crate) fn payload_len(&self) -> usize {
        self.payload.get() as usize
    }
}

/// A header in its wire form.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Head {
    bytes: [u8; HEAD_MAX],
    len: u8,
}

impl Head {
    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

/// How a one-sided operation, a message or a flush ended at the other side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    Ok,
    Unknown,
    Revoked,
    Rights,
    Bounds,
    Misaligned,
    Aborted,
    Unsupported,
    Failed,
}

impl Status {
    const ALL: [Status; 9] = [
        Status::Ok,
        Status::Unknown,
        Status::Revoked,
        Status::Rights,
        Status::Bounds,
        Status::Misaligned,
        Status::Aborted,
        Status::Unsupported,
        Status::Failed,
    ];

    fn decode(value: u64) -> Result<Self, WireError> {
        usize::try_from(value).ok().and_then(|i| Self::ALL.get(i).copied()).ok_or(WireError::Field { field: "status", value })
    }
}

macro_rules! frames {
    ($($(#[$doc:meta])* $name:ident = $kind:literal, payload $payload:literal { $($field:ident),* })*) => {
        /// A decoded header.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Frame {
            $($(#[$doc])* $name { flags: u8, $($field: u64),* },)*
        }

        /// Length of the whole header of a kind, `None` for an unknown kind.
        pub(crate) const fn head_len(kind: u8) -> Option<usize> {
            match kind {
                $($kind => Some(PRELUDE + 8 * [$(stringify!($field)),*].len()),)*
                _ => None,
            }
        }

        const fn has_payload(kind: u8) -> bool {
            match kind { $($kind => $payload,)* _ => false }
        }

        impl Frame {
            /// Reads a header whose prelude was parsed. `bytes` holds exactly the header.
            pub(crate) fn decode(bytes: &[u8]) -> Result<Self, WireError> {
                let prelude = Prelude::parse(bytes)?;
                let mut words = Words(bytes.get(PRELUDE..prelude.head_len()).ok_or(WireError::Short)?);
                match prelude.kind {
                    $($kind => Ok(Frame::$name { flags: prelude.flags, $($field: words.next()?),* }),)*
                    other => Err(WireError::UnknownKind(other)),
                }
            }

            /// Writes the header for a payload of `payload` bytes.
            pub(crate) fn encode(&self, payload: u32) -> Head {
                let mut head = Head { bytes: [0; HEAD_MAX], len: 0 };
                match *self {
                    $(Frame::$name { flags, $($field),* } => {
                        let words: &[u64] = &[$($field),*];
                        head.fill($kind, flags, payload, words);
                    })*
                }
                head
            }
        }
    };
}

struct Words<'a>(&'a [u8]);

impl Words<'_> {
    fn next(&mut self) -> Result<u64, WireError> {
        let (word, rest) = U64::read_from_prefix(self.0).map_err(|_| WireError::Short)?;
        self.0 = rest;
        Ok(word.get())
    }
}

impl Head {
    fn fill(&mut self, kind: u8, flags: u8, payload: u32, words: &[u64]) {
        let len = PRELUDE + 8 * words.len();
        let prelude = Prelude { kind, flags, head: U16::new(len as u16), payload: U32::new(payload) };
        self.bytes[..PRELUDE].copy_from_slice(prelude.as_bytes());
        for (slot, word) in self.bytes[PRELUDE..len].chunks_exact_mut(8).zip(words) {
            slot.copy_from_slice(&word.to_le_bytes());
        }
        self.len = len as u8;
    }
}

// `seq` numbers the one-sided operations of one direction, `msg` its rendezvous messages. `order` is how many one-sided
// operations were issued before a message: it is held back until they have landed, whatever lane they took.
frames! {
    /// A whole message.
    Eager = 1, payload true { tag, order }
    /// A message of `total` bytes is ready at the sender.
    Rts = 2, payload false { tag, order, msg, total }
    /// The receiver has matched the message and has memory for it.
    Cts = 3, payload false { msg }
    /// A piece of a rendezvous message.
    Data = 4, payload true { msg, offset }
    /// The receiver has it all, or it was withdrawn.
    Done = 5, payload false { msg, status }
    /// A piece of a one-sided write of `total` bytes.
    Write = 6, payload true { seq, total, exposure, token, offset, notify }
    /// Asks for a range of exposed memory.
    Read = 7, payload false { seq, exposure, token, offset, len }
    /// A piece of the answer to a read.
    ReadData = 8, payload true { seq, offset }
    /// An atomic operation on eight exposed bytes.
    Atomic = 9, payload false { seq, exposure, token, offset, operand, compare }
    /// The end of a one-sided operation.
    Reply = 10, payload false { seq, status, value }
    /// How many units of credit the receiver has granted since the beginning.
    Credit = 11, payload false { granted }
    /// Give up a one-sided operation; answered with a reply.
    Abort = 12, payload false { seq }
    /// Withdraw a rendezvous message if it was not matched yet; answered with `Done` in that case.
    Withdraw = 13, payload false { msg }
    /// Answer with `Flushed` when everything before has been delivered.
    Flush = 14, payload false { id, order }
    /// See `Flush`.
    Flushed = 15, payload false { id }
    /// Are you there?
    Ping = 16, payload false { stamp }
    /// Yes.
    Pong = 17, payload false { stamp }
    /// Nothing follows.
    Close = 18, payload false { reason }
}

impl Frame {
    pub(crate) fn done(msg: u64, status: Status) -> Self {
        Frame::Done { flags: 0, msg, status: status as u64 }
    }

    pub(crate) fn reply(seq: u64, status: Status, value: u64) -> Self {
        Frame::Reply { flags: 0, seq, status: status as u64, value }
    }
}

/// Decodes the status field of a frame.
pub(crate) fn status(value: u64) -> Result<Status, WireError> {
    Status::decode(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_head_fits() {
        for kind in 0..=255 {
            assert!(head_len(kind).is_none_or(|len| len <= HEAD_MAX), "kind {kind}");
        }
    }

    #[test]
    fn statuses_survive() {
        for status in Status::ALL {
            assert_eq!(Status::decode(status as u64), Ok(status));
        }
        assert!(Status::decode(Status::ALL.len() as u64).is_err());
        assert!(Status::decode(u64::MAX).is_err());
    }

    proptest! {
        #[test]
        fn frames_survive(tag: u64, order: u64, exposure: u64, token: u64, offset: u64, notify: u64, flags: u8,
                          len in 0..=PAYLOAD_MAX) {
            for frame in [
                Frame::Eager { flags, tag, order },
                Frame::Write { flags, seq: tag, total: order, exposure, token, offset, notify },
                Frame::Atomic { flags, seq: tag, exposure, token, offset, operand: notify, compare: order },
            ] {
                let head = frame.encode(len.min(if matches!(frame, Frame::Atomic { .. }) { 0 } else { PAYLOAD_MAX }));
                prop_assert_eq!(Frame::decode(head.as_bytes()), Ok(frame));
            }
        }

        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            if let Ok(prelude) = Prelude::parse(&bytes) {
                prop_assert!(prelude.head_len() <= HEAD_MAX && prelude.payload_len() <= PAYLOAD_MAX as usize);
            }
            let _ = Frame::decode(&bytes);
        }

        #[test]
        fn near_misses_never_panic(kind in 0u8..24, flags: u8, head: u16, payload: u32, rest in proptest::collection::vec(any::<u8>(), 0..64)) {
            let mut bytes = vec![kind, flags];
            bytes.extend(head.to_le_bytes());
            bytes.extend(payload.to_le_bytes());
            bytes.extend(rest);
            let _ = Frame::decode(&bytes);
        }
    }
}
