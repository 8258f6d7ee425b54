//! Kinds of memory.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// Where memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum MemKind {
    /// The host's memory. Written `host`.
    #[default]
    Host,
    /// The memory of the CUDA device with this ordinal. Written `cuda:0`.
    Cuda(u32),
}

impl fmt::Display for MemKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MemKind::Host => f.pad("host"),
            MemKind::Cuda(device) => f.pad(&format!("cuda:{device}")),
        }
    }
}

impl FromStr for MemKind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let digits = |device: &&str| device.bytes().all(|b| b.is_ascii_digit());
        let cuda = name.strip_prefix("cuda:").filter(digits).and_then(|device| device.parse().ok()).map(MemKind::Cuda);
        match name {
            "host" => Ok(MemKind::Host),
            _ => cuda.ok_or_else(|| Error::invalid(format!("{name:?} is no kind of memory; use \"host\" or \"cuda:0\""))),
        }
    }
}

impl TryFrom<&str> for MemKind {
    type Error = Error;

    fn try_from(name: &str) -> Result<Self> {
        name.parse()
    }
}

impl TryFrom<&String> for MemKind {
    type Error = Error;

    fn try_from(name: &String) -> Result<Self> {
        name.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive() {
        for kind in [MemKind::Host, MemKind::Cuda(0), MemKind::Cuda(15)] {
            assert_eq!(kind.to_string().parse::<MemKind>().unwrap(), kind);
        }
        for wrong in ["", "gpu", "cuda", "cuda:", "cuda:x", "cuda:-1", "cuda:+1", "Host"] {
            assert!(wrong.parse::<MemKind>().unwrap_err().to_string().contains("cuda:0"), "{wrong:?}");
        }
    }
}
