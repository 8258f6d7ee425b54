//! The order between a buffer and the streams of the user.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::stream::Event;
use crate::reactor::lock;

/// Which work of the user's has to be over before a range of memory may be touched.
#[derive(Debug, Default)]
pub(crate) struct Order {
    entries: Mutex<Vec<Entry>>,
    /// Whether there may be any, so that memory without them costs nothing.
    any: AtomicBool,
}

#[derive(Debug)]
struct Entry {
    start: u64,
    end: u64,
    event: Arc<Event>,
}

impl Order {
    pub(crate) fn add(&self, start: u64, len: u64, event: Event) {
        let mut entries = lock(&self.entries);
        entries.retain(|entry| !entry.event.is_reached());
        entries.push(Entry { start, end: start + len, event: Arc::new(event) });
        self.any.store(true, Ordering::Release);
    }

    /// What has to be waited for.
    pub(crate) fn before(&self, start: u64, len: u64) -> Vec<Arc<Event>> {
        if !self.any.load(Ordering::Acquire) {
            return Vec::new();
        }
        let mut entries = lock(&self.entries);
        entries.retain(|entry| !entry.event.is_reached());
        self.any.store(!entries.is_empty(), Ordering::Release);
        let overlaps = |entry: &&Entry| entry.start < start + len && start < entry.end;
        entries.iter().filter(overlaps).map(|entry| Arc::clone(&entry.event)).collect()
    }
}
