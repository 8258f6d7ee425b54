//! Training on a GPU: the weights stay there, and a kernel takes the steps.

use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, LaunchConfig, PushKernelArg};
use cudarc::nvrtc;
use gpusock::{Context, GpuBuf};

use crate::net::PARAMETERS;

/// Adam with the constants of [`Adam`](crate::net::Adam). A number that is none is left out.
const SOURCE: &str = r#"
extern "C" __global__ void adam(float *weights, const float *gradient, float *moments, float c1, float c2, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float g = gradient[i];
    if (!(g - g == 0.0f)) return;
    float m = moments[i] = 0.9f * moments[i] + 0.1f * g;
    float s = moments[n + i] = 0.999f * moments[n + i] + 0.001f * g * g;
    weights[i] -= 0.002f * (m / c1) / (sqrtf(s / c2) + 1e-8f);
}
"#;

pub struct GpuTrainer {
    stream: Arc<CudaStream>,
    adam: CudaFunction,
    weights: GpuBuf,
    /// Adam's averages of the gradient and of its square.
    moments: GpuBuf,
    step: i32,
}

impl GpuTrainer {
    pub fn new(ordinal: usize, context: &Context, weights: GpuBuf) -> Result<Self> {
        // SAFETY: it only looks whether the library can be loaded.
        let present = unsafe { nvrtc::sys::is_culib_present() };
        ensure!(present, "the update kernel needs NVIDIA's run-time compiler, and libnvrtc.so was not found");
        let cuda = CudaContext::new(ordinal)?;
        let adam = cuda.load_module(nvrtc::compile_ptx(SOURCE).context("compiling the update kernel")?)?.load_function("adam")?;
        // Memory that was just allocated is zero.
        let moments = context.alloc(weights.mem(), 2 * weights.len())?;
        let stream = cuda.new_stream()?;
        moments.make_wait(&*stream)?;
        Ok(GpuTrainer { stream, adam, weights, moments, step: 0 })
    }

    pub fn shared(&self) -> &GpuBuf {
        &self.weights
    }

    pub fn apply(&mut self, slot: &GpuBuf) -> Result<()> {
        let address = |buf: &GpuBuf| buf.device_ptr().context("memory of the host among that of a GPU");
        let (weights, gradient, moments) = (address(&self.weights)?, address(slot)?, address(&self.moments)?);
        self.step = self.step.saturating_add(1);
        let (c1, c2) = (1.0 - 0.9f32.powi(self.step), 1.0 - 0.999f32.powi(self.step));
        let n = PARAMETERS as u32;
        let mut launch = self.stream.launch_builder(&self.adam);
        launch.arg(&weights).arg(&gradient).arg(&moments).arg(&c1).arg(&c2).arg(&n);
        // SAFETY: these are the kernel's parameters, and each buffer has the numbers that it touches. Workers may read weights of two steps
        // mixed, as on the host.
        unsafe { launch.launch(LaunchConfig::for_num_elems(n)) }?;
        // Nobody waits here: the next write into the slot, and every read of the weights, waits on the device.
        slot.ready_after(&*self.stream)?;
        self.weights.ready_after(&*self.stream)?;
        Ok(())
    }
}
