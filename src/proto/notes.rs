//! Notifications: counters by tag, and who waits for them.

use std::collections::{HashMap, VecDeque};

use super::{Event, OpId, Outcome, Violation};
use crate::error::Error;

/// Tags with notifications that nobody has asked for; more than this is a peer that floods.
const TAGS_MAX: usize = 1 << 16;
/// Idle counters that are kept for reuse.
const KEEP: usize = 64;

#[derive(Debug, Default)]
struct Note {
    count: u64,
    waiting: VecDeque<(OpId, u64)>,
}

#[derive(Debug, Default)]
pub(crate) struct Notes {
    tags: HashMap<u64, Note>,
}

impl Notes {
    /// A notification arrived.
    pub(crate) fn add(&mut self, tag: u64, n: u64, events: &mut VecDeque<Event>) -> Result<(), Violation> {
        if self.tags.len() >= TAGS_MAX && !self.tags.contains_key(&tag) {
            return Err(Violation::Rule("too many notification tags that nobody waits for"));
        }
        let note = self.tags.entry(tag).or_default();
        note.count = note.count.saturating_add(n);
        self.settle(tag, events);
        Ok(())
    }

    /// `op` waits for `n` notifications and takes them.
    pub(crate) fn wait(&mut self, op: OpId, tag: u64, n: u64, events: &mut VecDeque<Event>) {
        self.tags.entry(tag).or_default().waiting.push_back((op, n));
        self.settle(tag, events);
    }

    /// Waiters are served in the order in which they came.
    fn settle(&mut self, tag: u64, events: &mut VecDeque<Event>) {
        let kept = self.tags.len() <= KEEP;
        let Some(note) = self.tags.get_mut(&tag) else { return };
        while let Some(&(op, n)) = note.waiting.front() {
            if note.count < n {
                break;
            }
            note.count -= n;
            note.waiting.pop_front();
            events.push_back(Event::Done { op, result: Ok(Outcome { value: n, tag, ..Outcome::default() }) });
        }
        if !kept && note.count == 0 && note.waiting.is_empty() {
            self.tags.remove(&tag);
        }
    }

    /// The waiter is gone. `false` if it was not waiting.
    pub(crate) fn forget(&mut self, op: OpId, tag: u64, events: &mut VecDeque<Event>) -> bool {
        let Some(note) = self.tags.get_mut(&tag) else { return false };
        let before = note.waiting.len();
        note.waiting.retain(|&(o, _)| o != op);
        let found = note.waiting.len() != before;
        self.settle(tag, events);
        found
    }

    /// Gives a wait up, if it is one.
    pub(crate) fn cancel(&mut self, op: OpId, events: &mut VecDeque<Event>) {
        let tag = self.tags.iter().find(|(_, note)| note.waiting.iter().any(|&(o, _)| o == op)).map(|(&tag, _)| tag);
        if let Some(tag) = tag {
            self.forget(op, tag, events);
            events.push_back(Event::Done { op, result: Err(Error::Cancelled) });
        }
    }

    pub(crate) fn fail(&mut self, error: &Error, events: &mut VecDeque<Event>) {
        for note in self.tags.values_mut() {
            events.extend(note.waiting.drain(..).map(|(op, _)| Event::Done { op, result: Err(error.clone()) }));
        }
    }
}
