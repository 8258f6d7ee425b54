//! The client's side, which measures.

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Instant;

use gpusock::{Error, Result};
use hdrhistogram::Histogram;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::args::{Measure, pin};
use super::ops::{NOTE, Side, check, pipeline, post, write_lat};
use super::plan::{Outcome, Plan, Ready, Test, VERSION, hear, tell};
use super::report::{Report, cpu_seconds};

/// The progress bar moves at most once in so many operations, so that it is not what is measured.
const BAR_STEP: u64 = 1024;

pub(crate) async fn run(address: &str, measure: &Measure) -> Result<ExitCode> {
    pin(measure.pin)?;
    let context = measure.context()?;
    let endpoint = context.connect(address).await?;
    let remote_memory = measure.remote_mem.unwrap_or(measure.mem);
    let one_sided = !matches!(measure.test, Test::SendLat | Test::SendBw);
    let mut plan = Plan {
        version: VERSION,
        test: measure.test,
        size: measure.size,
        iters: measure.iters,
        warmup: measure.warmup,
        window: measure.window,
        verify: measure.verify,
        memory: remote_memory.to_string(),
        remote: None,
    };
    let mut side = Side::new(&context, endpoint.clone(), &plan, measure.mem, one_sided)?;
    plan.remote = one_sided.then(|| side.descriptors());
    tell(&endpoint, &plan).await?;
    match hear(&endpoint).await? {
        Ready::Refused(reason) => return Err(Error::Handshake { peer: address.to_owned(), reason: reason.into() }),
        Ready::Go { remote } => side.set_remote(&plan, &remote.unwrap_or_default())?,
    }
    let bar = progress(measure);
    let mut times = histogram()?;
    repeat(&mut side, &plan, plan.warmup, &mut times, None).await?;
    times.reset();
    let cpu_before = cpu_seconds();
    let begun = Instant::now();
    repeat(&mut side, &plan, plan.iters, &mut times, bar.as_ref()).await?;
    let elapsed = begun.elapsed();
    let cpu_local = cpu_seconds() - cpu_before;
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    let Outcome { cpu_s: cpu_remote, wrong } = hear(&endpoint).await?;
    let path = endpoint.path_report()?.chosen().map_or("none", |kind| kind.name());
    let wrong = match wrong {
        None if plan.verify && plan.size > 0 => verify(&side, &plan)?,
        wrong => wrong,
    };
    let report = Report::new(&plan, path, measure.spin, &times, elapsed, (cpu_local, cpu_remote));
    if measure.json {
        println!("{}", report.json())
    } else {
        println!("{report}")
    }
    if let Some(wrong) = wrong {
        eprintln!("error: verification failed: {wrong}");
        return Ok(ExitCode::FAILURE);
    }
    endpoint.close().await?;
    Ok(ExitCode::SUCCESS)
}

/// Nanoseconds, to three digits, up to an hour.
fn histogram() -> Result<Histogram<u64>> {
    Histogram::new_with_bounds(1, 3_600_000_000_000, 3)
        .map_err(|e| Error::InvalidArgument { what: format!("histogram: {e}").into() })
}

fn progress(measure: &Measure) -> Option<ProgressBar> {
    if measure.json || !std::io::stderr().is_terminal() {
        return None;
    }
    let bar = ProgressBar::with_draw_target(Some(measure.iters), ProgressDrawTarget::stderr_with_hz(4));
    if let Ok(style) = ProgressStyle::with_template("{msg} [{wide_bar}] {pos}/{len} {eta}") {
        bar.set_style(style);
    }
    bar.set_message(measure.test.name());
    Some(bar)
}

/// Does the operation `count` times, and records how long each took.
async fn repeat(side: &mut Side, plan: &Plan, count: u64, times: &mut Histogram<u64>, bar: Option<&ProgressBar>) -> Result<()> {
    let Side { endpoint, source, inboxes, remote, .. } = side;
    let mut last = Instant::now();
    let mut n = 0;
    let mut record = || {
        let now = Instant::now();
        times.saturating_record((now - last).as_nanos() as u64);
        last = now;
        n += 1;
        if let Some(bar) = bar.filter(|_| n % BAR_STEP == 0) {
            bar.set_position(n);
        }
    };
    match plan.test {
        Test::SendLat => {
            for _ in 0..count {
                endpoint.send(&*source).await?;
                endpoint.recv(&mut inboxes[0]).await?;
                record();
            }
        }
        Test::WriteLat | Test::NotifyLat => {
            let (source, target) = write_lat(plan, source, remote)?;
            let mut last = None;
            for _ in 0..count {
                last = post(endpoint.write_remote(&source, &target).notify(NOTE), last).await?;
                endpoint.notified(NOTE, 1).await?;
                record();
            }
            if let Some(last) = last {
                last.await?;
            }
        }
        Test::SendBw => {
            let send = |_: usize| {
                let send = endpoint.send(&*source);
                async move { send.await.map(drop) }
            };
            pipeline(count, plan.window, send, record).await?;
            // The last byte has arrived when the server says so.
            endpoint.recv_bytes().await?;
        }
        Test::WriteBw => {
            let target = remote.first().ok_or(Error::Closed)?;
            let write = |_: usize| {
                let write = endpoint.write_remote(&*source, target);
                async move { write.await.map(drop) }
            };
            pipeline(count, plan.window, write, record).await?;
            finish(side).await?;
        }
        Test::ReadLat | Test::ReadBw => {
            let target = remote.first().ok_or(Error::Closed)?;
            let window = inboxes.len() as u64;
            let read = |i: usize| {
                let read = endpoint.read_remote(inboxes[i].slice_mut(..), target);
                async move { read.await.map(drop) }
            };
            pipeline(count, window, read, record).await?;
            finish(side).await?;
        }
    }
    Ok(())
}

/// Tells the server that the client, which worked alone, has done.
async fn finish(side: &Side) -> Result<()> {
    let target = side.remote.first().ok_or(Error::Closed)?;
    side.endpoint.write_remote(side.source.slice(..0), &target.slice(..0)?).notify(NOTE).await.map(drop)
}

fn verify(side: &Side, plan: &Plan) -> Result<Option<String>> {
    let used = |n: usize| (plan.iters + plan.warmup).min(n as u64) as usize;
    match plan.test {
        Test::SendLat | Test::WriteLat => check(&side.inboxes),
        Test::ReadLat | Test::ReadBw => check(&side.inboxes[..used(side.inboxes.len())]),
        Test::SendBw | Test::WriteBw | Test::NotifyLat => Ok(None),
    }
}
