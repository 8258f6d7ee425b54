//! A peer that lies, and one that is honest, without a handshake.

use std::os::fd::AsFd;
use std::sync::Arc;

use proptest::prelude::*;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::memory::{Direction, SIZE, Shared};
use super::ring::{Kind, Producer, Store};
use super::{Link, ShmReceiver, ShmSender, socket};
use crate::error::{Error, Result};
use crate::memory::{Chunk, HostRegion, Region};
use crate::proto::{Sent, Token};
use crate::transport::{Arrival, Dest, ReadMark, Received, Receiver, Sender, Sink};
use crate::wire::frame::{Frame, Head};

/// Both ends of a connection.
fn links() -> (Arc<Link>, Arc<Link>) {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let (a, b) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let (shared, file) = Shared::create().unwrap();
    let other = Shared::of_peer(file.as_fd()).unwrap();
    let process = Some(rustix::process::getpid());
    shared.try_reading(1, process).unwrap();
    other.try_reading(0, process).unwrap();
    (Link::new(shared, a, 0, process), Link::new(other, b, 1, process))
}

/// Takes every payload into memory of its own, as long as that goes.
#[derive(Default)]
struct Taker {
    landed: Vec<Vec<u8>>,
    buffered: bool,
}

impl Sink for Taker {
    fn resume(&mut self) {}

    fn pause(&mut self) {}

    fn frame(&mut self, head: &[u8], payload: u32, _direct: bool) -> Result<(Dest, Arrival)> {
        Frame::decode(head).map_err(|e| super::violation(&e))?;
        let arrival = Arrival { token: Token::None, op: None, onward: None };
        if payload == 0 || payload > 1 << 20 {
            return Ok((Dest::Discard, arrival));
        }
        if self.buffered {
            self.landed.push(vec![0; payload as usize]);
            return Ok((Dest::Sink, arrival));
        }
        Ok((Dest::Memory(chunk(payload.into())), arrival))
    }

    fn place(&mut self, _arrival: &Arrival) -> Result<Dest> {
        Ok(Dest::Discard)
    }

    fn carry(&mut self, _from: Chunk, _to: Chunk, _arrival: Arrival, _read: Option<ReadMark>) -> Result<()> {
        unreachable!("no memory of a device")
    }

    fn put(&mut self, _token: &Token, at: usize, bytes: &[u8]) {
        let last = self.landed.last_mut().unwrap();
        last[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn wants(&mut self, _token: &Token) -> bool {
        true
    }

    fn landed(&mut self, dest: Dest, _arrival: Arrival) -> Result<()> {
        if let Dest::Memory(chunk) = dest {
            let mut bytes = vec![0; chunk.len() as usize];
            chunk.read_into(0, &mut bytes)?;
            self.landed.push(bytes);
        }
        Ok(())
    }
}

fn chunk(len: u64) -> Chunk {
    Chunk::whole(Arc::new(Region::Host(HostRegion::alloc(len).unwrap())))
}

fn filled(len: u64) -> (Chunk, Vec<u8>) {
    let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + i / 251) as u8).collect();
    let chunk = chunk(len);
    chunk.write_from(0, &bytes).unwrap();
    (chunk, bytes)
}

fn head(payload: u32) -> Head {
    Frame::Data { flags: 0, msg: 1, offset: 0 }.encode(payload)
}

fn is_violation<T: std::fmt::Debug>(result: Result<T>) -> bool {
    matches!(&result, Err(Error::PeerLost { reason, .. }) if reason.contains("broke the protocol"))
}

/// Payloads of every way come whole, in order; and the memory of the sender comes back.
#[test]
fn payloads_come_whole() {
    let (a, b) = links();
    let (mut sender, mut receiver) = (ShmSender::new(&a), ShmReceiver::new(&b));
    let mut sink = Taker::default();
    let mut expected = Vec::new();
    // In the record, in pieces, by address (the heap), and in place (memory files, from 256 KiB on).
    for (i, len) in [1, 8, 64, 16 << 10, (16 << 10) + 1, 100_000, 300_000, 1 << 20, 3].into_iter().enumerate() {
        let (payload, bytes) = filled(len);
        let part = payload.sub(len / 3, len - len / 3).unwrap();
        let copied = i % 2 == 0;
        let sent = if copied { Sent::Eager { op: crate::proto::OpId(7), len: 0 } } else { Sent::Data { msg: 1 } };
        assert!(sender.has_room());
        sender.push(head(part.len() as u32).as_bytes(), Some(part), sent);
        expected.push(bytes[(len / 3) as usize..].to_vec());
        let mut done = Vec::new();
        while done.is_empty() {
            sender.flush(&mut done).unwrap();
            receiver.poll(&mut sink, usize::MAX).unwrap();
        }
        assert_eq!(done, [sent]);
        assert!(sender.is_idle());
    }
    assert!(sink.landed == expected);
    // Nothing else came.
    assert_eq!(receiver.poll(&mut sink, usize::MAX).unwrap(), Received::Idle { any: false });
}

#[test]
fn freed_memory_is_unmapped_by_the_peer() {
    let (a, b) = links();
    let (mut sender, mut receiver) = (ShmSender::new(&a), ShmReceiver::new(&b));
    let mut sink = Taker::default();
    for _ in 0..10 {
        let (payload, _) = filled(1 << 20);
        sender.push(head(1 << 20).as_bytes(), Some(payload), Sent::Data { msg: 1 });
        let mut done = Vec::new();
        while done.is_empty() {
            sender.flush(&mut done).unwrap();
            receiver.poll(&mut sink, usize::MAX).unwrap();
        }
        // The payload was the last that used the memory.
        b.drain().unwrap();
        assert_eq!(b.imported(), 0);
    }
}

/// What names memory that was never handed over, or is shorter, is never read.
#[test]
fn memory_that_is_not_there_is_not_read() {
    let (a, b) = links();
    let (payload, _) = filled(300_000);
    let name = a.name(&payload).unwrap();
    for (name, offset, good) in
        [(name, 0, true), (name, 44_000, true), (name, 44_001, false), (name, u64::MAX, false), (name + 1, 0, false)]
    {
        let mut producer = Producer::new(a.outgoing());
        let mut receiver = ShmReceiver::new(&b);
        let place = [name, offset].map(u64::to_le_bytes).concat();
        producer.push(Kind::Named, head(256_000).as_bytes(), place.len(), |ring, at| ring.put(at, &place));
        let result = receiver.poll(&mut Taker::default(), usize::MAX);
        assert!(if good { result.is_ok() } else { is_violation(result) }, "{name} {offset}");
    }
}

#[test]
fn files_that_can_shrink_are_refused() {
    let (a, b) = links();
    let file = |seals, len| {
        let file = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&file, len).unwrap();
        rustix::fs::fcntl_add_seals(&file, seals).unwrap();
        file
    };
    let good = file(SealFlags::SHRINK, 1 << 20);
    for (name, len, file, well) in [
        (1, 1 << 20, &good, true),
        (1, 1 << 20, &good, false),
        (2, (1 << 20) + 1, &good, false),
        (3, 0, &good, false),
        (4, u64::MAX, &good, false),
        (5, 4096, &file(SealFlags::GROW, 1 << 20), false),
    ] {
        socket::export(a.as_fd(), name, len, file.as_fd()).unwrap();
        let result = b.drain();
        assert!(if well { result.is_ok() } else { is_violation(result) }, "{name} {len}");
    }
    // The rings themselves.
    assert!(Shared::of_peer(file(SealFlags::GROW, SIZE as u64).as_fd()).is_err());
    assert!(Shared::of_peer(file(SealFlags::SHRINK, SIZE as u64 - 1).as_fd()).is_err());
    assert!(Shared::of_peer(file(SealFlags::SHRINK, SIZE as u64).as_fd()).is_ok());
    // Packets that are none.
    for bytes in [&[1; 3][..], &[0; 8], &[9; 24], &[2; 64]] {
        socket::send(a.as_fd(), bytes, None).unwrap();
        assert!(is_violation(b.drain()), "{bytes:?}");
    }
    // The end, for both.
    drop(a);
    assert_eq!(b.drain().unwrap(), None);
}

fn write_all(ring: &Direction, bytes: &[u8]) {
    for (i, part) in bytes.chunks(1 << 10).enumerate() {
        ring.put((i << 10) as u64, part);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever is in the ring, the receiver ends, with an error or with nothing more.
    #[test]
    fn a_ring_full_of_anything_is_survived(
        seed: u64,
        words in proptest::collection::vec((0u64..2048, prop_oneof![
            any::<u64>(),
            (1u64..7, 0u64..100, 0u64..20_000).prop_map(|(kind, head, body)| 1 << 63 | kind << 56 | head << 32 | body),
        ]), 0..200),
        heads in proptest::collection::vec((0u64..2048, 0u8..16, any::<u16>()), 0..200),
        buffered: bool,
    ) {
        let (a, b) = links();
        let ring = a.outgoing();
        let mut bytes = vec![0u8; ring.len() as usize];
        let mut x = seed | 1;
        for chunk in bytes.chunks_mut(8) {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            chunk.copy_from_slice(&x.to_le_bytes());
        }
        for (line, word) in words {
            let at = (line * 64) as usize;
            bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
        for (line, kind, payload) in heads {
            let at = (line * 64) as usize + 8;
            bytes[at..at + 8].copy_from_slice(&[kind, 0, 32, 0, payload as u8, (payload >> 8) as u8, 0, 0]);
        }
        write_all(&ring, &bytes);
        let mut receiver = ShmReceiver::new(&b);
        let mut sink = Taker { buffered, ..Taker::default() };
        // Each record is at least a line long, and none is consumed twice without new ones: it ends within one round or fails.
        for _ in 0..3 {
            match receiver.poll(&mut sink, 1 << 20) {
                Ok(Received::Idle { .. }) | Err(_) => break,
                Ok(_) => {}
            }
        }
        receiver.shut();
    }

    /// Whatever the peer says of what it has consumed and released, the sender ends, with an error or with a full ring.
    #[test]
    fn a_consumer_that_lies_is_survived(consumed: u64, released: u64, pushes in 1usize..40) {
        let (a, _b) = links();
        let mut sender = ShmSender::new(&a);
        let ring = a.outgoing();
        let (payload, _) = filled(300_000);
        let mut done = Vec::new();
        for i in 0..pushes {
            if !sender.has_room() {
                break;
            }
            sender.push(head(300_000).as_bytes(), Some(payload.clone()), Sent::Data { msg: i as u64 });
            ring.consumed().store(consumed, std::sync::atomic::Ordering::SeqCst);
            ring.released().store(released, std::sync::atomic::Ordering::SeqCst);
            if sender.flush(&mut done).is_err() {
                break;
            }
        }
        prop_assert!(done.len() <= pushes);
        sender.shut();
    }
}
