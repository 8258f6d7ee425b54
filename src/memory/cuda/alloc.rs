//! Device memory that can be shared: VMM allocations with a file descriptor, cut into pieces where a buffer is small.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::{Arc, Mutex, Weak};

use super::Device;
use super::driver::{AccessDesc, AllocationProp, DevicePtr, Driver, Location, Table, attribute, code};
use crate::error::{Error, Result};
use crate::reactor::lock;

/// Buffers up to this size share an allocation; a granule of the driver's (2 MiB) each would waste the device.
const SMALL: u64 = 8 << 20;
/// What such an allocation has, in bytes.
const BLOCK: u64 = 32 << 20;
/// The alignment of pieces, in bytes: what `cuMemAlloc` gives.
const ALIGN: u64 = 512;

/// `CU_MEM_ALLOCATION_TYPE_PINNED`, `CU_MEM_LOCATION_TYPE_DEVICE`, `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`,
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const PINNED: c_int = 1;
const ON_DEVICE: c_int = 1;
const POSIX_FD: c_int = 1;
const READ_WRITE: c_int = 3;

pub(crate) struct Allocator {
    /// The driver's granule for VMM, or why there is none.
    granule: Result<u64, String>,
    rdma: bool,
    blocks: Mutex<Vec<Weak<Block>>>,
}

/// Memory of a device, given back when it is dropped.
#[derive(Debug)]
pub(crate) enum Piece {
    /// An allocation of its own.
    Whole(Mapping),
    /// A part of one.
    Part { block: Arc<Block>, offset: u64, len: u64 },
    /// By `cuMemAlloc`.
    Plain(Plain),
}

/// A VMM allocation, mapped.
pub(crate) struct Mapping {
    device: &'static Device,
    base: DevicePtr,
    size: u64,
    handle: u64,
}

pub(crate) struct Plain {
    device: &'static Device,
    base: DevicePtr,
}

/// An allocation that is shared by small buffers.
#[derive(Debug)]
pub(crate) struct Block {
    mapping: Mapping,
    /// Free ranges: offset and length.
    free: Mutex<BTreeMap<u64, u64>>,
}

impl std::fmt::Debug for Mapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mapping").field("device", &self.device.ordinal).field("size", &self.size).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Plain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plain").field("device", &self.device.ordinal).finish_non_exhaustive()
    }
}

struct Vmm {
    granularity: unsafe extern "C" fn(*mut usize, *const AllocationProp, c_int) -> u32,
    create: unsafe extern "C" fn(*mut u64, usize, *const AllocationProp, u64) -> u32,
    release: unsafe extern "C" fn(u64) -> u32,
    reserve: unsafe extern "C" fn(*mut DevicePtr, usize, usize, DevicePtr, u64) -> u32,
    unreserve: unsafe extern "C" fn(DevicePtr, usize) -> u32,
    map: unsafe extern "C" fn(DevicePtr, usize, usize, u64, u64) -> u32,
    unmap: unsafe extern "C" fn(DevicePtr, usize) -> u32,
    access: unsafe extern "C" fn(DevicePtr, usize, *const AccessDesc, usize) -> u32,
}

impl Vmm {
    fn of(table: &Table) -> Option<Self> {
        Some(Vmm {
            granularity: table.vmm_granularity?,
            create: table.vmm_create?,
            release: table.vmm_release?,
            reserve: table.vmm_reserve?,
            unreserve: table.vmm_unreserve?,
            map: table.vmm_map?,
            unmap: table.vmm_unmap?,
            access: table.vmm_access?,
        })
    }
}

fn prop(handle: c_int, rdma: bool) -> AllocationProp {
    AllocationProp {
        kind: PINNED,
        handle_types: POSIX_FD,
        location: Location { kind: ON_DEVICE, id: handle },
        win32: std::ptr::null_mut(),
        compression: 0,
        gpu_direct_rdma: rdma.into(),
        usage: 0,
        reserved: [0; 4],
    }
}

impl Allocator {
    pub(super) fn new(driver: &'static Driver, handle: c_int) -> Self {
        let ask = |which| {
            let mut value = 0;
            // SAFETY: writes to a valid place.
            let answer = unsafe { (driver.table.device_attribute)(&mut value, which, handle) };
            answer == code::SUCCESS && value != 0
        };
        let rdma = ask(attribute::RDMA) && ask(attribute::RDMA_WITH_VMM);
        let granule = if !ask(attribute::VIRTUAL_MEMORY) {
            Err("the device has no virtual memory management".to_owned())
        } else if !ask(attribute::POSIX_HANDLES) {
            Err("its allocations cannot be shared by a file descriptor".to_owned())
        } else {
            match Vmm::of(&driver.table) {
                None => Err("the driver has no virtual memory management".to_owned()),
                Some(vmm) => {
                    let mut granule = 0;
                    // SAFETY: reads and writes valid places; 0 asks for the smallest granule.
                    match unsafe { (vmm.granularity)(&mut granule, &prop(handle, rdma), 0) } {
                        code::SUCCESS if granule > 0 => Ok(granule as u64),
                        answer => Err(format!("cuMemGetAllocationGranularity: {}", driver.name_of(answer))),
                    }
                }
            }
        };
        Allocator { granule, rdma, blocks: Mutex::default() }
    }

    /// How memory is allocated, and why not better.
    pub(crate) fn describe(&self) -> String {
        match &self.granule {
            Ok(granule) => format!(
                "shareable by file descriptor, {}, {} KiB granules",
                if self.rdma { "GPUDirect RDMA capable" } else { "not GPUDirect RDMA capable" },
                granule >> 10
            ),
            Err(why) => format!("by cuMemAlloc: {why}"),
        }
    }
}

impl Device {
    /// Memory with whatever is in it.
    pub(crate) fn allocate(&'static self, len: u64) -> Result<Piece> {
        self.limbo.reap();
        match &self.allocator.granule {
            Err(_) => Ok(Piece::Plain(Plain::new(self, len)?)),
            Ok(granule) if len > SMALL => Ok(Piece::Whole(Mapping::new(self, len.div_ceil(*granule) * granule)?)),
            Ok(granule) => {
                let size = len.div_ceil(ALIGN) * ALIGN;
                let mut blocks = lock(&self.allocator.blocks);
                blocks.retain(|block| block.strong_count() > 0);
                for block in blocks.iter().filter_map(Weak::upgrade) {
                    if let Some(offset) = block.take(size) {
                        return Ok(Piece::Part { block, offset, len: size });
                    }
                }
                // Where the device has no room for a whole block, as much as is needed.
                let mapping = Mapping::new(self, BLOCK.div_ceil(*granule) * granule)
                    .or_else(|_| Mapping::new(self, size.div_ceil(*granule) * granule))?;
                let free = Mutex::new(BTreeMap::from([(0, mapping.size)]));
                let block = Arc::new(Block { mapping, free });
                blocks.push(Arc::downgrade(&block));
                let offset = block.take(size).unwrap_or(0);
                Ok(Piece::Part { block, offset, len: size })
            }
        }
    }

    fn out_of_memory(&self, answer: u32, len: u64, call: &str) -> Result<()> {
        if answer == code::OUT_OF_MEMORY {
            let what = format!(
                "cuda:{}: {len} bytes: {call}: CUDA_ERROR_OUT_OF_MEMORY (the device has {})",
                self.ordinal,
                self.memory()
            );
            return Err(Error::Cuda { what });
        }
        self.check(answer, call)
    }
}

impl Block {
    /// First fit.
    fn take(&self, size: u64) -> Option<u64> {
        let mut free = lock(&self.free);
        let (&offset, &len) = free.iter().find(|&(_, &len)| len >= size)?;
        free.remove(&offset);
        if len > size {
            free.insert(offset + size, len - size);
        }
        Some(offset)
    }

    fn give_back(&self, mut offset: u64, mut len: u64) {
        let mut free = lock(&self.free);
        if let Some((&before, &before_len)) = free.range(..offset).next_back() {
            if before + before_len == offset {
                free.remove(&before);
                offset = before;
                len += before_len;
            }
        }
        if let Some(after_len) = free.remove(&(offset + len)) {
            len += after_len;
        }
        free.insert(offset, len);
    }
}

impl Piece {
    pub(crate) fn address(&self) -> DevicePtr {
        match self {
            Piece::Whole(mapping) => mapping.base,
            Piece::Part { block, offset, .. } => block.mapping.base + offset,
            Piece::Plain(plain) => plain.base,
        }
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        if let Piece::Part { block, offset, len } = self {
            block.give_back(*offset, *len);
        }
    }
}

impl Mapping {
    fn new(device: &'static Device, size: u64) -> Result<Self> {
        let table = &device.driver.table;
        let vmm = Vmm::of(table).ok_or_else(|| Error::invalid("no virtual memory management"))?;
        let bytes = usize::try_from(size).map_err(|_| Error::invalid(format!("{size} bytes are more than an address has")))?;
        let _current = device.enter()?;
        let (mut handle, mut base) = (0, 0);
        let location = Location { kind: ON_DEVICE, id: device.handle };
        // SAFETY: each call reads and writes valid places, and gets what the one before made. What was made is taken back if a later one
        // fails.
        unsafe {
            let created = (vmm.create)(&mut handle, bytes, &prop(device.handle, device.allocator.rdma), 0);
            device.out_of_memory(created, size, "cuMemCreate")?;
            let reserved = device.check((vmm.reserve)(&mut base, bytes, 0, 0, 0), "cuMemAddressReserve");
            if let Err(error) = reserved {
                (vmm.release)(handle);
                return Err(error);
            }
            let mapped = device.check((vmm.map)(base, bytes, 0, handle, 0), "cuMemMap");
            if let Err(error) = mapped {
                (vmm.unreserve)(base, bytes);
                (vmm.release)(handle);
                return Err(error);
            }
            let mapping = Mapping { device, base, size, handle };
            let access = AccessDesc { location, flags: READ_WRITE };
            device.check((vmm.access)(base, bytes, &access, 1), "cuMemSetAccess")?;
            Ok(mapping)
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let Some(vmm) = Vmm::of(&self.device.driver.table) else { return };
        let Ok(_current) = self.device.enter() else { return };
        let size = self.size as usize;
        // SAFETY: made by `new`, and nothing uses it any more: regions wait for the device before they go.
        unsafe {
            (vmm.unmap)(self.base, size);
            (vmm.unreserve)(self.base, size);
            (vmm.release)(self.handle);
        }
    }
}

impl Plain {
    fn new(device: &'static Device, len: u64) -> Result<Self> {
        let bytes = usize::try_from(len).map_err(|_| Error::invalid(format!("{len} bytes are more than an address has")))?;
        let _current = device.enter()?;
        let mut base = 0;
        // SAFETY: writes to a valid place.
        let answer = unsafe { (device.driver.table.mem_alloc)(&mut base, bytes) };
        device.out_of_memory(answer, len, "cuMemAlloc")?;
        Ok(Plain { device, base })
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        let Ok(_current) = self.device.enter() else { return };
        // SAFETY: made by `new`, and nothing uses it any more.
        unsafe { (self.device.driver.table.mem_free)(self.base) };
    }
}
