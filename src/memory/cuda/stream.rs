//! Streams for copies, and how their progress is seen.
//!
//! Behind each piece of work a stream writes the next number to a word in pinned host memory (`cuStreamWriteValue32`), so a look at whether it
//! is done is a load. On an H200 that sees an 8-byte copy done after 9.6 µs, an event query after 10.2 µs, a host callback after 23.7 µs.
//! The callback is what a waiter that sleeps is woken by.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use super::Device;
use super::driver::{DevicePtr, Raw, Table, code};
use crate::error::{Error, Result};
use crate::reactor::lock;

/// Where the bytes of a copy go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    ToDevice,
    ToHost,
    Within,
}

/// Streams per direction: two, so that a short copy need not wait behind a long one's submission.
const PER_DIRECTION: usize = 2;
/// Streams for work that has to wait for a stream of the user's first, so that nothing else waits with it.
const WAITING: usize = 16;
const STREAMS: usize = 3 * PER_DIRECTION + WAITING;
/// Between two words, in bytes: a cache line each.
const STRIDE: usize = 64;
/// Looks between two questions to the driver whether it has failed, and milliseconds after which a look asks in any case.
const ASK_EVERY: u32 = 1024;
const ASK_AFTER: u64 = 100;

/// `CU_STREAM_NON_BLOCKING`, `CU_EVENT_DISABLE_TIMING`.
const NON_BLOCKING: u32 = 1;
const NO_TIMING: u32 = 2;

/// Called when work is done, from a thread of the driver's, on which no call to it is allowed.
pub(crate) type Ring = Arc<dyn Fn() + Send + Sync>;

#[derive(Default)]
pub(crate) struct Streams {
    set: OnceLock<Result<Box<[Stream]>>>,
    turn: AtomicUsize,
    /// Events that are not in use.
    spare: Mutex<Vec<usize>>,
}

pub(crate) struct Stream {
    device: &'static Device,
    handle: Raw,
    word: &'static AtomicU32,
    word_on_device: DevicePtr,
    queue: Mutex<Queue>,
    /// Whether any work has an event behind it instead of a number that the device writes.
    by_event: AtomicBool,
    looks: AtomicU32,
    /// When the driver was asked last.
    asked: AtomicU64,
}

#[derive(Default)]
struct Queue {
    /// The number of the last work.
    tail: u32,
    /// Where the stream cannot write numbers, an event behind each piece of work.
    events: Option<VecDeque<(u32, Event)>>,
}

// SAFETY: the handle is the driver's, whose functions are thread-safe.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

/// A piece of work that was given to a stream.
#[derive(Clone, Copy)]
pub(crate) struct Ticket {
    stream: &'static Stream,
    number: u32,
}

impl std::fmt::Debug for Ticket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ticket").field("device", &self.stream.device.ordinal).field("number", &self.number).finish()
    }
}

/// A point in a stream.
pub(crate) struct Event {
    device: &'static Device,
    handle: Raw,
}

// SAFETY: the handle is the driver's, whose functions are thread-safe.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Event").field("device", &self.device.ordinal).finish_non_exhaustive()
    }
}

impl Event {
    /// Records what `stream` has been given so far. The device's context must be current.
    fn record(device: &'static Device, stream: Raw) -> Result<Event> {
        let table = &device.driver.table;
        let spare = lock(&device.streams.spare).pop();
        let handle = match spare {
            Some(handle) => handle as Raw,
            None => {
                let mut handle = std::ptr::null_mut();
                // SAFETY: writes to a valid place.
                device.check(unsafe { (table.event_create)(&mut handle, NO_TIMING) }, "cuEventCreate")?;
                handle
            }
        };
        let event = Event { device, handle };
        // SAFETY: the event is ours; that the stream is valid is the caller's word.
        device.check(unsafe { (table.event_record)(handle, stream) }, "cuEventRecord")?;
        Ok(event)
    }

    /// Whether what it marks has been reached. A device that has failed reaches everything.
    pub(crate) fn is_reached(&self) -> bool {
        // SAFETY: the event is ours.
        let query = || unsafe { (self.device.driver.table.event_query)(self.handle) };
        match query() {
            code::SUCCESS => true,
            code::NOT_READY => false,
            // Perhaps it is only that no context is current.
            _ => self.device.enter().map_or(true, |_current| query() != code::NOT_READY),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // A few are kept: making one costs more than recording it.
        let mut spare = lock(&self.device.streams.spare);
        if spare.len() < 64 {
            spare.push(self.handle as usize);
            return;
        }
        drop(spare);
        // SAFETY: the event is ours and used nowhere else. The driver itself waits for its use.
        unsafe { (self.device.driver.table.event_destroy)(self.handle) };
    }
}

impl Device {
    /// Whether the device still works.
    pub(crate) fn ask(&'static self) -> Result<()> {
        self.usable()?;
        // A stream of our own: to ask the default one would break the capture of a graph elsewhere in the process.
        self.stream_set()?.first().map_or(Ok(()), Stream::query)
    }

    fn stream_set(&'static self) -> Result<&'static [Stream]> {
        self.streams.set.get_or_init(|| self.open_streams()).as_deref().map_err(Clone::clone)
    }

    fn open_streams(&'static self) -> Result<Box<[Stream]>> {
        let table = &self.driver.table;
        let _current = self.enter()?;
        let (mut words, mut words_on_device) = (std::ptr::null_mut(), 0);
        // SAFETY: each call writes to a valid place. The memory is never freed, so words may be referred to for good; 3 is "portable" and
        // "mapped".
        unsafe {
            self.check((table.host_alloc)(&mut words, STREAMS * STRIDE, 3), "cuMemHostAlloc")?;
            self.check((table.host_device_pointer)(&mut words_on_device, words, 0), "cuMemHostGetDevicePointer")?;
            std::ptr::write_bytes(words.cast::<u8>(), 0, STREAMS * STRIDE);
        }
        let mut set = Vec::with_capacity(STREAMS);
        for i in 0..STREAMS {
            let mut handle = std::ptr::null_mut();
            // SAFETY: writes to a valid place.
            self.check(unsafe { (table.stream_create)(&mut handle, NON_BLOCKING) }, "cuStreamCreate")?;
            // SAFETY: within the allocation, aligned, zeroed, and shared with the device only, which writes whole words.
            let word = unsafe { AtomicU32::from_ptr(words.cast::<u8>().add(i * STRIDE).cast()) };
            let word_on_device = words_on_device + (i * STRIDE) as u64;
            // The number zero says whether this driver and device can do it.
            // SAFETY: the address is that of the word.
            let works = table.write_value.is_some_and(|write| unsafe { write(handle, word_on_device, 0, 0) } == code::SUCCESS);
            if !works && i == 0 {
                tracing::info!(device = self.ordinal, "the driver cannot write values behind copies; events are queried instead");
            }
            let queue = Queue { tail: 0, events: (!works).then(VecDeque::new) };
            set.push(Stream {
                device: self,
                handle,
                word,
                word_on_device,
                queue: Mutex::new(queue),
                by_event: AtomicBool::new(!works),
                looks: AtomicU32::new(0),
                asked: AtomicU64::new(0),
            });
        }
        Ok(set.into())
    }

    /// Gives work to a stream of this direction, behind `after`. Memory that the work uses must stay until the ticket is done.
    pub(crate) fn submit(
        &'static self,
        direction: Direction,
        after: &[Arc<Event>],
        work: impl FnOnce(&Table, Raw) -> Result<()>,
    ) -> Result<Ticket> {
        self.usable()?;
        let set = self.stream_set()?;
        let _current = self.enter()?;
        let turn = self.streams.turn.fetch_add(1, Ordering::Relaxed);
        let waits = after.iter().any(|event| !event.is_reached());
        let stream = if waits {
            // One on which nothing waits, if there is one.
            let waiting = &set[3 * PER_DIRECTION..];
            let idle = waiting.iter().find(|stream| stream.is_idle());
            idle.unwrap_or(&waiting[turn % WAITING])
        } else {
            &set[direction as usize * PER_DIRECTION + turn % PER_DIRECTION]
        };
        stream.submit(if waits { after } else { &[] }, work)
    }

    /// Records what a stream of the user's has been given so far.
    ///
    /// # Safety
    ///
    /// `stream` is a valid stream of this device's primary context.
    pub(crate) unsafe fn record(&'static self, stream: Raw) -> Result<Event> {
        let _current = self.enter()?;
        Event::record(self, stream)
    }

    /// An event that is reached when an event of the user's is.
    ///
    /// # Safety
    ///
    /// `event` is a valid event.
    #[cfg_attr(not(feature = "cudarc"), allow(dead_code))]
    pub(crate) unsafe fn capture(&'static self, event: Raw) -> Result<Event> {
        let set = self.stream_set()?;
        let _current = self.enter()?;
        let waiting = &set[3 * PER_DIRECTION..];
        let turn = self.streams.turn.fetch_add(1, Ordering::Relaxed);
        let stream = waiting.iter().find(|stream| stream.is_idle()).unwrap_or(&waiting[turn % WAITING]);
        let _queue = lock(&stream.queue);
        // SAFETY: both handles are valid.
        self.check(unsafe { (self.driver.table.stream_wait)(stream.handle, event, 0) }, "cuStreamWaitEvent")?;
        Event::record(self, stream.handle)
    }

    /// Makes a stream of the user's wait for an event.
    ///
    /// # Safety
    ///
    /// `stream` is a valid stream.
    pub(crate) unsafe fn make_wait(&'static self, stream: Raw, event: &Event) -> Result<()> {
        let _current = self.enter()?;
        // SAFETY: both handles are valid.
        self.check(unsafe { (self.driver.table.stream_wait)(stream, event.handle, 0) }, "cuStreamWaitEvent")
    }
}

impl Stream {
    fn is_idle(&self) -> bool {
        self.queue.try_lock().is_ok_and(|queue| queue.tail == self.word.load(Ordering::Acquire))
    }

    /// The device's context must be current.
    fn submit(&'static self, after: &[Arc<Event>], work: impl FnOnce(&Table, Raw) -> Result<()>) -> Result<Ticket> {
        let (device, table) = (self.device, &self.device.driver.table);
        // Held until the number is behind the work: the order of the two is what a ticket means.
        let mut queue = lock(&self.queue);
        for event in after {
            // SAFETY: both handles are ours.
            device.check(unsafe { (table.stream_wait)(self.handle, event.handle, 0) }, "cuStreamWaitEvent")?;
        }
        work(table, self.handle)?;
        let number = queue.tail.wrapping_add(1);
        let marked = match (&mut queue.events, table.write_value) {
            (None, Some(write)) => {
                // SAFETY: the address is that of the word.
                device.check(unsafe { write(self.handle, self.word_on_device, number, 0) }, "cuStreamWriteValue32")
            }
            (events, _) => Event::record(device, self.handle).map(|event| {
                events.get_or_insert_default().push_back((number, event));
                self.by_event.store(true, Ordering::Release);
            }),
        };
        if let Err(error) = marked {
            // The work is under way, and nobody could tell when it is over: wait here.
            // SAFETY: the stream is ours.
            while unsafe { (table.stream_query)(self.handle) } == code::NOT_READY {
                std::thread::yield_now();
            }
            return Err(error);
        }
        queue.tail = number;
        Ok(Ticket { stream: self, number })
    }

    fn reached(&self, number: u32) -> bool {
        self.word.load(Ordering::Acquire).wrapping_sub(number) as i32 >= 0
    }

    /// What a look at the word does not show.
    fn ask(&self) -> Result<()> {
        let looks = self.looks.fetch_add(1, Ordering::Relaxed);
        if self.by_event.load(Ordering::Acquire) {
            // Waits for whoever else is at it: a look that follows a ring must see what rang.
            if let Some(events) = &mut lock(&self.queue).events {
                while events.front().is_some_and(|(_, event)| event.is_reached()) {
                    if let Some((number, _event)) = events.pop_front() {
                        self.word.store(number, Ordering::Release);
                    }
                }
            }
        }
        let now = coarse_millis();
        if looks % ASK_EVERY != 0 && now.saturating_sub(self.asked.load(Ordering::Relaxed)) < ASK_AFTER {
            return self.device.usable();
        }
        self.asked.store(now, Ordering::Relaxed);
        self.query()
    }

    fn query(&self) -> Result<()> {
        let _current = self.device.enter()?;
        // SAFETY: the stream is ours.
        match unsafe { (self.device.driver.table.stream_query)(self.handle) } {
            code::NOT_READY => Ok(()),
            answer => self.device.check(answer, "cuStreamQuery"),
        }
    }
}

impl Ticket {
    /// Whether the work is done.
    ///
    /// # Errors
    ///
    /// [`Error::Cuda`] if the device has failed. Nothing touches memory any more then.
    pub(crate) fn poll(&self) -> Result<bool> {
        if self.stream.reached(self.number) {
            return Ok(true);
        }
        self.stream.ask()?;
        Ok(self.stream.reached(self.number))
    }

    /// Waits on the CPU, for calls that are not asynchronous.
    pub(crate) fn wait(&self) -> Result<()> {
        let mut looks = 0u32;
        while !self.poll()? {
            looks = looks.saturating_add(1);
            if looks < 2000 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        Ok(())
    }

    /// Has `ring` called once when everything that its stream has now is done. It is not called if the device fails.
    pub(crate) fn ring(&self, ring: &Ring) -> Result<()> {
        unsafe extern "C" fn call(data: *mut c_void) {
            // SAFETY: made by `Box::into_raw` below, and called once.
            let ring = unsafe { Box::from_raw(data.cast::<Ring>()) };
            // Nothing may unwind into the driver.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(&**ring));
        }
        let device = self.stream.device;
        let _current = device.enter()?;
        let _queue = lock(&self.stream.queue);
        let data = Box::into_raw(Box::new(Arc::clone(ring))).cast::<c_void>();
        // SAFETY: the function gets what it was made for.
        let answer = unsafe { (device.driver.table.launch_host)(self.stream.handle, call, data) };
        device.check(answer, "cuLaunchHostFunc").inspect_err(|_| {
            // SAFETY: it was refused, so it will not be called.
            drop(unsafe { Box::from_raw(data.cast::<Ring>()) });
        })
    }
}

/// The kernel's tick, a few nanoseconds to read.
fn coarse_millis() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
    time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000
}

/// An error for what no device can do.
pub(crate) fn unsupported(what: impl Into<String>) -> Error {
    Error::Unsupported { what: what.into().into() }
}
