//! `gpusock doctor`.

use std::process::ExitCode;

use gpusock::system::{Probe, Severity};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Prints JSON.
    #[arg(long)]
    json: bool,
}

/// Ends with 0 if nothing is wrong, with 1 if something is.
pub(crate) fn run(args: &Args) -> gpusock::Result<ExitCode> {
    let checks = Probe::new().checks();
    if args.json {
        println!("{}", serde_json::json!({ "checks": checks }));
    } else {
        for check in &checks {
            println!("{check}");
        }
    }
    let wrong = checks.iter().any(|check| check.severity >= Severity::Warn);
    Ok(if wrong { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
