//! What the driver says of itself and of its devices, without opening any: that takes time and memory of the device.

use std::ffi::{CStr, c_char, c_int};

use super::driver::{Driver, Table, attribute, code, driver, show_version};
use crate::system::{Cuda, CudaDevice};

/// What there is, or why there is nothing.
pub(crate) fn describe() -> Cuda {
    match driver() {
        Ok(driver) => Cuda {
            driver: Some(show_version(driver.version)),
            problem: (driver.devices == 0).then(|| "the driver has no device".to_owned()),
            missing: missing(&driver.table),
            devices: (0..driver.devices).filter_map(|ordinal| device(driver, ordinal)).collect(),
        },
        Err(why) => Cuda { driver: None, problem: Some(why.to_owned()), missing: Vec::new(), devices: Vec::new() },
    }
}

/// What an old driver lacks, and what is done instead.
fn missing(table: &Table) -> Vec<String> {
    let mut missing = Vec::new();
    if table.vmm_create.is_none() {
        missing.push("cuMemCreate: memory is allocated by cuMemAlloc, and cannot be shared by descriptor".to_owned());
    }
    if table.write_value.is_none() {
        missing.push("cuStreamWriteValue32: events are queried to see that copies are done".to_owned());
    }
    if table.flush_rdma.is_none() {
        missing.push("cuFlushGPUDirectRDMAWrites".to_owned());
    }
    missing
}

fn device(driver: &Driver, ordinal: u32) -> Option<CudaDevice> {
    let table = &driver.table;
    let (mut handle, mut bytes) = (0, 0);
    // SAFETY: each call writes to a valid place of the type and length that it was told; the buffers end with a zero, since the driver was
    // told of one byte less than they have.
    unsafe {
        if (table.device_get)(&mut handle, ordinal as c_int) != code::SUCCESS {
            return None;
        }
        let text = |call: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> u32| {
            let mut text = [0; 256];
            call(text.as_mut_ptr(), 255, handle);
            CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned()
        };
        let has = |which| {
            let mut value = 0;
            if (table.device_attribute)(&mut value, which, handle) == code::SUCCESS { value } else { 0 }
        };
        (table.device_memory)(&mut bytes, handle);
        Some(CudaDevice {
            ordinal,
            name: text(table.device_name),
            address: text(table.device_pci),
            capability: format!("{}.{}", has(attribute::MAJOR), has(attribute::MINOR)),
            memory: bytes as u64,
            descriptors: has(attribute::VIRTUAL_MEMORY) != 0 && has(attribute::POSIX_HANDLES) != 0 && table.vmm_create.is_some(),
            gpudirect_rdma: has(attribute::RDMA) != 0,
            dma_buf: has(attribute::DMA_BUF) != 0,
        })
    }
}
