//! GPUs: one object each for the life of the process, on the device's primary context, which cudarc and PyTorch use too.

use std::ffi::{CStr, c_int};
use std::marker::PhantomData;
use std::sync::{Mutex, OnceLock};

use super::alloc::Allocator;
use super::driver::{Driver, Raw, code, driver};
use super::flush::Flush;
use super::limbo::Limbo;
use super::stream::Streams;
use crate::error::{Error, Result};
use crate::reactor::lock;

pub(crate) struct Device {
    pub driver: &'static Driver,
    pub ordinal: u32,
    pub handle: c_int,
    pub context: Raw,
    pub name: String,
    pub pci: String,
    pub streams: Streams,
    pub allocator: Allocator,
    /// What waits for the device before it can be given up.
    pub limbo: Limbo,
    pub flush: Flush,
    pub(super) atomics: OnceLock<Result<super::atomic::Kernels>>,
    /// The error that made the context unusable. It stays so for good.
    lost: OnceLock<String>,
}

// SAFETY: the handles are the driver's, whose functions are thread-safe.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cuda:{} ({})", self.ordinal, self.name)
    }
}

type Slot = OnceLock<Result<&'static Device>>;

static DEVICES: OnceLock<Box<[Slot]>> = OnceLock::new();

/// Drops what devices are done with. For those that have been opened, of which there may be none.
pub(crate) fn reap() {
    let opened = DEVICES.get().into_iter().flatten().filter_map(|slot| slot.get()?.as_ref().ok());
    opened.for_each(|device| device.limbo.reap());
}

/// Whether a device has failed. Asks those that have been opened, so that it is noticed while nothing is under way on them.
pub(crate) fn any_lost() -> bool {
    let opened = DEVICES.get().into_iter().flatten().filter_map(|slot| slot.get()?.as_ref().ok());
    opened.fold(false, |lost, device| device.ask().is_err() | lost)
}

/// The device with this ordinal.
pub(crate) fn device(ordinal: u32) -> Result<&'static Device> {
    let driver = driver().map_err(|why| Error::Unsupported { what: format!("cuda:{ordinal}: {why}").into() })?;
    let devices = DEVICES.get_or_init(|| (0..driver.devices).map(|_| OnceLock::new()).collect());
    let slot = devices.get(ordinal as usize).ok_or_else(|| Error::Unsupported {
        what: format!("cuda:{ordinal}: there is no such device; the CUDA driver has {}", driver.devices).into(),
    })?;
    let device = slot.get_or_init(|| Device::open(driver, ordinal)).clone()?;
    device.usable()?;
    Ok(device)
}

impl Device {
    fn open(driver: &'static Driver, ordinal: u32) -> Result<&'static Device> {
        let table = &driver.table;
        let (mut handle, mut context) = (0, std::ptr::null_mut());
        let mut text = [0; 256];
        let string = |text: &[std::ffi::c_char; 256]| {
            // SAFETY: the buffer ends with a zero, since the driver was told of one byte less than it has.
            unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned()
        };
        // SAFETY: each call writes to a valid place of the type and length that it was told.
        let (name, pci) = unsafe {
            driver.check((table.device_get)(&mut handle, ordinal as c_int), "cuDeviceGet")?;
            driver.check((table.primary_retain)(&mut context, handle), "cuDevicePrimaryCtxRetain")?;
            driver.check((table.device_name)(text.as_mut_ptr(), 255, handle), "cuDeviceGetName")?;
            let name = string(&text);
            driver.check((table.device_pci)(text.as_mut_ptr(), 255, handle), "cuDeviceGetPCIBusId")?;
            (name, string(&text))
        };
        let flush = Flush::of(|which| attribute_of(driver, handle, which));
        let device = Device {
            driver,
            ordinal,
            handle,
            context,
            name,
            pci,
            streams: Streams::default(),
            allocator: Allocator::new(driver, handle),
            limbo: Limbo::default(),
            flush,
            atomics: OnceLock::new(),
            lost: OnceLock::new(),
        };
        // Devices live as long as the process: their memory is referred to from anywhere.
        let device: &'static Device = Box::leak(Box::new(device));
        tracing::info!(device = ?device, pci = %device.pci, memory = %device.allocator.describe(), "CUDA device opened");
        Ok(device)
    }

    /// Makes the device's context current on this thread until the guard goes; what was current before comes back.
    pub(crate) fn enter(&'static self) -> Result<Current> {
        // SAFETY: the context is valid for the life of the process, or the driver says that it is not.
        self.check(unsafe { (self.driver.table.push)(self.context) }, "cuCtxPushCurrent")?;
        Ok(Current { device: self, _thread: PhantomData })
    }

    pub(crate) fn check(&self, answer: u32, call: &str) -> Result<()> {
        if poisons(answer) {
            let name = self.driver.name_of(answer);
            let known = self.lost.get_or_init(|| {
                tracing::error!(device = %self.ordinal, error = %name, call, "the CUDA context is lost");
                name
            });
            return Err(self.lost_error(known, call));
        }
        self.driver.check(answer, call).map_err(|error| match error {
            Error::Cuda { what } => Error::Cuda { what: format!("cuda:{}: {what}", self.ordinal) },
            other => other,
        })
    }

    fn lost_error(&self, name: &str, call: &str) -> Error {
        Error::Cuda {
            what: format!("cuda:{}: {call}: {name}; its context is unusable for the rest of the process", self.ordinal),
        }
    }

    /// An error once the context is lost.
    pub(crate) fn usable(&self) -> Result<()> {
        self.lost.get().map_or(Ok(()), |name| Err(self.lost_error(name, "an earlier call")))
    }

    pub(crate) fn memory(&self) -> u64 {
        let mut bytes = 0;
        // SAFETY: writes to a valid place.
        unsafe { (self.driver.table.device_memory)(&mut bytes, self.handle) };
        bytes as u64
    }

    /// Lets this device reach the memory of `other`. Answers whether the hardware can.
    pub(crate) fn reach(&'static self, other: &'static Device) -> bool {
        static PAIRS: Mutex<Vec<(u32, u32, bool)>> = Mutex::new(Vec::new());
        let pair = (self.ordinal, other.ordinal);
        let mut pairs = lock(&PAIRS);
        if let Some(&(_, _, can)) = pairs.iter().find(|(a, b, _)| (*a, *b) == pair) {
            return can;
        }
        let mut can = 0;
        // SAFETY: writes to a valid place.
        let answer = unsafe { (self.driver.table.can_access_peer)(&mut can, self.handle, other.handle) };
        let can = answer == code::SUCCESS && can != 0 && self.enable(other);
        pairs.push((pair.0, pair.1, can));
        can
    }

    fn enable(&'static self, other: &'static Device) -> bool {
        let Ok(_current) = self.enter() else { return false };
        // SAFETY: the context lives as long as the process.
        let answer = unsafe { (self.driver.table.enable_peer_access)(other.context, 0) };
        let enabled = matches!(answer, code::SUCCESS | code::PEER_ACCESS_ALREADY);
        if !enabled {
            tracing::warn!(from = self.ordinal, to = other.ordinal, error = %self.driver.name_of(answer), "no peer access");
        }
        enabled
    }
}

fn attribute_of(driver: &Driver, handle: c_int, which: c_int) -> c_int {
    let mut value = 0;
    // SAFETY: writes to a valid place. An attribute that the driver does not know counts as zero.
    let answer = unsafe { (driver.table.device_attribute)(&mut value, which, handle) };
    if answer == code::SUCCESS { value } else { 0 }
}

/// Errors after which every call in the context answers the same (cuda.h: "the process must be terminated and relaunched").
fn poisons(answer: u32) -> bool {
    // Illegal address, launch timeout, assert, hardware stack error, illegal instruction, misaligned address, invalid address space,
    // invalid pc, launch failed, tensor memory leak, contained; ECC uncorrectable; destroyed context.
    matches!(answer, 700 | 702 | 710 | 714..=719 | 721 | 214 | 220 | 709)
}

/// While it lives, a device's context is current on this thread.
pub(crate) struct Current {
    device: &'static Device,
    /// Bound to the thread.
    _thread: PhantomData<*const ()>,
}

impl Drop for Current {
    fn drop(&mut self) {
        let mut was = std::ptr::null_mut();
        // SAFETY: writes to a valid place; what is popped is what was pushed.
        unsafe { (self.device.driver.table.pop)(&mut was) };
    }
}
