//! Operations and waiters by number. A number carries a generation, so that a late answer never meets the wrong operation.

use std::task::Waker;

/// Slots that are reused, most recently freed first: their memory is still in the cache.
#[derive(Debug)]
pub(crate) struct Slab<T> {
    slots: Vec<Slot<T>>,
    vacant: Vec<u32>,
}

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Slab { slots: Vec::new(), vacant: Vec::new() }
    }
}

impl<T> Slab<T> {
    pub(crate) fn insert(&mut self, value: T) -> u64 {
        let index = match self.vacant.pop() {
            Some(index) => index,
            None => {
                self.slots.push(Slot { generation: 0, value: None });
                (self.slots.len() - 1) as u32
            }
        };
        let slot = &mut self.slots[index as usize];
        slot.value = Some(value);
        u64::from(index) | u64::from(slot.generation) << 32
    }

    pub(crate) fn get(&self, id: u64) -> Option<&T> {
        self.slots.get(id as u32 as usize).filter(|s| s.generation == (id >> 32) as u32)?.value.as_ref()
    }

    pub(crate) fn get_mut(&mut self, id: u64) -> Option<&mut T> {
        self.slots.get_mut(id as u32 as usize).filter(|s| s.generation == (id >> 32) as u32)?.value.as_mut()
    }

    pub(crate) fn remove(&mut self, id: u64) -> Option<T> {
        let index = id as u32;
        let slot = self.slots.get_mut(index as usize).filter(|s| s.generation == (id >> 32) as u32)?;
        let value = slot.value.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        self.vacant.push(index);
        Some(value)
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.vacant.len()
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (u64, &mut T)> {
        self.slots.iter_mut().enumerate().filter_map(|(i, slot)| {
            let id = i as u64 | u64::from(slot.generation) << 32;
            slot.value.as_mut().map(|value| (id, value))
        })
    }
}

/// Wakers of futures that wait for the same thing. Each future keeps its number, and takes its waker away when it goes.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    wakers: Slab<Waker>,
}

impl Waiters {
    /// Leaves a waker, in place of the one that the future has left before. That one is handed back, to be dropped outside of a lock.
    pub(crate) fn wait(&mut self, place: &mut Option<u64>, waker: &Waker) -> Option<Waker> {
        if let Some(old) = place.and_then(|id| self.wakers.get_mut(id)) {
            return (!old.will_wake(waker)).then(|| std::mem::replace(old, waker.clone()));
        }
        *place = Some(self.wakers.insert(waker.clone()));
        None
    }

    pub(crate) fn leave(&mut self, place: Option<u64>) -> Option<Waker> {
        self.wakers.remove(place?)
    }

    /// All of them, to be woken outside of a lock.
    pub(crate) fn take(&mut self) -> Vec<Waker> {
        let ids: Vec<u64> = self.wakers.iter_mut().map(|(id, _)| id).collect();
        ids.into_iter().filter_map(|id| self.wakers.remove(id)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    #[test]
    fn a_stale_number_finds_nothing() {
        let mut slab = Slab::default();
        let a = slab.insert('a');
        assert_eq!(slab.remove(a), Some('a'));
        let b = slab.insert('b');
        assert_ne!(a, b);
        assert_eq!((slab.remove(a), slab.get(a), slab.get(b), slab.len()), (None, None, Some(&'b'), 1));
        assert_eq!(slab.get(u64::MAX), None);
    }

    #[test]
    fn waiters_that_go_leave_nothing_behind() {
        let mut waiters = Waiters::default();
        for _ in 0..1000 {
            let mut place = None;
            assert!(waiters.wait(&mut place, Waker::noop()).is_none());
            drop(waiters.wait(&mut place, Waker::noop()));
            assert_eq!(waiters.wakers.len(), 1, "the same future again");
            assert!(waiters.leave(place).is_some() && waiters.leave(place).is_none());
        }
        assert_eq!((waiters.wakers.len(), waiters.wakers.slots.len()), (0, 1));
        let mut places = [None; 3];
        places.iter_mut().for_each(|place| drop(waiters.wait(place, Waker::noop())));
        assert_eq!((waiters.take().len(), waiters.wakers.len()), (3, 0));
        assert!(waiters.leave(places[0]).is_none());
    }

    proptest! {
        #[test]
        fn behaves_like_a_map(steps in proptest::collection::vec((any::<bool>(), any::<u8>()), 0..200)) {
            let mut slab = Slab::default();
            let mut model = HashMap::new();
            let mut ids = Vec::new();
            for (insert, x) in steps {
                if insert || ids.is_empty() {
                    let id = slab.insert(x);
                    prop_assert!(model.insert(id, x).is_none(), "a live number was given twice");
                    ids.push(id);
                } else {
                    let id = ids[usize::from(x) % ids.len()];
                    prop_assert_eq!(slab.remove(id), model.remove(&id));
                }
                prop_assert_eq!(slab.len(), model.len());
                for id in &ids {
                    prop_assert_eq!(slab.get(*id), model.get(id));
                }
            }
        }
    }
}
