//! Another process of this host: frames and short payloads go through rings in shared memory, long payloads in memory files are read where
//! they are, with one copy, and a Unix socket wakes who sleeps.
//!
//! The connection's TCP socket stays beside it and tells whether the peer lives.

mod copy;
mod link;
mod meet;
mod memory;
mod ring;
mod rx;
mod socket;
#[cfg(all(test, not(gpusock_loom)))]
mod tests;
mod tx;

pub(crate) use link::Link;
pub(crate) use meet::{Meeting, ShmEnd, meet};
pub(crate) use rx::ShmReceiver;
pub(crate) use tx::ShmSender;

use std::sync::Arc;

use crate::error::Error;
use crate::transport::tcp::rx::violation;

fn corrupt(what: ring::Corrupt) -> Error {
    violation(&what.0)
}

impl ShmEnd {
    pub(crate) fn split(self) -> (ShmReceiver, ShmSender, Arc<Link>) {
        let link = self.into_link();
        (ShmReceiver::new(&link), ShmSender::new(&link), link)
    }
}
