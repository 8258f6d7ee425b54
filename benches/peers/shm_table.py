"""Names the samples of benches/peers/shm.sh, or prints its table. usage: shm_table.py [SAMPLES.tsv NOTES]

A sample is `name, value, probe before, probe after, busy`; table.py says what the probe is, what busy is, and why a row compares
medians of one class. Where too few samples of a row are undisturbed it is made of all of them, and says so.
"""

import statistics
import sys
from collections import defaultdict

BUSY = 10
POSIX, SYSV, ALL = "posix,self", "posix,sysv,self", "all"
MIB, MIB64 = 1 << 20, 64 << 20
STREAMS = [f"ucx:{test}:{tls}:{MIB64}" for test in ("tag_bw", "ucp_put_bw", "ucp_get") for tls in (SYSV, ALL)]
PUTS = {size: [f"ucx:ucp_put_bw:{tls}:{size}" for tls in (SYSV, ALL)] for size in (MIB, MIB64)}
# work, ours, peers (the best counts), reach (at most for a latency, at least for a bandwidth). `perf` spins adaptively unless
# told otherwise; UCX and NIXL always spin.
ROWS = [
    ("8 B one way", "gpusock:send-lat:adaptive:8", [f"ucx:tag_lat:{POSIX}:8"], 1.0),
    ("8 B one way, spinning", "gpusock:send-lat:always:8", [f"ucx:tag_lat:{POSIX}:8"], 1.0),
    ("4 KiB one way", "gpusock:send-lat:adaptive:4096", [f"ucx:ucp_am_lat:{POSIX}:4096"], 1.0),
    ("4 KiB one way, spinning", "gpusock:send-lat:always:4096", [f"ucx:ucp_am_lat:{POSIX}:4096"], 1.0),
    ("1 MiB send", f"gpusock:send-bw:adaptive:{MIB}", [f"ucx:tag_bw:{POSIX}:{MIB}"], 1.0),
    ("64 MiB send", f"gpusock:send-bw:adaptive:{MIB64}", STREAMS, 1.3),
    ("64 MiB send", f"gpusock:send-bw:adaptive:{MIB64}", [f"memcpy:::{MIB64}"], 0.95),
    ("8 B write_remote until complete", "gpusock:write-one:adaptive:8", ["nixl:write::8"], 0.3),
    ("8 B write_remote until complete, spinning", "gpusock:write-one:always:8", ["nixl:write::8"], 0.3),
    ("1 MiB write_remote", f"gpusock:write-bw:adaptive:{MIB}", PUTS[MIB], None),
    ("64 MiB write_remote", f"gpusock:write-bw:adaptive:{MIB64}", PUTS[MIB64], None),
]
NAMES = list(dict.fromkeys(name for _, ours, peers, _ in ROWS for name in [ours, *peers]))


def is_latency(name):
    return name.split(":")[1].endswith(("_lat", "-lat", "-one"))


def title(name):
    program, test, tls, _ = name.split(":")
    return {"ucx": f"UCX {test} ({tls})", "nixl": "NIXL write", "memcpy": "one memcpy"}[program]


def classify(samples):
    """{class: {name: [values]}} of the samples that nothing disturbed."""
    probes = sorted(p for s in samples for p in s[2:4])
    low, high = probes[len(probes) // 10], probes[len(probes) * 9 // 10]
    border = (low * high) ** 0.5 if high > 2 * low else float("inf")
    classes = defaultdict(lambda: defaultdict(list))
    for name, value, before, after, busy in samples:
        kinds = {"near" if probe < border else "far" for probe in (before, after)}
        if len(kinds) == 1 and busy <= BUSY:
            classes[kinds.pop()][name].append(value)
    return classes


def main():
    with open(sys.argv[1]) as lines:
        samples = [(name, *map(float, rest)) for name, *rest in (line.split("\t") for line in lines)]
    if not samples:
        sys.exit("nothing was measured")
    classes, every = classify(samples), defaultdict(list)
    for name, value, *_ in samples:
        every[name].append(value)
    table = [("work", "gpusock", "peer", "ratio", "reach", "met?")]
    for work, ours, peers, reach in ROWS:
        names = [ours, *(peer for peer in peers if peer in every)]
        if ours not in every or len(names) == 1:
            table.append((work, "-", " / ".join(map(title, peers)), "-", "-", "no samples"))
            continue
        count = lambda values: min(len(values.get(name, [])) for name in names)
        kind = max(classes, key=lambda kind: count(classes[kind]), default=None)
        disturbed = kind is None or 2 * count(classes[kind]) < count(every)
        values = every if disturbed else classes[kind]
        marks = ["disturbed"] if disturbed else [kind] if len(classes) > 1 else []
        latency = is_latency(ours)
        median = {name: statistics.median(values[name]) for name in names}
        best = (min if latency else max)(names[1:], key=median.get)
        mine, theirs = median[ours], median[best]
        figure = (lambda x: f"{x:.2f} µs") if latency else (lambda x: f"{x / 1000:.2f} GB/s")
        sign, met = ("≤", mine <= (reach or 0) * theirs) if latency else ("≥", mine >= (reach or 0) * theirs)
        goal = (f"{sign} {reach:.2f}", "yes" if met else "no") if reach else ("-", "-")
        place = ", ".join([*marks, f"n≥{count(values)}"])
        table.append((f"{work} [{place}]", figure(mine), f"{title(best)} {figure(theirs)}", f"{mine / theirs:.2f}", *goal))
    widths = [max(map(len, column)) for column in zip(*table)]
    for line in table:
        print(" | ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
    print("\nMedians; one way is half the round trip; until complete is from issue to completion, one at a time. 1 GB/s = 10^9 bytes per second.")
    if len(classes) > 1:
        print("The two CPUs share a cache (near) or do not (far), and that changed between samples.")
    left_out = len(samples) - sum(len(v) for kind in classes.values() for v in kind.values())
    if left_out:
        print(f"{left_out} of {len(samples)} samples disturbed: other programs, or a change from near to far.")
    with open(sys.argv[2]) as notes:
        print(notes.read(), end="")


if len(sys.argv) == 1:
    print(*NAMES, sep="\n")
else:
    main()
