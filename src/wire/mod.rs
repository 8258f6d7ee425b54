//! What travels: frames, the handshake, descriptors of exposed memory. Little-endian, versioned, bounded.
//!
//! Nothing here allocates by a length that it has not checked.

pub(crate) mod frame;
pub(crate) mod handshake;
pub(crate) mod offer;
pub(crate) mod remote;

/// Why bytes could not be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum WireError {
    #[error("unknown frame kind {0}")]
    UnknownKind(u8),
    #[error("frame of kind {kind} with a header of {got} bytes, {want} expected")]
    HeaderLength { kind: u8, got: usize, want: usize },
    #[error("frame of kind {kind} with a payload of {got} bytes, at most {max} allowed")]
    PayloadLength { kind: u8, got: u32, max: u32 },
    #[error("value {value} of field {field} is out of range")]
    Field { field: &'static str, value: u64 },
    #[error("the bytes end early")]
    Short,
    #[error("the bytes do not begin with the magic of gpusock")]
    Magic,
    #[error("version {got} is not spoken here, only {min} to {max}")]
    Version { got: u16, min: u16, max: u16 },
    #[error("longer than the {max} bytes that are allowed")]
    TooLong { max: usize },
}

/// Splits a fixed number of bytes off.
fn take<const N: usize>(bytes: &mut &[u8]) -> Result<[u8; N], WireError> {
    let (head, rest) = bytes.split_first_chunk().ok_or(WireError::Short)?;
    *bytes = rest;
    Ok(*head)
}
