//! Endpoints without a listener: two processes that already talk to each other, here through the pipes between a program and the program
//! that it started, exchange offers over that channel. It could as well be gRPC, etcd or a Kubernetes annotation.

use anyhow::{Context as _, Result, ensure};
use gpusock::{Context, GpuEndpoint};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Sends this side's offer, receives the other's, and connects. Both sides do the same.
async fn connect(ctx: &Context, from: &mut (impl AsyncRead + Unpin), to: &mut (impl AsyncWrite + Unpin)) -> Result<GpuEndpoint> {
    let offer = ctx.offer().await?;
    to.write_u32(offer.len() as u32).await?;
    to.write_all(&offer).await?;
    to.flush().await?;
    // What comes from outside is bounded before it is allocated.
    let len = from.read_u32().await?;
    ensure!(len <= 4096, "the other side says that its offer has {len} bytes");
    let mut peer = vec![0; len as usize];
    from.read_exact(&mut peer).await?;
    Ok(ctx.connect_offer(&peer).await?)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let ctx = Context::new()?;
    if std::env::args().nth(1).as_deref() == Some("child") {
        let ep = connect(&ctx, &mut tokio::io::stdin(), &mut tokio::io::stdout()).await?;
        let (question, _) = ep.recv_bytes().await?;
        ep.send_bytes([&question[..], b" - forty-two"].concat()).await?;
        ep.close().await?;
        return Ok(());
    }
    let mut child = tokio::process::Command::new(std::env::current_exe()?)
        .arg("child")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .context("starting the other process")?;
    let (mut to, mut from) = (child.stdin.take().context("no pipe")?, child.stdout.take().context("no pipe")?);
    let ep = connect(&ctx, &mut from, &mut to).await?;
    println!("{}", ep.path_report()?);
    ep.send_bytes("What do you get if you multiply six by nine?").await?;
    println!("{}", String::from_utf8_lossy(&ep.recv_bytes().await?.0));
    let status = child.wait().await?;
    ensure!(status.success(), "the other process ended with {status}");
    Ok(())
}
