//! Buffers for messages that arrived before a receive was posted. Their total is bounded by the credit granted to the peer.

/// Names a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct BufId(u32);

/// Buffers by number, with a few free ones kept so that a steady flow allocates nothing.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    slots: Vec<Vec<u8>>,
    vacant: Vec<u32>,
    spare: Vec<Vec<u8>>,
    spare_bytes: usize,
}

/// What idle buffers may hold, in bytes, for one endpoint.
const SPARE_MAX: usize = 32 << 10;
/// Sizes are rounded up to this, so that small buffers serve each other's messages.
const GRAIN: usize = 256;

impl Buffers {
    /// A buffer of at least `len` bytes. The caller has checked `len` against the credit.
    pub(crate) fn take(&mut self, len: usize) -> BufId {
        let size = len.div_ceil(GRAIN) * GRAIN;
        let bytes = match self.spare.iter().position(|b| b.len() >= size) {
            Some(i) => {
                let bytes = self.spare.swap_remove(i);
                self.spare_bytes -= bytes.len();
                bytes
            }
            None => vec![0; size],
        };
        match self.vacant.pop() {
            Some(i) => {
                self.slots[i as usize] = bytes;
                BufId(i)
            }
            None => {
                self.slots.push(bytes);
                BufId((self.slots.len() - 1) as u32)
            }
        }
    }

    /// The whole buffer, which may be longer than what was asked for.
    pub(crate) fn get_mut(&mut self, id: BufId) -> &mut [u8] {
        self.slots.get_mut(id.0 as usize).map_or(&mut [], Vec::as_mut_slice)
    }

    pub(crate) fn get(&self, id: BufId) -> &[u8] {
        self.slots.get(id.0 as usize).map_or(&[], Vec::as_slice)
    }

    /// Releases a buffer, and hands its bytes out.
    pub(crate) fn detach(&mut self, id: BufId) -> Vec<u8> {
        let bytes = self.slots.get_mut(id.0 as usize).map(std::mem::take);
        if bytes.is_some() {
            self.vacant.push(id.0);
        }
        bytes.unwrap_or_default()
    }

    /// Gives a buffer back. Each is released exactly once.
    pub(crate) fn release(&mut self, id: BufId) {
        let Some(slot) = self.slots.get_mut(id.0 as usize) else { return };
        let bytes = std::mem::take(slot);
        self.vacant.push(id.0);
        if bytes.len() + self.spare_bytes <= SPARE_MAX {
            self.spare_bytes += bytes.len();
            self.spare.push(bytes);
        }
    }

    /// Buffers in use.
    #[cfg(test)]
    pub(crate) fn in_use(&self) -> usize {
        self.slots.len() - self.vacant.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reuses_and_bounds() {
        let mut buffers = Buffers::default();
        let a = buffers.take(10);
        let b = buffers.take(SPARE_MAX + 1);
        assert!(buffers.get(a).len() >= 10 && buffers.get(b).len() > SPARE_MAX);
        buffers.get_mut(a)[..3].copy_from_slice(b"abc");
        assert_eq!(&buffers.get(a)[..3], b"abc");
        buffers.release(b);
        assert_eq!(buffers.spare_bytes, 0, "a large buffer is not kept");
        buffers.release(a);
        assert_eq!((buffers.in_use(), buffers.spare.len()), (0, 1));
        let c = buffers.take(1);
        assert_eq!((buffers.in_use(), buffers.spare.len()), (1, 0));
        buffers.release(c);
    }
}
