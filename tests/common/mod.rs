//! What the tests share: a table of transports, pairs of endpoints, processes to be killed.
#![allow(dead_code, missing_docs)]

use std::future::Future;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use gpusock::{Context, ContextBuilder, GpuBuf, GpuEndpoint, PathKind, PathPolicy, Spin};

/// Every transport that any machine has. A test that is written with `on_every_transport!` runs on each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    Tcp,
    /// Four sockets for bulk.
    TcpLanes,
    TcpNever,
    Inproc,
    Shm,
    ShmNever,
}

impl Transport {
    pub fn builder(self) -> ContextBuilder {
        let tcp = || Context::builder().policy(PathPolicy::new().require(PathKind::Tcp));
        let shm = || Context::builder().policy(PathPolicy::new().require(PathKind::Shm));
        match self {
            Transport::Tcp => tcp(),
            Transport::TcpLanes => tcp().lanes(4),
            Transport::TcpNever => tcp().spin(Spin::Never),
            Transport::Shm => shm(),
            Transport::ShmNever => shm().spin(Spin::Never),
            Transport::Inproc => Context::builder().policy(PathPolicy::new().require(PathKind::Inproc)),
        }
    }

    pub fn kind(self) -> PathKind {
        match self {
            Transport::Inproc => PathKind::Inproc,
            Transport::Shm | Transport::ShmNever => PathKind::Shm,
            _ => PathKind::Tcp,
        }
    }
}

/// Defines a test of this name for every transport.
#[macro_export]
macro_rules! on_every_transport {
    ($($(#[$attribute:meta])* async fn $name:ident($pair:ident: Pair) $body:block)*) => {
        $(mod $name {
            #[allow(unused_imports)]
            use super::*;

            $(#[$attribute])*
            async fn run(transport: common::Transport) {
                let $pair = common::pair(transport).await;
                $body
            }

            #[tokio::test] async fn tcp() { common::in_time(run(common::Transport::Tcp)).await }
            #[tokio::test] async fn tcp_lanes() { common::in_time(run(common::Transport::TcpLanes)).await }
            #[tokio::test] async fn tcp_never_spinning() { common::in_time(run(common::Transport::TcpNever)).await }
            #[tokio::test] async fn shm() { common::in_time(run(common::Transport::Shm)).await }
            #[tokio::test] async fn shm_never_spinning() { common::in_time(run(common::Transport::ShmNever)).await }
            #[tokio::test] async fn inproc() { common::in_time(run(common::Transport::Inproc)).await }
        })*
    };
}

/// Two contexts and the two ends of a connection between them.
pub struct Pair {
    pub transport: Transport,
    pub ctx_a: Context,
    pub a: GpuEndpoint,
    pub ctx_b: Context,
    pub b: GpuEndpoint,
}

pub async fn pair(transport: Transport) -> Pair {
    pair_of(transport, transport.builder(), transport.builder()).await
}

pub async fn pair_of(transport: Transport, a: ContextBuilder, b: ContextBuilder) -> Pair {
    let (ctx_a, ctx_b) = (a.build().unwrap(), b.build().unwrap());
    let listener = ctx_a.bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (a, b) = tokio::join!(listener.accept(), ctx_b.connect(address));
    Pair { transport, ctx_a, a: a.unwrap(), ctx_b, b: b.unwrap() }
}

/// A hang is a failure. The limit is generous, since machines under test can be slow.
pub async fn in_time<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(120), future).await.expect("the test hangs")
}

/// Bytes that differ from place to place and from seed to seed.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = vec![0; len];
    for chunk in bytes.chunks_mut(8) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        chunk.copy_from_slice(&x.to_le_bytes()[..chunk.len()]);
    }
    bytes
}

pub fn filled(ctx: &Context, len: usize, seed: u64) -> GpuBuf {
    let buf = ctx.alloc("host", len as u64).unwrap();
    buf.copy_from_slice(0, &pattern(len, seed)).unwrap();
    buf
}

/// Open descriptors of this process.
pub fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Mappings of memory files of this crate, in this process.
pub fn mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().filter(|line| line.contains("memfd:gpusock")).count()
}

/// A second process: this test binary again, running the one test `child`, which does what `role` says.
pub struct Process {
    pub child: Child,
    pub stdin: ChildStdin,
    pub stdout: BufReader<ChildStdout>,
}

const ROLE: &str = "GPUSOCK_TEST_ROLE";
/// The test harness prints to the same stream.
const MARK: &str = "##";

impl Process {
    pub fn start(role: &str) -> Self {
        Self::start_by(Command::new(std::env::current_exe().unwrap()), role)
    }

    /// The same, with a command that runs this test binary.
    pub fn start_by(mut command: Command, role: &str) -> Self {
        let mut child = command
            .args(["child", "--exact", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Process { child, stdin, stdout }
    }

    /// The next line that the child says.
    pub fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.stdout.read_line(&mut line).unwrap(), 0, "the child process ended early");
            if let Some((_, said)) = line.trim_end().split_once(MARK) {
                return said.to_owned();
            }
        }
    }

    pub fn tell(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").unwrap();
        self.stdin.flush().unwrap();
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What this process is to do, in a child.
pub fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

pub fn say(line: &str) {
    println!("{MARK}{line}");
}

/// A line from the parent.
pub fn heard() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}
