//! What a bare, non-blocking, spinning TCP socket does on this machine: the floor that gpusock's TCP path is measured against.
//!
//! * `raw_socket serve ADDR` prints `listening ADDR` and answers one connection after another.
//! * `raw_socket run ADDR --test lat|bw [--size N] [--iters N] [--warmup N] [--congestion NAME]` prints one line of JSON with
//!   the keys that `gpusock perf run --json` uses: `latency_us` is one way (half the round trip), `bandwidth_MBps` is 10^6.
//! * `raw_socket probe CPU CPU` prints how many nanoseconds a cache line takes from one CPU to the other and back. Virtual
//!   CPUs move between physical ones, and every figure over loopback moves with that by a factor of two.
//! * Without arguments (as `cargo bench` calls it) two threads of this process play both parts for a moment.

use std::error::Error;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_setaffinity};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const LATENCY: u64 = 0;
const STREAM: u64 = 1;
/// The largest message that a server makes room for; the size comes from the other process.
const LARGEST: u64 = 1 << 30;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match words[..] {
        ["serve", addr] => {
            let listener = TcpListener::bind(addr)?;
            println!("listening {}", listener.local_addr()?);
            loop {
                if let Err(error) = serve(listener.accept()?.0) {
                    eprintln!("connection ended: {error}");
                }
            }
        }
        ["run", addr, ref options @ ..] => {
            let run = Run::parse(options)?;
            println!("{}", run.measure(addr)?);
            Ok(())
        }
        ["probe", a, b] => {
            println!("{:.0}", probe(a.parse()?, b.parse()?)?);
            Ok(())
        }
        ["serve" | "run" | "probe", ..] => Err("usage: raw_socket serve ADDR | run ADDR --test lat|bw … | probe CPU CPU".into()),
        // A test runner that lists what there is: this is not a set of tests.
        _ if words.contains(&"--list") => Ok(()),
        _ => self_pair(),
    }
}

/// One server thread and one client in this process, for well under a second.
fn self_pair() -> Result<()> {
    if thread::available_parallelism()?.get() < 2 {
        println!("raw_socket: two spinning sides need two CPUs; nothing measured");
        return Ok(());
    }
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let addr = listener.local_addr()?.to_string();
    let server = thread::spawn(move || -> io::Result<()> {
        for _ in 0..2 {
            serve(listener.accept()?.0)?;
        }
        Ok(())
    });
    for options in [["--test", "lat", "--iters", "1000"], ["--test", "bw", "--iters", "50"]] {
        println!("{}", Run::parse(&options)?.measure(&addr)?);
    }
    server.join().map_err(|_| "the server thread panicked")??;
    Ok(())
}

struct Run {
    test: u64,
    size: u64,
    iters: u64,
    warmup: u64,
    congestion: Option<String>,
}

impl Run {
    fn parse(options: &[&str]) -> Result<Run> {
        let (mut test, mut size, mut iters, mut warmup, mut congestion) = (LATENCY, None, None, None, None);
        for pair in options.chunks(2) {
            match *pair {
                ["--test", "lat"] => test = LATENCY,
                ["--test", "bw"] => test = STREAM,
                ["--size", n] => size = Some(n.parse()?),
                ["--iters", n] => iters = Some(n.parse()?),
                ["--warmup", n] => warmup = Some(n.parse()?),
                ["--congestion", name] => congestion = Some(name.to_owned()),
                _ => return Err(format!("unknown option {pair:?}").into()),
            }
        }
        let (usual_size, usual_iters) = if test == LATENCY { (8, 20_000) } else { (1 << 20, 2_000) };
        let iters: u64 = iters.unwrap_or(usual_iters);
        Ok(Run {
            test,
            size: size.unwrap_or(usual_size).clamp(1, LARGEST),
            iters: iters.max(1),
            warmup: warmup.unwrap_or(iters / 10),
            congestion,
        })
    }

    /// Connects, runs the warm-up and then the measured iterations; the result as JSON.
    fn measure(&self, addr: &str) -> Result<String> {
        let mut stream = TcpStream::connect(addr)?;
        if let Some(name) = &self.congestion {
            rustix::net::sockopt::set_tcp_congestion(&stream, name)?;
        }
        prepare(&stream)?;
        let mut data = vec![1u8; usize::try_from(self.size)?];
        let mut round_trips = Vec::with_capacity(usize::try_from(self.iters)?);
        let mut took = Duration::ZERO;
        for count in [self.warmup, self.iters] {
            round_trips.clear();
            for word in [self.test, self.size, count] {
                send(&mut stream, &word.to_le_bytes())?;
            }
            let start = Instant::now();
            if self.test == LATENCY {
                let mut before = start;
                for _ in 0..count {
                    send(&mut stream, &data)?;
                    receive(&mut stream, &mut data)?;
                    let now = Instant::now();
                    round_trips.push(now - before);
                    before = now;
                }
            } else {
                for _ in 0..count {
                    send(&mut stream, &data)?;
                }
                // The other side answers when it has everything.
                receive(&mut stream, &mut [0; 8])?;
            }
            took = start.elapsed();
        }
        Ok(self.report(&mut round_trips, took))
    }

    fn report(&self, round_trips: &mut [Duration], took: Duration) -> String {
        round_trips.sort_unstable();
        let one_way = |share: f64| match round_trips.len() {
            0 => "null".to_owned(),
            n => format!("{:.3}", round_trips[((n - 1) as f64 * share) as usize].as_secs_f64() * 5e5),
        };
        let name = if self.test == LATENCY { "lat" } else { "bw" };
        let messages = if self.test == LATENCY { 2 * self.iters } else { self.iters } as f64 / took.as_secs_f64();
        format!(
            r#"{{"test":"{name}","size":{},"iters":{},"latency_us":{{"min":{},"p50":{},"p99":{},"max":{}}},"bandwidth_MBps":{:.1},"messages_per_s":{messages:.0}}}"#,
            self.size,
            self.iters,
            one_way(0.0),
            one_way(0.5),
            one_way(0.99),
            one_way(1.0),
            messages * self.size as f64 / 1e6,
        )
    }
}

/// Answers one client until it hangs up.
fn serve(mut stream: TcpStream) -> io::Result<()> {
    prepare(&stream)?;
    loop {
        let mut words = [0u64; 3];
        for word in &mut words {
            let mut bytes = [0; 8];
            match receive(&mut stream, &mut bytes) {
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(()),
                other => other?,
            }
            *word = u64::from_le_bytes(bytes);
        }
        let [test, size, count] = words;
        if test > STREAM || size > LARGEST {
            return Err(io::Error::new(ErrorKind::InvalidData, "this is not raw_socket's client"));
        }
        let mut data = vec![1u8; size as usize];
        for _ in 0..count {
            receive(&mut stream, &mut data)?;
            if test == LATENCY {
                send(&mut stream, &data)?;
            }
        }
        if test == STREAM {
            send(&mut stream, &[0; 8])?;
        }
    }
}

fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)
}

fn send(stream: &mut TcpStream, mut data: &[u8]) -> io::Result<()> {
    while !data.is_empty() {
        match stream.write(data) {
            Ok(n) => data = &data[n..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn receive(stream: &mut TcpStream, mut data: &mut [u8]) -> io::Result<()> {
    while !data.is_empty() {
        match stream.read(data) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => data = &mut data[n..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Nanoseconds that one cache line takes from one CPU to another and back.
fn probe(here: usize, there: usize) -> Result<f64> {
    const ROUNDS: u32 = 20_000;
    if here == there || here.max(there) >= CpuSet::MAX_CPU {
        return Err("probe needs two different CPUs".into());
    }
    static TURN: AtomicU32 = AtomicU32::new(0);
    let answer = thread::spawn(move || {
        let pinned = pin(there);
        for round in 0..ROUNDS {
            while TURN.load(Ordering::Acquire) != 2 * round + 1 {}
            TURN.store(2 * round + 2, Ordering::Release);
        }
        pinned
    });
    pin(here)?;
    let mut start = Instant::now();
    for round in 0..ROUNDS {
        if round == ROUNDS / 10 {
            start = Instant::now(); // both threads run by now
        }
        TURN.store(2 * round + 1, Ordering::Release);
        while TURN.load(Ordering::Acquire) != 2 * round + 2 {}
    }
    let took = start.elapsed();
    answer.join().map_err(|_| "the probe's thread panicked")??;
    Ok(took.as_nanos() as f64 / f64::from(ROUNDS - ROUNDS / 10))
}

fn pin(cpu: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}
