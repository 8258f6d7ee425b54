//! A ring of records between one producer and one consumer that share memory and trust each other with nothing.
//!
//! A record begins with a word that says what it is; the word is zero until the record is whole, so the consumer looks at one place, and an
//! eight-byte message is one cache line from core to core. Records are whole cache lines long. The consumer publishes how far it has come;
//! the producer looks at that only when its own count says that the ring is full. What either side reads of the other's words is taken once,
//! and checked on that copy.

#[cfg(gpusock_loom)]
use loom::sync::atomic::fence;
#[cfg(not(gpusock_loom))]
use std::sync::atomic::fence;

use std::sync::atomic::Ordering;

/// Records are multiples of this long, in bytes.
pub(super) const LINE: u64 = 64;
/// Longest head of a record, in bytes.
pub(super) const HEAD: usize = crate::wire::frame::HEAD_MAX;
/// Longest body of a record, in bytes.
pub(super) const BODY: usize = 16 << 10;
/// What a record of any kind needs at most: its word, head and body, and the next record's word, which it clears.
const ROOM: u64 = (8 + HEAD as u64 + BODY as u64).next_multiple_of(LINE) + LINE;

/// A word that both sides use.
pub(super) trait Word {
    fn load(&self, order: Ordering) -> u64;
    fn store(&self, value: u64, order: Ordering);
    fn swap(&self, value: u64, order: Ordering) -> u64;
}

impl Word for std::sync::atomic::AtomicU64 {
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }

    fn store(&self, value: u64, order: Ordering) {
        self.store(value, order);
    }

    fn swap(&self, value: u64, order: Ordering) -> u64 {
        self.swap(value, order)
    }
}

/// The memory of a ring, seen from one side. Positions count all bytes ever written; a store takes them modulo its length.
pub(super) trait Store {
    type Word: Word;
    /// Bytes in the ring, a power of two.
    fn len(&self) -> u64;
    /// The word at a position that is a multiple of [`LINE`].
    fn word(&self, at: u64) -> &Self::Word;
    /// Writes bytes of a record that the consumer does not look at yet.
    fn put(&self, at: u64, bytes: &[u8]);
    /// Reads bytes of a record that the producer has written.
    fn get(&self, at: u64, bytes: &mut [u8]);
    /// How far the consumer has come.
    fn consumed(&self) -> &Self::Word;
    /// Not zero: the consumer sleeps, and wants to be woken.
    fn sleeps(&self) -> &Self::Word;
    /// Not zero: the producer waits for room, and wants to be woken.
    fn waits(&self) -> &Self::Word;
}

/// What a record is. The numbers are part of what both sides agree on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// A frame; the body is its whole payload.
    Whole = 1,
    /// A frame; its payload follows in pieces.
    Begun = 2,
    /// A piece of the payload of the frame before it.
    Piece = 3,
    /// A frame; the body names the memory in which its payload is.
    Named = 4,
    /// A frame; the body is the address of its payload in the producer's process.
    Placed = 5,
}

/// The first word of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Record {
    pub kind: Kind,
    pub head: usize,
    pub body: usize,
}

impl Record {
    fn encode(self) -> u64 {
        1 << 63 | (self.kind as u64) << 56 | (self.head as u64) << 32 | self.body as u64
    }

    /// `None` for what no honest producer writes.
    fn decode(word: u64) -> Option<Record> {
        let kind = match word >> 56 {
            0x81 => Kind::Whole,
            0x82 => Kind::Begun,
            0x83 => Kind::Piece,
            0x84 => Kind::Named,
            0x85 => Kind::Placed,
            _ => return None,
        };
        let (head, body) = ((word >> 32) as usize & 0xff_ffff, word as u32 as usize);
        (head <= HEAD && body <= BODY).then_some(Record { kind, head, body })
    }

    /// Bytes that it takes in the ring.
    fn size(self) -> u64 {
        (8 + self.head as u64 + self.body as u64).next_multiple_of(LINE)
    }
}

/// The peer has written what cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Corrupt(pub &'static str);

pub(super) struct Producer<S> {
    store: S,
    /// Where the next record begins.
    at: u64,
    /// What was last seen of the consumer.
    consumed: u64,
}

impl<S: Store> Producer<S> {
    pub(super) fn new(store: S) -> Self {
        Producer { store, at: 0, consumed: 0 }
    }

    /// Whether a record of any length fits.
    pub(super) fn has_room(&mut self) -> Result<bool, Corrupt> {
        if self.store.len() - (self.at - self.consumed) >= ROOM {
            return Ok(true);
        }
        self.look()?;
        Ok(self.store.len() - (self.at - self.consumed) >= ROOM)
    }

    fn look(&mut self) -> Result<(), Corrupt> {
        let consumed = self.store.consumed().load(Ordering::Acquire);
        if consumed < self.consumed || consumed > self.at {
            return Err(Corrupt("it has taken more than there was"));
        }
        self.consumed = consumed;
        Ok(())
    }

    /// How far it has come.
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    pub(super) fn store(&self) -> &S {
        &self.store
    }

    /// Writes a record, for which there is room. `fill` gets the position of the body, and writes it with the store.
    pub(super) fn push(&mut self, kind: Kind, head: &[u8], body: usize, fill: impl FnOnce(&S, u64)) {
        debug_assert!(head.len() <= HEAD && body <= BODY);
        let record = Record { kind, head: head.len(), body };
        self.store.put(self.at + 8, head);
        fill(&self.store, self.at + 8 + head.len() as u64);
        let next = self.at + record.size();
        // The consumer gets there only by way of this record.
        self.store.word(next).store(0, Ordering::Relaxed);
        self.store.word(self.at).store(record.encode(), Ordering::Release);
        self.at = next;
    }

    /// Whether the consumer sleeps, and is to be woken now that something was pushed.
    pub(super) fn must_wake(&self) -> bool {
        // Either the consumer sees the record after it has said that it sleeps, or this sees that it does.
        fence(Ordering::SeqCst);
        self.store.sleeps().load(Ordering::Relaxed) != 0 && self.store.sleeps().swap(0, Ordering::SeqCst) != 0
    }
}

pub(super) struct Consumer<S> {
    store: S,
    at: u64,
}

impl<S: Store> Consumer<S> {
    pub(super) fn new(store: S) -> Self {
        Consumer { store, at: 0 }
    }

    pub(super) fn store(&self) -> &S {
        &self.store
    }

    /// The next record, and where its head begins. It stays until it is consumed.
    pub(super) fn peek(&self) -> Result<Option<(Record, u64)>, Corrupt> {
        match self.store.word(self.at).load(Ordering::Acquire) {
            0 => Ok(None),
            word => match Record::decode(word) {
                Some(record) => Ok(Some((record, self.at + 8))),
                None => Err(Corrupt("a record in shared memory is none")),
            },
        }
    }

    /// How far it has come.
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    pub(super) fn consume(&mut self, record: Record) {
        self.at += record.size();
        self.store.consumed().store(self.at, Ordering::Release);
    }

    /// Whether the producer waits for room, and is to be woken now that something was consumed.
    pub(super) fn must_wake(&self) -> bool {
        fence(Ordering::SeqCst);
        self.store.waits().load(Ordering::Relaxed) != 0 && self.store.waits().swap(0, Ordering::SeqCst) != 0
    }
}

/// Whether a producer that has come to `produced` has room. A consumer that lies is for the producer to find out.
pub(super) fn has_room<S: Store>(store: &S, produced: u64) -> bool {
    let used = produced.wrapping_sub(store.consumed().load(Ordering::Acquire));
    store.len().checked_sub(used).is_none_or(|free| free >= ROOM)
}

/// Asks for a wake-up at the next record. `look` says whether one is there already. Answers whether to go on at once instead.
pub(super) fn sleep<W: Word>(flag: &W, look: impl FnOnce() -> bool) -> bool {
    flag.store(1, Ordering::SeqCst);
    fence(Ordering::SeqCst);
    // If the other side has taken the flag, it wakes this one.
    look() && flag.swap(0, Ordering::SeqCst) != 0
}

#[cfg(all(test, not(gpusock_loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::cell::UnsafeCell;
    use std::rc::Rc;
    use std::sync::atomic::AtomicU64;

    const LEN: u64 = 64 << 10;

    /// Plain memory, used by one thread.
    struct Plain {
        words: Vec<AtomicU64>,
        bytes: UnsafeCell<Vec<u8>>,
    }

    impl Plain {
        fn new() -> Rc<Self> {
            let words = (0..LEN / LINE + 3).map(|_| AtomicU64::new(0)).collect();
            Rc::new(Plain { words, bytes: UnsafeCell::new(vec![0; LEN as usize]) })
        }
    }

    impl Store for Rc<Plain> {
        type Word = AtomicU64;

        fn len(&self) -> u64 {
            LEN
        }

        fn word(&self, at: u64) -> &AtomicU64 {
            &self.words[(at % LEN / LINE) as usize]
        }

        fn put(&self, at: u64, bytes: &[u8]) {
            // SAFETY: one thread, and no reference outlives a call.
            let all = unsafe { &mut *self.bytes.get() };
            bytes.iter().enumerate().for_each(|(i, &b)| all[(at as usize + i) % LEN as usize] = b);
        }

        fn get(&self, at: u64, bytes: &mut [u8]) {
            // SAFETY: as above.
            let all = unsafe { &*self.bytes.get() };
            bytes.iter_mut().enumerate().for_each(|(i, b)| *b = all[(at as usize + i) % LEN as usize]);
        }

        fn consumed(&self) -> &AtomicU64 {
            &self.words[(LEN / LINE) as usize]
        }

        fn sleeps(&self) -> &AtomicU64 {
            &self.words[(LEN / LINE) as usize + 1]
        }

        fn waits(&self) -> &AtomicU64 {
            &self.words[(LEN / LINE) as usize + 2]
        }
    }

    proptest! {
        /// Records of any length come out as they went in, round and round.
        #[test]
        fn records_survive(sizes in proptest::collection::vec((0..=HEAD, 0..=BODY), 1..60), pause in 1usize..5) {
            let memory = Plain::new();
            let (mut producer, mut consumer) = (Producer::new(Rc::clone(&memory)), Consumer::new(memory));
            let mut sent = std::collections::VecDeque::new();
            for (i, (head, body)) in sizes.into_iter().enumerate() {
                while !producer.has_room().unwrap() || sent.len() > pause {
                    let (record, at) = consumer.peek().unwrap().unwrap();
                    let (h, b): (Vec<u8>, Vec<u8>) = sent.pop_front().unwrap();
                    prop_assert_eq!((record.head, record.body), (h.len(), b.len()));
                    let (mut head, mut body) = (vec![0; record.head], vec![0; record.body]);
                    consumer.store().get(at, &mut head);
                    consumer.store().get(at + record.head as u64, &mut body);
                    prop_assert!(head == h && body == b);
                    consumer.consume(record);
                }
                let (head, body) = (vec![i as u8; head], vec![!(i as u8); body]);
                producer.push(Kind::Whole, &head, body.len(), |store, at| store.put(at, &body));
                sent.push_back((head, body));
            }
        }

        /// No word makes a record that is longer than the room for one.
        #[test]
        fn no_word_makes_a_record_too_long(word: u64) {
            if let Some(record) = Record::decode(word | 1 << 63) {
                prop_assert!(record.size() + LINE <= ROOM);
            }
        }
    }

    #[test]
    fn a_consumer_that_lies_is_found_out() {
        let memory = Plain::new();
        let mut producer = Producer::new(Rc::clone(&memory));
        while producer.has_room().unwrap() {
            producer.push(Kind::Whole, &[1; 8], 0, |_, _| {});
        }
        for lie in [producer.at + 1, u64::MAX] {
            memory.consumed().store(lie, Ordering::Release);
            assert!(producer.has_room().is_err());
        }
        memory.consumed().store(producer.at, Ordering::Release);
        assert_eq!(producer.has_room(), Ok(true));
        memory.consumed().store(0, Ordering::Release);
        producer.consumed = LINE;
        assert!(producer.look().is_err(), "it went back");
    }
}

#[cfg(all(test, gpusock_loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicBool, AtomicU64};

    impl Word for AtomicU64 {
        fn load(&self, order: Ordering) -> u64 {
            self.load(order)
        }

        fn store(&self, value: u64, order: Ordering) {
            self.store(value, order);
        }

        fn swap(&self, value: u64, order: Ordering) -> u64 {
            self.swap(value, order)
        }
    }

    /// Room for one long record and a few short ones; loom watches who touches which line when.
    const LEN: u64 = 32 << 10;

    struct Watched {
        first: AtomicU64,
        second: AtomicU64,
        others: AtomicU64,
        lines: [UnsafeCell<[u8; 8]>; 2],
        consumed: AtomicU64,
        sleeps: AtomicU64,
        waits: AtomicU64,
    }

    impl Watched {
        fn new() -> Arc<Self> {
            let zero = || AtomicU64::new(0);
            let lines = [UnsafeCell::new([0; 8]), UnsafeCell::new([0; 8])];
            Arc::new(Watched {
                first: zero(),
                second: zero(),
                others: zero(),
                lines,
                consumed: zero(),
                sleeps: zero(),
                waits: zero(),
            })
        }
    }

    impl Store for Arc<Watched> {
        type Word = AtomicU64;

        fn len(&self) -> u64 {
            LEN
        }

        fn word(&self, at: u64) -> &AtomicU64 {
            match at / LINE {
                0 => &self.first,
                1 => &self.second,
                _ => &self.others,
            }
        }

        fn put(&self, at: u64, bytes: &[u8]) {
            // SAFETY: loom checks that nobody else is at it.
            self.lines[(at / LINE) as usize].with_mut(|line| unsafe { (&mut *line)[..bytes.len()].copy_from_slice(bytes) });
        }

        fn get(&self, at: u64, bytes: &mut [u8]) {
            // SAFETY: as above.
            self.lines[(at / LINE) as usize].with(|line| unsafe { bytes.copy_from_slice(&(&*line)[..bytes.len()]) });
        }

        fn consumed(&self) -> &AtomicU64 {
            &self.consumed
        }

        fn sleeps(&self) -> &AtomicU64 {
            &self.sleeps
        }

        fn waits(&self) -> &AtomicU64 {
            &self.waits
        }
    }

    /// What the consumer sees of a record is what the producer wrote, and nothing is touched by both at once.
    #[test]
    fn a_record_is_whole() {
        loom::model(|| {
            let memory = Watched::new();
            let theirs = Arc::clone(&memory);
            let thread = loom::thread::spawn(move || {
                let mut producer = Producer::new(theirs);
                for n in 1..=2u8 {
                    producer.push(Kind::Whole, &[n; 8], 0, |_, _| {});
                }
            });
            let mut consumer = Consumer::new(memory);
            for n in 1..=2u8 {
                while let None = consumer.peek().unwrap() {
                    loom::thread::yield_now();
                }
                let (record, at) = consumer.peek().unwrap().unwrap();
                let mut head = [0; 8];
                consumer.store().get(at, &mut head);
                assert_eq!((record.head, head), (8, [n; 8]));
                consumer.consume(record);
            }
            thread.join().unwrap();
        });
    }

    /// A consumer that goes to sleep while a record comes either sees it, or is woken.
    #[test]
    fn no_wake_up_is_lost() {
        loom::model(|| {
            let memory = Watched::new();
            let bell = Arc::new(AtomicBool::new(false));
            let (theirs, ring) = (Arc::clone(&memory), Arc::clone(&bell));
            let thread = loom::thread::spawn(move || {
                let mut producer = Producer::new(theirs);
                producer.push(Kind::Whole, &[1; 8], 0, |_, _| {});
                if producer.must_wake() {
                    ring.store(true, Ordering::Release);
                }
            });
            let consumer = Consumer::new(Arc::clone(&memory));
            let at_once = sleep(memory.sleeps(), || consumer.peek().unwrap().is_some());
            thread.join().unwrap();
            let woken = bell.load(Ordering::Acquire);
            assert!(at_once || woken, "it sleeps for good");
            assert!(consumer.peek().unwrap().is_some());
        });
    }
}
