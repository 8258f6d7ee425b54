//! The device side of the tests: a stream and kernels that take their time.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaFunction, CudaSlice, CudaStream, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use gpusock::{Context, GpuBuf};

/// Waits `%r2` milliseconds; leaves the first byte of this thread in `%rd8` and its stride in `%rd9`.
macro_rules! wait {
    () => {
        concat!(
            "mov.u64 %rd3, %globaltimer; cvt.u64.u32 %rd4, %r2; mul.lo.u64 %rd4, %rd4, 1000000; add.u64 %rd4, %rd3, %rd4;\n",
            "W: mov.u64 %rd5, %globaltimer; setp.lt.u64 %p1, %rd5, %rd4; @%p1 bra W;\n",
            "mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ntid.x; mov.u32 %r5, %tid.x; mad.lo.u32 %r6, %r3, %r4, %r5;\n",
            "mul.wide.u32 %rd8, %r6, 4; mov.u32 %r7, %nctaid.x; mul.lo.u32 %r8, %r7, %r4; mul.wide.u32 %rd9, %r8, 4;\n",
        )
    };
}

/// The kernels, as text for the driver's compiler. Every thread waits by the clock first; then they share the words among them.
const PTX: &str = concat!(
    ".version 6.0\n.target sm_60\n.address_size 64\n",
    ".visible .entry test_fill(.param .u64 dst, .param .u64 bytes, .param .u32 value, .param .u32 delay_ms)\n{\n",
    ".reg .pred %p<4>; .reg .b32 %r<12>; .reg .b64 %rd<16>;\n",
    "ld.param.u64 %rd1, [dst]; ld.param.u64 %rd2, [bytes]; ld.param.u32 %r1, [value]; ld.param.u32 %r2, [delay_ms];\n",
    wait!(),
    "L: setp.ge.u64 %p2, %rd8, %rd2; @%p2 bra E; add.u64 %rd10, %rd1, %rd8;\n",
    "st.global.u32 [%rd10], %r1; add.u64 %rd8, %rd8, %rd9; bra L;\nE: ret;\n}\n",
    ".visible .entry test_xor(.param .u64 dst, .param .u64 bytes, .param .u32 value, .param .u32 delay_ms)\n{\n",
    ".reg .pred %p<4>; .reg .b32 %r<12>; .reg .b64 %rd<16>;\n",
    "ld.param.u64 %rd1, [dst]; ld.param.u64 %rd2, [bytes]; ld.param.u32 %r1, [value]; ld.param.u32 %r2, [delay_ms];\n",
    wait!(),
    "L: setp.ge.u64 %p2, %rd8, %rd2; @%p2 bra E; add.u64 %rd10, %rd1, %rd8;\n",
    "ld.global.u32 %r9, [%rd10]; xor.b32 %r9, %r9, %r1; st.global.u32 [%rd10], %r9; add.u64 %rd8, %rd8, %rd9; bra L;\nE: ret;\n}\n",
    ".visible .entry test_copy(.param .u64 dst, .param .u64 src, .param .u64 bytes, .param .u32 delay_ms)\n{\n",
    ".reg .pred %p<4>; .reg .b32 %r<12>; .reg .b64 %rd<16>;\n",
    "ld.param.u64 %rd1, [dst]; ld.param.u64 %rd11, [src]; ld.param.u64 %rd2, [bytes]; ld.param.u32 %r2, [delay_ms];\n",
    wait!(),
    "L: setp.ge.u64 %p2, %rd8, %rd2; @%p2 bra E; add.u64 %rd10, %rd1, %rd8; add.u64 %rd12, %rd11, %rd8;\n",
    "ld.global.u32 %r9, [%rd12]; st.global.u32 [%rd10], %r9; add.u64 %rd8, %rd8, %rd9; bra L;\nE: ret;\n}\n",
    ".visible .entry test_fault()\n{\n.reg .b64 %rd<2>; .reg .b32 %r<2>;\n",
    "mov.u64 %rd1, 16; mov.u32 %r1, 1; st.global.u32 [%rd1], %r1; ret;\n}\n",
);

pub struct Device {
    pub context: Arc<CudaContext>,
    pub stream: Arc<CudaStream>,
    fill: CudaFunction,
    xor: CudaFunction,
    copy: CudaFunction,
    fault: CudaFunction,
}

const GRID: LaunchConfig = LaunchConfig { grid_dim: (64, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };

impl Device {
    pub fn new() -> Self {
        Self::with(0)
    }

    pub fn with(ordinal: usize) -> Self {
        let context = CudaContext::new(ordinal).unwrap();
        let module = context.load_module(Ptx::from_src(PTX)).unwrap();
        let function = |name| module.load_function(name).unwrap();
        let stream = context.new_stream().unwrap();
        let (fill, xor, copy, fault) =
            (function("test_fill"), function("test_xor"), function("test_copy"), function("test_fault"));
        Device { context, stream, fill, xor, copy, fault }
    }

    /// Fills a buffer with a word, after a while, on the stream. The buffer is ordered behind it.
    pub fn fill(&self, buf: &mut GpuBuf, value: u32, delay_ms: u32) {
        let bytes = buf.len();
        let mut slice = buf.cuda_slice_mut::<u32>(&self.stream).unwrap();
        let mut launch = self.stream.launch_builder(&self.fill);
        // SAFETY: the kernel writes as many bytes as the slice has.
        unsafe { launch.arg(&mut *slice).arg(&bytes).arg(&value).arg(&delay_ms).launch(GRID) }.unwrap();
    }

    pub fn xor(&self, slice: &mut CudaSlice<u32>, value: u32, delay_ms: u32) {
        let bytes = slice.len() as u64 * 4;
        let mut launch = self.stream.launch_builder(&self.xor);
        // SAFETY: the kernel touches as many bytes as the slice has.
        unsafe { launch.arg(slice).arg(&bytes).arg(&value).arg(&delay_ms).launch(GRID) }.unwrap();
    }

    /// Copies a buffer on the stream, after a while: what a kernel sees of it then.
    pub fn snapshot(&self, buf: &GpuBuf, delay_ms: u32) -> CudaSlice<u32> {
        let bytes = buf.len();
        let mut seen = self.stream.alloc_zeros::<u32>(bytes as usize / 4).unwrap();
        let slice = buf.cuda_slice::<u32>(&self.stream).unwrap();
        let mut launch = self.stream.launch_builder(&self.copy);
        // SAFETY: both have this many bytes.
        unsafe { launch.arg(&mut seen).arg(&*slice).arg(&bytes).arg(&delay_ms).launch(GRID) }.unwrap();
        seen
    }

    pub fn words(&self, slice: &CudaSlice<u32>) -> Vec<u32> {
        let words = self.stream.clone_dtoh(slice).unwrap();
        self.stream.synchronize().unwrap();
        words
    }

    /// A kernel that writes where nothing is, and its end.
    pub fn fault(&self) {
        self.launch_fault();
        let _ = self.stream.synchronize();
    }

    pub fn launch_fault(&self) {
        let mut launch = self.stream.launch_builder(&self.fault);
        // SAFETY: it breaks the context, which is what the test wants.
        unsafe { launch.launch(LaunchConfig::for_num_elems(1)) }.unwrap();
    }
}

/// A buffer on a GPU with bytes that differ from place to place.
pub fn filled(ctx: &Context, kind: &str, len: usize, seed: u64) -> GpuBuf {
    let buf = ctx.alloc(kind, len as u64).unwrap();
    buf.copy_from_slice(0, &crate::common::pattern(len, seed)).unwrap();
    buf
}

pub fn bytes(buf: &GpuBuf) -> Vec<u8> {
    buf.to_vec().unwrap()
}
