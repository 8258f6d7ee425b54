//! Endpoints: the public face of a connection.

pub(crate) mod adapters;
mod ahead;
pub(crate) mod conn;
pub(crate) mod copies;
pub(crate) mod events;
pub(crate) mod futures;
pub(crate) mod handshake;
mod lane;
pub(crate) mod listener;
pub(crate) mod message;
pub(crate) mod offer;
pub(crate) mod operation;
pub(crate) mod remote;
pub(crate) mod route;
mod sink;
pub(crate) mod state;

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use self::adapters::{BytesSink, BytesStream, Messages};
use self::conn::Conn;
use self::events::PathEvents;
pub use self::futures::Receipt;
use self::futures::{
    Close, Closed, CompareSwap, FetchAdd, Flush, Incoming, Notified, ReadRemote, Recv, RecvBytes, Send, WriteRemote,
};
use self::operation::{Operation, Request};
use self::remote::{Access, Lease, RemoteBuf, RemoteWord};
use self::state::Held;
use crate::error::{Error, Result};
use crate::memory::{Dest, MemKind, Memory, ReadLease, Source};
use crate::path::{self, PathReport};
use crate::proto::initiator::{Parts, Work};
use crate::wire::remote::Descriptor;

/// One end of a connection to a peer, over the best path that both sides have.
///
/// Made by [`Context::connect`](crate::Context::connect), [`GpuListener::accept`](crate::GpuListener::accept) and
/// [`Context::connect_offer`](crate::Context::connect_offer). Cheap to clone; all clones are the same endpoint, and any of them can be used
/// from any task at any time. When the last clone and the last of its futures are dropped, the endpoint closes: what was issued is still
/// delivered, for at most the [linger time](crate::ContextBuilder::linger).
///
/// # Ordering
///
/// Messages arrive in the order in which they were sent. A one-sided write is visible at the target before any later message or
/// notification of the same endpoint is delivered. Otherwise operations may complete in any order.
///
/// # The end of the peer
///
/// If the peer dies, every pending operation ends with [`Error::PeerLost`], and none hangs. If it closes in good order, they end with
/// [`Error::Closed`]; messages that had wholly arrived can still be received.
#[derive(Clone)]
pub struct GpuEndpoint {
    handle: Arc<Handle>,
}

/// Shared by the clones of an endpoint and by its futures.
pub(crate) struct Handle {
    pub(crate) conn: Arc<Conn>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.conn.close();
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").field("peer", &self.conn.info.peer).finish_non_exhaustive()
    }
}

impl fmt::Debug for GpuEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let info = &self.handle.conn.info;
        f.debug_struct("GpuEndpoint").field("peer", &info.peer).field("path", &info.kind).finish_non_exhaustive()
    }
}

/// Counters of an endpoint since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Stats {
    /// Bytes that went to the peer: messages, writes, and answers to its reads.
    pub bytes_sent: u64,
    /// Bytes that came from the peer: messages, its writes, and answers to reads.
    pub bytes_received: u64,
    /// Bytes that passed through host memory on their way between GPUs.
    pub staged_bytes: u64,
    /// Messages that were issued.
    pub messages_sent: u64,
    /// Messages that have come or were announced.
    pub messages_received: u64,
    /// Writes, reads and atomics that were issued.
    pub writes: u64,
    /// See `writes`.
    pub reads: u64,
    /// See `writes`.
    pub atomics: u64,
    /// Operations that are not over, or whose end nobody has seen.
    pub in_flight: u64,
    /// Messages that wait here for a receive.
    pub unreceived: u64,
    /// Messages that wait here for the peer's credit.
    pub waiting_for_credit: u64,
    /// Exposures that are not revoked.
    pub exposures: u64,
}

impl GpuEndpoint {
    pub(crate) fn new(conn: Arc<Conn>) -> Self {
        GpuEndpoint { handle: Arc::new(Handle { conn }) }
    }

    fn conn(&self) -> &Arc<Conn> {
        &self.handle.conn
    }

    fn operation(&self, request: Result<Request>) -> Operation {
        Operation::new(&self.handle, request)
    }

    /// Sends one message. See [`Send`] for completion, ordering and cancel safety.
    pub fn send(&self, source: impl Source) -> Send {
        Send::new(self.operation(source.read_lease().map(send_request)))
    }

    /// Sends bytes that need no buffer. See [`Send`].
    pub fn send_bytes(&self, bytes: impl Into<Bytes>) -> Send {
        Send::new(self.operation(Ok(send_request(ReadLease::of_bytes(bytes.into())))))
    }

    /// Receives one message. See [`Recv`] for errors and cancel safety.
    pub fn recv(&self, dest: impl Dest) -> Recv {
        Recv::new(self.operation(match dest.write_lease() {
            Ok(lease) => Ok(Request::Recv { lease, tag: None }),
            Err(error @ Error::Busy { .. }) => Ok(Request::RecvBusy { key: dest.key(), tag: None, error }),
            Err(error) => Err(error),
        }))
    }

    /// Receives one message into memory of its own, with its tag.
    pub fn recv_bytes(&self) -> RecvBytes {
        RecvBytes::new(self.incoming())
    }

    /// Waits for the next message and answers its size, so that a buffer can be chosen.
    pub fn incoming(&self) -> Incoming {
        Incoming::new(self.operation(Ok(Request::Claim)))
    }

    /// The messages as a [`Stream`](futures_core::Stream). It ends when the endpoint does.
    pub fn messages(&self) -> Messages {
        Messages::new(self)
    }

    /// The messages as a [`Stream`](futures_core::Stream) of [`Bytes`]. It ends when the endpoint does.
    pub fn bytes_stream(&self) -> BytesStream {
        BytesStream::new(self)
    }

    /// A [`Sink`](futures_sink::Sink) that sends each [`Bytes`] as a message.
    pub fn bytes_sink(&self) -> BytesSink {
        BytesSink::new(self)
    }

    /// Lets the peer access memory. The returned value is the lease, and its [`to_bytes`](RemoteBuf::to_bytes) is what the peer needs.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] (see [`GpuBuf`](crate::GpuBuf)), [`Error::OutOfBounds`], [`Error::InvalidArgument`] for read-only memory or no
    /// right at all, and why the endpoint ended if it has.
    pub fn expose(&self, memory: impl Source, access: Access) -> Result<RemoteBuf> {
        if access.bits() & Access::ALL.bits() == 0 {
            return Err(Error::invalid("an exposure needs at least one of READ, WRITE and ATOMIC"));
        }
        let place = match memory.memory_kind() {
            MemKind::Host => 0,
            MemKind::Cuda(device) => device + 1,
        };
        let chunk = memory.expose(access.changes())?;
        let token = handshake::random_u64()?;
        let conn = self.conn();
        let (len, kind) = (chunk.len(), chunk.kind());
        let (index, exposure) = conn.with(|state| {
            if let Some(error) = state.ended.clone().or_else(|| state.proto.refusal()) {
                return Err(error);
            }
            let limits = *state.proto.limits();
            let segment = conn.route_of(&limits, kind)?.shape.segment;
            let (index, name) = state.proto.expose(len, access.rights(), token, segment);
            state.expose(index, chunk);
            Ok((index, name))
        })?;
        let descriptor = Descriptor {
            access: access.bits(),
            place,
            session: conn.info.session,
            by_acceptor: conn.info.acceptor,
            exposure,
            token,
            offset: 0,
            len,
        };
        Ok(RemoteBuf { descriptor, lease: Some(Arc::new(Lease { conn: Arc::downgrade(conn), index, exposure })) })
    }

    /// Writes all of `source` into the peer's memory. The lengths must be the same. See [`WriteRemote`] for completion, ordering and
    /// cancel safety.
    pub fn write_remote(&self, source: impl Source, remote: &RemoteBuf) -> WriteRemote {
        WriteRemote::new(self.operation(self.write_request(&source, remote)))
    }

    fn write_request(&self, source: &impl Source, remote: &RemoteBuf) -> Result<Request> {
        let range = remote.range(self.conn(), Access::WRITE)?;
        let lease = source.read_lease()?;
        same_length(lease.chunk().len(), range.len)?;
        let work = Work::Write { parts: Parts::One(range), notify: None };
        let between = (lease.chunk().kind(), remote.mem());
        Ok(Request::Work { held: Held::Read(lease), work, between })
    }

    /// Writes many pieces with one completion, and with [`notify`](WriteRemote::notify) one notification, after the last byte of the last
    /// piece. Each source must have the length of its target. See [`WriteRemote`].
    pub fn write_remote_vectored<S: Source>(&self, pieces: impl IntoIterator<Item = (S, RemoteBuf)>) -> WriteRemote {
        let request = || {
            let pieces = pieces.into_iter();
            let mut leases = Vec::with_capacity(pieces.size_hint().0);
            let mut ranges = Vec::with_capacity(pieces.size_hint().0);
            // The receipt names the worst path that a piece takes.
            let (mut worst, mut between) = (None, (MemKind::Host, MemKind::Host));
            for (source, remote) in pieces {
                let range = remote.range(self.conn(), Access::WRITE)?;
                let lease = source.read_lease()?;
                same_length(lease.chunk().len(), range.len)?;
                let pair = (lease.chunk().kind(), remote.mem());
                let kind = Some(self.conn().allowed(pair.0, pair.1)?);
                if kind > worst {
                    (worst, between) = (kind, pair);
                }
                leases.push(lease);
                ranges.push(range);
            }
            if ranges.is_empty() {
                return Err(Error::invalid("a vectored write needs at least one piece"));
            }
            if ranges.iter().try_fold(0u64, |sum, range| sum.checked_add(range.len)).is_none() {
                return Err(Error::invalid("the pieces are longer than 2^64 bytes together"));
            }
            let work = Work::Write { parts: Parts::Many(ranges.into()), notify: None };
            Ok(Request::Work { held: Held::Many(leases.into()), work, between })
        };
        WriteRemote::new(self.operation(request()))
    }

    /// Reads all of `remote` into `dest`. The lengths must be the same. See [`ReadRemote`] for ordering and cancel safety.
    pub fn read_remote(&self, dest: impl Dest, remote: &RemoteBuf) -> ReadRemote {
        let request = || {
            let range = remote.range(self.conn(), Access::READ)?;
            let lease = dest.write_lease()?;
            same_length(lease.chunk().len(), range.len)?;
            let work = Work::Read { remote: range };
            let between = (lease.chunk().kind(), remote.mem());
            Ok(Request::Work { held: Held::Write(lease), work, between })
        };
        ReadRemote::new(self.operation(request()))
    }

    /// Adds `value`, wrapping, to eight bytes of the peer's memory, little-endian, and answers what they held before. Atomic with regard
    /// to every other operation on them through any endpoint of that process, and to its CPU atomics.
    pub fn fetch_add(&self, word: &RemoteWord, value: u64) -> FetchAdd {
        FetchAdd::new(self.operation(self.atomic(word, false, value, 0)))
    }

    /// Replaces eight bytes of the peer's memory by `new` if they hold `expected`, and answers what they held before; the exchange was made
    /// if that is `expected`. Atomic as [`fetch_add`](Self::fetch_add).
    pub fn compare_swap(&self, word: &RemoteWord, expected: u64, new: u64) -> CompareSwap {
        CompareSwap::new(self.operation(self.atomic(word, true, new, expected)))
    }

    fn atomic(&self, word: &RemoteWord, swap: bool, operand: u64, compare: u64) -> Result<Request> {
        let remote = word.buf.range(self.conn(), Access::ATOMIC)?;
        let work = Work::Atomic { remote, swap, operand, compare };
        // Only the operand travels, and the former value.
        Ok(Request::Work { held: Held::None, work, between: (word.buf.mem(), word.buf.mem()) })
    }

    /// Waits for `n` notifications with this tag from the peer's writes, and takes them.
    pub fn notified(&self, tag: u64, n: u64) -> Notified {
        Notified::new(self.operation(Ok(Request::Note { tag, n })))
    }

    /// Waits until everything that was issued before has reached the peer's endpoint: messages can be received there, and writes are
    /// visible.
    pub fn flush(&self) -> Flush {
        Flush::new(self.operation(Ok(Request::Flush)))
    }

    /// Closes the endpoint. What was issued is completed first, for at most the [linger time](crate::ContextBuilder::linger); receives that
    /// wait end with [`Error::Closed`] at once, on both sides.
    pub fn close(&self) -> Close {
        Close { closed: self.closed(), begun: false }
    }

    /// Waits for the end of the endpoint, and answers why it ended.
    pub fn closed(&self) -> Closed {
        Closed { handle: Arc::clone(&self.handle), place: None }
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let state = self.conn().lock();
        let (messages_received, unreceived, waiting) = state.proto.message_counts();
        let counters = state.counters;
        Stats {
            bytes_sent: counters.bytes_sent,
            bytes_received: counters.bytes_received,
            staged_bytes: counters.staged,
            messages_sent: counters.messages_sent,
            messages_received,
            writes: counters.writes,
            reads: counters.reads,
            atomics: counters.atomics,
            in_flight: state.ops.len() as u64,
            unreceived: unreceived as u64,
            waiting_for_credit: waiting as u64,
            exposures: state.exposures() as u64,
        }
    }

    /// The path between a local and a remote memory, and why no better one is taken.
    ///
    /// # Errors
    ///
    /// [`Error::NoPath`] if the policy leaves none.
    pub fn path(&self, local: &impl Memory, remote: &RemoteBuf) -> Result<PathReport> {
        let info = &self.conn().info;
        path::choose(&info.facts, &info.policy, local.memory_kind(), remote.mem())
    }

    /// The path between host memory on both sides.
    ///
    /// # Errors
    ///
    /// [`Error::NoPath`] if the policy leaves none.
    pub fn path_report(&self) -> Result<PathReport> {
        let info = &self.conn().info;
        path::choose(&info.facts, &info.policy, MemKind::Host, MemKind::Host)
    }

    /// The paths that the endpoint takes, as a [`Stream`](futures_core::Stream), from the first on.
    pub fn path_events(&self) -> PathEvents {
        PathEvents::new(&self.handle)
    }

    /// The peer's side of the bootstrap connection.
    #[must_use]
    pub fn peer_addr(&self) -> SocketAddr {
        self.conn().info.peer
    }

    /// This side of the bootstrap connection.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.conn().info.local
    }

    /// Round trip of the handshake, the peer's wake-up from sleep included. Zero on the side that accepted.
    #[must_use]
    pub fn rtt(&self) -> Duration {
        self.conn().info.facts.rtt.unwrap_or_default()
    }
}

fn send_request(lease: ReadLease) -> Request {
    let len = lease.chunk().len();
    Request::Send { held: Held::Read(lease), len, tag: 0 }
}

fn same_length(local: u64, remote: u64) -> Result<()> {
    if local == remote {
        return Ok(());
    }
    Err(Error::invalid(format!("the local range has {local} bytes and the remote one {remote}; slice one of them")))
}
