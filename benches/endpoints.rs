//! A thousand endpoints in one process beside a single one: message rate, memory and idle CPU. Prints a table.
//!
//! `cargo bench --bench endpoints`; under `cargo test` it only starts.

use std::time::{Duration, Instant};

use gpusock::{Context, GpuBuf, GpuEndpoint, PathKind, PathPolicy, Result};

const MANY: usize = 1000;
const MESSAGES: usize = 100_000;
const ROUNDS: usize = 9;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    // Cargo says `--bench` when it means it.
    let bench = std::env::args().any(|arg| arg == "--bench");
    let (endpoints, messages, rounds) = if bench { (MANY, MESSAGES, ROUNDS) } else { (10, 100, 1) };
    let tcp = || Context::builder().policy(PathPolicy::new().require(PathKind::Tcp)).build();
    let (server, client) = (tcp()?, tcp()?);
    let listener = server.bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let before = resident();
    let mut pairs = Vec::with_capacity(endpoints);
    for _ in 0..endpoints {
        let (a, b) = tokio::join!(listener.accept(), client.connect(address));
        pairs.push((a?, b?));
    }
    let each = (resident() - before) as f64 / (2 * endpoints) as f64 / 1024.0;
    let (out, mut inbox) = (client.alloc("host", 8)?, server.alloc("host", 8)?);
    // Taken in turns, so that both see the same machine.
    let (mut one, mut many) = (Vec::new(), Vec::new());
    rate(&pairs, messages / 10, &out, &mut inbox).await?;
    for _ in 0..rounds {
        one.push(rate(&pairs[..1], messages, &out, &mut inbox).await?);
        many.push(rate(&pairs, messages, &out, &mut inbox).await?);
    }
    let (one, many) = (median(one), median(many));
    println!("8-byte messages over 1 endpoint        {one:>10.0} a second");
    println!("the same over {endpoints:<5} in turn           {many:>10.0} a second, ratio {:.2} (to reach: 0.90)", many / one);
    println!("memory of an idle endpoint             {each:>10.1} KiB (to reach: 64)");
    if bench {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let (wall, cpu) = (Duration::from_secs(10), cpu());
        tokio::time::sleep(wall).await;
        let used = 100.0 * (self::cpu() - cpu).as_secs_f64() / wall.as_secs_f64();
        println!("processor, {:<5} endpoints idle         {used:>10.2} % of a core (to reach: 1)", 2 * endpoints);
    }
    Ok(())
}

/// Messages a second, each received before the next is sent.
async fn rate(pairs: &[(GpuEndpoint, GpuEndpoint)], messages: usize, out: &GpuBuf, inbox: &mut GpuBuf) -> Result<f64> {
    let begun = Instant::now();
    for (a, b) in pairs.iter().cycle().take(messages) {
        b.send(out).await?;
        a.recv(&mut *inbox).await?;
    }
    Ok(messages as f64 / begun.elapsed().as_secs_f64())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn resident() -> i64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .and_then(|line| line.split_whitespace().next()?.parse::<i64>().ok());
    kib.unwrap_or(0) << 10
}

fn cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
