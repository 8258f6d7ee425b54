//! Kernel, send, receive, kernel: a producer and a consumer on one GPU, each with a CUDA stream of its own. Between the first kernel and the
//! last nothing waits for the GPU: what must come after what is told to the GPU.
//!
//! ```sh
//! cargo run --release --example cuda_stream                              # within the process: one copy by the GPU
//! GPUSOCK_PATHS=tcp-staged cargo run --release --example cuda_stream     # the same program over TCP
//! ```

use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg};
use cudarc::nvrtc;
use gpusock::Context;

const SOURCE: &str = r#"
extern "C" __global__ void ramp(unsigned *out, unsigned n, unsigned first) {
    unsigned stride = gridDim.x * blockDim.x;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) out[i] = first + i;
}

extern "C" __global__ void count_wrong(const unsigned *in, unsigned n, unsigned first, unsigned *wrong) {
    unsigned stride = gridDim.x * blockDim.x;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride)
        if (in[i] != first + i) atomicAdd(wrong, 1);
}
"#;

const WORDS: u32 = 4 << 20;
const ROUNDS: u32 = 50;
const GRID: LaunchConfig = LaunchConfig { grid_dim: (256, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };

#[tokio::main]
async fn main() -> Result<()> {
    let ctx = Context::new()?;
    let (mut out, mut into) = (ctx.alloc("cuda:0", 4 * u64::from(WORDS))?, ctx.alloc("cuda:0", 4 * u64::from(WORDS))?);
    let listener = ctx.bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let (producer, consumer) = tokio::join!(ctx.connect(address), listener.accept());
    let (producer, consumer) = (producer?, consumer?);

    // SAFETY: it only looks whether the library can be loaded.
    let present = unsafe { nvrtc::sys::is_culib_present() };
    ensure!(present, "the kernels need NVIDIA's run-time compiler, and libnvrtc.so was not found");
    let cuda = CudaContext::new(0)?;
    let module = cuda.load_module(nvrtc::compile_ptx(SOURCE).context("compiling the kernels")?)?;
    let (ramp, count_wrong) = (module.load_function("ramp")?, module.load_function("count_wrong")?);
    let (producing, consuming) = (cuda.new_stream()?, cuda.new_stream()?);
    let mut wrong = consuming.alloc_zeros::<u32>(1)?;

    let start = Instant::now();
    let mut path = None;
    for round in 0..ROUNDS {
        let first = round.wrapping_mul(0x9e37_79b9);
        {
            let mut slice = out.cuda_slice_mut::<u32>(&producing)?;
            // SAFETY: these are the kernel's parameters, and it stays within the slice.
            unsafe { producing.launch_builder(&ramp).arg(&mut *slice).arg(&WORDS).arg(&first).launch(GRID) }?;
            // The end of this borrow orders the buffer behind the stream. The kernel has hardly begun.
        }
        let (sent, received) = tokio::join!(producer.send(&out), consumer.recv(&mut into));
        path = Some((sent?, received?).1.receipt.path);
        {
            let slice = into.cuda_slice::<u32>(&consuming)?;
            let mut launch = consuming.launch_builder(&count_wrong);
            // SAFETY: as above.
            unsafe { launch.arg(&*slice).arg(&WORDS).arg(&first).arg(&mut wrong).launch(GRID) }?;
            // And the next message is received behind this kernel.
        }
    }
    // The only wait: for the result.
    let wrong = consuming.clone_dtoh(&wrong)?;
    consuming.synchronize()?;
    let seconds = start.elapsed().as_secs_f64();
    ensure!(wrong == [0], "{} words are wrong", wrong[0]);
    let gigabytes = f64::from(ROUNDS) * 4.0 * f64::from(WORDS) / 1e9;
    let path = path.map_or("none", |path| path.name());
    println!("{ROUNDS} rounds, all words right, {:.2} GB/s, path {path}", gigabytes / seconds);
    Ok(())
}
