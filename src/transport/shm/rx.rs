//! The receiving half.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::link::Link;
use super::memory::Direction;
use super::ring::{Consumer, HEAD, Kind, Record, Store};
use super::{copy, corrupt};
use crate::error::Error;
use crate::transport::tcp::rx::violation;
use crate::transport::{Arrival, Dest, Received, Receiver, Sink};
use crate::wire::frame::Prelude;

/// Bytes for the protocol's own buffers go by way of the stack, this many at a time.
const STEP: usize = 4 << 10;
/// Payloads up to this length are copied with the state locked, in bytes: a system call's worth of time.
const SHORT: usize = 4 << 10;

/// Where the payload of a frame is.
#[derive(Debug, Clone, Copy)]
enum Source {
    /// In the record itself.
    Whole,
    /// In the records after it.
    Pieces,
    /// In memory of the peer's.
    Named { name: u64, offset: u64 },
    /// At an address in the peer's process.
    Placed { address: u64 },
}

/// A frame of which the payload has not landed yet.
struct Pending {
    source: Source,
    dest: Dest,
    arrival: Arrival,
    at: usize,
    len: usize,
    /// The frame's own record.
    record: Record,
}

pub(crate) struct ShmReceiver {
    link: Arc<Link>,
    consumer: Consumer<Direction>,
    pending: Option<Pending>,
    /// Frames with named memory that were read.
    released: u64,
    /// What was consumed since the producer was last told.
    quiet: bool,
    shut: bool,
}

impl ShmReceiver {
    pub(super) fn new(link: &Arc<Link>) -> Self {
        let consumer = Consumer::new(link.incoming());
        ShmReceiver { link: Arc::clone(link), consumer, pending: None, released: 0, quiet: true, shut: false }
    }

    fn consume(&mut self, record: Record) {
        self.consumer.consume(record);
        self.link.consumed.store(self.consumer.at(), Ordering::Relaxed);
        self.quiet = false;
    }

    /// Takes a frame's header. The sink is active.
    fn begin(&mut self, sink: &mut dyn Sink, record: Record, at: u64) -> Result<(), Error> {
        let mut head = [0; HEAD];
        let head = &mut head[..record.head];
        self.consumer.store().get(at, head);
        let prelude = Prelude::parse(head).map_err(|e| violation(&e))?;
        if prelude.head_len() != head.len() {
            return Err(violation(&"a header of another length than its record says"));
        }
        let len = prelude.payload_len();
        let source = match record.kind {
            Kind::Whole if record.body == len => Source::Whole,
            Kind::Begun if record.body == 0 => Source::Pieces,
            Kind::Named if record.body == 16 => {
                let mut words = [0; 16];
                self.consumer.store().get(at + record.head as u64, &mut words);
                let (name, offset) = (u128::from_le_bytes(words) as u64, (u128::from_le_bytes(words) >> 64) as u64);
                Source::Named { name, offset }
            }
            Kind::Placed if record.body == 8 => {
                let mut word = [0; 8];
                self.consumer.store().get(at + record.head as u64, &mut word);
                Source::Placed { address: u64::from_le_bytes(word) }
            }
            _ => return Err(violation(&"a frame in a record of the wrong kind or length")),
        };
        let (dest, arrival) = sink.frame(head, len as u32, false)?;
        self.pending = Some(Pending { source, dest, arrival, at: 0, len, record });
        Ok(())
    }

    /// Moves what has come of a payload. Answers whether the frame is over; `false` if more must come, or pinned memory. The sink is active.
    fn go_on(&mut self, sink: &mut dyn Sink) -> Result<bool, Error> {
        let Some(pending) = &mut self.pending else { return Ok(true) };
        if matches!(pending.dest, Dest::Later) {
            pending.dest = sink.place(&pending.arrival)?;
            if matches!(pending.dest, Dest::Later) {
                return Ok(false);
            }
        }
        match pending.source {
            Source::Whole => {
                let (record, at) = (pending.record, self.consumer.at() + 8 + pending.record.head as u64);
                self.move_record(sink, at, record.body)?;
                self.consume(record);
                Ok(true)
            }
            source @ (Source::Named { .. } | Source::Placed { .. }) => {
                let record = pending.record;
                self.read_in_place(sink, source)?;
                self.released += 1;
                self.consumer.store().released().store(self.released, Ordering::Release);
                self.consume(record);
                Ok(true)
            }
            Source::Pieces => {
                if pending.at == 0 && pending.record.kind == Kind::Begun {
                    // The frame's own record is not needed any more; what follows it is.
                    let record = pending.record;
                    pending.record.kind = Kind::Piece;
                    self.consume(record);
                }
                self.take_pieces(sink)
            }
        }
    }

    fn take_pieces(&mut self, sink: &mut dyn Sink) -> Result<bool, Error> {
        loop {
            let (at, len) = self.pending.as_ref().map_or((0, 0), |pending| (pending.at, pending.len));
            if at >= len {
                return Ok(true);
            }
            let Some((record, from)) = self.consumer.peek().map_err(corrupt)? else { return Ok(false) };
            if record.kind != Kind::Piece || record.head != 0 || record.body == 0 || record.body > len - at {
                return Err(violation(&"a payload that does not go on as it began"));
            }
            self.move_record(sink, from, record.body)?;
            self.consume(record);
            self.wake();
        }
    }

    /// Moves the `n` bytes of a record to where the pending payload goes.
    fn move_record(&mut self, sink: &mut dyn Sink, from: u64, n: usize) -> Result<(), Error> {
        let Some(pending) = &mut self.pending else { return Ok(()) };
        let ring = self.consumer.store();
        match &pending.dest {
            Dest::Memory(chunk) if sink.wants(&pending.arrival.token) => {
                if n > SHORT {
                    sink.pause();
                }
                let copied = copy::from_ring(ring, from, chunk, pending.at as u64, n);
                sink.resume();
                copied?;
            }
            Dest::Memory(_) => pending.dest = Dest::Discard,
            Dest::Sink => {
                let mut step = [0; STEP];
                let mut done = 0;
                while done < n {
                    let part = &mut step[..STEP.min(n - done)];
                    ring.get(from + done as u64, part);
                    sink.put(&pending.arrival.token, pending.at + done, part);
                    done += part.len();
                }
            }
            Dest::Discard | Dest::Later => {}
        }
        pending.at += n;
        Ok(())
    }

    /// Copies a payload out of the peer's memory.
    fn read_in_place(&mut self, sink: &mut dyn Sink, source: Source) -> Result<(), Error> {
        let Some(pending) = &mut self.pending else { return Ok(()) };
        let beyond = || violation(&"a payload beyond the end of its memory");
        match &pending.dest {
            Dest::Memory(chunk) if sink.wants(&pending.arrival.token) => {
                sink.pause();
                let copied = match source {
                    Source::Named { name, offset } => self
                        .link
                        .mapping(name)
                        .and_then(|mapping| copy::from_peer(&mapping, offset, chunk, 0, pending.len)?.ok_or_else(beyond)),
                    Source::Placed { address } => copy::from_process(self.link.peer(), address, chunk, pending.len),
                    Source::Whole | Source::Pieces => Ok(()),
                };
                sink.resume();
                copied
            }
            Dest::Sink => {
                // Frames for which the protocol has a buffer are copied into the ring.
                Err(violation(&"a message that came unasked must come through the ring"))
            }
            _ => Ok(()),
        }
    }

    fn wake(&mut self) {
        if !std::mem::replace(&mut self.quiet, true) && self.consumer.must_wake() {
            self.link.wake_peer();
        }
    }

    fn take(&mut self, sink: &mut dyn Sink, budget: usize) -> Result<Received, Error> {
        let (mut total, mut any) = (0, false);
        loop {
            let next = self.consumer.peek().map_err(corrupt)?;
            match (&self.pending, next) {
                (None, Some((record, at))) => {
                    sink.resume();
                    any = true;
                    self.begin(sink, record, at)?;
                }
                (None, None) => return Ok(Received::Idle { any }),
                // The look that finds nothing costs no lock, and is no sign of life.
                (Some(Pending { source: Source::Pieces, dest, .. }), None) if !matches!(dest, Dest::Later) => {
                    return Ok(Received::Idle { any });
                }
                (Some(_), _) => sink.resume(),
            }
            let before = self.pending.as_ref().map_or(0, |pending| pending.at);
            let over = self.go_on(sink)?;
            any |= over || self.pending.as_ref().is_some_and(|pending| pending.at > before);
            if !over {
                return Ok(Received::Idle { any });
            }
            if let Some(Pending { dest, arrival, len, .. }) = self.pending.take() {
                total += len;
                sink.landed(dest, arrival)?;
            }
            if total >= budget {
                return Ok(Received::More);
            }
        }
    }
}

impl Receiver for ShmReceiver {
    fn poll(&mut self, sink: &mut dyn Sink, budget: usize) -> Result<Received, Error> {
        if self.shut {
            return Ok(Received::Idle { any: false });
        }
        let result = self.take(sink, budget);
        sink.pause();
        self.wake();
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
        self.link.end();
    }
}
