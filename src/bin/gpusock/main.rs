//! The `gpusock` command.

mod doctor;
mod info;
mod output;
mod path;
mod perf;
mod size;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use gpusock::{Context, Error, GpuEndpoint};

use output::complain;

/// Looks at what gpusock finds on this machine, and measures it.
#[derive(Parser)]
#[command(version, about, arg_required_else_help = true, after_help = ENVIRONMENT)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

const ENVIRONMENT: &str = "Environment:
  GPUSOCK_LOG             what is logged to standard error: error, warn (default), info, debug, trace, or as in gpusock=debug
  GPUSOCK_PATHS           paths that may be taken: tcp,inproc; or that may not: ^inproc
  GPUSOCK_TCP_CONGESTION  congestion control of all connections";

#[derive(Subcommand)]
enum Command {
    /// Shows devices, NICs, transports and limits.
    Info(info::Args),
    /// Shows the path to a listener, and why no better one is taken.
    Path(path::Args),
    /// Says what keeps this machine from its best path, and what to type.
    ///
    /// Ends with 0 if nothing is wrong, with 1 if something is, and with 2 if the machine could not be looked at.
    Doctor(doctor::Args),
    /// Measures latency and bandwidth between two processes.
    #[command(subcommand)]
    Perf(perf::Command),
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let Err(wrong) = log() {
        complain(wrong);
        return ExitCode::from(2);
    }
    // One thread: a process that is pinned to a core is measured as it is.
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            complain(format_args!("the tokio runtime cannot be started: {error}"));
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
            complain(error);
            ExitCode::FAILURE
        }
    }
}

/// Logs to standard error, as `GPUSOCK_LOG` wants it.
fn log() -> Result<(), String> {
    let wanted = std::env::var("GPUSOCK_LOG").ok().filter(|text| !text.trim().is_empty()).unwrap_or_else(|| "warn".into());
    let filter = tracing_subscriber::EnvFilter::try_new(&wanted).map_err(|e| {
        format!("GPUSOCK_LOG={wanted} cannot be understood ({e}); write error, warn, info, debug or trace, or for example gpusock=debug")
    })?;
    let ansi = std::io::stderr().is_terminal();
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(ansi).with_writer(std::io::stderr).init();
    Ok(())
}

/// Connects, and says what to do where that fails for an ordinary reason.
async fn connect(context: &Context, address: &str) -> gpusock::Result<GpuEndpoint> {
    context.connect(address).await.map_err(|error| match error {
        Error::Io { what, source } => {
            let hint = match source.kind() {
                std::io::ErrorKind::ConnectionRefused => " (does a listener, such as `gpusock perf serve`, run there?)",
                std::io::ErrorKind::InvalidInput => " (write HOST:PORT)",
                _ => "",
            };
            Error::Io { what: format!("{what}{hint}").into(), source }
        }
        error => error,
    })
}
