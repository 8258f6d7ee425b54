"""Prints the table of benches/peers/tcp.sh. usage: table.py SAMPLES.tsv NOTES

A sample is `congestion, name, value, probe before, probe after, busy`; the probe is a cache line's way between the two CPUs
and back, in ns; busy is the share of time in percent during which a program waited for a CPU. Virtual CPUs move between physical ones that share a cache or do not, and with that TCP moves by a factor of two. So
samples are put into classes by the probe, those during which it changed are left out, and a row compares medians of one class.
"""

import statistics
import sys
from collections import defaultdict

BUSY = 10
PEERS = {"ucx_tag": "UCX tag_bw", "ucx_put": "UCX ucp_put_bw", "nixl": "NIXL write"}
# work, ours, peers (the best counts), unit, target (at most for a latency, at least for a bandwidth)
ROWS = [
    ("8 B one way, spinning", "spin", {"ucx_lat": "UCX tag_lat"}, "µs", 1.0),
    ("8 B one way, spinning", "spin", {"raw_lat": "bare socket"}, "µs", 1.15),
    ("8 B one way, spin adaptive", "adaptive", {"spin": "gpusock spinning"}, "µs", 1.3),
    ("1 MiB send", "send", PEERS, "MB/s", 1.0),
    ("1 MiB write_remote", "write", PEERS, "MB/s", 1.0),
    ("1 MiB send", "send", {"iperf": "iperf3 -Z"}, "MB/s", 0.8),
    ("1 MiB write_remote", "write", {"iperf": "iperf3 -Z"}, "MB/s", 0.8),
    ("1 MiB send", "send", {"raw_bw": "bare socket"}, "MB/s", None),
]


def classify(samples):
    """{class: {(congestion, name): [values]}}, and how many samples were left out."""
    probes = sorted(p for s in samples for p in s[3:5])
    low, high = probes[len(probes) // 10], probes[len(probes) * 9 // 10]
    border = (low * high) ** 0.5 if high > 2 * low else float("inf")
    classes, left_out = defaultdict(lambda: defaultdict(list)), 0
    for congestion, name, value, before, after, busy in samples:
        kinds = {"near" if probe < border else "far" for probe in (before, after)}
        if len(kinds) == 1 and busy <= BUSY:
            classes[kinds.pop()][congestion, name].append(value)
        else:
            left_out += 1
    return classes, left_out


def row(classes, congestion, ours, peers, unit):
    """(class, count, our median, the best peer's median, its name), from the class with the most samples on either side."""
    best, run = None, [n for n in peers if any((congestion, n) in values for values in classes.values())]
    for kind, values in classes.items():
        mine = values.get((congestion, ours), [])
        theirs = {name: values.get((congestion, name), []) for name in run}
        count = min([len(mine), *map(len, theirs.values())]) if run else 0
        if count and (best is None or count > best[1]):
            pick = min if unit == "µs" else max
            name = pick(theirs, key=lambda n: statistics.median(theirs[n]))
            best = (kind, count, statistics.median(mine), statistics.median(theirs[name]), peers[name])
    return best


def main():
    with open(sys.argv[1]) as lines:
        samples = [(c, n, *map(float, rest)) for c, n, *rest in (line.split("\t") for line in lines)]
    if not samples:
        sys.exit("nothing was measured")
    classes, left_out = classify(samples)
    table = [("work", "gpusock", "peer", "ratio", "target", "met?")]
    for congestion in dict.fromkeys(s[0] for s in samples):
        for work, ours, peers, unit, target in ROWS:
            found = row(classes, congestion, ours, peers, unit)
            if not found:
                table.append((f"{work}, {congestion}", "-", " / ".join(peers.values()), "-", "-", "no samples"))
                continue
            kind, count, mine, theirs, name = found
            figure = (lambda x: f"{x:.2f} µs") if unit == "µs" else (lambda x: f"{x / 1000:.2f} GB/s")
            sign, ok = ("≤", mine <= (target or 0) * theirs) if unit == "µs" else ("≥", mine >= (target or 0) * theirs)
            place = f" [{kind}, n≥{count}]" if len(classes) > 1 else f" [n≥{count}]"
            goal, met = (f"{sign} {target:.2f}", "yes" if ok else "no") if target else ("-", "-")
            table.append((f"{work}, {congestion}{place}", figure(mine), f"{name} {figure(theirs)}", f"{mine / theirs:.2f}", goal, met))
    widths = [max(map(len, column)) for column in zip(*table)]
    for line in table:
        print(" | ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
    print("\nMedians; latency is the median of one-way times (half the round trip). 1 GB/s = 10^9 bytes per second.")
    if len(classes) > 1:
        print("The two CPUs share a cache (near) or do not (far), and that changed between samples.")
    if left_out:
        print(f"{left_out} of {len(samples)} samples left out: other programs, or a change from near to far, disturbed them.")
    with open(sys.argv[2]) as notes:
        print(notes.read(), end="")


main()
