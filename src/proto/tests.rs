//! Two connections in memory: a deterministic simulator, and properties over random interleavings.
//!
//! Each side has memory for its operations and exposures. Frames wait in lanes, which deliver independently of each other, header and
//! payload in separate steps. Touching memory of an operation that has ended fails the test, as does any unexpected event.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::initiator::{Parts, RemoteRange, Work};
use super::target::Rights;
use super::*;
use crate::wire::frame::{Frame, Prelude};

const LANES: usize = 2;
const EAGER: u32 = 64;
const SEGMENT: u32 = 128;
const EXPOSED: usize = 1024;

fn limits() -> Limits {
    Limits {
        eager_max: EAGER,
        segment: SEGMENT,
        frame_max: EAGER.max(SEGMENT),
        credit_out: 1024,
        credit_in: 1024,
        heartbeat: Duration::from_secs(1),
        liveness: Duration::from_secs(3),
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum What {
    Send,
    Recv,
    Claim,
    Write,
    Read { from: usize },
    Atomic,
    Note,
    Flush,
}

struct SimOp {
    what: What,
    memory: Vec<u8>,
    detached: bool,
}

type Packet = (Vec<u8>, Vec<u8>);

enum Deferred {
    Landing(Landing, Vec<u8>),
    Copy { from: Option<OpId>, to: OpId, bytes: Vec<u8> },
}

struct Side {
    proto: Connection,
    ops: HashMap<u64, SimOp>,
    next_op: u64,
    exposed: Vec<u8>,
    lanes: [VecDeque<Packet>; LANES],
    landing: [Option<(Landing, Vec<u8>)>; LANES],
    /// Payloads that a device takes its time to put in place, and copies of messages.
    deferred: Vec<Deferred>,
    /// Messages received, as the numbers in their first bytes.
    got: Vec<u64>,
    sent: u64,
    results: BTreeMap<u64, Result<Outcome, Error>>,
    claimed: Vec<Outcome>,
    notes: u64,
}

impl Side {
    fn new() -> Self {
        let mut proto = Connection::new(limits(), Instant::now());
        let all = Rights { read: true, write: true, atomic: true };
        assert_eq!(proto.expose(EXPOSED as u64, all, 7, limits().segment), (0, 0));
        Side {
            proto,
            ops: HashMap::new(),
            next_op: 0,
            exposed: vec![0; EXPOSED],
            lanes: Default::default(),
            landing: Default::default(),
            deferred: Vec::new(),
            got: Vec::new(),
            sent: 0,
            results: BTreeMap::new(),
            claimed: Vec::new(),
            notes: 0,
        }
    }

    fn op(&mut self, what: What, memory: Vec<u8>) -> OpId {
        self.next_op += 1;
        self.ops.insert(self.next_op, SimOp { what, memory, detached: false });
        OpId(self.next_op)
    }

    fn send(&mut self, len: usize) -> OpId {
        self.sent += 1;
        let number = self.sent;
        let mut memory: Vec<u8> = (0..len.max(8)).map(|i| (i as u64 * 31 + number) as u8).collect();
        memory[..8].copy_from_slice(&number.to_le_bytes());
        let len = memory.len() as u64;
        let op = self.op(What::Send, memory);
        self.proto.send(op, number % 3, len, limits().shape());
        op
    }

    fn recv(&mut self, capacity: usize, tag: Option<u64>) -> OpId {
        let op = self.op(What::Recv, vec![0xee; capacity]);
        self.proto.recv(op, tag, capacity as u64);
        op
    }

    fn write(&mut self, at: usize, len: usize, fill: u8, notify: Option<u64>) -> OpId {
        let op = self.op(What::Write, vec![fill; len]);
        let remote = RemoteRange { exposure: 0, token: 7, offset: at as u64, len: len as u64 };
        self.proto.start(op, Work::Write { parts: Parts::One(remote), notify }, limits().segment);
        op
    }

    fn read(&mut self, at: usize, len: usize) -> OpId {
        let op = self.op(What::Read { from: at }, vec![0xee; len]);
        let remote = RemoteRange { exposure: 0, token: 7, offset: at as u64, len: len as u64 };
        self.proto.start(op, Work::Read { remote }, limits().segment);
        op
    }

    fn memory(&mut self, place: Place, len: usize) -> Option<&mut [u8]> {
        match place {
            Place::Op { op, part, offset } => {
                assert_eq!(part, 0);
                let op = self.ops.get_mut(&op.0).expect("memory of an operation that is over");
                Some(&mut op.memory[offset as usize..][..len])
            }
            Place::Exposed { exposure, offset } => {
                assert_eq!(exposure, 0);
                Some(&mut self.exposed[offset as usize..][..len])
            }
            Place::Buffer(buf) => Some(&mut self.proto.buffer_mut(buf)[..len]),
            Place::Discard => None,
        }
    }

    /// Transmits one frame on a lane. The engine lets go of it at once.
    fn transmit(&mut self, lane: usize, peer: &mut Side) -> bool {
        let expected = self.proto.has_output();
        let Some(transmit) = self.proto.poll_transmit(lane) else { return false };
        assert!(expected, "output that was not announced");
        let payload = match transmit.payload {
            Some((place, len)) => self.memory(place, len as usize).expect("a payload has memory").to_vec(),
            None => Vec::new(),
        };
        peer.lanes[lane].push_back((transmit.head.as_bytes().to_vec(), payload));
        self.proto.sent(transmit.sent);
        self.settle();
        true
    }

    /// One step of delivery on a lane: a header, or the payload that it announced.
    fn deliver(&mut self, lane: usize) -> bool {
        if let Some((landing, payload)) = self.landing[lane].take() {
            self.land(landing, &payload);
        } else if let Some((head, payload)) = self.lanes[lane].pop_front() {
            let prelude = Prelude::parse(&head).expect("a prelude");
            assert_eq!((prelude.head_len(), prelude.payload_len()), (head.len(), payload.len()));
            let frame = Frame::decode(&head).expect("a frame");
            let landing = self.proto.on_frame(&frame, payload.len() as u32).expect("no violation");
            self.landing[lane] = Some((landing, payload));
        } else {
            return false;
        }
        self.settle();
        true
    }

    fn land(&mut self, landing: Landing, payload: &[u8]) {
        if self.proto.wants(&landing.token) {
            if let Some(memory) = self.memory(landing.place, payload.len()) {
                memory.copy_from_slice(payload);
            }
        }
        self.proto.landed(landing.token).expect("no violation");
    }

    /// What has come on a lane is left to a device; the lane goes on.
    fn defer(&mut self, lane: usize) {
        let of_memory = |landing: &Landing| matches!(landing.place, Place::Op { .. } | Place::Exposed { .. });
        if self.landing[lane].as_ref().is_some_and(|(landing, _)| of_memory(landing)) {
            let landing = self.landing[lane].take();
            self.deferred.extend(landing.map(|(landing, payload)| Deferred::Landing(landing, payload)));
        }
    }

    /// A device gets something done.
    fn device(&mut self, pick: usize) -> bool {
        if self.deferred.is_empty() {
            return false;
        }
        match self.deferred.swap_remove(pick % self.deferred.len()) {
            Deferred::Landing(landing, payload) => self.land(landing, &payload),
            Deferred::Copy { from, to, bytes } => {
                if let Some(from) = from {
                    assert!(self.ops.remove(&from.0).expect("a dropped receive").detached);
                }
                self.ops.get_mut(&to.0).expect("a receive").memory[..bytes.len()].copy_from_slice(&bytes);
                self.proto.copied(to, Ok(()));
            }
        }
        self.settle();
        true
    }

    fn settle(&mut self) {
        while let Some(event) = self.proto.poll_event() {
            match event {
                Event::Done { op, result } => self.done(op, result),
                Event::CopyBuffer { op, buf, bytes } => {
                    let bytes = self.proto.detach_buffer(buf)[..bytes as usize].to_vec();
                    self.deferred.push(Deferred::Copy { from: None, to: op, bytes });
                }
                Event::CopyOp { from, to, bytes } => {
                    let bytes = self.ops[&from.0].memory[..bytes as usize].to_vec();
                    self.deferred.push(Deferred::Copy { from: Some(from), to, bytes });
                }
                Event::Forget { op } => assert!(self.ops.remove(&op.0).expect("a dropped receive").detached),
                Event::Atomic { seq, offset, swap, operand, compare, .. } => {
                    let word = &mut self.exposed[offset as usize..][..8];
                    let old = u64::from_le_bytes(word.try_into().unwrap());
                    let new = match swap {
                        true if old != compare => old,
                        true => operand,
                        false => old.wrapping_add(operand),
                    };
                    word.copy_from_slice(&new.to_le_bytes());
                    self.proto.atomic_done(seq, Ok(old)).expect("no violation");
                }
                Event::PeerClosed => {}
            }
        }
    }

    fn done(&mut self, op: OpId, result: Result<Outcome, Error>) {
        let sim = self.ops.get(&op.0).expect("an operation ends once");
        if let (What::Recv, Ok(outcome), false) = (&sim.what, &result, sim.detached) {
            self.got.push(check_message(&sim.memory, outcome));
        }
        if let (What::Claim, Ok(outcome)) = (&sim.what, &result) {
            self.claimed.push(*outcome);
        }
        if let (What::Note, Ok(outcome)) = (&sim.what, &result) {
            self.notes += outcome.value;
        }
        self.ops.remove(&op.0);
        self.results.insert(op.0, result);
    }

    /// The future of a receive is dropped.
    fn drop_recv(&mut self, op: u64) {
        if self.ops.get(&op).is_some_and(|o| o.what == What::Recv && !o.detached) {
            match self.proto.detach(OpId(op)) {
                Detached::Released => drop(self.ops.remove(&op)),
                Detached::Held => self.ops.get_mut(&op).unwrap().detached = true,
            }
            self.settle();
        }
    }
}

/// The number of a message, whose bytes must all be right, and what lies behind it unchanged.
fn check_message(memory: &[u8], outcome: &Outcome) -> u64 {
    let number = u64::from_le_bytes(memory[..8].try_into().unwrap());
    assert_eq!(outcome.tag, number % 3);
    let len = outcome.bytes as usize;
    assert!(memory[8..len].iter().enumerate().all(|(i, &b)| b == ((i as u64 + 8) * 31 + number) as u8), "message {number}");
    assert!(memory[len..].iter().all(|&b| b == 0xee), "bytes behind message {number}");
    number
}

struct Sim {
    sides: [Side; 2],
}

impl Sim {
    fn new() -> Self {
        Sim { sides: [Side::new(), Side::new()] }
    }

    fn both(&mut self, from: usize) -> (&mut Side, &mut Side) {
        let [a, b] = &mut self.sides;
        if from == 0 { (a, b) } else { (b, a) }
    }

    fn transmit(&mut self, from: usize, lane: usize) -> bool {
        let (from, to) = self.both(from);
        from.transmit(lane, to)
    }

    /// Until nothing moves any more.
    fn run(&mut self) {
        let mut moved = true;
        while moved {
            moved = false;
            for side in 0..2 {
                for lane in 0..LANES {
                    moved |= self.transmit(side, lane);
                    moved |= self.sides[side].deliver(lane);
                }
                while self.sides[side].device(0) {
                    moved = true;
                }
            }
        }
    }
}

/// A step of a random run.
#[derive(Debug, Clone, Copy)]
enum Act {
    Send { len: usize },
    Recv { capacity: usize, tag: Option<u64> },
    DropRecv { pick: usize },
    CancelAny { pick: usize },
    Claim,
    TakeClaimed,
    Unclaim,
    Write { at: usize, len: usize },
    Read { at: usize, len: usize },
    Add { at: usize },
    Flush,
    Transmit { lane: usize },
    Deliver { lane: usize },
    Defer { lane: usize },
    Device { pick: usize },
}

fn acts() -> impl Strategy<Value = Vec<(usize, Act)>> {
    let len = prop_oneof![8usize..20, 60usize..70, 100usize..600];
    let act = prop_oneof![
        3 => len.clone().prop_map(|len| Act::Send { len }),
        3 => (len, proptest::option::weighted(0.2, 0u64..3)).prop_map(|(capacity, tag)| Act::Recv { capacity, tag }),
        2 => any::<usize>().prop_map(|pick| Act::DropRecv { pick }),
        1 => any::<usize>().prop_map(|pick| Act::CancelAny { pick }),
        1 => Just(Act::Claim),
        1 => Just(Act::TakeClaimed),
        1 => Just(Act::Unclaim),
        2 => (0usize..512, 0usize..512).prop_map(|(at, len)| Act::Write { at, len }),
        1 => (0usize..512, 0usize..512).prop_map(|(at, len)| Act::Read { at, len }),
        1 => (0usize..64).prop_map(|at| Act::Add { at: at * 8 }),
        1 => Just(Act::Flush),
        10 => (0..LANES).prop_map(|lane| Act::Transmit { lane }),
        20 => (0..LANES).prop_map(|lane| Act::Deliver { lane }),
        3 => (0..LANES).prop_map(|lane| Act::Defer { lane }),
        6 => any::<usize>().prop_map(|pick| Act::Device { pick }),
    ];
    proptest::collection::vec((0usize..2, act), 0..120)
}

impl Sim {
    fn act(&mut self, who: usize, act: Act) {
        if let Act::Transmit { lane } = act {
            self.transmit(who, lane);
            return;
        }
        let side = &mut self.sides[who];
        match act {
            Act::Send { len } => drop(side.send(len)),
            Act::Recv { capacity, tag } => drop(side.recv(capacity, tag)),
            Act::DropRecv { pick } => {
                let mut ops: Vec<_> = side.ops.keys().copied().collect();
                ops.sort_unstable();
                if !ops.is_empty() {
                    side.drop_recv(ops[pick % ops.len()]);
                }
            }
            Act::CancelAny { pick } => {
                // Cancelled messages would be missing from the order that is checked, so only one-sided operations are.
                let one_sided = |o: &SimOp| matches!(o.what, What::Write | What::Read { .. });
                let mut ops: Vec<_> = side.ops.iter().filter(|(_, o)| one_sided(o)).map(|(&id, _)| id).collect();
                ops.sort_unstable();
                if !ops.is_empty() {
                    side.proto.cancel(OpId(ops[pick % ops.len()]));
                }
            }
            Act::Claim => {
                let op = side.op(What::Claim, Vec::new());
                side.proto.claim(op);
            }
            Act::TakeClaimed => {
                if let Some(outcome) = side.claimed.pop() {
                    let op = side.op(What::Recv, vec![0xee; outcome.bytes as usize]);
                    side.proto.take_claimed(op, outcome.seq, outcome.bytes);
                }
            }
            Act::Unclaim => {
                if let Some(outcome) = side.claimed.pop() {
                    side.proto.unclaim(outcome.seq);
                }
            }
            Act::Write { at, len } => drop(side.write(at, len, len as u8, Some(1))),
            Act::Read { at, len } => drop(side.read(at, len)),
            Act::Add { at } => {
                let op = side.op(What::Atomic, Vec::new());
                let remote = RemoteRange { exposure: 0, token: 7, offset: at as u64, len: 8 };
                side.proto.start(op, Work::Atomic { remote, swap: false, operand: 1, compare: 0 }, limits().segment);
            }
            Act::Flush => {
                let op = side.op(What::Flush, Vec::new());
                side.proto.flush(op);
            }
            Act::Deliver { lane } => drop(side.deliver(lane)),
            Act::Defer { lane } => side.defer(lane),
            Act::Device { pick } => drop(side.device(pick)),
            Act::Transmit { .. } => {}
        }
        side.settle();
    }

    /// Receives everything that is left, and checks that nothing was lost, doubled or leaked.
    fn finish(&mut self) {
        self.run();
        for side in &mut self.sides {
            while let Some(outcome) = side.claimed.pop() {
                side.proto.unclaim(outcome.seq);
                side.settle();
            }
        }
        self.run();
        for who in 0..2 {
            // Receives that still wait for a certain tag or a small message would take messages at random: drop them.
            let waiting: Vec<_> = self.sides[who].ops.iter().filter(|(_, o)| o.what == What::Recv).map(|(&id, _)| id).collect();
            for op in waiting {
                self.sides[who].drop_recv(op);
            }
            let claims: Vec<_> = self.sides[who].ops.iter().filter(|(_, o)| o.what == What::Claim).map(|(&id, _)| id).collect();
            for op in claims {
                self.sides[who].proto.detach(OpId(op));
                self.sides[who].ops.remove(&op);
            }
            let sent = self.sides[1 - who].sent;
            while (self.sides[who].got.len() as u64) < sent {
                let before = self.sides[who].got.len();
                self.sides[who].recv(1024, None);
                self.sides[who].settle();
                self.run();
                assert_eq!(self.sides[who].got.len(), before + 1, "a message was lost");
            }
        }
        for who in 0..2 {
            let side = &mut self.sides[who];
            side.got.sort_unstable();
            let left: Vec<_> = side.ops.iter().map(|(id, op)| (id, &op.what)).collect();
            assert!(left.is_empty(), "operations never ended: {left:?}");
            assert_eq!(side.proto.buffers_in_use(), 0, "buffers leaked");
            assert!(side.proto.is_drained());
        }
        for who in 0..2 {
            let sent = self.sides[1 - who].sent;
            assert_eq!(self.sides[who].got, (1..=sent).collect::<Vec<_>>(), "each message once");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    /// Whatever the interleaving, every message is received once and whole, every operation ends, nothing leaks.
    #[test]
    fn nothing_is_lost(acts in acts()) {
        let mut sim = Sim::new();
        for (who, act) in acts {
            sim.act(who, act);
        }
        sim.finish();
    }

    /// The peer is lost after any step: every operation ends, and none twice.
    #[test]
    fn loss_at_any_step_ends_everything(acts in acts(), at in 0usize..120) {
        let mut sim = Sim::new();
        for (who, act) in acts.into_iter().take(at) {
            sim.act(who, act);
        }
        let error = Error::PeerLost { peer: "x".into(), reason: "test".into() };
        for side in &mut sim.sides {
            side.proto.fail(&error);
            side.deferred.retain(|deferred| matches!(deferred, Deferred::Copy { .. }));
            side.settle();
            // Messages that had arrived can still be received; then there are no more.
            let claimed = std::mem::take(&mut side.claimed);
            for outcome in claimed {
                side.proto.unclaim(outcome.seq);
            }
            loop {
                let op = side.recv(1024, None);
                side.settle();
                while side.device(0) {}
                match &side.results[&op.0] {
                    Ok(_) => {}
                    Err(e) => {
                        let lost = matches!(e, Error::PeerLost { .. });
                        prop_assert!(lost);
                        break;
                    }
                }
            }
            prop_assert!(side.ops.is_empty(), "operations never ended");
            // One that was being filled goes with the connection.
            let filling = |l: &Option<(Landing, _)>| matches!(l, Some((Landing { place: Place::Buffer(_), .. }, _)));
            prop_assert_eq!(side.proto.buffers_in_use(), side.landing.iter().filter(|l| filling(l)).count());
        }
    }

    /// Without dropped receives and tags, messages come in the order in which they were sent.
    #[test]
    fn messages_keep_their_order(lens in proptest::collection::vec(8usize..400, 1..40), deliveries in proptest::collection::vec((0..2usize, 0..LANES), 0..200)) {
        let mut sim = Sim::new();
        for &len in &lens {
            sim.sides[0].send(len);
            sim.sides[1].recv(400, None);
        }
        for (who, lane) in deliveries {
            sim.transmit(who, lane);
            sim.sides[who].deliver(lane);
        }
        sim.run();
        // Rendezvous messages end when their bytes have come; what must be in order is the matching, so compare by receive.
        prop_assert_eq!(sim.sides[1].got.len(), lens.len());
        let mut by_receive: Vec<_> = sim.sides[1].results.iter().map(|(op, r)| (*op, r.as_ref().unwrap().seq)).collect();
        by_receive.sort_unstable();
        prop_assert!(by_receive.windows(2).all(|w| w[0].1 < w[1].1));
    }
}

#[test]
fn a_write_is_visible_before_its_notification_and_later_messages_on_any_lane() {
    let mut sim = Sim::new();
    sim.sides[0].write(0, 1000, 9, Some(17));
    sim.sides[0].send(8);
    let note = sim.sides[1].op(What::Note, Vec::new());
    sim.sides[1].proto.wait_note(note, 17, 1);
    sim.sides[1].recv(8, None);
    // Everything leaves, striped over both lanes; lane 0 arrives first.
    while sim.transmit(0, 1) | sim.transmit(0, 0) {}
    assert!(!sim.sides[1].lanes[1].is_empty(), "the write is striped");
    while sim.sides[1].deliver(0) {}
    assert_eq!((sim.sides[1].notes, sim.sides[1].got.len()), (0, 0), "the last bytes are still on lane 1");
    while sim.sides[1].deliver(1) | sim.sides[1].device(0) {}
    assert_eq!((sim.sides[1].notes, sim.sides[1].got.len()), (1, 1));
    assert!(sim.sides[1].exposed[..1000].iter().all(|&b| b == 9));
    sim.run();
    assert!(sim.sides[0].ops.is_empty());
}

#[test]
fn a_revoked_exposure_refuses_what_is_under_way() {
    let mut sim = Sim::new();
    let op = sim.sides[0].write(0, 1000, 9, Some(1));
    sim.transmit(0, 0);
    sim.sides[1].deliver(0);
    sim.sides[1].proto.revoke(0);
    sim.run();
    assert!(matches!(sim.sides[0].results[&op.0], Err(Error::AccessDenied { .. })), "{:?}", sim.sides[0].results);
    assert!(sim.sides[1].exposed.iter().all(|&b| b == 0), "nothing landed after the revocation");
}

#[test]
fn wrong_tokens_ranges_and_rights_move_nothing() {
    let mut sim = Sim::new();
    sim.sides[1].proto.revoke(0);
    let read_only = Rights { read: true, write: false, atomic: false };
    let (index, name) = sim.sides[1].proto.expose(100, read_only, 42, limits().segment);
    assert_eq!(index, 0);
    let cases = [
        (RemoteRange { exposure: name, token: 41, offset: 0, len: 8 }, "token"),
        (RemoteRange { exposure: name, token: 42, offset: 0, len: 8 }, "right"),
        (RemoteRange { exposure: 0, token: 7, offset: 0, len: 8 }, "revoked"),
        (RemoteRange { exposure: 99, token: 42, offset: 0, len: 8 }, "no such"),
    ];
    for (remote, why) in cases {
        let op = sim.sides[0].op(What::Write, vec![1; 8]);
        sim.sides[0].proto.start(op, Work::Write { parts: Parts::One(remote), notify: Some(3) }, limits().segment);
        sim.run();
        let result = &sim.sides[0].results[&op.0];
        assert!(matches!(result, Err(Error::AccessDenied { reason }) if reason.contains(why)), "{why}: {result:?}");
    }
    let remote = RemoteRange { exposure: name, token: 42, offset: 96, len: 8 };
    let op = sim.sides[0].op(What::Read { from: 96 }, vec![0; 8]);
    sim.sides[0].proto.start(op, Work::Read { remote }, limits().segment);
    sim.run();
    assert!(matches!(sim.sides[0].results[&op.0], Err(Error::OutOfBounds { .. })));
    assert!(sim.sides[1].exposed.iter().all(|&b| b == 0));
}

#[test]
fn a_cancelled_write_fills_its_place_in_the_order() {
    let mut sim = Sim::new();
    let first = sim.sides[0].write(0, 1000, 1, Some(1));
    let second = sim.sides[0].write(0, 1000, 2, Some(1));
    let third = sim.sides[0].write(0, 8, 3, Some(1));
    sim.transmit(0, 0);
    sim.sides[0].proto.cancel(first);
    sim.sides[0].proto.cancel(second);
    sim.sides[0].settle();
    assert!(matches!(sim.sides[0].results[&second.0], Err(Error::Cancelled)), "nothing of it had left");
    let note = sim.sides[1].op(What::Note, Vec::new());
    sim.sides[1].proto.wait_note(note, 1, 1);
    sim.run();
    assert!(matches!(sim.sides[0].results[&first.0], Err(Error::Cancelled)));
    assert!(sim.sides[0].results[&third.0].is_ok());
    assert_eq!(sim.sides[1].notes, 1, "one write landed whole, so one notification");
    assert_eq!(sim.sides[1].exposed[..8], [3; 8]);
    assert!(sim.sides.iter().all(|side| side.ops.is_empty()));
}

#[test]
fn ten_thousand_messages_wait_for_credit_and_all_come() {
    let mut sim = Sim::new();
    for _ in 0..10_000 {
        sim.sides[0].send(8);
    }
    sim.run();
    let (arrived, unreceived, waiting) =
        (sim.sides[1].proto.message_counts().0, sim.sides[1].proto.message_counts().1, sim.sides[0].proto.message_counts().2);
    assert!(unreceived < 20, "the window bounds what waits at the receiver: {unreceived}");
    assert_eq!(arrived as usize + waiting, 10_000);
    for _ in 0..10_000 {
        sim.sides[1].recv(8, None);
        sim.sides[1].settle();
        sim.run();
    }
    assert_eq!(sim.sides[1].got, (1..=10_000).collect::<Vec<_>>());
}

#[test]
fn silence_is_asked_about_and_then_ends_the_connection() {
    let begun = Instant::now();
    let mut connection = Connection::new(limits(), begun);
    assert!(connection.tick(begun + Duration::from_millis(500)).is_ok());
    assert!(connection.poll_transmit(0).is_none());
    assert!(connection.tick(begun + Duration::from_millis(1500)).is_ok());
    let ping = connection.poll_transmit(0).expect("a ping");
    assert!(matches!(Frame::decode(ping.head.as_bytes()), Ok(Frame::Ping { .. })));
    connection.heard();
    assert!(connection.tick(begun + Duration::from_millis(4000)).is_ok(), "something was heard");
    assert!(connection.tick(begun + Duration::from_millis(7001)).is_err());
}

#[test]
fn a_peer_that_breaks_the_rules_is_found_out() {
    let fresh = || Connection::new(limits(), Instant::now());
    let frames = [
        (Frame::Eager { flags: 0, tag: 0, order: 0 }, EAGER + 1),
        (Frame::Cts { flags: 0, msg: 5 }, 0),
        (Frame::Data { flags: 0, msg: 5, offset: 0 }, 8),
        (Frame::Done { flags: 0, msg: 5, status: 0 }, 0),
        (Frame::Reply { flags: 0, seq: 0, status: 0, value: 0 }, 0),
        (Frame::ReadData { flags: 0, seq: 3, offset: 0 }, 8),
        (Frame::Credit { flags: 0, granted: 0 }, 0),
        (Frame::Credit { flags: 0, granted: u64::MAX }, 0),
        (Frame::Flushed { flags: 0, id: 1 }, 0),
        (Frame::Read { flags: 0, seq: WINDOW, exposure: 0, token: 0, offset: 0, len: 0 }, 0),
    ];
    for (frame, len) in frames {
        assert!(fresh().on_frame(&frame, len).is_err(), "{frame:?}");
    }
    // Messages beyond the credit.
    let mut connection = fresh();
    let eager = Frame::Eager { flags: 0, tag: 0, order: 0 };
    let violation = (0..1024 / (MESSAGE_COST + 64) + 1).map(|_| connection.on_frame(&eager, 64)).find_map(Result::err);
    assert!(violation.is_some());
    // Questions whose answers are never read.
    let mut connection = fresh();
    let flood = (0..100_000).find_map(|stamp| connection.on_frame(&Frame::Ping { flags: 0, stamp }, 0).err());
    assert!(flood.is_some());
}

#[test]
fn a_close_lets_what_is_landing_land() {
    for dropped in [false, true] {
        let mut sim = Sim::new();
        sim.sides[0].send(500);
        sim.sides[0].send(500);
        let op = sim.sides[1].recv(500, None);
        let waiting = sim.sides[1].recv(500, Some(77));
        sim.run_until_landing();
        if dropped {
            sim.sides[1].drop_recv(op.0);
        }
        sim.sides[1].proto.close();
        sim.sides[1].settle();
        assert!(matches!(sim.sides[1].results[&waiting.0], Err(Error::Closed)), "nothing had matched it");
        assert!(
            !sim.sides[1].results.contains_key(&op.0) && !sim.sides[1].proto.is_drained(),
            "an engine writes into its memory"
        );
        sim.run();
        assert_eq!(sim.sides[1].got, if dropped { vec![] } else { vec![1] });
        assert!(sim.sides[1].proto.close_sent() && sim.sides[0].proto.peer_closed());
        if dropped {
            let again = sim.sides[1].recv(500, None);
            sim.sides[1].settle();
            while sim.sides[1].device(0) {}
            assert!(sim.sides[1].results[&again.0].is_ok(), "it had arrived whole");
        }
    }
}

#[test]
fn pieces_that_overlap_never_end_a_message_early() {
    let mut receiver = Connection::new(Limits { frame_max: 1000, ..limits() }, Instant::now());
    receiver.recv(OpId(1), None, 1000);
    receiver.on_frame(&Frame::Rts { flags: 0, tag: 0, order: 0, msg: 1, total: 1000 }, 0).unwrap();
    assert!(receiver.on_frame(&Frame::Rts { flags: 0, tag: 0, order: 0, msg: 1, total: 8 }, 0).is_err(), "one number twice");
    // One lane has begun to write; the bytes of the others are not all there, whatever they are called.
    receiver.on_frame(&Frame::Data { flags: 0, msg: 1, offset: 0 }, 600).unwrap();
    assert!(receiver.on_frame(&Frame::Data { flags: 0, msg: 1, offset: 0 }, 1000).is_err());
}

/// The engine has the frames and fails before it lets go of them: the operations end, and once.
#[test]
fn what_the_engine_holds_ends_with_the_connection() {
    for len in [8, usize::try_from(EAGER).unwrap()] {
        let mut side = Side::new();
        let op = side.send(len);
        let transmit = (0..LANES).find_map(|lane| side.proto.poll_transmit(lane)).expect("a frame");
        let error = Error::PeerLost { peer: "x".into(), reason: "test".into() };
        side.proto.fail(&error);
        side.settle();
        assert!(matches!(side.results.get(&op.0), Some(Err(Error::PeerLost { .. }))), "{len} bytes: the send never ended");
        // What the engine says late changes nothing.
        side.proto.sent(transmit.sent);
        side.settle();
        assert!(side.ops.is_empty());
    }
}

#[test]
fn a_receive_takes_over_the_memory_of_a_dropped_one() {
    let mut sim = Sim::new();
    sim.sides[0].send(500);
    let op = sim.sides[1].recv(500, None);
    sim.run_until_landing();
    sim.sides[1].drop_recv(op.0);
    assert!(sim.sides[1].ops[&op.0].detached, "a message is on its way");
    assert_eq!(sim.sides[1].proto.adopt(OpId(99), None), None, "other memory");
    assert_eq!(sim.sides[1].proto.adopt(op, None), Some(None));
    sim.sides[1].ops.get_mut(&op.0).unwrap().detached = false;
    sim.run();
    assert_eq!(sim.sides[1].got, [1]);
    // Dropped after its end, before it was seen.
    sim.sides[0].send(500);
    let op = sim.sides[1].recv(500, None);
    sim.run();
    let outcome = *sim.sides[1].results[&op.0].as_ref().unwrap();
    sim.sides[1].ops.insert(op.0, SimOp { what: What::Recv, memory: vec![0xee; 500], detached: true });
    sim.sides[1].proto.requeue(op, outcome);
    assert_eq!(sim.sides[1].proto.adopt(op, Some(77)), None, "not its turn");
    assert_eq!(sim.sides[1].proto.adopt(op, None), Some(Some(outcome)));
}

impl Sim {
    /// Until the first piece of a rendezvous message is about to land at side 1.
    fn run_until_landing(&mut self) {
        loop {
            self.transmit(0, 0);
            self.transmit(1, 0);
            self.sides[0].deliver(0);
            self.sides[1].deliver(0);
            if matches!(self.sides[1].landing[0], Some((Landing { token: Token::Data { .. }, .. }, _))) {
                return;
            }
        }
    }
}
