//! A worker: pulls weights, pushes gradients.

use anyhow::{Context as _, Result, ensure};
use gpusock::{Context, RemoteBuf};

use crate::data::{self, Random};
use crate::net::{self, PARAMETERS};

/// Images in a gradient.
const BATCH: usize = 32;
/// The notification that says that a gradient is in its slot.
pub const PUSHED: u64 = 1;
/// The answer that says that there is nothing more to do.
pub const STOP: u64 = u64::MAX;
/// The server's first message: the worker's number and the number of workers. The descriptors of the weights and of the slot follow.
pub const WELCOME: usize = 16;

pub async fn run(address: &str, device: &str) -> Result<()> {
    let context = Context::new()?;
    let server = context.connect(address).await?;
    let (welcome, _) = server.recv_bytes().await.context("waiting for a place among the workers")?;
    let strange = || format!("{address} is no parameter server of this version");
    let welcome: [u8; WELCOME] = welcome[..].try_into().ok().with_context(strange)?;
    let (worker, workers) = welcome.split_at(WELCOME / 2);
    let (worker, workers) = (usize_from(worker), usize_from(workers).max(1));
    let weights_there = RemoteBuf::from_bytes(&server.recv_bytes().await?.0).with_context(strange)?;
    let slot_there = RemoteBuf::from_bytes(&server.recv_bytes().await?.0).with_context(strange)?;
    let bytes = 4 * PARAMETERS as u64;
    ensure!(weights_there.len() == bytes && slot_there.len() == bytes, "{address} trains another network");
    println!("worker {worker} of {workers} at {address}");

    // Every worker trains on its own part of the images.
    let images: Vec<_> = data::load()?.0.into_iter().skip(worker % workers).step_by(workers).collect();
    let mut random = Random::new(1000 + worker as u64);
    let mut weights_here = context.alloc(device, bytes)?;
    let gradient_here = context.alloc(device, bytes)?;
    let mut weights = vec![0.0; PARAMETERS];
    for pushed in 1u64.. {
        let pull = server.read_remote(&mut weights_here, &weights_there).await.context("pulling the weights")?;
        net::from_bytes(&weights_here.to_vec()?, &mut weights);
        let mut gradient = vec![0.0; PARAMETERS];
        for _ in 0..BATCH {
            net::add_gradient(&weights, &images[random.below(images.len())], 1.0 / BATCH as f32, &mut gradient);
        }
        gradient_here.copy_from_slice(0, &net::to_bytes(&gradient))?;
        let push = server.write_remote(&gradient_here, &slot_there).notify(PUSHED).await.context("pushing a gradient")?;
        // Only after this answer may the slot be written again.
        let (answer, _) = server.recv_bytes().await.context("waiting for the server to apply a gradient")?;
        if answer[..] == STOP.to_le_bytes() {
            // The receipts know the path that weights and gradients took; the server only lent its memory.
            server.send_bytes(format!("{} {}", pull.path, push.path)).await?;
            server.close().await?;
            println!("done: {pushed} gradients pushed, path {}", push.path);
            break;
        }
    }
    Ok(())
}

fn usize_from(bytes: &[u8]) -> usize {
    bytes.iter().rev().fold(0, |number, &byte| number << 8 | usize::from(byte))
}
