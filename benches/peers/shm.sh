#!/usr/bin/env bash
# gpusock's shared-memory path beside UCX (ucx_perftest), NIXL and a bare memcpy, on one host, each process pinned to a CPU.
#
#   benches/peers/shm.sh            one table on standard output; samples in target/peers/shm.tsv
#   ROUNDS=30 CPUS=2,4 benches/peers/shm.sh
#
# Needs cargo, cc, python3 with venv, taskset, and pip's usual index for the peers.
# Leave the machine alone meanwhile: samples that other programs disturb are repeated, but not forever.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
peers=$root/benches/peers
work=${CARGO_TARGET_DIR:-$root/target}/peers
rounds=${ROUNDS:-15}
cpus=${CPUS:-0,1}
cpu_server=${cpus#*,} cpu_client=${cpus%,*}
port=19515

say() { echo "$*" >&2; }
ending() {
    local status=$?
    kill $(jobs -p) 2>/dev/null || true
    [ "$status" = 0 ] || say "shm.sh ended early (status $status); logs are in $work"
}
trap ending EXIT

# --- one sample of each program: prints one number, or fails -----------------------------------------------------------------

# What a program printed is kept in a file first: a parser that starts beside it would take CPU time from it.
out=$work/out

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

gpusock() { # TEST SPIN WINDOW KEY SIZE ITERS WARMUP
    timeout 60 "$GPUSOCK" perf pair --path shm --pin "$cpu_client" --pin-server "$cpu_server" --json \
        --test "$1" --spin "$2" --window "$3" --size "$5" --iters "$6" --warmup "$7" >"$out" 2>>"$work/client.log" &&
        python3 -c "import json; print(json.load(open('$out'))$4)"
}
ucx() { # TEST COLUMN SCALE TLS SIZE ITERS WARMUP; ucx_perftest's MB are 2^20 bytes; column 2 is the median latency, 6 the bandwidth
    local run=(env UCX_TLS="$4" LD_LIBRARY_PATH="$UCX_LIB" taskset -c) status=0 server
    port=$((port + 1)) # the last one may still wait out its connections
    "${run[@]}" "$cpu_server" "$UCX" -p "$port" >>"$work/server.log" 2>&1 &
    server=$!
    wait_port && timeout 60 "${run[@]}" "$cpu_client" "$UCX" 127.0.0.1 -p "$port" -f -t "$1" -s "$5" -n "$6" -w "$7" \
        >"$out" 2>>"$work/client.log" || status=$?
    kill "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
    [ "$status" = 0 ] &&
        awk -v column="$2" -v scale="$3" 'NF == 8 { last = $column } END { if (last == "") exit 1; print last * scale }' "$out"
}
nixl() { # SIZE ITERS
    LD_LIBRARY_PATH=$UCX_LIB timeout 60 "$work/venv/bin/python" "$peers/nixl_lat.py" "$1" "$2" "$cpu_server" "$cpu_client" \
        2>>"$work/client.log"
}

# A sample's name says all of it: program:test:how:size. Every sample is short, so that little happens during it.
one() {
    local program test how size count p50='["latency_us"]["p50"]' bandwidth='["bandwidth_MBps"]'
    IFS=: read -r program test how size <<<"$1"
    case $size in 1048576) count=(600 100) ;; 67108864) count=(30 5) ;; *) count=(20000 10000) ;; esac
    case $program:$test in
    gpusock:write-one) gpusock write-bw "$how" 1 "$p50" "$size" "${count[@]}" ;; # one in flight: from issue to completion
    gpusock:*-lat) gpusock "$test" "$how" 1 "$p50" "$size" "${count[@]}" ;;
    gpusock:*-bw) gpusock "$test" "$how" 16 "$bandwidth" "$size" "${count[@]}" ;;
    ucx:*_lat) ucx "$test" 2 1 "$how" "$size" "${count[@]}" ;;
    ucx:*) ucx "$test" 6 1.048576 "$how" "$size" "${count[@]}" ;;
    nixl:*) nixl "$size" "${count[0]}" ;;
    memcpy:*) taskset -c "$cpu_client" "$work/memcpy" "$size" "${count[0]}" ;;
    esac
}

# Microseconds so far during which something waited for a CPU here (0 on a kernel that does not tell).
waited() { local total; total=$(sed -n 's/^some.*total=//p' /proc/pressure/cpu 2>/dev/null) || true; echo "${total:-0}"; }

# sample NAME: one line `name value probe-before probe-after busy` in shm.tsv. As in tcp.sh it is taken again, up to five
# times, where the CPUs moved meanwhile or where other programs wanted the CPUs for more than a tenth of the time.
sample() {
    local name=$1 before after value start wait_start busy attempt
    for attempt in 1 2 3 4 5; do
        before=$("$RAW" probe "$cpu_client" "$cpu_server")
        start=${EPOCHREALTIME//[!0-9]/} wait_start=$(waited)
        one "$name" >"$work/value" || { say "  $name: failed, see $work/client.log"; return 0; }
        value=$(<"$work/value")
        busy=$((100 * ($(waited) - wait_start) / (${EPOCHREALTIME//[!0-9]/} - start)))
        after=$("$RAW" probe "$cpu_client" "$cpu_server")
        [ "$busy" -gt 10 ] || [ $((after * 2)) -gt $((before * 5)) ] || [ $((before * 2)) -gt $((after * 5)) ] || break
    done
    printf '%s\t%s\t%s\t%s\t%s\n' "$name" "$value" "$before" "$after" "$busy" >>"$work/shm.tsv"
}

# --- build, install, measure, print --------------------------------------------------------------------------------------------

for tool in cargo cc python3 taskset; do
    command -v "$tool" >/dev/null || { say "shm.sh needs $tool"; exit 1; }
done
taskset -c "$cpus" true 2>/dev/null || { say "shm.sh needs two CPUs; CPUS=$cpus are not both there"; exit 1; }
mkdir -p "$work"
: >"$work/shm.tsv" >"$work/notes" && : >"$work/client.log" >"$work/server.log"
note() { echo "$*" >>"$work/notes"; }

executable() { # --bin|--bench NAME: builds it, prints its path
    (cd "$root" && cargo build --release --message-format=json-render-diagnostics "$@") | python3 -c '
import json, sys
for made in map(json.loads, sys.stdin):
    if made.get("executable") and made["target"]["name"] == sys.argv[1]: print(made["executable"])' "$2"
}
GPUSOCK=$(executable --bin gpusock)
RAW=$(executable --bench raw_socket)
cc -O2 -o "$work/memcpy" "$peers/memcpy.c"

# nixl-cu13 asks for torch (gigabytes), which a write from host memory does not load: hence no dependencies, and numpy by name.
[ -x "$work/venv/bin/pip" ] || python3 -m venv "$work/venv" || note "not run: UCX, NIXL: python3 -m venv failed"
install() { "$work/venv/bin/pip" install --quiet "$@" >>"$work/client.log" 2>&1; }
UCX='' UCX_LIB='' programs='gpusock|memcpy'
if install --no-deps libucx-cu13==1.22.0; then
    wheel=$(dirname "$("$work/venv/bin/python" -c 'import libucx; print(libucx.__file__)')")
    UCX=$wheel/bin/ucx_perftest UCX_LIB=$wheel/lib programs+='|ucx'
else
    note "not run: UCX: pip cannot install libucx-cu13 1.22.0"
fi
if install numpy && install --no-deps nixl-cu13==1.5.1; then programs+='|nixl'; else note "not run: NIXL: pip cannot install nixl-cu13 1.5.1"; fi
export UCX_WARN_UNUSED_ENV_VARS=n NIXL_LOG_LEVEL=ERROR

# Every program once per round, so that they see the same machine, in an order of its own each time: a program's speed depends
# on what ran before it.
for round in $(seq "$rounds"); do
    say "round $round of $rounds"
    for name in $(python3 "$peers/shm_table.py" | grep -E "^($programs):" | shuf); do sample "$name"; done
done
python3 "$peers/shm_table.py" "$work/shm.tsv" "$work/notes"
