#!/usr/bin/env bash
# gpusock's TCP path beside UCX (ucx_perftest), NIXL, iperf3 and a bare socket, over loopback, each process pinned to a CPU.
#
#   benches/peers/tcp.sh            one table on standard output; samples in target/peers/tcp.tsv
#   ROUNDS=30 CPUS=2,4 benches/peers/tcp.sh
#
# Needs cargo, python3 with venv, taskset; uses iperf3 where it is installed, and pip's usual index for the peers.
# Both sides of a comparison get one congestion control, from a network namespace of their own where this user may make one
# (`unshare`); the system's settings are not touched.
# Leave the machine alone meanwhile: samples that other programs disturb are repeated, but not forever.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
peers=$root/benches/peers
work=${CARGO_TARGET_DIR:-$root/target}/peers
rounds=${ROUNDS:-15}
cpus=${CPUS:-0,1}
cpu_server=${cpus#*,} cpu_client=${cpus%,*}
port=18515
system=$(cat /proc/sys/net/ipv4/tcp_congestion_control)

say() { echo "$*" >&2; }
ending() {
    local status=$?
    kill $(jobs -p) 2>/dev/null || true
    [ "$status" = 0 ] || say "tcp.sh ended early (status $status); logs are in $work"
}
trap ending EXIT

# --- one sample of each program: prints one number, or fails -----------------------------------------------------------------

# What a program printed is kept in a file first: a parser that starts beside it would take CPU time from it.
out=$work/out
field() { python3 -c "import json; d=json.load(open('$out')); print($1)"; }

# Waits until something listens on $port (a connection would count as a client), or fails after five seconds.
wait_port() {
    local listening tries
    listening=$(printf ':%04X 0*:0000 0A ' "$port")
    for tries in $(seq 250); do
        grep -qs "$listening" /proc/net/tcp /proc/net/tcp6 && return
        sleep 0.02
    done
    return 1
}

# served SERVER... -- CLIENT...: starts the server on its CPU, runs the client on the other, ends the server.
served() {
    local server=() status=0
    while [ "$1" != -- ]; do server+=("$1"); shift; done
    shift
    taskset -c "$cpu_server" "${server[@]//PORT/$port}" >>"$work/server.log" 2>&1 &
    local pid=$!
    wait_port && timeout 60 taskset -c "$cpu_client" "${@//PORT/$port}" 2>>"$work/client.log" || status=$?
    kill "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
    return "$status"
}

# "8 B" and "1 MiB" for all: size, measured iterations, iterations before
small=(8 20000 10000) large=(1048576 600 100)

gpusock() { # TEST SPIN WINDOW KEY SIZE ITERS WARMUP
    served "$GPUSOCK" perf serve --listen 127.0.0.1:PORT --spin "$2" -- "$GPUSOCK" perf run 127.0.0.1:PORT --path tcp --json \
        --test "$1" --spin "$2" --window "$3" --size "$5" --iters "$6" --warmup "$7" >"$out" && field "$4"
}
raw() { # TEST KEY SIZE ITERS WARMUP
    served "$RAW" serve 127.0.0.1:PORT -- "$RAW" run 127.0.0.1:PORT --congestion "$congestion" \
        --test "$1" --size "$3" --iters "$4" --warmup "$5" >"$out" && field "$2"
}
ucx() { # TEST COLUMN SCALE SIZE ITERS WARMUP; ucx_perftest's MB are 2^20 bytes
    served "$UCX" -p PORT -- "$UCX" 127.0.0.1 -p PORT -f -t "$1" -s "$4" -n "$5" -w "$6" >"$out" &&
        awk -v column="$2" -v scale="$3" 'NF == 8 || NF == 7 { last = $column } END { if (last == "") exit 1; print last * scale }' "$out"
}
nixl() { timeout 60 "$work/venv/bin/python" "$peers/nixl_write.py" 1048576 0.2 "$cpu_server" "$cpu_client" 2>>"$work/client.log"; }
iperf() {
    served iperf3 -s -1 -p PORT -- iperf3 -c 127.0.0.1 -p PORT -C "$congestion" -Z -l 1M -n 2G -J >"$out" &&
        field 'd["end"]["sum_received"]["bits_per_second"] / 8e6'
}

# Microseconds so far during which something waited for a CPU here (0 on a kernel that does not tell).
waited() { local total; total=$(sed -n 's/^some.*total=//p' /proc/pressure/cpu 2>/dev/null) || true; echo "${total:-0}"; }

# sample NAME: one line `congestion name value probe-before probe-after busy` in tcp.tsv. It is taken again, up to
# five times, where the probe says that the CPUs moved meanwhile (table.py says why that matters) or where other programs
# wanted the CPUs for more than a tenth of the time.
sample() {
    local name=$1 before after value start wait_start busy attempt
    for attempt in 1 2 3 4 5; do
        port=$((port + 1)) # the last one may still wait out its connections
        before=$("$RAW" probe "$cpu_client" "$cpu_server")
        start=${EPOCHREALTIME//[!0-9]/} wait_start=$(waited)
        value=$(one "$name") || { say "  $name: failed, see $work/client.log"; return 0; }
        busy=$((100 * ($(waited) - wait_start) / (${EPOCHREALTIME//[!0-9]/} - start)))
        after=$("$RAW" probe "$cpu_client" "$cpu_server")
        [ "$busy" -gt 10 ] || [ $((after * 2)) -gt $((before * 5)) ] || [ $((before * 2)) -gt $((after * 5)) ] || break
    done
    printf '%s\t%s\t%s\t%s\t%s\t%s\n' "$congestion" "$name" "$value" "$before" "$after" "$busy" >>"$work/tcp.tsv"
}

# Every sample is short, so that little happens during it.
one() {
    local p50='d["latency_us"]["p50"]' bandwidth='d["bandwidth_MBps"]'
    case $1 in
    spin) gpusock send-lat always 1 "$p50" "${small[@]}" ;;
    adaptive) gpusock send-lat adaptive 1 "$p50" "${small[@]}" ;;
    send) gpusock send-bw always 16 "$bandwidth" "${large[@]}" ;;
    write) gpusock write-bw always 16 "$bandwidth" "${large[@]}" ;;
    raw_lat) raw lat "$p50" "${small[@]}" ;;
    raw_bw) raw bw "$bandwidth" "${large[@]}" ;;
    ucx_lat) ucx tag_lat 2 1 "${small[@]}" ;;
    ucx_tag) UCX_RNDV_SCHEME=put_zcopy ucx tag_bw 7 1.048576 "${large[@]}" ;;
    ucx_put) ucx ucp_put_bw 7 1.048576 "${large[@]}" ;;
    *) "$1" ;;
    esac
}

# Every program once per round, so that they see the same machine, in an order of its own each time: a program's speed depends
# on what ran before it.
measure() {
    local round name
    congestion=$1
    export GPUSOCK_TCP_CONGESTION=$congestion
    export UCX_TLS=tcp,self UCX_NET_DEVICES=lo UCX_WARN_UNUSED_ENV_VARS=n NIXL_LOG_LEVEL=ERROR LD_LIBRARY_PATH=${UCX_LIB:-}
    for round in $(seq "$rounds"); do
        say "$congestion: round $round of $rounds"
        for name in $(shuf -e spin adaptive send write raw_lat raw_bw $PEERS); do sample "$name"; done
    done
}

# measure CONGESTION inside a namespace that has it as its default
if [ "${1:-}" = --in-namespace ]; then
    ip link set lo up
    echo "$2" >/proc/sys/net/ipv4/tcp_congestion_control
    echo 1 >/proc/sys/net/ipv4/tcp_no_metrics_save # or one connection's window starts the next one
    measure "$2"
    exit
fi

# --- build, install, measure, print --------------------------------------------------------------------------------------------

for tool in cargo python3 taskset; do
    command -v "$tool" >/dev/null || { say "tcp.sh needs $tool"; exit 1; }
done
taskset -c "$cpus" true 2>/dev/null || { say "tcp.sh needs two CPUs; CPUS=$cpus are not both there"; exit 1; }
mkdir -p "$work"
: >"$work/tcp.tsv" >"$work/notes" && : >"$work/client.log" >"$work/server.log"
note() { echo "$*" >>"$work/notes"; }

executable() { # --bin|--bench NAME: builds it, prints its path
    (cd "$root" && cargo build --release --message-format=json-render-diagnostics "$@") | python3 -c '
import json, sys
for made in map(json.loads, sys.stdin):
    if made.get("executable") and made["target"]["name"] == sys.argv[1]: print(made["executable"])' "$2"
}
GPUSOCK=$(executable --bin gpusock)
RAW=$(executable --bench raw_socket)

# nixl-cu13 asks for torch (gigabytes), which a write from host memory does not load: hence no dependencies, and numpy by name.
[ -x "$work/venv/bin/pip" ] || python3 -m venv "$work/venv" || note "not run: UCX, NIXL: python3 -m venv failed"
install() { "$work/venv/bin/pip" install --quiet "$@" >>"$work/client.log" 2>&1; }
UCX='' UCX_LIB='' PEERS=''
if install --no-deps libucx-cu13==1.22.0; then
    wheel=$(dirname "$("$work/venv/bin/python" -c 'import libucx; print(libucx.__file__)')")
    UCX=$wheel/bin/ucx_perftest UCX_LIB=$wheel/lib PEERS="ucx_lat ucx_tag ucx_put"
else
    note "not run: UCX: pip cannot install libucx-cu13 1.22.0"
fi
if install numpy && install --no-deps nixl-cu13==1.5.1; then PEERS+=" nixl"; else note "not run: NIXL: pip cannot install nixl-cu13 1.5.1"; fi
if command -v iperf3 >/dev/null; then PEERS+=" iperf"; else note "not run: iperf3: not installed"; fi
export GPUSOCK RAW UCX UCX_LIB PEERS ROUNDS=$rounds CPUS=$cpus

if [ "$(id -u)" = 0 ]; then namespace=(unshare --net); else namespace=(unshare --map-root-user --net); fi
for wanted in $(printf '%s\nreno\n' "$system" | awk '!seen[$0]++'); do
    if "${namespace[@]}" sh -c "ip link set lo up && echo $wanted >/proc/sys/net/ipv4/tcp_congestion_control" 2>/dev/null; then
        "${namespace[@]}" "$0" --in-namespace "$wanted"
    elif [ "$wanted" = "$system" ]; then
        note "no network namespace here: $system is the system's default and used as it is"
        measure "$wanted"
    else
        note "not run: $wanted: it needs a network namespace, which this user may not make"
    fi
done
python3 "$peers/table.py" "$work/tcp.tsv" "$work/notes"
