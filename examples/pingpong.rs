//! The shortest conversation: two tasks, one message each way.

use gpusock::Context;

#[tokio::main]
async fn main() -> gpusock::Result<()> {
    let ctx = Context::new()?;
    let listener = ctx.bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;

    let pong = tokio::spawn(async move {
        let ep = listener.accept().await?;
        let (ping, tag) = ep.recv_bytes().await?;
        println!("got {ping:?} with tag {tag}");
        ep.send_bytes("pong").await
    });

    let ep = ctx.connect(address).await?;
    let receipt = ep.send_bytes("ping").tag(7).await?;
    println!("sent {} bytes by {} in {:?}", receipt.bytes, receipt.path, receipt.elapsed);
    println!("got {:?}", ep.recv_bytes().await?.0);
    if let Ok(result) = pong.await {
        result?;
    }
    Ok(())
}
