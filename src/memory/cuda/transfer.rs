//! A copy of any length between any two pieces of memory, as a state machine that never blocks.

use std::collections::VecDeque;
use std::sync::Arc;

use super::copy;
use super::limbo::Until;
use super::staging::{FRAME, Staging, Use};
use super::stream::{Ring, Ticket};
use crate::error::{Error, Result};
use crate::memory::Chunk;

/// Chunks of pinned memory that one transfer uses at a time.
const DEPTH: usize = 4;

/// Keeps both pieces of memory, and while it lives they stay; dropped early, it leaves them to the device's limbo.
pub(crate) struct Transfer {
    from: Chunk,
    to: Chunk,
    staging: Option<Arc<Staging>>,
    /// Bytes for which a copy was started, and that are over.
    begun: u64,
    over: u64,
    under_way: VecDeque<(Ticket, Option<Chunk>)>,
    /// Whether the last ticket was told to ring.
    armed: bool,
    /// Bytes that passed through pinned memory.
    pub staged: u64,
}

/// How a transfer stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stands {
    Done,
    UnderWay,
    /// There is no pinned chunk; the ring will be called.
    NoChunk,
}

impl Transfer {
    /// Copies all of `from` to the beginning of `to`. The two are not both host memory.
    pub(crate) fn new(from: Chunk, to: Chunk, staging: Option<Arc<Staging>>) -> Self {
        Transfer { from, to, staging, begun: 0, over: 0, under_way: VecDeque::new(), armed: false, staged: 0 }
    }

    /// A copy that is under way already.
    pub(crate) fn of(ticket: Ticket, from: Chunk, to: Chunk) -> Self {
        let mut transfer = Self::new(from, to, None);
        transfer.begun = transfer.from.len();
        transfer.under_way.push_back((ticket, None));
        transfer
    }

    /// Moves on.
    pub(crate) fn poll(&mut self, ring: &Ring) -> Result<Stands> {
        let (from, to) = (&self.from, &self.to);
        let len = from.len();
        let mut stands = Stands::UnderWay;
        loop {
            while let Some((ticket, chunk)) = self.under_way.front() {
                if !ticket.poll()? {
                    break;
                }
                let n = chunk.as_ref().map_or(len, Chunk::len);
                if let (Some(chunk), None) = (chunk, to.device()) {
                    // Out of pinned memory to where it belongs.
                    chunk.copy_to(&to.narrow(self.over, n)?)?;
                }
                self.over += n;
                self.under_way.pop_front();
            }
            if self.over >= len {
                return Ok(Stands::Done);
            }
            let begun = self.begun;
            if begun >= len || self.under_way.len() >= DEPTH || stands == Stands::NoChunk {
                return Ok(stands);
            }
            if from.device().is_some() && to.device().is_some() {
                self.under_way.push_back((copy::start(from, to)?, None));
                self.begun = len;
                continue;
            }
            let (Some(staging), Some(device)) = (&self.staging, copy::device_of(from, to)) else {
                return Err(Error::invalid("a transfer without pinned memory"));
            };
            let n = (len - begun).min(FRAME.into());
            let Some(chunk) = staging.take(device, Use::Incoming, n as u32, ring)? else {
                stands = Stands::NoChunk;
                continue;
            };
            let (from, to) = (from.narrow(begun, n)?, to.narrow(begun, n)?);
            let ticket = if to.device().is_some() {
                from.copy_to(&chunk)?;
                copy::start(&chunk, &to)?
            } else {
                copy::start(&from, &chunk)?
            };
            self.under_way.push_back((ticket, Some(chunk)));
            self.begun += n;
            self.staged += n;
            self.armed = false;
        }
    }

    /// Has the ring called when what is under way is done.
    pub(crate) fn arm(&mut self, ring: &Ring) -> Result<()> {
        if let (false, Some((ticket, _))) = (self.armed, self.under_way.front()) {
            ticket.ring(ring)?;
            self.armed = true;
        }
        Ok(())
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        for (ticket, chunk) in self.under_way.drain(..) {
            if let Some(device) = copy::device_of(&self.from, &self.to) {
                device.limbo.keep(Until::Ticket(ticket), Box::new((self.from.clone(), self.to.clone(), chunk)));
            }
        }
    }
}
