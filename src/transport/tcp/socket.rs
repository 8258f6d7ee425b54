//! Socket options, and which congestion control a connection runs under.

use std::fmt;
use std::net::TcpStream;

use rustix::net::sockopt;

use crate::error::{Error, Result};

/// What a socket was set to; shown in the path report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tuning {
    pub congestion: String,
    /// Whether it was chosen here rather than by the system.
    pub chosen: bool,
}

impl fmt::Display for Tuning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.congestion, if self.chosen { " (chosen)" } else { " (system)" })
    }
}

/// The congestion control that paces, and on loopback halves the speed of one stream.
pub(crate) const PACED: &str = "bbr";
/// Needs no privilege, on any kernel.
const UNPACED: &str = "reno";

/// Prepares a connected socket. `wanted` names a congestion control; without it, a connection that stays on this host leaves a
/// pacing one, since there is no network to be fair to.
pub(crate) fn tune(socket: &TcpStream, wanted: Option<&str>, same_host: bool) -> Result<Tuning> {
    socket.set_nonblocking(true).map_err(|e| Error::io("setting a socket to non-blocking", e))?;
    socket.set_nodelay(true).map_err(|e| Error::io("setting TCP_NODELAY", e))?;
    let system = sockopt::tcp_congestion(socket).unwrap_or_else(|_| "unknown".to_owned());
    let pick = match wanted {
        Some(name) => Some(name),
        None if same_host && system == PACED => Some(UNPACED),
        None => None,
    };
    match pick {
        Some(name) if name != system => match sockopt::set_tcp_congestion(socket, name) {
            Ok(()) => Ok(Tuning { congestion: name.to_owned(), chosen: true }),
            // Asked for by the user: an error. A choice of ours: stay with the system's.
            Err(errno) if wanted.is_some() => Err(Error::io(
                format!("setting the TCP congestion control {name:?} (see net.ipv4.tcp_available_congestion_control)"),
                errno,
            )),
            Err(_) => Ok(Tuning { congestion: system, chosen: false }),
        },
        _ => Ok(Tuning { congestion: system, chosen: wanted.is_some() }),
    }
}
