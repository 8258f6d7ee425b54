//! Both sides in one process: headers go through a queue, and the receiver copies a payload straight from the sender's memory into its
//! destination. Short messages that must be copied before their send ends travel through the queue's own bytes. Where either memory is a
//! device's, the copy is the device's, and the sender's memory is let go of when it is done.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use crate::error::Error;
use crate::memory::{Chunk, HostRegion, Region};
use crate::proto::Sent;
use crate::reactor::{Reactor, SourceId, lock};
use crate::transport::tcp::rx::violation;
use crate::transport::{Dest, ReadMark, Received, Receiver, Sender, Sink};
use crate::wire::frame::{HEAD_MAX, Prelude};

/// Bytes of copied payload, and frames, that may wait in one direction.
const BYTES_MAX: usize = 256 << 10;
const FRAMES_MAX: usize = 1024;

struct Frame {
    head: [u8; HEAD_MAX],
    head_len: u8,
    body: Body,
}

enum Body {
    None,
    /// This many bytes of the queue's own.
    Copied(usize),
    /// The sender's memory, until it was read, and the place of its mark.
    Memory(Chunk, u64),
}

#[derive(Default)]
struct Queue {
    frames: VecDeque<Frame>,
    bytes: VecDeque<u8>,
    ended: bool,
}

/// One direction.
#[derive(Default)]
struct Pipe {
    queue: Mutex<Queue>,
    /// What the receiver has taken out and is working on.
    taken: Mutex<Queue>,
    /// Which frames with memory the receiver has read.
    marks: Arc<Marks>,
    /// The receiver sleeps; the sender waits for room.
    receiver_sleeps: AtomicBool,
    sender_waits: AtomicBool,
    receiver: Mutex<Option<Bell>>,
    sender: Mutex<Option<Bell>>,
}

/// Frames with memory that the receiver may hold at a time.
const MARKS: usize = 2048;

/// One bit for each frame with memory, counted from the first: the receiver has read it. Copies by devices end in any order.
#[derive(Debug)]
pub(crate) struct Marks([AtomicBool; MARKS]);

impl Default for Marks {
    fn default() -> Self {
        Marks([const { AtomicBool::new(false) }; MARKS])
    }
}

impl Marks {
    pub(crate) fn set(&self, index: u64) {
        self.0[index as usize % MARKS].store(true, Ordering::Release);
    }

    fn is_set(&self, index: u64) -> bool {
        self.0[index as usize % MARKS].load(Ordering::Acquire)
    }

    fn clear(&self, index: u64) {
        self.0[index as usize % MARKS].store(false, Ordering::Relaxed);
    }
}

/// How to wake one end.
#[derive(Clone)]
struct Bell {
    reactor: Weak<Reactor>,
    source: SourceId,
    lane: usize,
}

impl Bell {
    fn ring(bell: &Mutex<Option<Bell>>) {
        if let Some(Bell { reactor, source, lane }) = lock(bell).clone() {
            if let Some(reactor) = reactor.upgrade() {
                reactor.kick(source, lane);
            }
        }
    }
}

/// One end of a connection within the process.
pub(crate) struct InprocEnd {
    incoming: Arc<Pipe>,
    outgoing: Arc<Pipe>,
}

/// Two connected ends.
pub(crate) fn pair() -> (InprocEnd, InprocEnd) {
    let (a, b) = (Arc::new(Pipe::default()), Arc::new(Pipe::default()));
    (InprocEnd { incoming: Arc::clone(&a), outgoing: Arc::clone(&b) }, InprocEnd { incoming: b, outgoing: a })
}

impl InprocEnd {
    pub(crate) fn split(self) -> (InprocReceiver, InprocSender, InprocBell) {
        let bell = InprocBell { incoming: Arc::clone(&self.incoming), outgoing: Arc::clone(&self.outgoing) };
        (
            InprocReceiver { pipe: self.incoming },
            InprocSender { pipe: self.outgoing, handed: 0, released: 0, waiting: VecDeque::new(), pushed: false },
            bell,
        )
    }
}

/// Arms and wakes an end.
pub(crate) struct InprocBell {
    incoming: Arc<Pipe>,
    outgoing: Arc<Pipe>,
}

impl InprocBell {
    pub(crate) fn attach(&self, reactor: &Arc<Reactor>, source: SourceId, lane: usize) {
        let bell = Bell { reactor: Arc::downgrade(reactor), source, lane };
        *lock(&self.incoming.receiver) = Some(bell.clone());
        *lock(&self.outgoing.sender) = Some(bell);
    }

    /// Asks to be woken for the next frame, or for one that is already there.
    pub(crate) fn arm(&self, write: bool) {
        self.incoming.receiver_sleeps.store(true, Ordering::SeqCst);
        if write {
            self.outgoing.sender_waits.store(true, Ordering::SeqCst);
        }
        // Looked at after the flag is set, and the other side looks at the flag after it has queued: one of the two sees the other.
        let there = |queue: &Queue| !queue.frames.is_empty() || queue.ended;
        // Whoever is at the taken frames just now may leave some.
        let there = self.incoming.taken.try_lock().map_or(true, |taken| there(&taken)) || there(&lock(&self.incoming.queue));
        if there && self.incoming.receiver_sleeps.swap(false, Ordering::SeqCst) {
            Bell::ring(&self.incoming.receiver);
        }
        if write && lock(&self.outgoing.queue).has_room() && self.outgoing.sender_waits.swap(false, Ordering::SeqCst) {
            Bell::ring(&self.outgoing.sender);
        }
    }
}

impl Queue {
    fn has_room(&self) -> bool {
        self.frames.len() < FRAMES_MAX && self.bytes.len() < BYTES_MAX
    }

    fn clear(&mut self) {
        self.frames.clear();
        self.bytes.clear();
    }
}

pub(crate) struct InprocReceiver {
    pipe: Arc<Pipe>,
}

impl InprocReceiver {
    /// Answers how many bytes were taken in.
    fn deliver(&self, taken: &mut Queue, frame: &Frame, sink: &mut dyn Sink) -> Result<u64, Error> {
        let head = &frame.head[..usize::from(frame.head_len)];
        let prelude = Prelude::parse(head).map_err(|e| violation(&e))?;
        let (dest, arrival) = sink.frame(head, prelude.payload_len() as u32, true)?;
        let len = prelude.payload_len();
        match &frame.body {
            Body::None => {}
            Body::Copied(_) => {
                let (front, back) = taken.bytes.as_slices();
                let front = &front[..front.len().min(len)];
                let back = &back[..len - front.len()];
                match &dest {
                    Dest::Sink => {
                        sink.put(&arrival.token, 0, front);
                        sink.put(&arrival.token, front.len(), back);
                    }
                    Dest::Memory(to) if to.device().is_some() => {
                        // Kept until the device has read it.
                        let bytes = HostRegion::of_vec([front, back].concat());
                        sink.carry(Chunk::whole(Arc::new(Region::Host(bytes))), to.clone(), arrival, None)?;
                        return Ok(len as u64);
                    }
                    Dest::Memory(to) => to.write_from(0, front).and_then(|()| to.write_from(front.len() as u64, back))?,
                    Dest::Discard | Dest::Later => {}
                }
            }
            Body::Memory(from, index) => {
                let read = ReadMark { marks: Arc::clone(&self.pipe.marks), index: *index };
                match &dest {
                    Dest::Memory(to) if from.device().or(to.device()).is_some() => {
                        sink.carry(from.clone(), to.clone(), arrival, Some(read))?;
                        return Ok(len as u64);
                    }
                    Dest::Memory(to) => {
                        sink.pause();
                        let copied = from.copy_to(to);
                        sink.resume();
                        copied?;
                    }
                    Dest::Sink => {
                        // Frames for which a buffer is right are short, and from host memory.
                        let mut bytes = vec![0; len];
                        from.read_into(0, &mut bytes)?;
                        sink.put(&arrival.token, 0, &bytes);
                    }
                    Dest::Discard | Dest::Later => {}
                }
                // Before the sender can hear of it.
                read.marks.set(read.index);
            }
        }
        sink.landed(dest, arrival)?;
        Ok(len as u64)
    }
}

impl Receiver for InprocReceiver {
    fn poll(&mut self, sink: &mut dyn Sink, budget: usize) -> Result<Received, Error> {
        let mut taken = lock(&self.pipe.taken);
        let mut total = 0;
        let mut any = false;
        loop {
            if taken.frames.is_empty() {
                let ended = {
                    let mut queue = lock(&self.pipe.queue);
                    std::mem::swap(&mut *taken, &mut *queue);
                    queue.ended = taken.ended;
                    taken.ended
                };
                if self.pipe.sender_waits.swap(false, Ordering::SeqCst) {
                    Bell::ring(&self.pipe.sender);
                }
                if taken.frames.is_empty() {
                    return Ok(if ended { Received::End } else { Received::Idle { any } });
                }
            }
            sink.resume();
            while let Some(frame) = taken.frames.pop_front() {
                any = true;
                let result = self.deliver(&mut taken, &frame, sink);
                if let Body::Copied(n) = frame.body {
                    let n = n.min(taken.bytes.len());
                    taken.bytes.drain(..n);
                }
                if let (Body::Memory(_, index), Err(_)) = (&frame.body, &result) {
                    self.pipe.marks.set(*index);
                }
                match result {
                    Ok(n) => total += n as usize,
                    Err(error) => {
                        sink.pause();
                        return Err(error);
                    }
                }
                if total >= budget {
                    sink.pause();
                    return Ok(Received::More);
                }
            }
            sink.pause();
        }
    }

    fn review(&mut self, _sink: &mut dyn Sink) {
        // A payload is copied at once, or not at all.
    }

    fn shut(&mut self) {
        // The sender's memory is let go of with the frames.
        lock(&self.pipe.taken).clear();
        lock(&self.pipe.queue).clear();
    }
}

pub(crate) struct InprocSender {
    pipe: Arc<Pipe>,
    /// Frames with memory that were queued, and that came back.
    handed: u64,
    released: u64,
    waiting: VecDeque<(bool, Sent)>,
    pushed: bool,
}

impl Sender for InprocSender {
    fn takes_devices(&self) -> bool {
        true
    }

    fn has_room(&self) -> bool {
        self.waiting.len() < MARKS && lock(&self.pipe.queue).has_room()
    }

    fn push(&mut self, head: &[u8], payload: Option<Chunk>, sent: Sent) {
        let mut frame = Frame { head: [0; HEAD_MAX], head_len: head.len() as u8, body: Body::None };
        frame.head[..head.len()].copy_from_slice(head);
        let mut queue = lock(&self.pipe.queue);
        let mut by_reference = false;
        match payload {
            Some(chunk) if chunk.device().is_none() && (sent.needs_copy() || chunk.len() <= 256) => {
                let (at, n) = (queue.bytes.len(), chunk.len() as usize);
                queue.bytes.resize(at + n, 0);
                let (front, back) = queue.bytes.as_mut_slices();
                // The new bytes may lie in either slice, or across both. A copy within bounds cannot fail.
                let split = front.len().saturating_sub(at).min(n);
                let start = at.min(front.len());
                let _ = chunk.read_into(0, &mut front[start..start + split]);
                let tail = back.len() - (n - split);
                let _ = chunk.read_into(split as u64, &mut back[tail..]);
                frame.body = Body::Copied(n);
            }
            Some(chunk) => {
                by_reference = true;
                self.pipe.marks.clear(self.handed);
                frame.body = Body::Memory(chunk, self.handed);
                self.handed += 1;
            }
            None => {}
        }
        queue.frames.push_back(frame);
        drop(queue);
        self.pushed = true;
        if by_reference || sent != Sent::Nothing {
            self.waiting.push_back((by_reference, sent));
        }
    }

    fn flush(&mut self, done: &mut Vec<Sent>) -> Result<bool, Error> {
        while let Some(&(by_reference, sent)) = self.waiting.front() {
            if by_reference {
                if !self.pipe.marks.is_set(self.released) {
                    break;
                }
                self.released += 1;
            }
            self.waiting.pop_front();
            done.push(sent);
        }
        if std::mem::take(&mut self.pushed) && self.pipe.receiver_sleeps.swap(false, Ordering::SeqCst) {
            Bell::ring(&self.pipe.receiver);
        }
        Ok(true)
    }

    fn is_idle(&self) -> bool {
        let stuck = self.waiting.front().is_none_or(|&(by_reference, _)| by_reference && !self.pipe.marks.is_set(self.released));
        stuck && !self.pushed
    }

    fn shut(&mut self) {
        // Waits for a copy that is under way, then takes the rest back.
        lock(&self.pipe.taken).clear();
        {
            let mut queue = lock(&self.pipe.queue);
            queue.clear();
            queue.ended = true;
        }
        self.waiting.clear();
        if self.pipe.receiver_sleeps.swap(false, Ordering::SeqCst) {
            Bell::ring(&self.pipe.receiver);
        }
    }
}
