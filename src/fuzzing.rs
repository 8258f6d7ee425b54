//! Entry points for fuzzers: every decoder, and a connection that is fed with whatever comes. Not part of the API.

use std::time::{Duration, Instant};

use crate::proto::{Connection, Limits, Place};
use crate::wire::frame::{Frame, Prelude};
use crate::wire::handshake::{HEADER, Header, Hello};
use crate::wire::offer::Offer;
use crate::wire::remote::Descriptor;

/// One frame header.
pub fn frame(bytes: &[u8]) {
    let _ = Frame::decode(bytes);
}

/// The first bytes of a connection.
pub fn handshake(bytes: &[u8]) {
    if let Some((header, body)) = bytes.split_first_chunk::<HEADER>() {
        let _ = Header::parse(header).and_then(|h| h.common_version());
        let _ = Hello::decode(body);
    }
    let _ = Offer::decode(bytes);
}

/// A descriptor of exposed memory.
pub fn remote_buf(bytes: &[u8]) {
    let _ = Descriptor::decode(bytes);
}

/// A stream of frames to a connection that has something of everything open.
pub fn connection(mut bytes: &[u8]) {
    let limits = Limits {
        eager_max: 4096,
        segment: 4096,
        frame_max: 1 << 20,
        credit_out: 1 << 16,
        credit_in: 1 << 16,
        heartbeat: Duration::from_secs(1),
        liveness: Duration::from_secs(2),
    };
    let mut connection = Connection::new(limits, Instant::now());
    connection.fuzz_open();
    while let Ok(prelude) = Prelude::parse(bytes) {
        let Some((head, rest)) = bytes.split_at_checked(prelude.head_len()) else { break };
        let payload = prelude.payload_len().min(rest.len());
        bytes = &rest[payload..];
        let Ok(frame) = Frame::decode(head) else { break };
        let Ok(landing) = connection.on_frame(&frame, prelude.payload_len() as u32) else { break };
        if let Place::Buffer(buf) = landing.place {
            assert!(connection.buffer(buf).len() >= prelude.payload_len());
        }
        if connection.wants(&landing.token) && connection.landed(landing.token).is_err() {
            break;
        }
        while let Some(transmit) = connection.poll_transmit(0) {
            connection.sent(transmit.sent);
        }
        connection.fuzz_answer();
    }
    connection.fail(&crate::Error::Closed);
    connection.fuzz_answer();
}

/// A short run of what the fuzzers do at length, for every test run.
#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::frame::head_len;
    use proptest::prelude::*;

    /// Streams of well-formed headers with fields near each other, so that they often mean something to the connection.
    fn stream() -> impl Strategy<Value = Vec<u8>> {
        let word = prop_oneof![4 => 0u64..4, 1 => 4090u64..4100, 1 => any::<u64>(), 1 => Just(u64::MAX)];
        let frame = (1u8..19, 0u8..4, prop_oneof![Just(0u32), 0u32..64, 4000u32..4200], proptest::collection::vec(word, 7));
        proptest::collection::vec(frame, 0..40).prop_map(|frames| {
            let mut bytes = Vec::new();
            for (kind, flags, payload, words) in frames {
                let len = head_len(kind).unwrap_or(8);
                // Only these carry payload; the others would end the stream at once.
                let payload = if matches!(kind, 1 | 4 | 6 | 8) { payload } else { 0 };
                bytes.extend([kind, flags]);
                bytes.extend((len as u16).to_le_bytes());
                bytes.extend(payload.to_le_bytes());
                bytes.extend(words.iter().take((len - 8) / 8).flat_map(|word| word.to_le_bytes()));
                bytes.resize(bytes.len() + payload as usize, 0);
            }
            bytes
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

        #[test]
        fn no_stream_of_frames_breaks_a_connection(bytes in stream()) {
            connection(&bytes);
        }

        #[test]
        fn no_bytes_break_anything(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            frame(&bytes);
            handshake(&bytes);
            remote_buf(&bytes);
            connection(&bytes);
        }
    }
}
