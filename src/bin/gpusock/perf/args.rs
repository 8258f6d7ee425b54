//! The command line of `gpusock perf`.

use std::ops::RangeInclusive;
use std::str::FromStr;
use std::sync::Arc;

use clap::{Parser, Subcommand};
use gpusock::{Context, Error, MemKind, PathKind, PathPolicy, Result, Spin, system};

use super::plan::{Test, WINDOW_MAX};
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

/// `auto`, or one kind.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Path(Option<PathKind>);

impl FromStr for Path {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        if name == "auto" {
            Ok(Path(None))
        } else {
            name.parse().map(|kind| Path(Some(kind))).map_err(|e: Error| format!("{e}; or auto"))
        }
    }
}

/// A number within a range, or what is accepted instead.
fn number(text: &str, accepted: RangeInclusive<u64>) -> Result<u64, String> {
    text.parse().ok().filter(|n| accepted.contains(n)).ok_or_else(|| match (accepted.start(), accepted.end()) {
        (least, &u64::MAX) => format!("write a number from {least} on"),
        (least, most) => format!("write a number from {least} to {most}"),
    })
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
    #[arg(long, value_parser = core, allow_negative_numbers = true)]
    pub pin: Option<usize>,
    /// Ends after the first client.
    #[arg(long)]
    pub once: bool,
    /// Most bytes that a client may make the server allocate.
    #[arg(long, default_value = "16G", value_parser = size::parse, allow_negative_numbers = true)]
    pub memory: u64,
}

#[derive(Parser)]
pub(crate) struct Run {
    /// HOST:PORT of the server.
    pub address: String,
    #[command(flatten)]
    pub measure: Measure,
}

#[derive(Parser)]
pub(crate) struct Pair {
    #[command(flatten)]
    pub measure: Measure,
    /// Core to pin the server process to.
    #[arg(long, value_parser = core, allow_negative_numbers = true)]
    pub pin_server: Option<usize>,
}

#[derive(Parser, Clone)]
pub(crate) struct Measure {
    /// What to measure.
    #[arg(long, value_enum, default_value = "send-lat")]
    pub test: Test,
    /// Bytes of each operation: 8, 64K, 1M, 5G.
    #[arg(long, default_value = "8", value_parser = size::parse, allow_negative_numbers = true)]
    pub size: u64,
    /// Operations that are measured.
    #[arg(long, default_value_t = 10_000, value_parser = |text: &str| number(text, 1..=u64::MAX), allow_negative_numbers = true)]
    pub iters: u64,
    /// Operations before that.
    #[arg(long, default_value_t = 1_000, value_parser = |text: &str| number(text, 0..=u64::MAX), allow_negative_numbers = true)]
    pub warmup: u64,
    /// Memory of this side: host or cuda:0.
    #[arg(long, default_value = "host", value_parser = parse_memory)]
    pub mem: MemKind,
    /// Memory of the server's side. Default: as `--mem`.
    #[arg(long, value_parser = parse_memory)]
    pub remote_mem: Option<MemKind>,
    /// The path to require, for example tcp; auto takes the best.
    #[arg(long, default_value = "auto")]
    pub path: Path,
    /// What waits do: adaptive, never, always or thread.
    #[arg(long, default_value = "adaptive")]
    pub spin: Spin,
    /// Operations in flight, for bandwidth.
    #[arg(long, default_value_t = 16, value_parser = |text: &str| number(text, 1..=WINDOW_MAX), allow_negative_numbers = true)]
    pub window: u64,
    /// TCP connections.
    #[arg(long, default_value_t = 1, value_parser = lanes, allow_negative_numbers = true)]
    pub lanes: u8,
    /// Checks every byte that arrives, at the side where it does, which slows the run down.
    #[arg(long)]
    pub verify: bool,
    /// Prints JSON.
    #[arg(long)]
    pub json: bool,
    /// Core to pin this process to.
    #[arg(long, value_parser = core, allow_negative_numbers = true)]
    pub pin: Option<usize>,
}

fn core(text: &str) -> Result<usize, String> {
    let most = rustix::thread::CpuSet::MAX_CPU as u64 - 1;
    number(text, 0..=most).map(|core| core as usize).map_err(|e| format!("{e}, as in /proc/cpuinfo"))
}

fn lanes(text: &str) -> Result<u8, String> {
    number(text, 1..=16).map(|lanes| lanes as u8)
}

fn parse_memory(name: &str) -> Result<MemKind> {
    name.parse()
}

impl Measure {
    pub(crate) fn context(&self) -> Result<Context> {
        let policy = self.path.0.map_or_else(PathPolicy::new, |kind| PathPolicy::new().require(kind));
        Context::builder().policy(policy).spin(self.spin).lanes(self.lanes).build()
    }
}

/// Pins the process, so that the two sides do not share a core.
pub(crate) fn pin(core: Option<usize>) -> Result<()> {
    let Some(core) = core else { return Ok(()) };
    let mut set = rustix::thread::CpuSet::new();
    set.set(core);
    rustix::thread::sched_setaffinity(None, &set).map_err(|e| {
        // Which ones a cpuset leaves, the kernel does not say here; those that are online are most often all of them.
        let what = format!("pinning the process to core {core} (this machine has {})", system::inspect().cpus);
        Error::Io { what: what.into(), source: Arc::new(e.into()) }
    })
}
