//! Endpoints by a signalling channel of the user's: both sides make an offer, carry it over, and answer the other's.

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use tokio::net::TcpListener;
use tokio::sync::{Notify, OnceCell};

use super::GpuEndpoint;
use super::handshake::{self, Local, host_id, random_u64};
use super::listener::serve;
use crate::error::{Error, Result};
use crate::reactor::lock;
use crate::wire::offer::Offer;

/// The offers of a context and the endpoints that came of them.
#[derive(Default)]
pub(crate) struct Offers {
    listening: OnceCell<Listening>,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    /// Offers that have not been answered.
    open: Mutex<HashSet<u64>>,
    /// Endpoints that peers made, by the peer's context.
    ready: Mutex<HashMap<[u8; 16], VecDeque<GpuEndpoint>>>,
    changed: Notify,
}

struct Listening {
    addresses: Vec<SocketAddr>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Offers of one context that wait for an answer at a time.
const OPEN_MAX: usize = 4096;

impl Offers {
    pub(crate) async fn offer(&self, local: &Local) -> Result<Bytes> {
        let listening = self.listening.get_or_try_init(|| self.listen(local)).await?;
        let nonce = random_u64()?;
        {
            let mut open = lock(&self.shared.open);
            if open.len() >= OPEN_MAX {
                return Err(Error::Busy { what: "4096 offers of this context wait for an answer" });
            }
            open.insert(nonce);
        }
        let offer = Offer { context: local.context, host: host_id(), nonce, addresses: listening.addresses.clone() };
        Ok(offer.encode().into())
    }

    async fn listen(&self, local: &Local) -> Result<Listening> {
        let any6 = SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0));
        let any4 = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        let listener = match TcpListener::bind(any6).await {
            Ok(listener) => listener,
            Err(_) => TcpListener::bind(any4).await.map_err(|e| Error::io("binding a socket for offers", e))?,
        };
        let bound = listener.local_addr().map_err(|e| Error::io("asking a listener for its address", e))?;
        let addresses = own_addresses(bound.is_ipv6()).into_iter().map(|ip| SocketAddr::new(ip, bound.port())).collect();
        let (judging, delivering) = (Arc::clone(&self.shared), Arc::clone(&self.shared));
        let task = tokio::spawn(serve(
            listener,
            local.clone(),
            move |hello| match lock(&judging.open).remove(&hello.nonce) {
                true => Ok(()),
                false => Err("the offer is unknown, or was answered before".to_owned()),
            },
            move |endpoint, hello| {
                lock(&delivering.ready).entry(hello.context).or_default().push_back(endpoint);
                delivering.changed.notify_waiters();
                std::future::ready(())
            },
        ));
        Ok(Listening { addresses, task })
    }

    /// Both sides call this; the one whose context has the lower number dials.
    pub(crate) async fn connect(&self, local: &Local, peer: &[u8]) -> Result<GpuEndpoint> {
        let offer =
            Offer::decode(peer).map_err(|why| Error::invalid(format!("these {} bytes are no offer: {why}", peer.len())))?;
        if offer.context == local.context {
            return Err(Error::invalid("the offer is of this very context; give it to the peer, and the peer's to this side"));
        }
        if local.context < offer.context { self.dial(local, &offer).await } else { self.wait(local, &offer).await }
    }

    async fn dial(&self, local: &Local, offer: &Offer) -> Result<GpuEndpoint> {
        let mut addresses = offer.addresses.clone();
        // On the same host the loopback is sure to work, and elsewhere it is sure not to.
        let near = offer.host == host_id();
        addresses.retain(|address| near || !address.ip().is_loopback());
        addresses.sort_by_key(|address| near != address.ip().is_loopback());
        let mut last = Error::invalid("the offer names no address that can be reached from here");
        for address in addresses {
            let limit = local.config.connect_timeout;
            match tokio::time::timeout(limit, handshake::connect(local, address, offer.nonce)).await {
                Ok(Ok(endpoint)) => return Ok(endpoint),
                Ok(Err(error)) => last = error,
                Err(_) => last = Error::handshake(address, format!("no connection within {limit:?}")),
            }
        }
        Err(last)
    }

    async fn wait(&self, local: &Local, offer: &Offer) -> Result<GpuEndpoint> {
        let limit = local.config.connect_timeout;
        let come = async {
            loop {
                // Registered before the look, so that what comes in between wakes it.
                let changed = self.shared.changed.notified();
                tokio::pin!(changed);
                changed.as_mut().enable();
                let endpoint = {
                    let mut ready = lock(&self.shared.ready);
                    let endpoint = ready.get_mut(&offer.context).and_then(VecDeque::pop_front);
                    ready.retain(|_, endpoints| !endpoints.is_empty());
                    endpoint
                };
                if let Some(endpoint) = endpoint {
                    return endpoint;
                }
                changed.await;
            }
        };
        tokio::time::timeout(limit, come).await.map_err(|_| {
            let peer = offer.addresses.first().map_or_else(|| "the peer".to_owned(), ToString::to_string);
            Error::handshake(
                peer,
                format!("it did not answer this side's offer within {limit:?}; both sides must call connect_offer"),
            )
        })
    }
}

/// The addresses of this host that a peer may reach: those from which the system would talk to the outside, and the loopback.
fn own_addresses(v6: bool) -> Vec<IpAddr> {
    // Connecting a datagram socket sends nothing; it only makes the system choose a source address. The targets are addresses for
    // documentation (RFC 5737, RFC 3849).
    let source = |bind: SocketAddr, target: SocketAddr| {
        let socket = UdpSocket::bind(bind).ok()?;
        socket.connect(target).ok()?;
        Some(socket.local_addr().ok()?.ip())
    };
    let mut addresses = vec![IpAddr::from(Ipv4Addr::LOCALHOST)];
    addresses.extend(source((Ipv4Addr::UNSPECIFIED, 0).into(), (Ipv4Addr::new(192, 0, 2, 1), 9).into()));
    if v6 {
        let target = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
        addresses.extend(source((Ipv6Addr::UNSPECIFIED, 0).into(), (target, 9).into()));
    }
    addresses.dedup();
    addresses
}
