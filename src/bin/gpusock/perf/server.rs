//! The server's side.

use std::process::ExitCode;

use gpusock::{Context, Error, GpuEndpoint, Result};

use super::args::{Serve, pin};
use super::ops::{NOTE, Side, check, pipeline, post, write_lat};
use super::plan::{Outcome, Plan, Ready, Test, VERSION, hear, tell};
use super::report::cpu_seconds;

pub(crate) async fn serve(args: &Serve) -> Result<ExitCode> {
    pin(args.pin)?;
    let context = Context::builder().spin(args.spin).lanes(16).build()?;
    let listener = context.bind(args.listen.as_str()).await?;
    println!("listening {}", listener.local_addr()?);
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
    let plan: Plan = hear(&endpoint).await?;
    let mut side = match prepare(context, &endpoint, &plan, limit) {
        Ok(side) => side,
        Err(error) => {
            tell(&endpoint, &Ready::Refused(error.to_string())).await?;
            endpoint.close().await?;
            return Ok(());
        }
    };
    let remote = plan.remote.is_some().then(|| side.descriptors());
    tell(&endpoint, &Ready::Go { remote }).await?;
    run(&mut side, &plan, plan.warmup).await?;
    let before = cpu_seconds();
    run(&mut side, &plan, plan.iters).await?;
    let cpu_s = cpu_seconds() - before;
    let wrong = if plan.verify && plan.size > 0 { verify(&side, &plan)? } else { None };
    tell(&endpoint, &Outcome { cpu_s, wrong }).await?;
    endpoint.closed().await;
    Ok(())
}

fn prepare(context: &Context, endpoint: &GpuEndpoint, plan: &Plan, limit: u64) -> Result<Side> {
    let refuse = |what: String| Err(Error::InvalidArgument { what: what.into() });
    if plan.version != VERSION {
        return refuse(format!("the client speaks version {} of this test, and the server {VERSION}", plan.version));
    }
    let buffers = 1 + plan.inboxes();
    if buffers.checked_mul(plan.size).is_none_or(|needed| needed > limit) {
        return refuse(format!("{buffers} x {} bytes are more than this server allows (--memory {limit})", plan.size));
    }
    let mut side = Side::new(context, endpoint.clone(), plan, plan.memory()?, plan.remote.is_some())?;
    if let Some(remote) = &plan.remote {
        side.set_remote(plan, remote)?;
    }
    Ok(side)
}

/// The counterpart of what the client does.
async fn run(side: &mut Side, plan: &Plan, count: u64) -> Result<()> {
    let Side { endpoint, source, inboxes, remote, .. } = side;
    match plan.test {
        Test::SendLat => {
            for _ in 0..count {
                endpoint.recv(&mut inboxes[0]).await?;
                endpoint.send(&*source).await?;
            }
        }
        Test::WriteLat | Test::NotifyLat => {
            let (source, target) = write_lat(plan, source, remote)?;
            let mut last = None;
            for _ in 0..count {
                endpoint.notified(NOTE, 1).await?;
                last = post(endpoint.write_remote(&source, &target).notify(NOTE), last).await?;
            }
            if let Some(last) = last {
                last.await?;
            }
        }
        Test::SendBw => {
            let window = inboxes.len() as u64;
            let receive = |i: usize| {
                let recv = endpoint.recv(inboxes[i].slice_mut(..));
                async move { recv.await.map(drop) }
            };
            pipeline(count, window, receive, || ()).await?;
            endpoint.send_bytes(&b""[..]).await?;
        }
        // The client works alone, and says when it has done.
        Test::WriteBw | Test::ReadLat | Test::ReadBw => endpoint.notified(NOTE, 1).await?,
    }
    Ok(())
}

fn verify(side: &Side, plan: &Plan) -> Result<Option<String>> {
    match plan.test {
        Test::ReadLat | Test::ReadBw | Test::NotifyLat => Ok(None),
        // Buffers that the run never came to are still zero.
        _ => check(&side.inboxes[..(plan.iters + plan.warmup).min(side.inboxes.len() as u64) as usize]),
    }
}
