//! The server: holds the weights, applies the gradients.

use std::cell::RefCell;
use std::io::{IsTerminal, Write};
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use gpusock::{Access, Context, GpuBuf, GpuEndpoint, PathKind};
use tokio::task::{JoinSet, LocalSet};

use crate::Args;
use crate::data::{self, Image};
use crate::net::{self, Adam, PARAMETERS};
use crate::worker::{PUSHED, STOP};

/// How often the progress is shown.
const SHOW: Duration = Duration::from_millis(300);

/// What all workers share. One thread serves them, so a cell is enough.
struct Model {
    weights: Vec<f32>,
    /// The same, where the workers read them.
    shared: GpuBuf,
    adam: Adam,
    updates: u64,
    wanted: u64,
    bytes: u64,
    path: Option<PathKind>,
    progress: Progress,
    test: Vec<Image>,
}

struct Progress {
    shown: Instant,
    terminal: bool,
}

pub async fn run(args: &Args) -> Result<()> {
    let context = Context::new()?;
    let listener = context.bind(args.listen.as_deref().unwrap_or("127.0.0.1:0")).await?;
    let address = listener.local_addr()?;
    let weights = net::initial();
    let shared = context.alloc(args.device.as_str(), 4 * PARAMETERS as u64)?;
    shared.copy_from_slice(0, &net::to_bytes(&weights))?;
    let model = Rc::new(RefCell::new(Model {
        weights,
        shared,
        adam: Adam::new(),
        updates: 0,
        wanted: args.updates,
        bytes: 0,
        path: None,
        progress: Progress { shown: Instant::now(), terminal: std::io::stdout().is_terminal() },
        test: data::load()?.1,
    }));

    let mut children = Children(Vec::new());
    if args.listen.is_some() {
        println!("listening {address}, waiting for {} workers", args.workers);
    } else {
        for _ in 0..args.workers {
            children.0.push(start_worker(&address.to_string(), &args.device)?);
        }
        println!("{} workers, processes {}", args.workers, children.ids());
    }

    let local = LocalSet::new();
    let lost = local.run_until(serve(args, &context, &listener, &model)).await?;
    let model = model.borrow();
    model.progress.end();
    if model.updates < model.wanted {
        bail!("all workers are lost after {} of {} updates: {}", model.updates, model.wanted, lost.join("; "));
    }
    let accuracy = net::accuracy(&model.weights, &model.test);
    let path = model.path.map_or("none", PathKind::name);
    let moved = model.bytes as f64 / 1e6;
    println!("test accuracy {accuracy:.3}, {} updates, {moved:.1} MB moved, path {path}", model.updates);
    ensure!(accuracy >= args.target, "the accuracy is below {}", args.target);
    Ok(())
}

/// Serves workers until the training is over. Answers why workers were lost.
async fn serve(
    args: &Args,
    context: &Context,
    listener: &gpusock::GpuListener,
    model: &Rc<RefCell<Model>>,
) -> Result<Vec<String>> {
    let mut tasks = JoinSet::new();
    for worker in 0..args.workers {
        let endpoint = tokio::select! {
            endpoint = listener.accept() => endpoint?,
            // A worker that does not even come is as good as lost.
            () = tokio::time::sleep(Duration::from_secs(30)), if args.listen.is_none() => bail!("worker {worker} did not come"),
        };
        let slot = context.alloc(args.device.as_str(), 4 * PARAMETERS as u64)?;
        let (model, workers) = (Rc::clone(model), args.workers);
        tasks.spawn_local(async move {
            let result = attend(&endpoint, &slot, worker, workers, &model).await;
            // The endpoint and the slot are freed here, whatever became of the worker.
            result.map_err(|error| format!("worker {worker} lost: {error:#}"))
        });
    }
    let mut lost = Vec::new();
    while let Some(ended) = tasks.join_next().await {
        if let Err(why) = ended.context("a task failed")? {
            model.borrow().progress.end();
            eprintln!("{why}");
            lost.push(why);
        }
    }
    Ok(lost)
}

/// Serves one worker.
async fn attend(endpoint: &GpuEndpoint, slot: &GpuBuf, worker: u32, workers: u32, model: &RefCell<Model>) -> Result<()> {
    // Dropping these takes the worker's access away.
    let weights_lease = endpoint.expose(&model.borrow().shared, Access::READ)?;
    let slot_lease = endpoint.expose(slot, Access::WRITE)?;
    let mut welcome = Vec::with_capacity(crate::worker::WELCOME);
    welcome.extend(worker.to_le_bytes());
    welcome.extend(workers.to_le_bytes());
    welcome.extend_from_slice(&weights_lease.to_bytes());
    welcome.extend_from_slice(&slot_lease.to_bytes());
    endpoint.send_bytes(welcome).await?;

    let mut bytes = vec![0; 4 * PARAMETERS];
    let mut gradient = vec![0.0; PARAMETERS];
    loop {
        endpoint.notified(PUSHED, 1).await?;
        slot.copy_to_slice(0, &mut bytes)?;
        net::from_bytes(&bytes, &mut gradient);
        let answer = model.borrow_mut().apply(&gradient)?;
        let receipt = endpoint.send_bytes(answer.to_le_bytes().to_vec()).await?;
        model.borrow_mut().path = Some(receipt.path);
        if answer == STOP {
            break;
        }
    }
    endpoint.closed().await;
    let stats = endpoint.stats();
    model.borrow_mut().bytes += stats.bytes_sent + stats.bytes_received;
    Ok(())
}

impl Model {
    /// Applies a gradient. Answers its number, or `STOP`.
    fn apply(&mut self, gradient: &[f32]) -> Result<u64> {
        if self.updates < self.wanted {
            self.adam.apply(&mut self.weights, gradient);
            self.shared.copy_from_slice(0, &net::to_bytes(&self.weights))?;
            self.updates += 1;
            if self.progress.shown.elapsed() >= SHOW {
                self.progress.show(self.updates, self.wanted, net::accuracy(&self.weights, &self.test));
            }
        }
        Ok(if self.updates < self.wanted { self.updates } else { STOP })
    }
}

impl Progress {
    fn show(&mut self, updates: u64, wanted: u64, accuracy: f32) {
        self.shown = Instant::now();
        if self.terminal {
            print!("\r{updates} of {wanted} updates, test accuracy {accuracy:.3} ");
            // A terminal that went away is no reason to stop training.
            let _ = std::io::stdout().flush();
        } else {
            println!("{updates} of {wanted} updates, test accuracy {accuracy:.3}");
        }
    }

    fn end(&self) {
        if self.terminal {
            println!();
        }
    }
}

fn start_worker(address: &str, device: &str) -> Result<Child> {
    let program = std::env::current_exe().context("finding this program's file")?;
    let mut command = Command::new(program);
    command.args(["--connect", address, "--device", device]).stdin(Stdio::null());
    command.spawn().context("starting a worker")
}

/// The workers that were started here. They do not outlive the server.
struct Children(Vec<Child>);

impl Children {
    fn ids(&self) -> String {
        let ids: Vec<_> = self.0.iter().map(|child| child.id().to_string()).collect();
        ids.join(", ")
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
