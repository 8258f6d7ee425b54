//! Accepting connections.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::{Mutex, Semaphore, mpsc};
use tokio::task::JoinHandle;

use super::GpuEndpoint;
use super::handshake::{Arrival, Joining, Local, accept};
use crate::error::{Error, Result};
use crate::wire::handshake::Hello;

/// Handshakes under way at a time. Strangers can fill them, but each for the handshake's time limit only.
const HANDSHAKES: usize = 256;
/// Endpoints that wait to be accepted.
const BACKLOG: usize = 128;
/// After an error of `accept(2)`, most often a lack of descriptors, the listener tries again after this long.
const RETRY: Duration = Duration::from_millis(50);

/// Accepts endpoints, like [`tokio::net::TcpListener`]. Made by [`Context::bind`](crate::Context::bind).
///
/// Handshakes run in the background, so a peer that is slow, silent or no gpusock at all keeps nobody else waiting.
#[derive(Debug)]
pub struct GpuListener {
    address: SocketAddr,
    ready: Mutex<mpsc::Receiver<GpuEndpoint>>,
    task: JoinHandle<()>,
}

impl GpuListener {
    pub(crate) fn start(listener: TcpListener, local: Local) -> Result<Self> {
        let address = listener.local_addr().map_err(|e| Error::io("asking a listener for its address", e))?;
        let (sender, ready) = mpsc::channel(BACKLOG);
        let refuse_offers = |hello: &Hello| {
            if hello.nonce == 0 { Ok(()) } else { Err("an offer is answered at the address that it names".to_owned()) }
        };
        let task = tokio::spawn(serve(listener, local, refuse_offers, move |endpoint, _| {
            let sender = sender.clone();
            async move {
                // Without a listener any more, the endpoint closes.
                let _ = sender.send(endpoint).await;
            }
        }));
        Ok(GpuListener { address, ready: Mutex::new(ready), task })
    }

    /// The address that it listens on, with the port that the system chose if 0 was asked for.
    ///
    /// # Errors
    ///
    /// None at present.
    pub fn local_addr(&self) -> Result<SocketAddr> {
        Ok(self.address)
    }

    /// Waits for the next endpoint. May be called from several tasks.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`] if the runtime that ran the listener has ended. A peer whose handshake fails is no error here; it is logged.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: no endpoint is lost.
    pub async fn accept(&self) -> Result<GpuEndpoint> {
        self.ready.lock().await.recv().await.ok_or(Error::Closed)
    }
}

impl Drop for GpuListener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Accepts until the task is dropped.
pub(crate) async fn serve<F>(
    listener: TcpListener,
    local: Local,
    judge: impl Fn(&Hello) -> Result<(), String> + Clone + Send + Sync + 'static,
    deliver: impl Fn(GpuEndpoint, Hello) -> F + Clone + Send + Sync + 'static,
) where
    F: Future<Output = ()> + Send,
{
    let places = Arc::new(Semaphore::new(HANDSHAKES));
    let joining = Joining::default();
    // Dropped with this task, and with it every handshake under way.
    let mut handshakes = tokio::task::JoinSet::new();
    loop {
        while handshakes.try_join_next().is_some() {}
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(RETRY).await;
                continue;
            }
        };
        let (local, joining, judge, deliver) = (local.clone(), Arc::clone(&joining), judge.clone(), deliver.clone());
        handshakes.spawn(async move {
            let limit = local.config.handshake_timeout;
            let result = tokio::time::timeout(limit, accept(&local, stream, peer, &joining, judge)).await;
            match result {
                Ok(Ok(Arrival::Endpoint(endpoint, hello))) => deliver(endpoint, hello).await,
                Ok(Ok(Arrival::Lane)) => {}
                Ok(Err(error)) => tracing::warn!(%peer, %error, "a handshake failed"),
                Err(_) => tracing::warn!(%peer, ?limit, "a peer did not complete the handshake in time"),
            }
            // Kept until the endpoint has a place in the queue: who does not accept is not flooded with endpoints.
            drop(place);
        });
    }
}
