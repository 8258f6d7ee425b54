#!/usr/bin/env bash
# Tests of GPU memory on a machine that has a GPU and no Rust.
#
#   tests/gpu-pack.sh DIR     here: builds, strips, and puts into DIR what the other machine needs, 20 MB or so
#   DIR/run.sh                there: runs it; the last lines count what passed, failed and was not run
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${1:?usage: tests/gpu-pack.sh DIR}
mkdir -p "$dir"
cargo build --locked --release --bin gpusock
# The path of the test program comes out of cargo's own report.
test=$(cargo test --locked --release --test gpu --no-run --message-format=json 2>/dev/null |
  sed -n 's/.*"name":"gpu".*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
[ -x "$test" ] || { echo "the tests were not built" >&2; exit 1; }
cp "$test" "$dir/gpu"
cp "${CARGO_TARGET_DIR:-target}/release/gpusock" "$dir/gpusock"
strip "$dir/gpu" "$dir/gpusock"
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
echo "passed $passed"
echo "failed $failed"
echo "not run $missing"
[ "$failed" = 0 ]
RUN
chmod +x "$dir/run.sh"
du -sh "$dir" | cut -f1
