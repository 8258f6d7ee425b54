//! The client's side, which measures.

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use gpusock::{Context, Error, GpuBuf, GpuEndpoint, Result};
use hdrhistogram::Histogram;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::args::{Measure, pin};
use super::ops::{Checker, NOTE, Side, check_memory, pipeline, post};
use super::plan::{Begin, Outcome, Plan, Ready, Role, Test, VERSION, hear, strange, tell};
use super::report::{Report, cpu_seconds};
use crate::output::{complain, print};

/// The progress bar moves at most so often, so that it is not what is measured.
const BAR_STEP: Duration = Duration::from_millis(250);
/// A server that has answered nothing by then is none. It fills its buffers before it answers.
const ANSWER: Duration = Duration::from_secs(60);

pub(crate) async fn run(address: &str, measure: &Measure) -> Result<ExitCode> {
    pin(measure.pin)?;
    let context = measure.context()?;
    let endpoint = crate::connect(&context, address).await?;
    let result = measured(&context, &endpoint, measure).await;
    // Whatever it came to, the server is told that this side leaves. If it is gone itself, the run has said so.
    let _ = endpoint.close().await;
    let (report, wrong) = result?;
    if measure.json {
        print(report.json())?;
    } else {
        print(report)?;
    }
    if let Some(wrong) = wrong {
        complain(format_args!("verification failed: {wrong}"));
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

/// Answers what was measured, and what is wrong with the bytes.
async fn measured(context: &Context, endpoint: &GpuEndpoint, measure: &Measure) -> Result<(Report, Option<String>)> {
    let mut plan = Plan {
        version: VERSION,
        test: measure.test,
        size: if measure.test == Test::NotifyLat { 0 } else { measure.size },
        iters: measure.iters,
        warmup: measure.warmup,
        window: measure.window,
        verify: measure.verify,
        memory: measure.remote_mem.unwrap_or(measure.mem).to_string(),
        remote: None,
    };
    let same_machine = endpoint.peer_addr().ip() == endpoint.local_addr().ip();
    check_memory(&plan, if same_machine { &[Role::Client, Role::Server] } else { &[Role::Client] })?;
    let mut side = Side::new(context, endpoint.clone(), &plan, measure.mem, Role::Client)?;
    plan.remote = side.descriptor();
    tell(endpoint, &plan).await?;
    let answer = tokio::time::timeout(ANSWER, hear(endpoint)).await;
    let none = |_| strange(endpoint, &format!("it said nothing within {ANSWER:?}; is it a `gpusock perf serve`?"));
    match answer.map_err(none)?? {
        Ready::Refused(reason) => return Err(strange(endpoint, &format!("the server refuses: {reason}"))),
        Ready::Go { remote } => side.set_remote(&plan, Role::Client, remote.as_deref())?,
    }
    let bar = progress(measure);
    let mut run = Run::new(&plan, None)?;
    run.repeat(&mut side, &plan, plan.warmup).await?;
    let Begin = hear(endpoint).await?;
    side.spoil()?;
    let mut run = Run::new(&plan, bar.as_ref())?;
    let cpu_before = cpu_seconds();
    let begun = Instant::now();
    run.repeat(&mut side, &plan, plan.iters).await?;
    let elapsed = begun.elapsed();
    let cpu_local = cpu_seconds() - cpu_before;
    let Run { times, checker, .. } = run;
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    let Outcome { cpu_s: cpu_remote, wrong } = hear(endpoint).await?;
    let path = endpoint.path_report()?.chosen().map_or("none", |kind| kind.name());
    let here = checker.wrong.map(|wrong| format!("at the client, {wrong}"));
    let there = wrong.map(|wrong| format!("at the server, {wrong}"));
    Ok((Report::new(&plan, path, measure.spin, &times, elapsed, (cpu_local, cpu_remote)), here.or(there)))
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

struct Run<'a> {
    times: Histogram<u64>,
    checker: Checker,
    bar: Option<&'a ProgressBar>,
    /// Operations so far, and when the bar was moved last.
    done: u64,
    drawn: Instant,
    /// When the clock was read last: at the end of an operation.
    last: Instant,
    /// When each operation of the window was issued.
    begun: Vec<Instant>,
}

impl<'a> Run<'a> {
    fn new(plan: &Plan, bar: Option<&'a ProgressBar>) -> Result<Self> {
        // Nanoseconds, to three digits, up to an hour.
        let times = Histogram::new_with_bounds(1, 3_600_000_000_000, 3)
            .map_err(|e| Error::InvalidArgument { what: format!("histogram: {e}").into() })?;
        let now = Instant::now();
        let begun = vec![now; plan.window as usize];
        Ok(Run { times, checker: Checker::new(plan.verify), bar, done: 0, drawn: now, last: now, begun })
    }

    fn record(&mut self, begun: Instant) {
        let now = Instant::now();
        self.times.saturating_record((now - begun).as_nanos() as u64);
        self.last = now;
        self.done += 1;
        if let Some(bar) = self.bar.filter(|_| now - self.drawn >= BAR_STEP) {
            bar.set_position(self.done);
            self.drawn = now;
        }
    }

    /// An operation of the window is issued where the clock has just been read, at the end of the one whose place it takes.
    fn issue(&mut self, at: usize) {
        self.begun[at] = self.last;
    }

    fn complete<T>(&mut self, at: usize, _: T) -> Result<()> {
        self.record(self.begun[at]);
        Ok(())
    }

    /// Does the operation `count` times, and records how long each took.
    async fn repeat(&mut self, side: &mut Side, plan: &Plan, count: u64) -> Result<()> {
        self.last = Instant::now();
        match plan.test {
            Test::SendLat => self.send_lat(side, count).await,
            Test::WriteLat | Test::NotifyLat => self.write_lat(side, plan, count).await,
            Test::SendBw => {
                let Side { endpoint, source, .. } = &*side;
                let send = |run: &mut Self, at| {
                    run.issue(at);
                    endpoint.send(source)
                };
                pipeline(self, count, plan.window, send, Self::complete).await?;
                // The last byte has arrived when the server says so.
                endpoint.recv_bytes().await.map(drop)
            }
            Test::WriteBw => {
                let Side { endpoint, source, .. } = &*side;
                let target = side.target()?;
                let write = |run: &mut Self, at| {
                    run.issue(at);
                    endpoint.write_remote(source, &target)
                };
                pipeline(self, count, plan.window, write, Self::complete).await?;
                finish(side).await
            }
            Test::ReadLat => self.read(side, plan, count, 1).await,
            Test::ReadBw => self.read(side, plan, count, plan.window).await,
        }
    }

    async fn send_lat(&mut self, side: &mut Side, count: u64) -> Result<()> {
        let Side { endpoint, source, inboxes, .. } = side;
        for _ in 0..count {
            endpoint.send(&*source).await?;
            let got = endpoint.recv(&mut inboxes[0]).await?;
            self.record(self.last);
            self.checker.check(&inboxes[0], got.len)?;
        }
        Ok(())
    }

    async fn write_lat(&mut self, side: &Side, plan: &Plan, count: u64) -> Result<()> {
        let target = side.target()?;
        let Side { endpoint, source, inboxes, .. } = side;
        let mut flying = None;
        for _ in 0..count {
            flying = post(endpoint.write_remote(source, &target).notify(NOTE), flying).await?;
            endpoint.notified(NOTE, 1).await?;
            self.record(self.last);
            self.checker.check(&inboxes[0], plan.size)?;
        }
        if let Some(flying) = flying {
            flying.await?;
        }
        Ok(())
    }

    async fn read(&mut self, side: &mut Side, plan: &Plan, count: u64, window: u64) -> Result<()> {
        let target = side.target()?;
        let Side { endpoint, inboxes, .. } = side;
        let endpoint = &*endpoint;
        let read = |(run, inboxes): &mut (&mut Self, &mut Vec<GpuBuf>), at: usize| {
            run.issue(at);
            endpoint.read_remote(inboxes[at].slice_mut(..), &target)
        };
        let arrived = |(run, inboxes): &mut (&mut Self, &mut Vec<GpuBuf>), at: usize, _| {
            run.complete(at, ())?;
            run.checker.check(&inboxes[at], plan.size)
        };
        pipeline(&mut (self, inboxes), count, window, read, arrived).await?;
        finish(side).await
    }
}

/// Tells the server that the client, which worked alone, has done.
async fn finish(side: &Side) -> Result<()> {
    let target = side.target()?;
    side.endpoint.write_remote(side.source.slice(..0), &target.slice(..0)?).notify(NOTE).await.map(drop)
}
