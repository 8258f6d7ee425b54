"""Bandwidth of NIXL one-sided writes between two processes of one host, host memory, UCX backend.

usage: nixl_write.py SIZE SECONDS CPU_TARGET CPU_INITIATOR
Prints MB/s (10^6 bytes). Two transfers of eight writes each are kept in flight, and neither side has NIXL's progress thread,
since both poll: the fastest arrangement found (one write per transfer reaches half of it).
"""

import os
import sys
import time

import numpy as np
from nixl_cu13._api import nixl_agent, nixl_agent_config


TRANSFERS, WRITES = 2, 8


def agent(name, cpu):
    os.sched_setaffinity(0, {cpu})
    return nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))


def register(me, length):
    """A buffer that NIXL knows, and its address."""
    data = np.ones(length, dtype=np.uint8)
    me.register_memory(me.get_reg_descs([(data.ctypes.data, length, 0, "")], "DRAM"))
    return data, data.ctypes.data


def send(fd, blob):
    os.write(fd, len(blob).to_bytes(4, "little") + blob)


def receive(fd):
    def exactly(length):
        blob = b""
        while len(blob) < length:
            part = os.read(fd, length - len(blob))
            if not part:
                sys.exit("the other process ended")
            blob += part
        return blob

    return exactly(int.from_bytes(exactly(4), "little"))


def target(size, cpu, outgoing, incoming):
    me = agent("target", cpu)
    _data, address = register(me, size * WRITES * TRANSFERS)
    send(outgoing, me.get_agent_metadata())
    send(outgoing, address.to_bytes(8, "little"))
    me.add_remote_agent(receive(incoming))
    os.set_blocking(incoming, False)
    while True:
        for _ in range(1000):
            me.get_new_notifs()  # drives UCX
        try:
            os.read(incoming, 1)  # told to end, or the initiator is gone
            return
        except BlockingIOError:
            pass


def initiator(size, seconds, cpu, outgoing, incoming):
    me = agent("initiator", cpu)
    _data, here = register(me, size * WRITES * TRANSFERS)
    peer = me.add_remote_agent(receive(incoming))
    there = int.from_bytes(receive(incoming), "little")
    send(outgoing, me.get_agent_metadata())

    def descriptors(base, transfer):
        offsets = range(transfer * WRITES * size, (transfer + 1) * WRITES * size, size)
        return me.get_xfer_descs([(base + offset, size, 0) for offset in offsets], "DRAM")

    name = peer.decode() if isinstance(peer, bytes) else peer
    handles = [me.initialize_xfer("WRITE", descriptors(here, k), descriptors(there, k), name) for k in range(TRANSFERS)]

    def wait(handle):
        while (state := me.check_xfer_state(handle)) == "PROC":
            pass
        if state != "DONE":
            sys.exit(f"NIXL write failed: {state}")

    def stream(seconds):
        """Keeps every transfer busy, oldest first, for `seconds`; MB/s."""
        start, transfers = time.perf_counter(), TRANSFERS
        for handle in handles:
            me.transfer(handle)
        while time.perf_counter() - start < seconds:
            for handle in handles:
                wait(handle)
                me.transfer(handle)
            transfers += TRANSFERS
        for handle in handles:
            wait(handle)
        return transfers * WRITES * size / (time.perf_counter() - start) / 1e6

    stream(0.1)
    print(f"{stream(seconds):.1f}", flush=True)
    os.write(outgoing, b"x")


def main():
    size, seconds, cpu_target, cpu_initiator = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    from_target, to_target = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(to_target[1])
        target(size, cpu_target, from_target[1], to_target[0])
    else:
        os.close(from_target[1])
        initiator(size, seconds, cpu_initiator, to_target[1], from_target[0])
        os.wait()
    os._exit(0)  # NIXL's own tear-down would wait for the peer


main()
