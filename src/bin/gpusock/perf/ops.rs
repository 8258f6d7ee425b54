//! What is measured works on, and the loops that both sides share.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

use gpusock::system::Probe;
use gpusock::{Access, Context, Error, GpuBuf, GpuEndpoint, MemKind, RemoteBuf, Result, WriteRemote};

use super::plan::{Plan, Role};

/// Tag of the notifications of ping-pong tests.
pub(crate) const NOTE: u64 = 1;

/// A side's buffers, their exposure and that of the peer.
pub(crate) struct Side {
    pub endpoint: GpuEndpoint,
    /// What is sent, written, and read by the peer. Empty where this side does nothing of it.
    pub source: GpuBuf,
    /// Where incoming bytes land.
    pub inboxes: Vec<GpuBuf>,
    pub lease: Option<RemoteBuf>,
    pub remote: Option<RemoteBuf>,
}

impl Side {
    pub(crate) fn new(context: &Context, endpoint: GpuEndpoint, plan: &Plan, memory: MemKind, role: Role) -> Result<Self> {
        let source = context.alloc(memory, if plan.has_source(role) { plan.size } else { 0 })?;
        let inboxes = (0..plan.inboxes(role)).map(|_| context.alloc(memory, plan.size)).collect::<Result<Vec<_>>>()?;
        // All pages are there before anything is measured, and hold what no page does that was never written.
        fill(&source, PATTERN)?;
        for inbox in &inboxes {
            fill(inbox, SPOILT)?;
        }
        let mut side = Side { endpoint, source, inboxes, lease: None, remote: None };
        if plan.exposes(role) {
            let exposed = side.inboxes.first().unwrap_or(&side.source);
            // Reads end with a notification, which is a write without bytes.
            side.lease = Some(side.endpoint.expose(exposed, Access::WRITE | Access::READ)?);
        }
        Ok(side)
    }

    pub(crate) fn descriptor(&self) -> Option<Vec<u8>> {
        self.lease.as_ref().map(|lease| lease.to_bytes().to_vec())
    }

    /// Takes what the peer exposes, `role` being that of this side.
    pub(crate) fn set_remote(&mut self, plan: &Plan, role: Role, descriptor: Option<&[u8]>) -> Result<()> {
        let peer = if role == Role::Client { Role::Server } else { Role::Client };
        self.remote = descriptor.map(RemoteBuf::from_bytes).transpose()?;
        let right = match &self.remote {
            Some(remote) => plan.exposes(peer) && remote.len() == plan.size,
            None => !plan.exposes(peer),
        };
        if right { Ok(()) } else { Err(invalid("the peer exposed other memory than agreed".into())) }
    }

    /// What the peer exposes.
    pub(crate) fn target(&self) -> Result<RemoteBuf> {
        self.remote.clone().ok_or_else(|| invalid("the peer exposed no memory".into()))
    }

    /// Makes what landed in the warm-up useless, so that the run is judged by what it moves itself.
    pub(crate) fn spoil(&self) -> Result<()> {
        self.inboxes.iter().try_for_each(|inbox| fill(inbox, SPOILT))
    }
}

pub(crate) fn invalid(what: String) -> Error {
    Error::InvalidArgument { what: what.into() }
}

/// Refuses what this machine has no memory for, since the system would end the process, or another one, in the middle of the run.
/// `sides` of the run are on this machine.
pub(crate) fn check_memory(plan: &Plan, sides: &[Role]) -> Result<()> {
    let needed = sides.iter().try_fold(0_u64, |sum, role| sum.checked_add(plan.needs(*role)?)).unwrap_or(u64::MAX);
    let available = Probe::new().memory_available().unwrap_or(u64::MAX);
    if needed <= available {
        return Ok(());
    }
    let where_to = if sides.len() > 1 { "both sides, on this machine, need" } else { "this needs" };
    Err(invalid(format!("{where_to} {needed} bytes of memory, and {available} are available; use a smaller --size or --window")))
}

/// Length of what is repeated to fill a buffer. No two neighbouring blocks in it are alike.
const BLOCK: usize = 1 << 16;
/// What is sent.
const PATTERN: u8 = 0;
/// What a target holds before: the complement, so that no byte can be right by chance.
const SPOILT: u8 = 0xff;

fn block(flip: u8) -> Vec<u8> {
    (0..BLOCK).map(|i| (i * 131 + (i >> 8) * 29 + 7) as u8 ^ flip).collect()
}

fn fill(buffer: &GpuBuf, flip: u8) -> Result<()> {
    let block = block(flip);
    for (at, n) in pieces(buffer.len()) {
        buffer.copy_from_slice(at, &block[..n])?;
    }
    Ok(())
}

fn pieces(len: u64) -> impl Iterator<Item = (u64, usize)> {
    (0..len).step_by(BLOCK).map(move |at| (at, (len - at).min(BLOCK as u64) as usize))
}

/// Checks what arrived. Without it, nothing is done.
pub(crate) struct Checker {
    /// The right bytes, and room for those that are there; empty if nothing is to be checked.
    expected: Vec<u8>,
    seen: Vec<u8>,
    spoilt: Vec<u8>,
    /// The first thing that was wrong.
    pub wrong: Option<String>,
}

impl Checker {
    pub(crate) fn new(verify: bool) -> Self {
        let blocks = |flip| if verify { block(flip) } else { Vec::new() };
        Checker { expected: blocks(PATTERN), seen: blocks(PATTERN), spoilt: blocks(SPOILT), wrong: None }
    }

    /// Checks a buffer in which `len` bytes should have arrived, all of it, and spoils it for the next time.
    pub(crate) fn check(&mut self, buffer: &GpuBuf, len: u64) -> Result<()> {
        if len != buffer.len() && self.wrong.is_none() {
            self.wrong = Some(format!("{len} bytes arrived, and {} should have", buffer.len()));
        }
        if self.expected.is_empty() {
            return Ok(());
        }
        for (at, n) in pieces(buffer.len()) {
            buffer.copy_to_slice(at, &mut self.seen[..n])?;
            let (seen, expected) = (&self.seen[..n], &self.expected[..n]);
            if seen != expected && self.wrong.is_none() {
                let i = (0..n).find(|&i| seen[i] != expected[i]).unwrap_or(0);
                let at = at + i as u64;
                self.wrong = Some(format!("byte {at} is {:#04x} and should be {:#04x}", seen[i], expected[i]));
            }
            buffer.copy_from_slice(at, &self.spoilt[..n])?;
        }
        Ok(())
    }
}

/// Posts a write without waiting for its end; waits for that of the last one instead, which is there by now.
pub(crate) async fn post(mut write: WriteRemote, last: Option<WriteRemote>) -> Result<Option<WriteRemote>> {
    let over = poll_fn(|cx| Poll::Ready(Pin::new(&mut write).poll(cx))).await;
    if let Some(last) = last {
        last.await?;
    }
    match over {
        Poll::Ready(result) => result.map(|_| None),
        Poll::Pending => Ok(Some(write)),
    }
}

/// Keeps up to `window` operations in flight, numbered within the window; `start` makes one, `done` is called in order with what each
/// came to, and both work on `state`. Nothing is allocated while it runs.
pub(crate) async fn pipeline<S, F, T>(
    state: &mut S,
    count: u64,
    window: u64,
    mut start: impl FnMut(&mut S, usize) -> F,
    mut done: impl FnMut(&mut S, usize, T) -> Result<()>,
) -> Result<()>
where
    F: Future<Output = Result<T>>,
{
    enum Slot<T> {
        Flying,
        /// Over at once. It keeps its place, since buffers are reused in order.
        Over(T),
    }
    let window = window.min(count).max(1);
    let mut ops: Vec<Pin<Box<Option<F>>>> = (0..window).map(|_| Box::pin(None)).collect();
    let mut slots: Vec<Option<Slot<T>>> = (0..window).map(|_| None).collect();
    let mut started = 0;
    for finished in 0..count {
        while started < count && started - finished < window {
            let at = (started % window) as usize;
            started += 1;
            ops[at].set(Some(start(state, at)));
            let op = &mut ops[at];
            // Posted now, not when its turn comes to be waited for.
            let first = poll_fn(|cx| Poll::Ready(op.as_mut().as_pin_mut().map(|op| op.poll(cx)))).await;
            slots[at] = Some(match first {
                Some(Poll::Ready(result)) => Slot::Over(result?),
                _ => Slot::Flying,
            });
        }
        let at = (finished % window) as usize;
        let value = match (slots[at].take(), ops[at].as_mut().as_pin_mut()) {
            (Some(Slot::Over(value)), _) => value,
            (_, Some(op)) => op.await?,
            (_, None) => return Err(Error::Closed),
        };
        ops[at].set(None);
        done(state, at, value)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An operation that is over after so many polls.
    fn after(mut polls: u64, value: u64) -> impl Future<Output = Result<u64>> {
        poll_fn(move |cx| {
            if polls == 0 {
                return Poll::Ready(Ok(value));
            }
            polls -= 1;
            cx.waker().wake_by_ref();
            Poll::Pending
        })
    }

    #[derive(Default)]
    struct State {
        flying: u64,
        most: u64,
        started: u64,
        order: Vec<u64>,
    }

    #[tokio::test]
    async fn the_window_is_kept_and_the_order_too() {
        for (count, window) in [(0, 4), (1, 4), (3, 1), (10, 4), (64, 64), (100, 7)] {
            let mut state = State::default();
            let start = |state: &mut State, _: usize| {
                state.flying += 1;
                state.most = state.most.max(state.flying);
                state.started += 1;
                after(state.started % 3, state.started - 1)
            };
            let done = |state: &mut State, at: usize, n: u64| {
                assert_eq!(at as u64, n % window.min(count));
                state.flying -= 1;
                state.order.push(n);
                Ok(())
            };
            pipeline(&mut state, count, window, start, done).await.unwrap();
            assert_eq!(state.order, (0..count).collect::<Vec<_>>());
            assert_eq!(state.most, window.min(count));
        }
    }

    #[tokio::test]
    async fn a_wrong_byte_is_found_wherever_it_is() {
        let context = Context::new().unwrap();
        let buffer = context.alloc("host", 200_000).unwrap();
        for at in [0, 65_535, 65_536, 199_999] {
            fill(&buffer, PATTERN).unwrap();
            let mut checker = Checker::new(true);
            checker.check(&buffer, 200_000).unwrap();
            assert_eq!(checker.wrong, None);
            // What was there is no longer good.
            checker.check(&buffer, 200_000).unwrap();
            assert!(checker.wrong.is_some());
            fill(&buffer, PATTERN).unwrap();
            let mut byte = [0];
            buffer.copy_to_slice(at, &mut byte).unwrap();
            buffer.copy_from_slice(at, &[byte[0] ^ 1]).unwrap();
            let mut checker = Checker::new(true);
            checker.check(&buffer, 200_000).unwrap();
            assert!(
                checker.wrong.as_deref().is_some_and(|wrong| wrong.starts_with(&format!("byte {at} "))),
                "{:?}",
                checker.wrong
            );
        }
        let mut checker = Checker::new(false);
        checker.check(&buffer, 7).unwrap();
        assert!(checker.wrong.is_some(), "the length is checked in any case");
    }
}
