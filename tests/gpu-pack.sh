#!/usr/bin/env bash
# Tests of GPU memory on a machine that has a GPU and no Rust.
#
#   tests/gpu-pack.sh DIR     here: builds, strips, and puts into DIR what the other machine needs, 20 MB or so
#   DIR/run.sh                there: runs it; the last lines count what passed, failed and was not run
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${1:?usage: tests/gpu-pack.sh DIR}
mkdir -p "$dir"
cargo build --locked --release --bin gpusock --example cuda_stream --example kv_transfer --example parameter_server
# The path of the test program comes out of cargo's own report.
test=$(cargo test --locked --release --test gpu --no-run --message-format=json 2>/dev/null |
  sed -n 's/.*"name":"gpu".*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
[ -x "$test" ] || { echo "the tests were not built" >&2; exit 1; }
cp "$test" "$dir/gpu"
built=${CARGO_TARGET_DIR:-target}/release
cp "$built/gpusock" "$built"/examples/{cuda_stream,kv_transfer,parameter_server} "$dir"
strip "$dir"/{gpu,gpusock,cuda_stream,kv_transfer,parameter_server}
cat >"$dir/run.sh" <<'RUN'
#!/usr/bin/env bash
# Each test in a process of its own: some measure free memory, and some break the device's context.
cd "$(dirname "$0")"
./gpusock info
passed=0 failed=0 missing=0
while IFS= read -r test; do
  if out=$(timeout 150 ./gpu --exact "$test" 2>&1 </dev/null); then
    if grep -q ' 1 passed' <<<"$out"; then passed=$((passed + 1)); else
      missing=$((missing + 1))
      echo "not run  $test: $(sed -n 's/.*\[not run: \(.*\)\].*/\1/p' <<<"$out" | head -n 1)"
    fi
  else
    failed=$((failed + 1))
    echo "FAILED   $test"
    grep -vE '^(running|test |$)' <<<"$out" | head -n 12 | sed 's/^/         /'
  fi
done < <(./gpu --list | sed 's/^\[[^]]*\] *//; s/: test$//')
# CUDA's compiler is where a toolkit puts it, if not on the path of the libraries.
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/cuda/lib64
example() {
  local out
  if ! ./gpusock info --json | grep -q '"ordinal":0'; then missing=$((missing + 1)) && echo "not run  $*: no GPU" && return; fi
  if out=$(timeout 120 "$@" 2>&1 </dev/null); then passed=$((passed + 1)); else failed=$((failed + 1)) && echo "FAILED   $*"; fi
  sed 's/^/         /' <<<"$out" | tail -n 2
}
example ./cuda_stream
example env GPUSOCK_PATHS=tcp-staged ./cuda_stream
example ./kv_transfer --device cuda:0
example ./parameter_server --device cuda:0
echo "passed $passed"
echo "failed $failed"
echo "not run $missing"
[ "$failed" = 0 ]
RUN
chmod +x "$dir/run.sh"
du -sh "$dir" | cut -f1
