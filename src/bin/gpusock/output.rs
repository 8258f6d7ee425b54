//! What goes to the terminal.

use std::fmt::Display;
use std::io::{ErrorKind, Write};
use std::sync::Arc;

use gpusock::{Error, Result};

/// Prints a line to standard output. A reader that has had enough, like `head`, is no error.
pub(crate) fn print(line: impl Display) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{line}").and_then(|()| out.flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            Err(Error::Io { what: "writing to standard output".into(), source: Arc::new(e) })
        }
        _ => Ok(()),
    }
}

/// Prints an error. If nobody can be told, there is nothing left to do.
pub(crate) fn complain(what: impl Display) {
    let _ = writeln!(std::io::stderr(), "error: {what}");
}
