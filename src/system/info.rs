//! The facts.

use std::fmt;

use super::{Cgroup, Cuda, Gpu, Interface, IpcLock, Limit, Pci, Probe, RdmaDevice, RdmaFile, Tcp, number_after};

/// What there is on a machine. Displays as a table.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Info {
    /// Version of this crate.
    pub version: String,
    /// Engines that this build has.
    pub engines: Vec<String>,
    /// Name of the machine.
    pub host: String,
    /// Release of the kernel.
    pub kernel: String,
    /// Processors that are online, as a list of ranges.
    pub cpus: String,
    /// NUMA nodes.
    pub numa_nodes: Vec<NumaNode>,
    /// Memory, in bytes.
    pub memory: u64,
    /// What of it can be had; see [`Probe::memory_available`].
    pub memory_available: Option<u64>,
    /// Huge pages that were set aside.
    pub huge_pages: HugePages,
    /// What the control group of the process allows.
    pub cgroup: Cgroup,
    /// Memory that may be locked, in bytes. `None` where the system does not say.
    pub memlock: Option<Limit>,
    /// Open files. `None` where the system does not say.
    pub open_files: Option<Limit>,
    /// Whether the process may lock memory beyond the limit.
    pub ipc_lock: IpcLock,
    /// Namespaces of the process.
    pub namespaces: Vec<Namespace>,
    /// NVIDIA GPUs.
    pub gpus: Vec<Gpu>,
    /// The NVIDIA kernel driver, in its own words.
    pub nvidia_driver: Option<String>,
    /// The `nvidia_peermem` module is loaded.
    pub nvidia_peermem: bool,
    /// Where the CUDA driver library is.
    pub cuda_library: Option<String>,
    /// What the CUDA driver says; `None` on a recorded machine.
    pub cuda: Option<Cuda>,
    /// Where NVIDIA's management library is.
    pub nvml_library: Option<String>,
    /// RDMA devices that the kernel knows.
    pub rdma_devices: Vec<RdmaDevice>,
    /// Their device files.
    pub rdma_files: Vec<RdmaFile>,
    /// Where the verbs library is.
    pub verbs_library: Option<String>,
    /// The PCI bus.
    pub pci: Pci,
    /// Network interfaces.
    pub interfaces: Vec<Interface>,
    /// How TCP is set.
    pub tcp: Tcp,
}

/// A part of the machine with memory of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
#[non_exhaustive]
pub struct NumaNode {
    /// Its number.
    pub number: u32,
    /// Its processors, as a list of ranges.
    pub cpus: String,
}

/// Huge pages that were set aside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
#[non_exhaustive]
pub struct HugePages {
    /// How many.
    pub total: u64,
    /// How many nobody uses.
    pub free: u64,
    /// Length of each, in bytes.
    pub size: u64,
}

/// A namespace that the process is in.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Namespace {
    /// `ipc`, `net`, `pid` or `user`.
    pub kind: &'static str,
    /// Its number: two processes with the same one are in the same namespace.
    pub number: u64,
    /// Whether it is that of the machine, rather than of a container. `None` where the kernel has no fixed number for that one.
    pub initial: Option<bool>,
}

impl Probe {
    /// Collects the facts.
    #[must_use]
    pub fn info(&self) -> Info {
        let meminfo = self.text("/proc/meminfo").unwrap_or_default();
        let number = |name: &str| number_after(&meminfo, name).unwrap_or(0);
        let nodes = self.numbered("/sys/devices/system/node", "node").into_iter();
        let cpus = |node: u32| self.text(&format!("/sys/devices/system/node/node{node}/cpulist")).unwrap_or_default();
        // "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  ..."
        let driver = self.text("/proc/driver/nvidia/version");
        let driver = driver.as_deref().and_then(|text| text.lines().find_map(|line| line.strip_prefix("NVRM version:")));
        let driver = driver.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
        Info {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            engines: ["inproc", "tcp", "cuda"].map(str::to_owned).into(),
            host: self.text("/proc/sys/kernel/hostname").unwrap_or_default(),
            kernel: self.text("/proc/sys/kernel/osrelease").unwrap_or_default(),
            cpus: self.text("/sys/devices/system/cpu/online").unwrap_or_default(),
            numa_nodes: nodes.map(|number| NumaNode { number, cpus: cpus(number) }).collect(),
            memory: number("MemTotal:").saturating_mul(1024),
            memory_available: self.memory_available(),
            huge_pages: HugePages {
                total: number("HugePages_Total:"),
                free: number("HugePages_Free:"),
                size: number("Hugepagesize:").saturating_mul(1024),
            },
            cgroup: self.cgroup(),
            memlock: self.memlock(),
            open_files: self.open_files(),
            ipc_lock: self.ipc_lock(),
            namespaces: ["ipc", "net", "pid", "user"].into_iter().filter_map(|kind| self.namespace(kind)).collect(),
            gpus: self.gpus(),
            nvidia_driver: driver.or_else(|| self.text("/sys/module/nvidia/version")),
            nvidia_peermem: self.exists("/sys/module/nvidia_peermem"),
            cuda_library: self.library("libcuda.so.1"),
            cuda: self.live.then(crate::memory::cuda::describe),
            nvml_library: self.library("libnvidia-ml.so.1"),
            rdma_devices: self.rdma_devices(),
            rdma_files: self.rdma_files(),
            verbs_library: self.library("libibverbs.so.1"),
            pci: self.pci(),
            interfaces: self.interfaces(),
            tcp: self.tcp(),
        }
    }

    pub(super) fn namespace(&self, kind: &'static str) -> Option<Namespace> {
        // "ipc:[4026531839]"
        let link = self.link(&format!("/proc/self/ns/{kind}"))?;
        let number = link.strip_prefix(kind)?.strip_prefix(":[")?.strip_suffix(']')?.parse().ok()?;
        // The machine's own have fixed numbers (include/linux/proc_ns.h of the kernel). That of the network has one only in new kernels.
        let initial = match kind {
            "ipc" => Some(number == 4_026_531_839),
            "user" => Some(number == 4_026_531_837),
            "pid" => Some(number == 4_026_531_836),
            _ => (number == 4_026_531_833).then_some(true),
        };
        Some(Namespace { kind, number, initial })
    }
}

/// Bytes, for people.
fn bytes(bytes: u64) -> String {
    match bytes {
        0..=9_999 => format!("{bytes} bytes"),
        10_000..=10_485_759 => format!("{} KiB", bytes >> 10),
        _ => format!("{} MiB", bytes >> 20),
    }
}

fn list(items: &[String]) -> String {
    if items.is_empty() { "none".to_owned() } else { items.join(", ") }
}

fn or<T: fmt::Display>(value: Option<T>, other: &str) -> String {
    value.map_or_else(|| other.to_owned(), |value| value.to_string())
}

fn row(f: &mut fmt::Formatter<'_>, name: &str, text: impl fmt::Display) -> fmt::Result {
    writeln!(f, "{name:<15}{text}")
}

impl fmt::Display for Info {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        row(f, "gpusock", format_args!("{}, engines: {}", self.version, list(&self.engines)))?;
        row(f, "host", format_args!("{}, Linux {}", self.host, self.kernel))?;
        let nodes: Vec<_> = self.numa_nodes.iter().map(|node| format!("node {}: {}", node.number, node.cpus)).collect();
        row(f, "processors", format_args!("{} (NUMA {})", self.cpus, list(&nodes)))?;
        let available = or(self.memory_available.map(bytes), "unknown");
        row(f, "memory", format_args!("{}, {available} available", bytes(self.memory)))?;
        let HugePages { total, free, size } = self.huge_pages;
        row(f, "huge pages", format_args!("{free} free of {total}, {} each", bytes(size)))?;
        let no_limit = |text: Option<String>| or(text, "no limit");
        row(
            f,
            "control group",
            format_args!(
                "memory {}, processors {}",
                no_limit(self.cgroup.memory_max.map(bytes)),
                no_limit(self.cgroup.cpus.map(|n| n.to_string()))
            ),
        )?;
        let lifted = match self.ipc_lock {
            IpcLock::Effective => "; CAP_IPC_LOCK lifts it",
            IpcLock::NamespaceOnly => "; CAP_IPC_LOCK of a user namespace does not lift it",
            IpcLock::NotForThisUser => "; the container has CAP_IPC_LOCK, but not for this user",
            IpcLock::Absent => "",
        };
        row(f, "locked memory", format_args!("{} bytes{lifted}", or(self.memlock, "unknown")))?;
        row(f, "open files", or(self.open_files, "unknown"))?;
        let namespaces: Vec<_> = self
            .namespaces
            .iter()
            .map(|namespace| {
                let whose = match namespace.initial {
                    Some(true) => " (the machine's)",
                    Some(false) => " (private)",
                    None => "",
                };
                format!("{} {}{whose}", namespace.kind, namespace.number)
            })
            .collect();
        row(f, "namespaces", list(&namespaces))?;
        self.devices(f)?;
        for interface in &self.interfaces {
            let mut text = format!("{} {}", interface.name, interface.state);
            for (name, value) in [("MTU", interface.mtu), ("NUMA node", interface.numa_node), ("Mbit/s", interface.speed_mbps)] {
                text += &value.map_or_else(String::new, |value| format!(", {name} {value}"));
            }
            row(f, "interface", format_args!("{text}, addresses {}", list(&interface.addresses)))?;
        }
        let tcp = &self.tcp;
        row(
            f,
            "TCP",
            format_args!(
                "congestion control {} (there are {}; free to choose: {})",
                or(tcp.congestion.as_ref(), "unknown"),
                list(&tcp.congestion_available),
                list(&tcp.congestion_allowed)
            ),
        )?;
        write!(
            f,
            "{:<15}receive to {}, send to {}",
            "TCP buffers",
            or(tcp.receive_buffer_max.map(bytes), "unknown"),
            or(tcp.send_buffer_max.map(bytes), "unknown")
        )
    }
}

impl Info {
    fn devices(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let near = |node: Option<u32>| node.map_or_else(String::new, |node| format!(", NUMA node {node}"));
        for gpu in &self.gpus {
            row(f, "GPU", format_args!("{} {}{}", gpu.address, or(gpu.model.as_ref(), "without driver"), near(gpu.numa_node)))?;
        }
        if self.gpus.is_empty() {
            row(f, "GPU", "none")?;
        }
        if let Some(cuda) = &self.cuda {
            cuda_rows(cuda, f)?;
        }
        row(f, "NVIDIA driver", or(self.nvidia_driver.as_ref(), "not loaded"))?;
        row(f, "nvidia_peermem", if self.nvidia_peermem { "loaded" } else { "not loaded" })?;
        for device in &self.rdma_devices {
            row(f, "RDMA device", format_args!("{}{}", device.name, near(device.numa_node)))?;
            for port in &device.ports {
                row(f, "", format_args!("port {}: {}, {}, {}", port.number, port.state, port.link_layer, port.rate))?;
                for gid in &port.gids {
                    row(
                        f,
                        "",
                        format_args!(
                            "GID {}: {} {} {}",
                            gid.index,
                            gid.gid,
                            or(gid.kind.as_ref(), ""),
                            or(gid.interface.as_ref(), "")
                        ),
                    )?;
                }
            }
        }
        if self.rdma_devices.is_empty() {
            row(f, "RDMA device", "none")?;
        }
        let files: Vec<_> = self
            .rdma_files
            .iter()
            .map(|file| format!("{}{}", file.path, if file.usable { "" } else { " (no access)" }))
            .collect();
        row(f, "RDMA files", list(&files))?;
        let libraries = [
            ("libcuda.so.1", &self.cuda_library),
            ("libnvidia-ml.so.1", &self.nvml_library),
            ("libibverbs.so.1", &self.verbs_library),
        ];
        for (name, place) in libraries {
            row(f, "library", or(place.as_ref(), &format!("{name} not found")))?;
        }
        let Pci { iommu_groups, iommu_type, acs_redirecting, acs_unreadable } = &self.pci;
        let iommu = match (iommu_groups, iommu_type) {
            (0, _) => "not in use".to_owned(),
            (n, Some(kind)) => format!("{n} groups, {kind}"),
            (n, None) => format!("{n} groups"),
        };
        let hidden =
            if *acs_unreadable > 0 { format!(" (of {acs_unreadable} bridges only root can tell)") } else { String::new() };
        row(f, "IOMMU", iommu)?;
        row(f, "PCI ACS", format_args!("bridges that redirect: {}{hidden}", list(acs_redirecting)))
    }
}

fn cuda_rows(cuda: &Cuda, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match (&cuda.driver, &cuda.problem) {
        (Some(version), None) => row(f, "CUDA driver", format_args!("for CUDA {version}"))?,
        (Some(version), Some(problem)) => row(f, "CUDA driver", format_args!("for CUDA {version}: {problem}"))?,
        (None, problem) => row(f, "CUDA driver", or(problem.as_ref(), "none"))?,
    }
    for missing in &cuda.missing {
        row(f, "", format_args!("too old for {missing}"))?;
    }
    for device in &cuda.devices {
        let can = [(device.descriptors, "descriptors"), (device.gpudirect_rdma, "GPUDirect RDMA"), (device.dma_buf, "dma-buf")];
        let can: Vec<_> = can.iter().filter(|(can, _)| *can).map(|(_, name)| *name).collect();
        let shared = if can.is_empty() { "none".to_owned() } else { can.join(", ") };
        row(
            f,
            &format!("cuda:{}", device.ordinal),
            format_args!(
                "{} at {}, compute capability {}, {}; memory can be shared by: {shared}",
                device.name,
                device.address,
                device.capability,
                bytes(device.memory)
            ),
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::checks::fixture;

    #[test]
    fn this_machine_can_be_looked_at() {
        let info = super::super::inspect();
        assert!(!info.kernel.is_empty() && info.memory > 0 && !info.cpus.is_empty());
        assert!(info.memory_available.is_some_and(|bytes| bytes <= info.memory));
        let shown = info.to_string();
        assert!(
            shown.contains("engines: inproc, tcp, cuda") && shown.contains("CUDA driver") && shown.contains("PCI ACS"),
            "{shown}"
        );
    }

    #[test]
    fn a_machine_without_anything_can_be_looked_at() {
        let (_dir, probe) = fixture(&[]);
        let shown = probe.info().to_string();
        assert!(shown.contains("locked memory  unknown") && shown.contains("libcuda.so.1 not found"), "{shown}");
    }

    #[test]
    fn the_nvidia_driver_is_quoted() {
        let version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 13\n";
        let (_dir, probe) = fixture(&[("proc/driver/nvidia/version", version), ("sys/module/nvidia_peermem/refcnt", "0\n")]);
        let info = probe.info();
        assert_eq!(info.nvidia_driver.as_deref(), Some("NVIDIA UNIX Open Kernel Module for x86_64 580.65.06 Release Build"));
        assert!(info.nvidia_peermem);
    }

    #[test]
    fn namespaces_are_told_apart_from_those_of_the_machine() {
        let (dir, probe) = fixture(&[("proc/self/ns/.keep", "")]);
        let link = |kind: &str, number: u64| {
            std::os::unix::fs::symlink(format!("{kind}:[{number}]"), dir.path().join("proc/self/ns").join(kind)).unwrap();
        };
        link("ipc", 4_026_532_500);
        link("pid", 4_026_531_836);
        link("net", 4_026_532_600);
        let found: Vec<_> = probe.info().namespaces.iter().map(|namespace| (namespace.kind, namespace.initial)).collect();
        assert_eq!(found, [("ipc", Some(false)), ("net", None), ("pid", Some(true))]);
    }
}
