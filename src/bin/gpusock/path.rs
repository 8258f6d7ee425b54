//! `gpusock path`.

use std::process::ExitCode;

use gpusock::Context;

use crate::output::print;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// HOST:PORT of any gpusock listener, for example of `gpusock perf serve`.
    address: String,
    /// Prints JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) async fn run(args: &Args) -> gpusock::Result<ExitCode> {
    let context = Context::new()?;
    let endpoint = crate::connect(&context, &args.address).await?;
    let report = endpoint.path_report()?;
    if args.json {
        let rows: Vec<_> = report
            .candidates()
            .iter()
            .map(|c| {
                serde_json::json!({
                    "path": c.kind.name(),
                    "verdict": c.verdict.to_string(),
                    "reason": c.reason,
                    "one_way_us": c.cost.map(|cost| cost.latency.as_nanos() as f64 / 1e3),
                })
            })
            .collect();
        print(serde_json::json!({ "between": report.between(), "chosen": report.chosen().map(|k| k.name()), "paths": rows }))?;
    } else {
        print(report)?;
    }
    endpoint.close().await?;
    Ok(ExitCode::SUCCESS)
}
