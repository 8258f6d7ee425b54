//! Which way the bytes of an operation take, and how they are cut for it.

use std::sync::atomic::Ordering;

use super::conn::Conn;
use crate::error::{Error, Result};
use crate::memory::MemKind;
use crate::memory::cuda::staging::FRAME;
use crate::path::{self, Link, PathKind};
use crate::proto::{Limits, Shape};
use crate::wire::frame::PAYLOAD_MAX;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Route {
    pub kind: PathKind,
    pub shape: Shape,
    /// The GPU of this process that copies.
    pub gpu: Option<u32>,
    /// All bytes pass through memory that is neither their source nor their destination.
    pub staged: bool,
}

fn ordinal(kind: MemKind) -> Option<u32> {
    match kind {
        MemKind::Host => None,
        MemKind::Cuda(ordinal) => Some(ordinal),
    }
}

/// How transfers from memory of this kind are cut.
fn shape(link: Link, limits: &Limits, local: MemKind, staged: bool) -> Shape {
    match (link, local) {
        (_, MemKind::Host) if !staged => limits.shape(),
        // The copies of a device end later, and the sender's memory is needed until then: so nothing leaves unasked. One copy for each
        // transfer, whatever its length.
        (Link::Inproc, MemKind::Cuda(_)) => Shape { eager_max: None, segment: PAYLOAD_MAX },
        (Link::Inproc, MemKind::Host) => limits.shape(),
        (Link::Shm | Link::Tcp, _) => Shape { eager_max: Some(limits.eager_max.min(FRAME)), segment: limits.segment.min(FRAME) },
    }
}

impl Conn {
    /// The path between two memories, if the policy allows it.
    pub(crate) fn allowed(&self, local: MemKind, remote: MemKind) -> Result<PathKind> {
        let policy = &self.info.policy;
        let kind = path::kind_of(self.info.link, local, remote);
        if !policy.allows(kind) {
            let why = path::choose(&self.info.facts, policy, local, remote);
            return Err(why
                .err()
                .unwrap_or_else(|| Error::NoPath { rejected: format!("{kind}: not allowed by the path policy") }));
        }
        self.warn_of_staging(kind, local, remote);
        Ok(kind)
    }

    /// The route between two memories of which both are known.
    pub(crate) fn route(&self, limits: &Limits, local: MemKind, remote: MemKind) -> Result<Route> {
        let link = self.info.link;
        let kind = self.allowed(local, remote)?;
        let mixed = (local == MemKind::Host) != (remote == MemKind::Host);
        let staged = kind.is_staged() || (link == Link::Inproc && mixed);
        let gpu = ordinal(local).or(ordinal(remote).filter(|_| link == Link::Inproc));
        Ok(Route { kind, shape: shape(link, limits, local, staged), gpu, staged })
    }

    /// The route of a message or an exposure, of which only this side's memory is known.
    pub(crate) fn route_of(&self, limits: &Limits, local: MemKind) -> Result<Route> {
        let (link, policy) = (self.info.link, &self.info.policy);
        let remote = match (link, local) {
            // What is in the other memory shows when the bytes move.
            (Link::Inproc, MemKind::Cuda(_)) if policy.allows(PathKind::Inproc) => local,
            (Link::Inproc, MemKind::Cuda(ordinal)) => MemKind::Cuda(ordinal ^ 1),
            _ => MemKind::Host,
        };
        self.route(limits, local, remote).map(|route| Route { kind: path::kind_of(link, local, local), ..route })
    }

    /// For what moves no bytes of the user's.
    pub(crate) fn no_route(&self, limits: &Limits) -> Route {
        Route { kind: self.info.kind, shape: limits.shape(), gpu: None, staged: false }
    }

    /// Once for each connection: what a user of GPUs may not expect.
    fn warn_of_staging(&self, kind: PathKind, local: MemKind, remote: MemKind) {
        if kind.is_staged() && !self.staging_warned.swap(true, Ordering::Relaxed) {
            let report = path::choose(&self.info.facts, &self.info.policy, local, remote);
            let rejected = report.map_or_else(|error| error.to_string(), |report| report.rejected());
            tracing::warn!(peer = %self.info.peer, path = %kind, %rejected, "the bytes of GPU memory go through host memory");
        }
    }
}
