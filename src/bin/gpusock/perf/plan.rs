//! What client and server tell each other, as JSON in ordinary messages.
//!
//! Client: the plan. Server: ready, or why not. Both warm up. Server: begin. Both run. Server: the outcome.

use gpusock::{Error, GpuEndpoint, MemKind, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Changes when the messages do.
pub(crate) const VERSION: u32 = 2;
/// Longest message that is read.
const LONGEST: u64 = 64 << 10;
/// Tag of control messages, apart from those that are measured.
pub(crate) const CONTROL: u64 = u64::MAX;
/// Most operations in flight.
pub(crate) const WINDOW_MAX: u64 = 4096;

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

    /// The client's side of the measurement takes turns with the server's.
    pub(crate) fn is_ping_pong(self) -> bool {
        matches!(self, Test::SendLat | Test::WriteLat | Test::NotifyLat)
    }

    /// What the latency that is reported is that of.
    pub(crate) fn latency_of(self) -> &'static str {
        match self {
            Test::SendLat | Test::WriteLat | Test::NotifyLat => "half the round trip",
            Test::ReadLat => "the whole read, there and back",
            Test::SendBw | Test::WriteBw | Test::ReadBw => "from issue to completion, with the window full",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Client,
    Server,
}

/// From the client.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub version: u32,
    pub test: Test,
    /// Bytes of each operation.
    pub size: u64,
    pub iters: u64,
    pub warmup: u64,
    pub window: u64,
    pub verify: bool,
    /// The server's memory.
    pub memory: String,
    /// Descriptor of the client's exposed memory.
    pub remote: Option<Vec<u8>>,
}

/// The one part of a plan that no version changes.
#[derive(Deserialize)]
struct Opening {
    version: u32,
}

impl Plan {
    /// Reads and judges what came from a client.
    pub(crate) fn read(bytes: &[u8]) -> Result<Self> {
        let wrong = |what: String| Error::InvalidArgument { what: what.into() };
        let unread = |e: serde_json::Error| wrong(format!("the plan cannot be read: {e}"));
        let Opening { version } = serde_json::from_slice(bytes).map_err(unread)?;
        if version != VERSION {
            return Err(wrong(format!(
                "the client speaks version {version} of this test, and the server {VERSION}; use the same version of gpusock on both"
            )));
        }
        let plan: Plan = serde_json::from_slice(bytes).map_err(unread)?;
        if plan.iters == 0 || !(1..=WINDOW_MAX).contains(&plan.window) {
            return Err(wrong(format!("{} operations, {} in flight, cannot be measured", plan.iters, plan.window)));
        }
        Ok(plan)
    }

    pub(crate) fn memory(&self) -> Result<MemKind> {
        self.memory.parse()
    }

    /// Whether a side sends, writes or is read.
    pub(crate) fn has_source(&self, role: Role) -> bool {
        match self.test {
            Test::SendBw | Test::WriteBw => role == Role::Client,
            Test::ReadLat | Test::ReadBw => role == Role::Server,
            Test::SendLat | Test::WriteLat | Test::NotifyLat => true,
        }
    }

    /// How many buffers of a side bytes arrive in. As in other programs of this kind, all operations read the same source and, where
    /// the rules of borrowing allow it, fill the same target, so that the path is measured and not the cache.
    pub(crate) fn inboxes(&self, role: Role) -> u64 {
        match (self.test, role) {
            (Test::SendBw, Role::Server) => self.window.min(2),
            (Test::ReadBw, Role::Client) => self.window.min(self.iters.max(self.warmup)),
            (Test::SendBw | Test::WriteBw, Role::Client) | (Test::ReadLat | Test::ReadBw, Role::Server) => 0,
            _ => 1,
        }
    }

    /// The peer of this side reads its memory or writes to it.
    pub(crate) fn exposes(&self, role: Role) -> bool {
        match self.test {
            Test::SendLat | Test::SendBw => false,
            Test::WriteLat | Test::NotifyLat => true,
            Test::WriteBw | Test::ReadLat | Test::ReadBw => role == Role::Server,
        }
    }

    /// Bytes that a side allocates.
    pub(crate) fn needs(&self, role: Role) -> Option<u64> {
        (u64::from(self.has_source(role)) + self.inboxes(role)).checked_mul(self.size)
    }
}

/// From the server: ready, or why not.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Ready {
    Go { remote: Option<Vec<u8>> },
    Refused(String),
}

/// From the server, when the warm-up is over.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Begin;

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

/// The next message, which must be one of these.
pub(crate) async fn hear_bytes(endpoint: &GpuEndpoint) -> Result<Vec<u8>> {
    let message = endpoint.incoming().await?;
    if message.len() > LONGEST || message.tag() != CONTROL {
        return Err(strange(
            endpoint,
            "it does not speak the protocol of `gpusock perf`; is it a `gpusock perf serve` of this version?",
        ));
    }
    Ok(message.into_bytes().await?.to_vec())
}

pub(crate) async fn hear<T: DeserializeOwned>(endpoint: &GpuEndpoint) -> Result<T> {
    let bytes = hear_bytes(endpoint).await?;
    serde_json::from_slice(&bytes).map_err(|e| strange(endpoint, &format!("its message cannot be read: {e}")))
}

pub(crate) fn strange(endpoint: &GpuEndpoint, reason: &str) -> Error {
    Error::Handshake { peer: endpoint.peer_addr().to_string(), reason: reason.to_owned().into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(test: Test) -> Plan {
        let memory = "host".to_owned();
        Plan { version: VERSION, test, size: 8, iters: 10, warmup: 0, window: 4, verify: false, memory, remote: None }
    }

    #[test]
    fn a_plan_of_a_stranger_is_judged_before_it_is_followed() {
        let read = |plan: &Plan| Plan::read(&serde_json::to_vec(plan).unwrap());
        assert!(read(&plan(Test::SendBw)).is_ok());
        for wrong in [
            Plan { window: 0, ..plan(Test::ReadBw) },
            Plan { window: u64::MAX, size: 0, ..plan(Test::ReadBw) },
            Plan { iters: 0, ..plan(Test::SendLat) },
        ] {
            assert!(read(&wrong).is_err(), "{wrong:?}");
        }
        // Another version may have any other fields.
        let error = Plan::read(br#"{"version":7,"shape":"round"}"#).unwrap_err().to_string();
        assert!(error.contains("version 7") && error.contains("same version"), "{error}");
        assert!(Plan::read(b"GET / HTTP/1.1").is_err());
        let huge = Plan { size: u64::MAX, ..plan(Test::SendLat) };
        assert_eq!(huge.needs(Role::Server), None);
    }

    #[test]
    fn a_side_allocates_only_what_it_uses() {
        let needs = |test| (plan(test).needs(Role::Client), plan(test).needs(Role::Server));
        assert_eq!(needs(Test::SendLat), (Some(16), Some(16)));
        assert_eq!(needs(Test::SendBw), (Some(8), Some(16)));
        assert_eq!(needs(Test::WriteBw), (Some(8), Some(8)));
        assert_eq!(needs(Test::ReadBw), (Some(32), Some(8)));
    }
}
