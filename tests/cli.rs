//! The `gpusock` command, as a user types it.
#![cfg(feature = "cli")]

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};

const GPUSOCK: &str = env!("CARGO_BIN_EXE_gpusock");

fn gpusock(args: &[&str]) -> Output {
    Command::new(GPUSOCK).args(args).stdin(Stdio::null()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn json(output: &Output) -> serde_json::Value {
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
            let report = json(&gpusock(&args));
            assert_eq!((report["test"].as_str(), report["iters"].as_u64()), (Some(test), Some(30)));
            assert_eq!((report["path"].as_str(), report["spin"].as_str()), (Some("tcp"), Some("adaptive")));
            for key in ["min", "p50", "p99", "max"] {
                assert!(report["latency_us"][key].as_f64().is_some_and(|us| us >= 0.0), "{report}");
            }
            for key in ["bandwidth_MBps", "messages_per_s"] {
                assert!(report[key].as_f64().is_some(), "{report}");
            }
            assert!(report["cpu_s"]["local"].as_f64().is_some() && report["cpu_s"]["remote"].as_f64().is_some(), "{report}");
        }
    }
}

#[test]
fn pair_starts_its_own_server() {
    for spin in ["adaptive", "never", "always", "thread"] {
        let report =
            json(&gpusock(&["perf", "pair", "--iters", "50", "--spin", spin, "--path", "tcp", "--lanes", "2", "--json"]));
        assert_eq!(report["spin"].as_str(), Some(spin));
    }
    let table = gpusock(&["perf", "pair", "--iters", "50", "--size", "64K"]);
    let shown = text(&table.stdout);
    assert!(table.status.success() && shown.contains("send-lat of 64K bytes") && shown.contains("median"), "{shown}");
}

#[test]
fn wrong_values_are_refused_with_what_is_right() {
    for (args, expected) in [
        (&["perf", "pair", "--size", "8X"][..], "64K"),
        (&["perf", "pair", "--iters", "0"], "iters"),
        (&["perf", "pair", "--window", "0"], "window"),
        (&["perf", "pair", "--lanes", "99"], "lanes"),
        (&["perf", "pair", "--test", "flood"], "send-lat"),
        (&["perf", "pair", "--spin", "sometimes"], "adaptive"),
        (&["perf", "pair", "--path", "tpc"], "gpudirect-rdma"),
        (&["perf", "pair", "--mem", "gpu"], "cuda:0"),
        (&["perf", "pair", "--mem", "cuda:0"], "no CUDA engine"),
        (&["perf", "pair", "--path", "shm"], "no shared-memory engine"),
        (&["perf", "pair", "--size", "900000G"], "memory"),
        (&["perf", "pair", "--size", "99999999999G"], "no size"),
        (&["perf", "run", "127.0.0.1:1"], "127.0.0.1:1"),
        (&["perf", "run", "nowhere"], "nowhere"),
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
    assert!(!output.status.success() && text(&output.stderr).contains("in use"), "{}", text(&output.stderr));
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
    let output = run.wait_with_output().unwrap();
    assert!(!output.status.success() && text(&output.stderr).contains("lost"), "{}", text(&output.stderr));
}

#[test]
fn path_shows_the_table() {
    let server = Server::start(&[]);
    let table = text(&gpusock(&["path", &server.1]).stdout);
    assert!(table.contains("tcp") && table.contains("chosen") && table.contains("no shared-memory engine"), "{table}");
    let report = json(&gpusock(&["path", &server.1, "--json"]));
    assert_eq!((report["chosen"].as_str(), report["paths"].as_array().map(Vec::len)), (Some("tcp"), Some(9)));
    let forced = Command::new(GPUSOCK).args(["path", &server.1]).env("GPUSOCK_PATHS", "^tcp").output().unwrap();
    assert!(text(&forced.stderr).contains("not allowed by GPUSOCK_PATHS"), "{}", text(&forced.stderr));
    let wrong = Command::new(GPUSOCK).args(["path", &server.1]).env("GPUSOCK_PATHS", "tpc").output().unwrap();
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
    let output = gpusock(&["path", &address]);
    assert!(text(&output.stderr).contains("gpusock listener"), "{}", text(&output.stderr));
}

#[test]
fn info_and_doctor_look_at_this_machine() {
    let info = json(&gpusock(&["info", "--json"]));
    assert!(info["kernel"].as_str().is_some_and(|kernel| !kernel.is_empty()) && info["engines"].as_array().is_some());
    assert!(text(&gpusock(&["info"]).stdout).contains("locked memory"));
    let doctor = gpusock(&["doctor", "--json"]);
    let checks: serde_json::Value = serde_json::from_slice(&doctor.stdout).unwrap();
    let checks = checks["checks"].as_array().unwrap();
    let bad = |check: &serde_json::Value| matches!(check["severity"].as_str(), Some("warn" | "error"));
    assert!(checks.len() >= 5 && checks.iter().all(|check| check["seen"].as_str().is_some()));
    assert_eq!(doctor.status.code(), Some(i32::from(checks.iter().any(bad))));
}
