//! The part of the CUDA driver's interface that is used here, looked up at run time.
//!
//! Not cudarc's bindings, although users meet cudarc at the edge ([`interop`](super::interop)): those are fixed to one version at build time,
//! panic where a symbol is missing, and turn the driver's answers into a Rust `enum`, which is undefined for a code that only a newer
//! driver knows. Here a code stays a number, and a symbol that is missing is an `Option`.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use libloading::Library;

use crate::error::{Error, Result};

pub(crate) type DevicePtr = u64;
/// Handles of the driver: a context, a stream, an event, a module, a function.
pub(crate) type Raw = *mut c_void;
pub(crate) type HostFn = unsafe extern "C" fn(*mut c_void);

/// Device attributes (`CU_DEVICE_ATTRIBUTE_*`).
pub(crate) mod attribute {
    pub(crate) const MAJOR: i32 = 75;
    pub(crate) const MINOR: i32 = 76;
    pub(crate) const VIRTUAL_MEMORY: i32 = 102;
    pub(crate) const POSIX_HANDLES: i32 = 103;
    pub(crate) const RDMA_WITH_VMM: i32 = 110;
    pub(crate) const RDMA: i32 = 116;
    pub(crate) const RDMA_FLUSH_OPTIONS: i32 = 117;
    pub(crate) const RDMA_WRITES_ORDERING: i32 = 118;
    pub(crate) const DMA_BUF: i32 = 124;
}

/// Pointer attributes (`CU_POINTER_ATTRIBUTE_*`).
pub(crate) mod pointer {
    use std::ffi::c_int;

    pub(crate) const CONTEXT: c_int = 1;
    pub(crate) const MEMORY_TYPE: c_int = 2;
    pub(crate) const BUFFER_ID: c_int = 7;
    pub(crate) const ORDINAL: c_int = 9;
    pub(crate) const RANGE_START: c_int = 11;
    pub(crate) const RANGE_SIZE: c_int = 12;
    /// The value of `MEMORY_TYPE` for device memory.
    pub(crate) const DEVICE: u32 = 2;
}

/// Results (`CUresult`) that are told apart.
pub(crate) mod code {
    pub(crate) const SUCCESS: u32 = 0;
    pub(crate) const OUT_OF_MEMORY: u32 = 2;
    pub(crate) const NOT_READY: u32 = 600;
    pub(crate) const PEER_ACCESS_ALREADY: u32 = 704;
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Location {
    pub kind: c_int,
    pub id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
pub(crate) struct AllocationProp {
    pub kind: c_int,
    pub handle_types: c_int,
    pub location: Location,
    pub win32: *mut c_void,
    pub compression: u8,
    pub gpu_direct_rdma: u8,
    pub usage: u16,
    pub reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
pub(crate) struct AccessDesc {
    pub location: Location,
    pub flags: c_int,
}

macro_rules! table {
    (required { $($name:ident = $symbol:literal ($($arg:ty),*);)* }
     optional { $($extra:ident = $($extra_symbol:literal)|+ ($($extra_arg:ty),*);)* }) => {
        /// The functions. Every one answers a `CUresult`.
        #[allow(non_snake_case)]
        pub(crate) struct Table {
            $(pub $name: unsafe extern "C" fn($($arg),*) -> u32,)*
            $(pub $extra: Option<unsafe extern "C" fn($($extra_arg),*) -> u32>,)*
        }

        impl Table {
            fn load(library: &Library) -> Result<Self, String> {
                // SAFETY: the types are those of cuda.h, whose functions never change theirs under one name.
                unsafe {
                    Ok(Table {
                        $($name: *library
                            .get(concat!($symbol, "\0").as_bytes())
                            .map_err(|_| concat!("it has no ", $symbol, "; CUDA 11.4 or later is needed").to_owned())?,)*
                        $($extra: [$(concat!($extra_symbol, "\0")),+].iter().find_map(|name| library.get(name.as_bytes()).ok().map(|f| *f)),)*
                    })
                }
            }
        }
    };
}

table! {
    required {
        init = "cuInit"(c_uint);
        driver_version = "cuDriverGetVersion"(*mut c_int);
        error_name = "cuGetErrorName"(u32, *mut *const c_char);
        device_count = "cuDeviceGetCount"(*mut c_int);
        device_get = "cuDeviceGet"(*mut c_int, c_int);
        device_name = "cuDeviceGetName"(*mut c_char, c_int, c_int);
        device_attribute = "cuDeviceGetAttribute"(*mut c_int, c_int, c_int);
        device_memory = "cuDeviceTotalMem_v2"(*mut usize, c_int);
        device_pci = "cuDeviceGetPCIBusId"(*mut c_char, c_int, c_int);
        primary_retain = "cuDevicePrimaryCtxRetain"(*mut Raw, c_int);
        push = "cuCtxPushCurrent_v2"(Raw);
        pop = "cuCtxPopCurrent_v2"(*mut Raw);
        mem_alloc = "cuMemAlloc_v2"(*mut DevicePtr, usize);
        mem_free = "cuMemFree_v2"(DevicePtr);
        host_alloc = "cuMemHostAlloc"(*mut *mut c_void, usize, c_uint);
        host_free = "cuMemFreeHost"(*mut c_void);
        host_device_pointer = "cuMemHostGetDevicePointer_v2"(*mut DevicePtr, *mut c_void, c_uint);
        copy_to_device = "cuMemcpyHtoDAsync_v2"(DevicePtr, *const c_void, usize, Raw);
        copy_to_host = "cuMemcpyDtoHAsync_v2"(*mut c_void, DevicePtr, usize, Raw);
        copy_on_device = "cuMemcpyDtoDAsync_v2"(DevicePtr, DevicePtr, usize, Raw);
        copy_to_peer = "cuMemcpyPeerAsync"(DevicePtr, Raw, DevicePtr, Raw, usize, Raw);
        set_bytes = "cuMemsetD8Async"(DevicePtr, u8, usize, Raw);
        stream_create = "cuStreamCreate"(*mut Raw, c_uint);
        stream_query = "cuStreamQuery"(Raw);
        stream_wait = "cuStreamWaitEvent"(Raw, Raw, c_uint);
        launch_host = "cuLaunchHostFunc"(Raw, HostFn, *mut c_void);
        event_create = "cuEventCreate"(*mut Raw, c_uint);
        event_destroy = "cuEventDestroy_v2"(Raw);
        event_record = "cuEventRecord"(Raw, Raw);
        event_query = "cuEventQuery"(Raw);
        pointer_attribute = "cuPointerGetAttribute"(*mut c_void, c_int, DevicePtr);
        can_access_peer = "cuDeviceCanAccessPeer"(*mut c_int, c_int, c_int);
        enable_peer_access = "cuCtxEnablePeerAccess"(Raw, c_uint);
        module_load = "cuModuleLoadData"(*mut Raw, *const c_void);
        module_function = "cuModuleGetFunction"(*mut Raw, Raw, *const c_char);
        launch = "cuLaunchKernel"(Raw, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Raw, *mut *mut c_void, *mut *mut c_void);
    }
    optional {
        write_value = "cuStreamWriteValue32_v2" | "cuStreamWriteValue32"(Raw, DevicePtr, u32, c_uint);
        vmm_granularity = "cuMemGetAllocationGranularity"(*mut usize, *const AllocationProp, c_int);
        vmm_create = "cuMemCreate"(*mut u64, usize, *const AllocationProp, u64);
        vmm_release = "cuMemRelease"(u64);
        vmm_reserve = "cuMemAddressReserve"(*mut DevicePtr, usize, usize, DevicePtr, u64);
        vmm_unreserve = "cuMemAddressFree"(DevicePtr, usize);
        vmm_map = "cuMemMap"(DevicePtr, usize, usize, u64, u64);
        vmm_unmap = "cuMemUnmap"(DevicePtr, usize);
        vmm_access = "cuMemSetAccess"(DevicePtr, usize, *const AccessDesc, usize);
        flush_rdma = "cuFlushGPUDirectRDMAWrites"(c_int, c_int);
    }
}

/// The driver, initialized.
pub(crate) struct Driver {
    pub table: Table,
    /// 13000 for 13.0.
    pub version: i32,
    pub devices: u32,
    /// Keeps the code in memory.
    _library: Library,
}

/// The oldest driver whose interface has all that is required.
const VERSION_MIN: i32 = 11_040;

impl Driver {
    fn load() -> Result<Self, String> {
        let mut reason = String::new();
        // The second name is what WSL and some containers have.
        let library = ["libcuda.so.1", "libcuda.so"].into_iter().find_map(|name| {
            // SAFETY: the driver's library has no initializers that rely on anything of this process.
            match unsafe { Library::new(name) } {
                Ok(library) => Some(library),
                Err(error) => {
                    reason = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
                    None
                }
            }
        });
        let library = library.ok_or_else(|| format!("no CUDA driver: {reason}"))?;
        let table = Table::load(&library).map_err(|why| format!("the CUDA driver is too old: {why}"))?;
        // SAFETY: the arguments are as documented.
        let answer = unsafe { (table.init)(0) };
        if answer != code::SUCCESS {
            return Err(format!("the CUDA driver does not start: {}", name_of(&table, answer)));
        }
        let (mut version, mut devices) = (0, 0);
        // SAFETY: both write to valid places.
        unsafe {
            (table.driver_version)(&mut version);
            (table.device_count)(&mut devices);
        }
        if version < VERSION_MIN {
            return Err(format!("the CUDA driver is too old: it supports CUDA {}, and 11.4 is needed", show_version(version)));
        }
        Ok(Driver { table, version, devices: u32::try_from(devices).unwrap_or(0), _library: library })
    }
}

/// `13.0` for 13000.
pub(crate) fn show_version(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

fn name_of(table: &Table, answer: u32) -> String {
    let mut name = std::ptr::null();
    // SAFETY: writes a pointer to a static string, or null.
    let known = unsafe { (table.error_name)(answer, &mut name) } == code::SUCCESS && !name.is_null();
    // SAFETY: a string of the driver's, which is never freed.
    if known { unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned() } else { format!("CUDA error {answer}") }
}

/// The driver, or why there is none. Looked for once.
pub(crate) fn driver() -> Result<&'static Driver, &'static str> {
    static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
    DRIVER.get_or_init(Driver::load).as_ref().map_err(String::as_str)
}

impl Driver {
    /// Turns a driver's answer into an error that names the call.
    pub(crate) fn check(&self, answer: u32, call: &str) -> Result<()> {
        if answer == code::SUCCESS {
            return Ok(());
        }
        Err(Error::Cuda { what: format!("{call}: {}", name_of(&self.table, answer)) })
    }

    pub(crate) fn name_of(&self, answer: u32) -> String {
        name_of(&self.table, answer)
    }
}
