//! Streams and sinks of messages.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context as Task, Poll, ready};

use bytes::Bytes;
use futures_core::Stream;
use futures_sink::Sink;
use pin_project::pin_project;

use super::GpuEndpoint;
use super::futures::{Incoming, RecvBytes, Send};
use super::message::Message;
use crate::error::{Error, Result};

macro_rules! stream {
    ($(#[$doc:meta])* $name:ident: $future:ident = $make:ident -> $item:ty, |$value:ident| $map:expr) => {
        $(#[$doc])*
        #[pin_project]
        #[derive(Debug)]
        pub struct $name {
            endpoint: GpuEndpoint,
            next: Option<$future>,
            over: bool,
        }

        impl $name {
            pub(crate) fn new(endpoint: &GpuEndpoint) -> Self {
                $name { endpoint: endpoint.clone(), next: None, over: false }
            }
        }

        impl Stream for $name {
            type Item = Result<$item>;

            fn poll_next(self: Pin<&mut Self>, cx: &mut Task<'_>) -> Poll<Option<Self::Item>> {
                let this = self.project();
                if *this.over {
                    return Poll::Ready(None);
                }
                let next = this.next.get_or_insert_with(|| this.endpoint.$make());
                let result = ready!(Pin::new(next).poll(cx));
                *this.next = None;
                Poll::Ready(match result {
                    Ok($value) => Some(Ok($map)),
                    Err(Error::Closed) => {
                        *this.over = true;
                        None
                    }
                    Err(error) => {
                        *this.over = !error.is_endpoint_usable();
                        Some(Err(error))
                    }
                })
            }
        }
    };
}

stream! {
    /// The messages of an endpoint. Ends when the endpoint is closed, and after [`Error::PeerLost`].
    ///
    /// Cancel safe: dropping it loses no message.
    Messages: Incoming = incoming -> Message, |message| message
}

stream! {
    /// The messages of an endpoint as [`Bytes`]. Ends when the endpoint is closed, and after [`Error::PeerLost`].
    ///
    /// Cancel safe: dropping it loses no message.
    BytesStream: RecvBytes = recv_bytes -> Bytes, |message| message.0
}

/// Sends each [`Bytes`] as a message. `poll_flush` waits until the sends have ended, `poll_close` closes the endpoint.
#[derive(Debug)]
pub struct BytesSink {
    endpoint: GpuEndpoint,
    sending: Option<Send>,
    closing: Option<Pin<Box<super::futures::Close>>>,
}

impl BytesSink {
    pub(crate) fn new(endpoint: &GpuEndpoint) -> Self {
        BytesSink { endpoint: endpoint.clone(), sending: None, closing: None }
    }
}

impl Sink<Bytes> for BytesSink {
    type Error = Error;

    fn poll_ready(mut self: Pin<&mut Self>, cx: &mut Task<'_>) -> Poll<Result<()>> {
        if let Some(sending) = &mut self.sending {
            let result = ready!(Pin::new(sending).poll(cx));
            self.sending = None;
            result?;
        }
        Poll::Ready(Ok(()))
    }

    fn start_send(mut self: Pin<&mut Self>, item: Bytes) -> Result<()> {
        if self.sending.is_some() {
            return Err(Error::Busy { what: "start_send was called without poll_ready" });
        }
        self.sending = Some(self.endpoint.send_bytes(item));
        Ok(())
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Task<'_>) -> Poll<Result<()>> {
        self.poll_ready(cx)
    }

    fn poll_close(mut self: Pin<&mut Self>, cx: &mut Task<'_>) -> Poll<Result<()>> {
        ready!(self.as_mut().poll_ready(cx))?;
        let endpoint = self.endpoint.clone();
        self.closing.get_or_insert_with(|| Box::pin(endpoint.close())).as_mut().poll(cx)
    }
}
