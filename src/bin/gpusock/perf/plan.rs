//! What client and server tell each other, as JSON in ordinary messages.

use gpusock::{Error, GpuEndpoint, MemKind, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Changes when the messages do.
pub(crate) const VERSION: u32 = 1;
/// Longest message that is read.
const LONGEST: u64 = 64 << 10;
/// Tag of control messages, apart from those that are measured.
pub(crate) const CONTROL: u64 = u64::MAX;

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Test {
    /// Messages to and fro; half the round trip.
    SendLat,
    /// Messages one way.
    SendBw,
    /// Writes with a notification to and fro; half the round trip.
    WriteLat,
    /// Writes one way.
    WriteBw,
    /// Reads, one after the other; the whole operation.
    ReadLat,
    /// Reads.
    ReadBw,
    /// Notifications without bytes, to and fro; half the round trip.
    NotifyLat,
}

impl Test {
    pub(crate) fn name(self) -> String {
        clap::ValueEnum::to_possible_value(&self).map_or_else(String::new, |value| value.get_name().to_owned())
    }

    pub(crate) fn reads(self) -> bool {
        matches!(self, Test::ReadLat | Test::ReadBw)
    }

    /// The client's side of the measurement takes turns with the server's.
    pub(crate) fn is_ping_pong(self) -> bool {
        matches!(self, Test::SendLat | Test::WriteLat | Test::NotifyLat)
    }
}

/// From the client.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub version: u32,
    pub test: Test,
    pub size: u64,
    pub iters: u64,
    pub warmup: u64,
    pub window: u64,
    pub verify: bool,
    /// The server's memory.
    pub memory: String,
    /// Descriptors of the client's exposed memory.
    pub remote: Option<Vec<Vec<u8>>>,
}

impl Plan {
    pub(crate) fn memory(&self) -> Result<MemKind> {
        self.memory.parse()
    }

    /// Buffers on each side for what comes in. As in other programs of this kind, all operations read the same source and, where the
    /// rules of borrowing allow it, fill the same target, so that the path is measured and not the cache.
    pub(crate) fn inboxes(&self) -> u64 {
        match self.test {
            Test::SendBw => self.window.min(2),
            Test::ReadBw => self.window,
            _ => 1,
        }
    }
}

/// From the server: ready, or why not.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Ready {
    Go { remote: Option<Vec<Vec<u8>>> },
    Refused(String),
}

/// From the server, at the end.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Outcome {
    pub cpu_s: f64,
    /// What is wrong with the bytes, if they were checked.
    pub wrong: Option<String>,
}

pub(crate) async fn tell(endpoint: &GpuEndpoint, message: &impl Serialize) -> Result<()> {
    let json = serde_json::to_vec(message).map_err(|e| Error::InvalidArgument { what: e.to_string().into() })?;
    endpoint.send_bytes(json).tag(CONTROL).await?;
    Ok(())
}

pub(crate) async fn hear<T: DeserializeOwned>(endpoint: &GpuEndpoint) -> Result<T> {
    let strange = |what: String| Error::Handshake { peer: endpoint.peer_addr().to_string(), reason: what.into() };
    let message = endpoint.incoming().await?;
    if message.len() > LONGEST || message.tag() != CONTROL {
        return Err(strange(
            "it does not speak the protocol of `gpusock perf`; is it a `gpusock perf serve` of this version?".into(),
        ));
    }
    let bytes = message.into_bytes().await?;
    serde_json::from_slice(&bytes).map_err(|e| strange(format!("its message cannot be read: {e}")))
}
