//! Facts about the machine, and checks of what keeps it from its best path.
//!
//! Everything is read from files below a root, so that the decisions can be tested on recorded machines. Nothing is opened that
//! would touch a device: a GPU or a NIC is only looked at where the kernel describes it. The one exception is the CUDA driver of this machine,
//! which is asked for its devices without opening any.

mod checks;
mod cuda;
mod devices;
mod info;
mod limits;
mod network;

use std::path::PathBuf;

pub use checks::{Check, Severity};
pub use cuda::{Cuda, CudaDevice};
pub use devices::{Gid, Gpu, Pci, RdmaDevice, RdmaFile, RdmaPort};
pub use info::{HugePages, Info, Namespace, NumaNode};
pub use limits::{Cgroup, IpcLock, Limit};
pub use network::{Interface, Tcp};

use crate::error::Result;

/// What there is on this machine.
#[must_use]
pub fn inspect() -> Info {
    Probe::new().info()
}

/// What is right and what is wrong on this machine.
///
/// # Errors
///
/// As for [`Probe::checks`].
pub fn checks() -> Result<Vec<Check>> {
    Probe::new().checks()
}

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
    /// `proc/self/limits`; the addresses of its network interfaces are not known.
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

    /// The text of a file, as what it stands for.
    fn value<T: std::str::FromStr>(&self, path: &str) -> Option<T> {
        self.text(path)?.parse().ok()
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

    /// Names in a directory that are a prefix and a number, by number.
    fn numbered(&self, path: &str, prefix: &str) -> Vec<u32> {
        let names = self.names(path);
        let mut numbers: Vec<_> = names.iter().filter_map(|name| name.strip_prefix(prefix)?.parse().ok()).collect();
        numbers.sort_unstable();
        numbers
    }

    /// Where a symbolic link points.
    fn link(&self, path: &str) -> Option<String> {
        std::fs::read_link(self.path(path)).ok()?.into_os_string().into_string().ok()
    }

    /// Where a library is, in the directories in which a loader usually looks. It is not loaded, since that runs its code.
    fn library(&self, name: &str) -> Option<String> {
        const PLACES: [&str; 12] = [
            "/usr/lib/x86_64-linux-gnu",
            "/usr/lib/aarch64-linux-gnu",
            "/lib/x86_64-linux-gnu",
            "/lib/aarch64-linux-gnu",
            "/usr/lib64",
            "/lib64",
            "/usr/lib",
            "/lib",
            "/usr/local/lib",
            "/usr/local/nvidia/lib64",
            "/usr/local/cuda/compat",
            "/usr/lib/wsl/lib",
        ];
        let extra = if self.live { std::env::var("LD_LIBRARY_PATH").unwrap_or_default() } else { String::new() };
        let configured =
            self.names("/etc/ld.so.conf.d").into_iter().filter_map(|file| self.text(&format!("/etc/ld.so.conf.d/{file}")));
        let configured = configured.collect::<Vec<_>>().join("\n");
        let places =
            extra.split(':').chain(configured.lines().map(str::trim)).filter(|place| place.starts_with('/')).chain(PLACES);
        places.map(|place| format!("{}/{name}", place.trim_end_matches('/'))).find(|file| self.exists(file))
    }
}

/// The number that follows a name at the beginning of a line.
fn number_after(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_found_where_the_loader_is_configured_to_look() {
        let (_dir, probe) = checks::fixture(&[
            ("etc/ld.so.conf.d/nvidia.conf", "# a comment\n/opt/driver/lib/\n"),
            ("opt/driver/lib/libcuda.so.1", ""),
            ("usr/lib64/libibverbs.so.1", ""),
        ]);
        assert_eq!(probe.library("libcuda.so.1").as_deref(), Some("/opt/driver/lib/libcuda.so.1"));
        assert_eq!(probe.library("libibverbs.so.1").as_deref(), Some("/usr/lib64/libibverbs.so.1"));
        assert_eq!(probe.library("libnvidia-ml.so.1"), None);
    }
}
