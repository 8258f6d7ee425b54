//! How two GPUs are connected, as NVML says.
//!
//! Looked up at run time like the driver: NVML comes with it, but not into every container. The answer is for reports only.

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::OnceLock;

use libloading::Library;

use super::Device;

type Handle = *mut c_void;

/// `NVML_P2P_CAPS_INDEX_NVLINK` of nvml.h; the status "OK" is zero.
const NVLINK: c_int = 2;

struct Nvml {
    by_pci: unsafe extern "C" fn(*const c_char, *mut Handle) -> c_int,
    p2p_status: unsafe extern "C" fn(Handle, Handle, c_int, *mut c_int) -> c_int,
    _library: Library,
}

impl Nvml {
    fn load() -> Option<Self> {
        // SAFETY: the types are those of nvml.h, and the library's initializers rely on nothing of this process.
        unsafe {
            let library = Library::new("libnvidia-ml.so.1").ok()?;
            let init: unsafe extern "C" fn() -> c_int = *library.get(b"nvmlInit_v2\0").ok()?;
            let by_pci = *library.get(b"nvmlDeviceGetHandleByPciBusId_v2\0").ok()?;
            let p2p_status = *library.get(b"nvmlDeviceGetP2PStatus\0").ok()?;
            (init() == 0).then_some(Nvml { by_pci, p2p_status, _library: library })
        }
    }

    fn handle(&self, device: &Device) -> Option<Handle> {
        let pci = CString::new(device.pci.as_str()).ok()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the string ends with a zero, and the handle goes to a valid place.
        (unsafe { (self.by_pci)(pci.as_ptr(), &mut handle) } == 0).then_some(handle)
    }

    fn nvlink(&self, a: &Device, b: &Device) -> Option<bool> {
        let (a, b) = (self.handle(a)?, self.handle(b)?);
        let mut status = -1;
        // SAFETY: both handles are NVML's, and the status goes to a valid place.
        (unsafe { (self.p2p_status)(a, b, NVLINK, &mut status) } == 0).then_some(status == 0)
    }
}

/// For the path report: what a copy between two GPUs of this process goes over.
pub(crate) fn between(a: &'static Device, b: &'static Device) -> &'static str {
    static NVML: OnceLock<Option<Nvml>> = OnceLock::new();
    if !a.reach(b) {
        return "the GPUs cannot reach each other: the driver copies through host memory";
    }
    match NVML.get_or_init(Nvml::load).as_ref().map(|nvml| nvml.nvlink(a, b)) {
        Some(Some(true)) => "peer copies over NVLink",
        Some(Some(false)) => "peer copies over PCIe",
        Some(None) => "peer copies; NVML does not say over what",
        None => "peer copies; there is no NVML to say over what",
    }
}
