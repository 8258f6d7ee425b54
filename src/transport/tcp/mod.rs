//! TCP: a raw non-blocking socket. Header and payload leave in one call from the user's memory, long payloads as pages without a copy; a
//! payload is read straight into its destination.

mod pages;
pub(crate) mod rx;
pub(crate) mod socket;
pub(crate) mod tx;

pub(crate) use rx::TcpReceiver;
pub(crate) use tx::TcpSender;
