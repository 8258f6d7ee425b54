//! A piece of device memory.

use std::any::Any;
use std::sync::Arc;

use super::driver::{DevicePtr, pointer};
use super::limbo::Until;
use super::order::Order;
use super::stream::{Direction, Event};
use super::{Device, driver};
use crate::error::{Error, Result};

/// Memory of a device, freed when the last reference goes and the device is done with it.
pub(crate) struct CudaRegion {
    device: &'static Device,
    base: DevicePtr,
    len: u64,
    order: Order,
    /// For memory that is not ours: the driver's number for the allocation, which no other gets.
    buffer_id: Option<u64>,
    /// What is dropped to free it.
    owner: Option<Box<dyn Any + Send + Sync>>,
}

impl std::fmt::Debug for CudaRegion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaRegion").field("device", &self.device.ordinal).field("len", &self.len).finish_non_exhaustive()
    }
}

impl CudaRegion {
    /// Zeroed bytes.
    pub(crate) fn alloc(ordinal: u32, len: u64) -> Result<Self> {
        let device = driver_device(ordinal)?;
        let region = |base, owner| CudaRegion { device, base, len, order: Order::default(), buffer_id: None, owner };
        if len == 0 {
            return Ok(region(0, None));
        }
        let memory = device.memory();
        if len > memory {
            return Err(Error::invalid(format!("{len} bytes are more than cuda:{ordinal} has, {memory}")));
        }
        let piece = device.allocate(len)?;
        let base = piece.address();
        // SAFETY: the piece has this address and at least this length, and is waited for below.
        let zero = |table: &driver::Table, stream| unsafe {
            device.check((table.set_bytes)(base, 0, len as usize, stream), "cuMemsetD8Async")
        };
        device.submit(Direction::Within, &[], zero)?.wait()?;
        Ok(region(base, Some(Box::new(piece))))
    }

    /// Memory of the user's, which `owner` keeps.
    ///
    /// # Safety
    ///
    /// `base` and `len` are device memory that stays allocated while `owner` lives, and nothing else is freed by what `owner` does.
    pub(crate) unsafe fn of_user(base: DevicePtr, len: u64, owner: Box<dyn Any + Send + Sync>) -> Result<Self> {
        if len == 0 {
            let device = driver_device(0)?;
            return Ok(CudaRegion { device, base: 0, len, order: Order::default(), buffer_id: None, owner: Some(owner) });
        }
        let facts = Facts::ask(base)?;
        let device = driver_device(facts.ordinal)?;
        facts.check_range(base, len)?;
        if let Some(context) = facts.context.filter(|&context| context != device.context.addr()) {
            tracing::debug!(context, "memory of another context than the device's primary one");
        }
        Ok(CudaRegion { device, base, len, order: Order::default(), buffer_id: facts.buffer_id, owner: Some(owner) })
    }

    /// Whether memory of the user's is still what it was.
    pub(crate) fn verify(&self) -> Result<()> {
        self.device.usable()?;
        let Some(id) = self.buffer_id else { return Ok(()) };
        match Facts::ask(self.base) {
            Ok(facts) if facts.buffer_id == Some(id) => Ok(()),
            Ok(_) => Err(Error::Cuda {
                what: format!(
                    "cuda:{}: the memory that was registered has been freed, and its address is another allocation's",
                    self.device.ordinal
                ),
            }),
            Err(_) => Err(Error::Cuda {
                what: format!(
                    "cuda:{}: the memory that was registered has been freed, or its context was destroyed",
                    self.device.ordinal
                ),
            }),
        }
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    pub(crate) fn device(&self) -> &'static Device {
        self.device
    }

    pub(crate) fn at(&self, offset: u64) -> DevicePtr {
        self.base.wrapping_add(offset)
    }

    pub(crate) fn order(&self) -> &Order {
        &self.order
    }

    pub(crate) fn before(&self, offset: u64, len: u64) -> Vec<Arc<Event>> {
        self.order.before(offset, len)
    }
}

fn driver_device(ordinal: u32) -> Result<&'static Device> {
    super::device::device(ordinal)
}

impl Drop for CudaRegion {
    fn drop(&mut self) {
        let Some(owner) = self.owner.take() else { return };
        // Copies of ours keep the region; what may still be at it is the user's own work.
        let before = self.order.before(0, self.len);
        if before.is_empty() {
            drop(owner);
        } else {
            self.device.limbo.keep(Until::Events(before), owner);
        }
    }
}

/// What the driver knows of an address.
struct Facts {
    ordinal: u32,
    context: Option<usize>,
    buffer_id: Option<u64>,
    range: Option<(DevicePtr, u64)>,
}

impl Facts {
    fn ask(address: DevicePtr) -> Result<Self> {
        let driver = driver::driver().map_err(|why| Error::Unsupported { what: why.into() })?;
        let ask = |which| {
            let mut value = 0u64;
            // SAFETY: each attribute that is asked for writes at most eight bytes.
            let answer = unsafe { (driver.table.pointer_attribute)((&raw mut value).cast(), which, address) };
            (answer == driver::code::SUCCESS).then_some(value)
        };
        let kind = ask(pointer::MEMORY_TYPE).map(|value| value as u32);
        match kind {
            Some(pointer::DEVICE) => {}
            Some(_) => return Err(Error::invalid(format!("{address:#x} is host memory; register it as such"))),
            None => {
                return Err(Error::invalid(format!(
                    "{address:#x} is no memory that the CUDA driver knows; is it a host pointer?"
                )));
            }
        }
        let ordinal = ask(pointer::ORDINAL).map_or(0, |value| value as u32);
        let range = ask(pointer::RANGE_START).zip(ask(pointer::RANGE_SIZE));
        let context = ask(pointer::CONTEXT).map(|value| value as usize).filter(|&context| context != 0);
        Ok(Facts { ordinal, context, buffer_id: ask(pointer::BUFFER_ID), range })
    }

    /// A range that begins in one allocation must not leave what is mapped. Ranges of several VMM allocations, one behind another, are one.
    fn check_range(&self, base: DevicePtr, len: u64) -> Result<()> {
        let end = base.checked_add(len).ok_or_else(|| Error::invalid("the range does not fit the address space"))?;
        let mut at = base;
        let mut range = self.range;
        while let Some((start, size)) = range {
            let next = start.saturating_add(size);
            if next >= end {
                return Ok(());
            }
            if next <= at {
                break;
            }
            at = next;
            range = Facts::ask(at).ok().filter(|facts| facts.ordinal == self.ordinal).and_then(|facts| facts.range);
        }
        match self.range {
            // A driver that does not say.
            None => Ok(()),
            Some((start, size)) => Err(Error::OutOfBounds { offset: base - start.min(base), len, size }),
        }
    }
}
