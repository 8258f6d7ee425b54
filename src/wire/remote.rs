//! The descriptor of exposed memory, as it travels between applications.

use super::WireError;

const MAGIC: [u8; 4] = *b"gsRB";
const VERSION: u8 = 1;
/// Length of a descriptor, in bytes.
pub(crate) const LEN: usize = 64;

/// What a descriptor says. It grants nothing by itself: the target checks every access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Descriptor {
    /// Rights, as bits.
    pub access: u8,
    /// 0: host memory; `n + 1`: GPU `n` of the target.
    pub place: u32,
    /// The connection that it was made on.
    pub session: u64,
    /// Whether the side that accepted the connection made it.
    pub by_acceptor: bool,
    pub exposure: u64,
    pub token: u64,
    /// Of this range within the exposure, in bytes.
    pub offset: u64,
    pub len: u64,
}

impl Descriptor {
    pub(crate) fn encode(&self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = VERSION;
        bytes[5] = self.access;
        bytes[6] = self.by_acceptor.into();
        bytes[8..12].copy_from_slice(&self.place.to_le_bytes());
        let words = [self.session, self.exposure, self.token, self.offset, self.len];
        for (slot, word) in bytes[16..56].chunks_exact_mut(8).zip(words) {
            slot.copy_from_slice(&word.to_le_bytes());
        }
        let check = checksum(&bytes[..56]);
        bytes[56..].copy_from_slice(&check.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let bytes: &[u8; LEN] = bytes.try_into().map_err(|_| WireError::Short)?;
        if bytes[..4] != MAGIC {
            return Err(WireError::Magic);
        }
        if bytes[4] != VERSION {
            return Err(WireError::Version { got: bytes[4].into(), min: VERSION.into(), max: VERSION.into() });
        }
        let word = |at: usize| bytes[at..].first_chunk().map_or(0, |chunk| u64::from_le_bytes(*chunk));
        if word(56) != checksum(&bytes[..56]) {
            return Err(WireError::Field { field: "checksum", value: word(56) });
        }
        let (offset, len) = (word(40), word(48));
        if offset.checked_add(len).is_none() {
            return Err(WireError::Field { field: "length", value: len });
        }
        Ok(Descriptor {
            access: bytes[5],
            by_acceptor: bytes[6] != 0,
            place: u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]),
            session: word(16),
            exposure: word(24),
            token: word(32),
            offset,
            len,
        })
    }
}

/// FNV-1a, 64 bits. It finds accidents; against intent there is the token, which the target checks.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn descriptors_survive(access: u8, place: u32, session: u64, by_acceptor: bool, exposure: u64, token: u64,
                               offset in 0..1u64 << 60, len in 0..1u64 << 60, flip in 0..LEN * 8) {
            let descriptor = Descriptor { access, place, session, by_acceptor, exposure, token, offset, len };
            let mut bytes = descriptor.encode();
            prop_assert_eq!(Descriptor::decode(&bytes), Ok(descriptor));
            bytes[flip / 8] ^= 1 << (flip % 8);
            prop_assert!(Descriptor::decode(&bytes).is_err());
        }

        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = Descriptor::decode(&bytes);
        }
    }
}
