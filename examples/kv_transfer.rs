//! Disaggregated inference: a prefill process hands a KV cache over to a decode process. Both caches are paged, so each block lies on some
//! page here and on another one there; all blocks of a round go with one vectored write and one notification.
//!
//! ```sh
//! cargo run --release --example kv_transfer                        # between two processes of this machine
//! cargo run --release --example kv_transfer -- --device cuda:0     # with both caches on a GPU
//! GPUSOCK_PATHS=tcp cargo run --release --example kv_transfer      # the same program over TCP
//! ```
//!
//! The program starts itself as the decode process, which exposes its cache once. In each round that process sends a page table; the
//! prefill process writes, and sends the checksums of what it wrote; the decode process compares and answers with a verdict.

use std::collections::BTreeSet;
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Parser;
use gpusock::{Access, Context, GpuBuf, GpuEndpoint, PathKind, RemoteBuf};
use tokio::process::{Child, Command};

/// Bytes of a page, and of the block on it.
const PAGE: usize = 16 << 10;
/// Blocks in a round. They fill half of a cache, so that a write to a wrong page can be seen.
const BLOCKS: usize = 4096;
const PAGES: usize = 2 * BLOCKS;
/// The notification that says that all blocks of a round are in place.
const WRITTEN: u64 = 1;
/// After a failure, how long the decode process may take to end by itself, which says more than a broken connection.
const GOODBYE: Duration = Duration::from_secs(2);

/// Moves a paged KV cache from a prefill process to a decode process.
#[derive(Parser)]
struct Args {
    /// Where both caches are: host or cuda:0.
    #[arg(long, default_value = "host")]
    device: String,
    /// Times that all blocks are moved, each time with other content between other pages.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Seed of content and pages.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Is the decode process of the prefill process at this address.
    #[arg(long, hide = true)]
    connect: Option<String>,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let args = Args::parse();
    let (role, result) = match &args.connect {
        Some(address) => ("decode", decode(address, &args).await),
        None => ("prefill", prefill(&args).await),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{role}: error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// What the prefill process knows of the rounds so far.
#[derive(Default)]
struct Outcome {
    gigabytes_per_second: Vec<f64>,
    paths: BTreeSet<PathKind>,
    wrong: u64,
}

async fn prefill(args: &Args) -> Result<()> {
    let context = Context::new()?;
    let cache = context.alloc(&args.device, (PAGES * PAGE) as u64)?;
    let listener = context.bind("127.0.0.1:0").await?;
    let mut child = start_decode(&listener.local_addr()?.to_string(), args)?;
    let endpoint = tokio::select! {
        endpoint = listener.accept() => endpoint?,
        status = child.wait() => bail!("the decode process ended before it connected: {}", status?),
    };

    let mut outcome = Outcome::default();
    if let Err(error) = transfer(&endpoint, &cache, args, &mut outcome).await {
        return Err(match tokio::time::timeout(GOODBYE, child.wait()).await {
            Ok(Ok(status)) => error.context(format!("the decode process ended: {status}")),
            _ => error,
        });
    }
    let Outcome { gigabytes_per_second: mut rates, paths, wrong } = outcome;
    rates.sort_by(f64::total_cmp);
    let median = (rates[(rates.len() - 1) / 2] + rates[rates.len() / 2]) / 2.0;
    let paths: Vec<_> = paths.iter().map(|path| path.name()).collect();
    let (rounds, moved) = (args.rounds, (BLOCKS * PAGE) as f64 / 1e6);
    println!("{rounds} rounds of {BLOCKS} blocks, {moved:.1} MB each, path {}, median {median:.2} GB/s", paths.join(" and "));
    ensure!(wrong == 0, "{wrong} checksums were wrong");
    let status = child.wait().await.context("waiting for the decode process to end")?;
    ensure!(status.success(), "the decode process ended: {status}");
    Ok(())
}

/// All rounds, at the prefill process.
async fn transfer(endpoint: &GpuEndpoint, cache: &GpuBuf, args: &Args, outcome: &mut Outcome) -> Result<()> {
    let (descriptor, _) = endpoint.recv_bytes().await.context("waiting for the descriptor of the other cache")?;
    let remote = RemoteBuf::from_bytes(&descriptor)?;
    // The decode process draws its pages from the seed itself.
    let mut random = Random(!args.seed);
    let mut image = vec![0; PAGES * PAGE];
    for round in 1..=args.rounds {
        let pages = scatter(&mut random);
        // Older blocks stay on the other pages, so that a read from a wrong one can be seen.
        let sums: Vec<_> = pages.iter().map(|&page| fill(&mut image[range(page)], &mut random)).collect();
        cache.copy_from_slice(0, &image)?;
        push(endpoint, cache, &pages, &sums, &remote, outcome).await.with_context(|| format!("round {round}"))?;
    }
    Ok(())
}

/// One round: writes the blocks on these pages to where the decode process wants them.
async fn push(
    endpoint: &GpuEndpoint,
    cache: &GpuBuf,
    pages: &[u64],
    sums: &[u64],
    remote: &RemoteBuf,
    outcome: &mut Outcome,
) -> Result<()> {
    let table = receive(endpoint, BLOCKS).await.context("waiting for the page table")?;
    ensure!(table.iter().all(|&page| page < PAGES as u64), "the page table names a page that is none");
    let bytes = |page| page * PAGE as u64..(page + 1) * PAGE as u64;
    let piece = |(&from, &to): (&u64, &u64)| Ok((cache.slice(bytes(from)), remote.slice(bytes(to))?));
    let pieces = pages.iter().zip(&table).map(piece).collect::<Result<Vec<_>>>()?;

    let start = Instant::now();
    let receipt = endpoint.write_remote_vectored(pieces).notify(WRITTEN).await.context("writing the blocks")?;
    outcome.gigabytes_per_second.push(receipt.bytes as f64 / 1e9 / start.elapsed().as_secs_f64());
    outcome.paths.insert(receipt.path);

    endpoint.send_bytes(to_bytes(sums)).await.context("sending the checksums")?;
    let wrong = receive(endpoint, 2).await.context("waiting for the verdict")?;
    if wrong != [0, 0] {
        eprintln!("round {}: {} blocks are wrong, and {} other pages", outcome.gigabytes_per_second.len(), wrong[0], wrong[1]);
    }
    outcome.wrong += wrong.iter().sum::<u64>();
    Ok(())
}

async fn decode(address: &str, args: &Args) -> Result<()> {
    let context = Context::new()?;
    let endpoint = context.connect(address).await?;
    // Memory that was just allocated is zero.
    let cache = context.alloc(&args.device, (PAGES * PAGE) as u64)?;
    let lease = endpoint.expose(&cache, Access::WRITE)?;
    endpoint.send_bytes(lease.to_bytes()).await.context("sending the descriptor")?;

    let mut random = Random(args.seed);
    let mut image = vec![0; PAGES * PAGE];
    for round in 1..=args.rounds {
        let pages = scatter(&mut random);
        pull(&endpoint, &cache, &pages, &mut image).await.with_context(|| format!("round {round}"))?;
    }
    endpoint.close().await.context("closing")
}

/// One round: has blocks written to these pages, checks all pages, and clears them.
async fn pull(endpoint: &GpuEndpoint, cache: &GpuBuf, pages: &[u64], image: &mut [u8]) -> Result<()> {
    endpoint.send_bytes(to_bytes(pages)).await.context("sending the page table")?;
    endpoint.notified(WRITTEN, 1).await.context("waiting for the blocks")?;
    let sums = receive(endpoint, BLOCKS).await.context("waiting for the checksums")?;

    let blank = checksum(&[0; PAGE]);
    // The checksum of its block, for each page that has one.
    let mut blocks = vec![None; PAGES];
    pages.iter().zip(sums).for_each(|(&page, sum)| blocks[page as usize] = Some(sum));
    cache.copy_to_slice(0, image)?;
    let mut wrong = [0, 0];
    for (page, block) in image.chunks_exact(PAGE).zip(&blocks) {
        wrong[usize::from(block.is_none())] += u64::from(checksum(page) != block.unwrap_or(blank));
    }
    // The next page table goes out only when every page is zero again.
    image.fill(0);
    cache.copy_from_slice(0, image)?;
    endpoint.send_bytes(to_bytes(&wrong)).await.context("sending the verdict")?;
    Ok(())
}

/// Starts this program as the decode process. It does not outlive this one.
fn start_decode(address: &str, args: &Args) -> Result<Child> {
    let program = std::env::current_exe().context("finding this program's file")?;
    let mut command = Command::new(program);
    command.args(["--connect", address, "--device", &args.device]);
    command.args(["--rounds", &args.rounds.to_string(), "--seed", &args.seed.to_string()]);
    command.stdin(Stdio::null()).kill_on_drop(true).spawn().context("starting the decode process")
}

/// A page of its own for each block.
fn scatter(random: &mut Random) -> Vec<u64> {
    let mut pages: Vec<u64> = (0..PAGES as u64).collect();
    for i in (1..PAGES).rev() {
        pages.swap(i, (random.next() % (i as u64 + 1)) as usize);
    }
    pages.truncate(BLOCKS);
    pages
}

/// Where a page lies in a cache.
fn range(page: u64) -> std::ops::Range<usize> {
    page as usize * PAGE..(page as usize + 1) * PAGE
}

/// Makes a new block, and answers its checksum.
fn fill(block: &mut [u8], random: &mut Random) -> u64 {
    block.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&random.next().to_le_bytes()));
    checksum(block)
}

/// As FNV-1a, but eight bytes at a time. The rotation brings the high bits back to the low ones.
fn checksum(bytes: &[u8]) -> u64 {
    words(bytes).fold(0xcbf2_9ce4_8422_2325, |sum, word| (sum ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(29))
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks_exact(8).map(|word| word.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte)))
}

fn to_bytes(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

/// Receives a message of so many numbers.
async fn receive(endpoint: &GpuEndpoint, count: usize) -> Result<Vec<u64>> {
    let (bytes, _) = endpoint.recv_bytes().await?;
    ensure!(bytes.len() == 8 * count, "a message of {} bytes came instead of {count} numbers", bytes.len());
    Ok(words(&bytes).collect())
}

/// SplitMix64 (Steele, Lea and Flood, 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}
