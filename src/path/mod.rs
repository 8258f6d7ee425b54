//! Which way bytes take between two memories, and why.
//!
//! Nothing here moves bytes: candidates are judged from facts about the two sides, the first that works and is allowed is taken, and
//! the report keeps every verdict.

mod choice;
mod kind;
mod policy;
mod report;

pub(crate) use choice::{Facts, Link, choose, kind_of, link, wants_inproc, wants_shm};
pub use kind::PathKind;
pub use policy::PathPolicy;
pub use report::{Candidate, Cost, PathEvent, PathReport, Verdict};
