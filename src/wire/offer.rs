//! An offer to connect, as it travels over the user's own channel.

use std::net::{IpAddr, SocketAddr};

use super::{WireError, take};

const MAGIC: [u8; 4] = *b"gsOF";
const VERSION: u8 = 1;
const ADDRESSES_MAX: usize = 16;

/// Who offers, and where to go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Offer {
    pub context: [u8; 16],
    pub host: [u8; 16],
    pub nonce: u64,
    pub addresses: Vec<SocketAddr>,
}

impl Offer {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let addresses = &self.addresses[..self.addresses.len().min(ADDRESSES_MAX)];
        let mut bytes = Vec::with_capacity(64 + 18 * addresses.len());
        bytes.extend(MAGIC);
        bytes.push(VERSION);
        bytes.extend(self.context);
        bytes.extend(self.host);
        bytes.extend(self.nonce.to_le_bytes());
        bytes.push(addresses.len() as u8);
        for address in addresses {
            // IPv4 in its mapped form.
            let ip = match address.ip() {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            bytes.extend(ip.octets());
            bytes.extend(address.port().to_le_bytes());
        }
        bytes
    }

    pub(crate) fn decode(mut bytes: &[u8]) -> Result<Self, WireError> {
        let rest = &mut bytes;
        if take::<4>(rest)? != MAGIC {
            return Err(WireError::Magic);
        }
        let [version] = take(rest)?;
        if version != VERSION {
            return Err(WireError::Version { got: version.into(), min: VERSION.into(), max: VERSION.into() });
        }
        let (context, host) = (take(rest)?, take(rest)?);
        let nonce = u64::from_le_bytes(take(rest)?);
        let [count] = take(rest)?;
        if usize::from(count) > ADDRESSES_MAX {
            return Err(WireError::TooLong { max: ADDRESSES_MAX });
        }
        let mut addresses = Vec::with_capacity(count.into());
        for _ in 0..count {
            let ip = IpAddr::from(take::<16>(rest)?).to_canonical();
            addresses.push(SocketAddr::new(ip, u16::from_le_bytes(take(rest)?)));
        }
        if !rest.is_empty() {
            return Err(WireError::TooLong { max: 0 });
        }
        Ok(Offer { context, host, nonce, addresses })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn offers_survive() {
        let addresses = vec!["192.0.2.7:1".parse().unwrap(), "[2001:db8::1]:65535".parse().unwrap()];
        let offer = Offer { context: [1; 16], host: [2; 16], nonce: 3, addresses };
        let bytes = offer.encode();
        assert_eq!(Offer::decode(&bytes), Ok(offer));
        for cut in 0..bytes.len() {
            assert!(Offer::decode(&bytes[..cut]).is_err(), "cut at {cut}");
        }
        assert!(Offer::decode(&[bytes, vec![0]].concat()).is_err());
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Offer::decode(&bytes);
            let _ = Offer::decode(&[&b"gsOF\x01"[..], &bytes].concat());
        }
    }
}
