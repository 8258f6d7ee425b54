//! A parameter server: trains a small neural network on handwritten digits, with the workers in processes of their own.
//!
//! ```sh
//! cargo run --release --example parameter_server
//! ```
//!
//! starts a server and four workers on this machine. Across machines, start `-- --listen 0.0.0.0:7700` on one and
//! `-- --connect server:7700` on each of the others. With `--device cuda:0` the weights and the gradients are on a GPU, where a kernel
//! applies them; each side chooses for itself.
//!
//! The weights are one buffer at the server, exposed for reading. Each worker has a slot there, exposed to it for writing. A worker
//! pulls the weights, computes a gradient on its part of the data, and writes it into its slot with a notification; the server applies it
//! and answers with a message, after which the slot may be written again. Nobody waits for anybody else: gradients may be a few
//! updates old, and a pull may see weights of two updates mixed, neither of which stochastic gradient descent minds. A worker that is
//! lost is reported, and the others go on; across machines, another one may take its place.

mod data;
mod gpu;
mod net;
mod progress;
mod server;
mod trainer;
mod worker;

use std::process::ExitCode;

use clap::Parser;

/// Trains a neural network with a parameter server.
#[derive(Parser, Clone)]
struct Args {
    /// Workers.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    workers: u32,
    /// Serves here and starts no workers: they come from other machines.
    #[arg(long, conflicts_with = "connect")]
    listen: Option<String>,
    /// Is one worker of the server at this address.
    #[arg(long)]
    connect: Option<String>,
    /// Where weights and gradients are: host or cuda:0.
    #[arg(long, default_value = "host")]
    device: String,
    /// Gradients to apply.
    #[arg(long, default_value_t = 3000, value_parser = clap::value_parser!(u64).range(1..))]
    updates: u64,
    /// Accuracy on the held-out images below which the training has failed.
    #[arg(long, default_value_t = 0.95, value_parser = fraction)]
    target: f32,
}

fn fraction(text: &str) -> Result<f32, String> {
    match text.parse() {
        Ok(number) if (0.0..=1.0).contains(&number) => Ok(number),
        _ => Err("a number from 0 to 1 is wanted".to_owned()),
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let args = Args::parse();
    let result = match &args.connect {
        Some(address) => worker::run(address, &args.device).await,
        None => server::run(&args).await,
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
