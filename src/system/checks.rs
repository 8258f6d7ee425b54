//! What is wrong, and what to type.

use std::fmt;

use super::{Info, Probe};

/// How much a finding matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "cli", derive(serde::Serialize), serde(rename_all = "lowercase"))]
#[non_exhaustive]
pub enum Severity {
    /// As it should be.
    Ok,
    /// Worth knowing.
    Info,
    /// Something works worse than it could.
    Warn,
    /// Something does not work.
    Error,
}

/// One finding.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Check {
    /// What was looked at.
    pub name: &'static str,
    /// How much it matters.
    pub severity: Severity,
    /// What was seen.
    pub seen: String,
    /// What to type or change.
    pub fix: Option<String>,
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = match self.severity {
            Severity::Ok => "ok",
            Severity::Info => "info",
            Severity::Warn => "WARN",
            Severity::Error => "ERROR",
        };
        write!(f, "{mark:<6}{:<16}{}", self.name, self.seen)?;
        match &self.fix {
            Some(fix) => write!(f, "\n{:22}-> {fix}", ""),
            None => Ok(()),
        }
    }
}

/// A service with a few hundred peers needs about this many descriptors.
const FILES_WANTED: u64 = 4096;
/// Locked memory below this is the old default of many systems, and too little for any registration.
const MEMLOCK_WANTED: u64 = 64 << 20;

impl Probe {
    /// Looks at everything that this version can judge.
    #[must_use]
    pub fn checks(&self) -> Vec<Check> {
        let info = self.info();
        vec![
            open_files(&info),
            memlock(&info),
            congestion(&info),
            memory_files(self),
            gpu(&info),
            rdma(self, &info),
            namespaces(self),
        ]
    }
}

fn finding(name: &'static str, severity: Severity, seen: impl Into<String>, fix: Option<&str>) -> Check {
    Check { name, severity, seen: seen.into(), fix: fix.map(str::to_owned) }
}

fn open_files(info: &Info) -> Check {
    let limit = info.open_files;
    let enough = limit.soft.is_none_or(|soft| soft >= FILES_WANTED);
    let (severity, fix) = match (enough, limit.hard.is_none_or(|hard| hard >= FILES_WANTED)) {
        (true, _) => (Severity::Ok, None),
        (false, true) => (Severity::Warn, Some("ulimit -n 4096, or LimitNOFILE=4096 in the systemd unit")),
        (false, false) => (
            Severity::Warn,
            Some("raise the hard limit: `* hard nofile 4096` in /etc/security/limits.conf, or --ulimit nofile of the container"),
        ),
    };
    finding("open files", severity, format!("the limit is {limit}"), fix)
}

fn memlock(info: &Info) -> Check {
    let limit = info.memlock;
    let seen = format!("the limit is {limit} bytes");
    if info.ipc_lock {
        return finding("locked memory", Severity::Ok, format!("{seen}, and CAP_IPC_LOCK lifts it"), None);
    }
    if limit.soft.is_none_or(|soft| soft >= MEMLOCK_WANTED) {
        return finding("locked memory", Severity::Ok, seen, None);
    }
    // It matters to RDMA only.
    let severity = if info.rdma_devices.is_empty() { Severity::Info } else { Severity::Error };
    let fix = if limit.hard.is_none() {
        "ulimit -l unlimited"
    } else {
        "raise the hard limit: `* hard memlock unlimited` in /etc/security/limits.conf, LimitMEMLOCK=infinity in the systemd unit, or \
         --ulimit memlock=-1 of the container (the capability IPC_LOCK alone does nothing for a process that is not root)"
    };
    finding("locked memory", severity, format!("{seen}: too little to register memory with an RDMA NIC"), Some(fix))
}

fn congestion(info: &Info) -> Check {
    match info.tcp_congestion.as_deref() {
        Some("bbr") => finding(
            "TCP",
            Severity::Info,
            "the system's congestion control is bbr, which paces; connections within this host use reno instead",
            None,
        ),
        Some(name) => finding("TCP", Severity::Ok, format!("congestion control {name}"), None),
        None => finding("TCP", Severity::Warn, "the kernel's TCP settings cannot be read (is /proc mounted?)", None),
    }
}

fn memory_files(probe: &Probe) -> Check {
    const NAME: &str = "memory files";
    match probe.text("/proc/sys/vm/memfd_noexec").as_deref() {
        Some("2") => finding(
            NAME,
            Severity::Info,
            "vm.memfd_noexec is 2: memory files without MFD_NOEXEC_SEAL are refused, and large buffers come from the heap instead",
            Some("sysctl vm.memfd_noexec=1"),
        ),
        _ => finding(NAME, Severity::Ok, "large buffers are memory files, which TCP sends without a copy", None),
    }
}

fn gpu(info: &Info) -> Check {
    const NAME: &str = "GPU";
    const NO_ENGINE: &str = "this version of gpusock has no CUDA engine, and uses host memory only";
    match (info.gpus.len(), &info.cuda_library) {
        (0, _) => finding(NAME, Severity::Ok, "no NVIDIA GPU", None),
        (n, Some(_)) => finding(NAME, Severity::Info, format!("{n} GPUs, but {NO_ENGINE}"), None),
        (n, None) => finding(
            NAME,
            Severity::Info,
            format!("{n} GPUs without libcuda.so.1; and {NO_ENGINE}"),
            Some("install the driver's user-space part, or run the container with --gpus all"),
        ),
    }
}

fn rdma(probe: &Probe, info: &Info) -> Check {
    const NAME: &str = "RDMA";
    const NO_ENGINE: &str = "this version of gpusock has no verbs engine, and takes TCP";
    if info.rdma_devices.is_empty() {
        return finding(NAME, Severity::Ok, "no RDMA device", None);
    }
    let devices = info.rdma_devices.join(", ");
    let (missing, fix) = match (probe.exists("/dev/infiniband"), &info.verbs_library) {
        (false, _) => (" /dev/infiniband is missing;", Some("run the container with --device /dev/infiniband")),
        (true, None) => (" libibverbs.so.1 is missing;", Some("apt-get install libibverbs1 ibverbs-providers")),
        (true, Some(_)) => ("", None),
    };
    finding(NAME, Severity::Info, format!("{devices};{missing} {NO_ENGINE}"), fix)
}

fn namespaces(probe: &Probe) -> Check {
    // The initial namespaces have fixed numbers (include/uapi/linux/nsfs.h and proc_ns.h of the kernel).
    const INITIAL: [(&str, &str); 2] = [("ipc", "4026531839"), ("pid", "4026531836")];
    let own = |name: &str| std::fs::read_link(probe.path(&format!("/proc/self/ns/{name}"))).ok();
    let private: Vec<_> = INITIAL
        .iter()
        .filter(|(name, number)| own(name).is_some_and(|link| !link.to_string_lossy().contains(number)))
        .map(|(name, _)| *name)
        .collect();
    if private.is_empty() {
        return finding("namespaces", Severity::Ok, "processes of this host see each other", None);
    }
    let seen = format!("private {} namespace: processes outside of it are reached by TCP all the same", private.join(" and "));
    finding("namespaces", Severity::Info, seen, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine of a few files.
    fn machine(files: &[(&str, &str)]) -> (tempfile::TempDir, Probe) {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let file = dir.path().join(path);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
        }
        let probe = Probe::at(dir.path());
        (dir, probe)
    }

    fn limits(memlock: &str, files: &str) -> String {
        format!(
            "Limit                     Soft Limit           Hard Limit           Units\nMax locked memory         {memlock} bytes\nMax open files            {files} files\n"
        )
    }

    fn check(probe: &Probe, name: &str) -> Check {
        probe.checks().into_iter().find(|check| check.name == name).unwrap()
    }

    #[test]
    fn little_locked_memory_is_an_error_only_where_there_is_a_nic() {
        let limits = limits("65536 65536", "1024 1048576");
        let (_dir, without) = machine(&[("proc/self/limits", &limits)]);
        assert_eq!(check(&without, "locked memory").severity, Severity::Info);
        let (_dir, with) = machine(&[("proc/self/limits", &limits), ("sys/class/infiniband/mlx5_0/fw_ver", "1")]);
        let found = check(&with, "locked memory");
        assert_eq!(found.severity, Severity::Error);
        assert!(found.seen.contains("65536") && found.fix.unwrap().contains("limits.conf"));
        let files = check(&with, "open files");
        assert_eq!(files.severity, Severity::Warn);
        assert!(files.fix.unwrap().starts_with("ulimit -n"));
    }

    #[test]
    fn a_capability_lifts_the_limit() {
        let limits = limits("65536 65536", "65536 65536");
        let (_dir, probe) = machine(&[("proc/self/limits", &limits), ("proc/self/status", "CapEff:\t0000000000004000\n")]);
        assert_eq!(check(&probe, "locked memory").severity, Severity::Ok);
        let unlimited = self::limits("unlimited unlimited", "65536 65536");
        let (_dir, probe) = machine(&[("proc/self/limits", &unlimited)]);
        assert_eq!(check(&probe, "locked memory").severity, Severity::Ok);
    }

    #[test]
    fn a_nic_in_a_container_without_its_device_files_is_explained() {
        let (_dir, probe) = machine(&[("sys/class/infiniband/mlx5_0/fw_ver", "1")]);
        let found = check(&probe, "RDMA");
        assert!(found.seen.contains("mlx5_0") && found.fix.unwrap().contains("--device /dev/infiniband"));
    }

    #[test]
    fn this_machine_can_be_looked_at() {
        let info = Probe::new().info();
        assert!(!info.kernel.is_empty() && info.memory > 0 && !info.interfaces.is_empty());
        assert!(info.to_string().contains("engines: inproc, tcp"));
    }
}
