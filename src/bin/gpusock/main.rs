//! The `gpusock` command.

mod doctor;
mod info;
mod path;
mod perf;
mod size;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Looks at what gpusock finds on this machine, and measures it.
#[derive(Parser)]
#[command(version, about, arg_required_else_help = true)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Shows devices, NICs, transports and limits.
    Info(info::Args),
    /// Shows the path to a listener, and why no better one is taken.
    Path(path::Args),
    /// Says what keeps this machine from its best path, and what to type.
    Doctor(doctor::Args),
    /// Measures latency and bandwidth between two processes.
    #[command(subcommand)]
    Perf(perf::Command),
}

fn main() -> ExitCode {
    let args = Args::parse();
    let filter = tracing_subscriber::EnvFilter::try_from_env("GPUSOCK_LOG").unwrap_or_else(|_| "warn".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    // One thread: a process that is pinned to a core is measured as it is.
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: the tokio runtime cannot be started: {error}");
            return ExitCode::from(2);
        }
    };
    let result = runtime.block_on(async {
        match args.command {
            Command::Info(args) => info::run(&args),
            Command::Path(args) => path::run(&args).await,
            Command::Doctor(args) => doctor::run(&args),
            Command::Perf(command) => perf::run(command).await,
        }
    });
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
