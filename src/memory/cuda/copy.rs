//! Copies between pieces of memory of which at least one is on a device.

use super::driver::Table;
use super::stream::{Direction, Ticket, unsupported};
use super::{CudaRegion, Device};
use crate::error::Result;
use crate::memory::{Chunk, Region};

/// Starts to copy all of `from` to the beginning of `to`, behind what the user's streams still have to do with either. Host memory must be
/// pinned, or the call waits for it. Both must be kept until the ticket is done.
pub(crate) fn start(from: &Chunk, to: &Chunk) -> Result<Ticket> {
    let len = from.len();
    let to = to.narrow(0, len)?;
    let mut after = Vec::new();
    for chunk in [from, &to] {
        if let Region::Cuda(region) = chunk.region() {
            after.append(&mut region.before(chunk.offset(), len));
        }
    }
    let bytes = len as usize;
    match (from.region(), to.region()) {
        (Region::Cuda(source), Region::Cuda(target)) => {
            let (device, peer) = (source.device(), target.device());
            let (source, target) = (source.at(from.offset()), target.at(to.offset()));
            // SAFETY: both ranges were checked, and are kept until the ticket is done.
            device.submit(Direction::Within, &after, |table, stream| unsafe {
                if std::ptr::eq(device, peer) {
                    device.check((table.copy_on_device)(target, source, bytes, stream), "cuMemcpyDtoDAsync")
                } else {
                    device.reach(peer);
                    let answer = (table.copy_to_peer)(target, peer.context, source, device.context, bytes, stream);
                    device.check(answer, "cuMemcpyPeerAsync")
                }
            })
        }
        (Region::Host(_), Region::Cuda(target)) => {
            let (device, source, target) = (target.device(), from.as_ptr(), target.at(to.offset()));
            // SAFETY: as above.
            device.submit(Direction::ToDevice, &after, |table, stream| unsafe {
                device.check((table.copy_to_device)(target, source.cast(), bytes, stream), "cuMemcpyHtoDAsync")
            })
        }
        (Region::Cuda(source), Region::Host(_)) => {
            let (device, source, target) = (source.device(), source.at(from.offset()), to.as_ptr());
            // SAFETY: as above.
            device.submit(Direction::ToHost, &after, |table: &Table, stream| unsafe {
                device.check((table.copy_to_host)(target.cast(), source, bytes, stream), "cuMemcpyDtoHAsync")
            })
        }
        (Region::Host(_), Region::Host(_)) => Err(unsupported("a copy within host memory needs no device")),
    }
}

/// Copies out to memory of the caller's, and waits.
pub(crate) fn read_into(region: &CudaRegion, offset: u64, to: &mut [u8]) -> Result<()> {
    let (device, source, after) = (region.device(), region.at(offset), region.before(offset, to.len() as u64));
    // SAFETY: the caller has checked the range; the slice is borrowed until the ticket is done.
    let ticket = device.submit(Direction::ToHost, &after, |table, stream| unsafe {
        device.check((table.copy_to_host)(to.as_mut_ptr().cast(), source, to.len(), stream), "cuMemcpyDtoHAsync")
    })?;
    ticket.wait()
}

/// Copies in from memory of the caller's, and waits.
pub(crate) fn write_from(region: &CudaRegion, offset: u64, from: &[u8]) -> Result<()> {
    let (device, target, after) = (region.device(), region.at(offset), region.before(offset, from.len() as u64));
    // SAFETY: as in `read_into`.
    let ticket = device.submit(Direction::ToDevice, &after, |table, stream| unsafe {
        device.check((table.copy_to_device)(target, from.as_ptr().cast(), from.len(), stream), "cuMemcpyHtoDAsync")
    })?;
    ticket.wait()
}

/// The device on which a copy between the two is work.
pub(crate) fn device_of(from: &Chunk, to: &Chunk) -> Option<&'static Device> {
    from.device().or_else(|| to.device())
}
