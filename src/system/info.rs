//! The facts.

use std::fmt;

use super::Probe;

/// A resource limit, in bytes or pieces; `None` is unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
pub struct Limit {
    /// What is in force.
    pub soft: Option<u64>,
    /// What it can be raised to without privilege.
    pub hard: Option<u64>,
}

/// A network interface.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Longest packet, in bytes.
    pub mtu: Option<u32>,
    /// Speed in Mbit/s, where the driver says.
    pub speed_mbps: Option<u32>,
    /// NUMA node of the device behind it.
    pub numa_node: Option<u32>,
    /// `up`, `down`, `unknown`.
    pub state: String,
}

/// What there is on a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Info {
    /// Version of this crate.
    pub version: String,
    /// Release of the kernel.
    pub kernel: String,
    /// Processors that are online.
    pub cpus: String,
    /// Memory, in bytes.
    pub memory: u64,
    /// NUMA nodes.
    pub numa_nodes: usize,
    /// Engines that this build has.
    pub engines: Vec<String>,
    /// NVIDIA GPUs that the kernel driver knows.
    pub gpus: Vec<String>,
    /// Version of the kernel driver.
    pub nvidia_driver: Option<String>,
    /// Where the CUDA driver library is.
    pub cuda_library: Option<String>,
    /// RDMA devices that the kernel knows.
    pub rdma_devices: Vec<String>,
    /// Where the verbs library is.
    pub verbs_library: Option<String>,
    /// Network interfaces.
    pub interfaces: Vec<Interface>,
    /// Congestion control of new TCP connections, and what else there is.
    pub tcp_congestion: Option<String>,
    /// See `tcp_congestion`.
    pub tcp_congestion_available: Option<String>,
    /// Memory that may be locked, in bytes.
    pub memlock: Limit,
    /// Open files.
    pub open_files: Limit,
    /// The process may lock memory beyond the limit (`CAP_IPC_LOCK`).
    pub ipc_lock: bool,
    /// Huge pages that are free, and their size in bytes.
    pub huge_pages_free: u64,
    /// See `huge_pages_free`.
    pub huge_page_size: u64,
}

/// The number of the capability, from linux/capability.h.
const CAP_IPC_LOCK: u32 = 14;

impl Probe {
    /// Collects the facts.
    #[must_use]
    pub fn info(&self) -> Info {
        let meminfo = self.text("/proc/meminfo").unwrap_or_default();
        let kib = |name: &str| number_after(&meminfo, name).unwrap_or(0);
        let status = self.text("/proc/self/status").unwrap_or_default();
        let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
        let effective = effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0);
        let nodes = self.names("/sys/devices/system/node");
        let is_node = |name: &&String| name.strip_prefix("node").is_some_and(|n| n.parse::<u32>().is_ok());
        Info {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            kernel: self.text("/proc/sys/kernel/osrelease").unwrap_or_default(),
            cpus: self.text("/sys/devices/system/cpu/online").unwrap_or_default(),
            memory: kib("MemTotal:") << 10,
            numa_nodes: nodes.iter().filter(is_node).count(),
            engines: vec!["inproc".into(), "tcp".into()],
            gpus: self.names("/proc/driver/nvidia/gpus"),
            nvidia_driver: self.text("/sys/module/nvidia/version"),
            cuda_library: self.library("libcuda.so.1"),
            rdma_devices: self.names("/sys/class/infiniband"),
            verbs_library: self.library("libibverbs.so.1"),
            interfaces: self.names("/sys/class/net").into_iter().map(|name| self.interface(name)).collect(),
            tcp_congestion: self.text("/proc/sys/net/ipv4/tcp_congestion_control"),
            tcp_congestion_available: self.text("/proc/sys/net/ipv4/tcp_available_congestion_control"),
            memlock: self.limit("Max locked memory"),
            open_files: self.limit("Max open files"),
            ipc_lock: effective >> CAP_IPC_LOCK & 1 == 1,
            huge_pages_free: kib("HugePages_Free:"),
            huge_page_size: kib("Hugepagesize:") << 10,
        }
    }

    fn interface(&self, name: String) -> Interface {
        let at = |file: &str| self.text(&format!("/sys/class/net/{name}/{file}"));
        Interface {
            mtu: at("mtu").and_then(|text| text.parse().ok()),
            // -1 where the link is down or the driver does not know.
            speed_mbps: at("speed").and_then(|text| text.parse().ok()),
            numa_node: at("device/numa_node").and_then(|text| text.parse().ok()),
            state: at("operstate").unwrap_or_else(|| "unknown".into()),
            name,
        }
    }

    fn limit(&self, name: &str) -> Limit {
        let limits = self.text("/proc/self/limits").unwrap_or_default();
        let line = limits.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        let mut values = line.split_whitespace().map(|value| value.parse().ok());
        Limit { soft: values.next().flatten(), hard: values.next().flatten() }
    }
}

fn number_after(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?.parse().ok()
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let show = |value: Option<u64>| value.map_or_else(|| "unlimited".to_owned(), |value| value.to_string());
        write!(f, "{} (can be raised to {})", show(self.soft), show(self.hard))
    }
}

impl fmt::Display for Info {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |items: &[String]| if items.is_empty() { "none".to_owned() } else { items.join(", ") };
        let or_none = |text: &Option<String>| text.clone().unwrap_or_else(|| "not found".to_owned());
        writeln!(f, "gpusock        {}, engines: {}", self.version, list(&self.engines))?;
        writeln!(f, "kernel         {}", self.kernel)?;
        writeln!(f, "processors     {}, {} NUMA nodes, {} MiB of memory", self.cpus, self.numa_nodes, self.memory >> 20)?;
        writeln!(f, "GPUs           {}", list(&self.gpus))?;
        writeln!(f, "NVIDIA driver  {}; libcuda.so.1 {}", or_none(&self.nvidia_driver), or_none(&self.cuda_library))?;
        writeln!(f, "RDMA devices   {}; libibverbs.so.1 {}", list(&self.rdma_devices), or_none(&self.verbs_library))?;
        for interface in &self.interfaces {
            write!(f, "interface      {} {}", interface.name, interface.state)?;
            if let Some(mtu) = interface.mtu {
                write!(f, ", MTU {mtu}")?;
            }
            if let Some(speed) = interface.speed_mbps {
                write!(f, ", {speed} Mbit/s")?;
            }
            if let Some(node) = interface.numa_node {
                write!(f, ", NUMA node {node}")?;
            }
            writeln!(f)?;
        }
        let available = or_none(&self.tcp_congestion_available);
        writeln!(f, "TCP            congestion control {} of {available}", or_none(&self.tcp_congestion))?;
        writeln!(f, "locked memory  {} bytes{}", self.memlock, if self.ipc_lock { ", not enforced (CAP_IPC_LOCK)" } else { "" })?;
        writeln!(f, "open files     {}", self.open_files)?;
        write!(f, "huge pages     {} free of {} KiB", self.huge_pages_free, self.huge_page_size >> 10)
    }
}
