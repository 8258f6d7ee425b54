//! GPUs, RDMA devices, and the bus between them.

use super::Probe;

/// An NVIDIA GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Gpu {
    /// Its place on the PCI bus.
    pub address: String,
    /// What the kernel driver calls it; `None` if the driver does not have it.
    pub model: Option<String>,
    /// NUMA node that it is near to.
    pub numa_node: Option<u32>,
}

/// An RDMA device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
#[non_exhaustive]
pub struct RdmaDevice {
    /// Its name, as in `mlx5_0`.
    pub name: String,
    /// NUMA node that it is near to.
    pub numa_node: Option<u32>,
    /// Its ports.
    pub ports: Vec<RdmaPort>,
}

/// A port of an RDMA device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
#[non_exhaustive]
pub struct RdmaPort {
    /// Its number, from 1.
    pub number: u32,
    /// `ACTIVE`, `DOWN` and so on.
    pub state: String,
    /// `InfiniBand` or `Ethernet`.
    pub link_layer: String,
    /// Its speed, in the kernel's words.
    pub rate: String,
    /// Its addresses, those that are set.
    pub gids: Vec<Gid>,
}

/// An entry of a port's table of addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Gid {
    /// Its place in the table.
    pub index: u32,
    /// The address.
    pub gid: String,
    /// `RoCE v2`, `IB/RoCE v1`.
    pub kind: Option<String>,
    /// The network interface that it belongs to.
    pub interface: Option<String>,
}

/// A file through which programs reach an RDMA device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
#[non_exhaustive]
pub struct RdmaFile {
    /// Where it is.
    pub path: String,
    /// This process may open it.
    pub usable: bool,
}

/// What of the PCI bus bears on traffic from device to device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Pci {
    /// Groups of devices that an IOMMU keeps apart; 0 where none is in use.
    pub iommu_groups: usize,
    /// How it translates, of the first group: `identity`, `DMA`, `DMA-FQ`.
    pub iommu_type: Option<String>,
    /// Bridges whose access control (ACS) sends traffic from device to device up to the root, which slows it down or breaks it.
    pub acs_redirecting: Vec<String>,
    /// Bridges that do not show their access control to this user.
    pub acs_unreadable: usize,
}

impl Probe {
    pub(super) fn gpus(&self) -> Vec<Gpu> {
        let mut addresses = self.names("/proc/driver/nvidia/gpus");
        // Without the driver, they still stand on the bus: class 3 (display), vendor NVIDIA.
        for address in self.names("/sys/bus/pci/devices") {
            let at = |file: &str| self.text(&format!("/sys/bus/pci/devices/{address}/{file}"));
            let is_gpu = at("vendor").as_deref() == Some("0x10de") && at("class").is_some_and(|class| class.starts_with("0x03"));
            if is_gpu && !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        addresses.sort();
        let gpu = |address: String| {
            let text = self.text(&format!("/proc/driver/nvidia/gpus/{address}/information"));
            let model = text.as_deref().and_then(|text| text.lines().find_map(|line| line.strip_prefix("Model:")));
            Gpu {
                model: model.map(|model| model.trim().to_owned()),
                numa_node: self.numa_node(&format!("/sys/bus/pci/devices/{address}")),
                address,
            }
        };
        addresses.into_iter().map(gpu).collect()
    }

    fn numa_node(&self, device: &str) -> Option<u32> {
        // -1 where there is only one.
        self.value(&format!("{device}/numa_node"))
    }

    pub(super) fn rdma_devices(&self) -> Vec<RdmaDevice> {
        const ALL: &str = "/sys/class/infiniband";
        let device = |name: String| {
            let ports = self.numbered(&format!("{ALL}/{name}/ports"), "");
            RdmaDevice {
                ports: ports.into_iter().map(|number| self.rdma_port(&format!("{ALL}/{name}/ports/{number}"), number)).collect(),
                numa_node: self.numa_node(&format!("{ALL}/{name}/device")),
                name,
            }
        };
        self.names(ALL).into_iter().map(device).collect()
    }

    fn rdma_port(&self, path: &str, number: u32) -> RdmaPort {
        let at = |file: &str| self.text(&format!("{path}/{file}")).unwrap_or_else(|| "unknown".into());
        // "4: ACTIVE"
        let state = at("state");
        let state = state.split_once(": ").map_or(state.as_str(), |(_, name)| name).to_owned();
        let gid = |index: u32| {
            let gid = self.text(&format!("{path}/gids/{index}"))?;
            // Entries that are not set are zero.
            gid.chars().any(|c| c != '0' && c != ':').then(|| Gid {
                kind: self.text(&format!("{path}/gid_attrs/types/{index}")),
                interface: self.text(&format!("{path}/gid_attrs/ndevs/{index}")),
                index,
                gid,
            })
        };
        let gids = self.numbered(&format!("{path}/gids"), "").into_iter().filter_map(gid).collect();
        RdmaPort { number, state, link_layer: at("link_layer"), rate: at("rate"), gids }
    }

    /// The device files of the RDMA devices, and whether this process may open them.
    pub(super) fn rdma_files(&self) -> Vec<RdmaFile> {
        let names = self.names("/dev/infiniband").into_iter().filter(|name| name.starts_with("uverbs"));
        let file = |name: String| {
            let path = format!("/dev/infiniband/{name}");
            // Asked, not opened: opening makes the driver set up a context. The device filter of a container answers this too.
            let access = rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK;
            RdmaFile { usable: rustix::fs::access(self.path(&path), access).is_ok(), path }
        };
        names.map(file).collect()
    }

    pub(super) fn pci(&self) -> Pci {
        let mut groups = self.numbered("/sys/kernel/iommu_groups", "");
        groups.truncate(1 << 16);
        let mut found = Pci {
            iommu_groups: groups.len(),
            iommu_type: groups.first().and_then(|group| self.text(&format!("/sys/kernel/iommu_groups/{group}/type"))),
            ..Pci::default()
        };
        for address in self.names("/sys/bus/pci/devices") {
            let path = format!("/sys/bus/pci/devices/{address}");
            // Class 6, subclass 4: a bridge from PCI to PCI.
            if !self.text(&format!("{path}/class")).is_some_and(|class| class.starts_with("0x0604")) {
                continue;
            }
            let config = std::fs::read(self.path(&format!("{path}/config"))).unwrap_or_default();
            match acs_redirects(&config) {
                Acs::Redirects => found.acs_redirecting.push(address),
                Acs::Hidden => found.acs_unreadable += 1,
                Acs::Direct => {}
            }
        }
        found
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Acs {
    Redirects,
    Direct,
    /// Only root reads more than the first 64 bytes.
    Hidden,
}

/// Whether a bridge sends requests or answers from device to device up to the root (PCI Express, 7.7.11).
fn acs_redirects(config: &[u8]) -> Acs {
    const EXTENDED: usize = 0x100;
    const ACS: u32 = 0x000d;
    const REDIRECT: u16 = 1 << 2 | 1 << 3;
    // 64 bytes: not allowed to see more. 256: a device of the time before extended capabilities.
    if config.len() < EXTENDED {
        return Acs::Hidden;
    }
    let mut at = EXTENDED;
    // There is room for so many.
    for _ in 0..(4096 - EXTENDED) / 8 {
        let Some(header) = config.get(at..at + 4).and_then(|b| b.try_into().ok()).map(u32::from_le_bytes) else { break };
        if header & 0xffff == ACS {
            let control = config.get(at + 6..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u16::from_le_bytes);
            return if control & REDIRECT == 0 { Acs::Direct } else { Acs::Redirects };
        }
        at = (header >> 20) as usize;
        if at < EXTENDED {
            break;
        }
    }
    Acs::Direct
}

#[cfg(test)]
mod tests {
    use super::super::checks::fixture;
    use super::*;

    #[test]
    fn an_rdma_device_is_described_with_the_addresses_that_are_set() {
        let port = |file: &str| format!("sys/class/infiniband/mlx5_0/ports/1/{file}");
        let files = [
            (port("state"), "4: ACTIVE\n"),
            (port("link_layer"), "Ethernet\n"),
            (port("rate"), "400 Gb/sec (4X NDR)\n"),
            (port("gids/0"), "fe80:0000:0000:0000:0000:00ff:fe00:0001\n"),
            (port("gids/1"), "0000:0000:0000:0000:0000:ffff:c000:0207\n"),
            (port("gids/2"), "0000:0000:0000:0000:0000:0000:0000:0000\n"),
            (port("gids/10"), "0000:0000:0000:0000:0000:ffff:c000:0208\n"),
            (port("gid_attrs/types/1"), "RoCE v2\n"),
            (port("gid_attrs/ndevs/1"), "eth0\n"),
            ("sys/class/infiniband/mlx5_0/device/numa_node".to_owned(), "1\n"),
        ];
        let files: Vec<_> = files.iter().map(|(path, text)| (path.as_str(), *text)).collect();
        let (_dir, probe) = fixture(&files);
        let devices = probe.rdma_devices();
        let [device] = &devices[..] else { panic!("{devices:?}") };
        let [port] = &device.ports[..] else { panic!("{device:?}") };
        assert_eq!((device.name.as_str(), device.numa_node, port.number, port.state.as_str()), ("mlx5_0", Some(1), 1, "ACTIVE"));
        assert_eq!(port.gids.iter().map(|gid| gid.index).collect::<Vec<_>>(), [0, 1, 10]);
        assert_eq!((port.gids[1].kind.as_deref(), port.gids[1].interface.as_deref()), (Some("RoCE v2"), Some("eth0")));
    }

    #[test]
    fn a_gpu_is_seen_with_and_without_its_driver() {
        let (_dir, probe) = fixture(&[
            ("proc/driver/nvidia/gpus/0000:18:00.0/information", "Model: \t\t NVIDIA H200\nIRQ: 5\n"),
            ("sys/bus/pci/devices/0000:18:00.0/vendor", "0x10de\n"),
            ("sys/bus/pci/devices/0000:18:00.0/class", "0x030200\n"),
            ("sys/bus/pci/devices/0000:18:00.0/numa_node", "1\n"),
            ("sys/bus/pci/devices/0000:99:00.0/vendor", "0x10de\n"),
            ("sys/bus/pci/devices/0000:99:00.0/class", "0x030200\n"),
            ("sys/bus/pci/devices/0000:9a:00.0/vendor", "0x10de\n"),
            ("sys/bus/pci/devices/0000:9a:00.0/class", "0x068000\n"),
        ]);
        let gpus = probe.gpus();
        assert_eq!(gpus.len(), 2);
        assert_eq!((gpus[0].model.as_deref(), gpus[0].numa_node), (Some("NVIDIA H200"), Some(1)));
        assert_eq!((gpus[1].address.as_str(), &gpus[1].model), ("0000:99:00.0", &None));
    }

    #[test]
    fn access_control_of_bridges_is_read_from_their_configuration() {
        let mut config = vec![0; 4096];
        let capability = |config: &mut Vec<u8>, at: usize, id: u32, next: usize| {
            config[at..at + 4].copy_from_slice(&(id | 1 << 16 | (next as u32) << 20).to_le_bytes());
        };
        capability(&mut config, 0x100, 0x0001, 0x140);
        capability(&mut config, 0x140, 0x000d, 0);
        assert_eq!(acs_redirects(&config), Acs::Direct);
        config[0x146] = 0x1d;
        assert_eq!(acs_redirects(&config), Acs::Redirects);
        assert_eq!(acs_redirects(&config[..64]), Acs::Hidden);
        assert_eq!(acs_redirects(&config[..256]), Acs::Direct);
        assert_eq!(acs_redirects(&config[..0x142]), Acs::Direct);
        // A chain that bites its tail ends.
        capability(&mut config, 0x140, 0x0002, 0x100);
        assert_eq!(acs_redirects(&config), Acs::Direct);

        let (dir, probe) =
            fixture(&[("sys/bus/pci/devices/0000:00:01.0/class", "0x060400\n"), ("sys/kernel/iommu_groups/0/type", "DMA-FQ\n")]);
        capability(&mut config, 0x140, 0x000d, 0);
        std::fs::write(dir.path().join("sys/bus/pci/devices/0000:00:01.0/config"), &config).unwrap();
        let pci = probe.pci();
        assert_eq!((pci.iommu_groups, pci.iommu_type.as_deref(), pci.acs_unreadable), (1, Some("DMA-FQ"), 0));
        assert_eq!(pci.acs_redirecting, ["0000:00:01.0"]);
    }
}
