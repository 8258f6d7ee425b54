//! The `gpusock` command, as a user types it.
#![cfg(feature = "cli")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use gpusock::{Context, GpuEndpoint, GpuListener};
use serde_json::{Value, json};

const GPUSOCK: &str = env!("CARGO_BIN_EXE_gpusock");
/// Nothing here takes nearly as long, unless it hangs.
const LIMIT: Duration = Duration::from_secs(120);

fn gpusock(args: &[&str]) -> Output {
    output(Command::new(GPUSOCK).args(args))
}

fn output(command: &mut Command) -> Output {
    end_of(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
}

/// What came of a process; one that hangs is ended, and is a failure.
fn end_of(child: Child) -> Output {
    let id = child.id();
    let (sender, end) = mpsc::channel();
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    end.recv_timeout(LIMIT).map(Result::unwrap).unwrap_or_else(|_| {
        let id = rustix::process::Pid::from_raw(id as i32).unwrap();
        let _ = rustix::process::kill_process(id, rustix::process::Signal::KILL);
        panic!("it hangs");
    })
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn report(output: &Output) -> Value {
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", text(&output.stdout)))
}

struct Server(Child, String);

impl Server {
    fn start(args: &[&str]) -> Self {
        let mut child = Command::new(GPUSOCK)
            .args(["perf", "serve", "--listen", "127.0.0.1:0"])
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening ").unwrap().to_owned();
        Server(child, address)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn every_test_measures_and_verifies() {
    let server = Server::start(&[]);
    for test in ["send-lat", "send-bw", "write-lat", "write-bw", "read-lat", "read-bw", "notify-lat"] {
        for size in ["0", "8", "200K"] {
            let args = [
                "perf", "run", &server.1, "--test", test, "--size", size, "--iters", "30", "--warmup", "3", "--verify", "--json",
            ];
            let measured = report(&gpusock(&args));
            assert_eq!((measured["test"].as_str(), measured["iters"].as_u64()), (Some(test), Some(30)));
            assert_eq!((measured["path"].as_str(), measured["spin"].as_str()), (Some("shm"), Some("adaptive")));
            let keys: Vec<_> = measured.as_object().unwrap().keys().map(String::as_str).collect();
            assert_eq!(
                keys,
                ["bandwidth_MBps", "cpu_s", "iters", "latency_us", "messages_per_s", "path", "size", "spin", "test"]
            );
            if test == "notify-lat" {
                assert_eq!((measured["size"].as_u64(), measured["bandwidth_MBps"].as_f64()), (Some(0), Some(0.0)));
            }
            for key in ["min", "p50", "p99", "max"] {
                assert!(measured["latency_us"][key].as_f64().is_some_and(|us| us >= 0.0), "{measured}");
            }
            for key in ["bandwidth_MBps", "messages_per_s"] {
                assert!(measured[key].as_f64().is_some(), "{measured}");
            }
            assert!(
                measured["cpu_s"]["local"].as_f64().is_some() && measured["cpu_s"]["remote"].as_f64().is_some(),
                "{measured}"
            );
        }
    }
}

#[test]
fn pair_starts_its_own_server() {
    for spin in ["adaptive", "never", "always", "thread"] {
        let measured =
            report(&gpusock(&["perf", "pair", "--iters", "50", "--spin", spin, "--path", "tcp", "--lanes", "2", "--json"]));
        assert_eq!(measured["spin"].as_str(), Some(spin));
    }
    let table = gpusock(&["perf", "pair", "--iters", "50", "--size", "64K"]);
    let shown = text(&table.stdout);
    assert!(table.status.success() && shown.contains("send-lat of 64K bytes") && shown.contains("median"), "{shown}");
}

#[test]
fn wrong_values_are_refused_with_what_is_right() {
    for (args, expected) in [
        (&["perf", "pair", "--size", "8X"][..], "64K"),
        (&["perf", "pair", "--size", "-1"], "64K"),
        (&["perf", "pair", "--iters", "0"], "from 1 on"),
        (&["perf", "pair", "--warmup", "-1"], "from 0 on"),
        (&["perf", "pair", "--window", "0"], "from 1 to 4096"),
        (&["perf", "pair", "--lanes", "99"], "from 1 to 16"),
        (&["perf", "pair", "--test", "flood"], "send-lat"),
        (&["perf", "pair", "--spin", "sometimes"], "adaptive"),
        (&["perf", "pair", "--path", "tpc"], "gpudirect-rdma"),
        (&["perf", "pair", "--path", "tpc"], "auto"),
        (&["perf", "pair", "--pin", "9999"], "from 0 to 1023"),
        (&["perf", "pair", "--pin", "1023"], "this machine has"),
        (&["perf", "serve", "--listen", "7700"], "HOST:PORT"),
        (&["perf", "serve", "--memory", "much"], "64K"),
        (&["perf", "pair", "--mem", "gpu"], "cuda:0"),
        (&["perf", "pair", "--mem", "cuda:99"], "cuda:99"),
        (&["perf", "pair", "--path", "rdma"], "no verbs engine"),
        (&["perf", "pair", "--size", "900000G"], "memory"),
        (&["perf", "pair", "--size", "99999999999G"], "no size"),
        (&["perf", "run", "127.0.0.1:1"], "does a listener"),
        (&["perf", "run", "nowhere"], "HOST:PORT"),
        (&["path", "127.0.0.1:1"], "refused"),
    ] {
        let output = gpusock(args);
        let said = text(&output.stderr);
        assert!(!output.status.success(), "{args:?}");
        assert!(said.contains(expected) && !said.contains("panicked"), "{args:?}: {said}");
    }
}

#[test]
fn a_server_says_no_to_what_is_too_much() {
    let server = Server::start(&["--memory", "1M"]);
    let output = gpusock(&["perf", "run", &server.1, "--size", "2M"]);
    assert!(!output.status.success() && text(&output.stderr).contains("--memory"), "{}", text(&output.stderr));
    assert!(gpusock(&["perf", "run", &server.1, "--size", "8", "--iters", "10"]).status.success(), "the next client is served");
    let output = gpusock(&["perf", "serve", "--listen", &server.1]);
    assert!(!output.status.success() && text(&output.stderr).contains("choose another port"), "{}", text(&output.stderr));
}

#[test]
fn a_server_that_dies_ends_the_run() {
    let mut server = Server::start(&[]);
    let mut run = Command::new(GPUSOCK)
        .args(["perf", "run", &server.1, "--iters", "100000000", "--warmup", "0"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Once it has used 50 ms of processor time, it is at it.
    let ticks = |pid: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let fields: Vec<u64> = stat.rsplit(')').next().unwrap_or("").split_whitespace().filter_map(|n| n.parse().ok()).collect();
        // Without the state, which is no number, user and system time are the 11th and 12th behind the name.
        fields.get(10).copied().unwrap_or(0) + fields.get(11).copied().unwrap_or(0)
    };
    while ticks(run.id()) < 5 && run.try_wait().unwrap().is_none() {
        std::thread::yield_now();
    }
    server.0.kill().unwrap();
    let output = end_of(run);
    assert!(output.status.code() == Some(1) && text(&output.stderr).contains("lost"), "{}", text(&output.stderr));
}

#[test]
fn path_shows_the_table() {
    let server = Server::start(&[]);
    let table = text(&gpusock(&["path", &server.1]).stdout);
    assert!(table.contains("tcp") && table.contains("chosen") && table.contains("no verbs engine"), "{table}");
    let table = report(&gpusock(&["path", &server.1, "--json"]));
    assert_eq!((table["chosen"].as_str(), table["paths"].as_array().map(Vec::len)), (Some("shm"), Some(10)));
    let forced = output(Command::new(GPUSOCK).args(["path", &server.1]).env("GPUSOCK_PATHS", "^tcp,shm"));
    assert!(text(&forced.stderr).contains("not allowed by GPUSOCK_PATHS"), "{}", text(&forced.stderr));
    let wrong = output(Command::new(GPUSOCK).args(["path", &server.1]).env("GPUSOCK_PATHS", "tpc"));
    assert!(text(&wrong.stderr).contains("the paths are"), "{}", text(&wrong.stderr));
}

#[test]
fn a_web_server_is_no_gpusock() {
    let web = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = web.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for stream in web.incoming() {
            let _ = stream.unwrap().write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    for args in [&["path", &address][..], &["perf", "run", &address]] {
        let output = gpusock(args);
        assert_eq!(output.status.code(), Some(1));
        assert!(text(&output.stderr).contains("gpusock listener"), "{}", text(&output.stderr));
    }
}

#[test]
fn info_and_doctor_look_at_this_machine() {
    let info = report(&gpusock(&["info", "--json"]));
    assert!(info["kernel"].as_str().is_some_and(|kernel| !kernel.is_empty()) && info["engines"].as_array().is_some());
    assert!(text(&gpusock(&["info"]).stdout).contains("locked memory"));
    let doctor = gpusock(&["doctor", "--json"]);
    let checks: Value = serde_json::from_slice(&doctor.stdout).unwrap();
    let checks = checks["checks"].as_array().unwrap();
    let bad = |check: &Value| matches!(check["severity"].as_str(), Some("warn" | "error"));
    assert!(checks.len() >= 5 && checks.iter().all(|check| check["seen"].as_str().is_some()));
    assert_eq!(doctor.status.code(), Some(i32::from(checks.iter().any(bad))));
}

/// A peer of the test's own, which answers the next endpoint.
async fn peer() -> (GpuListener, String) {
    let listener = Context::new().unwrap().bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    (listener, address)
}

/// Runs the command while the test does its part.
async fn meanwhile(args: &[&str], part: impl Future<Output = ()>) -> Output {
    let args: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
    let command = tokio::task::spawn_blocking(move || output(Command::new(GPUSOCK).args(args)));
    tokio::time::timeout(LIMIT, part).await.expect("the test's part hangs");
    command.await.unwrap()
}

async fn tell(endpoint: &GpuEndpoint, message: Value) {
    endpoint.send_bytes(message.to_string()).tag(u64::MAX).await.unwrap();
}

#[tokio::test]
async fn wrong_bytes_fail_the_verification() {
    let (listener, address) = peer().await;
    for (wrong, message) in [(false, ""), (true, "byte 5 is")] {
        let args = ["perf", "run", &address, "--size", "8", "--iters", "1", "--warmup", "0", "--verify", "--json"];
        let outcome = meanwhile(&args, async {
            let endpoint = listener.accept().await.unwrap();
            let (plan, _) = endpoint.recv_bytes().await.unwrap();
            let plan: Value = serde_json::from_slice(&plan).unwrap();
            assert_eq!((plan["test"].as_str(), plan["verify"].as_bool()), (Some("send-lat"), Some(true)));
            tell(&endpoint, json!({ "Go": { "remote": null } })).await;
            tell(&endpoint, Value::Null).await;
            let (message, _) = endpoint.recv_bytes().await.unwrap();
            let mut answer = message.to_vec();
            answer[5] ^= u8::from(wrong);
            endpoint.send_bytes(answer).await.unwrap();
            tell(&endpoint, json!({ "cpu_s": 0.0, "wrong": null })).await;
            endpoint.closed().await;
        });
        let outcome = outcome.await;
        let said = text(&outcome.stderr);
        assert_eq!(outcome.status.code(), Some(i32::from(wrong)), "{said}");
        assert!(said.contains(message) && said.contains("verification failed") == wrong, "{said}");
    }
}

#[tokio::test]
async fn a_gpusock_that_is_no_perf_server_is_told_apart() {
    let (listener, address) = peer().await;
    let args = ["perf", "run", &address];
    let outcome = meanwhile(&args, async {
        let endpoint = listener.accept().await.unwrap();
        endpoint.send_bytes(&b"welcome"[..]).await.unwrap();
        endpoint.closed().await;
    });
    let outcome = outcome.await;
    let said = text(&outcome.stderr);
    assert!(outcome.status.code() == Some(1) && said.contains("is it a `gpusock perf serve`"), "{said}");
}

#[tokio::test]
async fn a_client_of_another_version_or_with_impossible_wishes_is_refused_with_the_reason() {
    let server = Server::start(&[]);
    let context = Context::new().unwrap();
    let wish = |window: u64| json!({ "version": 2, "test": "read-bw", "size": 0, "iters": 1, "warmup": 0, "window": window, "verify": false, "memory": "host", "remote": null });
    for (plan, reason) in [
        (json!({ "version": 77, "colour": "blue" }), "version 77"),
        (json!({ "version": 2, "test": "juggle" }), "cannot be read"),
        (json!("nonsense"), "cannot be read"),
        (wish(u64::MAX), "cannot be measured"),
        (wish(0), "cannot be measured"),
    ] {
        let endpoint = context.connect(server.1.as_str()).await.unwrap();
        tell(&endpoint, plan).await;
        let (answer, _) = tokio::time::timeout(LIMIT, endpoint.recv_bytes()).await.unwrap().unwrap();
        let answer: Value = serde_json::from_slice(&answer).unwrap();
        assert!(answer["Refused"].as_str().is_some_and(|said| said.contains(reason)), "{answer}");
    }
    assert!(gpusock(&["perf", "run", &server.1, "--iters", "10"]).status.success(), "the server serves on");
}

#[test]
fn several_clients_are_served_at_once() {
    let server = Server::start(&[]);
    std::thread::scope(|scope| {
        for test in ["send-bw", "write-lat", "read-bw", "send-lat"] {
            let address = &server.1;
            scope.spawn(move || {
                let args = ["perf", "run", address, "--test", test, "--size", "70K", "--iters", "40", "--verify", "--json"];
                assert_eq!(report(&gpusock(&args))["test"].as_str(), Some(test));
            });
        }
    });
}

#[test]
fn output_that_nobody_takes_is_no_panic() {
    let full = || Stdio::from(std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap());
    for args in [&["info"][..], &["doctor"], &["doctor", "--json"]] {
        let ended = end_of(Command::new(GPUSOCK).args(args).stdout(full()).stderr(Stdio::piped()).spawn().unwrap());
        let said = text(&ended.stderr);
        assert!(!ended.status.success() && said.contains("standard output") && !said.contains("panicked"), "{said}");
    }
    // A reader that leaves at once, as `head` does.
    let mut child = Command::new(GPUSOCK).arg("info").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(child.wait().unwrap().success() && said.is_empty(), "{said}");
}

#[test]
fn the_log_is_asked_for_by_a_variable() {
    let info = |level: &str| output(Command::new(GPUSOCK).arg("info").env("GPUSOCK_LOG", level));
    let wrong = info("a=b=c");
    assert_eq!(wrong.status.code(), Some(2));
    assert!(text(&wrong.stderr).contains("write error, warn, info"), "{}", text(&wrong.stderr));
    let server = Server::start(&[]);
    let path = output(Command::new(GPUSOCK).args(["path", &server.1]).env("GPUSOCK_LOG", "info"));
    let said = text(&path.stderr);
    assert!(path.status.success() && said.contains("path chosen") && !said.contains('\u{1b}'), "{said}");
}
