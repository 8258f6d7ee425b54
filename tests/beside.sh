#!/usr/bin/env bash
# Whether the crate goes into one tree with other users of cudarc, which is built once for all of them: one that asks for another version of
# CUDA, and candle-core, which links CUDA. Resolved and checked only; of candle-core, whose build needs a toolkit, the features of cudarc are
# taken as its manifest has them.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# package NAME DEPENDENCIES: one that uses this crate and those.
package() {
  mkdir -p "$work/$1/src"
  printf '[package]\nname = "%s"\nversion = "0.0.0"\nedition = "2021"\n\n[workspace]\n\n[dependencies]\ngpusock = { path = "%s" }\n%s\n' \
    "$1" "$root" "$2" >"$work/$1/Cargo.toml"
  echo 'pub fn uses(buf: &gpusock::GpuBuf) -> u64 { buf.len() }' >"$work/$1/src/lib.rs"
  # The versions that are tested, as far as they go.
  cp Cargo.lock "$work/$1/Cargo.lock"
}

check() { (cd "$work/$1" && cargo check --target-dir "$target/beside"); }

package other_version 'cudarc = { version = "0.19", default-features = false, features = ["driver", "dynamic-linking", "cuda-12020"] }'
check other_version

package with_candle 'candle-core = { version = "0.11", features = ["cuda"] }'
# Resolving it tells what it wants of cudarc.
features=$(cd "$work/with_candle" && cargo metadata --format-version 1 |
  python3 -c '
import json, sys
packages = json.load(sys.stdin)["packages"]
candle = next(package for package in packages if package["name"] == "candle-core")
wanted = next(d for d in candle["dependencies"] if d["name"] == "cudarc")
assert sum(package["name"] == "cudarc" for package in packages) == 1, "more than one cudarc"
print(json.dumps(wanted["features"]))')
echo "candle-core wants of cudarc: $features"
package like_candle "cudarc = { version = \"0.19\", default-features = false, features = $features }"
check like_candle
