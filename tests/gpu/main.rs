//! Tests of GPU memory. They run wherever a CUDA driver is, the model in `tests/cuda_model` included; elsewhere each one is listed as not run.
//!
//! A program of its own rather than functions for the test harness, so that a test can say why it is not run, and so that the same
//! program runs on a GPU machine that has no Rust (`tests/gpu-pack.sh`).
#![allow(missing_docs)]

#[path = "../common/mod.rs"]
mod common;
mod device;
mod lost;
mod memory;
mod messages;
mod one_sided;
mod order;
mod registered;

use std::future::Future;

use gpusock::{Context, ContextBuilder, PathKind, PathPolicy, Spin, system};
use libtest_mimic::{Arguments, Trial};

/// The links of an endpoint. Both carry GPU memory in their own way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Link {
    Inproc,
    Shm,
    Tcp,
}

impl Link {
    pub const ALL: [Link; 3] = [Link::Inproc, Link::Shm, Link::Tcp];

    pub fn builder(self) -> ContextBuilder {
        let policy = PathPolicy::new();
        Context::builder().policy(match self {
            Link::Inproc => policy.allow_only([PathKind::Inproc, PathKind::InprocPeer]),
            Link::Shm => policy.allow_only([PathKind::Shm, PathKind::ShmStaged]),
            Link::Tcp => policy.allow_only([PathKind::Tcp, PathKind::TcpStaged]),
        })
    }

    /// The path between two memories of one GPU.
    pub fn path(self) -> PathKind {
        match self {
            Link::Inproc => PathKind::Inproc,
            Link::Shm => PathKind::ShmStaged,
            Link::Tcp => PathKind::TcpStaged,
        }
    }
}

pub async fn pair(link: Link) -> common::Pair {
    common::pair_of(common::Transport::Tcp, link.builder(), link.builder()).await
}

pub async fn pair_spinning(link: Link, spin: Spin) -> common::Pair {
    common::pair_of(common::Transport::Tcp, link.builder().spin(spin), link.builder().spin(spin)).await
}

/// Runs a test on a runtime of its own.
pub fn run<F: Future<Output = ()>>(test: F) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(common::in_time(test));
}

pub struct Suite {
    trials: Vec<Trial>,
    /// Why tests that need this many GPUs are not run.
    missing: [Option<String>; 2],
}

impl Suite {
    fn trial(&mut self, name: String, gpus: usize, test: impl FnOnce() + Send + 'static) {
        let missing = self.missing[gpus - 1].clone();
        let trial = Trial::test(name, || {
            test();
            Ok(())
        });
        self.trials.push(match missing {
            Some(why) => trial.with_kind(format!("not run: {why}")).with_ignored_flag(true),
            None => trial,
        });
    }

    /// A test that needs a GPU.
    pub fn add<F: Future<Output = ()>>(&mut self, name: &str, test: impl FnOnce() -> F + Send + 'static) {
        self.trial(name.to_owned(), 1, move || run(test()));
    }

    /// A test that needs two.
    pub fn add_with_two<F: Future<Output = ()>>(&mut self, name: &str, test: impl FnOnce() -> F + Send + 'static) {
        self.trial(name.to_owned(), 2, move || run(test()));
    }

    /// A test for each link.
    pub fn on_links<F: Future<Output = ()>>(&mut self, name: &str, test: impl Fn(Link) -> F + Send + Copy + 'static) {
        for link in Link::ALL {
            self.trial(format!("{name}::{link:?}").to_lowercase(), 1, move || run(test(link)));
        }
    }
}

fn main() {
    if let Some(role) = common::role() {
        return run(lost::child(role));
    }
    let info = system::inspect();
    let (devices, problem) = info.cuda.map(|cuda| (cuda.devices.len(), cuda.problem)).unwrap_or_default();
    let missing = [
        (devices < 1).then(|| problem.unwrap_or_else(|| "no CUDA device".to_owned())),
        (devices < 2).then(|| format!("{devices} CUDA devices")),
    ];
    let mut suite = Suite { trials: Vec::new(), missing };
    memory::add(&mut suite);
    messages::add(&mut suite);
    one_sided::add(&mut suite);
    order::add(&mut suite);
    registered::add(&mut suite);
    lost::add(&mut suite);
    libtest_mimic::run(&Arguments::from_args(), suite.trials).exit();
}
