//! The loops that are measured, and what they work on.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

use gpusock::{Access, Context, Error, GpuBuf, GpuEndpoint, GpuSlice, MemKind, RemoteBuf, Result, WriteRemote};

use super::plan::{Plan, Test};

/// Tag of the notifications of ping-pong tests.
pub(crate) const NOTE: u64 = 1;

/// A side's buffers, their exposures and those of the peer.
pub(crate) struct Side {
    pub endpoint: GpuEndpoint,
    /// What is sent, written, and read by the peer.
    pub source: GpuBuf,
    /// Where incoming bytes land.
    pub inboxes: Vec<GpuBuf>,
    pub leases: Vec<RemoteBuf>,
    pub remote: Vec<RemoteBuf>,
}

impl Side {
    pub(crate) fn new(context: &Context, endpoint: GpuEndpoint, plan: &Plan, memory: MemKind, one_sided: bool) -> Result<Self> {
        let source = context.alloc(memory, plan.size)?;
        let inboxes = (0..plan.inboxes()).map(|_| context.alloc(memory, plan.size)).collect::<Result<Vec<_>>>()?;
        if plan.verify {
            fill(&source)?;
        }
        let mut side = Side { endpoint, source, inboxes, leases: Vec::new(), remote: Vec::new() };
        if one_sided {
            let exposed = if plan.test.reads() { &side.source } else { &side.inboxes[0] };
            side.leases = vec![side.endpoint.expose(exposed, Access::WRITE | Access::READ)?];
        }
        Ok(side)
    }

    pub(crate) fn descriptors(&self) -> Vec<Vec<u8>> {
        self.leases.iter().map(|lease| lease.to_bytes().to_vec()).collect()
    }

    pub(crate) fn set_remote(&mut self, plan: &Plan, descriptors: &[Vec<u8>]) -> Result<()> {
        self.remote = descriptors.iter().map(|bytes| RemoteBuf::from_bytes(bytes)).collect::<Result<_>>()?;
        let right = self.remote.len() == self.leases.len() && self.remote.iter().all(|r| r.len() == plan.size);
        if right { Ok(()) } else { Err(Error::InvalidArgument { what: "the peer exposed other buffers than agreed".into() }) }
    }
}

const PATTERN: usize = 1 << 16;

fn pattern() -> Vec<u8> {
    (0..PATTERN).map(|i| (i * 131 + (i >> 8) * 29 + 7) as u8).collect()
}

/// Fills a buffer with bytes of which no two neighbouring blocks are alike.
fn fill(buffer: &GpuBuf) -> Result<()> {
    let pattern = pattern();
    let mut at = 0;
    while at < buffer.len() {
        let n = (buffer.len() - at).min(PATTERN as u64);
        buffer.copy_from_slice(at, &pattern[..n as usize])?;
        at += n;
    }
    Ok(())
}

/// What is wrong with a buffer that should hold the pattern.
pub(crate) fn check(buffers: &[GpuBuf]) -> Result<Option<String>> {
    let pattern = pattern();
    let mut bytes = vec![0; PATTERN];
    for (which, buffer) in buffers.iter().enumerate() {
        let mut at = 0;
        while at < buffer.len() {
            let n = (buffer.len() - at).min(PATTERN as u64) as usize;
            buffer.copy_to_slice(at, &mut bytes[..n])?;
            if let Some(i) = (0..n).find(|&i| bytes[i] != pattern[i]) {
                return Ok(Some(format!(
                    "byte {} of buffer {which} is {:#x} and should be {:#x}",
                    at + i as u64,
                    bytes[i],
                    pattern[i]
                )));
            }
            at += n as u64;
        }
    }
    Ok(None)
}

/// What a ping-pong of writes moves, and where to.
pub(crate) fn write_lat(plan: &Plan, source: &GpuBuf, remote: &[RemoteBuf]) -> Result<(GpuSlice, RemoteBuf)> {
    let target = remote.first().ok_or(Error::Closed)?;
    if plan.test == Test::NotifyLat {
        Ok((source.slice(..0), target.slice(..0)?))
    } else {
        Ok((source.slice(..), target.clone()))
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

/// Keeps up to `window` operations in flight; each is made by `start` for the buffer that is free again. `done` is called after each.
pub(crate) async fn pipeline<F>(count: u64, window: u64, mut start: impl FnMut(usize) -> F, mut done: impl FnMut()) -> Result<()>
where
    F: Future<Output = Result<()>>,
{
    // One that is over at once keeps its place, since buffers are reused in order.
    let mut flying: VecDeque<Option<Pin<Box<F>>>> = VecDeque::with_capacity(window as usize);
    let mut started = 0;
    for _ in 0..count {
        while started < count && (flying.len() as u64) < window {
            let mut op = Box::pin(start((started % window) as usize));
            started += 1;
            // Posted now, not when its turn comes to be waited for.
            match poll_fn(|cx| Poll::Ready(op.as_mut().poll(cx))).await {
                Poll::Ready(result) => {
                    result?;
                    flying.push_back(None);
                }
                Poll::Pending => flying.push_back(Some(op)),
            }
        }
        if let Some(Some(op)) = flying.pop_front() {
            op.await?;
        }
        done();
    }
    Ok(())
}
