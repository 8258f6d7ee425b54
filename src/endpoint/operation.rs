//! An operation as its future sees it: posted at the first poll, driven by every poll, let go of by drop.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context as Task, Poll};
use std::time::{Duration, Instant};

use super::conn::Conn;
use super::route::Route;
use super::state::{Held, State};
use super::{Handle, Receipt};
use crate::error::Error;
use crate::memory::{BufKey, MemKind, WriteLease};
use crate::proto::initiator::Work;
use crate::proto::{Detached, OpId, Outcome};
use crate::reactor::spin::{Learnt, Spin, Spinner, Step};

/// What is to be done, before it was posted.
#[derive(Debug)]
pub(crate) enum Request {
    Send {
        held: Held,
        len: u64,
        tag: u64,
    },
    Recv {
        lease: WriteLease,
        tag: Option<u64>,
    },
    /// The buffer is busy; perhaps with the message of a dropped receive, which can then be taken over.
    RecvBusy {
        key: BufKey,
        tag: Option<u64>,
        error: Error,
    },
    /// Wait for a message.
    Claim,
    /// Receive a message that was waited for.
    Claimed {
        lease: WriteLease,
        seq: u64,
    },
    Work {
        held: Held,
        work: Work,
        /// Where the memory is, here and at the peer.
        between: (MemKind, MemKind),
    },
    Note {
        tag: u64,
        n: u64,
    },
    Flush,
}

/// What a drop means for an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Recv,
    Claim,
    /// Goes on without its future.
    Detachable,
    Note {
        tag: u64,
        n: u64,
    },
}

#[derive(Debug)]
enum Stage {
    Request(Request),
    Posted(OpId, Kind),
    Failed(Error),
    Over,
}

/// The end of an operation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Finished {
    pub outcome: Outcome,
    pub elapsed: Duration,
    route: Route,
    staged: u64,
}

pub(crate) struct Operation {
    handle: Arc<Handle>,
    stage: Stage,
    polled: bool,
    /// Counted in `State::spinning`.
    spinning: bool,
    timeout: Option<Duration>,
    timer: Option<Pin<Box<tokio::time::Sleep>>>,
}

impl Operation {
    pub(crate) fn new(handle: &Arc<Handle>, request: Result<Request, Error>) -> Self {
        let stage = match request {
            Ok(request) => Stage::Request(request),
            Err(error) => Stage::Failed(error),
        };
        Operation { handle: Arc::clone(handle), stage, polled: false, spinning: false, timeout: None, timer: None }
    }

    pub(crate) fn request_mut(&mut self) -> Option<&mut Request> {
        match &mut self.stage {
            Stage::Request(request) => Some(request),
            _ => None,
        }
    }

    pub(crate) fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = Some(timeout);
    }

    pub(crate) fn handle(&self) -> &Arc<Handle> {
        &self.handle
    }

    fn conn(&self) -> &Conn {
        &self.handle.conn
    }

    /// Drives the operation.
    pub(crate) fn poll(&mut self, cx: &mut Task<'_>) -> Poll<Result<Finished, Error>> {
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Request(request) => {
                let handle = Arc::clone(&self.handle);
                match handle.conn.with(|state| post(&handle.conn, state, request)) {
                    Ok((op, kind)) => self.stage = Stage::Posted(op, kind),
                    Err(error) => return Poll::Ready(Err(error)),
                }
            }
            Stage::Failed(error) => return Poll::Ready(Err(error)),
            Stage::Over => return Poll::Ready(Err(Error::invalid("the future was polled after it had ended"))),
            posted @ Stage::Posted(..) => self.stage = posted,
        }
        let Stage::Posted(op, kind) = self.stage else { return Poll::Pending };
        match self.drive(op, cx) {
            Poll::Ready(result) => {
                self.stage = Stage::Over;
                Poll::Ready(result)
            }
            Poll::Pending => self.check_timer(op, kind, cx),
        }
    }

    fn drive(&mut self, op: OpId, cx: &mut Task<'_>) -> Poll<Result<Finished, Error>> {
        let handle = Arc::clone(&self.handle);
        let conn = &handle.conn;
        conn.touch();
        let mut learnt = Learnt::default();
        let mut started = None;
        let first = !std::mem::replace(&mut self.polled, true);
        if first {
            // What was posted leaves before anything is looked for.
            conn.transmit();
            match self.look(op, &mut learnt) {
                Ok(end) => return Poll::Ready(end),
                Err(at) => started = Some(at),
            }
        }
        let policy = conn.reactor.spin;
        let mut spinner: Option<Spinner> = None;
        let last = loop {
            if policy != Spin::Thread || conn.has_copies() {
                let moved = conn.receive();
                // What has come is looked at before anything is sent, which it may make superfluous, and may end by itself.
                if moved.received || started.is_none() {
                    match self.look(op, &mut learnt) {
                        Ok(end) => return Poll::Ready(end),
                        Err(at) => started = Some(at),
                    }
                }
                if moved.received || conn.is_blocked() {
                    conn.transmit();
                    match self.look(op, &mut learnt) {
                        Ok(end) => return Poll::Ready(end),
                        Err(at) => started = Some(at),
                    }
                }
                if moved.more {
                    break Step::Yield;
                }
            }
            if first && matches!(policy, Spin::Adaptive | Spin::Always) && !learnt.sleeps(policy) {
                // What the task polls beside this one is posted before anything spins.
                break Step::Yield;
            }
            let since = started.unwrap_or_else(Instant::now);
            match spinner.get_or_insert_with(|| Spinner::new(policy, learnt, since)).step() {
                Step::Look => {}
                last => break last,
            }
        };
        let mut state = conn.lock();
        if let Some(end) = self.take(op, &mut state) {
            conn.unlock(state);
            return Poll::Ready(end);
        }
        // After the end nobody is woken for work of a device that goes on.
        let last = if state.ended.is_some() && conn.has_copies() { Step::Yield } else { last };
        state.wait(op, cx.waker());
        // One that is polled for the first time may then be held, unpolled, while its task awaits another.
        self.set_spinning(&mut state, last == Step::Yield && !first);
        conn.unlock(state);
        conn.set_resting(last == Step::Sleep);
        match last {
            Step::Yield => {
                if conn.is_blocked() {
                    // Should the user not poll again soon, the reactor waits for room.
                    conn.watch();
                }
                yield_now(cx);
            }
            Step::Sleep => conn.arm(),
            Step::Look | Step::Leave => {}
        }
        Poll::Pending
    }

    /// Answers the end of the operation, or when it began.
    fn look(&mut self, op: OpId, learnt: &mut Learnt) -> Result<Result<Finished, Error>, Instant> {
        let handle = Arc::clone(&self.handle);
        let mut state = handle.conn.lock();
        if let Some(end) = self.take(op, &mut state) {
            let output = state.proto.has_output();
            handle.conn.unlock(state);
            if output {
                // Nobody may poll this endpoint for a while.
                handle.conn.transmit();
            }
            return Ok(end);
        }
        *learnt = state.learnt;
        Err(state.ops.get(op.0).map_or_else(Instant::now, |slot| slot.started))
    }

    fn take(&mut self, op: OpId, state: &mut State) -> Option<Result<Finished, Error>> {
        let (result, started, route, staged) = match state.ops.get_mut(op.0) {
            Some(slot) => (slot.result.take()?, slot.started, slot.route, slot.staged),
            // It was posted, so it is there until it is taken.
            None => return Some(Err(Error::Closed)),
        };
        let elapsed = started.elapsed();
        if self.polled {
            state.learnt.observe(elapsed);
        }
        state.bury(op);
        self.set_spinning(state, false);
        self.conn().pass_on(state);
        Some(result.map(|outcome| Finished { outcome, elapsed, route, staged }))
    }

    fn set_spinning(&mut self, state: &mut State, spinning: bool) {
        if self.spinning != spinning {
            self.spinning = spinning;
            if spinning { state.spinning += 1 } else { state.spinning -= 1 }
        }
    }

    fn check_timer(&mut self, op: OpId, kind: Kind, cx: &mut Task<'_>) -> Poll<Result<Finished, Error>> {
        let Some(after) = self.timeout else { return Poll::Pending };
        if self.timer.is_none() && tokio::runtime::Handle::try_current().is_err() {
            self.stage = Stage::Posted(op, kind);
            return Poll::Ready(Err(Error::Unsupported { what: "a timeout needs a tokio runtime to be polled in".into() }));
        }
        let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep(after)));
        if timer.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        let handle = Arc::clone(&self.handle);
        let ended = handle.conn.with(|state| {
            if let Some(end) = self.take(op, state) {
                return Some(end);
            }
            self.set_spinning(state, false);
            abandon(state, op, kind);
            if kind == Kind::Detachable {
                state.proto.cancel(op);
            }
            None
        });
        self.stage = Stage::Over;
        handle.conn.transmit();
        handle.conn.arm();
        Poll::Ready(ended.unwrap_or(Err(Error::Timeout { after })))
    }

    /// Asks for the operation's end; polling goes on to see it.
    pub(crate) fn cancel(&mut self) {
        match &self.stage {
            Stage::Posted(op, _) => {
                let op = *op;
                let handle = Arc::clone(&self.handle);
                handle.conn.with(|state| state.proto.cancel(op));
                handle.conn.transmit();
            }
            Stage::Request(_) => {
                self.put_back();
                self.stage = Stage::Failed(Error::Cancelled);
            }
            Stage::Failed(_) | Stage::Over => {}
        }
    }

    /// A claimed message that was never received takes its place in the order again.
    fn put_back(&self) {
        if let Stage::Request(Request::Claimed { seq, .. }) = &self.stage {
            self.conn().with(|state| state.proto.unclaim(*seq));
        }
    }

    pub(crate) fn receipt(&self, finished: &Finished) -> Receipt {
        let Finished { outcome, elapsed, route, staged } = *finished;
        let staged_bytes = if route.staged { outcome.bytes } else { staged.min(outcome.bytes) };
        Receipt { path: route.kind, bytes: outcome.bytes, staged_bytes, elapsed, nic: None, gpu: route.gpu }
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        self.put_back();
        let Stage::Posted(op, kind) = self.stage else { return };
        let handle = Arc::clone(&self.handle);
        handle.conn.with(|state| {
            self.set_spinning(state, false);
            abandon(state, op, kind);
            handle.conn.pass_on(state);
        });
        // What the drop has set going, a message back in its place for instance, may have something to say.
        handle.conn.transmit();
        handle.conn.arm();
    }
}

/// Hands the request to the protocol.
fn post(conn: &Conn, state: &mut State, request: Request) -> Result<(OpId, Kind), Error> {
    let refusal = state.ended.clone().or_else(|| state.proto.refusal());
    let open = move || refusal.map_or(Ok(()), Err);
    let limits = *state.proto.limits();
    Ok(match request {
        Request::Send { held, len, tag } => {
            open()?;
            let route = conn.route_of(&limits, held.kind())?;
            let op = state.insert(held, route);
            state.proto.send(op, tag, len, route.shape);
            state.counters.messages_sent += 1;
            (op, Kind::Detachable)
        }
        // Messages that have arrived can be received after the end, too; the protocol knows.
        Request::Recv { lease, tag } => {
            let capacity = lease.chunk().len();
            let route = conn.route_of(&limits, lease.chunk().kind())?;
            let op = state.insert(Held::Write(lease), route);
            state.proto.recv(op, tag, capacity);
            (op, Kind::Recv)
        }
        Request::RecvBusy { key, tag, error } => {
            let holds = |held: &Held| matches!(held, Held::Write(lease) if lease.key() == key);
            let orphan = state.ops.iter_mut().find(|(_, op)| op.detached && holds(&op.held)).map(|(id, _)| OpId(id));
            let op = orphan.ok_or_else(|| error.clone())?;
            let outcome = state.proto.adopt(op, tag).ok_or(error)?;
            if let Some(slot) = state.ops.get_mut(op.0) {
                slot.detached = false;
                slot.result = outcome.map(Ok);
            }
            (op, Kind::Recv)
        }
        Request::Claim => {
            let op = state.insert(Held::None, conn.no_route(&limits));
            state.proto.claim(op);
            (op, Kind::Claim)
        }
        Request::Claimed { lease, seq } => {
            let capacity = lease.chunk().len();
            let route = conn.route_of(&limits, lease.chunk().kind()).inspect_err(|_| state.proto.unclaim(seq))?;
            let op = state.insert(Held::Write(lease), route);
            state.proto.take_claimed(op, seq, capacity);
            (op, Kind::Recv)
        }
        Request::Work { held, work, between } => {
            open()?;
            let route = conn.route(&limits, between.0, between.1)?;
            let counter = match &work {
                Work::Write { .. } => &mut state.counters.writes,
                Work::Read { .. } => &mut state.counters.reads,
                Work::Atomic { .. } => &mut state.counters.atomics,
            };
            *counter += 1;
            let op = state.insert(held, route);
            state.proto.start(op, work, route.shape.segment);
            (op, Kind::Detachable)
        }
        Request::Note { tag, n } => {
            let op = state.insert(Held::None, conn.no_route(&limits));
            state.proto.wait_note(op, tag, n);
            // Notifications that have arrived can be taken after the end; no more will come.
            state.settle();
            if let (Err(error), Some(slot)) = (open(), state.ops.get(op.0)) {
                if slot.result.is_none() {
                    state.proto.forget_note(op, tag);
                    state.bury(op);
                    return Err(error);
                }
            }
            (op, Kind::Note { tag, n })
        }
        Request::Flush => {
            open()?;
            let op = state.insert(Held::None, conn.no_route(&limits));
            state.proto.flush(op);
            (op, Kind::Detachable)
        }
    })
}

/// The future no longer waits.
fn abandon(state: &mut State, op: OpId, kind: Kind) {
    state.silence(op);
    let Some(slot) = state.ops.get_mut(op.0) else { return };
    let result = slot.result.take();
    match (kind, result) {
        (Kind::Recv, Some(Ok(outcome))) => {
            slot.detached = true;
            state.proto.requeue(op, outcome);
        }
        (Kind::Recv, None) => match state.proto.detach(op) {
            Detached::Released => state.bury(op),
            Detached::Held => slot.detached = true,
        },
        (Kind::Claim, Some(Ok(outcome))) => {
            state.proto.unclaim(outcome.seq);
            state.bury(op);
        }
        (Kind::Claim, None) => {
            state.proto.detach(op);
            state.bury(op);
        }
        (Kind::Note { tag, n }, Some(Ok(_))) => {
            state.proto.return_notes(tag, n);
            state.bury(op);
        }
        (Kind::Note { tag, .. }, None) => {
            state.proto.forget_note(op, tag);
            state.bury(op);
        }
        (Kind::Detachable, None) => slot.detached = true,
        (_, Some(_)) => state.bury(op),
    }
}

/// Lets other tasks run before this one is polled again, without a wake-up through the driver. Outside of tokio it wakes at once.
fn yield_now(cx: &mut Task<'_>) {
    // The first poll of this future does just that, and nothing depends on a second one.
    let _ = pin!(tokio::task::yield_now()).poll(cx);
}
