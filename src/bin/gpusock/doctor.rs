//! `gpusock doctor`.

use std::process::ExitCode;

use gpusock::system::{self, Check};

use crate::output::{complain, print};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Prints JSON.
    #[arg(long)]
    json: bool,
}

/// Ends with 0 if nothing is wrong, with 1 if something is, with 2 if it could not look.
pub(crate) fn run(args: &Args) -> gpusock::Result<ExitCode> {
    match diagnose(args) {
        Ok(0) => Ok(ExitCode::SUCCESS),
        Ok(_) => Ok(ExitCode::FAILURE),
        Err(error) => {
            complain(error);
            Ok(ExitCode::from(2))
        }
    }
}

/// Answers how many problems there are.
fn diagnose(args: &Args) -> gpusock::Result<usize> {
    let checks = system::checks()?;
    let problems = checks.iter().filter(|check| Check::is_problem(check)).count();
    if args.json {
        print(serde_json::json!({ "problems": problems, "checks": checks }))?;
        return Ok(problems);
    }
    for check in &checks {
        print(check)?;
    }
    print(match problems {
        0 => "\nNothing is wrong.".to_owned(),
        1 => "\n1 problem.".to_owned(),
        n => format!("\n{n} problems."),
    })?;
    Ok(problems)
}
