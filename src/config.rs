//! What a context is set to.

use std::time::Duration;

use crate::error::{Error, Result};
use crate::path::PathPolicy;
use crate::proto::MESSAGE_COST;
use crate::reactor::spin::Spin;
use crate::wire::frame::SEGMENT_MAX;

/// See [`ContextBuilder`](crate::ContextBuilder).
#[derive(Debug, Clone)]
pub(crate) struct Config {
    pub spin: Spin,
    pub spin_core: Option<usize>,
    pub policy: PathPolicy,
    pub lanes: u8,
    pub eager_max: u32,
    pub segment: u32,
    pub credit: u64,
    pub heartbeat: Duration,
    pub liveness: Duration,
    pub handshake_timeout: Duration,
    pub connect_timeout: Duration,
    pub linger: Duration,
    pub tcp_congestion: Option<String>,
    pub zero_copy: bool,
    pub shm_between_users: bool,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            spin: Spin::Adaptive,
            spin_core: None,
            policy: PathPolicy::new(),
            lanes: 1,
            eager_max: 64 << 10,
            segment: 1 << 20,
            credit: 1 << 20,
            heartbeat: Duration::from_secs(5),
            liveness: Duration::from_secs(15),
            handshake_timeout: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(30),
            linger: Duration::from_secs(10),
            tcp_congestion: None,
            zero_copy: true,
            shm_between_users: false,
        }
    }
}

impl Config {
    /// Checks it, and lets the environment override what it may.
    pub(crate) fn finish(mut self) -> Result<Self> {
        self.policy = self.policy.or_environment()?;
        if let Ok(name) = std::env::var("GPUSOCK_TCP_CONGESTION") {
            self.tcp_congestion = Some(name).filter(|name| !name.is_empty());
        }
        if self.lanes == 0 || u16::from(self.lanes) > crate::endpoint::handshake::LANES_MAX {
            return Err(Error::invalid(format!(
                "{} lanes; 1 to {} can be had",
                self.lanes,
                crate::endpoint::handshake::LANES_MAX
            )));
        }
        if self.eager_max > SEGMENT_MAX {
            return Err(Error::invalid(format!("an eager limit of {} bytes; at most {SEGMENT_MAX}", self.eager_max)));
        }
        // A message must fit in half of the window, since credit comes back a quarter at a time.
        self.credit = self.credit.max(2 * (u64::from(self.eager_max) + MESSAGE_COST));
        if self.heartbeat < Duration::from_millis(10) || self.liveness < self.heartbeat.saturating_mul(2) {
            return Err(Error::invalid("the heartbeat must be at least 10 ms, and the liveness time at least twice that"));
        }
        Ok(self)
    }
}
