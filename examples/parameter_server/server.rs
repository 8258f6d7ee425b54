//! The server: holds the weights, applies the gradients.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::process::{ExitStatus, Stdio};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gpusock::{Access, Context, GpuBuf, GpuEndpoint, GpuListener, PathKind};
use tokio::process::{Child, Command};
use tokio::task::{JoinError, JoinSet, LocalSet};

use crate::Args;
use crate::data::{self, Image};
use crate::net;
use crate::progress::Progress;
use crate::trainer::Trainer;
use crate::worker::{PUSHED, STOP};

/// When the training is over, a worker that does not say goodbye within this time is left behind.
const GOODBYE: Duration = Duration::from_secs(2);

/// A worker's task at its end: its number and what became of it.
type Ended = Result<(u32, Result<()>), JoinError>;

/// What all workers share. One thread serves them, so a cell is enough.
struct Model {
    trainer: Trainer,
    updates: u64,
    wanted: u64,
    bytes: u64,
    paths: BTreeSet<PathKind>,
    progress: Progress,
    test: Vec<Image>,
}

pub async fn run(args: &Args) -> Result<()> {
    let context = Context::new()?;
    let listener = context.bind(args.listen.as_deref().unwrap_or("127.0.0.1:0")).await?;
    let address = listener.local_addr()?.to_string();
    let model = Rc::new(RefCell::new(Model {
        trainer: Trainer::new(&context, &args.device)?,
        updates: 0,
        wanted: args.updates,
        bytes: 0,
        paths: BTreeSet::new(),
        progress: Progress::new(),
        test: data::load()?.1,
    }));

    let mut children = JoinSet::new();
    if args.listen.is_some() {
        println!("listening {address}, waiting for {} workers", args.workers);
    } else {
        let mut ids = Vec::new();
        for _ in 0..args.workers {
            let mut child = start_worker(&address, &args.device)?;
            let id = child.id().unwrap_or(0);
            ids.push(id.to_string());
            children.spawn(async move { (id, child.wait().await) });
        }
        println!("{} workers, processes {}", args.workers, ids.join(", "));
    }
    LocalSet::new().run_until(serve(args, &context, &listener, &model, &mut children)).await?;

    let mut model = model.borrow_mut();
    model.progress.end();
    ensure!(model.updates == model.wanted, "all workers are lost after {} of {} updates", model.updates, model.wanted);
    let accuracy = net::accuracy(&model.trainer.weights()?, &model.test);
    let paths: Vec<_> = model.paths.iter().map(|path| path.name()).collect();
    let paths = if paths.is_empty() { "unknown".to_owned() } else { paths.join(" and ") };
    let moved = model.bytes as f64 / 1e6;
    println!("test accuracy {accuracy:.3}, {} updates, {moved:.1} MB moved, path {paths}", model.updates);
    ensure!(accuracy >= args.target, "the accuracy is below {}", args.target);
    Ok(())
}

/// Serves workers until the training is over or no worker is left.
async fn serve(
    args: &Args,
    context: &Context,
    listener: &GpuListener,
    model: &Rc<RefCell<Model>>,
    children: &mut JoinSet<(u32, std::io::Result<ExitStatus>)>,
) -> Result<()> {
    // Numbers that no worker has. One that was lost leaves its number to the next that comes.
    let mut free: BTreeSet<u32> = (0..args.workers).collect();
    let mut endpoints = BTreeMap::new();
    let mut tasks = JoinSet::new();
    let mut came = 0;
    while !model.borrow().is_done() {
        tokio::select! {
            endpoint = listener.accept(), if !free.is_empty() => {
                let (endpoint, model, workers) = (endpoint?, Rc::clone(model), args.workers);
                let Some(worker) = free.pop_first() else { continue };
                let slot = model.borrow().trainer.slot(context)?;
                endpoints.insert(worker, endpoint.clone());
                came += 1;
                // Its end frees the slot, whatever became of the worker.
                tasks.spawn_local(async move { (worker, attend(&endpoint, &slot, worker, workers, &model).await) });
            }
            Some(ended) = tasks.join_next() => {
                let worker = model.borrow_mut().see_off(ended, &mut endpoints)?;
                free.insert(worker);
            }
            Some(Ok((id, Ok(status)))) = children.join_next() => {
                if !status.success() {
                    model.borrow_mut().progress.note(&format!("process {id} ended: {status}"));
                }
            }
        }
        // Who else could come: a process that was started here and runs, or the first workers from other machines.
        let more = if args.listen.is_none() { !children.is_empty() } else { came < args.workers };
        if tasks.is_empty() && !more {
            return Ok(());
        }
    }
    // The other workers learn from the answer to their next gradient that it is over.
    let goodbyes = async {
        while let Some(ended) = tasks.join_next().await {
            model.borrow_mut().see_off(ended, &mut endpoints)?;
        }
        Ok(())
    };
    let in_time = tokio::time::timeout(GOODBYE, goodbyes).await;
    for (worker, endpoint) in endpoints {
        let mut model = model.borrow_mut();
        model.count(&endpoint);
        model.progress.note(&format!("worker {worker} left behind: it does not answer"));
    }
    in_time.unwrap_or(Ok(()))
}

/// Serves one worker.
async fn attend(endpoint: &GpuEndpoint, slot: &GpuBuf, worker: u32, workers: u32, model: &RefCell<Model>) -> Result<()> {
    // Dropping these takes the worker's access away.
    let weights_lease = endpoint.expose(model.borrow().trainer.shared(), Access::READ)?;
    let slot_lease = endpoint.expose(slot, Access::WRITE)?;
    endpoint.send_bytes([u64::from(worker).to_le_bytes(), u64::from(workers).to_le_bytes()].concat()).await?;
    endpoint.send_bytes(weights_lease.to_bytes()).await?;
    endpoint.send_bytes(slot_lease.to_bytes()).await?;

    loop {
        // The worker writes the slot again only when it has the answer, so that the slot is quiet while it is read.
        endpoint.notified(PUSHED, 1).await?;
        let answer = model.borrow_mut().apply(slot)?;
        endpoint.send_bytes(answer.to_le_bytes().to_vec()).await?;
        if answer == STOP {
            break;
        }
    }
    let (paths, _) = endpoint.recv_bytes().await?;
    for path in String::from_utf8_lossy(&paths).split_whitespace() {
        model.borrow_mut().paths.insert(path.parse()?);
    }
    endpoint.closed().await;
    Ok(())
}

impl Model {
    fn is_done(&self) -> bool {
        self.updates >= self.wanted
    }

    fn count(&mut self, endpoint: &GpuEndpoint) {
        let stats = endpoint.stats();
        self.bytes += stats.bytes_sent + stats.bytes_received;
    }

    /// Says what became of a worker, and drops its endpoint.
    fn see_off(&mut self, ended: Ended, endpoints: &mut BTreeMap<u32, GpuEndpoint>) -> Result<u32> {
        let (worker, result) = ended.context("a task failed")?;
        if let Some(endpoint) = endpoints.remove(&worker) {
            self.count(&endpoint);
        }
        if let Err(why) = result {
            self.progress.note(&format!("worker {worker} lost: {why:#}"));
        }
        Ok(worker)
    }

    /// Applies the gradient in a slot. Answers its number, or `STOP`.
    fn apply(&mut self, slot: &GpuBuf) -> Result<u64> {
        if !self.is_done() {
            self.trainer.apply(slot)?;
            self.updates += 1;
            if self.progress.is_due() {
                self.progress.show(self.updates, self.wanted, net::accuracy(&self.trainer.weights()?, &self.test));
            }
        }
        Ok(if self.is_done() { STOP } else { self.updates })
    }
}

/// Starts this program as a worker. It does not outlive the server.
fn start_worker(address: &str, device: &str) -> Result<Child> {
    let program = std::env::current_exe().context("finding this program's file")?;
    let mut command = Command::new(program);
    command.args(["--connect", address, "--device", device]).stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
    command.spawn().context("starting a worker")
}
