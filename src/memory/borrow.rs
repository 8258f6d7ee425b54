//! The borrow state of a buffer: one atomic word that turns an overlap into [`Error::Busy`] instead of a data race.

#[cfg(gpusock_loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(gpusock_loom))]
use std::sync::atomic::{AtomicU64, Ordering};

use std::sync::Arc;

use crate::error::{Error, Result};

/// Counts, packed into one word.
///
/// | bits | who |
/// | --- | --- |
/// | 0..20 | operations that read it |
/// | 20..32 | `map()` guards |
/// | 32 | an operation that writes it |
/// | 33 | a `map_mut()` guard |
/// | 34..48 | exposures for reading |
/// | 48..62 | exposures for writing |
#[derive(Debug)]
pub(crate) struct BorrowState(AtomicU64);

impl Default for BorrowState {
    fn default() -> Self {
        BorrowState(AtomicU64::new(0))
    }
}

/// A way of using a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    Read,
    Map,
    Write,
    MapMut,
    ExposeRead,
    ExposeWrite,
    /// A copy by the CPU, which may overlap with exposures.
    CopyIn,
}

const READERS: u64 = (1 << 20) - 1;
const MAPS: u64 = ((1 << 12) - 1) << 20;
const WRITER: u64 = 1 << 32;
const MAP_MUT: u64 = 1 << 33;
const EXPOSED_READ: u64 = ((1 << 14) - 1) << 34;
const EXPOSED_WRITE: u64 = ((1 << 14) - 1) << 48;

impl Use {
    /// What it adds, the field that it counts in, and what must not be there, in the order in which it is complained about.
    fn rule(self) -> (u64, u64, u64) {
        match self {
            Use::Read => (1, READERS, WRITER | MAP_MUT),
            Use::Map => (1 << 20, MAPS, WRITER | MAP_MUT | EXPOSED_WRITE),
            Use::Write => (WRITER, WRITER, READERS | MAPS | WRITER | MAP_MUT | EXPOSED_WRITE),
            Use::MapMut => (MAP_MUT, MAP_MUT, u64::MAX),
            Use::ExposeRead => (1 << 34, EXPOSED_READ, WRITER | MAP_MUT),
            Use::ExposeWrite => (1 << 48, EXPOSED_WRITE, MAPS | WRITER | MAP_MUT),
            Use::CopyIn => (WRITER, WRITER, READERS | MAPS | WRITER | MAP_MUT),
        }
    }
}

fn complaint(state: u64) -> &'static str {
    match state {
        s if s & MAP_MUT != 0 => "it is mapped for writing",
        s if s & WRITER != 0 => "an operation is writing it (a receive that was dropped after its match keeps its buffer)",
        s if s & EXPOSED_WRITE != 0 => "it is exposed for writing; use copy_to_slice, or drop the RemoteBuf",
        s if s & MAPS != 0 => "it is mapped for reading",
        s if s & EXPOSED_READ != 0 => "it is exposed for reading; use copy_from_slice, or drop the RemoteBuf",
        _ => "an operation is reading it",
    }
}

impl BorrowState {
    pub(crate) fn try_begin(&self, what: Use) -> Result<()> {
        let (one, field, excluded) = what.rule();
        let mut state = self.0.load(Ordering::Relaxed);
        loop {
            if state & excluded != 0 {
                return Err(Error::Busy { what: complaint(state & excluded) });
            }
            if state & field == field {
                return Err(Error::Busy { what: "too many uses at once" });
            }
            match self.0.compare_exchange_weak(state, state + one, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(now) => state = now,
            }
        }
    }

    fn end(&self, what: Use) {
        self.0.fetch_sub(what.rule().0, Ordering::Release);
    }

    #[cfg(test)]
    fn is_free(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }
}

/// A share of a buffer, given back when it is dropped.
#[derive(Debug)]
pub(crate) struct BorrowGuard {
    state: Arc<BorrowState>,
    what: Use,
}

impl BorrowGuard {
    pub(crate) fn new(state: &Arc<BorrowState>, what: Use) -> Result<Self> {
        state.try_begin(what)?;
        Ok(BorrowGuard { state: Arc::clone(state), what })
    }
}

impl Drop for BorrowGuard {
    fn drop(&mut self) {
        self.state.end(self.what);
    }
}

/// Whether nothing uses the buffer.
#[cfg(test)]
fn is_free(state: &BorrowState) -> bool {
    state.is_free()
}

#[cfg(all(test, not(gpusock_loom)))]
mod tests {
    use super::*;

    const ALL: [Use; 7] = [Use::Read, Use::Map, Use::Write, Use::MapMut, Use::ExposeRead, Use::ExposeWrite, Use::CopyIn];

    /// Rows: what is there; columns in the order of `ALL`: whether it may be added.
    #[test]
    fn what_goes_with_what() {
        let table = [
            (Use::Read, [true, true, false, false, true, true, false]),
            (Use::Map, [true, true, false, false, true, false, false]),
            (Use::Write, [false; 7]),
            (Use::MapMut, [false; 7]),
            (Use::ExposeRead, [true, true, true, false, true, true, true]),
            (Use::ExposeWrite, [true, false, false, false, true, true, true]),
            (Use::CopyIn, [false; 7]),
        ];
        for (there, allowed) in table {
            let state = Arc::new(BorrowState::default());
            let first = BorrowGuard::new(&state, there).unwrap();
            for (what, allowed) in ALL.into_iter().zip(allowed) {
                assert_eq!(BorrowGuard::new(&state, what).is_ok(), allowed, "{what:?} beside {there:?}");
            }
            drop(first);
            assert!(is_free(&state), "{there:?} left something behind");
        }
    }

    #[test]
    fn threads_never_share_a_writer() {
        let state = Arc::new(BorrowState::default());
        let shared = Arc::new(std::sync::atomic::AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..10_000 {
                        if let Ok(_guard) = BorrowGuard::new(&state, Use::Write) {
                            assert_eq!(shared.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                            shared.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                        }
                    }
                });
            }
        });
        assert!(is_free(&state));
    }
}

#[cfg(all(test, gpusock_loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;

    /// A writer excludes a reader, and what it wrote is seen by the next one.
    #[test]
    fn a_writer_is_alone() {
        loom::model(|| {
            let state = Arc::new(BorrowState::default());
            let cell = Arc::new(UnsafeCell::new(0));
            let other = {
                let (state, cell) = (Arc::clone(&state), Arc::clone(&cell));
                loom::thread::spawn(move || {
                    if let Ok(_guard) = BorrowGuard::new(&state, Use::Write) {
                        // SAFETY: loom checks that nobody else is at it.
                        cell.with_mut(|p| unsafe { *p = 1 });
                    }
                })
            };
            if let Ok(_guard) = BorrowGuard::new(&state, Use::Read) {
                // SAFETY: as above.
                cell.with(|p| unsafe { assert!(*p <= 1) });
            }
            other.join().unwrap();
            assert!(is_free(&state));
        });
    }
}
