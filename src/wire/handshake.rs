//! The first bytes on a connection, in both directions.
//!
//! A fixed header (magic, versions, length of the body), then a body of type-length-value fields. A reader skips a field that it does
//! not know, unless the highest bit of its type is set, so that authentication and encryption can be added without a break.

use super::{WireError, take};

pub(crate) const MAGIC: [u8; 8] = *b"GPUSOCK\n";
/// Versions of the frame protocol that this crate speaks.
pub(crate) const VERSION_MIN: u16 = 1;
pub(crate) const VERSION_MAX: u16 = 1;
pub(crate) const HEADER: usize = 16;
pub(crate) const BODY_MAX: usize = 4096;
const TEXT_MAX: usize = 512;

/// A field of this kind must be understood.
const CRITICAL: u16 = 0x8000;

/// What one side says of itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Hello {
    /// The context, random.
    pub context: [u8; 16],
    /// The process, random: equal only within one process.
    pub process: [u8; 16],
    /// The running kernel (its boot id); zero if unknown.
    pub host: [u8; 16],
    /// The connection: zero from the side that connects, chosen by the side that accepts, repeated to join a lane to it.
    pub session: u64,
    /// Which lane of the connection this is, and how many are wanted.
    pub lane: u16,
    pub lanes: u16,
    pub eager_max: u32,
    pub segment: u32,
    pub credit: u64,
    pub heartbeat_ms: u32,
    pub liveness_ms: u32,
    /// Bits for engines and extensions.
    pub capabilities: u64,
    /// The offer that is answered, zero without one; for further lanes, the secret that joins them.
    pub nonce: u64,
    /// Where the two sides are to meet on this host, and the proof of who comes; zero without.
    pub meeting: [u8; 32],
    /// Why the connection is refused. Everything else is without meaning then.
    pub refused: Option<String>,
}

macro_rules! ids {
    ($($name:ident = $id:expr;)*) => { $(const $name: u16 = $id;)* };
}

ids! {
    CONTEXT = 1;
    PROCESS = 2;
    HOST = 3;
    SESSION = 4;
    LANE = 5;
    LIMITS = 6;
    TIMES = 7;
    CAPABILITIES = 8;
    NONCE = 9;
    REFUSED = 10;
    MEETING = 11;
}

/// What the fixed header says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub min: u16,
    pub max: u16,
    pub body: usize,
}

impl Header {
    pub(crate) fn parse(bytes: &[u8; HEADER]) -> Result<Self, WireError> {
        if bytes[..8] != MAGIC {
            return Err(WireError::Magic);
        }
        let (min, max) = (u16::from_le_bytes([bytes[8], bytes[9]]), u16::from_le_bytes([bytes[10], bytes[11]]));
        let body = u32::from_le_bytes([bytes[12], bytes[13], bytes[14], bytes[15]]) as usize;
        if body > BODY_MAX {
            return Err(WireError::TooLong { max: BODY_MAX });
        }
        Ok(Header { min, max, body })
    }

    /// The highest version that both sides speak.
    pub(crate) fn common_version(&self) -> Result<u16, WireError> {
        let common = self.max.min(VERSION_MAX);
        if common < self.min.max(VERSION_MIN) {
            return Err(WireError::Version { got: self.max, min: VERSION_MIN, max: VERSION_MAX });
        }
        Ok(common)
    }
}

impl Hello {
    /// Header and body.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut body = Vec::with_capacity(256);
        let mut put = |id: u16, value: &[&[u8]]| {
            let len: usize = value.iter().map(|v| v.len()).sum();
            body.extend(id.to_le_bytes());
            body.extend((len as u16).to_le_bytes());
            value.iter().for_each(|v| body.extend_from_slice(v));
        };
        match &self.refused {
            Some(reason) => put(REFUSED, &[truncated(reason).as_bytes()]),
            None => {
                put(CONTEXT, &[&self.context]);
                put(PROCESS, &[&self.process]);
                put(HOST, &[&self.host]);
                put(SESSION, &[&self.session.to_le_bytes()]);
                put(LANE, &[&self.lane.to_le_bytes(), &self.lanes.to_le_bytes()]);
                put(LIMITS, &[&self.eager_max.to_le_bytes(), &self.segment.to_le_bytes(), &self.credit.to_le_bytes()]);
                put(TIMES, &[&self.heartbeat_ms.to_le_bytes(), &self.liveness_ms.to_le_bytes()]);
                put(CAPABILITIES, &[&self.capabilities.to_le_bytes()]);
                put(NONCE, &[&self.nonce.to_le_bytes()]);
                if self.meeting != [0; 32] {
                    put(MEETING, &[&self.meeting]);
                }
            }
        }
        let mut bytes = Vec::with_capacity(HEADER + body.len());
        bytes.extend(MAGIC);
        bytes.extend(VERSION_MIN.to_le_bytes());
        bytes.extend(VERSION_MAX.to_le_bytes());
        bytes.extend((body.len() as u32).to_le_bytes());
        bytes.extend(body);
        bytes
    }

    pub(crate) fn decode(mut body: &[u8]) -> Result<Self, WireError> {
        if body.len() > BODY_MAX {
            return Err(WireError::TooLong { max: BODY_MAX });
        }
        let mut hello = Hello::default();
        while !body.is_empty() {
            let id = u16::from_le_bytes(take(&mut body)?);
            let len = usize::from(u16::from_le_bytes(take(&mut body)?));
            if len > body.len() {
                return Err(WireError::Short);
            }
            let (mut value, rest) = body.split_at(len);
            body = rest;
            let value = &mut value;
            match id {
                CONTEXT => hello.context = take(value)?,
                PROCESS => hello.process = take(value)?,
                HOST => hello.host = take(value)?,
                SESSION => hello.session = u64::from_le_bytes(take(value)?),
                LANE => {
                    hello.lane = u16::from_le_bytes(take(value)?);
                    hello.lanes = u16::from_le_bytes(take(value)?);
                }
                LIMITS => {
                    hello.eager_max = u32::from_le_bytes(take(value)?);
                    hello.segment = u32::from_le_bytes(take(value)?);
                    hello.credit = u64::from_le_bytes(take(value)?);
                }
                TIMES => {
                    hello.heartbeat_ms = u32::from_le_bytes(take(value)?);
                    hello.liveness_ms = u32::from_le_bytes(take(value)?);
                }
                CAPABILITIES => hello.capabilities = u64::from_le_bytes(take(value)?),
                MEETING => hello.meeting = take(value)?,
                NONCE => hello.nonce = u64::from_le_bytes(take(value)?),
                REFUSED => hello.refused = Some(truncated(&String::from_utf8_lossy(value)).to_owned()),
                unknown if unknown & CRITICAL != 0 => {
                    return Err(WireError::Field { field: "extension", value: unknown.into() });
                }
                _ => {}
            }
        }
        Ok(hello)
    }

    /// A refusal with its reason.
    pub(crate) fn refusal(reason: &str) -> Self {
        Hello { refused: Some(reason.to_owned()), ..Hello::default() }
    }
}

/// At most `TEXT_MAX` bytes, cut between characters.
fn truncated(text: &str) -> &str {
    let mut end = text.len().min(TEXT_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header(bytes: &[u8]) -> Result<Header, WireError> {
        Header::parse(bytes[..HEADER].try_into().unwrap())
    }

    #[test]
    fn refusals_survive_and_are_bounded() {
        let bytes = Hello::refusal(&"é".repeat(1000)).encode();
        let hello = Hello::decode(&bytes[HEADER..]).unwrap();
        let reason = hello.refused.unwrap();
        assert!(reason.len() <= TEXT_MAX && reason.starts_with('é'));
    }

    #[test]
    fn other_versions_and_protocols_are_told_apart() {
        let mut bytes = Hello::default().encode();
        assert_eq!(header(&bytes).unwrap().common_version(), Ok(VERSION_MAX));
        bytes[8] = 9;
        bytes[10] = 9;
        assert_eq!(header(&bytes).unwrap().common_version(), Err(WireError::Version { got: 9, min: 1, max: 1 }));
        assert_eq!(header(b"GET / HTTP/1.1\r\n"), Err(WireError::Magic));
        bytes[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(header(&bytes), Err(WireError::TooLong { max: BODY_MAX }));
    }

    #[test]
    fn unknown_fields_are_skipped_unless_critical() {
        let hello = Hello { session: 7, ..Hello::default() };
        let mut bytes = hello.encode();
        bytes.extend([0x77, 0x00, 1, 0, 42]);
        assert_eq!(Hello::decode(&bytes[HEADER..]), Ok(hello));
        bytes.extend([0x77, 0x80, 0, 0]);
        assert!(matches!(Hello::decode(&bytes[HEADER..]), Err(WireError::Field { .. })));
    }

    proptest! {
        #[test]
        fn hellos_survive(context: [u8; 16], process: [u8; 16], meeting: [u8; 32], session: u64, lane: u16, lanes: u16, eager_max: u32, credit: u64, nonce: u64) {
            let hello = Hello { context, process, session, lane, lanes, eager_max, credit, nonce, meeting, ..Hello::default() };
            let bytes = hello.encode();
            prop_assert_eq!(header(&bytes).unwrap().body, bytes.len() - HEADER);
            prop_assert_eq!(Hello::decode(&bytes[HEADER..]), Ok(hello));
            for cut in HEADER..bytes.len() {
                let _ = Hello::decode(&bytes[HEADER..cut]);
            }
        }

        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Hello::decode(&bytes);
        }
    }
}
