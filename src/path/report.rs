//! What was decided, and how to show it.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use super::PathKind;

/// What became of a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verdict {
    /// This path is taken.
    Chosen,
    /// It would work, but a better one is taken.
    Possible,
    /// It cannot be taken.
    Rejected,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Verdict::Chosen => "chosen",
            Verdict::Possible => "possible",
            Verdict::Rejected => "rejected",
        })
    }
}

/// What a path was measured to cost on this connection.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Cost {
    /// One way, half of the handshake's round trip. It includes the peer's wake-up from sleep, so it is an upper bound.
    pub latency: Duration,
}

/// A path that was considered.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Candidate {
    /// Which.
    pub kind: PathKind,
    /// What became of it.
    pub verdict: Verdict,
    /// Why.
    pub reason: Cow<'static, str>,
    /// What it was measured to cost, where it was.
    pub cost: Option<Cost>,
}

/// The path between two memories, with every path that was not taken and the reason. Displays as a table.
#[derive(Debug, Clone, PartialEq)]
pub struct PathReport {
    pub(crate) between: String,
    pub(crate) candidates: Vec<Candidate>,
}

impl PathReport {
    /// The path that is taken.
    #[must_use]
    pub fn chosen(&self) -> Option<PathKind> {
        self.candidates.iter().find(|c| c.verdict == Verdict::Chosen).map(|c| c.kind)
    }

    /// All candidates, in order of preference.
    #[must_use]
    pub fn candidates(&self) -> &[Candidate] {
        &self.candidates
    }

    /// The memories that the report is about, and the host and port of the peer.
    #[must_use]
    pub fn between(&self) -> &str {
        &self.between
    }

    /// All reasons in one line.
    pub(crate) fn rejected(&self) -> String {
        let reasons: Vec<_> = self
            .candidates
            .iter()
            .filter(|c| c.verdict == Verdict::Rejected)
            .map(|c| format!("{}: {}", c.kind, c.reason))
            .collect();
        reasons.join("; ")
    }
}

impl fmt::Display for PathReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.between)?;
        write!(f, "{:<15} {:<9} {:>10}  reason", "path", "verdict", "one way")?;
        for candidate in &self.candidates {
            let cost = candidate.cost.map_or("-".into(), |cost| format!("{:.1} us", cost.latency.as_nanos() as f64 / 1e3));
            write!(f, "\n{:<15} {:<9} {:>10}  {}", candidate.kind, candidate.verdict, cost, candidate.reason)?;
        }
        Ok(())
    }
}

/// A change of the path that an endpoint takes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum PathEvent {
    /// A path was taken into use.
    Selected {
        /// Which.
        kind: PathKind,
        /// Why.
        reason: String,
    },
    /// The endpoint has come to its end: no path is left.
    Ended {
        /// Why.
        reason: String,
    },
}
