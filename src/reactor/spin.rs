//! How a wait is spent: spinning is fast and costs a core, sleeping is free and costs a wake-up.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::{Reactor, Source};
use crate::error::{Error, Result};

/// What a future does while it waits.
///
/// A wake-up from sleep costs tens of microseconds on a virtual machine, many times a message on loopback; so latency is won by not
/// sleeping, and power by sleeping soon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Spin {
    /// Spins for a bounded time (up to 50 µs a wait) while recent waits were short, in steps of a few microseconds between which
    /// other tasks run, then sleeps. An idle endpoint costs no CPU.
    #[default]
    Adaptive,
    /// Sleeps at once.
    Never,
    /// Spins without end, in the same small steps: for pinned latency work. The executor's thread is busy for as long as an operation
    /// waits.
    Always,
    /// One thread of the context's own spins over all its endpoints; futures only wait to be woken.
    Thread,
}

impl Spin {
    const NAMES: [(&'static str, Spin); 4] =
        [("adaptive", Spin::Adaptive), ("never", Spin::Never), ("always", Spin::Always), ("thread", Spin::Thread)];
}

impl fmt::Display for Spin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Spin::NAMES.iter().find(|(_, spin)| spin == self).map_or("?", |(name, _)| name))
    }
}

impl FromStr for Spin {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Spin::NAMES
            .iter()
            .find(|(n, _)| *n == name)
            .map(|&(_, spin)| spin)
            .ok_or_else(|| Error::invalid(format!("{name:?} is no spin policy; use adaptive, never, always or thread")))
    }
}

/// The longest that one wait spins under `Adaptive`. About what a wake-up from sleep costs: spinning longer than that can at best
/// halve the latency (the ski-rental bound).
const BUDGET: Duration = Duration::from_micros(50);
/// A wait up to this long, however it was spent, is worth spinning for the next time.
const SHORT: Duration = Duration::from_micros(150);
/// One `poll` spins no longer than this before it lets other tasks run. Measured over loopback, longer steps were slower, not faster: looks
/// without a pause contend with the kernel for the socket's lock.
const STEP: Duration = Duration::from_micros(4);
/// Looks at the socket between two looks at the clock.
const LOOKS: u32 = 4;

/// What an endpoint has learnt of its waits: a full budget, or none.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Learnt {
    /// Waits in a row that were long.
    long: u8,
}

impl Learnt {
    /// A wait took so long.
    pub(crate) fn observe(&mut self, waited: Duration) {
        self.long = if waited <= SHORT { 0 } else { self.long.saturating_add(1) };
    }

    /// Whether a wait goes to sleep without spinning.
    pub(crate) fn sleeps(self, policy: Spin) -> bool {
        match policy {
            Spin::Never => true,
            Spin::Adaptive => self.budget().is_zero(),
            Spin::Always | Spin::Thread => false,
        }
    }

    fn budget(self) -> Duration {
        // One long wait is forgiven; after a few, sleeping at once is right.
        match self.long {
            0 | 1 => BUDGET,
            2 | 3 => BUDGET / 4,
            _ => Duration::ZERO,
        }
    }
}

/// What to do next in a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Look again, now.
    Look,
    /// Let other tasks run, then look again.
    Yield,
    /// Arm and sleep.
    Sleep,
    /// Somebody else looks.
    Leave,
}

/// The spinning of one `poll`.
#[derive(Debug)]
pub(crate) struct Spinner {
    policy: Spin,
    deadline: Option<Instant>,
    until: Option<Instant>,
    looks: u32,
}

impl Spinner {
    /// `since` is when the wait began.
    pub(crate) fn new(policy: Spin, learnt: Learnt, since: Instant) -> Self {
        let deadline = match policy {
            Spin::Adaptive => Some(since + learnt.budget()),
            _ => None,
        };
        Spinner { policy, deadline, until: None, looks: 0 }
    }

    /// After a look that found nothing.
    pub(crate) fn step(&mut self) -> Step {
        match self.policy {
            Spin::Never => return Step::Sleep,
            Spin::Thread => return Step::Leave,
            Spin::Adaptive | Spin::Always => {}
        }
        self.looks += 1;
        if self.looks % LOOKS != 0 && self.until.is_some() {
            std::hint::spin_loop();
            return Step::Look;
        }
        let now = Instant::now();
        if self.deadline.is_some_and(|deadline| now >= deadline) {
            return Step::Sleep;
        }
        if now >= *self.until.get_or_insert(now + STEP) {
            return Step::Yield;
        }
        std::hint::spin_loop();
        Step::Look
    }
}

/// Runs until the reactor is gone.
pub(super) fn spawn(weak: Weak<Reactor>, core: Option<usize>) -> Result<std::thread::Thread> {
    let handle = std::thread::Builder::new()
        .name("gpusock-spin".into())
        .spawn(move || {
            if let Some(core) = core {
                let mut set = rustix::thread::CpuSet::new();
                set.set(core);
                if let Err(error) = rustix::thread::sched_setaffinity(None, &set) {
                    tracing::warn!(core, %error, "the spinning thread could not be pinned");
                }
            }
            spin(&weak);
        })
        .map_err(|e| Error::io("starting the spinning thread", e))?;
    Ok(handle.thread().clone())
}

fn spin(weak: &Weak<Reactor>) {
    let mut version = u64::MAX;
    let mut sources: Vec<Arc<dyn Source>> = Vec::new();
    while let Some(reactor) = weak.upgrade() {
        let now = reactor.version.load(Ordering::Acquire);
        if now != version {
            version = now;
            sources = reactor.all();
        }
        drop(reactor);
        if sources.is_empty() {
            // Woken when a source is added, and when the reactor goes.
            std::thread::park();
            continue;
        }
        for source in &sources {
            source.progress();
        }
        std::hint::spin_loop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive() {
        for (name, spin) in Spin::NAMES {
            assert_eq!(spin.to_string(), name);
            assert_eq!(name.parse::<Spin>().unwrap(), spin);
        }
        assert!("always!".parse::<Spin>().unwrap_err().to_string().contains("adaptive"));
    }

    #[test]
    fn long_waits_end_the_spinning_and_a_short_one_brings_it_back() {
        let mut learnt = Learnt::default();
        assert_eq!(learnt.budget(), BUDGET);
        for _ in 0..10 {
            learnt.observe(SHORT * 2);
        }
        assert_eq!(learnt.budget(), Duration::ZERO);
        let mut spinner = Spinner::new(Spin::Adaptive, learnt, Instant::now());
        assert_eq!(spinner.step(), Step::Sleep);
        learnt.observe(SHORT);
        assert_eq!(learnt.budget(), BUDGET);
    }

    #[test]
    fn always_yields_but_never_sleeps() {
        let mut spinner = Spinner::new(Spin::Always, Learnt::default(), Instant::now() - Duration::from_secs(1));
        let mut yields = 0;
        while yields == 0 {
            match spinner.step() {
                Step::Look => {}
                Step::Yield => yields += 1,
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(Spinner::new(Spin::Never, Learnt::default(), Instant::now()).step(), Step::Sleep);
        assert_eq!(Spinner::new(Spin::Thread, Learnt::default(), Instant::now()).step(), Step::Leave);
    }
}
