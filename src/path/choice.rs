//! The choice, from facts.

use std::borrow::Cow;
use std::time::Duration;

use super::{Candidate, Cost, PathKind, PathPolicy, PathReport, Verdict};
use crate::error::{Error, Result};
use crate::memory::MemKind;

/// What is known of the two sides of a connection.
#[derive(Debug, Clone)]
pub(crate) struct Facts {
    pub peer: String,
    pub same_process: bool,
    pub same_host: bool,
    /// The peer's policy allows a direct copy within the process.
    pub peer_allows_inproc: bool,
    /// Round trip of the handshake.
    pub rtt: Option<Duration>,
    /// How the TCP connection is set up.
    pub tcp: String,
}

/// Judges all candidates for a pair of memories.
pub(crate) fn choose(facts: &Facts, policy: &PathPolicy, local: MemKind, remote: MemKind) -> Result<PathReport> {
    let gpu = local != MemKind::Host || remote != MemKind::Host;
    let mut chosen = false;
    let candidates = PathKind::ALL.into_iter().map(|kind| {
        let judged = if policy.allows(kind) { judge(kind, facts, gpu) } else { Err(policy.reason().into()) };
        let (verdict, reason) = match judged {
            Ok(reason) if chosen => (Verdict::Possible, reason),
            Ok(reason) => {
                chosen = true;
                (Verdict::Chosen, reason)
            }
            Err(reason) => (Verdict::Rejected, reason),
        };
        let measured = kind == PathKind::Tcp && verdict != Verdict::Rejected;
        let cost = facts.rtt.filter(|_| measured).map(|rtt| Cost { latency: rtt / 2 });
        Candidate { kind, verdict, reason, cost }
    });
    let candidates = candidates.collect();
    let report = PathReport { between: format!("{local} here, {remote} at {}", facts.peer), candidates };
    if report.chosen().is_none() {
        return Err(Error::NoPath { rejected: report.rejected() });
    }
    Ok(report)
}

/// Whether a kind works, with the reason either way.
fn judge(kind: PathKind, facts: &Facts, gpu: bool) -> Result<Cow<'static, str>, Cow<'static, str>> {
    const NO_GPU: Cow<'static, str> = Cow::Borrowed("neither memory is on a GPU");
    const NO_CUDA: Cow<'static, str> = Cow::Borrowed("this version of gpusock has no CUDA engine");
    const NO_VERBS: Cow<'static, str> = Cow::Borrowed("this version of gpusock has no verbs engine");
    match kind {
        PathKind::Inproc if gpu => Err(NO_CUDA),
        PathKind::Inproc if !facts.same_process => Err("the peer is another process".into()),
        PathKind::Inproc if !facts.peer_allows_inproc => Err("the peer does not allow it".into()),
        PathKind::Inproc => Ok("the peer is in this process: one copy".into()),
        PathKind::InprocPeer | PathKind::CudaIpc | PathKind::GpuDirectRdma | PathKind::RdmaStaged | PathKind::TcpStaged
            if !gpu =>
        {
            Err(NO_GPU)
        }
        PathKind::InprocPeer | PathKind::CudaIpc | PathKind::TcpStaged => Err(NO_CUDA),
        PathKind::Shm if gpu => Err("the memory is on a GPU".into()),
        PathKind::Shm if !facts.same_host => Err("the peer is on another host".into()),
        PathKind::Shm => Err("this version of gpusock has no shared-memory engine".into()),
        PathKind::GpuDirectRdma | PathKind::Rdma | PathKind::RdmaStaged => Err(NO_VERBS),
        PathKind::Tcp if gpu => Err("the memory is on a GPU".into()),
        PathKind::Tcp => Ok(facts.tcp.clone().into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> Facts {
        Facts {
            peer: "192.0.2.1:7700".into(),
            same_process: false,
            same_host: true,
            peer_allows_inproc: true,
            rtt: Some(Duration::from_micros(80)),
            tcp: "1 lane, cubic (system)".into(),
        }
    }

    fn host(facts: &Facts, policy: PathPolicy) -> Result<PathReport> {
        choose(facts, &policy, MemKind::Host, MemKind::Host)
    }

    #[test]
    fn every_path_has_a_verdict_and_a_reason() {
        let report = host(&facts(), PathPolicy::new()).unwrap();
        assert_eq!(report.chosen(), Some(PathKind::Tcp));
        assert_eq!(report.candidates().len(), PathKind::ALL.len());
        assert!(report.candidates().iter().all(|c| !c.reason.is_empty()));
        // Two processes of one host that end up on TCP: the report says why it is not shared memory.
        let shown = report.to_string();
        assert!(shown.contains("no shared-memory engine") && shown.contains("40.0 us"), "{shown}");
    }

    #[test]
    fn same_process_is_preferred_unless_either_side_forbids_it() {
        let here = Facts { same_process: true, ..facts() };
        assert_eq!(host(&here, PathPolicy::new()).unwrap().chosen(), Some(PathKind::Inproc));
        assert_eq!(host(&here, PathPolicy::new().forbid(PathKind::Inproc)).unwrap().chosen(), Some(PathKind::Tcp));
        let refused = Facts { peer_allows_inproc: false, ..here };
        assert_eq!(host(&refused, PathPolicy::new()).unwrap().chosen(), Some(PathKind::Tcp));
    }

    #[test]
    fn a_required_path_that_does_not_work_is_an_error_with_all_reasons() {
        let error = host(&facts(), PathPolicy::new().require(PathKind::GpuDirectRdma)).unwrap_err().to_string();
        assert!(error.contains("gpudirect-rdma: neither memory is on a GPU") && error.contains("tcp: not allowed"), "{error}");
    }

    #[test]
    fn gpu_memory_names_what_is_missing() {
        let error = choose(&facts(), &PathPolicy::new(), MemKind::Cuda(0), MemKind::Host).unwrap_err().to_string();
        assert!(error.contains("no CUDA engine"), "{error}");
    }
}
