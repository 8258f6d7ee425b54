//! Where the weights are and how they are trained: on the host, or on a GPU.

use anyhow::{Result, bail};
use gpusock::{Context, GpuBuf, MemKind};

use crate::gpu::GpuTrainer;
use crate::net::{self, Adam, PARAMETERS};

const BYTES: u64 = 4 * PARAMETERS as u64;

pub enum Trainer {
    Host(HostTrainer),
    Gpu(GpuTrainer),
}

pub struct HostTrainer {
    weights: Vec<f32>,
    gradient: Vec<f32>,
    /// The weights, where the workers read them.
    shared: GpuBuf,
    adam: Adam,
}

impl Trainer {
    pub fn new(context: &Context, device: &str) -> Result<Self> {
        let weights = net::initial();
        let shared = context.alloc(device, BYTES)?;
        shared.copy_from_slice(0, &net::to_bytes(&weights))?;
        Ok(match shared.mem() {
            MemKind::Cuda(ordinal) => Trainer::Gpu(GpuTrainer::new(ordinal as usize, context, shared)?),
            _ => Trainer::Host(HostTrainer { weights, gradient: vec![0.0; PARAMETERS], shared, adam: Adam::new() }),
        })
    }

    /// The weights, where the workers read them.
    pub fn shared(&self) -> &GpuBuf {
        match self {
            Trainer::Host(host) => &host.shared,
            Trainer::Gpu(gpu) => gpu.shared(),
        }
    }

    /// Memory for the gradients of a worker.
    pub fn slot(&self, context: &Context) -> Result<GpuBuf> {
        Ok(context.alloc(self.shared().mem(), BYTES)?)
    }

    /// Takes a step along the gradient in `slot`, which nobody writes meanwhile. On a GPU the step may still be under way when this returns,
    /// but whatever this program does with the slot and the weights from now on comes after it.
    pub fn apply(&mut self, slot: &GpuBuf) -> Result<()> {
        match self {
            Trainer::Host(host) => host.apply(slot),
            Trainer::Gpu(gpu) => gpu.apply(slot),
        }
    }

    /// The weights as they are now.
    pub fn weights(&self) -> Result<Vec<f32>> {
        let mut weights = vec![0.0; PARAMETERS];
        net::from_bytes(&self.shared().to_vec()?, &mut weights);
        Ok(weights)
    }
}

impl HostTrainer {
    fn apply(&mut self, slot: &GpuBuf) -> Result<()> {
        net::from_bytes(&slot.to_vec()?, &mut self.gradient);
        if !self.gradient.iter().all(|g| g.is_finite()) {
            bail!("its gradient is no number");
        }
        self.adam.apply(&mut self.weights, &self.gradient);
        Ok(self.shared.copy_from_slice(0, &net::to_bytes(&self.weights))?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deviation(a: &[f32], b: &[f32]) -> f32 {
        a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    }

    async fn steps(device: &str) -> Vec<f32> {
        let context = Context::new().unwrap();
        let mut trainer = Trainer::new(&context, device).unwrap();
        let slot = trainer.slot(&context).unwrap();
        for step in 0..20 {
            let gradient: Vec<f32> = (0..PARAMETERS).map(|i| ((i * 31 + step * 7) % 101) as f32 * 0.01 - 0.5).collect();
            slot.copy_from_slice(0, &net::to_bytes(&gradient)).unwrap();
            trainer.apply(&slot).unwrap();
        }
        trainer.weights().unwrap()
    }

    #[tokio::test]
    async fn a_gpu_takes_the_steps_that_the_host_takes() {
        let host = steps("host").await;
        assert!(deviation(&host, &net::initial()) > 0.01, "nothing was trained");
        match Context::new().unwrap().alloc("cuda:0", 1) {
            Ok(_) => assert!(deviation(&host, &steps("cuda:0").await) < 1e-4),
            Err(why) => eprintln!("on a GPU: not run: {why}"),
        }
    }

    #[tokio::test]
    async fn what_is_no_number_is_refused() {
        let context = Context::new().unwrap();
        let mut trainer = Trainer::new(&context, "host").unwrap();
        let slot = trainer.slot(&context).unwrap();
        slot.copy_from_slice(0, &f32::NAN.to_le_bytes()).unwrap();
        assert!(trainer.apply(&slot).is_err());
        assert_eq!(trainer.weights().unwrap(), net::initial());
    }
}
