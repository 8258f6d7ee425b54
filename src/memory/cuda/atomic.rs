//! Atomic operations on device memory: two kernels of a few instructions, as text for the driver's own compiler, so that no toolkit is needed.

use std::ffi::c_void;

use super::driver::{DevicePtr, Raw};
use super::stream::{Direction, Ticket};
use super::{CudaRegion, Device};
use crate::error::{Error, Result};
use crate::memory::Chunk;

/// PTX ISA 6.0 for sm_60, the first with `atom.sys`: atomic with regard to the CPU and other GPUs as well.
const PTX: &std::ffi::CStr = c"
.version 6.0
.target sm_60
.address_size 64

.visible .entry gpusock_fetch_add(.param .u64 word, .param .u64 value, .param .u64 result)
{
    .reg .b64 %r<5>;
    ld.param.u64 %r1, [word];
    ld.param.u64 %r2, [value];
    ld.param.u64 %r3, [result];
    atom.sys.global.add.u64 %r4, [%r1], %r2;
    st.volatile.global.u64 [%r3], %r4;
    membar.sys;
    ret;
}

.visible .entry gpusock_compare_swap(.param .u64 word, .param .u64 expected, .param .u64 new, .param .u64 result)
{
    .reg .b64 %r<6>;
    ld.param.u64 %r1, [word];
    ld.param.u64 %r2, [expected];
    ld.param.u64 %r3, [new];
    ld.param.u64 %r4, [result];
    atom.sys.global.cas.b64 %r5, [%r1], %r2, %r3;
    st.volatile.global.u64 [%r4], %r5;
    membar.sys;
    ret;
}
";

#[derive(Clone, Copy)]
pub(super) struct Kernels {
    fetch_add: Raw,
    compare_swap: Raw,
}

impl Device {
    fn atomics(&'static self) -> Result<Kernels> {
        let load = || {
            let table = &self.driver.table;
            let _current = self.enter()?;
            let (mut module, mut fetch_add, mut compare_swap) =
                (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: the texts end with a zero, and each call writes to a valid place.
            unsafe {
                self.check((table.module_load)(&mut module, PTX.as_ptr().cast()), "cuModuleLoadData")?;
                let find = |function: *mut Raw, name: &std::ffi::CStr| {
                    self.check((table.module_function)(function, module, name.as_ptr()), "cuModuleGetFunction")
                };
                find(&mut fetch_add, c"gpusock_fetch_add")?;
                find(&mut compare_swap, c"gpusock_compare_swap")?;
            }
            Ok(Kernels { fetch_add, compare_swap })
        };
        self.atomics.get_or_init(load).clone()
    }
}

/// Starts an atomic operation on the eight bytes at `offset` of a region. The former value is written to `result`, eight bytes of pinned memory, which
/// must be kept, like the region, until the ticket is done. With `expected`, it is a compare and swap.
pub(crate) fn start(region: &CudaRegion, offset: u64, operand: u64, expected: Option<u64>, result: &Chunk) -> Result<Ticket> {
    let mut word: DevicePtr = region.at(offset);
    if word % 8 != 0 {
        return Err(Error::invalid("an atomic operation needs an address that is a multiple of 8 bytes"));
    }
    let device = region.device();
    let kernels = device.atomics()?;
    let after = region.before(offset, 8);
    let (mut operand, mut former) = (operand, result.as_ptr().addr() as u64);
    device.submit(Direction::Within, &after, |table, stream| {
        let mut expected = expected;
        let arg = |value: &mut u64| (value as *mut u64).cast::<c_void>();
        let (function, mut args) = match &mut expected {
            None => (kernels.fetch_add, vec![arg(&mut word), arg(&mut operand), arg(&mut former)]),
            Some(expected) => (kernels.compare_swap, vec![arg(&mut word), arg(expected), arg(&mut operand), arg(&mut former)]),
        };
        // SAFETY: the kernel takes these arguments, which the driver copies during the call. Pinned memory has one address for host and
        // device (unified addressing, on every 64-bit Linux), and both places are kept until the ticket is done.
        let answer = unsafe { (table.launch)(function, 1, 1, 1, 1, 1, 1, 0, stream, args.as_mut_ptr(), std::ptr::null_mut()) };
        device.check(answer, "cuLaunchKernel")
    })
}
