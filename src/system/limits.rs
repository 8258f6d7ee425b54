//! What the process may use.

use std::fmt;

use super::{Probe, number_after};

/// A resource limit, in bytes or pieces; `None` is unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
pub struct Limit {
    /// What is in force.
    #[cfg_attr(feature = "cli", serde(serialize_with = "or_unlimited"))]
    pub soft: Option<u64>,
    /// What it can be raised to without privilege.
    #[cfg_attr(feature = "cli", serde(serialize_with = "or_unlimited"))]
    pub hard: Option<u64>,
}

#[cfg(feature = "cli")]
#[allow(clippy::ref_option)] // serde's form
fn or_unlimited<S: serde::Serializer>(value: &Option<u64>, serializer: S) -> Result<S::Ok, S::Error> {
    match value {
        Some(value) => serializer.serialize_u64(*value),
        None => serializer.serialize_str("unlimited"),
    }
}

impl Limit {
    /// Whether `wanted` is within what is in force.
    #[must_use]
    pub fn allows(&self, wanted: u64) -> bool {
        self.soft.is_none_or(|soft| soft >= wanted)
    }

    /// Whether the process can raise it to `wanted` by itself.
    #[must_use]
    pub fn can_allow(&self, wanted: u64) -> bool {
        self.hard.is_none_or(|hard| hard >= wanted)
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let show = |value: Option<u64>| value.map_or_else(|| "unlimited".to_owned(), |value| value.to_string());
        match self {
            Limit { soft: None, .. } => f.write_str("unlimited"),
            Limit { soft, hard } if soft == hard => write!(f, "{} (soft and hard)", show(*soft)),
            Limit { soft, hard } => write!(f, "{} (soft; hard {})", show(*soft), show(*hard)),
        }
    }
}

/// Whether the process may lock memory beyond the limit, which is what `CAP_IPC_LOCK` is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum IpcLock {
    /// It may.
    Effective,
    /// It has the capability in a user namespace only (a container without root, say). The RDMA drivers ask for it in the first
    /// namespace, so that the limit stays in force.
    NamespaceOnly,
    /// The container was given the capability, but this user does not have it: capabilities are for root unless a file grants them.
    NotForThisUser,
    /// It may not.
    Absent,
}

/// What the control group of the process allows. `None` is no limit, or none that can be seen.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Cgroup {
    /// Memory, in bytes.
    pub memory_max: Option<u64>,
    /// What of it is left, in bytes, if what can be dropped (cached files) is.
    pub memory_left: Option<u64>,
    /// Processors' worth of time.
    pub cpus: Option<f64>,
}

/// The number of the capability, from linux/capability.h.
const CAP_IPC_LOCK: u32 = 14;
/// The identity mapping, which only the first user namespace has by default.
const ALL_USERS: [&str; 3] = ["0", "0", "4294967295"];

impl Probe {
    pub(super) fn memlock(&self) -> Option<Limit> {
        self.limit(rustix::process::Resource::Memlock, "Max locked memory")
    }

    pub(super) fn open_files(&self) -> Option<Limit> {
        self.limit(rustix::process::Resource::Nofile, "Max open files")
    }

    fn limit(&self, resource: rustix::process::Resource, name: &str) -> Option<Limit> {
        if self.live {
            let limit = rustix::process::getrlimit(resource);
            return Some(Limit { soft: limit.current, hard: limit.maximum });
        }
        let limits = self.text("/proc/self/limits")?;
        let line = limits.lines().find_map(|line| line.strip_prefix(name))?;
        let mut values = line.split_whitespace().map(|value| match value {
            "unlimited" => Some(None),
            number => number.parse().ok().map(Some),
        });
        Some(Limit { soft: values.next()??, hard: values.next()?? })
    }

    pub(super) fn ipc_lock(&self) -> IpcLock {
        let status = self.text("/proc/self/status").unwrap_or_default();
        let has = |set: &str| {
            let hex = status.lines().find_map(|line| line.strip_prefix(set)).unwrap_or_default();
            u64::from_str_radix(hex.trim(), 16).unwrap_or(0) >> CAP_IPC_LOCK & 1 == 1
        };
        let map = self.text("/proc/self/uid_map");
        let first_by_map = map.is_none_or(|map| map.split_whitespace().eq(ALL_USERS));
        let first_by_number = self.namespace("user").is_none_or(|namespace| namespace.initial != Some(false));
        match (has("CapEff:"), has("CapBnd:")) {
            (true, _) if first_by_map && first_by_number => IpcLock::Effective,
            (true, _) => IpcLock::NamespaceOnly,
            (false, true) if self.user() != Some(0) => IpcLock::NotForThisUser,
            (false, _) => IpcLock::Absent,
        }
    }

    /// The number of the user.
    pub(super) fn user(&self) -> Option<u64> {
        // Real, effective, saved, file system; the effective one counts.
        let status = self.text("/proc/self/status")?;
        status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_whitespace().nth(1)?.parse().ok()
    }

    pub(super) fn cgroup(&self) -> Cgroup {
        let own = self.text("/proc/self/cgroup").unwrap_or_default();
        // "number:controllers:path"; version 2 has number 0 and no controllers.
        let path = |controller: &str| {
            own.lines().find_map(|line| {
                let mut fields = line.splitn(3, ':').skip(1);
                let (controllers, path) = (fields.next()?, fields.next()?);
                controllers.split(',').any(|c| c == controller).then(|| path.to_owned())
            })
        };
        let groups = |mount: &str, controller: &str| -> Vec<String> {
            let Some(mut path) = path(controller) else { return Vec::new() };
            let mut groups = Vec::new();
            // Every group on the way to the root limits it. Inside of a container the path may be that of the host: its last steps up
            // are then the only ones that exist.
            loop {
                groups.push(format!("{mount}{}", path.trim_end_matches('/')));
                match path.rfind('/') {
                    Some(at) if path.len() > 1 => path.truncate(at.max(1)),
                    _ => return groups,
                }
            }
        };
        let v2 = groups("/sys/fs/cgroup", "");
        let v1_memory = groups("/sys/fs/cgroup/memory", "memory");
        let v1_cpu = groups("/sys/fs/cgroup/cpu", "cpu");
        let memory = v2.iter().map(|group| (group, "memory.max", "memory.current", "inactive_file"));
        let memory = memory.chain(
            v1_memory.iter().map(|group| (group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
        );
        let mut found = Cgroup::default();
        let lower = |old: Option<u64>, new: u64| Some(old.map_or(new, |old| old.min(new)));
        for (group, max, current, droppable) in memory {
            // Version 1 says "no limit" as a number beyond all memory.
            let Some(max) = self.value::<u64>(&format!("{group}/{max}")).filter(|&max| max < 1 << 62) else { continue };
            found.memory_max = lower(found.memory_max, max);
            if let Some(current) = self.value::<u64>(&format!("{group}/{current}")) {
                let stat = self.text(&format!("{group}/memory.stat")).unwrap_or_default();
                let used = current.saturating_sub(number_after(&stat, &format!("{droppable} ")).unwrap_or(0));
                found.memory_left = lower(found.memory_left, max.saturating_sub(used));
            }
        }
        let quota = |max: Option<f64>, period: Option<f64>| Some(max? / period.filter(|&p| p > 0.0)?).filter(|&cpus| cpus > 0.0);
        let v2_cpus = v2.iter().filter_map(|group| {
            let text = self.text(&format!("{group}/cpu.max"))?;
            let mut fields = text.split_whitespace().map(|field| field.parse().ok());
            quota(fields.next()?, fields.next()?)
        });
        let v1_cpus = v1_cpu.iter().filter_map(|group| {
            quota(self.value(&format!("{group}/cpu.cfs_quota_us")), self.value(&format!("{group}/cpu.cfs_period_us")))
        });
        found.cpus = v2_cpus.chain(v1_cpus).min_by(f64::total_cmp);
        found
    }

    /// Memory that can be had now without driving anything out, in bytes: what the machine has left, or the control group if that is
    /// less. `None` where the kernel does not say.
    #[must_use]
    pub fn memory_available(&self) -> Option<u64> {
        let machine = number_after(&self.text("/proc/meminfo")?, "MemAvailable:")?.saturating_mul(1024);
        Some(self.cgroup().memory_left.map_or(machine, |left| left.min(machine)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::checks::fixture;
    use super::*;

    #[test]
    fn an_unreadable_limit_is_not_an_unlimited_one() {
        let (_dir, probe) = fixture(&[]);
        assert_eq!(probe.memlock(), None);
        let (_dir, probe) =
            fixture(&[("proc/self/limits", "Max locked memory         65536                unlimited            bytes\n")]);
        assert_eq!(probe.memlock(), Some(Limit { soft: Some(65536), hard: None }));
        assert_eq!(probe.open_files(), None);
        assert!(Probe::new().memlock().is_some() && Probe::new().open_files().is_some());
    }

    #[test]
    fn the_capability_counts_only_where_the_drivers_look_for_it() {
        let status = |effective: &str, bound: &str, user: u32| {
            format!("Uid:\t{user}\t{user}\t{user}\t{user}\nCapEff:\t{effective}\nCapBnd:\t{bound}\n")
        };
        let at = |status: &str, map: &str| {
            let (_dir, probe) = fixture(&[("proc/self/status", status), ("proc/self/uid_map", map)]);
            probe.ipc_lock()
        };
        let (all, none) = ("0000000000004000", "0000000000000000");
        let first = "         0          0 4294967295\n";
        assert_eq!(at(&status(all, all, 0), first), IpcLock::Effective);
        assert_eq!(at(&status(all, all, 0), "0 1000 1\n"), IpcLock::NamespaceOnly);
        assert_eq!(at(&status(none, all, 1000), first), IpcLock::NotForThisUser);
        assert_eq!(at(&status(none, none, 1000), first), IpcLock::Absent);
        assert_eq!(at(&status(none, all, 0), first), IpcLock::Absent);
    }

    #[test]
    fn every_control_group_on_the_way_up_limits() {
        let (_dir, probe) = fixture(&[
            ("proc/meminfo", "MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n"),
            ("proc/self/cgroup", "0::/pod/box\n"),
            ("sys/fs/cgroup/pod/box/memory.max", "max\n"),
            ("sys/fs/cgroup/pod/memory.max", "400000000\n"),
            ("sys/fs/cgroup/pod/memory.current", "300000000\n"),
            ("sys/fs/cgroup/pod/memory.stat", "anon 5\ninactive_file 100000000\n"),
            ("sys/fs/cgroup/pod/box/cpu.max", "150000 100000\n"),
            ("sys/fs/cgroup/pod/cpu.max", "max 100000\n"),
        ]);
        let cgroup = probe.cgroup();
        assert_eq!((cgroup.memory_max, cgroup.memory_left), (Some(400_000_000), Some(200_000_000)));
        assert_eq!(cgroup.cpus, Some(1.5));
        assert_eq!(probe.memory_available(), Some(200_000_000));
    }

    #[test]
    fn version_1_is_read_too_also_from_inside_a_container() {
        let (_dir, probe) = fixture(&[
            ("proc/meminfo", "MemAvailable: 900000 kB\n"),
            ("proc/self/cgroup", "4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1000000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "400000\n"),
            ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n"),
            ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"),
        ]);
        assert_eq!(probe.cgroup(), Cgroup { memory_max: Some(1_000_000), memory_left: Some(600_000), cpus: None });
    }
}
