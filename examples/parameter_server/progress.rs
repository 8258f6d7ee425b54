//! The progress, on standard output: one line that is drawn again on a terminal, plain lines otherwise.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// How often it is shown.
const SHOW: Duration = Duration::from_millis(300);

pub struct Progress {
    shown: Instant,
    terminal: bool,
    /// Whether the terminal's cursor is behind a line of progress.
    open: bool,
}

impl Progress {
    pub fn new() -> Self {
        Progress { shown: Instant::now(), terminal: std::io::stdout().is_terminal(), open: false }
    }

    pub fn is_due(&self) -> bool {
        self.shown.elapsed() >= SHOW
    }

    pub fn show(&mut self, updates: u64, wanted: u64, accuracy: f32) {
        self.shown = Instant::now();
        let line = format!("{updates} of {wanted} updates, test accuracy {accuracy:.3}");
        if self.terminal {
            print!("\r{line} ");
            // A terminal that went away is no reason to stop training.
            let _ = std::io::stdout().flush();
            self.open = true;
        } else {
            println!("{line}");
        }
    }

    /// Says something in between, on standard error.
    pub fn note(&mut self, what: &str) {
        self.end();
        eprintln!("{what}");
    }

    /// Leaves the line of progress as it is.
    pub fn end(&mut self) {
        if std::mem::take(&mut self.open) {
            println!();
        }
    }
}
