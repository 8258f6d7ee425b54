//! Network interfaces, and how TCP is set.

use std::net::IpAddr;

use super::Probe;

/// A network interface.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// `up`, `down`, `unknown`.
    pub state: String,
    /// Longest packet, in bytes.
    pub mtu: Option<u32>,
    /// Speed in Mbit/s, where the driver says.
    pub speed_mbps: Option<u32>,
    /// NUMA node of the device behind it.
    pub numa_node: Option<u32>,
    /// Its addresses, each with the length of its network's prefix: `192.0.2.7/24`.
    pub addresses: Vec<String>,
}

/// How the kernel's TCP is set.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Tcp {
    /// Congestion control of new connections.
    pub congestion: Option<String>,
    /// What else there is.
    pub congestion_available: Vec<String>,
    /// What may be chosen without privilege.
    pub congestion_allowed: Vec<String>,
    /// Longest receive buffer that the kernel grows to by itself, in bytes.
    pub receive_buffer_max: Option<u64>,
    /// The same of the send buffer.
    pub send_buffer_max: Option<u64>,
}

impl Probe {
    pub(super) fn interfaces(&self) -> Vec<Interface> {
        let addresses = if self.live { netlink::addresses() } else { Vec::new() };
        self.names("/sys/class/net")
            .into_iter()
            // Not everything there is an interface: the bonding driver keeps a file of its own.
            .filter(|name| self.exists(&format!("/sys/class/net/{name}/mtu")))
            .map(|name| {
                let at = |file: &str| format!("/sys/class/net/{name}/{file}");
                let index: Option<u32> = self.value(&at("ifindex"));
                let own = addresses.iter().filter(|address| Some(address.index) == index);
                Interface {
                    state: self.text(&at("operstate")).unwrap_or_else(|| "unknown".into()),
                    mtu: self.value(&at("mtu")),
                    // -1 where the link is down or the driver does not know.
                    speed_mbps: self.value(&at("speed")),
                    numa_node: self.value(&at("device/numa_node")),
                    addresses: own.map(|address| format!("{}/{}", address.ip, address.prefix)).collect(),
                    name,
                }
            })
            .collect()
    }

    pub(super) fn tcp(&self) -> Tcp {
        let at = |name: &str| self.text(&format!("/proc/sys/net/ipv4/{name}"));
        let words = |name: &str| at(name).unwrap_or_default().split_whitespace().map(str::to_owned).collect();
        // "least default most"
        let most = |name: &str| at(name)?.split_whitespace().nth(2)?.parse().ok();
        Tcp {
            congestion: at("tcp_congestion_control"),
            congestion_available: words("tcp_available_congestion_control"),
            congestion_allowed: words("tcp_allowed_congestion_control"),
            receive_buffer_max: most("tcp_rmem"),
            send_buffer_max: most("tcp_wmem"),
        }
    }
}

/// An address of this machine.
#[derive(Debug, PartialEq, Eq)]
struct Address {
    /// Number of the interface.
    index: u32,
    ip: IpAddr,
    prefix: u8,
}

/// Asks the kernel for addresses (rtnetlink(7)), which stand in no file.
mod netlink {
    use rustix::io::Errno;
    use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

    use super::Address;

    const GET_ADDRESS: u16 = 22;
    pub(super) const NEW_ADDRESS: u16 = 20;
    pub(super) const ERROR: u16 = 2;
    pub(super) const DONE: u16 = 3;
    const REQUEST_DUMP: u16 = 0x301;
    const HEADER: usize = 16;
    const BODY: usize = 8;
    /// The peer's address on a point-to-point link, else the own one.
    pub(super) const ATTRIBUTE_ADDRESS: u16 = 1;
    /// The own address.
    pub(super) const ATTRIBUTE_LOCAL: u16 = 2;

    pub(super) fn addresses() -> Vec<Address> {
        ask().unwrap_or_else(|error| {
            tracing::debug!(%error, "the kernel does not tell its addresses");
            Vec::new()
        })
    }

    fn ask() -> Result<Vec<Address>, Errno> {
        // Protocol 0 of this family, that of no protocol given, is NETLINK_ROUTE.
        let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        let mut request = [0; HEADER + BODY];
        request[..4].copy_from_slice(&((HEADER + BODY) as u32).to_ne_bytes());
        request[4..6].copy_from_slice(&GET_ADDRESS.to_ne_bytes());
        request[6..8].copy_from_slice(&REQUEST_DUMP.to_ne_bytes());
        rustix::net::send(&socket, &request, SendFlags::empty())?;
        let mut found = Vec::new();
        let mut part = vec![0; 64 << 10];
        loop {
            // The answer is there when the request has been sent: it is the kernel's own work.
            let (n, _) = rustix::net::recv(&socket, &mut part[..], RecvFlags::DONTWAIT)?;
            if n == 0 || parse(&part[..n.min(part.len())], &mut found) {
                return Ok(found);
            }
        }
    }

    /// Reads one datagram. Answers whether it was the last one.
    pub(super) fn parse(mut bytes: &[u8], found: &mut Vec<Address>) -> bool {
        while let Some((message, rest)) = piece(bytes, 4, |b| Some(u32::from_ne_bytes(b.get(..4)?.try_into().ok()?) as usize)) {
            bytes = rest;
            let Some(kind) = message.get(4..6).and_then(|b| b.try_into().ok()).map(u16::from_ne_bytes) else { return true };
            match kind {
                DONE | ERROR => return true,
                NEW_ADDRESS => found.extend(message.get(HEADER..).and_then(address)),
                _ => {}
            }
        }
        false
    }

    fn address(message: &[u8]) -> Option<Address> {
        let (body, mut attributes) = message.split_at_checked(BODY)?;
        let mut best = None;
        while let Some((attribute, rest)) =
            piece(attributes, 4, |b| Some(u16::from_ne_bytes(b.get(..2)?.try_into().ok()?).into()))
        {
            attributes = rest;
            let kind = u16::from_ne_bytes(attribute.get(2..4)?.try_into().ok()?);
            if kind == ATTRIBUTE_LOCAL || kind == ATTRIBUTE_ADDRESS && best.is_none() {
                best = Some(attribute.get(4..)?);
            }
        }
        let ip = match best? {
            four if four.len() == 4 => <[u8; 4]>::try_from(four).ok()?.into(),
            sixteen => <[u8; 16]>::try_from(sixteen).ok()?.into(),
        };
        Some(Address { index: u32::from_ne_bytes(body.get(4..8)?.try_into().ok()?), ip, prefix: *body.get(1)? })
    }

    /// A piece that tells its own length, and what follows it after padding. `None` if none is left that is whole.
    fn piece(bytes: &[u8], align: usize, len: impl Fn(&[u8]) -> Option<usize>) -> Option<(&[u8], &[u8])> {
        let len = len(bytes).filter(|&len| len >= 4)?;
        let piece = bytes.get(..len)?;
        Some((piece, bytes.get(len.next_multiple_of(align)..).unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use super::netlink::{ATTRIBUTE_ADDRESS, ATTRIBUTE_LOCAL, DONE, NEW_ADDRESS, parse};
    use super::*;

    fn message(kind: u16, index: u32, prefix: u8, attributes: &[(u16, &[u8])]) -> Vec<u8> {
        let mut body = vec![2, prefix, 0, 0];
        body.extend(index.to_ne_bytes());
        for (kind, value) in attributes {
            body.extend((value.len() as u16 + 4).to_ne_bytes());
            body.extend(kind.to_ne_bytes());
            body.extend(*value);
            body.resize(body.len().next_multiple_of(4), 0);
        }
        let mut bytes = (body.len() as u32 + 16).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend([0; 10]);
        bytes.extend(body);
        bytes
    }

    #[test]
    fn answers_of_the_kernel_are_read() {
        let v6: [u8; 16] = "fe80::1".parse::<std::net::Ipv6Addr>().unwrap().octets();
        // A label of an odd length stands before what is looked for.
        let mut bytes = message(
            NEW_ADDRESS,
            3,
            24,
            &[(3, b"eth0\0"), (ATTRIBUTE_ADDRESS, &[192, 0, 2, 9]), (ATTRIBUTE_LOCAL, &[192, 0, 2, 7])],
        );
        bytes.extend(message(NEW_ADDRESS, 3, 64, &[(ATTRIBUTE_ADDRESS, &v6)]));
        let mut found = Vec::new();
        assert!(!parse(&bytes, &mut found));
        let address = |ip: &str, prefix| Address { index: 3, ip: ip.parse().unwrap(), prefix };
        assert_eq!(found, [address("192.0.2.7", 24), address("fe80::1", 64)]);
        assert!(parse(&message(DONE, 0, 0, &[]), &mut found));
        // Nothing that is cut short is believed, or read beyond.
        for end in 0..bytes.len() {
            found.clear();
            parse(&bytes[..end], &mut found);
            assert!(found.len() <= 1);
        }
    }

    #[test]
    fn the_loopback_interface_has_its_address() {
        let interfaces = Probe::new().interfaces();
        let Some(lo) = interfaces.iter().find(|interface| interface.name == "lo") else { return };
        assert!(lo.state == "down" || lo.addresses.iter().any(|address| address == "127.0.0.1/8"), "{lo:?}");
        assert!(Probe::new().tcp().congestion.is_some());
    }

    #[test]
    fn settings_of_tcp_are_read() {
        let (_dir, probe) = super::super::checks::fixture(&[
            ("proc/sys/net/ipv4/tcp_congestion_control", "cubic\n"),
            ("proc/sys/net/ipv4/tcp_available_congestion_control", "reno cubic\n"),
            ("proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t6291456\n"),
            ("sys/class/net/bonding_masters", "bond0\n"),
            ("sys/class/net/eth0/mtu", "9000\n"),
            ("sys/class/net/eth0/speed", "-1\n"),
        ]);
        let tcp = probe.tcp();
        assert_eq!(
            (tcp.congestion.as_deref(), tcp.receive_buffer_max, tcp.send_buffer_max),
            (Some("cubic"), Some(6_291_456), None)
        );
        assert_eq!(tcp.congestion_available, ["reno", "cubic"]);
        let interfaces = probe.interfaces();
        assert_eq!(interfaces.len(), 1);
        assert_eq!((interfaces[0].mtu, interfaces[0].speed_mbps), (Some(9000), None));
    }
}
