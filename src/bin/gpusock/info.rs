//! `gpusock info`.

use std::process::ExitCode;

use gpusock::system::Probe;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Prints JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> gpusock::Result<ExitCode> {
    let info = Probe::new().info();
    if args.json {
        println!("{}", serde_json::json!(info));
    } else {
        println!("{info}");
    }
    Ok(ExitCode::SUCCESS)
}
