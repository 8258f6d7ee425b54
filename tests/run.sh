#!/usr/bin/env bash
# All tests of the crate. As root on Debian it installs what it lacks; elsewhere it says what is missing, and leaves that step out.
set -uo pipefail
cd "$(dirname "$0")/.."
exec </dev/null
export CARGO_TERM_COLOR=never RUST_BACKTRACE=0

declare -a rows
passed=0 failed=0 skipped=0

# step NAME COMMAND…
step() {
  local name=$1 begun=$SECONDS
  shift
  printf '\n== %s\n' "$name"
  if "$@"; then
    rows+=("$(printf '%-34s passed   %4d s' "$name" $((SECONDS - begun)))")
    passed=$((passed + 1))
  else
    rows+=("$(printf '%-34s FAILED   %4d s' "$name" $((SECONDS - begun)))")
    failed=$((failed + 1))
  fi
}

# not_run NAME REASON
not_run() {
  rows+=("$(printf '%-34s not run: %s' "$1" "$2")")
  skipped=$((skipped + 1))
}

# What every step needs. Rust itself is the reader's; cc is what Rust links with.
for tool in cargo rustfmt cargo-clippy; do
  command -v "$tool" >/dev/null || { echo "$tool is missing: install Rust 1.85 or later with rustfmt and clippy" >&2; exit 1; }
done
if ! command -v cc >/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -q >/dev/null
    DEBIAN_FRONTEND=noninteractive apt-get install -qy gcc libc6-dev >/dev/null
  fi
  command -v cc >/dev/null || { echo "cc is missing, with which Rust links: install gcc" >&2; exit 1; }
fi
target=${CARGO_TARGET_DIR:-target}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

tests() {
  if cargo nextest --version >/dev/null 2>&1; then cargo nextest run --locked --no-fail-fast; else cargo test --locked --no-fail-fast --lib --bins --tests; fi
}
examples_tests() { cargo test --locked --examples; }
docs() { RUSTDOCFLAGS='-D warnings' cargo doc --locked --no-deps --lib; }

example() { timeout "$1" "$target/release/examples/$2" "${@:3}"; }

parameter_server() {
  local path
  for path in shm tcp; do
    GPUSOCK_PATHS=$path example 60 parameter_server | tee "$work/log" || return 1
    tail -n 1 "$work/log" | grep -qE "^test accuracy (0\.9[5-9]|1\.)[0-9]*, [0-9]+ updates, [0-9.]+ MB moved, path $path\$" || return 1
  done
}

# A worker is killed in the middle; the others finish the training.
killed_worker() {
  local server worker line
  # Line by line, so that nothing has to be waited for by looking again and again.
  coproc SERVER { example 120 parameter_server --updates 20000 2>&1; }
  server=$SERVER_PID
  while read -r line <&"${SERVER[0]}"; do
    echo "$line"
    case $line in
      *processes*) worker=$(sed 's/.*processes \([0-9]*\),.*/\1/' <<<"$line") ;;
      *'of 20000 updates'*) [ -z "${worker:-}" ] || { kill -9 "$worker"; worker=; killed=1; } ;;
      *lost:*) lost=1 ;;
      'test accuracy'*) ended=1 ;;
    esac
  done 2>/dev/null
  wait "$server" 2>/dev/null
  [ "${killed:-}${lost:-}${ended:-}" = 111 ]
}

gpu_examples() {
  local path
  for path in inproc tcp-staged; do
    GPUSOCK_PATHS=$path example 60 cuda_stream | tee "$work/log" || return 1
    grep -qE "^50 rounds, all words right, .* path $path\$" "$work/log" || return 1
  done
  example 60 kv_transfer --device cuda:0 --rounds 5 | tee "$work/log" || return 1
  grep -qE '^5 rounds of 4096 blocks, 67.1 MB each, path shm-staged,' "$work/log" || return 1
  cargo test --locked --example parameter_server a_gpu_takes_the_steps || return 1
  example 100 parameter_server --device cuda:0 | tee "$work/log" || return 1
  tail -n 1 "$work/log" | grep -qE '^test accuracy (0\.9[5-9]|1\.)[0-9]*, [0-9]+ updates, .* path shm-staged$'
}

on_model() { LD_LIBRARY_PATH=$PWD/$target/cuda_model "$@"; }

other_examples() { example 60 pingpong && example 60 offer; }

# Every page of both processes is compared by its checksum.
kv_transfer() {
  local path
  for path in shm tcp; do
    GPUSOCK_PATHS=$path example 60 kv_transfer | tee "$work/log" || return 1
    grep -qE "^20 rounds of 4096 blocks, 67.1 MB each, path $path, median [0-9.]+ GB/s\$" "$work/log" || return 1
  done
}

# tokio leaves its sockets out under `--cfg loom`, so the crate has a name of its own for it.
loom() {
  RUSTFLAGS='--cfg gpusock_loom' cargo test --locked --lib --target-dir "$target/loom" loom_tests | tee "$work/log"
  grep -qE '^test result: ok. [1-9]' "$work/log"
}

# GPU memory on a model of the driver, once as today's drivers are and once for each thing that a driver may lack.
gpu_model() {
  local dir=$PWD/$target/cuda_model
  mkdir -p "$dir" || return 1
  local flags=(-std=gnu11 -O2 -Wall -Wextra -Werror -shared -fPIC -pthread)
  cc "${flags[@]}" -Wl,-soname,libcuda.so.1 -o "$dir/libcuda.so.1" tests/cuda_model/cuda.c -lm || return 1
  cc "${flags[@]}" -Wl,-soname,libnvrtc.so -o "$dir/libnvrtc.so" tests/cuda_model/nvrtc.c || return 1
  if cargo nextest --version >/dev/null 2>&1; then
    env "$@" LD_LIBRARY_PATH="$dir" cargo nextest run --locked --no-fail-fast --test gpu
  else
    env "$@" LD_LIBRARY_PATH="$dir" cargo test --locked --test gpu -- --test-threads=1
  fi
}

# The oldest Rust that is promised, as Debian has it (rustc-web): unpacked beside the build, not installed. 2: it cannot be had.
msrv() {
  local dir=$PWD/$target/msrv version arch=x86_64-linux-gnu
  mkdir -p "$dir/debs/partial"
  apt-get update -q >/dev/null
  version=$(apt-cache madison rustc-web | sed -n 's/.*| *\(1\.85[^ |]*\) *|.*/\1/p' | head -n 1)
  [ -n "$version" ] || return 2
  apt-get install -qy --download-only -o Dir::Cache::archives="$dir/debs" \
    "rustc-web=$version" "cargo-web=$version" "libstd-rust-web-1.85=$version" "libstd-rust-web-dev=$version" >/dev/null || return 2
  for deb in "$dir"/debs/*.deb; do dpkg -x "$deb" "$dir/root" || return 2; done
  export LD_LIBRARY_PATH=$dir/root/usr/lib/$arch:$dir/root/lib/$arch:$dir/root/usr/lib/llvm-19/lib
  export RUSTC=$dir/root/usr/bin/rustc
  "$RUSTC" -vV && "$dir/root/usr/bin/cargo" --version || return 2
  "$dir/root/usr/bin/cargo" check --locked --no-default-features --features cli --target-dir "$dir/target"
}

step 'format' cargo fmt --check
step 'clippy' cargo clippy --locked --all-targets -- -D warnings
step 'clippy, library alone' cargo clippy --locked --no-default-features --lib --tests -- -D warnings
step 'tests' tests
step 'GPU memory, on a model' gpu_model MODEL_DEVICES=1
step 'the same, two GPUs, few abilities' gpu_model MODEL_DEVICES=2 MODEL_NO_PEER=1 MODEL_NO_VMM=1 MODEL_NO_WRITE_VALUE=1
step 'tests of the examples' examples_tests
step 'doctests' cargo test --locked --doc
step 'documentation' docs
step 'loom' loom
step 'examples, release build' cargo build --locked --release --examples
step 'parameter server' parameter_server
step 'parameter server, a worker killed' killed_worker
step 'other examples' other_examples
step 'KV transfer' kv_transfer
step 'GPU examples, on a model' on_model gpu_examples
if command -v python3 >/dev/null; then
  step 'beside other users of cudarc' tests/beside.sh
else
  not_run 'beside other users of cudarc' 'it needs python3'
fi
step 'benchmarks start' cargo test --locked --benches -q

if cargo deny --version >/dev/null 2>&1; then
  step 'licences, sources' cargo deny check licenses bans sources
else
  not_run 'licences, sources' 'cargo-deny is not installed (cargo install cargo-deny)'
fi

if command -v apt-get >/dev/null && [ "$(uname -m)" = x86_64 ] && [ "$(id -u)" = 0 ]; then
  printf '\n== Rust 1.85\n'
  begun=$SECONDS
  (msrv)
  case $? in
    0) rows+=("$(printf '%-34s passed   %4d s' 'Rust 1.85' $((SECONDS - begun)))"); passed=$((passed + 1)) ;;
    2) not_run 'Rust 1.85' 'it cannot be had on this machine' ;;
    *) rows+=("$(printf '%-34s FAILED   %4d s' 'Rust 1.85' $((SECONDS - begun)))"); failed=$((failed + 1)) ;;
  esac
else
  not_run 'Rust 1.85' 'it is taken from Debian for x86-64, as root'
fi
not_run 'fuzz targets' 'they need cargo-fuzz and a nightly Rust; their bodies run under proptest in the tests'
if [ -e /dev/nvidiactl ]; then
  step 'GPU memory, on the GPU' cargo test --locked --test gpu -- --test-threads=1
  step 'GPU examples, on the GPU' gpu_examples
else
  not_run 'GPU memory, on a GPU' 'this machine has none (tests/gpu-pack.sh packs the tests for one that has)'
fi
not_run 'RDMA' 'this version has no verbs engine'

printf '\n'
printf '%s\n' "${rows[@]}"
printf '%d passed, %d failed, %d skipped\n' $passed $failed $skipped
[ $failed = 0 ]
