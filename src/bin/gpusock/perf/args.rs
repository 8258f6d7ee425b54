//! The command line of `gpusock perf`.

use clap::{Parser, Subcommand};
use gpusock::{Context, MemKind, PathKind, PathPolicy, Result, Spin};

use super::plan::Test;
use crate::size;

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Waits for clients, and does with each what it asks for.
    Serve(Serve),
    /// Measures against a server.
    Run(Run),
    /// Starts a server in a second process on this machine, and measures against it.
    Pair(Pair),
}

#[derive(Parser)]
pub(crate) struct Serve {
    /// Address to listen on; port 0 lets the system choose.
    #[arg(long, default_value = "0.0.0.0:7700")]
    pub listen: String,
    /// What waits do: adaptive, never, always or thread.
    #[arg(long, default_value = "adaptive")]
    pub spin: Spin,
    /// Core to pin the process to.
    #[arg(long)]
    pub pin: Option<usize>,
    /// Ends after the first client.
    #[arg(long)]
    pub once: bool,
    /// Most bytes that a client may make the server allocate.
    #[arg(long, default_value = "16G", value_parser = size::parse)]
    pub memory: u64,
}

#[derive(Parser)]
pub(crate) struct Run {
    /// Address of the server.
    pub address: String,
    #[command(flatten)]
    pub measure: Measure,
}

#[derive(Parser)]
pub(crate) struct Pair {
    #[command(flatten)]
    pub measure: Measure,
    /// Core to pin the server process to.
    #[arg(long)]
    pub pin_server: Option<usize>,
}

#[derive(Parser, Clone)]
pub(crate) struct Measure {
    /// What to measure.
    #[arg(long, value_enum, default_value = "send-lat")]
    pub test: Test,
    /// Bytes of each operation: 8, 64K, 1M, 5G.
    #[arg(long, default_value = "8", value_parser = size::parse)]
    pub size: u64,
    /// Operations that are measured.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub iters: u64,
    /// Operations before that.
    #[arg(long, default_value_t = 1_000)]
    pub warmup: u64,
    /// Memory of this side: host or cuda:0.
    #[arg(long, default_value = "host", value_parser = parse_memory)]
    pub mem: MemKind,
    /// Memory of the server's side. Default: as `--mem`.
    #[arg(long, value_parser = parse_memory)]
    pub remote_mem: Option<MemKind>,
    /// The path to require, for example tcp. Default: the best.
    #[arg(long)]
    pub path: Option<PathKind>,
    /// What waits do: adaptive, never, always or thread.
    #[arg(long, default_value = "adaptive")]
    pub spin: Spin,
    /// Operations in flight, for bandwidth.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=4096))]
    pub window: u64,
    /// TCP connections.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub lanes: u8,
    /// Checks that the right bytes arrive.
    #[arg(long)]
    pub verify: bool,
    /// Prints JSON.
    #[arg(long)]
    pub json: bool,
    /// Core to pin this process to.
    #[arg(long)]
    pub pin: Option<usize>,
}

fn parse_memory(name: &str) -> Result<MemKind> {
    name.parse()
}

impl Measure {
    pub(crate) fn context(&self) -> Result<Context> {
        let policy = self.path.map_or_else(PathPolicy::new, |kind| PathPolicy::new().require(kind));
        Context::builder().policy(policy).spin(self.spin).lanes(self.lanes).build()
    }
}

/// Pins the process, so that the two sides do not share a core.
pub(crate) fn pin(core: Option<usize>) -> Result<()> {
    let Some(core) = core else { return Ok(()) };
    let mut set = rustix::thread::CpuSet::new();
    if core < rustix::thread::CpuSet::MAX_CPU {
        set.set(core);
    }
    rustix::thread::sched_setaffinity(None, &set).map_err(|e| gpusock::Error::Io {
        what: format!("pinning the process to core {core}").into(),
        source: std::sync::Arc::new(e.into()),
    })
}
