//! Work of devices for a connection: copies on their way, and what follows when they are done.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::error::Error;
use crate::memory::cuda::staging::{Staging, Use};
use crate::memory::cuda::stream::{Ring, Ticket};
use crate::memory::cuda::{Stands, Transfer, Until, atomic};
use crate::memory::{Chunk, Region};
use crate::proto::{OpId, Token};
use crate::reactor::lock;
use crate::transport::ReadMark;
use crate::wire::frame::Status;

/// What a connection needs to work with devices.
pub(crate) struct Gpu {
    pub staging: Arc<Staging>,
    /// Has the driver look at the connection.
    pub ring: Ring,
}

/// What follows.
pub(crate) enum Then {
    /// A frame's payload has landed; the engine that lent it may be told. `staged` bytes of it passed through pinned memory.
    Landed { token: Token, read: Option<ReadMark>, op: Option<OpId>, staged: u64 },
    /// A receive has its message, which had been elsewhere: in the memory of `from`, for instance.
    Copied { op: OpId, from: Option<OpId>, staged: u64, result: Result<(), Error> },
    /// The answer to an atomic operation.
    Atomic { seq: u64, result: Result<u64, Status> },
}

pub(crate) struct Job {
    work: Work,
    /// `None` once it was handed out.
    then: Option<Then>,
}

enum Work {
    Transfer(Transfer),
    Atomic { word: Chunk, operand: u64, expected: Option<u64>, started: Option<(Ticket, Chunk)>, armed: bool },
}

impl Job {
    pub(crate) fn transfer(transfer: Transfer, then: Then) -> Self {
        Job { work: Work::Transfer(transfer), then: Some(then) }
    }

    /// An atomic operation of the peer's on eight bytes of device memory.
    pub(crate) fn atomic(word: Chunk, operand: u64, expected: Option<u64>, seq: u64) -> Self {
        let work = Work::Atomic { word, operand, expected, started: None, armed: false };
        Job { work, then: Some(Then::Atomic { seq, result: Err(Status::Failed) }) }
    }

    /// Whether it is done.
    fn poll(&mut self, gpu: &Gpu) -> Result<bool, Error> {
        match &mut self.work {
            Work::Transfer(transfer) => {
                let done = transfer.poll(&gpu.ring)? == Stands::Done;
                if let (true, Some(Then::Landed { staged, .. } | Then::Copied { staged, .. })) = (done, &mut self.then) {
                    *staged += transfer.staged;
                }
                Ok(done)
            }
            Work::Atomic { word, operand, expected, started, .. } => {
                let Some(Then::Atomic { result, .. }) = &mut self.then else { return Ok(true) };
                let (Some(device), Region::Cuda(region)) = (word.device(), word.region()) else { return Ok(true) };
                if started.is_none() {
                    let Some(former) = gpu.staging.take(device, Use::Incoming, 8, &gpu.ring)? else { return Ok(false) };
                    match atomic::start(region, word.offset(), *operand, *expected, &former) {
                        Ok(ticket) => *started = Some((ticket, former)),
                        Err(error) => {
                            device.usable()?;
                            tracing::warn!(%error, "an atomic operation on device memory was refused");
                            let misaligned = matches!(error, Error::InvalidArgument { .. });
                            *result = Err(if misaligned { Status::Misaligned } else { Status::Unsupported });
                            return Ok(true);
                        }
                    }
                }
                let Some((ticket, former)) = started else { return Ok(false) };
                if !ticket.poll()? {
                    return Ok(false);
                }
                let mut value = [0; 8];
                former.read_into(0, &mut value)?;
                *result = Ok(u64::from_le_bytes(value));
                *started = None;
                Ok(true)
            }
        }
    }

    fn arm(&mut self, ring: &Ring) -> Result<(), Error> {
        match &mut self.work {
            Work::Transfer(transfer) => transfer.arm(ring),
            Work::Atomic { started: Some((ticket, _)), armed, .. } if !*armed => {
                *armed = true;
                ticket.ring(ring)
            }
            Work::Atomic { .. } => Ok(()),
        }
    }

    /// Whether it needs neither the peer nor an engine.
    fn is_local(&self) -> bool {
        matches!(self.then, Some(Then::Copied { .. }))
    }

    fn writes_into(&self, name: u64) -> bool {
        match &self.then {
            Some(Then::Landed { token: Token::Write { exposure, .. }, .. }) => *exposure == name,
            _ => false,
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if let Work::Atomic { word, started, .. } = &mut self.work {
            if let (Some((ticket, former)), Some(device)) = (started.take(), word.device()) {
                device.limbo.keep(Until::Ticket(ticket), Box::new((word.clone(), former)));
            }
        }
    }
}

/// The jobs of a connection. Its lock is taken last of all, and no code of the user's runs under it.
#[derive(Default)]
pub(crate) struct Copies {
    jobs: Mutex<Vec<Job>>,
    /// How many there are, so that a connection without any pays one load a look.
    count: AtomicUsize,
    /// Some were never looked at, and so were not begun.
    fresh: AtomicBool,
    /// The connection is over: only what stays on this side goes on.
    ended: AtomicBool,
}

impl Copies {
    pub(crate) fn push(&self, job: Job) {
        let mut jobs = lock(&self.jobs);
        if self.ended.load(Ordering::SeqCst) && !job.is_local() {
            drop(jobs);
            return drop(job);
        }
        jobs.push(job);
        self.fresh.store(true, Ordering::Release);
        self.count.store(jobs.len(), Ordering::Release);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// Whether there are jobs that only a look begins.
    pub(crate) fn is_fresh(&self) -> bool {
        self.fresh.load(Ordering::Acquire)
    }

    /// Looks at all jobs, and hands out what follows those that are over.
    ///
    /// Waits for whoever else looks: that one may be past the job that has just rung, or be arming it, and would ring no second time.
    pub(crate) fn poll(&self, gpu: &Gpu, follow: &mut Vec<Then>) -> Result<(), Error> {
        let mut over = Vec::new();
        let mut failed = Ok(());
        let mut jobs = lock(&self.jobs);
        self.fresh.store(false, Ordering::Release);
        let mut i = 0;
        while i < jobs.len() {
            let ended = match jobs[i].poll(gpu) {
                Ok(ended) => ended,
                Err(error) => {
                    let local = match &mut jobs[i].then {
                        Some(Then::Copied { result, .. }) => {
                            *result = Err(error.clone());
                            true
                        }
                        _ => false,
                    };
                    failed = Err(error);
                    local
                }
            };
            if ended {
                // In order, since pieces of one transfer usually end in the order in which they began.
                let mut job = jobs.remove(i);
                follow.extend(job.then.take());
                over.push(job);
            } else {
                i += 1;
            }
        }
        self.count.store(jobs.len(), Ordering::Release);
        drop(jobs);
        // Outside of the lock: memory can be the user's, with a drop of its own.
        drop(over);
        failed
    }

    /// Has the ring called as jobs get done, and at once for those that were not begun.
    pub(crate) fn arm(&self, ring: &Ring) -> Result<(), Error> {
        let mut jobs = lock(&self.jobs);
        if self.is_fresh() {
            ring();
        }
        jobs.iter_mut().try_for_each(|job| job.arm(ring))
    }

    /// Whether something is still on its way into an exposure.
    pub(crate) fn writes_into(&self, name: u64) -> bool {
        lock(&self.jobs).iter().any(|job| job.writes_into(name))
    }

    /// Gives up what needs the peer. What devices have begun they finish, into memory that is kept for it.
    pub(crate) fn end(&self) {
        let mut jobs = lock(&self.jobs);
        self.ended.store(true, Ordering::SeqCst);
        let (local, other): (Vec<_>, Vec<_>) = std::mem::take(&mut *jobs).into_iter().partition(Job::is_local);
        self.count.store(local.len(), Ordering::Release);
        *jobs = local;
        drop(jobs);
        drop(other);
    }
}
