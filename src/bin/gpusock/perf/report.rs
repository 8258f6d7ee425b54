//! What was measured, as a table or as JSON.

use std::fmt;
use std::time::Duration;

use gpusock::Spin;
use hdrhistogram::Histogram;

use super::plan::{Plan, Test};
use crate::size;

pub(crate) struct Report {
    test: Test,
    size: u64,
    iters: u64,
    path: &'static str,
    spin: Spin,
    /// min, p50, p99, max, in microseconds.
    latency_us: [f64; 4],
    bandwidth: f64,
    rate: f64,
    cpu: (f64, f64),
}

impl Report {
    pub(crate) fn new(
        plan: &Plan,
        path: &'static str,
        spin: Spin,
        times: &Histogram<u64>,
        elapsed: Duration,
        cpu: (f64, f64),
    ) -> Self {
        // One way is half of a round trip; a ping-pong moves the bytes both ways.
        let ways = if plan.test.is_ping_pong() { 2.0 } else { 1.0 };
        let us = |nanos: u64| nanos as f64 / 1e3 / ways;
        let operations = plan.iters as f64 * ways;
        let seconds = elapsed.as_secs_f64().max(1e-9);
        Report {
            test: plan.test,
            size: plan.size,
            iters: plan.iters,
            path,
            spin,
            latency_us: [us(times.min()), us(times.value_at_quantile(0.5)), us(times.value_at_quantile(0.99)), us(times.max())],
            bandwidth: operations * plan.size as f64 / seconds / 1e6,
            rate: operations / seconds,
            cpu,
        }
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        let [min, p50, p99, max] = self.latency_us;
        serde_json::json!({
            "test": self.test.name(),
            "size": self.size,
            "iters": self.iters,
            "path": self.path,
            "spin": self.spin.to_string(),
            "latency_us": { "min": min, "p50": p50, "p99": p99, "max": max },
            "bandwidth_MBps": self.bandwidth,
            "messages_per_s": self.rate,
            "cpu_s": { "local": self.cpu.0, "remote": self.cpu.1 },
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [min, p50, p99, max] = self.latency_us;
        let (test, size, path) = (self.test.name(), size::show(self.size), self.path);
        writeln!(f, "{test} of {size} bytes, {} times, path {path}, spin {}", self.iters, self.spin)?;
        writeln!(f, "latency     min {min:.2} us, median {p50:.2} us, 99 % {p99:.2} us, max {max:.2} us")?;
        writeln!(f, "            ({})", self.test.latency_of())?;
        writeln!(f, "bandwidth   {:.1} MB/s", self.bandwidth)?;
        writeln!(f, "rate        {:.0} operations/s", self.rate)?;
        write!(f, "cpu         {:.3} s here, {:.3} s there", self.cpu.0, self.cpu.1)
    }
}

/// Processor time of this process, user and system, in seconds.
pub(crate) fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
