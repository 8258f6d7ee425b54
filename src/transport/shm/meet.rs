//! How two processes find out that they are on one host, and come by their shared memory.
//!
//! The side that accepts listens on an abstract Unix socket with a random name, which it tells the other over TCP, with a second random number
//! that proves who comes. Abstract names belong to a network namespace, so processes that do not share one do not meet. The kernel says
//! which user is at the other end; another user than this process's is refused unless the user of the crate allows it.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::Pid;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::link::Link;
use super::memory::{SIZE, Shared};
use super::socket;

/// The name of the socket, and the number that proves who comes.
pub(crate) type Token = [u8; 32];

/// How long a stranger on the socket may take to say its number.
const STRANGER: Duration = Duration::from_millis(200);
/// What the side that accepts says, before the length of its file.
const WELCOME: u64 = u64::from_le_bytes(*b"gpusock\x01");

/// One end of the shared memory.
#[derive(Debug)]
pub(crate) struct ShmEnd {
    shared: Shared,
    socket: OwnedFd,
    side: usize,
    peer: Option<Pid>,
    /// Whether memory of the peer's that is no memory file can be read.
    reads: Result<(), Errno>,
}

impl ShmEnd {
    fn new(shared: Shared, socket: OwnedFd, side: usize, peer: Option<Pid>) -> Self {
        ShmEnd { shared, socket, side, peer, reads: Err(Errno::SRCH) }
    }

    /// Finds out how memory can be reached. Both sides have mapped the shared memory.
    pub(crate) fn explore(mut self) -> Self {
        self.reads = self.shared.try_reading(1 - self.side, self.peer);
        self
    }

    pub(super) fn into_link(self) -> Arc<Link> {
        Link::new(self.shared, self.socket, self.side, self.peer)
    }

    /// How it is set up, for the report.
    pub(crate) fn describe(&self) -> String {
        let others = match self.reads {
            Ok(()) => "those of other memory by process_vm_readv".to_owned(),
            Err(errno) => format!("those of other memory pass through a ring (process_vm_readv: {errno})"),
        };
        format!("the peer is on this host: long payloads of memory files are read in place, {others}")
    }
}

/// Why it did not come about, for people.
type Reason = String;

fn name(token: &Token) -> Result<SocketAddrUnix, Reason> {
    let digits: String = token[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    SocketAddrUnix::new_abstract_name(format!("gpusock-{digits}").as_bytes()).map_err(|e| format!("naming a Unix socket: {e}"))
}

fn open() -> Result<OwnedFd, Reason> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(|e| format!("opening a Unix socket: {e}"))
}

/// Whether the process at the other end may share memory with this one.
fn check_user(socket: &OwnedFd, others: bool) -> Result<Option<Pid>, Reason> {
    let (process, user) = socket::peer(socket.as_fd()).map_err(|e| format!("asking who is at a Unix socket: {e}"))?;
    let own = rustix::process::geteuid().as_raw();
    if user == own || others {
        return Ok(process);
    }
    Err(format!("the peer runs as user {}, this process as user {}; `shm_between_users` allows it", user, own))
}

/// Waits for a packet.
async fn receive(socket: &AsyncFd<OwnedFd>, bytes: &mut [u8; 64]) -> Result<(usize, Option<OwnedFd>), Reason> {
    loop {
        let mut ready = socket.ready(Interest::READABLE).await.map_err(|e| format!("waiting at a Unix socket: {e}"))?;
        match socket::receive(socket.as_fd(), bytes) {
            Ok((packet, file)) => return Ok((packet.len(), file)),
            Err(Errno::AGAIN) => ready.clear_ready(),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(format!("receiving at a Unix socket: {errno}")),
        }
    }
}

fn watch(socket: OwnedFd) -> Result<AsyncFd<OwnedFd>, Reason> {
    // SAFETY: the descriptor belongs to the value that tokio is given.
    unsafe { AsyncFd::register(socket) }.map_err(|e| format!("watching a Unix socket: {e}"))
}

/// The side that accepts, waiting.
pub(crate) struct Meeting {
    listener: AsyncFd<OwnedFd>,
    token: Token,
    others: bool,
    shared: Shared,
    file: OwnedFd,
}

impl Meeting {
    pub(crate) fn new(token: Token, others: bool) -> Result<Self, Reason> {
        let (shared, file) = Shared::create().map_err(|e| format!("making shared memory: {e}"))?;
        let listener = open()?;
        rustix::net::bind(&listener, &name(&token)?).map_err(|e| format!("binding a Unix socket: {e}"))?;
        rustix::net::listen(&listener, 4).map_err(|e| format!("listening on a Unix socket: {e}"))?;
        Ok(Meeting { listener: watch(listener)?, token, others, shared, file })
    }

    /// Waits for the peer. Strangers are sent away.
    pub(crate) async fn wait(self) -> Result<ShmEnd, Reason> {
        loop {
            let mut ready =
                self.listener.ready(Interest::READABLE).await.map_err(|e| format!("waiting at a Unix socket: {e}"))?;
            let socket = match rustix::net::accept_with(&self.listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
                Ok(socket) => socket,
                Err(Errno::AGAIN) => {
                    ready.clear_ready();
                    continue;
                }
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(errno) => return Err(format!("accepting at a Unix socket: {errno}")),
            };
            let socket = watch(socket)?;
            let mut bytes = [0; 64];
            let said = tokio::time::timeout(STRANGER, receive(&socket, &mut bytes)).await;
            if !matches!(said, Ok(Ok((n, _))) if bytes[..n] == self.token[16..]) {
                continue;
            }
            let socket = socket.into_inner();
            let process = check_user(&socket, self.others)?;
            let welcome = [WELCOME, SIZE as u64].map(u64::to_le_bytes).concat();
            socket::send(socket.as_fd(), &welcome, Some(self.file.as_fd())).map_err(|e| format!("sending shared memory: {e}"))?;
            return Ok(ShmEnd::new(self.shared, socket, 0, process));
        }
    }
}

/// The side that connects.
pub(crate) async fn meet(token: &Token, others: bool) -> Result<ShmEnd, Reason> {
    let socket = open()?;
    rustix::net::connect(&socket, &name(token)?).map_err(|errno| match errno {
        Errno::CONNREFUSED => {
            "the two processes do not meet on a Unix socket: they are in different network namespaces".to_owned()
        }
        errno => format!("connecting to a Unix socket: {errno}"),
    })?;
    let process = check_user(&socket, others)?;
    socket::send(socket.as_fd(), &token[16..], None).map_err(|e| format!("sending on a Unix socket: {e}"))?;
    let socket = watch(socket)?;
    let mut bytes = [0; 64];
    let (n, file) = receive(&socket, &mut bytes).await?;
    let (Some(file), true) = (file, bytes[..n] == [WELCOME, SIZE as u64].map(u64::to_le_bytes).concat()) else {
        return Err("the peer refused to share memory".to_owned());
    };
    let shared = Shared::of_peer(file.as_fd()).map_err(|e| format!("mapping shared memory: {e}"))?;
    Ok(ShmEnd::new(shared, socket.into_inner(), 1, process).explore())
}
