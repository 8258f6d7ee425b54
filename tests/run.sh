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

# Something links the programs: cc, which Rust needs anyway.
if ! command -v cc >/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -q >/dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -qy gcc libc6-dev >/dev/null
  else
    echo "a C compiler is missing, which Rust uses to link: install gcc" >&2
    exit 1
  fi
fi

tests() {
  if cargo nextest --version >/dev/null 2>&1; then cargo nextest run --locked --no-fail-fast; else cargo test --locked --no-fail-fast --lib --bins --tests; fi
}
examples_tests() { cargo test --locked --examples; }
docs() { RUSTDOCFLAGS='-D warnings' cargo doc --locked --no-deps --lib; }

parameter_server() {
  local said
  said=$(timeout 120 cargo run --locked --release --example parameter_server) || { echo "$said"; return 1; }
  echo "$said"
  tail -n 1 <<<"$said" | grep -qE '^test accuracy (0\.9[5-9]|1\.)[0-9]*, [0-9]+ updates, [0-9.]+ MB moved, path [a-z-]+$'
}

# A worker is killed in the middle; the others finish the training.
killed_worker() {
  local log pid
  log=$(mktemp)
  timeout 120 target/release/examples/parameter_server --updates 20000 >"$log" 2>&1 &
  local server=$!
  until grep -q 'processes' "$log"; do kill -0 $server 2>/dev/null || { cat "$log"; return 1; }; done
  pid=$(sed -n 's/.*processes \([0-9]*\),.*/\1/p' "$log")
  until grep -q 'of 20000 updates' "$log"; do kill -0 $server 2>/dev/null || { cat "$log"; return 1; }; done
  kill -9 "$pid"
  wait $server
  local code=$?
  cat "$log"
  [ $code = 0 ] && grep -q 'lost:' "$log" && tail -n 1 "$log" | grep -q '^test accuracy'
}

other_examples() {
  timeout 60 cargo run --locked --release --example pingpong && timeout 60 cargo run --locked --release --example offer
}

loom() { RUSTFLAGS='--cfg loom' cargo test --locked --release --lib --target-dir target/loom loom; }

# The oldest Rust that is promised. Debian has it as rustc-web; it is unpacked, not installed.
msrv() {
  local dir=$PWD/target/msrv
  mkdir -p "$dir/debs" && cd "$dir/debs" || return 1
  apt-get update -q >/dev/null || true
  local packages
  packages=$(apt-cache madison rustc-web | sed -n 's/.*| *\(1\.85[^ |]*\) *|.*/\1/p' | head -n 1)
  [ -n "$packages" ] || { echo 'this Debian has no rustc-web 1.85'; return 2; }
  ls rustc-web_*.deb >/dev/null 2>&1 ||
    apt-get download -q "rustc-web=$packages" "cargo-web=$packages" "libstd-rust-web-dev=$packages" "libstd-rust-web-1.85=$packages" || return 2
  for deb in *.deb; do dpkg -x "$deb" "$dir/root" || return 2; done
  cd ../../.. || return 1
  local libs=$dir/root/usr/lib/x86_64-linux-gnu
  LD_LIBRARY_PATH=$libs RUSTC=$dir/root/usr/bin/rustc CARGO_TARGET_DIR=target/msrv/target "$dir/root/usr/bin/cargo" --version || return 2
  LD_LIBRARY_PATH=$libs RUSTC=$dir/root/usr/bin/rustc CARGO_TARGET_DIR=target/msrv/target "$dir/root/usr/bin/cargo" check --locked
}

step 'format' cargo fmt --check
step 'clippy' cargo clippy --locked --all-targets -- -D warnings
step 'clippy, library alone' cargo clippy --locked --no-default-features --lib -- -D warnings
step 'tests' tests
step 'tests of the examples' examples_tests
step 'doctests' cargo test --locked --doc
step 'documentation' docs
step 'loom' loom
step 'parameter server' parameter_server
step 'parameter server, a worker killed' killed_worker
step 'other examples' other_examples
step 'benchmarks build and start' cargo bench --locked --bench raw_socket

if cargo deny --version >/dev/null 2>&1; then
  step 'licences and advisories' cargo deny check
else
  not_run 'licences and advisories' 'cargo-deny is not installed (cargo install cargo-deny)'
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
  not_run 'Rust 1.85' 'it is taken from Debian, as root'
fi
not_run 'GPU memory' 'this version has no CUDA engine'
not_run 'RDMA' 'this version has no verbs engine'

printf '\n'
printf '%s\n' "${rows[@]}"
printf '%d passed, %d failed, %d skipped\n' $passed $failed $skipped
[ $failed = 0 ]
