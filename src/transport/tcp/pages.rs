//! Payloads as pages: through a pipe into the socket, without a copy.
//!
//! `vmsplice(2)` puts references to the memory's pages into a pipe, `splice(2)` moves them on into the socket, and the only copy is the
//! receiver's. A reference keeps its page alive, so the memory may be freed at any time; it must only not change before the peer has
//! the bytes, which holds for every payload whose operation ends with the peer's answer.

use std::net::TcpStream;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::pipe::{IoSliceRaw, PipeFlags, SpliceFlags};

use crate::memory::Chunk;

/// The pipe's capacity, in bytes: what an unprivileged process may ask for by default (`fs.pipe-max-size`). With the 64 KiB of a new
/// pipe, the calls would cost what the copy did.
const CAPACITY: usize = 1 << 20;

pub(super) struct Pages {
    /// Made for the first payload that needs it.
    pipe: Option<(OwnedFd, OwnedFd)>,
    /// Bytes of the payload at hand that are in the pipe.
    pub inside: u64,
    /// Whether it is wanted, and has not failed.
    pub usable: bool,
}

impl Pages {
    pub(super) fn new(wanted: bool) -> Self {
        Pages { pipe: None, inside: 0, usable: wanted }
    }

    /// Moves bytes of the chunk's beginning, of which `inside` are in the pipe already, into the socket.
    pub(super) fn send(&mut self, socket: &TcpStream, chunk: &Chunk) -> Result<usize, Errno> {
        if let Err(errno) = self.fill(chunk) {
            // Refused by a sandbox, out of descriptors, or memory that has no pages: from now on by copy.
            tracing::debug!(%errno, "payloads are sent by copy");
            self.usable = self.inside > 0;
            if !self.usable {
                self.pipe = None;
                return Err(Errno::INTR);
            }
        }
        let Some((read, _)) = &self.pipe else { return Err(Errno::INTR) };
        let mut flags = SpliceFlags::NONBLOCK | SpliceFlags::MOVE;
        if self.inside < chunk.len() {
            flags |= SpliceFlags::MORE;
        }
        let n = rustix::pipe::splice(read, None, socket, None, self.inside as usize, flags)?;
        self.inside -= n as u64;
        Ok(n)
    }

    fn fill(&mut self, chunk: &Chunk) -> Result<(), Errno> {
        if self.pipe.is_none() {
            let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
            rustix::pipe::fcntl_setpipe_size(&write, CAPACITY)?;
            self.pipe = Some((read, write));
        }
        let (Some((_, write)), Some(rest)) = (&self.pipe, chunk.sub(self.inside, chunk.len() - self.inside)) else {
            return Ok(());
        };
        if rest.len() == 0 {
            return Ok(());
        }
        // SAFETY: the chunk keeps the memory alive during the call, and only the kernel reads it. The operation holds a reader's share of
        // it, or it is exposed for reading.
        let Some(slice) = (unsafe { rest.io_slice() }) else { return Err(Errno::FAULT) };
        // SAFETY: not gifted, so the pages remain this process's; that they may change under the pipe is a matter of what the peer
        // reads, not of memory safety, and operations see to it that they do not.
        match unsafe { rustix::pipe::vmsplice(write, &[IoSliceRaw::from_slice(&slice)], SpliceFlags::NONBLOCK) } {
            Ok(n) => {
                self.inside += n as u64;
                Ok(())
            }
            // Full: what is in it goes first.
            Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(errno) => Err(errno),
        }
    }
}
