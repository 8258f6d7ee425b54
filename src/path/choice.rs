//! The choice, from facts.

use std::borrow::Cow;
use std::time::Duration;

use super::{Candidate, Cost, PathKind, PathPolicy, PathReport, Verdict};
use crate::error::{Error, Result};
use crate::memory::MemKind;
use crate::memory::cuda;
use crate::memory::cuda::staging::Staging;

/// What carries the frames of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Link {
    /// A queue within the process.
    Inproc,
    /// Memory that two processes of one host share.
    Shm,
    Tcp,
}

/// What is known of the two sides of a connection.
#[derive(Debug, Clone)]
pub(crate) struct Facts {
    pub peer: String,
    pub same_process: bool,
    pub same_host: bool,
    /// The peer's policy allows a direct copy within the process.
    pub peer_allows_inproc: bool,
    /// The peer's policy allows shared memory.
    pub peer_allows_shm: bool,
    /// How shared memory came about, or why not, once it was tried.
    pub shm: Option<Result<String, String>>,
    /// Round trip of the handshake.
    pub rtt: Option<Duration>,
    /// How the TCP connection is set up.
    pub tcp: String,
    /// What was agreed on, once it was.
    pub link: Option<Link>,
}

/// Whether a side with this policy wants its frames to stay within the process where they can.
pub(crate) fn wants_inproc(policy: &PathPolicy) -> bool {
    let tcp = policy.allows(PathKind::Tcp) || policy.allows(PathKind::TcpStaged);
    policy.allows(PathKind::Inproc) || (policy.allows(PathKind::InprocPeer) && !tcp)
}

/// Whether a side with this policy wants shared memory with another process of its host.
pub(crate) fn wants_shm(policy: &PathPolicy) -> bool {
    let tcp = policy.allows(PathKind::Tcp) || policy.allows(PathKind::TcpStaged);
    policy.allows(PathKind::Shm) || (policy.allows(PathKind::ShmStaged) && !tcp)
}

/// What is to carry the frames.
pub(crate) fn link(facts: &Facts, policy: &PathPolicy) -> Result<Link> {
    if facts.same_process && facts.peer_allows_inproc && wants_inproc(policy) {
        return Ok(Link::Inproc);
    }
    if facts.same_host && facts.peer_allows_shm && wants_shm(policy) && !matches!(facts.shm, Some(Err(_))) {
        return Ok(Link::Shm);
    }
    if policy.allows(PathKind::Tcp) || policy.allows(PathKind::TcpStaged) {
        return Ok(Link::Tcp);
    }
    let rejected = judge_all(facts, policy, MemKind::Host, MemKind::Host).rejected();
    Err(Error::NoPath { rejected })
}

/// The path between two memories over a link, if nothing forbids it.
pub(crate) fn kind_of(link: Link, local: MemKind, remote: MemKind) -> PathKind {
    match (link, local, remote) {
        (Link::Inproc, MemKind::Cuda(a), MemKind::Cuda(b)) if a != b => PathKind::InprocPeer,
        (Link::Inproc, ..) => PathKind::Inproc,
        (Link::Shm, MemKind::Host, MemKind::Host) => PathKind::Shm,
        (Link::Shm, ..) => PathKind::ShmStaged,
        (Link::Tcp, MemKind::Host, MemKind::Host) => PathKind::Tcp,
        (Link::Tcp, ..) => PathKind::TcpStaged,
    }
}

/// Judges all candidates for a pair of memories.
pub(crate) fn choose(facts: &Facts, policy: &PathPolicy, local: MemKind, remote: MemKind) -> Result<PathReport> {
    let report = judge_all(facts, policy, local, remote);
    if report.chosen().is_none() {
        return Err(Error::NoPath { rejected: report.rejected() });
    }
    Ok(report)
}

fn judge_all(facts: &Facts, policy: &PathPolicy, local: MemKind, remote: MemKind) -> PathReport {
    let mut chosen = false;
    let candidates = PathKind::ALL.into_iter().map(|kind| {
        let judged = if policy.allows(kind) { judge(kind, facts, local, remote) } else { Err(policy.reason().into()) };
        let judged = judged.and_then(|reason| match facts.link {
            // A better path that works is taken; what another link would have to carry is none.
            Some(link) if !chosen && kind_of(link, local, remote) != kind => Err(off_link(link)),
            _ => Ok(reason),
        });
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
    PathReport { between: format!("{local} here, {remote} at {}", facts.peer), candidates: candidates.collect() }
}

fn off_link(link: Link) -> Cow<'static, str> {
    Cow::Borrowed(match link {
        Link::Inproc => "the frames of this endpoint stay within the process",
        Link::Shm => "the frames of this endpoint go through shared memory",
        Link::Tcp => "the frames of this endpoint go over TCP",
    })
}

type Judgement = Result<Cow<'static, str>, Cow<'static, str>>;

/// Whether a kind works, with the reason either way.
fn judge(kind: PathKind, facts: &Facts, local: MemKind, remote: MemKind) -> Judgement {
    const NO_GPU: Cow<'static, str> = Cow::Borrowed("neither memory is on a GPU");
    const ON_GPU: Cow<'static, str> = Cow::Borrowed("the memory is on a GPU");
    const NO_VERBS: Cow<'static, str> = Cow::Borrowed("this version of gpusock has no verbs engine");
    const OTHER_HOST: Cow<'static, str> = Cow::Borrowed("the peer is on another host");
    let gpu = local != MemKind::Host || remote != MemKind::Host;
    match kind {
        PathKind::Inproc | PathKind::InprocPeer => judge_inproc(kind, facts, local, remote),
        PathKind::CudaIpc | PathKind::ShmStaged | PathKind::GpuDirectRdma | PathKind::RdmaStaged | PathKind::TcpStaged
            if !gpu =>
        {
            Err(NO_GPU)
        }
        PathKind::Shm | PathKind::Rdma | PathKind::Tcp if gpu => Err(ON_GPU),
        PathKind::CudaIpc | PathKind::Shm | PathKind::ShmStaged if !facts.same_host => Err(OTHER_HOST),
        PathKind::CudaIpc => Err("this version of gpusock has no CUDA IPC engine".into()),
        PathKind::Shm => judge_shm(facts),
        PathKind::ShmStaged => judge_shm(facts).map(|how| format!("{how}; {}", Staging::describe()).into()),
        PathKind::GpuDirectRdma | PathKind::Rdma | PathKind::RdmaStaged => Err(NO_VERBS),
        PathKind::Tcp => Ok(facts.tcp.clone().into()),
        PathKind::TcpStaged => Ok(format!("{}; {}", facts.tcp, Staging::describe()).into()),
    }
}

fn judge_shm(facts: &Facts) -> Judgement {
    match &facts.shm {
        _ if !facts.peer_allows_shm => Err("the peer does not allow it".into()),
        Some(Ok(how)) => Ok(how.clone().into()),
        Some(Err(why)) => Err(why.clone().into()),
        None => Ok("the peer is on this host".into()),
    }
}

fn judge_inproc(kind: PathKind, facts: &Facts, local: MemKind, remote: MemKind) -> Judgement {
    match (kind, local, remote) {
        (PathKind::InprocPeer, MemKind::Host, MemKind::Host) => return Err("neither memory is on a GPU".into()),
        (PathKind::InprocPeer, MemKind::Host, _) | (PathKind::InprocPeer, _, MemKind::Host) => {
            return Err("one memory is the host's".into());
        }
        (PathKind::InprocPeer, a, b) if a == b => return Err("both memories are on one GPU".into()),
        (PathKind::Inproc, MemKind::Cuda(a), MemKind::Cuda(b)) if a != b => {
            return Err("the memories are on different GPUs".into());
        }
        _ => {}
    }
    if !facts.same_process {
        return Err("the peer is another process".into());
    }
    if !facts.peer_allows_inproc {
        return Err("the peer does not allow it".into());
    }
    Ok(match (local, remote) {
        (MemKind::Cuda(a), MemKind::Cuda(b)) if a != b => match (cuda::device(a), cuda::device(b)) {
            (Ok(a), Ok(b)) => cuda::topology::between(a, b).into(),
            (Err(error), _) | (_, Err(error)) => return Err(error.to_string().into()),
        },
        (MemKind::Cuda(_), MemKind::Cuda(_)) => "the peer is in this process: one copy on the GPU".into(),
        (MemKind::Host, MemKind::Host) => "the peer is in this process: one copy".into(),
        _ => "the peer is in this process: the GPU copies, through pinned host memory".into(),
    })
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
            peer_allows_shm: true,
            shm: Some(Err("they do not meet".into())),
            rtt: Some(Duration::from_micros(80)),
            tcp: "1 lane, cubic (system)".into(),
            link: None,
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
        assert!(shown.contains("they do not meet") && shown.contains("40.0 us"), "{shown}");
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
    fn gpu_memory_over_tcp_is_staged_and_says_so() {
        let over = |facts: &Facts, policy| choose(facts, &policy, MemKind::Cuda(0), MemKind::Host);
        let report = over(&facts(), PathPolicy::new()).unwrap();
        assert_eq!(report.chosen(), Some(PathKind::TcpStaged));
        let shown = report.to_string();
        assert!(shown.contains("no CUDA IPC engine") && shown.contains("pinned"), "{shown}");
        let error = over(&facts(), PathPolicy::new().forbid(PathKind::TcpStaged)).unwrap_err().to_string();
        assert!(error.contains("tcp-staged: not allowed") && error.contains("tcp: the memory is on a GPU"), "{error}");
    }

    #[test]
    fn within_a_process_the_gpus_decide() {
        let here = Facts { same_process: true, link: Some(Link::Inproc), ..facts() };
        let between = |local, remote, policy| choose(&here, &policy, local, remote);
        let same = between(MemKind::Cuda(0), MemKind::Cuda(0), PathPolicy::new()).unwrap();
        assert_eq!(same.chosen(), Some(PathKind::Inproc));
        let mixed = between(MemKind::Cuda(0), MemKind::Host, PathPolicy::new()).unwrap();
        assert_eq!(mixed.chosen(), Some(PathKind::Inproc));
        assert!(mixed.to_string().contains("through pinned host memory"));
        // The endpoint has one link; what only another one could carry is refused, with the reason.
        let error = between(MemKind::Cuda(0), MemKind::Host, PathPolicy::new().forbid(PathKind::Inproc)).unwrap_err().to_string();
        assert!(error.contains("tcp-staged: the frames of this endpoint stay within the process"), "{error}");
    }

    #[test]
    fn the_link_follows_both_policies() {
        let here = Facts { same_process: true, ..facts() };
        assert_eq!(link(&here, &PathPolicy::new()).unwrap(), Link::Inproc);
        assert_eq!(link(&here, &PathPolicy::new().forbid(PathKind::Inproc)).unwrap(), Link::Tcp);
        assert_eq!(link(&here, &PathPolicy::new().require(PathKind::InprocPeer)).unwrap(), Link::Inproc);
        assert_eq!(link(&here, &PathPolicy::new().require(PathKind::TcpStaged)).unwrap(), Link::Tcp);
        assert!(link(&here, &PathPolicy::new().require(PathKind::Shm)).is_err());
        let other = Facts { peer_allows_inproc: false, ..here };
        assert_eq!(link(&other, &PathPolicy::new()).unwrap(), Link::Tcp);
    }
}
