//! `gpusock perf`: measures between two processes.

mod args;
mod client;
mod ops;
mod plan;
mod report;
mod server;

use std::process::{ExitCode, Stdio};

use gpusock::{Error, Result};
use tokio::io::{AsyncBufReadExt, BufReader};

pub(crate) use args::Command;

pub(crate) async fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Serve(args) => server::serve(&args).await,
        Command::Run(args) => client::run(&args.address, &args.measure).await,
        Command::Pair(args) => pair(&args).await,
    }
}

/// Starts the server in a second process of this machine, and runs against it.
async fn pair(args: &args::Pair) -> Result<ExitCode> {
    let failed = |what: &str, e: std::io::Error| Error::Io { what: what.to_owned().into(), source: std::sync::Arc::new(e) };
    let program = std::env::current_exe().map_err(|e| failed("finding this program's file", e))?;
    let mut command = tokio::process::Command::new(program);
    command.args(["perf", "serve", "--once", "--listen", "127.0.0.1:0", "--spin", &args.measure.spin.to_string()]);
    if let Some(core) = args.pin_server {
        command.args(["--pin", &core.to_string()]);
    }
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|e| failed("starting the server process", e))?;
    let stdout = child.stdout.take().ok_or(Error::Closed)?;
    let mut lines = BufReader::new(stdout).lines();
    let line = lines.next_line().await.map_err(|e| failed("reading from the server process", e))?;
    let Some(address) = line.as_deref().and_then(|line| line.strip_prefix("listening ")) else {
        return Err(Error::Handshake { peer: "the server process".into(), reason: "it ended before it listened".into() });
    };
    let code = client::run(address, &args.measure).await;
    let _ = child.kill().await;
    code
}
