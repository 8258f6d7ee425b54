//! A connection: the protocol, its lanes, and everything that drives them.
//!
//! Three kinds of lock, always taken in this order and never two of one kind: a lane's sending half, a lane's receiving half, the
//! state; and last of all that of the copies, under which nothing else is locked. System calls and long copies are made under a half's lock only, so both directions move at once, and an operation can be
//! posted while another thread moves bytes.

use std::cell::Cell;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, TryLockError};
use std::task::Waker;
use std::time::{Duration, Instant};

use super::copies::{Copies, Gpu};
use super::lane::{ARMED_DEVICE, ARMED_READ, ARMED_WRITE, Bell, Lane, Links, Tx};
use super::sink::ConnSink;
use super::state::{State, Trash};
use crate::error::Error;
use crate::memory::Chunk;
use crate::memory::cuda;
use crate::memory::cuda::staging::Staging;
use crate::path::{Facts, Link, PathKind, PathPolicy};
use crate::proto::{Connection, Transmit};
use crate::reactor::spin::Spin;
use crate::reactor::{Reactor, Source, SourceId, lock};
use crate::transport::tcp::rx::violation;
use crate::transport::tcp::{TcpReceiver, TcpSender};
use crate::transport::{Received, Sink, shm};

/// What one round of progress takes in at most, in bytes, before other tasks get their turn.
const RX_BUDGET: usize = 1 << 20;
/// Rounds of filling and flushing a lane before other tasks get their turn.
const TX_ROUNDS: usize = 4;
/// Rounds that the driver makes for one connection before it looks at the next.
const DRIVER_ROUNDS: usize = 4;
/// How long a revocation waits for a device that is writing. Longer, and the memory stays busy instead.
const REVOKE_WAIT: Duration = Duration::from_millis(5);
/// The lane number of the bootstrap connection where it carries no frames, but only life.
const LIFE: usize = 255;

/// What does not change.
pub(crate) struct Info {
    pub peer: SocketAddr,
    pub local: SocketAddr,
    /// Names the connection in descriptors of exposed memory.
    pub session: u64,
    pub acceptor: bool,
    pub facts: Facts,
    pub policy: PathPolicy,
    pub link: Link,
    /// The path of host memory.
    pub kind: PathKind,
    /// Why this path.
    pub reason: String,
    pub linger: Duration,
}

pub(crate) struct Conn {
    pub(crate) info: Info,
    state: Mutex<State>,
    lanes: Box<[Lane]>,
    life: Option<TcpStream>,
    pub(crate) reactor: Arc<Reactor>,
    id: OnceLock<SourceId>,
    /// Polls of futures, so that the reactor sees when they stop.
    activity: AtomicU32,
    seen: AtomicU32,
    watched: AtomicBool,
    /// The future that was polled last has gone to sleep.
    resting: AtomicBool,
    pub(crate) log: super::events::Log,
    pub(crate) copies: Copies,
    staging: Arc<Staging>,
    gpu: OnceLock<Gpu>,
    pub(super) staging_warned: AtomicBool,
}

thread_local! {
    /// Spare lists for what is woken and dropped after the lock, so that a steady flow allocates nothing.
    static SPARE: Cell<(Vec<Waker>, Vec<Trash>)> = const { Cell::new((Vec::new(), Vec::new())) };
}

fn try_lock<T: ?Sized>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Without its driver, a context can do nothing.
pub(crate) fn runtime_ended() -> Error {
    Error::Unsupported { what: "the tokio runtime in which this context was made has ended; make a new context".into() }
}

/// What a round of progress did.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Moved {
    /// Something came in.
    pub received: bool,
    /// There is more to do at once.
    pub more: bool,
}

impl Conn {
    pub(crate) fn start(
        info: Info,
        proto: Connection,
        links: Links,
        reactor: &Arc<Reactor>,
        staging: &Arc<Staging>,
    ) -> Result<Arc<Self>, Error> {
        let mut life = None;
        let lanes: Box<[Lane]> = match links {
            Links::Tcp { sockets, zero_copy } => sockets
                .into_iter()
                .map(|socket| {
                    let socket = Arc::new(socket);
                    let rx = Box::new(TcpReceiver::new(Arc::clone(&socket)));
                    let tx = Box::new(TcpSender::new(Arc::clone(&socket), zero_copy));
                    Lane::new(rx, tx, Bell::Tcp(socket))
                })
                .collect(),
            Links::Inproc { end, life: socket } => {
                life = Some(socket);
                let (rx, tx, bell) = end.split();
                Box::new([Lane::new(Box::new(rx), Box::new(tx), Bell::Inproc(bell))])
            }
            Links::Shm { end, life: socket } => {
                life = Some(socket);
                let (rx, tx, link) = end.split();
                Box::new([Lane::new(Box::new(rx), Box::new(tx), Bell::Shm(link))])
            }
        };
        let conn = Arc::new(Conn {
            state: Mutex::new(State::new(proto, Arc::clone(staging))),
            log: super::events::Log::new(&info),
            info,
            lanes,
            life,
            reactor: Arc::clone(reactor),
            id: OnceLock::new(),
            activity: AtomicU32::new(0),
            seen: AtomicU32::new(0),
            watched: AtomicBool::new(false),
            resting: AtomicBool::new(false),
            copies: Copies::default(),
            staging: Arc::clone(staging),
            gpu: OnceLock::new(),
            staging_warned: AtomicBool::new(false),
        });
        let id = reactor.add(Arc::clone(&conn) as Arc<dyn Source>);
        let _ = conn.id.set(id);
        if let Err(error) = conn.register(id) {
            conn.fail(&error);
            return Err(error);
        }
        if reactor.is_abandoned() {
            let error = runtime_ended();
            conn.fail(&error);
            return Err(error);
        }
        conn.arm();
        Ok(conn)
    }

    fn register(&self, id: SourceId) -> Result<(), Error> {
        for (i, lane) in self.lanes.iter().enumerate() {
            match &lane.bell {
                Bell::Tcp(socket) => self.reactor.register(socket.as_fd(), id, i)?,
                Bell::Inproc(bell) => bell.attach(&self.reactor, id, i),
                Bell::Shm(link) => {
                    link.attach(&self.reactor, id, i);
                    self.reactor.register(link.as_fd(), id, i)?;
                }
            }
        }
        if let Some(life) = &self.life {
            self.reactor.register(life.as_fd(), id, LIFE)?;
            self.reactor.arm(life.as_fd(), id, LIFE, true, false)?;
        }
        Ok(())
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// What it needs to work with devices.
    pub(crate) fn gpu(&self) -> &Gpu {
        self.gpu.get_or_init(|| {
            let kicks = Arc::clone(self.reactor.kicks());
            let id = self.id.get().copied();
            let ring = Arc::new(move || id.into_iter().for_each(|id| kicks.kick(id, 0)));
            Gpu { staging: Arc::clone(&self.staging), ring }
        })
    }

    /// Settles events, gives up the lock, and then wakes and drops what was left to do. Not to be called under a lane's lock: what is
    /// woken and dropped can be code of the user's, which may come back to this connection.
    pub(crate) fn unlock(&self, mut state: MutexGuard<'_, State>) {
        state.settle();
        self.take_jobs(&mut state);
        if !state.has_leftovers() {
            return;
        }
        // A thread that is ending may have no spare lists any more.
        let (mut wakers, mut trash) = SPARE.try_with(Cell::take).unwrap_or_default();
        std::mem::swap(&mut wakers, &mut state.wakers);
        std::mem::swap(&mut trash, &mut state.trash);
        drop(state);
        wakers.drain(..).for_each(Waker::wake);
        trash.clear();
        let _ = SPARE.try_with(|spare| spare.set((wakers, trash)));
    }

    /// The same under a lane's lock: settles, and leaves the rest to an [`unlock`](Self::unlock) after it. Answers whether there is a rest.
    pub(super) fn unlock_in_lane(&self, mut state: MutexGuard<'_, State>) -> bool {
        state.settle();
        self.take_jobs(&mut state);
        state.has_leftovers()
    }

    /// Takes over the work for devices that the protocol asks for.
    fn take_jobs(&self, state: &mut State) {
        if !state.jobs.is_empty() {
            state.jobs.drain(..).for_each(|job| self.copies.push(job));
            self.watch();
        }
    }

    /// Runs `f` on the state, then does what comes of it.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        let mut state = self.lock();
        let result = f(&mut state);
        self.unlock(state);
        result
    }

    /// One round over all lanes, both directions.
    pub(crate) fn progress(&self) -> Moved {
        let mut moved = self.receive();
        moved.more |= self.transmit_some();
        moved
    }

    /// Takes in what has come.
    pub(crate) fn receive(&self) -> Moved {
        let mut moved = Moved { received: self.follow_copies(), more: false };
        for lane in &self.lanes {
            let Some(mut rx) = try_lock(&lane.rx) else { continue };
            let mut sink = ConnSink::new(self);
            let result = rx.poll(&mut sink, RX_BUDGET);
            sink.pause();
            let leftovers = sink.leftovers;
            lane.stalled.store(rx.is_stalled(), Ordering::Relaxed);
            drop(rx);
            if leftovers {
                self.unlock(self.lock());
            }
            match result {
                Ok(Received::Idle { any }) => moved.received |= any,
                Ok(Received::More) => {
                    moved.received = true;
                    moved.more = true;
                }
                Ok(Received::End) => self.fail(&self.end_reason(None)),
                Err(Error::Io { source, .. }) => self.fail(&self.end_reason(Some(&source))),
                Err(error) => self.fail(&error),
            }
        }
        if self.copies.is_fresh() {
            moved.received |= self.follow_copies();
        }
        if moved.received {
            self.check_close();
        }
        moved
    }

    /// Looks at the work of devices, and does what follows what is over. Answers whether there was any.
    fn follow_copies(&self) -> bool {
        if self.copies.is_empty() {
            return false;
        }
        let mut follow = Vec::new();
        let mut result = self.copies.poll(self.gpu(), &mut follow);
        let any = !follow.is_empty();
        if any {
            let mut state = self.lock();
            for then in follow {
                if let Err(broken) = state.follow(then) {
                    result = Err(violation(&broken));
                }
            }
            self.unlock(state);
        }
        if let Err(error) = result {
            self.fail(&error);
        }
        any
    }

    pub(crate) fn has_copies(&self) -> bool {
        !self.copies.is_empty()
    }

    /// Sends what there is to send. If it is much, the driver goes on with it.
    pub(crate) fn transmit(&self) {
        if self.transmit_some() {
            self.kick(0);
        } else if self.is_blocked() {
            // Whoever called may be nobody who drives: the reactor waits for room, or for the device.
            self.watch();
        }
    }

    fn kick(&self, lane: usize) {
        if let Some(&id) = self.id.get() {
            self.reactor.kick(id, lane);
        }
    }

    /// Answers whether there is more to do at once.
    fn transmit_some(&self) -> bool {
        let mut more = false;
        for i in 0..self.lanes.len() {
            match self.transmit_lane(i) {
                Ok(m) => more |= m,
                Err(Error::Io { source, .. }) => self.fail(&self.end_reason(Some(&source))),
                Err(error) => self.fail(&error),
            }
        }
        more
    }

    fn transmit_lane(&self, i: usize) -> Result<bool, Error> {
        let lane = &self.lanes[i];
        lane.dirty.store(true, Ordering::SeqCst);
        let mut more = false;
        // Whoever holds the half looks at `dirty` again after it has let go, so nothing that was posted meanwhile is left lying.
        while lane.dirty.load(Ordering::SeqCst) {
            let Some(mut tx) = try_lock(&lane.tx) else { break };
            lane.dirty.store(false, Ordering::SeqCst);
            let mut leftovers = false;
            let pumped = self.pump(i, &mut tx, &mut leftovers);
            drop(tx);
            if leftovers {
                self.unlock(self.lock());
            }
            more = pumped?;
            if more {
                break;
            }
        }
        Ok(more)
    }

    fn pump(&self, i: usize, tx: &mut Tx, leftovers: &mut bool) -> Result<bool, Error> {
        let lane = &self.lanes[i];
        for _ in 0..TX_ROUNDS {
            let mut state = self.lock();
            for token in tx.sent.drain(..) {
                state.proto.sent(token);
            }
            let filled = fill(i, &mut state, tx);
            *leftovers |= self.unlock_in_lane(state);
            filled?;
            let Tx { sender, sent, ahead } = tx;
            let mut ready = false;
            if !ahead.is_empty() {
                ahead.start(self.gpu())?;
                ready = ahead.is_ready()?;
            }
            lane.waiting.store(!ahead.is_empty() && !ready, Ordering::Relaxed);
            if sender.is_idle() {
                lane.blocked.store(!sender.has_room(), Ordering::Relaxed);
                if ready && sender.has_room() {
                    continue;
                }
                return Ok(false);
            }
            let flushed = sender.flush(sent)?;
            let full = !flushed || !sender.has_room();
            lane.blocked.store(full, Ordering::Relaxed);
            if full {
                if !sent.is_empty() {
                    let mut state = self.lock();
                    sent.drain(..).for_each(|token| state.proto.sent(token));
                    *leftovers |= self.unlock_in_lane(state);
                }
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Watches every lane for what comes next. What is there already counts.
    pub(crate) fn arm(&self) {
        if self.reactor.spin == Spin::Thread {
            return;
        }
        let Some(&id) = self.id.get() else { return };
        if let Err(error) = self.arm_devices() {
            return self.fail(&error);
        }
        for (i, lane) in self.lanes.iter().enumerate() {
            let read = !lane.stalled.load(Ordering::Relaxed);
            let write = lane.blocked.load(Ordering::Relaxed);
            let want = if read { ARMED_READ } else { ARMED_DEVICE } | if write { ARMED_WRITE } else { 0 };
            if lane.armed.fetch_or(want, Ordering::AcqRel) & want == want {
                continue;
            }
            match &lane.bell {
                Bell::Tcp(socket) => {
                    if let Err(error) = self.reactor.arm(socket.as_fd(), id, i, read, write) {
                        // Only after the end, when the socket is no longer registered.
                        tracing::trace!(%error, "a lane could not be armed");
                    }
                }
                Bell::Inproc(bell) => bell.arm(write),
                Bell::Shm(link) => {
                    if let Err(error) = self.reactor.arm(link.as_fd(), id, i, true, false) {
                        tracing::trace!(%error, "a lane could not be armed");
                    }
                    link.arm(read, write);
                }
            }
        }
    }

    /// Has devices ring when they have done what this connection waits for.
    fn arm_devices(&self) -> Result<(), Error> {
        if !self.copies.is_empty() {
            self.copies.arm(&self.gpu().ring)?;
        }
        for (i, lane) in self.lanes.iter().enumerate().filter(|(_, lane)| lane.waiting.load(Ordering::Relaxed)) {
            lock(&lane.tx).ahead.arm(&self.gpu().ring)?;
            // Who wanted the lane meanwhile, for the ring of a device that was done at once, found it taken.
            if lane.dirty.load(Ordering::SeqCst) {
                self.kick(i);
            }
        }
        Ok(())
    }

    fn is_armed(&self) -> bool {
        self.lanes.iter().all(|lane| lane.armed.load(Ordering::Relaxed) != 0)
    }

    /// Whether something waits to leave: for room in a lane, or for a device.
    pub(crate) fn is_blocked(&self) -> bool {
        self.lanes.iter().any(|lane| lane.blocked.load(Ordering::Relaxed)) || self.is_waiting()
    }

    fn is_waiting(&self) -> bool {
        self.lanes.iter().any(|lane| lane.waiting.load(Ordering::Relaxed))
    }

    /// A future drives this connection.
    pub(crate) fn touch(&self) {
        self.activity.fetch_add(1, Ordering::Relaxed);
    }

    /// A future that was polled will be polled again at once, or sleeps.
    pub(crate) fn set_resting(&self, resting: bool) {
        self.resting.store(resting, Ordering::Relaxed);
    }

    /// A future stops driving. If others wait and nobody else looks, one of them takes over.
    pub(crate) fn pass_on(&self, state: &mut State) {
        if state.waiting > 0 && state.spinning == 0 && self.reactor.spin != Spin::Thread && !self.is_armed() {
            if let Some(waker) = state.ops.iter_mut().find_map(|(_, op)| op.waker.clone()) {
                state.wakers.push(waker);
            }
        }
    }

    /// Makes sure that the reactor puts this connection to rest when no future drives it any more.
    pub(crate) fn watch(&self) {
        if !self.watched.swap(true, Ordering::AcqRel) {
            if let Some(&id) = self.id.get() {
                self.reactor.watch(id);
            }
        }
    }

    // ---- the end ----

    /// What the end of the stream means.
    fn end_reason(&self, source: Option<&std::io::Error>) -> Error {
        let state = self.lock();
        if state.proto.peer_closed() || state.proto.close_sent() {
            return Error::Closed;
        }
        match source {
            None => self.lost("it closed the connection without a goodbye; its process has probably ended"),
            Some(error) => self.lost(&format!("the connection failed: {error}")),
        }
    }

    pub(crate) fn lost(&self, reason: &str) -> Error {
        Error::PeerLost { peer: self.info.peer.to_string(), reason: reason.to_owned().into() }
    }

    /// Carries an orderly close on.
    fn check_close(&self) {
        let closing = |state: &State| state.proto.peer_closed() && state.ended.is_none();
        if !closing(&self.lock()) {
            return;
        }
        // The peer's last answers may have ended what only waits for an engine of ours to let go.
        self.transmit();
        let mut state = self.lock();
        if !closing(&state) {
            return;
        }
        // The peer will not answer anything that is still open.
        let mut over = !state.proto.is_drained() || state.proto.close_sent();
        state.proto.close();
        self.unlock(state);
        if !over {
            self.transmit();
            over = self.lock().proto.is_closed();
        }
        if over {
            self.fail(&Error::Closed);
        }
    }

    /// Begins an orderly close.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        if state.ended.is_some() {
            return;
        }
        state.proto.close();
        // A time that no clock reaches is none.
        state.linger_until = state.linger_until.or_else(|| Instant::now().checked_add(self.info.linger));
        self.unlock(state);
        self.transmit();
        self.check_close();
        self.arm();
    }

    /// Ends everything. The engines let go of all memory before any operation is told.
    pub(crate) fn fail(&self, error: &Error) {
        let error = match error {
            Error::PeerLost { peer, reason } if peer.is_empty() => self.lost(reason),
            other => other.clone(),
        };
        let orderly = {
            let mut state = self.lock();
            if state.ended.is_some() {
                return;
            }
            state.ended = Some(error.clone());
            matches!(error, Error::Closed) && state.proto.is_closed()
        };
        if !matches!(error, Error::Closed) {
            tracing::warn!(peer = %self.info.peer, %error, "an endpoint ended");
        }
        for lane in &self.lanes {
            {
                let mut tx = lock(&lane.tx);
                tx.sender.shut();
                tx.ahead.shut();
            }
            lane.waiting.store(false, Ordering::Relaxed);
            lock(&lane.rx).shut();
            lane.stalled.store(false, Ordering::Relaxed);
            if let Bell::Shm(link) = &lane.bell {
                self.reactor.deregister(link.as_fd());
            }
            if let Bell::Tcp(socket) = &lane.bell {
                self.reactor.deregister(socket.as_fd());
                if !orderly {
                    // What is still queued may refer to memory that is free to change from now on. Disconnecting throws it away and
                    // resets the connection, at which the peer throws away what it has not looked at yet (see the receiver).
                    let _ = rustix::net::connect_unspec(&**socket);
                }
                let _ = socket.shutdown(std::net::Shutdown::Both);
            }
        }
        if let Some(life) = &self.life {
            self.reactor.deregister(life.as_fd());
            let _ = life.shutdown(std::net::Shutdown::Both);
        }
        // What devices are at, they finish; its memory stays in use until then.
        self.copies.end();
        let mut state = self.lock();
        state.proto.fail(&error);
        let exposures = state.revoke_all();
        let mourners = state.mourners.take();
        self.unlock(state);
        self.log.ended(&error);
        drop(exposures);
        mourners.into_iter().for_each(Waker::wake);
        if let Some(&id) = self.id.get() {
            self.reactor.remove(id);
        }
    }

    /// Ends an exposure. When this returns, no engine writes into its memory any more; except a device that takes long, for instance
    /// because it waits for a stream of the user's, and then the memory stays in use until it has.
    pub(crate) fn revoke(&self, index: u32, name: u64) {
        let exposure = self.with(|state| if state.proto.is_exposed(name) { state.revoke(index) } else { None });
        if exposure.is_some() {
            for lane in &self.lanes {
                // A payload that is on its way is read under this lock.
                let mut rx = lock(&lane.rx);
                let mut sink = ConnSink::new(self);
                rx.review(&mut sink);
                sink.pause();
            }
            self.unlock(self.lock());
            let begun = Instant::now();
            while self.copies.writes_into(name) && begun.elapsed() < REVOKE_WAIT {
                self.follow_copies();
                std::thread::yield_now();
            }
        }
    }

    /// Reads what came beside shared memory. Answers whether there was a wake-up among it.
    fn drain(&self, link: &shm::Link) -> bool {
        match link.drain() {
            Ok(Some(woken)) => woken,
            Ok(None) => {
                // What the peer said before it went comes first.
                self.receive();
                self.fail(&self.end_reason(None));
                false
            }
            Err(error) => {
                self.fail(&error);
                false
            }
        }
    }

    fn on_life(&self) {
        let Some(life) = &self.life else { return };
        let mut byte = [0; 16];
        match rustix::net::recv(life, &mut byte[..], rustix::net::RecvFlags::empty()) {
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
            // What the peer said before it went comes first.
            _ => {
                self.receive();
                self.fail(&self.end_reason(None));
            }
        }
    }
}

/// Hands frames to a sender for as long as it has room. Payloads in memory of a device, which it cannot read, take a way round, and what comes
/// after them waits for them.
fn fill(lane: usize, state: &mut State, tx: &mut Tx) -> Result<(), Error> {
    let Tx { sender, ahead, .. } = tx;
    state.counters.staged += ahead.take_staged();
    while sender.has_room() {
        if !ahead.is_empty() {
            if let Some(frame) = ahead.pop()? {
                let (head, sent) = (frame.head, frame.sent);
                sender.push(head.as_bytes(), frame.payload(), sent);
                continue;
            }
            if lane == 0 {
                // Answers need not wait for a device.
                if let Some(transmit) = state.proto.poll_control() {
                    sender.push(transmit.head.as_bytes(), None, transmit.sent);
                    continue;
                }
            }
            if !ahead.has_room() {
                break;
            }
        }
        let Some(transmit) = state.proto.poll_transmit(lane) else { break };
        let payload = payload_of(state, &transmit)?;
        state.counters.bytes_sent += payload.as_ref().map_or(0, Chunk::len);
        let on_device = payload.as_ref().is_some_and(|chunk| chunk.device().is_some());
        if !ahead.is_empty() || (on_device && !sender.takes_devices()) {
            ahead.push(transmit.head, payload, transmit.sent);
        } else {
            sender.push(transmit.head.as_bytes(), payload, transmit.sent);
        }
    }
    Ok(())
}

fn payload_of(state: &State, transmit: &Transmit) -> Result<Option<Chunk>, Error> {
    match transmit.payload {
        Some((place, len)) if len > 0 => {
            state.chunk(place, len).map(Some).ok_or_else(|| violation(&"a payload of ours has no memory"))
        }
        _ => Ok(None),
    }
}

impl Source for Conn {
    fn on_ready(&self, lane: usize) {
        if lane == LIFE {
            self.on_life();
            if let (Some(&id), Some(life)) = (self.id.get(), &self.life) {
                let _ = self.reactor.arm(life.as_fd(), id, LIFE, true, false);
            }
            return;
        }
        if let Some(lane) = self.lanes.get(lane) {
            lane.armed.store(0, Ordering::Release);
            if let Bell::Shm(link) = &lane.bell {
                if self.drain(link) {
                    // Perhaps it was for somebody who has armed the lane since: that arming is used up, too.
                    lane.armed.swap(0, Ordering::AcqRel);
                }
            }
        }
        let mut moved = Moved::default();
        for _ in 0..DRIVER_ROUNDS {
            moved = self.progress();
            if !moved.more {
                break;
            }
        }
        if moved.more {
            return self.kick(lane);
        }
        let spins = matches!(self.reactor.spin, Spin::Adaptive | Spin::Always);
        let driven = self.activity.load(Ordering::Relaxed) != self.seen.load(Ordering::Relaxed);
        if spins && driven && !self.resting.load(Ordering::Relaxed) {
            // Futures are at it, and will look themselves.
            self.watch();
        } else {
            self.arm();
        }
    }

    fn on_tick(&self, now: Instant) {
        // A device that has failed rings for nobody.
        self.follow_copies();
        cuda::reap();
        let lost = if cuda::any_lost() { self.lock().lost_memory() } else { None };
        if let Some(error) = lost {
            return self.fail(&error);
        }
        let stalled = self.lanes.iter().any(|lane| lane.stalled.load(Ordering::Relaxed));
        let (silent, linger) = {
            let mut state = self.lock();
            if stalled {
                state.proto.stalled();
            }
            (state.proto.tick(now).err(), state.linger_until.is_some_and(|until| now >= until))
        };
        if let Some(silent) = silent {
            let reason = format!("nothing was heard of it for {:.1} s", silent.as_secs_f64());
            return self.fail(&self.lost(&reason));
        }
        if linger {
            return self.fail(&Error::Closed);
        }
        for lane in &self.lanes {
            if let Bell::Shm(link) = &lane.bell {
                // What has come for who spins, and never sleeps.
                link.tidy();
                if self.drain(link) {
                    self.kick(0);
                }
            }
        }
        self.transmit();
    }

    fn rest(&self) -> bool {
        let activity = self.activity.load(Ordering::Relaxed);
        if self.seen.swap(activity, Ordering::Relaxed) != activity {
            return false;
        }
        self.watched.store(false, Ordering::Release);
        self.transmit();
        // What is there already counts as the next event, so nothing has to be looked for here.
        self.arm();
        true
    }

    fn progress(&self) {
        Conn::progress(self);
    }

    fn abandon(&self) {
        self.fail(&self.lost("the tokio runtime that drove this context has ended"));
    }
}
