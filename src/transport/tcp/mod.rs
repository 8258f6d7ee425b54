//! TCP: a raw non-blocking socket. Header and payload leave in one `writev` from the user's memory; a payload is read straight into
//! its destination.

pub(crate) mod rx;
pub(crate) mod socket;
pub(crate) mod tx;

pub(crate) use rx::TcpReceiver;
pub(crate) use tx::TcpSender;
