//! The handshake: who the two sides are, what they agree on, and which links their connection gets.

use std::collections::HashMap;
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::oneshot;

use super::GpuEndpoint;
use super::conn::{Conn, Info};
use super::lane::Links;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::memory::MemKind;
use crate::memory::cuda::staging::Staging;
use crate::path::{self, Facts, Link, PathKind};
use crate::proto::{Connection, Limits, MESSAGE_COST};
use crate::reactor::{Reactor, lock};
use crate::transport::inproc::{self, InprocEnd};
use crate::transport::shm::{self, ShmEnd};
use crate::transport::tcp::socket;
use crate::wire::WireError;
use crate::wire::frame::{PAYLOAD_MAX, SEGMENT_MAX};
use crate::wire::handshake::{HEADER, Header, Hello, VERSION_MAX, VERSION_MIN};

/// The side that connects allows a direct copy within the process.
const ALLOWS_INPROC: u64 = 1;
/// The side that accepts has chosen it.
const USES_INPROC: u64 = 2;
/// The same two for shared memory between processes of one host.
const ALLOWS_SHM: u64 = 4;
const USES_SHM: u64 = 8;
/// More sockets for one connection than this help nobody.
pub(crate) const LANES_MAX: u16 = 16;

/// What both sides of a handshake need.
#[derive(Clone)]
pub(crate) struct Local {
    pub config: Arc<Config>,
    pub reactor: Arc<Reactor>,
    pub context: [u8; 16],
    pub staging: Arc<Staging>,
}

/// Random numbers from the system.
pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|e| Error::io("asking the system for random bytes", std::io::Error::other(e)))?;
    Ok(bytes)
}

pub(crate) fn random_u64() -> Result<u64> {
    // Zero stands for "none" on the wire.
    random().map(|bytes| u64::from_le_bytes(bytes).max(1))
}

/// Random, but the same throughout a process, and another one after a fork.
fn process_id() -> Result<[u8; 16]> {
    static ID: OnceLock<[u8; 16]> = OnceLock::new();
    let mut id = match ID.get() {
        Some(id) => *id,
        None => {
            let id = random()?;
            *ID.get_or_init(|| id)
        }
    };
    for (byte, pid) in id.iter_mut().zip(std::process::id().to_le_bytes()) {
        *byte ^= pid;
    }
    Ok(id)
}

/// The running kernel; zero where it does not say.
pub(crate) fn host_id() -> [u8; 16] {
    static ID: OnceLock<[u8; 16]> = OnceLock::new();
    *ID.get_or_init(|| {
        let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let digits: Vec<u8> = text.bytes().filter_map(|b| (b as char).to_digit(16)).map(|d| d as u8).collect();
        let mut id = [0; 16];
        for (byte, pair) in id.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = pair[0] << 4 | pair[1];
        }
        id
    })
}

/// Ends of connections within this process that wait for their other side, by session. Dropping what is beside an end tells that it was
/// taken.
type Offers = HashMap<u64, (InprocEnd, oneshot::Sender<()>)>;
static INPROC: Mutex<Option<Offers>> = Mutex::new(None);

/// Takes the end back if nobody came for it.
struct Offered(u64);

impl Drop for Offered {
    fn drop(&mut self) {
        lock(&INPROC).as_mut().and_then(|ends| ends.remove(&self.0));
    }
}

impl Local {
    pub(crate) fn hello(&self) -> Result<Hello> {
        let config = &self.config;
        let millis = |time: Duration| u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
        Ok(Hello {
            context: self.context,
            process: process_id()?,
            host: host_id(),
            lanes: config.lanes.into(),
            eager_max: config.eager_max,
            segment: config.segment,
            credit: config.credit,
            heartbeat_ms: millis(config.heartbeat),
            liveness_ms: millis(config.liveness),
            capabilities: if path::wants_inproc(&config.policy) { ALLOWS_INPROC } else { 0 }
                | if path::wants_shm(&config.policy) { ALLOWS_SHM } else { 0 },
            ..Hello::default()
        })
    }

    fn limits(&self, peer: &Hello) -> Result<Limits, &'static str> {
        let config = &self.config;
        let eager_max = config.eager_max.min(peer.eager_max);
        let segment = config.segment.min(peer.segment);
        if !(4096..=SEGMENT_MAX).contains(&segment) || eager_max > SEGMENT_MAX {
            return Err("the frame lengths that it wants are out of range");
        }
        if peer.credit / 2 < u64::from(eager_max) + MESSAGE_COST || peer.credit > 1 << 40 {
            return Err("the credit that it grants is out of range");
        }
        let heartbeat = config.heartbeat.min(Duration::from_millis(peer.heartbeat_ms.max(10).into()));
        Ok(Limits {
            eager_max,
            segment,
            // Within a process, what a device copies comes in one piece; see `start`.
            frame_max: segment.max(eager_max),
            credit_out: peer.credit,
            credit_in: config.credit,
            heartbeat,
            liveness: config.liveness,
        })
    }

    fn facts(&self, peer: SocketAddr, hello: &Hello, rtt: Option<Duration>, tcp: String) -> Result<Facts> {
        Ok(Facts {
            peer: peer.to_string(),
            same_process: hello.process == process_id()?,
            same_host: hello.host == host_id() && hello.host != [0; 16],
            peer_allows_inproc: hello.capabilities & ALLOWS_INPROC != 0,
            peer_allows_shm: hello.capabilities & ALLOWS_SHM != 0,
            shm: None,
            rtt,
            tcp,
            link: None,
        })
    }
}

async fn write_hello(stream: &mut tokio::net::TcpStream, hello: &Hello) -> std::io::Result<()> {
    stream.write_all(&hello.encode()).await
}

/// Why a hello could not be read.
enum Trouble {
    Io(std::io::Error),
    Wire(WireError),
}

impl Trouble {
    fn of_peer(self, peer: SocketAddr) -> Error {
        let reason = match self {
            Trouble::Io(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => {
                "it closed the connection before it had answered; is it a gpusock listener?".to_owned()
            }
            Trouble::Io(e) => format!("the connection failed: {e}"),
            Trouble::Wire(WireError::Magic) => "its answer is not that of a gpusock listener; is the address right?".to_owned(),
            Trouble::Wire(WireError::Version { got, .. }) => format!(
                "it speaks protocol version {got}, and this side {VERSION_MIN} to {VERSION_MAX}; use the same version of gpusock on both"
            ),
            Trouble::Wire(e) => format!("its handshake is malformed: {e}"),
        };
        Error::handshake(peer, reason)
    }
}

async fn read_hello(stream: &mut tokio::net::TcpStream) -> Result<Hello, Trouble> {
    let mut header = [0; HEADER];
    // The first bytes tell strangers apart at once, so that little of what they send is ever read.
    stream.read_exact(&mut header[..8]).await.map_err(Trouble::Io)?;
    if header[..8] != crate::wire::handshake::MAGIC {
        return Err(Trouble::Wire(WireError::Magic));
    }
    stream.read_exact(&mut header[8..]).await.map_err(Trouble::Io)?;
    let header = Header::parse(&header).map_err(Trouble::Wire)?;
    header.common_version().map_err(Trouble::Wire)?;
    let mut body = vec![0; header.body];
    stream.read_exact(&mut body).await.map_err(Trouble::Io)?;
    Hello::decode(&body).map_err(Trouble::Wire)
}

async fn dial(address: SocketAddr, hello: &Hello) -> Result<(tokio::net::TcpStream, Hello, Duration)> {
    let mut stream =
        tokio::net::TcpStream::connect(address).await.map_err(|e| Error::io(format!("connecting to {address}"), e))?;
    let _ = stream.set_nodelay(true);
    let begun = Instant::now();
    write_hello(&mut stream, hello).await.map_err(|e| Trouble::Io(e).of_peer(address))?;
    let answer = read_hello(&mut stream).await.map_err(|trouble| trouble.of_peer(address))?;
    if let Some(reason) = answer.refused {
        return Err(Error::handshake(address, format!("it refused the connection: {reason}")));
    }
    Ok((stream, answer, begun.elapsed()))
}

/// The side that connects.
pub(crate) async fn connect(local: &Local, address: SocketAddr, nonce: u64) -> Result<GpuEndpoint> {
    let limit = local.config.handshake_timeout;
    match tokio::time::timeout(limit, connect_inner(local, address, nonce)).await {
        Ok(result) => result,
        Err(_) => Err(Error::handshake(address, format!("it did not answer within {limit:?}"))),
    }
}

async fn connect_inner(local: &Local, address: SocketAddr, nonce: u64) -> Result<GpuEndpoint> {
    let hello = Hello { nonce, ..local.hello()? };
    let (mut stream, answer, rtt) = dial(address, &hello).await?;
    let mut shared = None;
    if answer.capabilities & USES_SHM != 0 {
        let met = shm::meet(&answer.meeting, local.config.shm_between_users).await;
        // The other side waits for this, and goes the way that it says.
        let outcome = match &met {
            Ok(_) => Hello { session: answer.session, capabilities: USES_SHM, ..Hello::default() },
            Err(why) => Hello::refusal(why),
        };
        write_hello(&mut stream, &outcome).await.map_err(|e| Trouble::Io(e).of_peer(address))?;
        shared = Some(met);
    }
    let limits = local.limits(&answer).map_err(|reason| Error::handshake(address, reason))?;
    let mut streams = vec![stream];
    let lanes = if matches!(shared, Some(Ok(_))) { 1 } else { answer.lanes.min(hello.lanes) };
    for lane in 1..lanes {
        let join = Hello { session: answer.session, lane, nonce: answer.nonce, ..hello.clone() };
        streams.push(dial(address, &join).await?.0);
    }
    let inproc = if answer.capabilities & USES_INPROC != 0 {
        let end = lock(&INPROC).as_mut().and_then(|ends| ends.remove(&answer.session));
        Some(
            end.map(|(end, _taken)| end)
                .ok_or_else(|| Error::handshake(address, "it says that it is this process, and is not"))?,
        )
    } else {
        None
    };
    start(local, streams, &answer, answer.session, limits, Some(rtt), Inside { inproc, shared })
}

/// Connections that wait for further lanes, by session.
pub(crate) type Joining = Arc<Mutex<HashMap<u64, (u64, tokio::sync::mpsc::Sender<(u16, tokio::net::TcpStream)>)>>>;

/// What a connection that came in turned out to be.
pub(crate) enum Arrival {
    Endpoint(GpuEndpoint, Hello),
    /// A further lane; handed to the connection that waits for it.
    Lane,
}

/// The side that accepts. `judge` may refuse the peer.
pub(crate) async fn accept(
    local: &Local,
    mut stream: tokio::net::TcpStream,
    peer: SocketAddr,
    joining: &Joining,
    judge: impl Fn(&Hello) -> Result<(), String>,
) -> Result<Arrival> {
    let _ = stream.set_nodelay(true);
    let hello = match read_hello(&mut stream).await {
        Ok(hello) => hello,
        Err(trouble) => {
            // A gpusock of another version is told so; a stranger gets nothing.
            if let Trouble::Wire(WireError::Version { .. }) = trouble {
                let _ = write_hello(&mut stream, &Hello::refusal("no common protocol version")).await;
            }
            return Err(trouble.of_peer(peer));
        }
    };
    if hello.session != 0 {
        return join(stream, hello, peer, joining).await;
    }
    let refuse = |reason: String| Error::handshake(peer, format!("refused: {reason}"));
    let judged = judge(&hello).and_then(|()| local.limits(&hello).map_err(str::to_owned));
    let limits = match judged {
        Ok(limits) => limits,
        Err(reason) => {
            let _ = write_hello(&mut stream, &Hello::refusal(&reason)).await;
            return Err(refuse(reason));
        }
    };
    let session = random_u64()?;
    let secret = random_u64()?;
    let facts = local.facts(peer, &hello, None, String::from("-"))?;
    let link = match path::link(&facts, &local.config.policy) {
        Ok(link) => link,
        Err(error) => {
            let reason = error.to_string();
            let _ = write_hello(&mut stream, &Hello::refusal(&reason)).await;
            return Err(refuse(reason));
        }
    };
    let inproc = (link == Link::Inproc).then(inproc::pair);
    let mut shared = None;
    let mut meeting = None;
    let mut token = [0; 32];
    if link == Link::Shm {
        token = random()?;
        match shm::Meeting::new(token, local.config.shm_between_users) {
            Ok(made) => meeting = Some(made),
            Err(why) => {
                shared = Some(Err(why));
                token = [0; 32];
            }
        }
    }
    let lanes = if inproc.is_some() { 1 } else { hello.lanes.clamp(1, LANES_MAX.min(local.config.lanes.max(1).into())) };
    let (sender, mut joined) = tokio::sync::mpsc::channel(usize::from(LANES_MAX));
    if lanes > 1 {
        lock(joining).insert(session, (secret, sender));
    }
    let _leave = Leave { joining, session };
    let (tell, taken) = oneshot::channel();
    let (own, _offered) = match inproc {
        Some((own, other)) => {
            lock(&INPROC).get_or_insert_default().insert(session, (other, tell));
            (Some(own), Some(Offered(session)))
        }
        None => (None, None),
    };
    let mut answer = Hello { session, lanes, nonce: secret, ..local.hello()? };
    if own.is_some() {
        answer.capabilities |= USES_INPROC;
    }
    if meeting.is_some() {
        answer.capabilities |= USES_SHM;
        answer.meeting = token;
    }
    write_hello(&mut stream, &answer).await.map_err(|e| Trouble::Io(e).of_peer(peer))?;
    if let Some(meeting) = meeting {
        shared = Some(attend(meeting, &mut stream).await.map_err(|trouble| trouble.of_peer(peer))?);
    }
    let lanes = if matches!(shared, Some(Ok(_))) { 1 } else { lanes };
    let mut streams = vec![(0, stream)];
    while streams.len() < usize::from(lanes) {
        match joined.recv().await {
            Some((lane, stream)) if !streams.iter().any(|(l, _)| *l == lane) => streams.push((lane, stream)),
            Some(_) => return Err(Error::handshake(peer, "it opened one lane twice")),
            None => return Err(Error::handshake(peer, "its lanes did not come")),
        }
    }
    streams.sort_by_key(|(lane, _)| *lane);
    let streams = streams.into_iter().map(|(_, stream)| stream).collect();
    if own.is_some() {
        // The peer takes its end when it has our answer; until then the offer must stand.
        let _ = taken.await;
    }
    let endpoint = start(local, streams, &hello, session, limits, None, Inside { inproc: own, shared })?;
    Ok(Arrival::Endpoint(endpoint, hello))
}

/// Waits until the peer has come for its shared memory, or says why not.
async fn attend(meeting: shm::Meeting, stream: &mut tokio::net::TcpStream) -> Result<Result<ShmEnd, String>, Trouble> {
    let mut coming = std::pin::pin!(meeting.wait());
    let mut came = None;
    let outcome = {
        let mut outcome = std::pin::pin!(read_hello(stream));
        loop {
            tokio::select! {
                biased;
                end = &mut coming, if came.is_none() => came = Some(end),
                outcome = &mut outcome => break outcome?,
            }
        }
    };
    // This side's own reason says more than that it refused.
    match (&came, outcome.refused) {
        (Some(Err(why)), _) => return Ok(Err(why.clone())),
        (_, Some(why)) => return Ok(Err(why)),
        _ => {}
    }
    // It has what was sent to it, so this does not wait; unless it lies, and then the handshake's time runs out.
    match came {
        Some(Ok(end)) => Ok(Ok(end.explore())),
        Some(Err(why)) => Err(Trouble::Io(std::io::Error::other(why))),
        None => coming.await.map(|end| Ok(end.explore())).map_err(|why| Trouble::Io(std::io::Error::other(why))),
    }
}

/// What carries the frames where TCP does not.
#[derive(Default)]
struct Inside {
    inproc: Option<InprocEnd>,
    /// Shared memory, or why there is none, where it was tried.
    shared: Option<Result<ShmEnd, String>>,
}

struct Leave<'a> {
    joining: &'a Joining,
    session: u64,
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        lock(self.joining).remove(&self.session);
    }
}

async fn join(mut stream: tokio::net::TcpStream, hello: Hello, peer: SocketAddr, joining: &Joining) -> Result<Arrival> {
    let waiting = {
        let joining = lock(joining);
        joining.get(&hello.session).filter(|(secret, _)| *secret == hello.nonce).map(|(_, sender)| sender.clone())
    };
    let Some(sender) = waiting.filter(|_| (1..LANES_MAX).contains(&hello.lane)) else {
        let _ = write_hello(&mut stream, &Hello::refusal("no connection waits for this lane")).await;
        return Err(Error::handshake(peer, "a lane for no connection"));
    };
    let answer = Hello { session: hello.session, lane: hello.lane, ..Hello::default() };
    write_hello(&mut stream, &answer).await.map_err(|e| Trouble::Io(e).of_peer(peer))?;
    let _ = sender.send((hello.lane, stream)).await;
    Ok(Arrival::Lane)
}

/// Both sides have agreed: the connection begins.
fn start(
    local: &Local,
    streams: Vec<tokio::net::TcpStream>,
    hello: &Hello,
    session: u64,
    mut limits: Limits,
    rtt: Option<Duration>,
    inside: Inside,
) -> Result<GpuEndpoint> {
    let Inside { inproc, shared } = inside;
    let acceptor = rtt.is_none();
    let first = streams.first().ok_or(Error::Closed)?;
    let address = |which: std::io::Result<SocketAddr>| which.map_err(|e| Error::io("asking a socket for its address", e));
    let (peer, own) = (address(first.peer_addr())?, address(first.local_addr())?);
    let mut facts = local.facts(peer, hello, rtt, String::new())?;
    let mut zero_copy = local.config.zero_copy;
    let mut sockets: Vec<TcpStream> = Vec::with_capacity(streams.len());
    for stream in streams {
        let socket = stream.into_std().map_err(|e| Error::io("taking a socket from tokio", e))?;
        let tuning = socket::tune(&socket, local.config.tcp_congestion.as_deref(), facts.same_host)?;
        // Pacing makes many small packets of pages; there a copy is faster.
        zero_copy &= tuning.congestion != socket::PACED;
        facts.tcp = tuning.to_string();
        sockets.push(socket);
    }
    let lanes = sockets.len();
    facts.tcp += if zero_copy { ", long payloads without a copy at the sender" } else { "" };
    facts.tcp = format!("{lanes} lane{}, congestion control {}", if lanes == 1 { "" } else { "s" }, facts.tcp);
    facts.peer_allows_inproc &= inproc.is_some() || !facts.same_process;
    let shared = match shared {
        Some(Ok(end)) => {
            facts.shm = Some(Ok(end.describe()));
            Some(end)
        }
        Some(Err(why)) => {
            facts.shm = Some(Err(why));
            None
        }
        None => None,
    };
    let link = match (&inproc, &shared) {
        (Some(_), _) => Link::Inproc,
        (None, Some(_)) => Link::Shm,
        (None, None) => Link::Tcp,
    };
    if link == Link::Tcp {
        // A path that only this side refuses.
        path::link(&Facts { peer_allows_inproc: false, peer_allows_shm: false, ..facts.clone() }, &local.config.policy)?;
    } else if link == Link::Inproc {
        limits.frame_max = PAYLOAD_MAX;
    }
    facts.link = Some(link);
    let (kind, reason, rejected) = of_host(&facts, local, link);
    tracing::info!(%peer, path = %kind, %reason, %rejected, "path chosen");
    let last = sockets.pop().ok_or(Error::Closed)?;
    let links = match (inproc, shared) {
        (Some(end), _) => Links::Inproc { end, life: last },
        (None, Some(end)) => Links::Shm { end, life: last },
        (None, None) => {
            sockets.push(last);
            Links::Tcp { sockets, zero_copy }
        }
    };
    let info = Info {
        peer,
        local: own,
        session,
        acceptor,
        facts,
        policy: local.config.policy,
        link,
        kind,
        reason,
        linger: local.config.linger,
    };
    let proto = Connection::new(limits, Instant::now());
    Ok(GpuEndpoint::new(Conn::start(info, proto, links, &local.reactor, &local.staging)?))
}

/// The path that host memory takes, why, and why not another. Where a policy leaves host memory none, as it may, that of a GPU's.
fn of_host(facts: &Facts, local: &Local, link: Link) -> (PathKind, String, String) {
    let policy = &local.config.policy;
    match path::choose(facts, policy, MemKind::Host, MemKind::Host) {
        Ok(report) => {
            let chosen = report.candidates().iter().find(|c| Some(c.kind) == report.chosen());
            let kind = chosen.map_or(PathKind::Tcp, |c| c.kind);
            (kind, chosen.map(|c| c.reason.to_string()).unwrap_or_default(), report.rejected())
        }
        Err(error) => {
            let kind = path::kind_of(link, MemKind::Cuda(0), if link == Link::Inproc { MemKind::Cuda(1) } else { MemKind::Host });
            (kind, "only memory of GPUs may be used, by the path policy".to_owned(), error.to_string())
        }
    }
}
