//! What the user allows.

use super::PathKind;
use crate::error::{Error, Result};

/// Which paths may be taken. By default all of them.
///
/// The environment variable `GPUSOCK_PATHS` overrides the policy of a context in the field: `tcp,inproc` allows only these,
/// `^inproc,shm` forbids these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathPolicy {
    allowed: u32,
    from_environment: bool,
}

impl Default for PathPolicy {
    fn default() -> Self {
        PathPolicy { allowed: u32::MAX, from_environment: false }
    }
}

impl PathPolicy {
    /// Everything is allowed.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Allows only `kind`: where it does not work, [`Error::NoPath`] is the answer instead of another path.
    #[must_use]
    pub fn require(self, kind: PathKind) -> Self {
        self.allow_only([kind])
    }

    /// Allows only these.
    #[must_use]
    pub fn allow_only(mut self, kinds: impl IntoIterator<Item = PathKind>) -> Self {
        self.allowed = kinds.into_iter().fold(0, |bits, kind| bits | kind.bit());
        self
    }

    /// Forbids `kind`.
    #[must_use]
    pub fn forbid(mut self, kind: PathKind) -> Self {
        self.allowed &= !kind.bit();
        self
    }

    /// Whether `kind` may be taken.
    #[must_use]
    pub fn allows(&self, kind: PathKind) -> bool {
        self.allowed & kind.bit() != 0
    }

    /// Reads the form of `GPUSOCK_PATHS`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a name that is no path.
    pub fn parse(text: &str) -> Result<Self> {
        let (forbid, list) = match text.strip_prefix('^') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let kinds = list.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::parse);
        let kinds = kinds.collect::<Result<Vec<PathKind>>>()?;
        if kinds.is_empty() {
            return Err(Error::invalid("GPUSOCK_PATHS names no path; write for example tcp,inproc or ^inproc"));
        }
        Ok(if forbid { kinds.into_iter().fold(Self::new(), Self::forbid) } else { Self::new().allow_only(kinds) })
    }

    /// The environment's policy if it is set, else this one.
    pub(crate) fn or_environment(self) -> Result<Self> {
        match std::env::var("GPUSOCK_PATHS") {
            Ok(text) if !text.trim().is_empty() => Ok(PathPolicy { from_environment: true, ..Self::parse(text.trim())? }),
            _ => Ok(self),
        }
    }

    /// Why a kind is not allowed.
    pub(crate) fn reason(&self) -> &'static str {
        if self.from_environment { "not allowed by GPUSOCK_PATHS" } else { "not allowed by the path policy" }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_lists() {
        let only = PathPolicy::parse("tcp, inproc").unwrap();
        let not = PathPolicy::parse("^inproc").unwrap();
        for kind in PathKind::ALL {
            assert_eq!(only.allows(kind), matches!(kind, PathKind::Tcp | PathKind::Inproc), "{kind}");
            assert_eq!(not.allows(kind), kind != PathKind::Inproc, "{kind}");
            assert_eq!(kind.name().parse::<PathKind>().unwrap(), kind);
        }
        for wrong in ["", "^", "tpc", "tcp;shm"] {
            assert!(matches!(PathPolicy::parse(wrong), Err(Error::InvalidArgument { .. })), "{wrong:?}");
        }
    }
}
