//! Copies between memory of this process and memory that is shared with the peer.

use super::memory::{Direction, Mapping, read_process};
use crate::error::{Error, Result};
use crate::memory::Chunk;
use crate::transport::tcp::rx::violation;

/// From a chunk into a record.
pub(super) fn into_ring(ring: &Direction, to: u64, chunk: &Chunk, at: u64, n: usize) -> Result<()> {
    let from = host(chunk, at, n)?;
    // SAFETY: `host` checked the range, which the chunk keeps; a record is shorter than a ring, which is mapped twice, and the record is this
    // side's to write. The two are different memory.
    unsafe { std::ptr::copy_nonoverlapping(from.cast_const(), ring.pointer(to), n) };
    Ok(())
}

/// From a record into a chunk.
pub(super) fn from_ring(ring: &Direction, from: u64, chunk: &Chunk, at: u64, n: usize) -> Result<()> {
    chunk.check_writable()?;
    let to = host(chunk, at, n)?;
    // SAFETY: as above, the other way round. A peer that goes on writing what it has published changes the bytes that are copied, no more.
    unsafe { std::ptr::copy_nonoverlapping(ring.pointer(from).cast_const(), to, n) };
    Ok(())
}

/// From memory of the peer's into a chunk. `None` if the peer's is not that long.
pub(super) fn from_peer(mapping: &Mapping, from: u64, chunk: &Chunk, at: u64, n: usize) -> Result<Option<()>> {
    chunk.check_writable()?;
    let to = host(chunk, at, n)?;
    let Some(from) = mapping.at(from, n) else { return Ok(None) };
    // SAFETY: both ranges were checked, and are kept by their owners during the call. They may be the same file, mapped twice, where a
    // process talks to itself, but an operation of this side has the bytes of `to` for itself, or they are exposed and may change anyhow;
    // their addresses are different mappings. The peer can change its bytes, not take them away: the file cannot shrink.
    unsafe { std::ptr::copy_nonoverlapping(from, to, n) };
    Ok(Some(()))
}

/// From an address in the peer's process into a chunk.
pub(super) fn from_process(peer: Option<rustix::process::Pid>, from: u64, chunk: &Chunk, n: usize) -> Result<()> {
    chunk.check_writable()?;
    let to = host(chunk, 0, n)?;
    let peer = peer.ok_or_else(|| violation(&"a payload in a process that cannot be reached"))?;
    // SAFETY: the range was checked, and the chunk keeps it.
    unsafe { read_process(peer, from, to, n) }.map_err(|errno| violation(&format!("its memory cannot be read: {errno}")))
}

/// The address of a range of a chunk, which the CPU can reach.
fn host(chunk: &Chunk, at: u64, n: usize) -> Result<*mut u8> {
    let whole = Error::OutOfBounds { offset: at, len: n as u64, size: chunk.len() };
    if at.checked_add(n as u64).is_none_or(|end| end > chunk.len()) {
        return Err(whole);
    }
    chunk.check_host()?;
    Ok(chunk.as_ptr().wrapping_add(at as usize))
}
