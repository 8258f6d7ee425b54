//! The one error type of the crate.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// The result of everything in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, what was tried, and where it helps, what to do about it.
///
/// The type is [`Clone`], since one cause (a peer that died) fails every pending operation of an endpoint.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The peer is gone: its connection was reset, or nothing was heard of it for the liveness time.
    ///
    /// Every operation that was pending on the endpoint fails with the same reason. Memory that the operations held has been
    /// released. Other endpoints of the context are not affected.
    #[error("peer {peer} is lost: {reason}")]
    PeerLost {
        /// The address of the peer's side of the bootstrap connection.
        peer: String,
        /// How it was noticed.
        reason: Cow<'static, str>,
    },

    /// The time given with `.timeout(..)` passed before the operation was complete.
    ///
    /// The operation was asked to stop. Its memory stays in use until the transport has let go of it, which
    /// shows as [`Error::Busy`] for a short while.
    #[error("the operation did not complete within {after:?}")]
    Timeout {
        /// The time that was allowed.
        after: Duration,
    },

    /// A message is longer than the buffer of the receive that it met. The message can still be received, by a receive with a
    /// buffer of at least `needed` bytes.
    #[error("a message of {needed} bytes does not fit the buffer of {got} bytes; it can still be received with a larger one")]
    Truncated {
        /// Length of the message, in bytes.
        needed: u64,
        /// Length of the buffer, in bytes.
        got: u64,
    },

    /// A range lies outside the memory it was applied to. Nothing was transferred.
    #[error("{len} bytes at offset {offset} do not fit a range of {size} bytes")]
    OutOfBounds {
        /// First byte of the range, relative to the memory.
        offset: u64,
        /// Length of the range in bytes.
        len: u64,
        /// Length of the memory in bytes.
        size: u64,
    },

    /// The target refused the access: the exposure was revoked, belongs to another endpoint, does not grant the right, or its
    /// token is wrong. Nothing was transferred.
    #[error("remote access denied: {reason}")]
    AccessDenied {
        /// Which check failed.
        reason: Cow<'static, str>,
    },

    /// The memory is in use in a way that excludes what was asked for.
    #[error("the buffer is busy: {what}")]
    Busy {
        /// Which use excludes it.
        what: &'static str,
    },

    /// The endpoint (or listener) was closed, by either side, in good order.
    #[error("the endpoint is closed")]
    Closed,

    /// The operation was cancelled with `cancel()` before it had any effect.
    #[error("the operation was cancelled")]
    Cancelled,

    /// No path is left for this pair of memories under the policy in force.
    #[error("no path: {rejected}")]
    NoPath {
        /// Every candidate with the reason why it was not taken.
        rejected: String,
    },

    /// This version, machine or kind of memory cannot do what was asked for.
    #[error("unsupported: {what}")]
    Unsupported {
        /// What, and what to use instead.
        what: Cow<'static, str>,
    },

    /// Memory could not be registered with a device.
    #[error("registration failed (errno {errno}): {hint}")]
    Registration {
        /// The system's error number.
        errno: i32,
        /// What most likely caused it, and how to lift it.
        hint: String,
    },

    /// The peer at the address does not speak this protocol, speaks another version of it, or refused the connection.
    #[error("handshake with {peer} failed: {reason}")]
    Handshake {
        /// The address of the peer.
        peer: String,
        /// What happened.
        reason: Cow<'static, str>,
    },

    /// A CUDA call failed.
    #[error("CUDA: {what}")]
    Cuda {
        /// The call and the driver's name for the error.
        what: String,
    },

    /// An argument cannot be right.
    #[error("invalid argument: {what}")]
    InvalidArgument {
        /// Which one, and what is accepted.
        what: Cow<'static, str>,
    },

    /// The operating system refused something.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: Cow<'static, str>,
        /// The system's answer.
        source: Arc<io::Error>,
    },
}

impl Error {
    /// An I/O error with what was tried.
    pub(crate) fn io(what: impl Into<Cow<'static, str>>, source: impl Into<io::Error>) -> Self {
        Error::Io { what: what.into(), source: Arc::new(source.into()) }
    }

    pub(crate) fn invalid(what: impl Into<Cow<'static, str>>) -> Self {
        Error::InvalidArgument { what: what.into() }
    }

    pub(crate) fn denied(reason: impl Into<Cow<'static, str>>) -> Self {
        Error::AccessDenied { reason: reason.into() }
    }

    pub(crate) fn handshake(peer: impl fmt::Display, reason: impl Into<Cow<'static, str>>) -> Self {
        Error::Handshake { peer: peer.to_string(), reason: reason.into() }
    }

    /// Whether the endpoint that answered this can still be used.
    ///
    /// `false` for [`PeerLost`](Error::PeerLost) and [`Closed`](Error::Closed), after which a new endpoint is needed.
    #[must_use]
    pub fn is_endpoint_usable(&self) -> bool {
        !matches!(self, Error::PeerLost { .. } | Error::Closed)
    }
}

impl From<std::convert::Infallible> for Error {
    fn from(never: std::convert::Infallible) -> Self {
        match never {}
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        let kind = match &error {
            Error::PeerLost { .. } => io::ErrorKind::ConnectionReset,
            Error::Timeout { .. } => io::ErrorKind::TimedOut,
            Error::Closed => io::ErrorKind::NotConnected,
            Error::AccessDenied { .. } => io::ErrorKind::PermissionDenied,
            Error::InvalidArgument { .. } | Error::OutOfBounds { .. } => io::ErrorKind::InvalidInput,
            Error::Unsupported { .. } => io::ErrorKind::Unsupported,
            Error::Handshake { .. } => io::ErrorKind::InvalidData,
            Error::Io { source, .. } => source.kind(),
            _ => io::ErrorKind::Other,
        };
        io::Error::new(kind, error)
    }
}
