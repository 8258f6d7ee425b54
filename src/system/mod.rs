//! Facts about the machine, and checks of what keeps it from its best path.
//!
//! Everything is read from files below a root, so that the decisions can be tested on recorded machines.

mod checks;
mod info;

use std::path::{Path, PathBuf};

pub use checks::{Check, Severity};
pub use info::{Info, Interface, Limit};

/// Reads the facts of a machine.
#[derive(Debug, Clone)]
pub struct Probe {
    root: PathBuf,
    live: bool,
}

impl Default for Probe {
    fn default() -> Self {
        Self::new()
    }
}

impl Probe {
    /// This machine.
    #[must_use]
    pub fn new() -> Self {
        Probe { root: "/".into(), live: true }
    }

    /// A machine that was recorded as files below `root`, in the places that they have on a machine. Limits are read from
    /// `proc/self/limits`.
    #[must_use]
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Probe { root: root.into(), live: false }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// The text of a file, trimmed.
    fn text(&self, path: &str) -> Option<String> {
        std::fs::read_to_string(self.path(path)).ok().map(|text| text.trim().to_owned())
    }

    fn exists(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// Names in a directory, sorted.
    fn names(&self, path: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(path)).into_iter().flatten().flatten();
        let mut names: Vec<_> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// The first directory of the usual ones that holds a library.
    fn library(&self, name: &str) -> Option<String> {
        const PLACES: [&str; 8] = [
            "/usr/lib/x86_64-linux-gnu",
            "/usr/lib/aarch64-linux-gnu",
            "/lib/x86_64-linux-gnu",
            "/usr/lib64",
            "/usr/lib",
            "/usr/local/lib",
            "/usr/local/nvidia/lib64",
            "/usr/local/cuda/compat",
        ];
        let extra = if self.live { std::env::var("LD_LIBRARY_PATH").unwrap_or_default() } else { String::new() };
        let places = extra.split(':').filter(|place| !place.is_empty()).chain(PLACES);
        places.map(|place| format!("{}/{name}", place.trim_end_matches('/'))).find(|file| Path::exists(&self.path(file)))
    }
}
