//! The server's side.

use std::process::ExitCode;

use gpusock::{Context, Error, GpuBuf, GpuEndpoint, Received, Result};

use super::args::{Serve, pin};
use super::ops::{Checker, NOTE, Side, check_memory, invalid, pipeline, post};
use super::plan::{Begin, Outcome, Plan, Ready, Role, Test, hear_bytes, tell};
use super::report::cpu_seconds;
use crate::output::print;

pub(crate) async fn serve(args: &Serve) -> Result<ExitCode> {
    pin(args.pin)?;
    let context = Context::builder().spin(args.spin).lanes(16).build()?;
    let listener = context.bind(args.listen.as_str()).await.map_err(|error| match error {
        Error::Io { what, source } => {
            let hint = match source.kind() {
                std::io::ErrorKind::AddrInUse => " (choose another port, or 0 for a free one)",
                std::io::ErrorKind::InvalidInput => " (write HOST:PORT)",
                _ => "",
            };
            Error::Io { what: format!("{what}{hint}").into(), source }
        }
        error => error,
    })?;
    print(format_args!("listening {}", listener.local_addr()?))?;
    loop {
        let endpoint = listener.accept().await?;
        let peer = endpoint.peer_addr();
        let (context, limit) = (context.clone(), args.memory);
        let client = async move {
            match attend(&context, endpoint, limit).await {
                Ok(()) | Err(Error::Closed) => {}
                Err(error) => tracing::warn!(%peer, %error, "a client did not finish"),
            }
        };
        if args.once {
            client.await;
            return Ok(ExitCode::SUCCESS);
        }
        tokio::spawn(client);
    }
}

async fn attend(context: &Context, endpoint: GpuEndpoint, limit: u64) -> Result<()> {
    let bytes = hear_bytes(&endpoint).await?;
    let (plan, mut side) = match prepare(context, &endpoint, &bytes, limit) {
        Ok(ready) => ready,
        Err(error) => {
            tell(&endpoint, &Ready::Refused(error.to_string())).await?;
            endpoint.close().await?;
            return Ok(());
        }
    };
    tell(&endpoint, &Ready::Go { remote: side.descriptor() }).await?;
    let mut checker = Checker::new(plan.verify);
    run(&mut side, &plan, plan.warmup, &mut checker).await?;
    side.spoil()?;
    checker.wrong = None;
    tell(&endpoint, &Begin).await?;
    // All clients together, if there are several: the system counts by process.
    let before = cpu_seconds();
    run(&mut side, &plan, plan.iters, &mut checker).await?;
    let cpu_s = cpu_seconds() - before;
    if plan.test == Test::WriteBw {
        // What lands here on the client's own account is known only when the last write has.
        checker.check(&side.inboxes[0], plan.size)?;
    }
    tell(&endpoint, &Outcome { cpu_s, wrong: checker.wrong }).await?;
    endpoint.closed().await;
    Ok(())
}

fn prepare(context: &Context, endpoint: &GpuEndpoint, bytes: &[u8], limit: u64) -> Result<(Plan, Side)> {
    let plan = Plan::read(bytes)?;
    if plan.needs(Role::Server).is_none_or(|needed| needed > limit) {
        let buffers = u64::from(plan.has_source(Role::Server)) + plan.inboxes(Role::Server);
        return Err(invalid(format!("{buffers} x {} bytes are more than this server allows (--memory {limit})", plan.size)));
    }
    check_memory(&plan, &[Role::Server])?;
    let mut side = Side::new(context, endpoint.clone(), &plan, plan.memory()?, Role::Server)?;
    side.set_remote(&plan, Role::Server, plan.remote.as_deref())?;
    Ok((plan, side))
}

/// The counterpart of what the client does.
async fn run(side: &mut Side, plan: &Plan, count: u64, checker: &mut Checker) -> Result<()> {
    let target = side.target();
    let Side { endpoint, source, inboxes, .. } = side;
    match plan.test {
        Test::SendLat => {
            for _ in 0..count {
                let got = endpoint.recv(&mut inboxes[0]).await?;
                checker.check(&inboxes[0], got.len)?;
                endpoint.send(&*source).await?;
            }
        }
        Test::WriteLat | Test::NotifyLat => {
            let target = target?;
            let mut flying = None;
            for _ in 0..count {
                endpoint.notified(NOTE, 1).await?;
                checker.check(&inboxes[0], plan.size)?;
                flying = post(endpoint.write_remote(&*source, &target).notify(NOTE), flying).await?;
            }
            if let Some(flying) = flying {
                flying.await?;
            }
        }
        Test::SendBw => {
            let window = inboxes.len() as u64;
            let endpoint = &*endpoint;
            let receive = |inboxes: &mut Vec<GpuBuf>, at: usize| endpoint.recv(inboxes[at].slice_mut(..));
            let arrived = |inboxes: &mut Vec<GpuBuf>, at: usize, got: Received| checker.check(&inboxes[at], got.len);
            pipeline(inboxes, count, window, receive, arrived).await?;
            endpoint.send_bytes(&b""[..]).await?;
        }
        // The client works alone, and says when it has done.
        Test::WriteBw | Test::ReadLat | Test::ReadBw => endpoint.notified(NOTE, 1).await?,
    }
    Ok(())
}
