//! The receiving half of a TCP lane.

use std::io::IoSliceMut;
use std::net::TcpStream;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::RecvFlags;

use crate::error::Error;
use crate::memory::Chunk;
use crate::transport::tcp::tx::PAGES_MIN;
use crate::transport::{Arrival, Dest, Received, Receiver, Sink};
use crate::wire::frame::{PRELUDE, Prelude};

/// Holds headers, small payloads, and the beginnings of large ones. An idle endpoint keeps it, so it is small.
const BUFFER: usize = 16 << 10;

/// A payload that has not wholly come yet.
struct Pending {
    dest: Dest,
    arrival: Arrival,
    at: usize,
    len: usize,
}

pub(crate) struct TcpReceiver {
    socket: Arc<TcpStream>,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    pending: Option<Pending>,
    shut: bool,
}

impl TcpReceiver {
    pub(crate) fn new(socket: Arc<TcpStream>) -> Self {
        TcpReceiver { socket, buffer: vec![0; BUFFER].into_boxed_slice(), start: 0, end: 0, pending: None, shut: false }
    }

    /// Consumes whole headers and as much payload as the buffer holds. The sink is active.
    fn parse(&mut self, sink: &mut dyn Sink) -> Result<(), Error> {
        loop {
            if let Some(pending) = &mut self.pending {
                if matches!(pending.dest, Dest::Later) {
                    pending.dest = sink.place(&pending.arrival)?;
                    if matches!(pending.dest, Dest::Later) {
                        return Ok(());
                    }
                }
                let n = (pending.len - pending.at).min(self.end - self.start);
                let bytes = &self.buffer[self.start..self.start + n];
                if n > 0 {
                    match &pending.dest {
                        Dest::Sink => sink.put(&pending.arrival.token, pending.at, bytes),
                        Dest::Memory(chunk) if sink.wants(&pending.arrival.token) => {
                            chunk.write_from(pending.at as u64, bytes)?
                        }
                        Dest::Memory(_) => pending.dest = Dest::Discard,
                        Dest::Discard | Dest::Later => {}
                    }
                    pending.at += n;
                    self.start += n;
                }
                if pending.at < pending.len {
                    return Ok(());
                }
                let Some(Pending { dest, arrival, len, .. }) = self.pending.take() else { continue };
                if len >= PAGES_MIN as usize {
                    check_reset(&self.socket)?;
                }
                sink.landed(dest, arrival)?;
                continue;
            }
            let bytes = &self.buffer[self.start..self.end];
            if bytes.len() < PRELUDE {
                return Ok(());
            }
            let prelude = Prelude::parse(bytes).map_err(|e| violation(&e))?;
            let Some(head) = bytes.get(..prelude.head_len()) else { return Ok(()) };
            let (dest, arrival) = sink.frame(head, prelude.payload_len() as u32, false)?;
            self.start += prelude.head_len();
            self.pending = Some(Pending { dest, arrival, at: 0, len: prelude.payload_len() });
        }
    }

    /// Moves what is left to the front, so that a header never has to wrap.
    fn compact(&mut self) {
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        } else if self.buffer.len() - self.end < BUFFER / 2 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
    }

    /// One system call. Answers how many bytes came.
    fn receive(&mut self, sink: &mut dyn Sink) -> Result<Option<usize>, Error> {
        self.compact();
        let direct = match &mut self.pending {
            Some(pending) if matches!(pending.dest, Dest::Memory(_)) => {
                if sink.wants(&pending.arrival.token) {
                    let Dest::Memory(chunk) = &pending.dest else { return Ok(None) };
                    chunk.sub(pending.at as u64, (pending.len - pending.at) as u64)
                } else {
                    pending.dest = Dest::Discard;
                    None
                }
            }
            _ => None,
        };
        // Without a payload under way, which is how a spinning look goes, the lock is not taken at all.
        sink.pause();
        let room = &mut self.buffer[self.end..];
        let result = match &direct {
            Some(chunk) => receive_into(&self.socket, chunk, room),
            None => rustix::net::recv(&*self.socket, room, RecvFlags::empty()).map(|(n, _)| n),
        };
        let n = match result {
            Ok(0) => return Ok(Some(0)),
            Ok(n) => n,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(errno) => return Err(Error::io("the connection failed while receiving", errno)),
        };
        sink.resume();
        match (&direct, &mut self.pending) {
            (Some(chunk), Some(pending)) => {
                let placed = n.min(chunk.len() as usize);
                pending.at += placed;
                self.end += n - placed;
            }
            _ => self.end += n,
        }
        Ok(Some(n))
    }
}

/// Reads into the chunk, and what follows it into `rest`.
fn receive_into(socket: &TcpStream, chunk: &Chunk, rest: &mut [u8]) -> Result<usize, Errno> {
    // SAFETY: the chunk keeps the memory alive during the call, its bytes are written by the kernel only, and an operation that
    // receives into it has exclusive use of it, or it is exposed for writing, in which case no reference to its bytes exists.
    let Some(slice) = (unsafe { chunk.io_slice_mut() }) else { return Err(Errno::FAULT) };
    rustix::io::readv(socket, &mut [slice, IoSliceMut::new(rest)])
}

impl Receiver for TcpReceiver {
    fn poll(&mut self, sink: &mut dyn Sink, budget: usize) -> Result<Received, Error> {
        if self.shut {
            return Ok(Received::Idle { any: false });
        }
        let mut total = 0;
        let result = loop {
            if self.is_stalled() {
                // Perhaps there is pinned memory by now.
                sink.resume();
                if let Err(error) = self.parse(sink) {
                    break Err(error);
                }
                if self.is_stalled() {
                    break Ok(Received::Idle { any: total > 0 });
                }
            }
            match self.receive(sink) {
                Ok(None) => break Ok(Received::Idle { any: total > 0 }),
                Ok(Some(0)) => break Ok(Received::End),
                Ok(Some(n)) => {
                    total += n;
                    let room = self.buffer.len() - self.end;
                    if let Err(error) = self.parse(sink) {
                        break Err(error);
                    }
                    // A read that did not fill what it was offered has emptied the socket: save the call that would say so.
                    if room > 0 && self.pending.is_none() {
                        break Ok(Received::Idle { any: true });
                    }
                    if total >= budget {
                        break Ok(Received::More);
                    }
                }
                Err(error) => break Err(error),
            }
        };
        sink.pause();
        result
    }

    fn review(&mut self, sink: &mut dyn Sink) {
        if let Some(pending) = &mut self.pending {
            if !sink.wants(&pending.arrival.token) {
                pending.dest = Dest::Discard;
            }
        }
    }

    fn is_stalled(&self) -> bool {
        matches!(&self.pending, Some(Pending { dest: Dest::Later, .. }))
    }

    fn shut(&mut self) {
        self.shut = true;
        self.pending = None;
        self.start = 0;
        self.end = 0;
    }
}

/// Long payloads may have come as pages of the sender's memory, which it may change as soon as it has given the connection up. It resets the
/// connection before that: as long as there was no reset after the last byte was copied, all of them are what was sent.
fn check_reset(socket: &TcpStream) -> Result<(), Error> {
    match rustix::net::sockopt::socket_error(socket) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(errno)) | Err(errno) => Err(Error::io("the connection failed while receiving", errno)),
    }
}

/// A peer that sends what is no frame.
pub(crate) fn violation(what: &dyn std::fmt::Display) -> Error {
    Error::PeerLost { peer: String::new(), reason: format!("it broke the protocol: {what}").into() }
}
