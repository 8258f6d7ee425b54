//! One lane of a connection: its two halves, and how it is woken.

use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU8};
use std::sync::{Arc, Mutex};

use super::ahead::Ahead;
use crate::proto::Sent;
use crate::transport::inproc::{InprocBell, InprocEnd};
use crate::transport::shm::{Link, ShmEnd};
use crate::transport::{Receiver, Sender};

/// Bits of `Lane::armed`: the lane is watched for arrivals, for room, and a device will ring.
pub(super) const ARMED_READ: u8 = 1;
pub(super) const ARMED_WRITE: u8 = 2;
pub(super) const ARMED_DEVICE: u8 = 4;

pub(super) struct Lane {
    pub rx: Mutex<Box<dyn Receiver>>,
    pub tx: Mutex<Tx>,
    pub bell: Bell,
    pub armed: AtomicU8,
    /// The sending half has something left that did not fit.
    pub blocked: AtomicBool,
    /// The sending half waits for a device, or for pinned memory.
    pub waiting: AtomicBool,
    /// The receiving half waits for pinned memory.
    pub stalled: AtomicBool,
    /// Something was posted while the sending half was busy.
    pub dirty: AtomicBool,
}

pub(super) struct Tx {
    pub sender: Box<dyn Sender>,
    pub sent: Vec<Sent>,
    pub ahead: Ahead,
}

pub(super) enum Bell {
    Tcp(Arc<TcpStream>),
    Inproc(InprocBell),
    Shm(Arc<Link>),
}

/// What carries the frames.
pub(crate) enum Links {
    /// One socket a lane.
    Tcp { sockets: Vec<TcpStream>, zero_copy: bool },
    /// A pipe, and the socket that tells whether the peer lives.
    Inproc { end: InprocEnd, life: TcpStream },
    /// Shared memory, and the same.
    Shm { end: ShmEnd, life: TcpStream },
}

impl Lane {
    pub(super) fn new(rx: Box<dyn Receiver>, sender: Box<dyn Sender>, bell: Bell) -> Self {
        Lane {
            rx: Mutex::new(rx),
            tx: Mutex::new(Tx { sender, sent: Vec::new(), ahead: Ahead::default() }),
            bell,
            armed: AtomicU8::new(0),
            blocked: AtomicBool::new(false),
            waiting: AtomicBool::new(false),
            stalled: AtomicBool::new(false),
            dirty: AtomicBool::new(false),
        }
    }
}
