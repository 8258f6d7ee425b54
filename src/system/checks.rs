//! What is wrong, and what to type.

use std::fmt;

use super::{Cuda, Info, IpcLock, Limit, Probe};
use crate::error::{Error, Result};

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

impl Check {
    /// Whether something works worse than it could, or not at all.
    #[must_use]
    pub fn is_problem(&self) -> bool {
        self.severity >= Severity::Warn
    }
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
/// The soft limit of most systems. Less was set by somebody.
const FILES_USUAL: u64 = 1024;
/// Locked memory below this is the old default of many systems, and too little for any registration.
const MEMLOCK_WANTED: u64 = 64 << 20;
/// What one connection can have on its way is at most a buffer: 4 MiB is 10 Gbit/s over 3 ms.
const BUFFER_WANTED: u64 = 4 << 20;

impl Probe {
    /// Looks at everything that this version can judge.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if `/proc` cannot be read, without which there is nothing to judge by.
    pub fn checks(&self) -> Result<Vec<Check>> {
        std::fs::read(self.path("/proc/self/status"))
            .map_err(|e| Error::io("reading /proc/self/status; is /proc mounted?", e))?;
        let info = self.info();
        Ok(vec![
            open_files(&info),
            memlock(&info, self.user()),
            congestion(&info),
            buffers(&info),
            memory_files(self),
            gpu(&info),
            rdma(self, &info),
            bus(&info),
            namespaces(&info),
        ])
    }
}

fn finding(name: &'static str, severity: Severity, seen: impl Into<String>, fix: Option<&str>) -> Check {
    Check { name, severity, seen: seen.into(), fix: fix.map(str::to_owned) }
}

fn open_files(info: &Info) -> Check {
    const NAME: &str = "open files";
    let Some(limit) = info.open_files else {
        return finding(NAME, Severity::Info, "the limit cannot be read", None);
    };
    let seen = format!("the limit is {limit}");
    if limit.allows(FILES_WANTED) {
        return finding(NAME, Severity::Ok, seen, None);
    }
    let fix = if limit.can_allow(FILES_WANTED) {
        "ulimit -n 4096, or LimitNOFILE=4096 in the systemd unit"
    } else {
        "raise the hard limit: `* hard nofile 4096` in /etc/security/limits.conf, or --ulimit nofile=4096 of the container"
    };
    let severity = if limit.allows(FILES_USUAL) { Severity::Info } else { Severity::Warn };
    finding(NAME, severity, format!("{seen}; each connection takes one, each large buffer another"), Some(fix))
}

fn memlock(info: &Info, user: Option<u64>) -> Check {
    const NAME: &str = "locked memory";
    let Some(limit) = info.memlock else {
        return finding(NAME, Severity::Info, "the limit cannot be read", None);
    };
    let seen = format!("the limit is {limit} bytes");
    if limit.allows(MEMLOCK_WANTED) {
        return finding(NAME, Severity::Ok, seen, None);
    }
    let capability = match info.ipc_lock {
        IpcLock::Effective => return finding(NAME, Severity::Ok, format!("{seen}, and CAP_IPC_LOCK lifts it"), None),
        IpcLock::NamespaceOnly => ", and CAP_IPC_LOCK in a user namespace does not lift it".to_owned(),
        IpcLock::NotForThisUser => {
            let user = user.map_or_else(String::new, |user| format!(" {user}"));
            format!(", and CAP_IPC_LOCK, which the container has, does nothing for user{user}, who is not root")
        }
        IpcLock::Absent => String::new(),
    };
    // It matters to RDMA only.
    let severity = if info.rdma_devices.is_empty() { Severity::Info } else { Severity::Error };
    let fix = match limit {
        Limit { hard: None, .. } => "ulimit -l unlimited".to_owned(),
        // The shell counts in KiB.
        Limit { hard: Some(hard), .. } if limit.can_allow(MEMLOCK_WANTED) => format!("ulimit -l {}", hard >> 10),
        _ => "raise the hard limit: `* hard memlock unlimited` in /etc/security/limits.conf and a new login, LimitMEMLOCK=infinity in the \
              systemd unit, or --ulimit memlock=-1 of the container"
            .to_owned(),
    };
    finding(NAME, severity, format!("{seen}{capability}: too little to register buffers with an RDMA NIC"), Some(&fix))
}

fn congestion(info: &Info) -> Check {
    const NAME: &str = "TCP";
    match info.tcp.congestion.as_deref() {
        Some("bbr") => finding(
            NAME,
            Severity::Info,
            "the system's congestion control is bbr, which paces; connections within this host use reno instead",
            None,
        ),
        Some(name) => finding(NAME, Severity::Ok, format!("congestion control {name}"), None),
        None => finding(
            NAME,
            Severity::Warn,
            "the kernel's TCP settings cannot be read",
            Some("mount /proc/sys, at least for reading"),
        ),
    }
}

fn buffers(info: &Info) -> Check {
    const NAME: &str = "TCP buffers";
    let (Some(receive), Some(send)) = (info.tcp.receive_buffer_max, info.tcp.send_buffer_max) else {
        return finding(NAME, Severity::Info, "their limits cannot be read", None);
    };
    let seen = format!("the kernel grows them to {receive} bytes (receive) and {send} bytes (send)");
    if receive.min(send) >= BUFFER_WANTED {
        return finding(NAME, Severity::Ok, seen, None);
    }
    let fix = "sysctl -w net.ipv4.tcp_rmem='4096 131072 16777216' net.ipv4.tcp_wmem='4096 16384 16777216'";
    finding(NAME, Severity::Info, format!("{seen}; over a long or fast network that limits a connection"), Some(fix))
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
    let count = match info.gpus.len() {
        // A driver for which the kernel shows no GPU: WSL, or a container without /proc/driver.
        0 => match &info.cuda {
            Some(cuda) if !cuda.devices.is_empty() => format!("{} CUDA devices", cuda.devices.len()),
            _ => return finding(NAME, Severity::Ok, "no NVIDIA GPU", None),
        },
        1 => "1 GPU".to_owned(),
        n => format!("{n} GPUs"),
    };
    if info.nvidia_driver.is_none() && info.cuda.as_ref().is_none_or(|cuda| cuda.devices.is_empty()) {
        let fix = Some("install the driver, or: modprobe nvidia");
        return finding(
            NAME,
            Severity::Warn,
            format!("{count} without the NVIDIA kernel driver; GPU memory cannot be used"),
            fix,
        );
    }
    match &info.cuda {
        Some(Cuda { driver: Some(version), problem: None, missing, .. }) if missing.is_empty() => {
            finding(NAME, Severity::Ok, format!("{count}, with a driver for CUDA {version}"), None)
        }
        Some(Cuda { driver: Some(version), problem: None, missing, .. }) => {
            let seen = format!("{count}, with a driver for CUDA {version} that lacks {}", missing.join("; "));
            finding(NAME, Severity::Info, seen, Some("install a newer driver"))
        }
        Some(Cuda { problem: Some(problem), .. }) if info.cuda_library.is_some() => {
            finding(NAME, Severity::Warn, format!("{count}; {problem}"), Some("run nvidia-smi, and see what it says"))
        }
        _ if info.cuda_library.is_none() => {
            let fix = Some("install the driver's user-space part, or run the container with --gpus all");
            finding(NAME, Severity::Warn, format!("{count} without libcuda.so.1; GPU memory cannot be used"), fix)
        }
        _ => finding(NAME, Severity::Ok, count, None),
    }
}

fn rdma(probe: &Probe, info: &Info) -> Check {
    const NAME: &str = "RDMA";
    const NO_ENGINE: &str = "this version of gpusock has no verbs engine, and takes TCP";
    if info.rdma_devices.is_empty() {
        return finding(NAME, Severity::Ok, "no RDMA device", None);
    }
    let names: Vec<_> = info.rdma_devices.iter().map(|device| device.name.as_str()).collect();
    let ports = || info.rdma_devices.iter().flat_map(|device| &device.ports);
    let (missing, fix) = if !probe.exists("/dev/infiniband") {
        (" /dev/infiniband is missing;", Some("run the container with --device /dev/infiniband"))
    } else if !info.rdma_files.iter().any(|file| file.usable) {
        (
            " no /dev/infiniband/uverbs* may be opened by this user;",
            Some("chmod 0666 /dev/infiniband/uverbs*, or --device /dev/infiniband of the container"),
        )
    } else if info.verbs_library.is_none() {
        (" libibverbs.so.1 is missing;", Some("apt-get install libibverbs1 ibverbs-providers"))
    } else if !ports().any(|port| port.state == "ACTIVE") {
        (" no port is active;", Some("ip link set DEV up, and look at the cable"))
    } else {
        ("", None)
    };
    finding(NAME, Severity::Info, format!("{};{missing} {NO_ENGINE}", names.join(", ")), fix)
}

fn bus(info: &Info) -> Check {
    const NAME: &str = "PCI";
    if info.gpus.is_empty() || info.rdma_devices.is_empty() {
        return finding(NAME, Severity::Ok, "no GPU and RDMA device whose traffic could be in each other's way", None);
    }
    let pci = &info.pci;
    if !pci.acs_redirecting.is_empty() {
        let seen = format!(
            "{} bridges send traffic between devices up to the root (ACS): {}; no engine of this version is affected",
            pci.acs_redirecting.len(),
            pci.acs_redirecting.join(", ")
        );
        return finding(
            NAME,
            Severity::Info,
            seen,
            Some("switch ACS off in the firmware, or for each: setpci -s ADDRESS ECAP_ACS+6.w=0"),
        );
    }
    if pci.acs_unreadable > 0 {
        return finding(
            NAME,
            Severity::Info,
            "only root can read the access control (ACS) of the bridges",
            Some("sudo gpusock doctor"),
        );
    }
    finding(NAME, Severity::Ok, "no bridge sends traffic between devices up to the root (ACS)", None)
}

fn namespaces(info: &Info) -> Check {
    const NAME: &str = "namespaces";
    let apart = |kind: &&str| info.namespaces.iter().any(|namespace| namespace.kind == *kind && namespace.initial == Some(false));
    let private: Vec<_> = ["ipc", "pid"].into_iter().filter(apart).collect();
    if private.is_empty() {
        return finding(NAME, Severity::Ok, "no private ipc or pid namespace", None);
    }
    let seen = format!("private {} namespace: processes outside of it are reached by TCP all the same", private.join(" and "));
    finding(NAME, Severity::Info, seen, None)
}

/// A machine of a few files.
#[cfg(test)]
pub(super) fn fixture(files: &[(&str, &str)]) -> (tempfile::TempDir, Probe) {
    let dir = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let file = dir.path().join(path);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, text).unwrap();
    }
    let probe = Probe::at(dir.path());
    (dir, probe)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NIC: (&str, &str) = ("sys/class/infiniband/mlx5_0/fw_ver", "1");
    const USER: &str = "Uid:\t1000\t1000\t1000\t1000\nCapEff:\t0000000000000000\nCapBnd:\t0000000000000000\n";

    fn limits(memlock: &str, files: &str) -> String {
        format!(
            "Limit                     Soft Limit           Hard Limit           Units\nMax locked memory         {memlock} bytes\n\
             Max open files            {files} files\n"
        )
    }

    /// The finding of this name on a machine of these files, for an ordinary user unless they say otherwise.
    fn check(name: &str, files: &[(&str, &str)]) -> Check {
        let (_dir, probe) = fixture(&[&[("proc/self/status", USER)], files].concat());
        probe.checks().unwrap().into_iter().find(|check| check.name == name).unwrap()
    }

    fn memlock_of(limit: &str, more: &[(&str, &str)]) -> Check {
        let limits = limits(limit, "65536 65536");
        check("locked memory", &[&[("proc/self/limits", limits.as_str())], more].concat())
    }

    #[test]
    fn little_locked_memory_is_an_error_only_where_there_is_a_nic() {
        assert_eq!(memlock_of("65536 65536", &[]).severity, Severity::Info);
        let found = memlock_of("65536 65536", &[NIC]);
        assert_eq!(found.severity, Severity::Error);
        assert!(found.seen.contains("65536") && found.fix.unwrap().contains("limits.conf"));
        assert_eq!(memlock_of("unlimited unlimited", &[NIC]).severity, Severity::Ok);
        assert_eq!(memlock_of("67108864 67108864", &[NIC]).severity, Severity::Ok);
    }

    #[test]
    fn what_the_user_can_raise_is_raised_by_one_command() {
        assert_eq!(memlock_of("65536 unlimited", &[NIC]).fix.as_deref(), Some("ulimit -l unlimited"));
        assert_eq!(memlock_of("65536 1073741824", &[NIC]).fix.as_deref(), Some("ulimit -l 1048576"));
        assert!(memlock_of("65536 8388608", &[NIC]).fix.unwrap().starts_with("raise the hard limit"));
    }

    #[test]
    fn the_capability_lifts_the_limit_for_root_and_does_nothing_for_others() {
        let status = |text: &'static str| ("proc/self/status", text);
        let root = status("Uid:\t0\t0\t0\t0\nCapEff:\t0000000000004000\nCapBnd:\t0000000000004000\n");
        assert_eq!(memlock_of("8388608 8388608", &[NIC, root]).severity, Severity::Ok);
        // A container with IPC_LOCK, as a user.
        let user = status("Uid:\t1000\t1000\t1000\t1000\nCapEff:\t0000000000000000\nCapBnd:\t0000000000004000\n");
        let found = memlock_of("8388608 8388608", &[NIC, user]);
        assert_eq!(found.severity, Severity::Error);
        assert!(found.seen.contains("8388608") && found.seen.contains("does nothing for user 1000"), "{found}");
        assert!(found.fix.unwrap().contains("--ulimit memlock=-1"));
        // A container without root on the outside.
        let found = memlock_of("8388608 8388608", &[NIC, root, ("proc/self/uid_map", "0 1000 1\n")]);
        assert_eq!(found.severity, Severity::Error);
        assert!(found.seen.contains("user namespace"), "{found}");
    }

    #[test]
    fn an_ordinary_limit_of_files_is_no_problem_and_a_low_one_is() {
        let of = |files: &str| check("open files", &[("proc/self/limits", &limits("0 0", files))]);
        assert_eq!(of("65536 65536").severity, Severity::Ok);
        let usual = of("1024 1048576");
        assert_eq!(usual.severity, Severity::Info);
        assert!(usual.fix.unwrap().starts_with("ulimit -n"));
        let low = of("256 256");
        assert_eq!(low.severity, Severity::Warn);
        assert!(low.is_problem() && low.fix.unwrap().contains("hard nofile"));
        assert_eq!(check("open files", &[]).severity, Severity::Info);
    }

    #[test]
    fn a_nic_that_cannot_be_reached_is_explained() {
        let found = check("RDMA", &[NIC]);
        assert!(found.seen.contains("mlx5_0") && found.fix.unwrap().contains("--device /dev/infiniband"));
        let found = check("RDMA", &[NIC, ("dev/infiniband/rdma_cm", "")]);
        assert!(found.seen.contains("may be opened"), "{found}");
        let file = ("dev/infiniband/uverbs0", "");
        let found = check("RDMA", &[NIC, file]);
        assert!(found.fix.unwrap().contains("libibverbs1"));
        let library = ("usr/lib64/libibverbs.so.1", "");
        assert!(check("RDMA", &[NIC, file, library]).seen.contains("no port is active"));
        let port = ("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n");
        let found = check("RDMA", &[NIC, file, library, port]);
        assert_eq!((found.severity, found.fix), (Severity::Info, None));
        assert!(found.seen.contains("no verbs engine"));
    }

    #[test]
    fn a_gpu_is_mentioned_with_what_it_lacks() {
        let gpu = ("proc/driver/nvidia/gpus/0000:18:00.0/information", "Model: NVIDIA H200\n");
        let found = check("GPU", &[gpu]);
        assert!(found.seen.contains("1 GPU without the NVIDIA kernel driver"), "{found}");
        let driver = ("sys/module/nvidia/version", "580.65.06\n");
        assert!(check("GPU", &[gpu, driver]).seen.contains("without libcuda.so.1"));
        let found = check("GPU", &[gpu, driver, ("usr/lib64/libcuda.so.1", "")]);
        assert_eq!((found.severity, found.fix), (Severity::Ok, None));
        // Bridges matter where there are both.
        let bridge = ("sys/bus/pci/devices/0000:00:01.0/class", "0x060400\n");
        assert_eq!(check("PCI", &[gpu, bridge]).severity, Severity::Ok);
        assert!(check("PCI", &[gpu, NIC, bridge]).fix.unwrap().contains("sudo"));
    }

    #[test]
    fn settings_of_tcp_are_judged() {
        const CONTROL: &str = "proc/sys/net/ipv4/tcp_congestion_control";
        assert_eq!(check("TCP", &[(CONTROL, "cubic\n")]).severity, Severity::Ok);
        let found = check("TCP", &[(CONTROL, "bbr\n")]);
        assert!(found.severity == Severity::Info && found.seen.contains("reno"));
        assert_eq!(check("TCP", &[]).severity, Severity::Warn);
        let sizes = |send| [("proc/sys/net/ipv4/tcp_rmem", "4096 131072 6291456\n"), ("proc/sys/net/ipv4/tcp_wmem", send)];
        assert_eq!(check("TCP buffers", &sizes("4096 16384 4194304\n")).severity, Severity::Ok);
        assert!(check("TCP buffers", &sizes("4096 16384 212992\n")).fix.unwrap().contains("tcp_wmem"));
    }

    #[test]
    fn a_machine_that_cannot_be_read_is_not_a_machine_without_problems() {
        let (_dir, probe) = fixture(&[]);
        assert!(probe.checks().unwrap_err().to_string().contains("/proc"));
        assert!(super::super::checks().is_ok());
    }
}
