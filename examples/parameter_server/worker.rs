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
/// What the server says first: the worker's number, the number of workers, and two descriptors of 64 bytes.
pub const WELCOME: usize = 8 + 64 + 64;

pub async fn run(address: &str, device: &str) -> Result<()> {
    let context = Context::new()?;
    let server = context.connect(address).await?;
    let (welcome, _) = server.recv_bytes().await?;
    ensure!(welcome.len() == WELCOME, "{address} is no parameter server of this version");
    let number = |at: usize| u32::from_le_bytes([welcome[at], welcome[at + 1], welcome[at + 2], welcome[at + 3]]) as usize;
    let (worker, workers) = (number(0), number(4).max(1));
    let weights_there = RemoteBuf::from_bytes(&welcome[8..72])?;
    let slot_there = RemoteBuf::from_bytes(&welcome[72..])?;

    // Every worker trains on its own part of the images.
    let images: Vec<_> = data::load()?.0.into_iter().skip(worker % workers).step_by(workers).collect();
    let mut random = Random::new(1000 + worker as u64);
    let bytes = 4 * PARAMETERS as u64;
    let mut weights_here = context.alloc(device, bytes)?;
    let gradient_here = context.alloc(device, bytes)?;
    let mut answer = context.alloc("host", 8)?;
    let mut weights = vec![0.0; PARAMETERS];
    loop {
        server.read_remote(&mut weights_here, &weights_there).await.context("pulling the weights")?;
        net::from_bytes(&weights_here.to_vec()?, &mut weights);
        let mut gradient = vec![0.0; PARAMETERS];
        for _ in 0..BATCH {
            net::add_gradient(&weights, &images[random.below(images.len())], 1.0 / BATCH as f32, &mut gradient);
        }
        gradient_here.copy_from_slice(0, &net::to_bytes(&gradient))?;
        server.write_remote(&gradient_here, &slot_there).notify(PUSHED).await.context("pushing a gradient")?;
        server.recv(&mut answer).await.context("waiting for the server to apply a gradient")?;
        if *answer.map()? == STOP.to_le_bytes() {
            server.close().await?;
            return Ok(());
        }
    }
}
