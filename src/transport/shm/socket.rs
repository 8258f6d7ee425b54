//! The Unix socket beside the shared memory: it wakes, and carries descriptors of memory files.
//!
//! It keeps packets apart, so that a reader never meets half of one. Every call says for itself that it must not wait: what the descriptor
//! itself says could be changed by a peer that shares it.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::io::{Errno, IoSlice, IoSliceMut};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use rustix::process::Pid;

/// What one side tells the other.
#[derive(Debug)]
pub(super) enum Packet {
    /// Look at the ring.
    Wake,
    /// A memory file, under the name by which frames will refer to it, and its length.
    Export { name: u64, len: u64, file: OwnedFd },
    /// The file of that name will not be referred to any more.
    Forget { name: u64 },
}

const WAKE: u64 = 1;
const EXPORT: u64 = 2;
const FORGET: u64 = 3;
/// Longest packet, in bytes.
const PACKET: usize = 64;

/// Sends a packet of a few bytes, with a descriptor if there is one.
pub(super) fn send(socket: BorrowedFd<'_>, bytes: &[u8], file: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files: Vec<BorrowedFd<'_>> = file.into_iter().collect();
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&files)) {
        return Err(Errno::NOBUFS);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags).map(|_| ())
}

/// Receives a packet. An empty one is the end.
pub(super) fn receive<'a>(socket: BorrowedFd<'_>, bytes: &'a mut [u8]) -> Result<(&'a [u8], Option<OwnedFd>), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, flags)?;
    let file = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    if got.flags.contains(ReturnFlags::CTRUNC) {
        // The kernel had no descriptor left for it.
        return Err(Errno::MFILE);
    }
    Ok((&bytes[..got.bytes], file))
}

pub(super) fn wake(socket: BorrowedFd<'_>) -> Result<(), Errno> {
    send(socket, &WAKE.to_le_bytes(), None)
}

pub(super) fn export(socket: BorrowedFd<'_>, name: u64, len: u64, file: BorrowedFd<'_>) -> Result<(), Errno> {
    let words = [EXPORT, name, len].map(u64::to_le_bytes).concat();
    send(socket, &words, Some(file))
}

pub(super) fn forget(socket: BorrowedFd<'_>, name: u64) -> Result<(), Errno> {
    send(socket, &[FORGET, name].map(u64::to_le_bytes).concat(), None)
}

/// The process at the other end, if it has a number in this namespace, and its user.
pub(super) fn peer(socket: BorrowedFd<'_>) -> Result<(Option<Pid>, u32), Errno> {
    let mut who = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // Not rustix's, whose type has no room for the zero that a process of another namespace has for a number.
    // SAFETY: writes at most `len` bytes to a place that has them.
    let answer = unsafe {
        let to = std::ptr::from_mut(&mut who).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, to, &mut len)
    };
    if answer != 0 {
        return Err(std::io::Error::last_os_error().raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error));
    }
    Ok((Pid::from_raw(who.pid), who.uid))
}

/// The next packet, if there is one.
///
/// # Errors
///
/// `Errno::PIPE` at the end, `Errno::BADMSG` for what is no packet.
pub(super) fn next(socket: &impl AsFd) -> Result<Option<Packet>, Errno> {
    let mut bytes = [0; PACKET];
    let (bytes, file) = match receive(socket.as_fd(), &mut bytes) {
        Ok((bytes, file)) => (bytes, file),
        Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
        Err(errno) => return Err(errno),
    };
    if bytes.is_empty() {
        return Err(Errno::PIPE);
    }
    let mut words = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()));
    match (words.next(), words.next(), words.next(), file) {
        (Some(WAKE), None, None, None) => Ok(Some(Packet::Wake)),
        (Some(EXPORT), Some(name), Some(len), Some(file)) => Ok(Some(Packet::Export { name, len, file })),
        (Some(FORGET), Some(name), None, None) => Ok(Some(Packet::Forget { name })),
        _ => Err(Errno::BADMSG),
    }
}
