//! What may be given up only when the device is done with it.

use std::any::Any;
use std::sync::{Arc, Mutex};

use super::stream::{Event, Ticket};
use crate::reactor::lock;

type Kept = Box<dyn Any + Send>;

#[derive(Default)]
pub(crate) struct Limbo {
    waiting: Mutex<Vec<(Until, Kept)>>,
}

pub(crate) enum Until {
    Ticket(Ticket),
    Events(Vec<Arc<Event>>),
}

impl Until {
    fn is_over(&self) -> bool {
        match self {
            // A device that has failed touches nothing any more.
            Until::Ticket(ticket) => ticket.poll().unwrap_or(true),
            Until::Events(events) => events.iter().all(|event| event.is_reached()),
        }
    }
}

impl Limbo {
    /// Keeps `what` until then.
    pub(crate) fn keep(&self, until: Until, what: Kept) {
        self.reap();
        if !until.is_over() {
            lock(&self.waiting).push((until, what));
        }
    }

    /// Drops what is due.
    pub(crate) fn reap(&self) {
        let mut due = Vec::new();
        {
            let mut waiting = lock(&self.waiting);
            let mut i = 0;
            while i < waiting.len() {
                if waiting[i].0.is_over() {
                    due.push(waiting.swap_remove(i));
                } else {
                    i += 1;
                }
            }
        }
        // Outside of the lock: a drop can be code of the user's, or come back here.
        drop(due);
    }
}
