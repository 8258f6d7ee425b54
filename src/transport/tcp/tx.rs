//! The sending half of a TCP lane.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::net::TcpStream;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::SendFlags;

use crate::error::Error;
use crate::memory::Chunk;
use crate::proto::Sent;
use crate::transport::Sender;
use crate::transport::tcp::pages::Pages;

/// Payloads up to this length are copied behind their header: cheaper than another element for the kernel to walk.
const COPY_MAX: u64 = 4 << 10;
/// Payloads from this length on leave as pages, without a copy.
pub(super) const PAGES_MIN: u64 = 64 << 10;
/// Bytes that may wait in the staging buffer, and payloads beside them.
const STAGED_MAX: usize = 64 << 10;
const ITEMS_MAX: usize = 64;
const QUEUED_MAX: u64 = 2 << 20;
const SLICES: usize = 32;
/// What the staging buffer may keep when nothing is to send.
const STAGED_KEEP: usize = 8 << 10;

enum Item {
    /// This many bytes of the staging buffer.
    Staged(usize),
    Memory {
        chunk: Chunk,
        sent: Sent,
    },
}

pub(crate) struct TcpSender {
    socket: Arc<TcpStream>,
    staged: Vec<u8>,
    /// Bytes at the front of `staged` that have left.
    gone: usize,
    items: VecDeque<Item>,
    /// Bytes of payload that wait in place.
    queued: u64,
    /// Payloads that were copied and so are done with.
    copied: Vec<Sent>,
    pages: Pages,
    shut: bool,
}

impl TcpSender {
    pub(crate) fn new(socket: Arc<TcpStream>, zero_copy: bool) -> Self {
        TcpSender {
            socket,
            staged: Vec::new(),
            gone: 0,
            items: VecDeque::new(),
            queued: 0,
            copied: Vec::new(),
            pages: Pages::new(zero_copy),
            shut: false,
        }
    }

    fn stage(&mut self, n: usize) {
        match self.items.back_mut() {
            Some(Item::Staged(len)) => *len += n,
            _ => self.items.push_back(Item::Staged(n)),
        }
    }

    /// Whether a payload leaves as pages. Only those of a memory file do: whatever becomes of the buffer before the peer has read the
    /// bytes, its pages never come to hold anything else.
    fn by_pages(&self, chunk: &Chunk, sent: Sent) -> bool {
        let wanted = self.pages.usable && !sent.needs_copy() && (chunk.len() >= PAGES_MIN || self.pages.inside > 0);
        wanted && chunk.is_file()
    }

    /// Answers how many bytes moved, `None` if the socket is full.
    fn transmit(&mut self) -> Result<Option<usize>, Errno> {
        let result = match self.items.front() {
            Some(Item::Memory { chunk, sent }) if self.by_pages(chunk, *sent) => self.pages.send(&self.socket, chunk),
            _ => self.send_slices(),
        };
        match result {
            Ok(n) => Ok(Some(n)),
            Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    fn send_slices(&self) -> Result<usize, Errno> {
        let mut slices = [IoSlice::new(&[]); SLICES];
        let (mut count, mut at, mut pages_follow) = (0, self.gone, false);
        for item in &self.items {
            if count == SLICES {
                break;
            }
            match item {
                Item::Staged(len) => {
                    slices[count] = IoSlice::new(&self.staged[at..at + len]);
                    at += len;
                }
                Item::Memory { chunk, sent } => {
                    if count > 0 && self.by_pages(chunk, *sent) {
                        pages_follow = true;
                        break;
                    }
                    // SAFETY: the item keeps the memory alive during the call, and the kernel only reads. The operation holds a
                    // reader's share of it, or it is exposed for reading.
                    let Some(slice) = (unsafe { chunk.io_slice() }) else { return Err(Errno::FAULT) };
                    slices[count] = slice;
                }
            }
            count += 1;
        }
        let slices = &slices[..count];
        if count == 1 || pages_follow {
            // More follows at once: let it share the header's packet.
            let flags = SendFlags::NOSIGNAL | if pages_follow { SendFlags::MORE } else { SendFlags::empty() };
            if count == 1 {
                return rustix::net::send(&*self.socket, &slices[0], flags);
            }
            return rustix::net::sendmsg(&*self.socket, slices, &mut Default::default(), flags);
        }
        rustix::net::sendmsg(&*self.socket, slices, &mut Default::default(), SendFlags::NOSIGNAL)
    }

    /// `n` bytes have left.
    fn advance(&mut self, mut n: usize, done: &mut Vec<Sent>) {
        while n > 0 {
            match self.items.front_mut() {
                Some(Item::Staged(len)) => {
                    let step = n.min(*len);
                    *len -= step;
                    self.gone += step;
                    n -= step;
                    if *len == 0 {
                        self.items.pop_front();
                    }
                }
                Some(Item::Memory { chunk, sent }) => {
                    let step = (n as u64).min(chunk.len());
                    n -= step as usize;
                    self.queued = self.queued.saturating_sub(step);
                    match chunk.sub(step, chunk.len() - step) {
                        Some(rest) if rest.len() > 0 => *chunk = rest,
                        _ => {
                            done.push(*sent);
                            self.items.pop_front();
                        }
                    }
                }
                None => break,
            }
        }
        if self.gone == self.staged.len() {
            self.staged.clear();
            self.gone = 0;
            self.staged.shrink_to(STAGED_KEEP);
        }
    }
}

impl Sender for TcpSender {
    fn has_room(&self) -> bool {
        self.items.len() < ITEMS_MAX && self.staged.len() < STAGED_MAX && self.queued < QUEUED_MAX
    }

    fn push(&mut self, head: &[u8], payload: Option<Chunk>, sent: Sent) {
        self.staged.extend_from_slice(head);
        self.stage(head.len());
        match payload {
            Some(chunk) if chunk.len() > COPY_MAX => {
                self.queued += chunk.len();
                self.items.push_back(Item::Memory { chunk, sent });
            }
            Some(chunk) => {
                let (at, n) = (self.staged.len(), chunk.len() as usize);
                self.staged.resize(at + n, 0);
                // Both lengths are the same, so the copy cannot fail on bounds; memory that the CPU cannot read never gets here.
                if chunk.read_into(0, &mut self.staged[at..]).is_ok() {
                    self.stage(n);
                    self.copied.push(sent);
                }
            }
            None if sent == Sent::Nothing => {}
            None => self.copied.push(sent),
        }
    }

    fn flush(&mut self, done: &mut Vec<Sent>) -> Result<bool, Error> {
        done.append(&mut self.copied);
        while !self.items.is_empty() && !self.shut {
            match self.transmit() {
                Ok(Some(n)) => self.advance(n, done),
                Ok(None) => return Ok(false),
                Err(errno) => return Err(Error::io("the connection failed while sending", errno)),
            }
        }
        Ok(true)
    }

    fn is_idle(&self) -> bool {
        self.items.is_empty() && self.copied.is_empty()
    }

    fn shut(&mut self) {
        self.shut = true;
        self.items.clear();
        self.copied.clear();
        self.staged = Vec::new();
        self.gone = 0;
    }
}
