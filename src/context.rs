//! Contexts: where everything begins.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::net::{TcpListener, ToSocketAddrs, lookup_host};

use crate::config::Config;
use crate::endpoint::GpuEndpoint;
use crate::endpoint::handshake::{self, Local, random};
use crate::endpoint::listener::GpuListener;
use crate::endpoint::offer::Offers;
use crate::error::{Error, Result};
use crate::memory::cuda::staging::Staging;
use crate::memory::{self, GpuBuf, MemKind, OwnedMemory};
use crate::path::PathPolicy;
use crate::reactor::Reactor;
use crate::reactor::spin::Spin;

/// Finds devices and paths, allocates memory, and makes endpoints. Cheap to clone; all clones are the same context.
///
/// A context belongs to the tokio runtime in which it was made, which must have I/O and time enabled. If that runtime ends, the
/// endpoints of the context end with [`Error::PeerLost`]. A runtime whose threads are kept busy by other code for longer than the
/// [liveness time](ContextBuilder::liveness) looks dead to the peers.
#[derive(Clone)]
pub struct Context {
    local: Local,
    offers: Arc<Offers>,
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("config", &self.local.config).finish_non_exhaustive()
    }
}

/// Sets a context up. Made by [`Context::builder`].
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct ContextBuilder {
    config: Config,
}

impl Context {
    /// A context with everything at its default.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] outside of a tokio runtime; [`Error::InvalidArgument`] if an environment variable of the crate cannot be
    /// understood.
    pub fn new() -> Result<Self> {
        Self::builder().build()
    }

    /// Starts to set a context up.
    pub fn builder() -> ContextBuilder {
        ContextBuilder::default()
    }

    /// Allocates `len` zeroed bytes of memory: `"host"` or `"cuda:0"`, or a [`MemKind`].
    ///
    /// Device memory is allocated so that it can be shared with other processes and reached by NICs, where the driver can do that
    /// (`cuMemCreate` with a POSIX file descriptor); buffers of up to 8 MiB share allocations of 32 MiB. The device is used through its
    /// primary context, the one that cudarc and PyTorch use too. The call waits for the memory to be zeroed.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] if there is no such device or no CUDA driver, with the reason; [`Error::InvalidArgument`] for a name that is no
    /// kind of memory or more bytes than the machine or device has; [`Error::Io`] if the system has none left, [`Error::Cuda`] if the
    /// device has none left, or has failed.
    pub fn alloc<K>(&self, kind: K, len: u64) -> Result<GpuBuf>
    where
        K: TryInto<MemKind>,
        Error: From<K::Error>,
    {
        memory::alloc(kind.try_into()?, len)
    }

    /// Takes memory that the user owns into use, where it is. It is freed, with its own destructor, when nothing uses it any more. See
    /// [`OwnedMemory`] for what can be registered. A `CudaSlice` of cudarc is ordered behind its stream
    /// ([`GpuBuf::ready_after`]), on which it was allocated and filled.
    ///
    /// # Errors
    ///
    /// None for host memory. For that of a device, [`Error::Unsupported`] without a driver, [`Error::Cuda`] if its context is gone or
    /// has failed, [`Error::OutOfBounds`] for a range that the slice does not have.
    pub fn register(&self, owner: impl OwnedMemory) -> Result<GpuBuf> {
        memory::register(owner)
    }

    /// Takes `len` bytes of device memory from `address` on into use, whoever allocated them: PyTorch, or a library in C. They may begin in the
    /// middle of an allocation, and span several that lie one behind another. `keep` is dropped when nothing uses them any more.
    ///
    /// Every later use checks that the driver still knows the memory by the number that it has now; memory that was freed all the same, and
    /// whose address another allocation got, is [`Error::Cuda`] then.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if it is no device memory, [`Error::OutOfBounds`] if it is longer than what is allocated there,
    /// [`Error::Unsupported`] without a driver.
    ///
    /// # Safety
    ///
    /// The memory stays allocated until `keep` is dropped, and meanwhile nothing else uses it but what is ordered with
    /// [`GpuBuf::ready_after`] and by the ends of operations.
    pub unsafe fn register_raw(
        &self,
        address: u64,
        len: u64,
        keep: impl std::any::Any + std::marker::Send + Sync,
    ) -> Result<GpuBuf> {
        // SAFETY: as the caller says.
        unsafe { memory::register_raw(address, len, Box::new(keep)) }
    }

    /// Listens on an address.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the address is in use or not one of this host.
    pub async fn bind(&self, address: impl ToSocketAddrs + fmt::Debug) -> Result<GpuListener> {
        let name = format!("{address:?}");
        let listener = TcpListener::bind(address).await.map_err(|e| Error::io(format!("listening on {name}"), e))?;
        GpuListener::start(listener, self.local.clone())
    }

    /// Connects to a listener. The addresses that a name resolves to are tried in turn.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if nobody listens there, [`Error::Handshake`] if it is no gpusock, one of another version, or does not answer in
    /// time, [`Error::NoPath`] if the policy leaves none.
    ///
    /// # Cancel safety
    ///
    /// Dropped, the connection is given up.
    pub async fn connect(&self, address: impl ToSocketAddrs + fmt::Debug) -> Result<GpuEndpoint> {
        let name = format!("{address:?}");
        let addresses: Vec<SocketAddr> =
            lookup_host(address).await.map_err(|e| Error::io(format!("looking {name} up"), e))?.collect();
        let mut last = Error::invalid(format!("{name} names no address"));
        for address in addresses {
            let limit = self.local.config.connect_timeout;
            match tokio::time::timeout(limit, handshake::connect(&self.local, address, 0)).await {
                Ok(Ok(endpoint)) => return Ok(endpoint),
                Ok(Err(error)) => last = error,
                Err(_) => last = Error::handshake(address, format!("no connection within {limit:?}")),
            }
        }
        Err(last)
    }

    /// Bytes that let a peer connect to this context, to be carried by any channel of the user's. Each offer serves one endpoint.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if no socket can be bound.
    pub async fn offer(&self) -> Result<Bytes> {
        self.offers.offer(&self.local).await
    }

    /// Connects to the peer whose offer this is. The peer must do the same with an offer of this context.
    ///
    /// # Errors
    ///
    /// As for [`connect`](Self::connect), and [`Error::InvalidArgument`] for bytes that are no offer, or one of this very context.
    pub async fn connect_offer(&self, peer: &[u8]) -> Result<GpuEndpoint> {
        self.offers.connect(&self.local, peer).await
    }

    /// Endpoints of this context that are open.
    #[must_use]
    pub fn endpoints(&self) -> usize {
        self.local.reactor.len()
    }
}

impl ContextBuilder {
    /// How waits are spent. Default: [`Spin::Adaptive`].
    pub fn spin(mut self, spin: Spin) -> Self {
        self.config.spin = spin;
        self
    }

    /// The core to which the thread of [`Spin::Thread`] is pinned. Default: none.
    pub fn spin_core(mut self, core: usize) -> Self {
        self.config.spin_core = Some(core);
        self
    }

    /// Which paths may be taken. Default: all.
    pub fn policy(mut self, policy: PathPolicy) -> Self {
        self.config.policy = policy;
        self
    }

    /// TCP connections per endpoint, 1 to 16, for bulk transfers over networks on which one stream is not enough. The lower number of
    /// both sides counts. Default: 1.
    pub fn lanes(mut self, lanes: u8) -> Self {
        self.config.lanes = lanes;
        self
    }

    /// The longest message, in bytes, that is sent without asking whether the receiver has a buffer for it. At most 4 MiB; the lower
    /// number of both sides counts. Default: 64 KiB.
    pub fn eager_max(mut self, bytes: u32) -> Self {
        self.config.eager_max = bytes;
        self
    }

    /// What each peer may have waiting here for a receive, in bytes, 64 bytes a message included. Default: 1 MiB.
    pub fn receive_window(mut self, bytes: u64) -> Self {
        self.config.credit = bytes;
        self
    }

    /// After this long without a word from a peer, it is asked whether it is there. Default: 5 s.
    pub fn heartbeat(mut self, after: Duration) -> Self {
        self.config.heartbeat = after;
        self
    }

    /// After this long without a word from a peer, it is lost. Default: 15 s. A peer whose process ends is noticed at once.
    pub fn liveness(mut self, after: Duration) -> Self {
        self.config.liveness = after;
        self
    }

    /// How long a handshake may take. Default: 5 s.
    pub fn handshake_timeout(mut self, limit: Duration) -> Self {
        self.config.handshake_timeout = limit;
        self
    }

    /// How long connecting may take, per address, the handshake included. Default: 30 s.
    pub fn connect_timeout(mut self, limit: Duration) -> Self {
        self.config.connect_timeout = limit;
        self
    }

    /// How long a close, or the drop of the last handle, waits for what was issued to be completed. Default: 10 s.
    pub fn linger(mut self, limit: Duration) -> Self {
        self.config.linger = limit;
        self
    }

    /// The TCP congestion control for all connections (`TCP_CONGESTION` of tcp(7)). By default the system's, except that connections
    /// within one host leave `bbr`, which paces them, for `reno`. The environment variable `GPUSOCK_TCP_CONGESTION` overrides it.
    pub fn tcp_congestion(mut self, name: impl Into<String>) -> Self {
        self.config.tcp_congestion = Some(name.into());
        self
    }

    /// Whether this process shares memory with processes of other users on its host. Default: no, and they are reached over TCP.
    ///
    /// A process that shares memory with this one can read, and write, the whole of each allocation of which a part is sent to it. One of the
    /// same user could do that anyhow, as a debugger does.
    pub fn shm_between_users(mut self, allowed: bool) -> Self {
        self.config.shm_between_users = allowed;
        self
    }

    /// Makes the context.
    ///
    /// # Errors
    ///
    /// As for [`Context::new`], and [`Error::InvalidArgument`] for values out of range.
    pub fn build(self) -> Result<Context> {
        let config = self.config.finish()?;
        let tick = (config.heartbeat / 4).min(Duration::from_secs(1));
        let reactor = Reactor::start(config.spin, config.spin_core, tick)?;
        let staging = Arc::new(Staging::new(config.segment.max(config.eager_max)));
        let local = Local { config: Arc::new(config), reactor, context: random()?, staging };
        Ok(Context { local, offers: Arc::default() })
    }
}
