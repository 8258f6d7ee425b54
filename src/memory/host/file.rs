//! Memory files, which other processes can map.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError, Weak};

/// Told when a memory file that it has handed out is no longer this process's.
pub(crate) trait FileUser: Send + Sync {
    fn freed(&self, name: u64);
}

/// A memory file of which the descriptor is kept.
pub(crate) struct MemoryFile {
    descriptor: OwnedFd,
    /// Different from that of any other file of this process, ever.
    name: u64,
    users: Mutex<Vec<Weak<dyn FileUser>>>,
}

static NAMES: AtomicU64 = AtomicU64::new(1);
static KEPT: AtomicUsize = AtomicUsize::new(0);

impl MemoryFile {
    /// Keeps the descriptor, unless so many are kept that the process may need theirs for other things: a quarter of its limit. Without it the
    /// mapping keeps the file, and other processes get copies of its bytes.
    pub(super) fn keep(descriptor: OwnedFd) -> Option<Self> {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX) / 4;
        if KEPT.fetch_add(1, Ordering::Relaxed) as u64 >= limit {
            KEPT.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(MemoryFile { descriptor, name: NAMES.fetch_add(1, Ordering::Relaxed), users: Mutex::default() })
    }

    pub(crate) fn name(&self) -> u64 {
        self.name
    }

    pub(crate) fn add_user(&self, user: Weak<dyn FileUser>) {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        users.retain(|user| user.strong_count() > 0);
        users.push(user);
    }
}

impl AsFd for MemoryFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        KEPT.fetch_sub(1, Ordering::Relaxed);
        let users = std::mem::take(self.users.get_mut().unwrap_or_else(PoisonError::into_inner));
        users.iter().filter_map(Weak::upgrade).for_each(|user| user.freed(self.name));
    }
}
