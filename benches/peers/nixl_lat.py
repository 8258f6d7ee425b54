"""Latency of one NIXL one-sided write between two processes of one host until it is complete, host memory, UCX backend.

usage: nixl_lat.py SIZE COUNT CPU_TARGET CPU_INITIATOR
Prints the median in µs. The calls go to NIXL's binding, past the Python class around it, and neither side has NIXL's progress
thread, since both poll. A small write is complete when the first call returns; about 0.5 µs of the figure is Python's (that call
and the clock).
"""

import os
import statistics
import sys
from multiprocessing import Pipe
from time import perf_counter_ns

import numpy as np
from nixl_cu13 import _bindings as binding
from nixl_cu13._api import nixl_agent, nixl_agent_config


def agent(name, cpu, size):
    """An agent, a buffer that it knows, and the description of that."""
    os.sched_setaffinity(0, {cpu})
    me = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    data = np.ones(size, dtype=np.uint8)
    me.register_memory(me.get_reg_descs([(data.ctypes.data, size, 0, "")], "DRAM"))
    return me, data


def target(size, cpu, pipe):
    me, data = agent("target", cpu, size)
    pipe.send((me.get_agent_metadata(), data.ctypes.data))
    me.add_remote_agent(pipe.recv())
    while not pipe.poll():  # told to end, or the initiator is gone
        for _ in range(1000):
            me.get_new_notifs()  # drives UCX


def initiator(size, count, cpu, pipe):
    me, data = agent("initiator", cpu, size)
    metadata, there = pipe.recv()
    peer = me.add_remote_agent(metadata)
    pipe.send(me.get_agent_metadata())
    local, remote = (me.get_xfer_descs([(address, size, 0)], "DRAM") for address in (data.ctypes.data, there))
    request = me.initialize_xfer("WRITE", local, remote, peer.decode() if isinstance(peer, bytes) else peer)
    post, check, handle = me.agent.postXferReq, me.agent.getXferStatus, request._handle
    times = []
    for _ in range(count + count // 10):
        start = perf_counter_ns()
        state = post(handle, b"")
        while state == binding.NIXL_IN_PROG:
            state = check(handle)
        times.append(perf_counter_ns() - start)
        if state != binding.NIXL_SUCCESS:
            sys.exit(f"NIXL write failed: {state}")
    print(f"{statistics.median(times[count // 10 :]) / 1e3:.3f}", flush=True)
    pipe.send(None)


def main():
    size, count, cpu_target, cpu_initiator = map(int, sys.argv[1:5])
    ours, theirs = Pipe()
    if os.fork() == 0:
        ours.close()
        target(size, cpu_target, theirs)
    else:
        theirs.close()
        initiator(size, count, cpu_initiator, ours)
        os.wait()
    os._exit(0)  # NIXL's own tear-down would wait for the peer


main()
