//! Device payloads on their way out: copied to pinned memory ahead of the socket, in the order of their frames.

use std::collections::VecDeque;

use super::copies::Gpu;
use crate::error::Result;
use crate::memory::Chunk;
use crate::memory::cuda::staging::{AHEAD, FRAME, Use};
use crate::memory::cuda::stream::{Ring, Ticket};
use crate::memory::cuda::{Until, copy};
use crate::proto::Sent;
use crate::wire::frame::Head;

/// Frames that may wait, however short.
const FRAMES_MAX: usize = 64;

/// The frames of a lane, from the first that has to wait for a device on.
#[derive(Default)]
pub(super) struct Ahead {
    frames: VecDeque<Frame>,
    /// Bytes in them that come from a device.
    bytes: u64,
    /// Bytes copied out since this was last asked for.
    staged: u64,
}

pub(super) struct Frame {
    pub head: Head,
    payload: Payload,
    pub sent: Sent,
}

enum Payload {
    None,
    /// In memory that the socket can be given.
    Here(Chunk),
    /// On a device, with no pinned memory for it yet.
    Device(Chunk),
    Copying {
        ticket: Ticket,
        slot: Chunk,
        source: Chunk,
        armed: bool,
    },
}

impl Frame {
    pub(super) fn payload(self) -> Option<Chunk> {
        match self.payload {
            Payload::Here(chunk) => Some(chunk),
            _ => None,
        }
    }
}

impl Ahead {
    pub(super) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    pub(super) fn has_room(&self) -> bool {
        self.frames.len() < FRAMES_MAX && self.bytes < AHEAD as u64 * u64::from(FRAME)
    }

    pub(super) fn push(&mut self, head: Head, payload: Option<Chunk>, sent: Sent) {
        let payload = match payload {
            None => Payload::None,
            Some(chunk) if chunk.device().is_none() => Payload::Here(chunk),
            Some(chunk) => {
                self.bytes += chunk.len();
                Payload::Device(chunk)
            }
        };
        self.frames.push_back(Frame { head, payload, sent });
    }

    /// Starts the copies for which there is pinned memory.
    pub(super) fn start(&mut self, gpu: &Gpu) -> Result<()> {
        for frame in &mut self.frames {
            let Payload::Device(source) = &frame.payload else { continue };
            let Some(device) = source.device() else { continue };
            let Some(slot) = gpu.staging.take(device, Use::Outgoing, source.len() as u32, &gpu.ring)? else { break };
            let ticket = copy::start(source, &slot)?;
            self.staged += slot.len();
            frame.payload = Payload::Copying { ticket, slot, source: source.clone(), armed: false };
        }
        Ok(())
    }

    /// Whether the first frame can leave.
    pub(super) fn is_ready(&self) -> Result<bool> {
        match self.frames.front().map(|frame| &frame.payload) {
            None | Some(Payload::Device(_)) => Ok(false),
            Some(Payload::None | Payload::Here(_)) => Ok(true),
            Some(Payload::Copying { ticket, .. }) => ticket.poll(),
        }
    }

    /// The first frame, if it can leave.
    pub(super) fn pop(&mut self) -> Result<Option<Frame>> {
        if !self.is_ready()? {
            return Ok(None);
        }
        let Some(mut frame) = self.frames.pop_front() else { return Ok(None) };
        if let Payload::Copying { slot, .. } = frame.payload {
            self.bytes -= slot.len();
            frame.payload = Payload::Here(slot);
        }
        Ok(Some(frame))
    }

    /// Has the ring called when the first frame can leave.
    pub(super) fn arm(&mut self, ring: &Ring) -> Result<()> {
        match self.frames.front_mut().map(|frame| &mut frame.payload) {
            Some(Payload::Copying { ticket, armed, .. }) if !*armed => {
                *armed = true;
                ticket.ring(ring)
            }
            _ => Ok(()),
        }
    }

    pub(super) fn take_staged(&mut self) -> u64 {
        std::mem::take(&mut self.staged)
    }

    /// Gives everything up. What a device is at is kept until it is done.
    pub(super) fn shut(&mut self) {
        for frame in self.frames.drain(..) {
            if let Payload::Copying { ticket, slot, source, .. } = frame.payload {
                if let Some(device) = source.device() {
                    device.limbo.keep(Until::Ticket(ticket), Box::new((slot, source)));
                }
            }
        }
        self.bytes = 0;
    }
}
