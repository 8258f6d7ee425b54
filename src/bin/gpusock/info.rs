//! `gpusock info`.

use std::process::ExitCode;

use gpusock::system;

use crate::output::print;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Prints JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> gpusock::Result<ExitCode> {
    let info = system::inspect();
    if args.json {
        print(serde_json::json!(info))?;
    } else {
        print(info)?;
    }
    Ok(ExitCode::SUCCESS)
}
